"""The pool that all users of one event loop share, and one line to run untrusted code in it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from forge_rl.sandbox.host import check_layers
from forge_rl.sandbox.limits import Limits, Result
from forge_rl.sandbox.pool import Pool, Profile
from forge_rl.system.cpus import cpu_cores


async def run_code(code: str, *, limits: Limits | None = None) -> Result:
    """Run untrusted Python in a fresh session on this machine, instead of with `eval`, `exec` or an import.

        async def score(task: Task, text: str) -> float:
            result = await run_code(text)
            return float(result.error is None and result.stdout.strip() == task.truth["output"])

    Nothing that the code may know or decide should be in the same session: not the expected output, not the tests.

    Args:
        limits: instead of the defaults of `Limits`.

    Raises:
        SandboxError: this machine cannot isolate sessions, is full, or the sandbox failed; never the code's own error,
            which is in the result.
    """
    pool = await shared_pool()
    async with pool.session(limits=limits) as session:
        return await session.run(code)


async def shared_pool(packages: Sequence[str] = (), profile: Profile | None = None, images: str = "") -> Pool:
    """Return the pool of the running event loop, opened on first use; it closes when the loop ends.

    Args:
        packages: folders of packages, as for `Pool`; each set of them has a pool of its own.
        profile: profile of the pool, each of which has its own; None for `default_profile()`.
        images: folder of a store of images, as for `Pool`; each has a pool of its own.

    Raises:
        SandboxError: this machine cannot isolate sessions, or the pool did not start.
    """
    loop, pools, profile = asyncio.get_running_loop(), _pools(), profile or default_profile()
    # A key holds its loop: entries of closed loops would keep their pools forever.
    for pool_key in [pool_key for pool_key in pools if pool_key[0].is_closed()]:
        pools.pop(pool_key, None)
    entry = pools.get(key := (loop, tuple(packages), profile, images))
    # A pool that failed to start is tried again by the next caller.
    if entry is None or entry.holder.done():
        opened: asyncio.Future[Pool] = loop.create_future()
        entry = pools[key] = _PoolEntry(opened, loop.create_task(_hold(opened, packages, profile, images)))
    # One caller that is cancelled must not cancel the start that all wait for.
    return await asyncio.shield(entry.opened)


def default_profile() -> Profile:
    """Return `standard`, the cheapest profile, for root; for other users `strict`, which does not need root."""
    return "standard" if os.geteuid() == 0 else "strict"


def check_shared_pool() -> None:
    """Check that `shared_pool` can isolate sessions here, before anything needs it.

    Raises:
        SandboxError: this machine lacks a layer of isolation.
    """
    check_layers(default_profile())


@contextlib.asynccontextmanager
async def a_cpu_of_shared_pool(profile: Profile | None = None) -> AsyncIterator[Pool]:
    """Yield the shared pool of a profile to as many users at a time as there are cores for this process, so that their
    time limits are fair."""
    pool = await shared_pool(profile=profile)
    async with _pools()[asyncio.get_running_loop(), (), profile or default_profile(), ""].cpus:
        yield pool


def pop_opened_sessions() -> dict[str, float]:
    """Return how many sessions were opened since the last call in this event loop's shared pools: warm ones, and
    fresh ones.

    pop_opened_sessions()  # {"sandbox/warm": 62.0, "sandbox/fresh": 2.0}
    """
    counts: Counter[str] = Counter()
    for (loop, *_), entry in _pools().items():
        if loop is asyncio.get_running_loop() and entry.opened.done() and entry.opened.exception() is None:
            pool = entry.opened.result()
            counts += pool.opened - entry.counts_by_kind
            entry.counts_by_kind.update(pool.opened - entry.counts_by_kind)
    return {f"sandbox/{kind}": float(counts[kind]) for kind in ("warm", "fresh")} if counts else {}


@dataclass(frozen=True)
class _PoolEntry:
    opened: asyncio.Future[Pool]
    holder: asyncio.Task[None]
    counts_by_kind: Counter[str] = field(default_factory=Counter)
    """Opened sessions already returned, by kind."""
    cpus: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(cpu_cores()))


@functools.lru_cache(maxsize=1)
def _pools() -> dict[tuple[asyncio.AbstractEventLoop, tuple[str, ...], Profile, str], _PoolEntry]:
    return {}


async def _hold(opened: asyncio.Future[Pool], packages: Sequence[str], profile: Profile, images: str) -> None:
    """Keep a pool open until the event loop ends, which cancels this task."""
    try:
        async with Pool(packages=packages, profile=profile, images=images) as pool:
            opened.set_result(pool)
            await asyncio.get_running_loop().create_future()
    except Exception as error:
        if opened.done():
            raise
        opened.set_exception(error)
