"""The actor of a Generator replica: one decode engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from monarch.actor import concurrent_endpoint

from forge_rl.engines.cpu import chosen_interfaces
from forge_rl.engines.devices import device_type
from forge_rl.engines.factory import (
    DECODE_MODULES,
    Closable,
    connect_decode_engine,
    import_decode_engine,
    part_environment,
    start_decode_engine,
    start_following_part,
)
from forge_rl.engines.parts import BucketOnHosts, EnginePart
from forge_rl.engines.platform import open_store
from forge_rl.engines.protocol import DecodeEngine, DecodeSettings
from forge_rl.engines.remote import RemoteServer
from forge_rl.errors import ConfigError
from forge_rl.models.adapter_bytes import AdapterFiles
from forge_rl.runtime.addresses import HostNetwork, interface_towards, own_address
from forge_rl.runtime.priority import low_priority
from forge_rl.runtime.service import ServiceActor
from forge_rl.system.variables import set_here
from forge_rl.token_arrays import Chunk, ScoredTokens, TokenIds
from forge_rl.types import Sampling
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transports.protocol import TensorBucket, Transport


class GeneratorActor(ServiceActor):
    """One engine in its own process, or in a server that others run, called `name` in errors; see `DecodeEngine`."""

    MODULES: ClassVar[Sequence[str]] = DECODE_MODULES
    """Modules imported before a process for an engine is forked."""

    def __init__(
        self, model: Path, settings: DecodeSettings, seed: int, name: str, server: RemoteServer | None = None
    ) -> None:
        self._model = model
        self._settings = settings
        self._seed = seed
        self._name = name
        self._server = server
        self._engine: DecodeEngine | None = None
        self._following: Closable | None = None
        self._store: object | None = None
        """Where the workers of several hosts meet, if this is the first one."""

    @concurrent_endpoint
    async def network(self) -> HostNetwork:
        """Return how other hosts can reach this one."""
        return HostNetwork.of_this_host(chosen_interfaces())

    @concurrent_endpoint
    async def open_store(self, address: str) -> int:
        """Open the store at which the workers of all hosts meet, at an address of this host; return its port."""
        self._store, port = open_store(address)
        return port

    @concurrent_endpoint
    async def setup(
        self, environment: Mapping[str, str] = MappingProxyType({}), part: EnginePart | None = None
    ) -> None:
        """Start the engine, or this host's part of it.

        Environment variables that differ from the process's are set first, for a spare or a part.
        """
        # A spare or a part was spawned before it was known which engine's devices it gets.
        set_here(environment)
        if part is not None:
            local_address = own_address([part.address], may_be_public=part.may_be_public)
            set_here(part_environment(local_address, interface_towards(part.address)))
            # Only the first host's process has the engine; the others run workers that follow it.
            if part.number > 0:
                start = functools.partial(start_following_part, seed=self._seed, part=part)
                self._following = await asyncio.to_thread(start, part.folder, self._settings)
            else:
                self._engine = await start_decode_engine(part.folder, self._settings, seed=self._seed, part=part)
            return
        if self._server is not None:
            self._engine = await connect_decode_engine(self._server, self._settings)
            return
        self._engine = await start_decode_engine(self._model, self._settings, seed=self._seed)

    @concurrent_endpoint
    async def prepare(self) -> bool:
        """Get ready to replace another engine, at low priority. On CPU, start the engine and put it to sleep; on GPUs,
        whose memory is taken, only import its modules. Return whether the engine is started."""
        # Engines on the same host serve meanwhile, and need their cores.
        with low_priority():
            if device_type() != "cpu":
                await asyncio.to_thread(import_decode_engine)
                return False
            self._engine = await start_decode_engine(self._model, self._settings, seed=self._seed)
            await self._engine.hold(paused=False, asleep=True)
        return True

    async def stand_by(self) -> None:
        """Answer over the link, as a spare's first call."""

    @concurrent_endpoint
    async def close(self) -> None:
        for closable in (self._engine, self._following):
            if closable is not None:
                closable.close()

    def stream(self, prompt_ids: TokenIds, sampling: Sampling, gather_s: float) -> AsyncGenerator[Chunk, None]:
        return self.engine.stream(prompt_ids, sampling, gather_s=gather_s)

    async def score(
        self, prompt_ids: TokenIds, token_ids: TokenIds, temperature: float, top_k: int, adapter: str
    ) -> ScoredTokens:
        return await self.engine.score(prompt_ids, token_ids, temperature=temperature, top_k=top_k, adapter=adapter)

    @concurrent_endpoint
    async def load(self, manifest: Manifest, transport: Transport) -> LoadReport:
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            return await self.engine.load(manifest, buckets, reader=self._name)

    @concurrent_endpoint
    async def fetch(self, manifest: Manifest, transport: Transport) -> list[TensorBucket]:
        """Bring a version to this host and return its buckets, which stay while the caller holds its lease."""
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            return [bucket async for bucket in buckets]

    @concurrent_endpoint
    async def load_on_hosts(self, manifest: Manifest, fetched: Sequence[Sequence[TensorBucket]]) -> LoadReport:
        """Load a version into the workers of all hosts, each from what `fetch` returned on its own."""

        async def buckets() -> AsyncIterator[TensorBucket]:
            # Hosts copied the same manifest, so their buckets come in the same order.
            for copies in zip(*fetched, strict=True):
                yield BucketOnHosts(copies)

        return await self.engine.load(manifest, buckets(), reader=self._name)

    @concurrent_endpoint
    async def serve_model(self) -> None:
        await self.engine.serve_model()

    @concurrent_endpoint
    async def load_adapter(self, name: str, files: AdapterFiles) -> None:
        with contextlib.ExitStack() as stack:
            try:
                # Engines load adapters from folders; this one lasts as long as the load.
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="adapter-")))
                await asyncio.to_thread(files.write, folder)
            except OSError as error:
                # A full disk is not the engine's fault, which would be replaced by another that cannot write, either.
                raise ConfigError(
                    f"the adapter {name!r:.80} cannot be written for an engine: {error.strerror or error}",
                    hint="free space in the folder of temporary files, or name another in TMPDIR",
                ) from error
            await self.engine.load_adapter(name, folder)

    @concurrent_endpoint
    async def drop_adapter(self, name: str) -> None:
        await self.engine.drop_adapter(name)

    @concurrent_endpoint
    async def hold(self, paused: bool, asleep: bool) -> bool:
        return await self.engine.hold(paused=paused, asleep=asleep)

    @property
    def engine(self) -> DecodeEngine:
        """The engine, once setup has run."""
        assert self._engine is not None, "setup comes first"
        return self._engine
