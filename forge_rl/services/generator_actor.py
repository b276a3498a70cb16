"""The actor of a Generator's replica: one decode engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

from monarch.actor import concurrent_endpoint

from forge_rl.engines.factory import start_decode_engine
from forge_rl.engines.protocol import DecodeEngine, DecodeSettings
from forge_rl.runtime.service import ServiceActor
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.types import Chunk, Sampling
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transports.protocol import Transport


class GeneratorActor(ServiceActor):
    """One engine in a process of its own."""

    def __init__(self, config: GeneratorConfig, model: Path, seed: int, name: str) -> None:
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

    def stream(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Decode one completion, chunk by chunk."""
        return self.engine.stream(prompt_ids, sampling)

    @concurrent_endpoint
    async def load(self, manifest: Manifest, transport: Transport) -> LoadReport:
        """Fetch a version and put it into the engine, bucket by bucket."""
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            return await self.engine.load(manifest, buckets, reader=self._name)

    @concurrent_endpoint
    async def serve_model(self) -> None:
        """Serve the weights of the model's folder; see Generator.serve_model."""
        await self.engine.serve_model()

    @concurrent_endpoint
    async def pause(self) -> None:
        """Stop decoding; see Generator.pause."""
        await self.engine.pause()

    @concurrent_endpoint
    async def resume(self) -> None:
        """Decode again; see Generator.resume."""
        await self.engine.resume()

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Free memory; see Generator.sleep."""
        await self.engine.sleep()

    @concurrent_endpoint
    async def wake(self) -> None:
        """Decode again; see Generator.wake."""
        await self.engine.wake()

    @property
    def engine(self) -> DecodeEngine:
        """The engine, once setup has run."""
        assert self._engine is not None, "setup comes first"
        return self._engine
