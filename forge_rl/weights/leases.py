"""Leases: a version is kept while a process reads it, and until that process ends at the latest."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_rl.errors import ForgeError
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.transports.protocol import Transport
from forge_rl.weights.transports.shared_memory import ask


@dataclass(frozen=True)
class Holder:
    """A process that leases versions."""

    pid: int
    namespace: str
    """Namespace of process ids, and the machine's boot: elsewhere the same pid is another process."""

    @staticmethod
    def this_process() -> Holder:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Holder(os.getpid(), f"{boot} {os.readlink('/proc/self/ns/pid')}")


@contextlib.asynccontextmanager
async def leased(call: Callable[..., Awaitable[Any]], version: int | None) -> AsyncIterator[Manifest]:
    """Lease a version, the latest by default, from the index that `call` asks, while the body runs."""
    lease = secrets.token_hex(8)
    try:
        yield await call("lease", version, lease, Holder.this_process())
    finally:  # also if the answer was not waited for
        with contextlib.suppress(ForgeError):  # a store that has died holds no leases, and the next call tells
            await call("release", lease)


class WeightReader:
    """Leases and reads versions in any process of the run; it pickles.

        async with reader.lease() as manifest:
            async for bucket in reader.transport.fetch(manifest): ...

    Args:
        index: actor that keeps the index of versions.
        transport: transport of the process's host.
        deadline_s: for each answer of the index.
    """

    def __init__(self, index: Any, transport: Transport, deadline_s: float) -> None:
        self._index = index
        self._deadline_s = deadline_s
        self.transport = transport

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Manifest]:
        """Keep a version and give its manifest, as `WeightStore.lease` does.

        Raises:
            WeightsError: there is no such version, or the store does not answer.
        """
        async with leased(self._call, version) as manifest:
            yield manifest

    async def _call(self, method: str, *args: object) -> Any:
        return await ask(self._index, method, *args, what="the index of weights", deadline_s=self._deadline_s)
