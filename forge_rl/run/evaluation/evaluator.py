"""Evaluates a run's policy on its sets, one evaluation at a time, and keeps the scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_rl.rollout.evaluation import EvalConfig, Evaluation, describe_failure, score_set
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.types import Episode, Sampling, Task

HELD_OUT = "held_out"
"""Name of the set that a run has by default, whose score is also logged as `held_out`."""
_MOSTLY_OTHERS = 0.5
"""Share of tokens from other versions above which there is a warning."""

Sets = Mapping[str, Sequence[Task]]
"""Tasks by set name."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Result of an evaluation."""

    step: int
    """Step whose weights were evaluated."""
    score: float
    """Score of the first set: avg@k, or the negative loss of examples."""
    metrics: dict[str, float]
    tokens: int
    """Number of tokens decoded, or scored, for it."""
    episodes: Mapping[str, Sequence[Sequence[Episode]]]
    """Episodes of each task, by set."""


class Evaluations(Protocol):
    """Carries out evaluations, one at a time."""

    blocking: bool
    """True if each has to be finished before training continues."""

    def start(self, sets: Sets, step: int, version: int) -> None:
        """Start to evaluate the weights of a step, published as a version."""

    async def finish(self) -> None:
        """Wait for the evaluation, ahead of all other work."""

    @property
    def complete(self) -> bool:
        """True once `pop` can return the result of an evaluation."""

    def pop(self, sets: Sets, step: int) -> EvaluationResult:
        """End the evaluation and return its result.

        Raises:
            ForgeError: nothing of a set could be evaluated.
        """

    def cancel(self) -> None:
        """Forget the evaluation, whose work was cancelled."""


class RolloutEvaluations:
    """Evaluates by generated episodes and their rewards, alongside training episodes.

    Args:
        max_tokens: used if the config sets none.
        warn: called with a line for the user.
    """

    def __init__(
        self, config: EvalConfig, rollouts: RolloutExecutor, *, max_tokens: int, warn: Callable[[str], None]
    ) -> None:
        self.blocking = config.blocking
        self._config = config
        self._rollouts = rollouts
        self._sampling = Sampling(max_tokens=config.max_tokens or max_tokens, temperature=config.temperature, seed=None)
        self._warn = warn
        self._evaluation: Evaluation | None = None

    def start(self, sets: Sets, step: int, version: int) -> None:
        """Start an evaluation.

        The evaluation before the first step, the baseline of all others, uses one version. So do all evaluations if
        runs with equal seeds must be equal, because otherwise the score would depend on the time of a publish.
        """
        self._evaluation = Evaluation(
            sets,
            episodes=self._config.episodes,
            sampling=self._sampling,
            version=version,
            # A training batch waits for an evaluation of one version, and for no other.
            one_version=step == 0 or self._rollouts.config.in_rounds,
        )
        self._rollouts.start_evaluation(self._evaluation)

    async def finish(self) -> None:
        """Wait for the evaluation, ahead of all other work."""
        await self._rollouts.finish_evaluation()

    @property
    def complete(self) -> bool:
        """True once all episodes of a started evaluation have ended."""
        return self._evaluation is not None and self._evaluation.complete

    def pop(self, sets: Sets, step: int) -> EvaluationResult:
        """End the evaluation and return its result.

        Raises:
            ForgeError: all episodes of a set failed.
        """
        evaluation, self._evaluation = self._evaluation, None
        assert evaluation is not None, "it was started"
        k, metrics, tokens = self._config.episodes, dict[str, float](), 0
        for name in sets:
            results = evaluation.results(name)
            values = score_set(name, results, k=k, success=self._config.success)
            metrics |= {f"eval/{name}/{key}": value for key, value in values.items()}
            metrics[f"eval/{name}/other_versions"] = share = evaluation.other_versions(name)
            if share > _MOSTLY_OTHERS:
                self._warn(
                    f"{share:.0%} of the tokens in the evaluation of step {step} on {name} come from other weights, "
                    "because training continued meanwhile: lower --evaluation.tasks, or set --evaluation.blocking"
                )
            episodes = [episode for task_episodes in results for episode in task_episodes]
            tokens += sum(episode.response_tokens for episode in episodes)
            # Failures of infrastructure or judge are no answers: scored as 0, they would look like a worse policy.
            if failed := [episode for episode in episodes if not episode.outcome.scored]:
                failures = f"{len(failed)} of {len(episodes)} evaluations failed"
                self._warn(f"{failures} and are left out of the score of {name}; {describe_failure(failed[-1])}")
        score = metrics[f"eval/{next(iter(sets))}/avg@{k}"]
        # The one default set is also logged under its short name.
        if [*sets] == [HELD_OUT]:
            metrics = _short(metrics, k) | metrics
        episodes_by_set = {name: evaluation.results(name) for name in sets}
        return EvaluationResult(step=step, score=score, metrics=metrics, tokens=tokens, episodes=episodes_by_set)

    def cancel(self) -> None:
        """Forget the evaluation, whose episodes were cancelled."""
        self._evaluation = None


