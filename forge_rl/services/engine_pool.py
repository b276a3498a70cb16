"""Keeps a generator's engines in one state: the same version, paused or asleep together, replacements included."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from forge_rl.errors import ForgeError, ReplicaError, ServiceError, WeightsError
from forge_rl.models.adapter_bytes import AdapterFiles
from forge_rl.runtime.replica import Replica, ReplicaState
from forge_rl.runtime.service import Service
from forge_rl.services.engine_spares import EngineSpares
from forge_rl.services.weight_store import WeightStore
from forge_rl.system.tasks import task_group
from forge_rl.weights.manifest import LoadReport, Manifest

T = TypeVar("T")

Lend = Callable[[], AbstractAsyncContextManager[object]]
"""Opens a context in which the engines have their devices."""
LendOne = Callable[[int], AbstractAsyncContextManager[object]]
"""Opens a context in which the engine with the given index has its devices."""
CONTROL_DEADLINE_S = 60.0
"""Timeout of pausing, resuming and the like."""
_LOAD_DEADLINE_S = 600.0
_LOADED_BYTES_PER_S = 1e7
"""Minimum speed at which an engine loads a version, which other hosts may have to send first."""
_SILENT_S = 30.0
"""Time without a chunk after which a busy engine counts as unresponsive."""
_HELD_BYTES_PER_S = 5e8
"""Minimum speed at which an engine going to sleep moves its weights to host memory, including pinning."""


def load_deadline_s(manifest: Manifest) -> float:
    """Timeout of loading a version, which grows with its size."""
    return _LOAD_DEADLINE_S + manifest.bytes / _LOADED_BYTES_PER_S


@dataclass(frozen=True, kw_only=True)
class DesiredState:
    """State to which every engine is brought."""

    version: int | None = None
    """Version to serve, if any."""
    epoch: int = 0
    """Epoch of the store in which it was published: after a rollback, numbers are used again for other weights."""
    store: WeightStore | None = None
    """Store that holds the version; None for the weights in the model's folder."""
    paused: bool = False
    asleep: bool = False
    adapters: Mapping[str, AdapterFiles] = field(default_factory=dict)
    """Adapters to serve, by name."""


async def load_version(replica: Replica, manifest: Manifest, store: WeightStore) -> LoadReport:
    """Have an engine load a leased version; each of its hosts reads its own copy."""
    deadline_s = load_deadline_s(manifest)
    args: tuple[object, ...] = manifest, store.transport(replica.host)
    method = "load"
    # Each host fetches its own copy first; then the engine has the workers of all hosts load them together.
    if replica.ranks > 1:
        copies = await replica.call_ranks(
            "fetch", lambda rank: (manifest, store.transport(replica.hosts[rank])), deadline_s=deadline_s
        )
        method, args = "load_on_hosts", (manifest, copies)
    report: LoadReport = await replica.call(method, *args, deadline_s=deadline_s)
    return report


async def serve_model(replica: Replica) -> None:
    """Have an engine serve the weights in the model's folder."""
    await replica.call("serve_model", deadline_s=CONTROL_DEADLINE_S)


async def load_adapter(replica: Replica, name: str, files: AdapterFiles) -> None:
    """Have an engine load an adapter."""
    deadline_s = CONTROL_DEADLINE_S + len(files.weights) / _LOADED_BYTES_PER_S
    await replica.call("load_adapter", name, files, deadline_s=deadline_s)


async def drop_adapter(replica: Replica, name: str) -> None:
    """Have an engine forget an adapter."""
    await replica.call("drop_adapter", name, deadline_s=CONTROL_DEADLINE_S)


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """How an engine starts."""

    spawn: Callable[[int], Replica]
    """Spawns the processes of the engine with a given index."""
    set_up: Callable[[Replica, float], Awaitable[None]]
    """Starts an engine in running processes, within a number of seconds."""
    deadline_s: float
    """Timeout of the start."""


