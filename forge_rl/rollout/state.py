"""What the schedule plans with: its settings, groups meant for batches, and attempts at their tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from forge_rl.errors import ConfigError
from forge_rl.types import Episode, Task


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Which batches engines work on, and what a batch is made of."""

    kind: Literal["pipelined", "synchronous", "one_step", "asynchronous"] = "pipelined"
    """pipelined: engines work ahead on the next batches while one waits for its stragglers, and pause while the trainer
    trains. synchronous: one batch at a time. one_step: train on a batch while the next one is generated. asynchronous:
    what is complete first is trained first, and engines never pause; what would be too old is left out, and counted as
    groups/replaced_aged. All but asynchronous keep the mixture exact."""
    max_lag: int = 1
    """Most optimizer steps between the weights that made a token and those that train on it; also how many batches
    pipelined works ahead. With 0, pipelined is synchronous."""
    over_sampling: float = 1.0
    """Start so many times the groups that a batch needs; the first to end make the batch, the others are carried on
    to the next one. In rare cases one cannot be used in time; such are counted as groups/replaced_aged."""
    replace_uniform: bool = False
    """Dynamic sampling: replace a group whose rewards are all equal by another task of the same source."""
    most_replaced: int = 64
    """Stop when a source gave so many groups in a row that could not be used."""
    retries: int = 2
    """How often an episode that failed through no fault of the policy starts again, before its group is replaced."""
    max_episodes: int = 16384
    """Most episodes under way at a time, those that wait for tools among them."""

    def __post_init__(self) -> None:
        for flag, value, good, hint in (
            ("max-lag", self.max_lag, self.max_lag >= 0, "0 or more"),
            ("over-sampling", self.over_sampling, 1 <= self.over_sampling <= 8, "a value from 1 to 8"),
            ("most-replaced", self.most_replaced, self.most_replaced >= 1, "1 or more"),
            ("retries", self.retries, self.retries >= 0, "0 or more"),
            ("max-episodes", self.max_episodes, self.max_episodes >= 1, "1 or more"),
        ):
            if not good:
                raise ConfigError(f"--schedule.{flag} is {value}", hint=f"set --schedule.{flag} to {hint}")
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
        """The bound on the lag that holds."""
        return {"synchronous": 0, "one_step": 1}.get(self.kind, self.max_lag)

    @property
    def exact(self) -> bool:
        """Whether each batch has exactly the mixture's proportions."""
        return self.kind != "asynchronous"

    @property
    def decodes_while_training(self) -> bool:
        """Whether engines go on while the trainer trains."""
        return self.kind in ("one_step", "asynchronous")

    @property
    def in_rounds(self) -> bool:
        """Whether groups are replaced only when all of the batch have ended: then runs of one seed are equal."""
        return self.exact and self.lag == 0


class Tasks(Protocol):
    """Where tasks come from."""

    def source_order(self, groups: int) -> list[str]:
        """Sources of the next batch's groups, in the mixture's exact proportions."""

    def draw_from(self, source: str) -> Task:
        """The next task of a source."""


State = Literal["new", "in_env", "waiting", "decoding", "done"]
"""new: not begun. away: in its world or with its judge. waiting: for an engine. decoding: on one. done: has a result,
or is of no use any more."""

EVALUATION = -1
"""The batch of episodes that are of none: they come first."""


@dataclass(eq=False, slots=True)
class GroupState:
    """The episodes of one task, and the batch that they are meant for."""

    task: Task
    batch: int
    """That it is meant for; a surplus group moves on to the next."""
    place: tuple[int, int, int]
    """Batch that it was planned for, place in it, and how many groups stood there before: the same in every run."""
    order: int
    """How many groups were planned before it."""
    episodes: list[InflightEpisode] = field(default_factory=list)
    since: int | None = None
    """Version that the engines served when its first episode began."""
    ended: int | None = None
    """How many groups were complete before it; None while it is not."""
    dropped: bool = False
    """It was replaced."""
    home: int | None = None
    """Engine that its prompt was first decoded on."""

    @property
    def results(self) -> tuple[Episode, ...]:
        """Of its episodes that are done."""
        return tuple(plan.result for plan in self.episodes if plan.result is not None)

    @property
    def is_uniform(self) -> bool:
        """All rewards are equal: nothing to learn."""
        rewards = [result.reward for result in self.results]
        return max(rewards) == min(rewards)


@dataclass(eq=False, slots=True)
class InflightEpisode:
    """One attempt at a task."""

    group: GroupState
    index: int
    state: State = "new"
    tries: int = 0
    """How often it started before."""
    engine: int | None = None
    """That it decodes on, or decoded on last."""
    result: Episode | None = None
    ticket: int = 0
    """How many asked for an engine for the first time before it did."""
    interrupted: bool = False
    """Its engine was lost in the middle of a turn: it goes first."""

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Of the group, index in it, and tries before: what a seed is made of."""
        return (*self.group.place, self.index, self.tries)
