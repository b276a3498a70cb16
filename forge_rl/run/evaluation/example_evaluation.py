"""Evaluates a model on given examples: the loss, without an update."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forge_rl.algorithms.protocol import Loss
from forge_rl.errors import TaskError
from forge_rl.rollout.examples import ExampleMaker
from forge_rl.run.evaluation.evaluator import HELD_OUT, EvaluationResult, Evaluations, Sets
from forge_rl.types import Batch, Group, Task

if TYPE_CHECKING:
    from forge_rl.packing.rows import PackedBatch
    from forge_rl.rollout.executor import RolloutExecutor
    from forge_rl.rollout.placement import DeviceHandover
    from forge_rl.services.trainer import Trainer

_MOST_NATS = 700.0
"""Above it, a perplexity has no finite float."""


class ExampleEvaluations:
    """Evaluates by the loss on examples: a set's score is the negative of its loss, so that more is better.

    Logs `eval/SET/loss`, the loss's own metrics, such as `eval/SET/accuracy`, and `eval/SET/perplexity` for a
    cross-entropy.

    Args:
        warn: called with a line for the user.
    """

    blocking = True

    def __init__(self, trainer: Trainer, loss: Loss, maker: ExampleMaker, *, warn: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._loss = loss
        self._maker = maker
        self._warn = warn
        self._sets: Sets = {}
        self._packed: dict[str, PackedBatch] = {}
        """Examples of each set, once made."""
        self._found: dict[str, dict[str, float]] | None = None
        """Metrics by set; None until they are complete."""

    def start(self, sets: Sets, step: int, version: int) -> None:
        """Note what to evaluate; `finish` does it."""
        self._sets, self._found = sets, None

    async def finish(self) -> None:
        """Evaluate all sets.

        Raises:
            TaskError: no task of a set can be used.
        """
        if self._found is not None or not self._sets:
            return
        set_metrics = {}
        for name, tasks in self._sets.items():
            # Sets do not change during a run, so each is packed once.
            if name not in self._packed:
                self._packed[name] = await asyncio.to_thread(self._pack, name, tasks)
            set_metrics[name] = await self._trainer.evaluate(self._packed[name], self._loss)
        self._found = set_metrics

    @property
    def complete(self) -> bool:
        """True once all sets are evaluated."""
        return self._found is not None

    def pop(self, sets: Sets, step: int) -> EvaluationResult:
        """End the evaluation and return its result."""
        set_metrics, self._found = self._found, None
        assert set_metrics is not None, "it was finished"
        metrics, tokens = dict[str, float](), 0
        for name, values in set_metrics.items():
            loss_metrics = {key.removeprefix("loss/"): value for key, value in values.items() if key.startswith("loss")}
            # Perplexity is exp of the mean cross-entropy in nats, which is the loss itself in supervised fine-tuning
            # and one of the metrics of other losses.
            name_of_nats = "loss" if self._loss.equal_metric == "cross_entropy" else "cross_entropy"
            if (cross_entropy := loss_metrics.get(name_of_nats)) is not None:
                loss_metrics["perplexity"] = math.exp(min(cross_entropy, _MOST_NATS))
            metrics |= {f"eval/{name}/{key}": value for key, value in loss_metrics.items()}
            tokens += round(values["tokens/trained"])
        # Negative, so that more is better, as with rewards: the best checkpoint has the highest score.
        score = -next(iter(set_metrics.values()))["loss"]
        if [*set_metrics] == [HELD_OUT]:
            metrics[HELD_OUT] = score
        return EvaluationResult(step=step, score=score, metrics=metrics, tokens=tokens, episodes={})

    def cancel(self) -> None:
        """Forget the evaluation."""
        self._sets, self._found = {}, None

    def _pack(self, name: str, tasks: Sequence[Task]) -> PackedBatch:
        """Make the examples of a set, and lay them into rows."""
        import torch

        from forge_rl.packing.pack import pack

        results = self._maker.try_groups(tasks)
        groups = [result for result in results if isinstance(result, Group)]
        failed = [(task, result) for task, result in zip(tasks, results, strict=True) if isinstance(result, TaskError)]
        for task, error in failed[:1]:
            failures = f"{len(failed)} of {len(tasks)} tasks of the evaluation set {name} cannot be used"
            cause = f"one is {task.source} {task.id}: {error.message}"
            if not groups:
                raise TaskError(f"{failures}; {cause}", hint=error.hint)
            self._warn(f"{failures} and are left out; {cause}")
        batch = Batch(groups=tuple(groups), version=0)
        # One minibatch, since there is no update; groups of equal advantages count, as the loss is of all examples.
        layout = replace(self._trainer.layout, minibatches=1)
        return pack(batch, torch.ones(len(groups), len(groups[0].episodes)), layout, drop_uniform=False)


class AnswerEvaluations:
    """Evaluates a model on given examples by the rewards of answers that engines generate, and by the loss.

    A set's score is the answers' mean reward. The weights are published for each evaluation.

    Args:
        losses: evaluates the loss.
        answers: evaluates answers from `rollouts`.
        rollouts: generates nothing else.
        devices: shared by trainer and engines.
        publish: publishes the trainer's weights to the engines; returns their version.
    """

    blocking = True

    def __init__(
        self,
        losses: Evaluations,
        answers: Evaluations,
        rollouts: RolloutExecutor,
        devices: DeviceHandover,
        publish: Callable[[], Awaitable[int]],
    ) -> None:
        self._losses = losses
        self._answers = answers
        self._rollouts = rollouts
        self._devices = devices
        self._publish = publish
        # The rollouts would otherwise draw tasks for batches that nobody trains on.
        rollouts.only_evaluate()
        self._wanted: tuple[Sets, int] | None = None
        """Sets and step to evaluate."""

    def start(self, sets: Sets, step: int, version: int) -> None:
        """Note what to evaluate; `finish` does it."""
        self._losses.start(sets, step, version)
        self._wanted = sets, step

    async def finish(self) -> None:
        """Evaluate all sets; answers of an evaluation that was interrupted are generated again.

        Raises:
            TaskError: no task of a set can be used.
        """
        if self._wanted is None or self.complete:
            return
        await self._losses.finish()
        # Left over if the last call was interrupted: its answers may be of weights that were rolled back since.
        await self._rollouts.cancel_evaluation()
        version = await self._publish()
        self._answers.start(*self._wanted, version)
        await self._answers.finish()
        # Nothing asks the engines for a batch next, so the devices go back at once.
        await self._devices.hand_to_trainer(idle=True)

    @property
    def complete(self) -> bool:
        """True once losses and answers are evaluated."""
        return self._losses.complete and self._answers.complete

    def pop(self, sets: Sets, step: int) -> EvaluationResult:
        """End the evaluation and return its result.

        Raises:
            ForgeError: all answers of a set failed.
        """
        self._wanted = None
        losses, answers = self._losses.pop(sets, step), self._answers.pop(sets, step)
        return replace(answers, metrics=losses.metrics | answers.metrics, tokens=losses.tokens + answers.tokens)

    def cancel(self) -> None:
        """Forget the evaluation."""
        self._wanted = None
        self._losses.cancel()
        self._answers.cancel()