class EnginePool:
    """Brings all engines to one desired state; a replacement engine reaches it before it serves.

    Args:
        service: service whose replicas have GeneratorActor's endpoints.
        start: how an engine starts.
        spares: take the place of dead engines; kept ready from the first load on.
        weights_bytes: size of the model's weights, which extends the timeout of going to sleep.
        replace: gives an engine that starts in a live run its devices, possibly after a wait, and reserves them while
            it starts.
        remote: indices of engines in servers that others run, which need no devices here, and no spares.
        guests: indices of engines on devices of the trainer, which are away while it has them; they get no spares.
    """

    def __init__(
        self,
        service: Service,
        start: EngineStart,
        *,
        spares: EngineSpares,
        weights_bytes: int = 0,
        replace: LendOne = contextlib.nullcontext,
        remote: Container[int] = (),
        guests: Container[int] = (),
    ) -> None:
        self._service = service
        self._start = start
        self._hold_deadline_s = CONTROL_DEADLINE_S + weights_bytes / _HELD_BYTES_PER_S
        self._replace = replace
        self._remote = remote
        self._guests = guests
        self.spares = spares
        self._keeping: asyncio.Task[None] | None = None
        """Keeps the spares ready."""
        self._waiting = 0
        """Number of replacement engines waiting for their devices."""
        self._waits = asyncio.Event()
        """Set while any are waiting."""
        self.version: int | None = None
        """Version that all engines serve; None before the first load and after a failed load."""
        self.refusal = "nothing was loaded yet"
        """Reason for a missing version."""
        self.versions: list[int] = []
        """Versions in load order."""
        self.current = 0
        """Index of the current version in `versions`."""
        self._desired = DesiredState()
        self._ready: dict[int, Replica] = {}
        """Engines in the desired state, by index, which serve or are about to."""
        self._away: WeakKeyDictionary[Replica, DesiredState] = WeakKeyDictionary()
        """State in which engines went away."""
        self._holding = asyncio.Lock()
        self._loading_adapters = asyncio.Lock()
        self._chunk_at: WeakKeyDictionary[Replica, float] = WeakKeyDictionary()
        """Time of each engine's last chunk, on its clock."""

    @property
    def held(self) -> bool:
        """True while the engines are to be paused or asleep."""
        return self._desired.paused or self._desired.asleep

    def answers(self, *, loading: bool) -> bool:
        """Return whether a serving engine is idle, makes progress, or is paused or loading on purpose."""
        # Engines that are paused or loading send no chunks, and are healthy.
        if loading or self.held:
            return any(replica.serving for replica in self._service.replicas)
        return any(replica.serving and self._goes_on(replica) for replica in self._service.replicas)

    def note_progress(self, replica: Replica) -> None:
        """Record that an engine sent a chunk."""
        self._chunk_at[replica] = replica.clock()

    async def start_one(self, index: int) -> None:
        """Start the engine with an index, possibly in place of a dead one, and bring it to the desired state."""
        spare = None if index in self._remote or index in self._guests else self.spares.take(index)
        replica = spare.replica if spare is not None else self._start.spawn(index)
        if spare is None:
            await self._service.watch(replica, deadline_s=self._start.deadline_s)
        async with contextlib.AsyncExitStack() as stack:
            # The spare's engine runs already, asleep; it only has to reach the desired state.
            if spare is not None and spare.started:
                await self._bring(replica, DesiredState(asleep=True))
                return
            # Until the service is supervised, this is the run's own start, which gives all engines their devices.
            if (replica.incarnation or self._service.supervised) and index not in self._remote:
                await self._devices(stack, index)
            if spare is not None:
                await replica.call("setup", self.spares.environment(index), deadline_s=self._start.deadline_s)
            else:
                await self._start.set_up(replica, self._start.deadline_s)
            await self._bring(replica, DesiredState())

    async def _bring(self, replica: Replica, state: DesiredState) -> None:
        """Bring an engine from its state to the desired one, and add it to those that are ready."""
        has_weights = True
        while state != (desired := self._desired):  # it may change meanwhile
            # Held first: an engine that wakes without its weights must load them, even if the version is the same.
            if (desired.paused, desired.asleep) != (state.paused, state.asleep):
                has_weights = await self._hold(replica, desired) or desired.asleep
            has_changed = (desired.version, desired.epoch, desired.store) != (state.version, state.epoch, state.store)
            if desired.version is not None and (has_changed or not has_weights):
                await self._load(replica, desired.version, desired.store)
            await self._load_adapters(replica, state.adapters, desired.adapters)
            state = desired
        replica.link.deadlines.hold_streams(state.paused or state.asleep)
        self._ready[replica.index] = replica  # no await since the comparison: `each` will not miss it

    @contextlib.asynccontextmanager
    async def serving_next(self, version: int, store: WeightStore | None, *, epoch: int = 0) -> AsyncIterator[None]:
        """Set the version to serve while the body loads it into living engines; new engines load it themselves.

        Meanwhile tokens may be from the old or the new version. If all engines die, this waits for a replacement,
        unless the replacement itself waits for devices.

        Raises:
            ServiceError: no engine is left.
        """
        # Listed before the load: tokens of the new version are valid from the moment that the first engine has it.
        self.versions.append(version)
        self._desired = replace(self._desired, version=version, epoch=epoch, store=store)
        try:
            yield
            async with task_group() as group:
                # A replacement that waits for devices may be waiting for the caller to hand them over, so it is not
                # waited for.
                waits = [group.create_task(self._service.available()), group.create_task(self._waits.wait())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
        except BaseException:
            # Some engines may have the new weights, others the old ones: none may serve.
            self._desired = replace(self._desired, version=None, store=None)
            self.version, self.refusal = None, f"loading version {version} failed"
            raise
        # From here on, new requests must not get tokens of earlier versions.
        self.current, self.version = len(self.versions) - 1, version
        if self._keeping is None:  # not before: the run's own start comes first
            self._keeping = self._service.in_background(self.spares.keep(), None, "spares are no longer started")

    @property
    def adapters(self) -> Mapping[str, AdapterFiles]:
        """Adapters that all engines serve, or are about to, by name."""
        return self._desired.adapters

    async def load_adapter(self, name: str, files: AdapterFiles) -> None:
        """Load an adapter into all living engines; later ones load it before they serve.

        Raises:
            ConfigError, ModelError: the engines do not take it; those before it stay.
            ServiceError: no engine is left.
        """
        async with self._loading_adapters:
            before = self._desired.adapters
            self._desired = replace(self._desired, adapters={**before, name: files})
            try:
                await self.each("load_adapter", lambda replica: load_adapter(replica, name, files))
                await self._service.available()
            except BaseException:
                self._desired = replace(self._desired, adapters=before)
                raise

    async def drop_adapter(self, name: str) -> None:
        """Have all engines forget an adapter; requests in flight go on."""
        async with self._loading_adapters:
            adapters = {key: files for key, files in self._desired.adapters.items() if key != name}
            self._desired = replace(self._desired, adapters=adapters)
            await self.each("drop_adapter", lambda replica: drop_adapter(replica, name))

    async def _load_adapters(
        self, replica: Replica, state: Mapping[str, AdapterFiles], desired: Mapping[str, AdapterFiles]
    ) -> None:
        """Drop and load adapters until an engine has the desired ones."""
        for name in state.keys() - desired.keys():
            await drop_adapter(replica, name)
        for name, files in desired.items():
            # Adapters that are loaded again under their name are other files.
            if state.get(name) is not files:
                await load_adapter(replica, name, files)

    async def hold(self, **changes: Any) -> None:
        """Change `paused` or `asleep` in the desired state, and bring all living engines to it.

        Engines that dropped their weights to sleep reload their version when they wake.
        """
        async with self._holding:
            self._desired = desired = replace(self._desired, **changes)
            hold_args = desired.paused, desired.asleep
            # Deadlines stop before the engines pause and run again after all have resumed, so that no pause makes a
            # request late.
            if any(hold_args):
                self._hold_deadlines(True)
            have_weights = await self.each("hold", lambda replica: self._hold(replica, desired))
            # Weights that were dropped to sleep are loaded again, under a lease, before anything is decoded. A version
            # may have been loaded meanwhile, so the desired one is read again.
            desired = self._desired
            if not (all(have_weights) or desired.asleep or desired.store is None):
                store = desired.store
                async with store.lease(desired.version) as manifest:
                    await self.load(manifest, store)
            if not any(hold_args):
                self._hold_deadlines(False)

    async def send_guests_away(self) -> None:
        """Put the guests to sleep, and let other engines resume their requests."""
        async with self._holding:
            guests = [replica for index, replica in self._ready.items() if index in self._guests and replica.alive]
            for replica in guests:
                # First out of `_ready`, so that loads and holds of the others pass it by, then away, so that its
                # requests go on elsewhere; only then does it sleep.
                self._ready.pop(replica.index)
                self._service.send_away(replica, "the trainer needs its devices")
                self._away[replica] = asleep = replace(self._desired, asleep=True)
            await asyncio.gather(*(self._try(replica, "hold", self._hold(replica, asleep)) for replica in guests))

    async def bring_guests_back(self) -> None:
        """Wake the guests with the version that the other engines serve; a guest that fails counts as dead."""

        async def wake(replica: Replica) -> None:
            await self._bring(replica, self._away.pop(replica))
            if replica.state is ReplicaState.AWAY:  # it neither died nor left meanwhile
                self._service.set_state(replica, ReplicaState.SERVING)

        away_guests = [replica for replica in self._away if replica.state is ReplicaState.AWAY]
        await asyncio.gather(*(self._try(replica, "wake", wake(replica)) for replica in away_guests))

    async def _hold(self, replica: Replica, state: DesiredState) -> bool:
        """Pause an engine or put it to sleep; returns whether it has its weights."""
        has_weights: bool = await replica.call("hold", state.paused, state.asleep, deadline_s=self._hold_deadline_s)
        return has_weights

    async def _try(self, replica: Replica, action: str, work: Awaitable[object]) -> None:
        """Await an engine's work; if it fails, the engine counts as dead."""
        try:
            await work
        except ReplicaError:
            pass
        except ForgeError as error:
            self.mark_failed(replica, f"{action} failed: {error.message}")

    async def each(self, action: str, work: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """Do work with all engines; returns their results in order, omitting engines that died or failed.

        An engine that fails while another succeeds is replaced.

        Raises:
            ForgeError: one engine's error, if all raised one.
        """
        errors: list[tuple[Replica, ForgeError]] = []

        async def attempt(replica: Replica) -> list[T]:
            try:
                return [await work(replica)]
            except ReplicaError:
                pass
            except ServiceError as error:
                self.mark_failed(replica, f"{action} failed: {error.message}")
            except ForgeError as error:
                errors.append((replica, error))
            return []

        live_replicas = [replica for _, replica in sorted(self._ready.items()) if replica.alive]
        async with task_group() as group:
            calls = [group.create_task(attempt(replica)) for replica in live_replicas]
        results = [result for call in calls for result in call.result()]
        for replica, error in errors:
            # If no engine accepts it, the request is at fault and none is replaced; an engine that alone refuses is at
            # fault itself.
            if not results:
                raise error
            self.mark_failed(replica, f"{action} failed: {error.message}")
        return results

    async def load(self, manifest: Manifest, store: WeightStore) -> list[LoadReport]:
        """Load a leased version into all engines; see `each`."""
        return await self.each("load", lambda replica: load_version(replica, manifest, store))

    def mark_failed(self, replica: Replica, cause: str) -> ReplicaError:
        """Count an engine as dead and return the error to raise; its other requests fail with the same kind of
        error."""
        self._service.mark_failed(replica, cause)
        return ReplicaError(cause, service=self._service.name, replica=replica.index, hint=f"see {replica.log}")

    async def _devices(self, stack: contextlib.AsyncExitStack, index: int) -> None:
        """Wait for the devices of the replacement engine with an index, which has them until the stack is closed."""
        self._waiting += 1
        self._waits.set()
        try:
            await stack.enter_async_context(self._replace(index))
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._waits.clear()

    def _goes_on(self, replica: Replica) -> bool:
        """Return whether an engine is idle or sent a chunk recently."""
        last_s = max(self._chunk_at.get(replica, 0.0), replica.busy_since)
        return not replica.in_flight or replica.clock() - last_s < _SILENT_S

    def _hold_deadlines(self, is_held: bool) -> None:
        """Suspend request deadlines while the engines are paused."""
        for replica in self._ready.values():
            replica.link.deadlines.hold_streams(is_held)

    async def _load(self, replica: Replica, version: int, store: WeightStore | None) -> None:
        if store is None:
            await serve_model(replica)
            return
        async with store.lease(version) as manifest:
            report = await load_version(replica, manifest, store)
        if report.version != version:
            raise WeightsError(f"the engine read version {report.version} instead of {version}")
