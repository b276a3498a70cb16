"""Placement of trainer and engines, and the handover of shared devices."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Literal, Protocol

from forge_rl.engines.devices import gpus
from forge_rl.errors import ConfigError
from forge_rl.system.tasks import ended

if TYPE_CHECKING:
    from forge_rl.services.trainer import Trainer

Placement = Literal["auto", "colocated", "separate"]
"""Whether trainer and engines share devices."""

_RETRY = 20
"""Guests get the devices, at the latest, when the trainers have waited for as long as this many changes take."""


class Engines(Protocol):
    """The part of the Generator's interface that a handover uses."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class DeviceHandover:
    """Hands the devices to the engines for rollouts and to the trainer in between; measures each transition.

        devices = DeviceHandover(generator, trainer)
        await devices.hand_to_engines()
        async with devices.lend():
            ...  # engines decode, even between rollouts

    Args:
        engines: paused while they do not have the devices; if devices are shared, put to sleep to free them.
        trainers: those that share the engines' devices; none if they have their own.
        guests: hands the trainers' own devices to further engines and back, while the trainers wait for a batch.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engines: Engines,
        *trainers: Trainer,
        guests: DeviceHandover | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._trainers = trainers
        self._guests = guests
        self._clock = clock
        self._holder: str | None = "both"
        """"engines", "trainer", or "both" initially; None during a transition and after a failed one."""
        self._rolling_out = False
        self._loans = 0
        self._starting = 0
        """Number of engines starting on their devices."""
        self._changed = asyncio.Condition()
        """Held during a transition; notified at its end."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._waited_s = math.inf
        """Seconds for which the trainers last waited for a batch."""
        self._unlent_s = 0.0
        """Seconds for which the trainers have waited since the guests last had their devices."""
        self._change_s = 0.0
        """Seconds that it last took to give the guests the devices and to take them back."""

    async def hand_to_engines(self) -> float:
        """Let rollouts start or continue; returns the transition's seconds."""
        self._rolling_out = True
        return await self._hand_over()

    async def hand_to_trainer(self, *, idle: bool = False) -> float:
        """Pause rollouts and everything in flight at a token boundary; returns the transition's seconds.

        Args:
            idle: True if nothing is in flight. Engines with devices of their own then need not pause.
        """
        if idle and not self._trainers:
            return 0.0
        self._rolling_out = False
        return await self._hand_over()

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[None]:
        """Lend the engines the devices while the body runs."""
        self._loans += 1
        try:
            await self._hand_over()
            yield
        finally:
            self._loans -= 1
            await self._hand_over()

    @contextlib.asynccontextmanager
    async def trainers_wait(self) -> AsyncIterator[None]:
        """Let guests decode on the trainers' devices while the body runs, if it waits at all and that is likely to be
        longer than the change takes.

        The last wait and the last change are the estimates. An estimate that forbids lending is not measured again, so
        that one slow change could end all lending: guests also get the devices when the waits since they last had
        them sum to `_RETRY` changes. If nothing has become faster, that costs 1 / `_RETRY` of the time waited.
        """
        guests, began, changes_s = self._guests, self._clock(), list[float]()
        if guests is None:
            yield
            return

        async def change(hand_over: Callable[[], Awaitable[float]]) -> None:
            # The entry says that the handover has begun, even if it fails, so that it is undone below.
            changes_s.append(0.0)
            changes_s[-1] = await hand_over()

        # Before the first wait this is true: the estimate begins at infinity.
        worth_it = self._waited_s > self._change_s or self._unlent_s > _RETRY * self._change_s
        lending = asyncio.create_task(change(guests.hand_to_engines)) if worth_it else None
        try:
            yield
        finally:
            self._waited_s = self._clock() - began
            self._unlent_s += self._waited_s
            if lending is not None:
                if not changes_s:  # the body did not wait
                    lending.cancel()
                await ended(lending)
            if changes_s:
                await change(guests.hand_to_trainer)
                self._change_s, self._unlent_s = sum(changes_s), 0.0
        # Raise the handover's own error, if any, only after the devices are back.
        if lending is not None and not lending.cancelled():
            lending.result()

    @contextlib.asynccontextmanager
    async def start_engine(self, *, guest: bool = False) -> AsyncIterator[None]:
        """Wait until the engines have the devices, and keep them while the body starts an engine.

        vLLM refuses to start if too little memory is free, and mistakes memory that the trainer allocates or frees
        meanwhile for its own.

        Args:
            guest: the engine is a guest on the trainers' devices.
        """
        if guest and self._guests is not None:
            async with self._guests.start_engine():
                yield
            return
        if not self._trainers:
            yield
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._holder == "engines")
            self._starting += 1
        try:
            yield
        finally:
            async with self._changed:
                self._starting -= 1
                self._changed.notify_all()

    async def free_devices(self) -> None:
        """Free the devices for a restarting trainer, which begins with all its state on them."""
        self._rolling_out = False
        if self._guests is not None:
            await self._guests.free_devices()
        if self._trainers:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._starting)
                self._holder = None
                await self._timed("sleep", self._engines.sleep())

    def pop_metrics(self) -> dict[str, float]:
        """Return `transition/<name>_s`, the seconds of each transition since the last call."""
        metrics = {f"transition/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics | (self._guests.pop_metrics() if self._guests is not None else {})

    async def _hand_over(self) -> float:
        """Hand the devices to the side that needs them.

        Returns:
            Seconds that the transition took, excluding the wait for engines that were starting on the devices.
        """

        def target() -> str:
            return "engines" if self._rolling_out or self._loans else "trainer"

        async with self._changed:
            # An engine that starts measures free memory, so the trainer must not allocate any until it has.
            await self._changed.wait_for(lambda: target() == "engines" or not self._starting)
            # The target is read again under the lock: it may have changed while this waited. Until the transition has
            # succeeded the holder is unknown, so that the next one repeats all of its calls.
            new_holder, old_holder, began = target(), self._holder, self._clock()
            self._holder = None
            if new_holder == old_holder:
                pass
            elif not self._trainers:
                if new_holder == "trainer":
                    await self._timed("pause", self._engines.pause())
                elif old_holder != "both":
                    await self._timed("resume", self._engines.resume())
            elif new_holder == "trainer":
                await self._timed("sleep", self._engines.sleep())
                for trainer in self._trainers:
                    await self._timed("onload", trainer.onload())
            else:
                for trainer in self._trainers:
                    await self._timed("offload", trainer.offload())
                if old_holder != "both":
                    await self._timed("wake", self._engines.wake())
            self._holder = new_holder
            self._changed.notify_all()
            return self._clock() - began

    async def _timed(self, name: str, work: Awaitable[object]) -> None:
        began = self._clock()
        try:
            await work
        finally:
            self._seconds[name] += self._clock() - began


def shares_devices(
    placement: Placement, *, ranks: int, engines: int, decodes_while_training: bool, num_gpus: int | None = None
) -> bool:
    """Decide whether the trainer's ranks and the engines share devices.

    Args:
        engines: number of devices of all engines.
        decodes_while_training: True if the schedule decodes while training.
        num_gpus: number of GPUs; this machine's by default.

    Raises:
        ConfigError: there are too few GPUs for separate devices, and they must not be shared.
    """
    needed = ranks + engines
    num_gpus = gpus() if num_gpus is None else num_gpus
    # Without GPUs, everything runs on CPU, and no device can be short.
    if 0 < num_gpus < needed and (placement == "separate" or (placement == "auto" and decodes_while_training)):
        share = "--schedule.kind pipelined" if decodes_while_training else "--placement colocated"
        raise ConfigError(
            f"{ranks} trainer ranks and {engines} engine devices need {needed} separate GPUs, but there are {num_gpus}",
            hint=f"choose {share}, or fewer --trainer.ranks or --generator.replicas, or a lower "
            "--generator.tensor-parallel-size or --generator.data-parallel-size",
        )
    return placement == "colocated" or (placement == "auto" and 0 < num_gpus < needed)
