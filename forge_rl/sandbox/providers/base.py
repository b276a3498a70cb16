"""Base of all pools of rented sandboxes and their sessions: places, closing, and refusals."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, ClassVar, Generic, Self, TypeVar

from forge_rl.sandbox.limits import Limits, SandboxError
from forge_rl.sandbox.providers.web import WebClient

S = TypeVar("S", bound="ProviderSession")
T = TypeVar("T")
_CANCEL_S = 10.0
"""Time that a cancelled start gets to end, so that its sandbox can be ended."""


class ContainerEndedError(SandboxError):
    """The container has ended, while its provider answers: out of memory, or its first process was killed."""


class TransferError(SandboxError):
    """A file that a container does not have, or cannot take; the provider itself works."""


async def start_or_end(start: Coroutine[Any, Any, T], end: Callable[[T], Awaitable[None]]) -> T:
    """Start a container; if cancelled, end it first, as nobody would know of it and it would cost money for hours."""
    starting = asyncio.ensure_future(start)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                container = await starting
            await end(container)
        raise


class ProviderPool(ABC, Generic[S]):
    """Holds at most `sessions` open sessions of a provider; a subclass opens and ends them by its API."""

    UNITS: ClassVar[str]
    """Name for what sessions run in, for errors, such as "Docker's containers"."""
    sessions: int
    client: WebClient

    def _start(self, client: WebClient) -> None:
        self.client = client
        self._places = asyncio.Semaphore(self.sessions)
        self._open: set[S] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        # Of a copy, as each session that closes leaves the set.
        await asyncio.gather(*(session.close() for session in list(self._open)), return_exceptions=True)
        await self.client.close()

    @contextlib.asynccontextmanager
    async def session(
        self, *, limits: Limits | None = None, undo: bool = False, wait_s: float | None = None
    ) -> AsyncIterator[S]:
        """Open a session for a block of code; see `open`."""
        async with await self.open(limits=limits, undo=undo, wait_s=wait_s) as session:
            yield session

    async def open(self, *, limits: Limits | None = None, undo: bool = False, wait_s: float | None = None) -> S:
        """Start a session, which the caller closes.

        Raises:
            SandboxError: the provider cannot be reached or refuses, no place became free, or `undo` is asked for.
        """
        if undo:
            raise SandboxError(f"{self.UNITS} keep no earlier state", hint="open the session without undo")
        try:
            async with asyncio.timeout(wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise SandboxError(
                f"all {self.sessions} sessions are open, and none was closed within {wait_s:g} s",
                hint=f"close sessions, or raise {type(self).__name__}(sessions=...)",
            ) from None
        try:
            session = await self._opened(limits)
        except BaseException:
            self._places.release()
            raise
        self._open.add(session)
        return session

    async def give_back(self, session: S) -> None:
        """End a session; if the provider cannot be reached, the session ends after `idle_s` without use."""
        if session not in self._open:
            return
        # Before the request: a session that is closed twice must not free two places.
        self._open.remove(session)
        try:
            with contextlib.suppress(SandboxError):
                await self._end(session)
        finally:
            self._places.release()

    @abstractmethod
    async def _opened(self, limits: Limits | None) -> S:
        """Start a session; one that fails or is cancelled leaves nothing."""

    @abstractmethod
    async def _end(self, session: S) -> None:
        """End a session at the provider."""


class ProviderSession:
    """A session of a `ProviderPool`. A subclass has the methods of `PoolSession`."""

    def __init__(self, pool: ProviderPool[Any], limits: Limits) -> None:
        self.limits = limits
        self.alive = True
        """Whether it takes another cell, as far as is known."""
        self._owner = pool
        self._lock = asyncio.Lock()

    async def fork(self) -> Self:
        """Refuse: sessions of providers cannot be forked.

        Raises:
            SandboxError: always.
        """
        raise SandboxError(f"{self._owner.UNITS} cannot be forked", hint="use forge_rl.sandbox.Pool")

    async def restore(self) -> None:
        """Refuse: sessions of providers keep no earlier state.

        Raises:
            SandboxError: always.
        """
        raise SandboxError(f"{self._owner.UNITS} keep no earlier state", hint="use forge_rl.sandbox.Pool")

    async def close(self) -> None:
        """End the session."""
        self.alive = False
        await self._owner.give_back(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.shield(self.close())

    def _check_alive(self) -> None:
        if not self.alive:
            raise SandboxError("the session has ended", hint="open another")

    def _check_size(self, path: str, data: bytes) -> None:
        if len(data) > self.limits.transfer_bytes:
            raise SandboxError(
                f"{path} has {len(data)} bytes", hint=f"Limits:transfer_bytes is {self.limits.transfer_bytes}"
            )
