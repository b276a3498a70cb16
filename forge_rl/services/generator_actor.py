"""The actor of a Generator's replica: one decoding engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import concurrent_endpoint

from forge_rl.engines.platform import cpu_cores, device_type, resolve_dtype
from forge_rl.errors import ModelError
from forge_rl.runtime.service import ServiceActor
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.types import Chunk, Sampling
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transports.protocol import Transport

if TYPE_CHECKING:
    from forge_rl.engines.vllm import VLLMEngine


class GeneratorActor(ServiceActor):
    """One engine in a process of its own."""

    def __init__(self, config: GeneratorConfig, model: Path, seed: int, name: str) -> None:
        self._name = name
        self._config = config
        self._model = model
        self._seed = seed
        self._engine: VLLMEngine | None = None

    @concurrent_endpoint
    async def setup(self) -> None:
        """Start vLLM."""
        from forge_rl.engines.vllm import VLLMEngine

        on_cpu = device_type() == "cpu"
        try:
            self._engine = await VLLMEngine.start(
                self._model,
                dtype=resolve_dtype(self._config.dtype),
                max_model_tokens=self._config.max_model_tokens,
                max_requests=self._config.max_requests,
                kv_cache_bytes=int(self._config.kv_cache_gib * (1 << 30)) if on_cpu else None,
                memory_share=self._config.memory_share,
                eager=self._config.eager,
                seed=self._seed,
            )
        except (ValueError, RuntimeError) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise ModelError(
                f"vLLM does not start with {self._model}: {lines[-1] if lines else type(error).__name__}",
                hint="see logs/generator-*.log in the run folder for vLLM's own report",
            ) from error

    @concurrent_endpoint
    async def close(self) -> None:
        """End vLLM's processes."""
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
    def engine(self) -> VLLMEngine:
        """The engine, once setup has run."""
        assert self._engine is not None, "setup comes first"
        return self._engine


def environment(config: GeneratorConfig, place: int) -> dict[str, str]:
    """Return the environment of an engine's process; on CUDA its GPU is the one at this place, in turn.

    In one process with its worker, an engine starts sooner and needs no inner messages.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device_type() == "cuda":
        import torch

        return env | {"CUDA_VISIBLE_DEVICES": str(place % torch.cuda.device_count())}
    threads = max(1, cpu_cores() // config.replicas)
    return env | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
