"""Settings of the schedule, and its state: groups planned for batches, and episodes in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from forge_rl.errors import ConfigError, check_flags
from forge_rl.types import Episode, Task


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The schedule: which batches engines work on, and how a batch is composed."""

    kind: Literal["pipelined", "synchronous", "one_step", "asynchronous"] = "pipelined"
    """pipelined: engines work ahead on the next batches while one waits for its stragglers, and pause while the trainer
    trains. synchronous: one batch at a time. one_step: train on a batch while the next one is generated. asynchronous:
    groups are trained in the order in which they complete, and engines never pause; groups that would be too old are
    left out, and counted as groups/replaced_aged. All but asynchronous keep the mixture exact."""
    max_lag: int = 1
    """Most versions between the weights that made a token and the latest when its batch is delivered; also, with one
    version a batch, the number of batches that pipelined works ahead. With 0, pipelined is synchronous."""
    over_sampling: float = 1.0
    """Factor by which more groups start than a batch needs; the first to complete make the batch, the others are
    carried on to the next one. In rare cases one cannot be used in time; it is counted as groups/replaced_aged."""
    replace_uniform: bool = False
    """Dynamic sampling: replace a group whose rewards are all equal by another task of the same source."""
    most_replaced: int = 64
    """Stop when a source gave so many batches' worth of groups in a row that replace_uniform replaced."""
    retries: int = 2
    """Times that an episode starts again after a failure that is not the policy's, before its group is replaced. One
    that could not be scored does not: its score is tried again, and then its group is replaced."""
    max_episodes: int = 16384
    """Most episodes in flight at a time, those that wait for tools included."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--schedule.",
            least={"max_lag": 0, "over_sampling": 1, "most_replaced": 1, "retries": 0, "max_episodes": 1},
            most={"over_sampling": 8},
        )
        if self.over_sampling > 1 and (self.kind != "pipelined" or self.max_lag == 0):
            raise ConfigError(
                f"--schedule.over-sampling is {self.over_sampling:g}, and no later batch may take the surplus",
                hint="choose the pipelined schedule with --schedule.max-lag 1 or more",
            )
        if self.kind == "asynchronous" and self.max_lag == 0:
            raise ConfigError(
                "the asynchronous schedule has a --schedule.max-lag of 0", hint="choose --schedule.kind synchronous"
            )

    @property
    def lag(self) -> int:
        """Bound on the lag that holds with this kind of schedule."""
        return {"synchronous": 0, "one_step": 1}.get(self.kind, self.max_lag)

    @property
    def exact(self) -> bool:
        """True if each batch has exactly the mixture's proportions."""
        return self.kind != "asynchronous"

    @property
    def decodes_while_training(self) -> bool:
        """True if engines decode while the trainer trains."""
        return self.kind in ("one_step", "asynchronous")

    @property
    def in_rounds(self) -> bool:
        """True if groups are replaced only when the whole batch has ended: runs of one seed are then equal."""
        return self.exact and self.lag == 0


State = Literal["new", "in_env", "waiting", "decoding", "done"]
"""new: not started. in_env: in its environment, or being scored. waiting: for an engine. decoding: on an engine.
done: has a result, or is not needed any more."""

EVALUATION = -1
"""Batch number of episodes that belong to no batch: they come first."""
RIDE_ALONG = -2
"""Batch number of an evaluation's episodes: they come after those of the batch that is awaited, and before work ahead;
while the evaluation is awaited, first."""


@dataclass(eq=False, slots=True)
class GroupState:
    """The episodes of one task."""

    task: Task
    batch: int
    """Number of the batch that it is planned for; a surplus group moves on to the next."""
    place: tuple[int, int, int]
    """Batch that it was first planned for, place in it, and number of groups that it replaces there: the same in every
    run of one seed. Of an evaluation: RIDE_ALONG, number of the set, and place in it."""
    order: int
    """Number of groups planned before it."""
    episodes: list[InflightEpisode] = field(default_factory=list)
    first_version: int | None = None
    """Version that the engines served when its first episode started."""
    completed: int | None = None
    """Number of groups that completed before it; None while it is not complete."""
    dropped: bool = False
    """True once it was replaced."""
    home: int | None = None
    """Engine that decoded its prompt first."""

    @property
    def results(self) -> tuple[Episode, ...]:
        """Results of its episodes that are done."""
        return tuple(episode.result for episode in self.episodes if episode.result is not None)

    @property
    def is_uniform(self) -> bool:
        """True if all rewards are equal, and no turn or token has a value of its own: there is nothing to learn.

        A group of one episode is never uniform: its advantage comes from elsewhere.
        """
        results = self.results
        if len(self.episodes) == 1:
            return False
        rewards = [result.reward for result in results]
        return max(rewards) == min(rewards) and not any(each.turn_values or each.token_values for each in results)


@dataclass(eq=False, slots=True)
class InflightEpisode:
    """One attempt at a task, from its plan to its result."""

    group: GroupState
    index: int
    state: State = "new"
    tries: int = 0
    """Number of failed attempts before this one."""
    engine: int | None = None
    """Engine that it decodes on, or decoded on last."""
    result: Episode | None = None
    waited_s: float = 0.0
    """Seconds without pauses that it has waited for engines."""
    waiting_since: float = 0.0
    ticket: int = 0
    """Place in the order of first requests for an engine, from 1; 0 before the first request."""
    interrupted: bool = False
    """True if its engine died in the middle of a turn: it goes first."""

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Place of the group, index in it, and tries before: the seed is derived from these."""
        return (*self.group.place, self.index, self.tries)
