"""A pool of sandboxes that tests share, in an event loop of its own thread."""

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import threading
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from forge_rl.sandbox import CellError, Limits, Pool, PoolSession, Result, SandboxError, shared_pool
from forge_rl.sandbox.images import ContainerImage
from forge_rl.sandbox.inside.commands import bubblewrap
from forge_rl.sandbox.pool import Profile

T = TypeVar("T")
needs_bubblewrap = pytest.mark.skipif(bubblewrap() is None, reason="this machine has no bubblewrap")
LIMITS = Limits(wall_s=20, memory_bytes=96 << 20, processes=24, scratch_bytes=4 << 20, scratch_files=64)


_AS_A_CELL = """
import ast, json, sys
answer, tree, space = {"value": None, "error": None}, ast.parse(sys.argv[1]), {"__name__": "__main__"}
last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
try:
    exec(compile(tree, "cell", "exec"), space)
    value = last and eval(compile(last, "cell", "eval"), space)
    answer["value"] = None if value is None else repr(value)
except BaseException as error:
    answer["error"] = type(error).__name__, str(error)
print(json.dumps(answer), file=sys.__stderr__)
"""
"""A program that runs its argument like a cell, and whose last line of stderr is what came of it."""


class SharedPool:
    """Runs coroutines beside an open pool."""

    def __init__(
        self,
        profile: str,
        *,
        image: ContainerImage | None = None,
        python: Sequence[str] = ("python3",),
        **settings: Any,
    ) -> None:
        self.profile = profile
        self.image = image
        """What all sessions see as their root."""
        self.python = python
        without = [] if os.geteuid() == 0 else ["cgroup"]
        mine = {"profile": profile, "limits": LIMITS, "warm": 2, "sessions": 64, "servers": 1, "without": without}
        self.settings = mine | settings
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)

    @property
    def has_network(self) -> bool:
        """Whether programs have a loopback of their own."""
        return self.image is not None and self.profile == "process"

    def open(self) -> None:
        self.thread.start()
        self.stop = self.run(self._event())
        opened: asyncio.Future[Pool] = self.run(self._future())
        self.holding = asyncio.run_coroutine_threadsafe(self._hold(opened), self.loop)
        self.pool = self.run(self._wait(opened))
        if self.image is not None:  # all sessions that tests open
            self.pool.open = functools.partial(self.pool.open, image=self.image)  # type: ignore[method-assign]
            self.pool.session = functools.partial(self.pool.session, image=self.image)  # type: ignore[method-assign]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.holding.result(60)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def cell(self, code: str, limits: Limits | None = None, **bounds: Any) -> Result:
        """Run one cell in a fresh session; in the profile `process`, as a program of its own."""

        async def work() -> Result:
            async with self.pool.session(limits=limits) as session:
                return await self.run_in(session, code, **bounds)

        return self.run(work())

    async def run_in(self, session: PoolSession, code: str, **bounds: Any) -> Result:
        if self.profile != "process":
            return await session.run(code, **bounds)
        result = await session.run([*self.python, "-c", _AS_A_CELL, code], **bounds)
        if result.error is not None:
            return result
        try:
            answer = json.loads(result.stderr.splitlines()[-1])
        except (IndexError, ValueError):
            return replace(result, error=CellError(name="Ended", message=f"{result.status} {result.stderr}"))
        error = answer["error"] and CellError(name=answer["error"][0], message=answer["error"][1])
        return replace(result, value=answer["value"], error=error)

    def value(self, code: str) -> str | None:
        """Run one cell in a fresh session, which must succeed."""
        result = self.cell(code)
        assert result.error is None, result.error.traceback
        return result.value

    def refused(self, code: str) -> str:
        """Run one cell that must fail with an error of the system; return its class."""
        result = self.cell(code)
        assert result.error is not None, f"got through: {result.value} {result.stdout}"
        return result.error.name

    async def _hold(self, opened: "asyncio.Future[Pool]") -> None:
        try:
            async with Pool(**self.settings) as pool:
                opened.set_result(pool)
                await self.stop.wait()
        except SandboxError as error:
            if opened.done():
                raise
            opened.set_exception(error)

    async def _event(self) -> asyncio.Event:
        return asyncio.Event()

    async def _future(self) -> "asyncio.Future[Pool]":
        return self.loop.create_future()

    async def _wait(self, work: Awaitable[T]) -> T:
        return await work


def opened_pool(profile: str, **settings: Any) -> Iterator[SharedPool]:
    """Open a shared pool; skip where this machine cannot isolate sessions."""
    shared = SharedPool(profile, **settings)
    try:
        shared.open()
    except SandboxError as error:
        shared.close()
        pytest.skip(str(error))
    try:
        yield shared
    finally:
        shared.close()


def loop_with_pool(profile: Profile = "standard") -> Iterator[asyncio.Runner]:
    """An event loop with an open `shared_pool`, as a process of a run has; skips where sessions cannot be isolated."""
    with asyncio.Runner() as runner:
        try:
            runner.run(shared_pool(profile=profile))
        except SandboxError as error:
            pytest.skip(str(error))
        yield runner


async def kill_servers(profile: Profile = "standard", packages: Sequence[str] = ()) -> None:
    """Kill the servers of the shared pool, and wait until it knows: until then, it may give away their sessions."""
    hosts = list((await shared_pool(packages, profile=profile)).hosts)
    for host in hosts:
        os.kill(host.process.pid, signal.SIGKILL)
    while not all(host.lost for host in hosts):  # noqa: ASYNC110 -- a host has no event for it
        await asyncio.sleep(0.01)


def only_pytest(folder: Path) -> Path:
    """Copy pytest and what it needs into a folder of packages, without the plugins that slow its start."""
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging"):
        shutil.copytree(Path(pytest.__file__).parents[1] / name, folder / name)
    return folder


def left_in_cgroups(name: str = "forge_rl-sandbox") -> list[Path]:
    """Folders of sandbox servers' cgroups."""
    from forge_rl.sandbox.inside import cgroups

    found = []
    for one in cgroups.here():
        with contextlib.suppress(OSError):
            found += [path for path in Path(one.folder).iterdir() if path.name.startswith(name)]
    return found


__all__ = [
    "LIMITS",
    "Limits",
    "Pool",
    "PoolSession",
    "Result",
    "SandboxError",
    "SharedPool",
    "kill_servers",
    "left_in_cgroups",
    "only_pytest",
    "loop_with_pool",
    "opened_pool",
]
