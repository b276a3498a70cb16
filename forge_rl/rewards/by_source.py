"""One reward per source of a mixture."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.rewards.protocol import RewardFunction, Scored, form_of, text_for
from forge_rl.types import Episode, Task


@dataclass(frozen=True)
class RewardBySource:
    """Scores each episode by the reward of its task's source.

    reward = RewardBySource({"gsm8k": Number(), "humaneval": UnitTests(tests="test")}, Auto())
    """

    rewards: Mapping[str, RewardFunction]
    """Rewards by source name; none may need the whole group."""
    other: RewardFunction
    """Reward of all other sources."""

    def __post_init__(self) -> None:
        for name, reward in [*self.rewards.items(), ("other sources", self.other)]:
            # Episodes arrive one at a time here, so a reward of a group would never see the others.
            if form_of(reward) == "group":
                raise ConfigError(
                    f"the reward of {name} needs the whole group", hint="choose one that scores single episodes"
                )

    @property
    def deadline_s(self) -> float:
        """Longest deadline of one score among the rewards, at least a minute."""
        return max(60.0, *(getattr(reward, "deadline_s", 0.0) for reward in (*self.rewards.values(), self.other)))

    def load(self, folder: Path | None) -> None:
        """Load each reward that has something to load."""
        for reward in (*self.rewards.values(), self.other):
            if load := getattr(reward, "load", None):
                load(folder)

    def reward_of(self, task: Task) -> RewardFunction:
        """Return the reward of a task's source, which the Reward service calls as it calls any other."""
        return self.rewards.get(task.source, self.other)

    async def __call__(self, task: Task, episode: Episode) -> Scored:
        """Return the score of the task's reward."""
        reward = self.reward_of(task)
        argument = episode if form_of(reward) == "episode" else text_for(reward, episode)
        score = reward(task, argument)  # type: ignore[arg-type]
        return await score if inspect.isawaitable(score) else score  # type: ignore[return-value]
