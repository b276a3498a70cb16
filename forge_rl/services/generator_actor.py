"""The actor of a Generator replica: one decode engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import MappingProxyType

from monarch.actor import concurrent_endpoint

from forge_rl.engines.devices import device_type
from forge_rl.engines.factory import connect_decode_engine, import_decode_engine, start_decode_engine
from forge_rl.engines.protocol import DecodeEngine, DecodeSettings
from forge_rl.engines.remote import RemoteServer
from forge_rl.runtime.priority import low_priority
from forge_rl.runtime.service import ServiceActor
from forge_rl.system.variables import set_here
from forge_rl.token_arrays import Chunk, ScoredTokens, TokenIds
from forge_rl.types import Sampling
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transports.protocol import Transport


class GeneratorActor(ServiceActor):
    """One engine in its own process, or in a server that others run, called `name` in errors; see `DecodeEngine`."""

    def __init__(
        self, model: Path, settings: DecodeSettings, seed: int, name: str, server: RemoteServer | None = None
    ) -> None:
        self._model = model
        self._settings = settings
        self._seed = seed
        self._name = name
        self._server = server
        self._engine: DecodeEngine | None = None

    @concurrent_endpoint
    async def setup(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the engine; environment variables that differ from the process's are set first, for a spare."""
        set_here(environment)
        if self._server is not None:
            self._engine = await connect_decode_engine(self._server, self._settings)
            return
        self._engine = await start_decode_engine(self._model, self._settings, seed=self._seed)

    @concurrent_endpoint
    async def prepare(self) -> bool:
        """Get ready to replace another engine, at low priority. On CPU, start the engine and put it to sleep; on GPUs,
        whose memory is taken, only import its modules. Return whether the engine is started."""
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
        if self._engine is not None:
            self._engine.close()

    def stream(self, prompt_ids: TokenIds, sampling: Sampling, gather_s: float) -> AsyncGenerator[Chunk, None]:
        return self.engine.stream(prompt_ids, sampling, gather_s=gather_s)

    async def score(self, prompt_ids: TokenIds, token_ids: TokenIds, temperature: float, top_k: int) -> ScoredTokens:
        return await self.engine.score(prompt_ids, token_ids, temperature=temperature, top_k=top_k)

    @concurrent_endpoint
    async def load(self, manifest: Manifest, transport: Transport) -> LoadReport:
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            return await self.engine.load(manifest, buckets, reader=self._name)

    @concurrent_endpoint
    async def serve_model(self) -> None:
        await self.engine.serve_model()

    @concurrent_endpoint
    async def hold(self, paused: bool, asleep: bool) -> bool:
        return await self.engine.hold(paused=paused, asleep=asleep)

    @property
    def engine(self) -> DecodeEngine:
        """The engine, once setup has run."""
        assert self._engine is not None, "setup comes first"
        return self._engine
