"""Base class of service actors."""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import Actor, concurrent_endpoint

from forge_rl.runtime.in_hand import RunningCalls
from forge_rl.runtime.link import LinkEnd
from forge_rl.runtime.processes import process_space


class ServiceActor(Actor):
    """Base class of service actors: endpoints are for `Replica.call`, plain methods for `ask` and `route`.

        class Adder(ServiceActor):
            async def add(self, a: int, b: int) -> int:
                return a + b

        total = await service.route("add", 1, 2, deadline_s=5)

    All endpoints are concurrent, as Monarch cannot mix concurrent and plain ones.
    """

    MODULES: ClassVar[Sequence[str]] = ()
    """Modules that a process of this host has already imported, which then forks the actor's process; if empty, the
    actor's process is executed."""

    @concurrent_endpoint
    async def process_id(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def process_space(self) -> str:
        return process_space()

    @concurrent_endpoint
    async def note_in_hand(self, path: Path) -> None:
        """Record the calls being executed in this file from now on; print all stacks to the log on SIGUSR2."""
        self._link_end.in_hand = RunningCalls(path)
        faulthandler.register(signal.SIGUSR2)  # works even while something holds the GIL

    @concurrent_endpoint
    async def link_post(self, messages: bytes) -> None:
        self._link_end.post(messages)

    @concurrent_endpoint
    async def link_collect(self, wait_s: float) -> bytes:
        return await self._link_end.collect(wait_s)

    @concurrent_endpoint
    async def receive_parcel(self, data: bytes, first: bool) -> None:
        """Receive a slice of a large value; see Replica.send."""
        if first:
            self._parcel.clear()
        self._parcel.append(data)

    def take_parcel(self) -> Any:
        """Return the last value sent by Replica.send."""
        data = b"".join(self._parcel)
        self._parcel.clear()
        return pickle.loads(data)

    @functools.cached_property  # subclasses have their own constructors
    def _parcel(self) -> list[bytes]:
        return []

    @functools.cached_property
    def _link_end(self) -> LinkEnd:
        return LinkEnd(self)