class Evaluator:
    """Starts evaluations, and keeps the scores by step.

    Args:
        sets: tasks by set name; the first set's score is the run's. Sets without tasks are left out.
        evaluations: carries them out.
        measure: describes the current reward; only scores by the same reward are compared.
    """

    def __init__(self, sets: Sets, evaluations: Evaluations, measure: Callable[[], str] = lambda: "") -> None:
        self.sets = {name: tasks for name, tasks in sets.items() if tasks}
        self.scores: dict[int, float] = {}
        """Score of the first set, by step."""
        self._measure = measure
        self._measures: dict[int, str] = {}
        """Description of the reward behind each score; scores of runs that did not record it have none."""
        self._evaluations = evaluations
        self._pending: tuple[int, int] | None = None
        """Step and version being evaluated."""

    @property
    def comparable(self) -> dict[int, float]:
        """Scores by the current reward, by step."""
        # A score without a record counts as one by the current reward.
        measure = self._measure()
        return {step: score for step, score in self.scores.items() if self._measures.get(step, measure) == measure}

    @property
    def step(self) -> int | None:
        """Step being evaluated; None if no evaluation is in progress."""
        return self._pending[0] if self._pending else None

    @property
    def blocking(self) -> bool:
        """True if each evaluation has to be finished before training continues."""
        return self._evaluations.blocking

    def start(self, step: int, version: int) -> None:
        """Start an evaluation.

        Args:
            step: step whose weights are evaluated.
            version: version of these weights.
        """
        self._evaluations.start(self.sets, step, version)
        self._pending = step, version

    async def finish(self) -> None:
        """Wait for the pending evaluation, ahead of all other work."""
        await self._evaluations.finish()

    def pop(self) -> EvaluationResult | None:
        """End the pending evaluation, keep its score, and return its result; None until it is complete.

        Raises:
            ForgeError: nothing of a set could be evaluated.
        """
        if self._pending is None or not self._evaluations.complete:
            return None
        # Cleared first, so that an evaluation of which a whole set failed raises once and not at each step.
        step, self._pending = self._pending[0], None
        result = self._evaluations.pop(self.sets, step)
        self.scores[step], self._measures[step] = result.score, self._measure()
        return result

    def state(self) -> dict[str, object]:
        """Return the scores and the pending evaluation, as JSON."""
        scores = {str(step): score for step, score in self.scores.items()}
        measures = {str(step): measure for step, measure in self._measures.items()}
        return {
            "scores": scores,
            "scores_by": measures,
            "evaluation": list(self._pending) if self._pending else None,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Take over the scores and the pending evaluation of an earlier process; `restart` starts it.

        Raises:
            ValueError: the state was not made by `state`.
        """
        match state:
            case {"scores": dict(scores), "evaluation": None | [int(), int()] as pending}:
                try:
                    self.scores = {int(step): float(score) for step, score in scores.items()}
                    measures = state.get("scores_by", {})
                    self._measures = {int(step): str(measure) for step, measure in dict(measures).items()}  # type: ignore[call-overload]
                except (TypeError, OverflowError) as error:
                    raise ValueError(f"the scores are malformed: {error}") from error
                self._pending = (pending[0], pending[1]) if pending else None
            case _:
                excerpt = {name: state.get(name) for name in ("scores", "evaluation")}
                raise ValueError(f"scores, or an evaluation, are malformed: {excerpt!r:.160}")

    def rollback(self, step: int) -> None:
        """Forget the scores of later steps, and a pending evaluation of one; its episodes were cancelled."""
        self.scores = {eval_step: score for eval_step, score in self.scores.items() if eval_step <= step}
        self._measures = {eval_step: measure for eval_step, measure in self._measures.items() if eval_step <= step}
        # Even an evaluation of an earlier step: its episodes are gone, and `restart` begins it again.
        self._evaluations.cancel()
        if self._pending is not None and self._pending[0] > step:
            self._pending = None

    def restart(self, step: int, version: int) -> None:
        """Start the evaluation that was pending before `restore` or `rollback`, if there is one.

        If the published weights belong to a later step than the evaluation, all tokens count as other_versions.

        Args:
            step: step of the published weights.
            version: their version. A reset publishes the weights of step 0 under a new one.
        """
        # A run resumed with --evaluation.every 0 has no sets, whatever its checkpoint left pending.
        if self._pending is not None and self.sets:
            evaluated_step, evaluated_version = self._pending
            self.start(evaluated_step, version if evaluated_step == step else evaluated_version)
        else:
            self._pending = None


def _short(metrics: Mapping[str, float], k: int) -> dict[str, float]:
    """Rename the only set's score to `held_out`, and its sources' scores to `held_out/SOURCE`."""
    ending, prefix = f"/avg@{k}", f"eval/{HELD_OUT}"
    return {
        name.removesuffix(ending).replace(prefix, HELD_OUT, 1): value
        for name, value in metrics.items()
        if name.endswith(ending)
    }
