"""Schedule settings and state: groups planned for batches, and episodes in flight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.categories import Category, Operational
from forge_rl.types import Episode, Task


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Schedule: which batches the engines work on, and how a batch is composed."""

    CATEGORY: ClassVar[Category] = Category.TUNABLE

    kind: Literal["pipelined", "synchronous", "one_step", "asynchronous"] = "pipelined"
    """pipelined: engines work ahead on the next batches while one waits for its stragglers, and pause during training.
    synchronous: one batch at a time. one_step: train on a batch while the next one is generated. asynchronous: train on
    groups in completion order and never pause engines; groups that are too old are dropped and counted as
    groups/replaced_aged. All except asynchronous keep the mixture exact."""
    max_lag: int = 1
    """Maximum versions between the weights that produced a token and the latest when its batch is delivered; with one
    version per batch, also the number of batches that pipelined works ahead. With 0, pipelined is synchronous."""
    over_sampling: float = 1.0
    """Start this many times the groups that a batch needs; the first to complete form the batch, and the others carry
    over to the next. The rare group that is then too old is dropped and counted as groups/replaced_aged. Engines then
    work ahead one batch less, so that a straggler may be a version older: --schedule.max-lag is 2 or more."""
    dynamic_sampling: bool = False
    """Dynamic sampling: replace a group whose rewards are all equal by another task of the same source."""
    least_advantage: float = 0.0
    """With dynamic_sampling, also replace a group in which no reward is this far from the group's mean."""
    max_replaced: Operational[int] = 64
    """Stop after this many batches' worth of consecutive groups of a source were replaced by dynamic_sampling."""
    retries: Operational[int] = 2
    """Restarts of an episode after a failure that is not the policy's, before its group is replaced. If scoring fails,
    only the score is retried, then the group is replaced."""
    max_infrastructure_failures: float = 0.5
    """Stop the run if more than this share of the latest attempts at episodes ended in an infrastructure error, over
    twice the number of attempts that batches can have in flight, and at least 64; with 1, never."""
    max_episodes: Operational[int] = 16384
    """Maximum concurrent episodes, including those waiting for tools."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--schedule.",
            minimum={"max_lag": 0, "over_sampling": 1, "max_replaced": 1, "retries": 0, "max_episodes": 1}
            | {"least_advantage": 0},
            above={"max_infrastructure_failures": 0},
            maximum={"over_sampling": 8, "max_infrastructure_failures": 1},
        )
        if self.least_advantage > 0 and not self.dynamic_sampling:
            raise ConfigError(
                f"--schedule.least-advantage is {self.least_advantage:g}, but no group is replaced by its rewards",
                hint="add --schedule.dynamic-sampling",
            )
        # The surplus is carried over, so a group must stay young enough for a batch after its own; see
        # `BatchPlanner.open_batches`.
        if self.over_sampling > 1 and (self.kind != "pipelined" or self.max_lag < 2):
            raise ConfigError(
                f"--schedule.over-sampling is {self.over_sampling:g}, but "
                + (
                    "with --schedule.max-lag 1 groups that start while the batch before theirs is awaited are too old "
                    "for a later batch than theirs, which waits for its stragglers all the same"
                    if self.kind == "pipelined" and self.max_lag
                    else "no later batch can use the surplus"
                ),
                hint="choose the pipelined schedule with --schedule.max-lag 2 or more, or leave it out",
            )
        if self.kind == "asynchronous" and self.max_lag == 0:
            raise ConfigError(
                "--schedule.max-lag is 0 with the asynchronous schedule", hint="choose --schedule.kind synchronous"
            )

    @property
    def lag(self) -> int:
        """Effective lag bound of this kind of schedule."""
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
        """True if groups are replaced only once the whole batch has ended, which makes runs reproducible by seed."""
        return self.exact and self.lag == 0


EpisodeState = Literal["new", "reserved", "in_env", "waiting", "decoding", "done"]
"""new: not started. reserved: for a branch of another episode. in_env: in its environment, or being scored. waiting:
for an engine. decoding: on an engine. done: has a result, or is not needed any more."""

EVALUATION = -1
"""Batch number of an evaluation's episodes: they go after the awaited batch and before later ones, or first while the
evaluation is awaited."""


@dataclass(eq=False, slots=True)
class GroupState:
    """The episodes of one task."""

    task: Task
    batch: int
    """Number of the batch that the group is planned for; a surplus group moves on to the next."""
    place: tuple[int, int, int]
    """Original batch number, place in the batch, and number of groups replaced at that place; the same in every run
    with the same seed. For evaluations: EVALUATION, number of the set, and place in it."""
    order: int
    """Number of groups planned before this one."""
    episodes: list[InflightEpisode] = field(default_factory=list)
    first_version: int | None = None
    """Version that the engines served when the first episode started."""
    completed: int | None = None
    """Number of groups that completed before this one; None while incomplete."""
    dropped: str = ""
    """Why the group was replaced; "" while it is in use."""
    home: int | None = None
    """Engine that first decoded the prompt."""

    @property
    def results(self) -> tuple[Episode, ...]:
        """Results of the finished episodes."""
        return tuple(episode.result for episode in self.episodes if episode.result is not None)

    @property
    def is_uniform(self) -> bool:
        """True if all rewards are equal and no turn or token has its own value, so there is nothing to learn.

        A group of one episode is never uniform, as its advantage does not come from the group.
        """
        return self._compared and max(self._rewards) == min(self._rewards)

    def is_weak(self, min_advantage: float) -> bool:
        """True if no reward is `min_advantage` or more from the mean of all, and no turn or token has its own value."""
        rewards = self._rewards
        mean = math.fsum(rewards) / len(rewards)
        return self._compared and max(abs(reward - mean) for reward in rewards) < min_advantage

    @property
    def _rewards(self) -> list[float]:
        return [result.reward for result in self.results]

    @property
    def _compared(self) -> bool:
        """True if advantages come from nothing but the rewards of this group's episodes."""
        has_values = any(result.score and (result.score.turns or result.score.tokens) for result in self.results)
        return len(self.episodes) > 1 and not has_values


@dataclass(eq=False, slots=True)
class InflightEpisode:
    """One attempt at a task, from planning to result."""

    group: GroupState
    index: int
    state: EpisodeState = "new"
    tries: int = 0
    """Number of failed attempts before this one."""
    engine: int | None = None
    """Current or last engine."""
    result: Episode | None = None
    waited_s: float = 0.0
    """Seconds spent waiting for engines, without pauses."""
    waiting_since: float = 0.0
    decoded_tokens: int = 0
    """Number of tokens of the current attempt's own turns so far."""
    ticket: int = 0
    """Position in the order of first engine requests, from 1; 0 before the first request."""
    interrupted: bool = False
    """True if the engine died in the middle of a turn; the episode then goes first."""

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Place of the group, index in it, and previous tries; determines the sampling seed."""
        return (*self.group.place, self.index, self.tries)
