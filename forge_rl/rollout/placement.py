"""Who has the devices: engines in rollouts, the trainer in between. Where they share them, each makes room first."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, Protocol

from forge_rl.engines.platform import gpus
from forge_rl.errors import ConfigError

Placement = Literal["auto", "colocated", "separate"]
"""Whether trainer and engines share devices."""


class Engines(Protocol):
    """What is needed of the Generator."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Owner(Protocol):
    """What is needed of the Trainer."""

    async def offload(self) -> int: ...

    async def onload(self) -> int: ...


class DeviceHandover:
    """Hands the devices over. What each transition takes is counted.

    Args:
        engines: pause while they do not have the devices; where they share them, they sleep.
        trainer: shares the engines' devices; None where it has its own.
        clock: monotonic seconds.
    """

    def __init__(
        self, engines: Engines, trainer: Owner | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engines = engines
        self._trainer = trainer
        self._clock = clock
        self._at: Literal["both", "engines", "trainer", "between"] = "both"
        """Who has them now; "between" where a transition failed."""
        self._rollouts = False
        self._guests = 0
        self._changing = asyncio.Lock()
        self._seconds: dict[str, float] = defaultdict(float)

    async def to_engines(self) -> None:
        """Rollouts begin, or go on."""
        self._rollouts = True
        await self._settle()

    async def to_trainer(self, *, idle: bool = False) -> None:
        """Rollouts stop at a token boundary, with what is under way.

        Args:
            idle: nothing is under way. Engines with devices of their own then need not stop.
        """
        self._rollouts = False
        if not idle or self._trainer is not None:
            await self._settle()

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """While the body runs, the engines have the devices."""
        self._guests += 1
        try:
            await self._settle()
            yield
        finally:
            self._guests -= 1
            await self._settle()

    async def clear(self) -> None:
        """Make room for a trainer that starts again, with all that it has on the devices."""
        self._rollouts = False
        if self._trainer is not None:
            async with self._changing:
                self._at = "between"
                await self._timed("sleep", self._engines.sleep())

    def take(self) -> dict[str, float]:
        """`transition/<name>_s` of each transition since this was last asked: seconds."""
        found = {f"transition/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return found

    async def _settle(self) -> None:
        async with self._changing:
            target: Literal["engines", "trainer"] = "engines" if self._rollouts or self._guests else "trainer"
            before, self._at = self._at, "between"
            if target == before:
                pass
            elif self._trainer is None:
                if target == "trainer":
                    await self._timed("pause", self._engines.pause())
                elif before != "both":
                    await self._timed("resume", self._engines.resume())
            elif target == "trainer":
                await self._timed("sleep", self._engines.sleep())
                await self._timed("onload", self._trainer.onload())
            else:
                await self._timed("offload", self._trainer.offload())
                if before != "both":
                    await self._timed("wake", self._engines.wake())
            self._at = target

    async def _timed(self, name: str, work: Awaitable[object]) -> None:
        began = self._clock()
        try:
            await work
        finally:
            self._seconds[name] += self._clock() - began


def shares_devices(placement: Placement, *, ranks: int, engines: int, decodes_while_training: bool) -> bool:
    """Decides whether trainer and engines share the devices.

    Args:
        placement: as asked for.
        ranks: of the trainer.
        engines: of the generator.
        decodes_while_training: whether the schedule lets engines go on while the trainer trains.

    Raises:
        ConfigError: there are too few GPUs for each to have its own.
    """
    needed = ranks + engines
    if placement == "auto":
        return 0 < gpus() < needed and not decodes_while_training
    if placement == "separate" and 0 < gpus() < needed:
        raise ConfigError(
            f"{ranks} ranks and {engines} engines on devices of their own need {needed} GPUs, and there are {gpus()}",
            hint="choose --placement colocated, or fewer --trainer.ranks or --generator.replicas",
        )
    return placement == "colocated"
