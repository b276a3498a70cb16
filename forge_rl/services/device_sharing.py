"""Devices that engines share with a trainer, and the engines there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from forge_rl.runtime.seats import ServiceHosts
from forge_rl.services.engine_pool import EnginePool, Lend, LendOne


@dataclass(frozen=True)
class Guests:
    """A generator's engines on the trainer's devices, which decode while the trainer waits; see `DeviceHandover`."""

    _pool: EnginePool

    async def sleep(self) -> None:
        """Free the devices; other engines resume the guests' requests."""
        await self._pool.send_guests_away()

    async def wake(self) -> None:
        """Decode again, with the version that the other engines serve."""
        await self._pool.bring_guests_back()

    pause, resume = sleep, wake


@dataclass(frozen=True, kw_only=True)
class DeviceSharing:
    """How engines share devices with a trainer."""

    trainer_hosts: ServiceHosts | None = None
    """Hosts of the guests, with the trainer's devices; by default the engines'."""
    lend: Lend = contextlib.nullcontext
    """Gives the engines their devices for a chat, if something else may hold them."""
    replace: LendOne = contextlib.nullcontext
    """Gives a replacement engine its devices once they are free, and reserves them while it starts."""
