"""Restarts of dead replicas, with a growing delay if they keep dying, and an end to them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forge_rl.errors import ConfigError

_LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Policy for replicas that die.

    Restart(max_restarts=3, backoff_s=2.0)  # at once, after 2 s, after 4 s, then never again
    """

    max_restarts: int = 5
    """Most restarts of a replica that keeps dying; then it is abandoned, and without any left the run stops."""
    backoff_s: float = 1.0
    """Wait before the second restart in a row, doubled for each further one up to a minute. The first is at once."""
    healthy_s: float = 60.0
    """Time of service in seconds after which a replica has recovered: its next death counts as the first."""

    def __post_init__(self) -> None:
        for flag, value in vars(self).items():
            if value < 0:
                name = flag.replace("_", "-")
                raise ConfigError(f"restart.{name} is {value}", hint=f"set restart.{name} to 0 or more")

    def delay_s(self, deaths: int) -> float:
        """Return the wait before a restart after so many deaths in a row."""
        return 0.0 if deaths < 2 else min(_LONGEST_BACKOFF_S, self.backoff_s * 2.0 ** (deaths - 2))


class Supervisor:
    """Decides when the replicas of one service are restarted, and which no more.

    Args:
        restart: replaces the dead replica of an index; returns whether the new one serves.
        clean_up: ends what is left of the dead replica of an index.
        abandon: told of an index that is not restarted any more.
        on_error: told of an index whose restarts ended with an error that is a bug.
        config: how often and when.
        clock: monotonic seconds.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        restart: Callable[[int], Awaitable[bool]],
        *,
        clean_up: Callable[[int], Awaitable[None]],
        abandon: Callable[[int], None],
        on_error: Callable[[int, BaseException], None],
        config: Restart,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._restart = restart
        self._clean_up = clean_up
        self._abandon = abandon
        self._on_error = on_error
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._deaths: dict[int, int] = defaultdict(int)
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def on_death(self, index: int, serving_since: float) -> None:
        """Restart a replica, unless that is being done already: then it died while it started.

        Args:
            index: of the dead replica.
            serving_since: when it began to serve, on the clock.
        """
        if index in self._tasks:
            return
        if self._clock() - serving_since >= self._config.healthy_s:
            self._deaths[index] = 0
        task = asyncio.get_running_loop().create_task(self._recover(index))
        self._tasks[index] = task
        task.add_done_callback(lambda task: self._on_end(index, task))

    async def close(self) -> None:
        """Cancel all restarts."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _recover(self, index: int) -> None:
        try:
            serves = False
            while not serves:
                await self._clean_up(index)
                self._deaths[index] += 1
                if self._deaths[index] > self._config.max_restarts:
                    self._abandon(index)
                    return
                await self._sleep(self._config.delay_s(self._deaths[index]))
                serves = await self._restart(index)
        finally:
            del self._tasks[index]  # at once: from here on a death starts another

    def _on_end(self, index: int, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(index, error)
