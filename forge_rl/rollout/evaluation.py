"""Evaluations: their settings, one that is under way, and what came of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.algorithms.evaluation import avg_at_k, maj_at_k, pass_at_k
from forge_rl.errors import ConfigError, ForgeError, check_flags
from forge_rl.rollout.state import RIDE_ALONG, GroupState, InflightEpisode
from forge_rl.types import Episode, Outcome, Sampling, Task


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on tasks that are never trained on: when, how often each task, and how answers are sampled."""

    every: int = 5
    """Steps between evaluations; there is one before the first step and one after the last; 0 evaluates never."""
    tasks: int = 100
    """Most tasks of each set: held-out ones, never drawn for training, and those of --eval-tasks."""
    episodes: int = 1
    """k: episodes of each task. Scores are avg@k, pass@2, pass@4, ... pass@k, and maj@k where answers are extracted."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy. Seeds are the same in every evaluation."""
    max_new_tokens: int | None = None
    """Most tokens of one completion; by default --generator.max-new-tokens."""
    success: float = 1.0
    """Reward from which an episode succeeds, for pass@k."""
    blocking: bool = False
    """Stop everything for an evaluation. By default its episodes ride along with the next batches where engines have
    room, and go on under the next weights if they have not ended by then; the share of such tokens is logged as
    other_versions. The evaluation before the first step, and all with a lag of 0, end before the weights change."""
    keep_best: bool = True
    """Keep the checkpoint with the best score, of those that are of a step with an evaluation, and link
    checkpoints/best to it, whatever --keep-checkpoints says."""

    def __post_init__(self) -> None:
        least = {"every": 0, "tasks": 0, "episodes": 1, "temperature": 0}
        least |= {"max_new_tokens": 1} if self.max_new_tokens is not None else {}
        check_flags(self, "--evaluation.", least=least, below={"temperature": 10})
        if self.episodes > 1 and self.temperature == 0:
            raise ConfigError(
                f"{self.episodes} greedy episodes of a task are equal",
                hint="set --evaluation.temperature above 0, such as 1.0, or --evaluation.episodes 1",
            )


class Evaluation:
    """The episodes of an evaluation: k of each task of each set, which share their prompt.

    Args:
        sets: tasks by the set's name.
        episodes: k.
        sampling: settings of all of them; each has a seed of its own.
        version: version of the weights that is evaluated.
        one_version: True if all tokens must be of this version: the next batch then waits for it.
        on_task: called with the set's name and the results of each task, once all its episodes have ended.
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
        """Groups by set; one task may be in several."""
        self.left = self.total = 0
        """Number of episodes that have not ended, and of all."""
        for number, (name, tasks) in enumerate(sets.items()):
            groups = [
                GroupState(task, RIDE_ALONG, (RIDE_ALONG, number, place), order=place)
                for place, task in enumerate(tasks)
            ]
            for group in groups:
                group.episodes = [InflightEpisode(group, index) for index in range(episodes)]
            self.groups[name] = groups
            self.total += len(groups) * episodes
        self.left = self.total

    @property
    def complete(self) -> bool:
        """True once all episodes have ended, well or not."""
        return self.left == 0

    def record(self, episode: InflightEpisode, result: Episode) -> None:
        """Note the end of an episode."""
        assert episode.result is None, "an episode of an evaluation ends once"
        episode.result = result
        self.left -= 1
        group = episode.group
        if all(each.result is not None for each in group.episodes):
            self._on_task([*self.groups][group.place[1]], _ended(group))

    def results(self, name: str) -> list[tuple[Episode, ...]]:
        """Return the results of a set by task, in its order, those that failed included."""
        return [_ended(group) for group in self.groups[name]]

    def other_versions(self, name: str) -> float:
        """Return the share of a set's tokens that weights of another version than the evaluated one produced."""
        turns = [turn for episodes in self.results(name) for episode in episodes for turn in episode.turns]
        tokens = sum(len(turn.versions) for turn in turns)
        return sum(int((turn.versions != self.version).sum()) for turn in turns) / max(1, tokens)


def _ended(group: GroupState) -> tuple[Episode, ...]:
    """Return a task's episodes as they ended: where the group could not be scored together, they have failed."""
    problem = "its group could not be scored"
    return tuple(
        result.updated(reward=0.0, outcome=Outcome.JUDGE_ERROR, problem=problem)
        if result.outcome.scored and math.isnan(result.reward)
        else result
        for result in group.results
    )


def score_set(name: str, results: Sequence[Sequence[Episode]], *, k: int, success: float = 1.0) -> dict[str, float]:
    """Score a set from its tasks' episodes: `avg@k`, `pass@j`, `maj@k`, and `SOURCE/...` where there are several.

    Each has its standard error beside it, as `avg@k_stderr`. Episodes that failed through no fault of the policy are
    left out.

    Raises:
        ForgeError: all failed.
    """
    scored = [[episode for episode in episodes if episode.outcome.scored] for episodes in results]
    if not any(scored):
        failed = [episode for episodes in results for episode in episodes]
        cause = f"; {describe_failure(failed[-1])}" if failed else ""
        hint = failed[-1].outcome.hint if failed else ""
        raise ForgeError(f"all {len(failed)} evaluations of the set {name} failed{cause}", hint=hint)
    sources = sorted({episode.task.source for episodes in scored for episode in episodes})
    values = _scores(scored, k, success)
    for source in sources if len(sources) > 1 else ():
        of_source = [episodes for episodes in scored if episodes and episodes[0].task.source == source]
        values |= {f"{source}/{key}": value for key, value in _scores(of_source, k, success).items()}
    return values


def describe_failure(episode: Episode) -> str:
    """Describe in words how an episode of an evaluation failed."""
    return f"{episode.task.source} {episode.task.id} ended with {episode.outcome}: {episode.problem}"


def _scores(scored: Sequence[Sequence[Episode]], k: int, success: float) -> dict[str, float]:
    rewards = [[episode.reward for episode in episodes] for episodes in scored]
    answers = [[episode.answer for episode in episodes] for episodes in scored]
    found = {f"avg@{k}": avg_at_k(rewards)}
    if k > 1:
        steps = sorted({2**power for power in range(1, k.bit_length()) if 2**power < k} | {k})
        found |= {f"pass@{each}": pass_at_k(rewards, each, success=success) for each in steps}
        if any(answer for texts in answers for answer in texts):
            found[f"maj@{k}"] = maj_at_k(rewards, answers)
    values: dict[str, float] = {}
    for name, score in found.items():
        values |= {name: score.value, f"{name}_stderr": score.stderr}
    return {name: value for name, value in values.items() if not math.isnan(value)}
