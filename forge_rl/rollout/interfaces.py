"""Interfaces of a rollout executor: runners of episodes, and listeners."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from forge_rl.rollout.dispatcher import PolicyClient
from forge_rl.types import Episode, Task


@runtime_checkable
class CountsEpisodes(Protocol):
    """A runner of episodes that has metrics."""

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call."""


@runtime_checkable
class PreparesTasks(Protocol):
    """A runner of episodes that prepares for coming tasks."""

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Start to prepare what tasks need, in their order, without waiting for it."""


RunEpisode: TypeAlias = Callable[[Task, PolicyClient], Awaitable[Episode]]
"""Runs one episode of a task with its policy client, such as an EpisodeRunner."""


class RolloutListener(Protocol):
    """Receives what a user should see, such as the log of a run."""

    def warn(self, text: str) -> None:
        """Report a warning to the user."""

    def episode(self, episode: Episode) -> None:
        """Record a finished episode; evaluations pass only failed ones."""


class NoListener:
    """Ignores everything."""

    def warn(self, text: str) -> None: ...

    def episode(self, episode: Episode) -> None: ...
