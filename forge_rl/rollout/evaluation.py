"""Evaluations: settings, progress and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.algorithms.evaluation import avg_at_k, maj_at_k, pass_at_k
from forge_rl.errors import ConfigError, ForgeError, check_flags
from forge_rl.flags.categories import Operational
from forge_rl.rollout.state import EVALUATION, GroupState, InflightEpisode
from forge_rl.types import Episode, Outcome, Sampling, Task


@dataclass(frozen=True, kw_only=True)
class EvalTasks:
    """Tasks of an evaluation."""

    tasks: int = 100
    """Maximum tasks per set: held-out tasks, never drawn for training, and tasks of --eval-tasks."""

    def __post_init__(self) -> None:
        check_flags(self, "--evaluation.", minimum={"tasks": 0})


@dataclass(frozen=True, kw_only=True)
class EvalConfig(EvalTasks):
    """Evaluation on tasks that are never trained on: frequency, tasks and sampling."""

    every: Operational[int] = 5
    """Steps between evaluations, with one before the first step and one after the last; 0 disables them."""
    episodes: int = 1
    """k: episodes per task. Scores are avg@k, pass@2, pass@4, ... pass@k, and maj@k if answers are extracted."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy. Seeds are the same in every evaluation."""
    max_tokens: int | None = None
    """Maximum tokens per completion; by default --generator.max-tokens."""
    success: float = 1.0
    """Minimum reward of a successful episode, for pass@k."""
    blocking: Operational[bool] = False
    """Pause all other rollouts and training during an evaluation. By default its episodes run alongside the next
    batches when engines have room, and continue with the next weights if unfinished; the share of such tokens is logged
    as other_versions. The evaluation before the first step, and all with a lag of 0, finish before the weights
    change."""
    keep_best: Operational[bool] = True
    """Keep the checkpoint with the best score, among steps with an evaluation, and link checkpoints/best to it,
    regardless of --keep-checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        minimums = {"every": 0, "episodes": 1, "temperature": 0}
        minimums |= {"max_tokens": 1} if self.max_tokens is not None else {}
        check_flags(self, "--evaluation.", minimum=minimums, below={"temperature": 10})
        if self.episodes > 1 and self.temperature == 0:
            raise ConfigError(
                f"{self.episodes} greedy episodes of a task are equal",
                hint="set --evaluation.temperature above 0, such as 1.0, or --evaluation.episodes 1",
            )


class Evaluation:
    """The episodes of an evaluation: k per task of each set.

    Args:
        sets: tasks by set name.
        episodes: k.
        sampling: sampling settings without a seed, as each turn has its own.
        version: weights version to evaluate.
        one_version: True if all tokens must be from this version: the next batch then waits for the evaluation.
        on_task: called with the set's name and a task's results once all its episodes have ended.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[Task]],
        *,
        episodes: int,
        sampling: Sampling,
        version: int,
        one_version: bool = False,
        on_task: Callable[[str, Sequence[Episode]], None] = lambda name, episodes: None,
    ) -> None:
        self.sampling = sampling
        self._on_task = on_task
        self.version = version
        self.one_version = one_version
        self.groups: dict[str, list[GroupState]] = {}
        """Groups by set; a task may be in several sets."""
        self.left = self.total = 0
        """Number of unfinished episodes, and of all episodes."""
        for number, (name, tasks) in enumerate(sets.items()):
            # A task may be in several sets, so a group's place names its set.
            groups = [
                GroupState(task, EVALUATION, (EVALUATION, number, place), order=place)
                for place, task in enumerate(tasks)
            ]
            for group in groups:
                group.episodes = [InflightEpisode(group, index) for index in range(episodes)]
            self.groups[name] = groups
            self.total += len(groups) * episodes
        self.left = self.total

    @property
    def complete(self) -> bool:
        """True once all episodes have ended, successfully or not."""
        return self.left == 0

    def record(self, episode: InflightEpisode, result: Episode) -> None:
        """Record the result of an episode."""
        assert episode.result is None, "an episode of an evaluation ends once"
        episode.result = result
        self.left -= 1
        group = episode.group
        if all(sibling.result is not None for sibling in group.episodes):
            self._on_task([*self.groups][group.place[1]], _ended(group))

    def results(self, name: str) -> list[tuple[Episode, ...]]:
        """Return a set's results per task, in the set's order, including failed episodes."""
        return [_ended(group) for group in self.groups[name]]

    def other_versions(self, name: str) -> float:
        """Return the share of a set's tokens produced by other versions than the evaluated one."""
        turns = [turn for episodes in self.results(name) for episode in episodes for turn in episode.turns]
        tokens = sum(len(turn.versions) for turn in turns)
        return sum(int((turn.versions != self.version).sum()) for turn in turns) / max(1, tokens)


def _ended(group: GroupState) -> tuple[Episode, ...]:
    """Return a task's results; episodes whose group could not be scored together are judge errors."""
    problem = "its group could not be scored"
    return tuple(
        result.updated(outcome=Outcome.JUDGE_ERROR, problem=problem) if result.unscored else result
        for result in group.results
    )


def score_set(name: str, results: Sequence[Sequence[Episode]], *, k: int, success: float = 1.0) -> dict[str, float]:
    """Score a set from its tasks' episodes: `avg@k`, `pass@j`, `maj@k`, and `SOURCE/...` if there are several sources.

    Each comes with its standard error, such as `avg@k_stderr`. Episodes that failed through no fault of the policy are
    ignored.

    Raises:
        ForgeError: all episodes failed.
    """
    scored = [[episode for episode in episodes if episode.outcome.scored] for episodes in results]
    if not any(scored):
        failed = [episode for episodes in results for episode in episodes]
        cause = f"; {describe_failure(failed[-1])}" if failed else ""
        hint = failed[-1].outcome.hint if failed else ""
        raise ForgeError(f"all {len(failed)} episodes of the evaluation set {name} failed{cause}", hint=hint)
    sources = sorted({episode.task.source for episodes in scored for episode in episodes})
    values = _scores(scored, k, success)
    # With a single source, its scores are the set's.
    for source in sources if len(sources) > 1 else ():
        source_episodes = [episodes for episodes in scored if episodes and episodes[0].task.source == source]
        values |= {f"{source}/{key}": value for key, value in _scores(source_episodes, k, success).items()}
    return values


def describe_failure(episode: Episode) -> str:
    """Describe in words how an episode of an evaluation failed."""
    return f"{episode.task.source} {episode.task.id} ended with {episode.outcome}: {episode.problem}"


def _scores(scored: Sequence[Sequence[Episode]], k: int, success: float) -> dict[str, float]:
    rewards = [[episode.reward for episode in episodes] for episodes in scored]
    answers = [[episode.score.answer if episode.score else "" for episode in episodes] for episodes in scored]
    scores = {f"avg@{k}": avg_at_k(rewards)}
    if k > 1:
        steps = sorted({2**power for power in range(1, k.bit_length()) if 2**power < k} | {k})
        scores |= {f"pass@{j}": pass_at_k(rewards, j, success=success) for j in steps}
        if any(answer for texts in answers for answer in texts):
            scores[f"maj@{k}"] = maj_at_k(rewards, answers)
    values: dict[str, float] = {}
    for name, score in scores.items():
        values |= {name: score.value, f"{name}_stderr": score.stderr}
    return {name: value for name, value in values.items() if not math.isnan(value)}
