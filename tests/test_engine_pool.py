"""The pool of engines: what one engine alone fails at costs that engine. No process is started."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forge_rl.errors import ForgeError, WeightsError
from forge_rl.runtime.supervision import Restart
from forge_rl.services.engine_pool import DesiredState, EnginePool, EngineStart
from forge_rl.services.engine_spares import EngineSpares


class Engine:
    """Stands for a replica; raises what it is given."""

    alive, log = True, "engine.log"

    def __init__(self, index: int, error: ForgeError | None = None) -> None:
        self.index = index
        self.error = error

    async def call(self, method: str, *args: object, deadline_s: float) -> str:
        if self.error is not None:
            raise self.error
        return f"{method} {self.index}"


def pool_of(*engines: Engine) -> tuple[EnginePool, list[tuple[int, str]]]:
    failed: list[tuple[int, str]] = []
    service: Any = SimpleNamespace(name="generator", mark_failed=lambda each, cause: failed.append((each.index, cause)))
    spawn: Any = lambda index: pytest.fail("none is spawned")  # noqa: E731
    spares = EngineSpares(service, spawn, lambda index: {}, numbers=(), start_deadline_s=1.0, restart=Restart())
    pool = EnginePool(service, EngineStart(spawn=spawn, set_up=spawn, deadline_s=1.0), spares=spares)
    pool._ready = dict(enumerate(engines))  # type: ignore[arg-type]
    return pool, failed


async def load(engine: Any) -> str:
    loaded: str = await engine.call("load", deadline_s=1.0)
    return loaded


async def test_an_engine_that_alone_cannot_load_is_replaced():
    pool, failed = pool_of(Engine(0), Engine(1, WeightsError("a bucket is torn")), Engine(2))
    assert await pool.each("load", load) == ["load 0", "load 2"]
    assert failed == [(1, "load failed: a bucket is torn")]


async def test_what_no_engine_can_load_is_an_error_and_ends_none():
    pool, failed = pool_of(Engine(0, WeightsError("it is torn")), Engine(1, WeightsError("it is torn")))
    with pytest.raises(WeightsError, match="it is torn"):
        await pool.each("load", load)
    assert failed == []


async def test_an_engine_that_loads_in_a_rollback_loads_the_new_weights(
    monkeypatch: pytest.MonkeyPatch,
):
    pool, _ = pool_of()
    store: Any = object()
    loaded: list[tuple[int, int]] = []

    async def load(replica: object, version: int, source: object) -> None:
        loaded.append((version, pool._desired.epoch))
        # Meanwhile the store rolled back, and the version of that number was published again.
        pool._desired = DesiredState(version=5, epoch=1, store=store)

    monkeypatch.setattr(pool, "_load", load)
    pool._desired = DesiredState(version=5, epoch=0, store=store)
    deadlines = SimpleNamespace(hold_streams=lambda is_held: None)
    replica: Any = SimpleNamespace(index=0, link=SimpleNamespace(deadlines=deadlines))
    await pool._bring(replica, DesiredState())
    assert loaded == [(5, 0), (5, 1)]


async def test_engines_that_wake_without_weights_load_the_version_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _ = pool_of(Engine(0))
    leases: list[int] = []

    class Store:
        @contextlib.asynccontextmanager
        async def lease(self, version: int) -> AsyncIterator[None]:
            leases.append(version)
            yield

    async def hold(replica: object, desired: DesiredState) -> bool:
        pool._desired = replace(pool._desired, version=6)  # a version is published while the engine wakes
        return False

    async def load(manifest: object, store: object) -> None: ...

    monkeypatch.setattr(pool, "_hold", hold)
    monkeypatch.setattr(pool, "_hold_deadlines", lambda is_held: None)
    monkeypatch.setattr(pool, "load", load)
    store: Any = Store()
    pool._desired = DesiredState(version=5, store=store, asleep=True)
    await pool.hold(asleep=False)
    assert leases == [6]
