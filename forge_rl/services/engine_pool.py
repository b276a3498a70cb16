"""The engines of a generator, kept alike: all of one version, and all stopped or all going, also those brought back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge_rl.errors import ReplicaError, ServiceError, WeightsError
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.runtime.tasks import task_group
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.manifest import LoadReport

LOAD_DEADLINE_S = 600.0
"""For an engine to load a version."""
CONTROL_DEADLINE_S = 60.0
"""For an engine to stop at a token boundary and the like."""


@dataclass(frozen=True, kw_only=True)
class DesiredState:
    """What all engines are to be like."""

    version: int | None = None
    """Version to serve; None while there is none."""
    store: WeightStore | None = None
    """That holds the version; None for the weights of the model's folder."""
    paused: bool = False
    asleep: bool = False


class EnginePool:
    """Tells all engines the same, and those that are brought back before they serve.

    Args:
        service: of replicas with a GeneratorActor's endpoints.
        spawn: spawns the engine of an index; told whether it replaces a dead one.
        start_deadline_s: for an engine to start.
    """

    def __init__(self, service: Service, spawn: Callable[[int, bool], Replica], start_deadline_s: float) -> None:
        self._service = service
        self._spawn = spawn
        self._start_deadline_s = start_deadline_s
        self._wish = DesiredState()
        self._ready: dict[int, Replica] = {}
        """By index: engines that are as was wished. They serve, or are about to."""
        self._switching = asyncio.Lock()

    async def start(self, count: int) -> None:
        """Start so many engines."""
        replicas = [self._spawn(index, False) for index in range(count)]
        async with task_group() as group:
            for replica in replicas:
                group.create_task(self._make_ready(replica))

    async def bring_back(self, index: int) -> None:
        """Start an engine in place of a dead one and make it like the others."""
        await self._make_ready(self._spawn(index, True))

    @contextlib.asynccontextmanager
    async def becoming(self, version: int, store: WeightStore | None) -> AsyncIterator[None]:
        """The body makes all engines serve a version; those that are brought back from now on serve it too.

        If all die meanwhile, this waits for one that was brought back.

        Raises:
            ServiceError: no engine is left.
        """
        self._wish = replace(self._wish, version=version, store=store)
        try:
            yield
            await self._service.available()
        except BaseException:
            self._wish = replace(self._wish, version=None, store=None)
            raise

    async def switch(self, method: str, change: Callable[[DesiredState], DesiredState]) -> None:
        """Stop all engines or let them go on."""
        async with self._switching:
            self._wish = change(self._wish)
            await self.each(method, deadline_s=CONTROL_DEADLINE_S)

    async def each(
        self, method: str, args_of: Callable[[Replica], Sequence[object]] = lambda _: (), *, deadline_s: float
    ) -> list[Any]:
        """Call all engines; what they answer, in order. One that dies, or fails and so counts as dead, is left out.

        Raises:
            ForgeError: what an engine raised, if it was one.
        """

        async def one(replica: Replica) -> list[Any]:
            try:
                return [await replica.call(method, *args_of(replica), deadline_s=deadline_s)]
            except ReplicaError:
                return []
            except ServiceError as error:
                self.failed(replica, f"{method} failed: {error.message}")
                return []

        living = [replica for _, replica in sorted(self._ready.items()) if replica.alive]
        async with task_group() as group:
            calls = [group.create_task(one(replica)) for replica in living]
        return [answer for call in calls for answer in call.result()]

    def failed(self, replica: Replica, cause: str) -> ReplicaError:
        """Count an engine as dead; the error for whoever met it. What is in flight on it ends with one too."""
        self._service.mark_failed(replica, cause)
        return ReplicaError(cause, service=self._service.name, replica=replica.index, hint=f"see {replica.log}")

    async def _make_ready(self, replica: Replica) -> None:
        await self._service.watch(replica, deadline_s=self._start_deadline_s)
        await replica.call("setup", deadline_s=self._start_deadline_s)
        now = DesiredState()
        while now != (wish := self._wish):  # it may change meanwhile
            if wish.paused != now.paused:
                await self._control(replica, "pause" if wish.paused else "resume")
            if wish.asleep != now.asleep:
                await self._control(replica, "sleep" if wish.asleep else "wake")
            if wish.version is not None and (wish.version, wish.store) != (now.version, now.store):
                await self._load(replica, wish.version, wish.store)
            now = wish
        self._ready[replica.index] = replica  # nothing was awaited since that look: `each` will not miss it

    async def _load(self, replica: Replica, version: int, store: WeightStore | None) -> None:
        if store is None:
            await self._control(replica, "serve_model")
            return
        async with store.lease(version) as manifest:
            report: LoadReport = await replica.call(
                "load", manifest, store.transport(replica.host), deadline_s=LOAD_DEADLINE_S
            )
        if report.version != version:
            raise WeightsError(f"version {version} was to be loaded, and the engine read {report.version}")

    async def _control(self, replica: Replica, method: str) -> None:
        await replica.call(method, deadline_s=CONTROL_DEADLINE_S)
