"""Evaluates a run's policy on its sets, one evaluation at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.rollout.evaluation import EvalConfig, Evaluation, describe_failure, score_set
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.types import Sampling, Task

HELD_OUT = "held_out"
"""Name of the set that a run has by default, whose score is also logged as `held_out`."""
_MOSTLY_OTHERS = 0.5
"""Warn above this share of tokens from other versions."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Result of an evaluation."""

    step: int
    """Step whose weights were evaluated."""
    score: float
    """avg@k of the first set."""
    metrics: dict[str, float]
    tokens: int
    """Number of tokens decoded for it."""


class Evaluator:
    """Starts evaluations and turns their results into metrics.

    Args:
        sets: tasks by set name; the first set's score is the run's. Sets without tasks are left out.
        max_tokens: used if the config sets none.
        warn: called with a line for the user.
    """

    def __init__(
        self,
        config: EvalConfig,
        sets: Mapping[str, Sequence[Task]],
        rollouts: RolloutExecutor,
        *,
        max_tokens: int,
        warn: Callable[[str], None],
    ) -> None:
        self.sets = {name: tasks for name, tasks in sets.items() if tasks}
        self._config = config
        self._rollouts = rollouts
        self._sampling = Sampling(max_tokens=config.max_tokens or max_tokens, temperature=config.temperature, seed=None)
        self._warn = warn
        self._pending: tuple[int, Evaluation] | None = None

    @property
    def step(self) -> int | None:
        """Step being evaluated; None if no evaluation is in progress."""
        return self._pending[0] if self._pending else None

    def start(self, step: int, version: int) -> None:
        """Start an evaluation, whose episodes run alongside training episodes.

        The evaluation before the first step, the baseline of all others, uses one version. So do all evaluations if
        runs with equal seeds must be equal, because otherwise the score would depend on the time of a publish.

        Args:
            step: step whose weights are evaluated.
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
        """Wait for the pending evaluation, ahead of all other work."""
        await self._rollouts.finish_evaluation()

    def drop(self) -> None:
        """Forget the pending evaluation, whose episodes were cancelled."""
        self._pending = None

    def pop(self) -> EvaluationResult | None:
        """Return the result of the pending evaluation and end it; None until it is complete.

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
                    f"{others:.0%} of the tokens in the evaluation of step {step} on {name} come from other weights, "
                    "because training continued meanwhile: lower --evaluation.tasks, or set --evaluation.blocking"
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
    """Rename the only set's score to `held_out`, and its sources' scores to `held_out/SOURCE`."""
    ending, prefix = f"/avg@{k}", f"eval/{HELD_OUT}"
    return {
        name.removesuffix(ending).replace(prefix, HELD_OUT, 1): value
        for name, value in metrics.items()
        if name.endswith(ending)
    }
