"""Shared by providers with a package of their own: its import, deadlines, and bounded reading."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from types import ModuleType

from forge_rl.errors import check_installed
from forge_rl.sandbox.limits import CellError, Result, SandboxError, Usage
from forge_rl.sandbox.providers.base import TransferError
from forge_rl.sandbox.providers.owners import has_ended

OWNER = "forge-rl-owner"
"""Label of containers, whose value names the process that started them."""
IDLE_S = 7200
"""Time after which a container ends at its provider, even if this program is gone."""
START_S = 1800.0
"""Time to start a container, with the provider's first pull of its image."""
REQUEST_S = 300.0


def provider_package(name: str) -> ModuleType:
    """Import a provider's package.

    Raises:
        ConfigError: it is not installed.
    """
    check_installed(f"provider={name}", name, name)
    return importlib.import_module(name)


async def bounded(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """Return a stream's bytes.

    Raises:
        TransferError: there are more than `max_bytes`.
    """
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        if len(data) > max_bytes:
            raise TransferError(f"the file has more than {max_bytes} bytes")
    return bytes(data)


@contextlib.asynccontextmanager
async def asking(service: str, limit_s: float) -> AsyncIterator[None]:
    """Turn all failures of a provider's package within a block into errors that name it.

    Raises:
        SandboxError: the package raised, or did not answer in time.
    """
    try:
        async with asyncio.timeout(limit_s):
            yield
    except SandboxError:
        raise
    except TimeoutError:
        raise SandboxError(f"{service} did not answer within {limit_s:g} s") from None
    except Exception as error:  # packages raise what their clients, parsers and transports raise
        raise SandboxError(f"{service} failed: {type(error).__name__}: {str(error)[:300]}") from None


async def run_within(
    service: str, wall_s: float, work: Coroutine[None, None, Result], close: Callable[[], Awaitable[None]]
) -> Result:
    """Return the result of a command, and how long it took; end its container if it takes longer than `wall_s`.

    Raises:
        SandboxError: as `asking`.
    """
    began_s = time.perf_counter()
    try:
        async with asking(service, wall_s):
            result = await work
    except SandboxError:
        # Any failure past the deadline counts as the deadline's, whatever error the package made of it.
        if time.perf_counter() - began_s < wall_s:
            raise
        await close()
        result = Result(
            error=CellError(name="CellOverrun", message=f"the cell exceeded {wall_s:g} s: killed"),
            usage=Usage(wall_s=0),
        )
    return replace(result, usage=Usage(wall_s=time.perf_counter() - began_s))


class Sweeper:
    """Ends, once, the containers of processes of this machine that were killed."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._is_done = False

    async def sweep(
        self, listed: Callable[[], Awaitable[Iterable[tuple[str, str]]]], end: Callable[[str], Awaitable[None]]
    ) -> None:
        """End containers whose owner has ended.

        Args:
            listed: returns the names of containers and their owners.
            end: ends one.
        """
        async with self._lock:
            if self._is_done:
                return
            for name, owner in await listed():
                if has_ended(owner):
                    with contextlib.suppress(SandboxError):  # another process of this machine may be ending it
                        await end(name)
            self._is_done = True
