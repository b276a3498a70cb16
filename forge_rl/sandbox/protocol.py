"""Protocols of a pool of sandboxes and of its sessions, whether on this machine, behind HTTP or rented."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self

from forge_rl.sandbox.limits import Limits, Result


class SandboxSession(Protocol):
    """A session that runs cells one at a time and keeps their state; `forge_rl.sandbox.PoolSession` says more.

    All methods raise `SandboxError` if the sandbox fails, or cannot do this; a cell that fails is a `Result`.
    """

    @property
    def limits(self) -> Limits:
        """Limits of the session and of its cells, as far as this kind of sandbox enforces them."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it takes another cell, as far as is known."""
        ...

    async def run(self, code: str, *, wall_s: float | None = None, cpu_s: float | None = None) -> Result:
        """Run a cell of Python."""
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        ...

    async def get(self, path: str) -> bytes:
        """Read a file."""
        ...

    async def fork(self) -> SandboxSession:
        """Return an independent copy, which the caller closes."""
        ...

    async def restore(self) -> None:
        """Go back to the state before the latest cell."""
        ...

    async def close(self) -> None:
        """End the session."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *raised: object) -> None: ...


class SandboxPool(Protocol):
    """Opens sessions; `forge_rl.sandbox.Pool`, `RemotePool`, `E2BPool` and `DockerPool` do.

    async def answer(pool: SandboxPool, code: str) -> str | None:
        async with pool.session() as session:
            return (await session.run(code)).value
    """

    async def open(
        self, *, limits: Limits | None = None, undo: bool = False, wait_s: float | None = None
    ) -> SandboxSession:
        """Open a session, which its caller closes."""
        ...

    def session(
        self, *, limits: Limits | None = None, undo: bool = False, wait_s: float | None = None
    ) -> AbstractAsyncContextManager[SandboxSession]:
        """Open a session for a block of code."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *raised: object) -> None: ...
