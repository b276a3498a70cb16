"""Evaluates a run's policy on its sets, one evaluation at a time, and says what came of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.rollout.evaluation import EvalConfig, Evaluation, describe_failure, score_set
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.types import Sampling, Task

HELD_OUT = "held_out"
"""Name of the set that a run has by default, whose score is also logged as `held_out`."""
_MOSTLY_OTHERS = 0.5
"""Share of tokens of other versions past which the user is told."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Result of an evaluation."""

    step: int
    """Step whose weights were evaluated."""
    score: float
    """avg@k of the first set."""
    metrics: dict[str, float]
    tokens: int
    """Number of tokens that were decoded for it."""


class Evaluator:
    """Starts evaluations, and makes metrics of what came of them.

    Args:
        sets: tasks by the set's name; the score of the first one is the run's. Sets without tasks are left out.
        max_new_tokens: what the config leaves open.
        warn: takes a line for the user.
    """

    def __init__(
        self,
        config: EvalConfig,
        sets: Mapping[str, Sequence[Task]],
        rollouts: RolloutExecutor,
        *,
        max_new_tokens: int,
        warn: Callable[[str], None],
    ) -> None:
        self.sets = {name: tasks for name, tasks in sets.items() if tasks}
        self._config = config
        self._rollouts = rollouts
        self._sampling = Sampling(
            max_tokens=config.max_new_tokens or max_new_tokens, temperature=config.temperature, seed=None
        )
        self._warn = warn
        self._pending: tuple[int, Evaluation] | None = None

    @property
    def step(self) -> int | None:
        """Step that is being evaluated; None if no evaluation is under way."""
        return self._pending[0] if self._pending else None

    def start(self, step: int, version: int) -> None:
        """Let an evaluation ride along from now on.

        The one before the first step, to which all others are compared, is of one version; so are all where runs of one
        seed are equal, which a score that depends on when a publish came would not be.

        Args:
            step: number of the step whose weights these are.
            version: version of these weights.
        """
        evaluation = Evaluation(
            self.sets,
            episodes=self._config.episodes,
            sampling=self._sampling,
            version=version,
            one_version=step == 0 or self._rollouts.config.in_rounds,
        )
        self._rollouts.start_evaluation(evaluation)
        self._pending = step, evaluation

    async def finish(self) -> None:
        """Wait for the evaluation that is under way, before all else."""
        await self._rollouts.finish_evaluation()

    def drop(self) -> None:
        """Forget the evaluation that is under way; its episodes were ended."""
        self._pending = None

    def pop(self) -> EvaluationResult | None:
        """Return what came of the evaluation once it is complete, and end it; None before.

        Raises:
            ForgeError: all episodes of a set failed.
        """
        if self._pending is None or not self._pending[1].complete:
            return None
        (step, evaluation), self._pending = self._pending, None
        k, metrics, tokens, first = self._config.episodes, dict[str, float](), 0, None
        for name in self.sets:
            results = evaluation.results(name)
            values = score_set(name, results, k=k, success=self._config.success)
            metrics |= {f"eval/{name}/{key}": value for key, value in values.items()}
            metrics[f"eval/{name}/other_versions"] = others = evaluation.other_versions(name)
            if others > _MOSTLY_OTHERS:
                self._warn(
                    f"{others:.0%} of the tokens by which step {step} was evaluated on {name} are of other weights "
                    "than that step's, as training went on: lower --evaluation.tasks, or set --evaluation.blocking"
                )
            first = values[f"avg@{k}"] if first is None else first
            episodes = [episode for of_task in results for episode in of_task]
            tokens += sum(episode.response_tokens for episode in episodes)
            if failed := [episode for episode in episodes if not episode.outcome.scored]:
                many = f"{len(failed)} of {len(episodes)} evaluations failed"
                self._warn(f"{many} and are left out of the score of {name}; {describe_failure(failed[-1])}")
        if [*self.sets] == [HELD_OUT]:
            metrics = _short(metrics, k) | metrics
        assert first is not None, "there is a set"
        return EvaluationResult(step=step, score=first, metrics=metrics, tokens=tokens)


def _short(metrics: Mapping[str, float], k: int) -> dict[str, float]:
    """Name the only set's score `held_out`, and those of its sources `held_out/SOURCE`."""
    ending, prefix = f"/avg@{k}", f"eval/{HELD_OUT}"
    return {
        name.removesuffix(ending).replace(prefix, HELD_OUT, 1): value
        for name, value in metrics.items()
        if name.endswith(ending)
    }
