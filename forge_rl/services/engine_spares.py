"""Spare engines, which stand by without requests and take the place of engines that die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.errors import ForgeError
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.runtime.supervision import Restart


@dataclass(frozen=True, kw_only=True)
class Spare:
    """An engine that stands by, or has just taken another one's place."""

    replica: Replica
    started: bool
    """True if its engine runs, asleep; False if its process has only imported what an engine needs."""
    since: float
    """When it became ready, on its clock."""


class EngineSpares:
    """Keeps spare engines ready: starts them one at a time while all engines serve, again after one was used or died.

    Args:
        service: service whose replicas have GeneratorActor's endpoints.
        spawn: spawns the spare with a given number.
        environment: returns the environment variables of the engine with a given index, for spares that have not
            started theirs.
        numbers: numbers of the spares, none of which is a replica's index.
        start_deadline_s: timeout of a spare's start.
        restart: how long to wait after spares that died one after another.
        host_of: returns the host that a spare must be on to take the place of the engine with a given index; None for
            any.
    """

    def __init__(
        self,
        service: Service,
        spawn: Callable[[int], Replica],
        environment: Callable[[int], Mapping[str, str]],
        *,
        numbers: Sequence[int],
        start_deadline_s: float,
        restart: Restart,
        host_of: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.environment = environment
        self._service = service
        self._spawn = spawn
        self._numbers = numbers
        self._start_deadline_s = start_deadline_s
        self._restart = restart
        self._host_of = host_of
        self._ready: dict[int, Spare] = {}
        """By number; some may have died since."""
        self._deaths = 0
        """Number of spares that died one after another."""

    @property
    def ready(self) -> int:
        """Number of spares that can take an engine's place now."""
        return sum(spare.replica.alive for spare in self._ready.values())

    def take(self, index: int) -> Spare | None:
        """Put a spare in the place of the dead engine with this index.

        Returns:
            The spare; None if none is ready, or the engine starts for the first time.
        """
        if index >= len(self._service.replicas):
            return None
        # On GPUs the spare takes over the dead engine's devices, so it must be on the same host.
        host = self._host_of(index)
        live_spares = [(number, spare.replica) for number, spare in self._ready.items() if spare.replica.alive]
        number = next((number for number, replica in live_spares if host in (None, replica.host)), None)
        if number is None:
            return None
        self._deaths = 0
        self._service.adopt(number, index)
        return self._ready.pop(number)

    async def keep(self) -> None:
        """Keep the spares ready, until cancelled."""
        while True:
            number = self._missing()
            if number is None:
                await self._service.change()
                continue
            # The dead spare's processes are gone before the next one with its number starts.
            await self._clear_away(number)
            await asyncio.sleep(self._restart.delay_s(self._deaths))
            try:
                await self._start(number)
            except ForgeError as error:
                # Each failed start lengthens the wait before the next one.
                self._deaths += 1
                if (replica := self._service.spares.get(number)) is not None and replica.alive:
                    self._service.mark_failed(replica, f"it did not start: {error.message}")

    async def _start(self, number: int) -> None:
        replica = self._spawn(number)
        await self._service.watch(replica, deadline_s=self._start_deadline_s)
        is_started = await replica.call("prepare", deadline_s=self._start_deadline_s)
        await replica.ask("stand_by", deadline_s=self._start_deadline_s)  # opens the link: now a hang is noticed
        self._ready[number] = Spare(replica=replica, started=is_started, since=replica.clock())
        self._service.stands_by(replica)

    async def _clear_away(self, number: int) -> None:
        """Clean up after the last spare with this number if it died, and count its death if it did not live long."""
        if (replica := self._service.spares.pop(number, None)) is not None:
            await self._service.processes.clean_up(replica)
        if (spare := self._ready.pop(number, None)) is not None:
            is_healthy = self._restart.recovered(spare.replica.clock() - spare.since)
            self._deaths = 1 if is_healthy else self._deaths + 1

    def _missing(self) -> int | None:
        """Return the number of a spare to start now, or None; while an engine is missing, that one comes first."""
        if not self._service.complete:
            return None
        # Spares that died are missing, too; `keep` cleans up after them first.
        spares = self._service.spares
        return next((number for number in self._numbers if number not in spares or not spares[number].alive), None)
