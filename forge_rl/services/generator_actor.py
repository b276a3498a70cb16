"""The actor of a Generator's replica: one decode engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import concurrent_endpoint

from forge_rl.engines.factory import start_decode_engine
from forge_rl.engines.protocol import DecodeEngine, DecodeSettings
from forge_rl.runtime.service import ServiceActor
from forge_rl.types import Chunk, Sampling
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transports.protocol import Transport

if TYPE_CHECKING:
    from forge_rl.services.generator import Generator


class GeneratorActor(ServiceActor):
    """One engine."""

    def __init__(self, config: Generator.Config, model: Path, seed: int, name: str) -> None:
        self._name = name
        self._config = config
        self._model = model
        self._seed = seed
        self._engine: DecodeEngine | None = None

    @concurrent_endpoint
    async def setup(self) -> None:
        """Start the engine."""
        self._engine = await start_decode_engine(
            DecodeSettings(
                folder=self._model,
                dtype=self._config.dtype,
                max_model_tokens=self._config.max_model_tokens,
                max_requests=self._config.max_requests,
                kv_cache_bytes=int(self._config.kv_cache_gib * (1 << 30)),
                memory_share=self._config.memory_share,
                eager=self._config.eager,
                seed=self._seed,
            )
        )

    @concurrent_endpoint
    async def close(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            self._engine.close()

    async def stream(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """One answer, as it is decoded."""
        async with contextlib.aclosing(self.engine.stream(prompt_ids, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk

    @concurrent_endpoint
    async def load(self, manifest: Manifest, transport: Transport) -> LoadReport:
        """Fetch a version and put it into the engine, bucket by bucket."""
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            return await self.engine.load(manifest, buckets, reader=self._name)

    @concurrent_endpoint
    async def serve_model(self) -> None:
        """See Generator.serve_model."""
        await self.engine.serve_model()

    @concurrent_endpoint
    async def pause(self) -> None:
        """See Generator.pause."""
        await self.engine.pause()

    @concurrent_endpoint
    async def resume(self) -> None:
        """See Generator.resume."""
        await self.engine.resume()

    @concurrent_endpoint
    async def sleep(self) -> None:
        """See Generator.sleep."""
        await self.engine.sleep()

    @concurrent_endpoint
    async def wake(self) -> None:
        """See Generator.wake."""
        await self.engine.wake()

    @property
    def engine(self) -> DecodeEngine:
        """The engine, once setup has run."""
        assert self._engine is not None, "setup comes first"
        return self._engine
