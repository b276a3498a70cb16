"""The Generator service: vLLM engines that decode, several replicas with least-loaded routing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import concurrent_endpoint

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.engines.platform import Dtype, cpu_cores, device_type, resolve_dtype
from forge_rl.errors import ConfigError, ForgeError, ModelError, ServiceError, WeightsError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Replica, Service, ServiceActor
from forge_rl.runtime.tasks import task_group
from forge_rl.services.weights import WeightStore
from forge_rl.types import Message, Sampling, Turn
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transport import Transport

if TYPE_CHECKING:
    from forge_rl.engines.vllm import VLLMEngine


class Generator:
    """Typed handle of the Generator service."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The generator: its engines, and how they sample."""

        replicas: int = 1
        """vLLM engines: one for each GPU that decodes, or some on a CPU."""
        dtype: Dtype = "auto"
        """Format of the engines' weights and activations. auto is bfloat16 on CUDA, float32 on CPU."""
        max_model_tokens: int = 1024
        """Longest prompt and answer together."""
        max_new_tokens: int = 16
        """Most tokens of one answer."""
        temperature: float = 1.0
        """Of training episodes; held-out tasks are answered greedily."""
        max_requests: int = 64
        """Most requests that one engine decodes at a time."""
        kv_cache_gib: float = 1.0
        """Room for keys and values of an engine on CPU; on CUDA it takes what memory_share leaves."""
        memory_share: float = 0.4
        """Share of a GPU's memory that an engine may take; trainer and engine may live on the same one."""
        eager: bool = False
        """No compilation and no CUDA graphs: starts sooner, decodes slower. Always so on CPU."""
        request_deadline_s: float = 900.0
        """Longest time for one answer."""

        def __post_init__(self) -> None:
            for flag, value, good, mend in (
                ("replicas", self.replicas, self.replicas >= 1, "1 or more"),
                ("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or more"),
                ("temperature", self.temperature, 0 < self.temperature < 10, "a value above 0, usually 1"),
                ("max-requests", self.max_requests, self.max_requests >= 1, "1 or more"),
                ("kv-cache-gib", self.kv_cache_gib, self.kv_cache_gib > 0, "a value above 0"),
                ("memory-share", self.memory_share, 0 < self.memory_share < 1, "a value between 0 and 1"),
                ("request-deadline-s", self.request_deadline_s, self.request_deadline_s > 0, "a value above 0"),
                (
                    "max-model-tokens",
                    self.max_model_tokens,
                    self.max_model_tokens > self.max_new_tokens,
                    f"more than the {self.max_new_tokens} new tokens",
                ),
            ):
                if not good:
                    raise ConfigError(f"--generator.{flag} is {value}", mend=f"set --generator.{flag} to {mend}")

    def __init__(self, config: Config, service: Service, tokenizer: Tokenizer) -> None:
        self.config = config
        self._service = service
        self._tokenizer = tokenizer
        self._load_deadline_s = 600.0
        self._pause_deadline_s = 120.0
        self.version: int | None = None
        """Version that all engines serve; None before the first load, and after one that failed."""
        self._refusal = "nothing was loaded yet"
        self.attested_in_place = 0.0
        """Share of the weights that the last load attested over the live parameters."""
        self.load_seconds: dict[str, float] = {}
        """Of each stage of the last load, by the slowest engine; see LoadReport."""

    @classmethod
    async def start(
        cls, config: Config, cluster: Cluster, faults: Faults, *, model: Path, seed: int, deadline_s: float
    ) -> Generator:
        """Spawn the engines. They serve nothing until the first load."""
        service = Service("generator", cluster, faults)

        async def start_one(index: int) -> None:
            replica = service.spawn(
                GeneratorActor,
                config,
                model,
                seed + index,
                f"generator replica {index}",
                env=_environment(config, index),
            )
            await service.watch(replica, deadline_s=deadline_s)
            await service.call(replica, "setup", deadline_s=deadline_s)

        async with task_group() as group:
            for index in range(config.replicas):
                group.create_task(start_one(index))
        return cls(config, service, Tokenizer(model))

    @property
    def sampling(self) -> Sampling:
        """How training episodes are drawn."""
        return Sampling(max_tokens=self.config.max_new_tokens, temperature=self.config.temperature)

    @property
    def dtype(self) -> str:
        """Format of the engines' weights, and so of published versions: "float32" or "bfloat16"."""
        return str(resolve_dtype(self.config.dtype)).removeprefix("torch.")

    def engines(self) -> dict[int, int]:
        """Index of each living engine, with the most requests that it decodes at a time."""
        return {replica.index: self.config.max_requests for replica in self._service.replicas if replica.alive}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
    ) -> Turn:
        """One answer. While the engines are paused it waits.

        Args:
            prompt_ids: everything that the model is shown.
            sampling: by default as training episodes are drawn.
            engine: index of the one that decodes; by default the one with the fewest requests in flight.

        Raises:
            WeightsError: no version was loaded yet, or the last load failed.
            ConfigError: prompt and answer can be longer than the engines take, or vLLM does not take such a request.
            ServiceError: the engine does not exist, or died.
        """
        chosen = sampling or self.sampling
        if self.version is None:
            raise WeightsError(f"the engines hold no weights: {self._refusal}", mend="load a version first")
        if len(prompt_ids) + chosen.max_tokens > self.config.max_model_tokens:
            raise ConfigError(
                f"a prompt of {len(prompt_ids)} tokens and {chosen.max_tokens} new ones exceed "
                f"{self.config.max_model_tokens}",
                mend="raise --generator.max-model-tokens, or choose tasks with shorter prompts",
            )
        request, deadline_s = ("generate", tuple(prompt_ids), chosen), self.config.request_deadline_s
        if engine is None:
            turn: Turn = await self._service.route(*request, deadline_s=deadline_s)
        else:
            turn = await self._service.call(self._replica(engine), *request, deadline_s=deadline_s)
        return turn

    async def pause(self) -> None:
        """Stop all living engines at a token boundary; requests are kept, and new ones wait.

        Raises:
            ServiceError: an engine died meanwhile, or did not stop in time.
        """
        await self._call_living("pause")

    async def resume(self) -> None:
        """Let all living engines go on; raises as pause does."""
        await self._call_living("resume")

    async def chat(
        self, message: str | Sequence[Message], *, max_tokens: int | None = None, temperature: float = 0.0
    ) -> str:
        """Ask the current policy something, with the model's chat template; greedy by default."""
        messages = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        sampling = Sampling(max_tokens=max_tokens or self.config.max_new_tokens, temperature=temperature)
        return (await self.generate(self._tokenizer.render(messages), sampling)).text

    async def load(self, store: WeightStore, version: int | None = None) -> int:
        """Load a version, the latest by default, into every engine.

        Requests may be in flight: they go on under the new version. Paused engines stay paused. Each engine attests
        what it read before it serves it. If one fails, all refuse requests until a later load succeeds.

        Returns:
            The version that the engines say they read.

        Raises:
            AttestationError: an engine holds other weights than the trainer published; names the tensors.
            WeightsError: the version cannot be read, or the engines read different ones.
        """
        async with store.lease(version) as manifest:
            try:
                async with task_group() as group:
                    loads = [
                        group.create_task(
                            self._service.call(
                                replica,
                                "load",
                                manifest,
                                store.transport(replica.host),
                                deadline_s=self._load_deadline_s,
                            )
                        )
                        for replica in self._service.replicas
                    ]
                reports: list[LoadReport] = [load.result() for load in loads]
                if any(report.version != manifest.version for report in reports):
                    read = [report.version for report in reports]
                    raise WeightsError(f"version {manifest.version} was to be loaded, and the engines read {read}")
            except BaseException:
                self.version = None
                self._refusal = f"loading version {manifest.version} failed"
                raise
        self.version = manifest.version
        self.attested_in_place = min(report.in_place for report in reports) / len(manifest.tensors)
        self.load_seconds = dict(max(reports, key=lambda report: sum(report.seconds.values())).seconds)
        return self.version

    def _replica(self, engine: int) -> Replica:
        for replica in self._service.replicas:
            if replica.index == engine:
                return replica
        raise ServiceError(
            f"there is no engine {engine}", service=self._service.name, mend=f"name one of {sorted(self.engines())}"
        )

    async def _call_living(self, method: str) -> None:
        async with task_group() as group:
            for replica in self._service.replicas:
                if replica.alive:
                    group.create_task(self._service.call(replica, method, deadline_s=self._pause_deadline_s))

    def take_busy_s(self) -> list[float]:
        """Seconds in which each engine had work, since this was last asked."""
        return self._service.take_busy_s()

    async def stop(self) -> None:
        """End the engines: first vLLM's own processes, then ours."""
        for replica in self._service.replicas:
            if replica.alive:
                with contextlib.suppress(ForgeError):  # what does not close in time is killed by Service.stop
                    await self._service.call(replica, "close", deadline_s=5.0)
        await self._service.stop()

    def __repr__(self) -> str:
        loads = ", ".join(f"{replica.index}: {replica.in_flight}" for replica in self._service.replicas)
        return f"Generator  version {self.version}  {self.dtype}  requests in flight by replica: {loads}"


class GeneratorActor(ServiceActor):
    """One engine."""

    def __init__(self, config: Generator.Config, model: Path, seed: int, name: str) -> None:
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
                mend="see logs/generator-*.log in the run folder for vLLM's own report",
            ) from error

    @concurrent_endpoint
    async def close(self) -> None:
        """End vLLM's processes."""
        if self._engine is not None:
            self._engine.close()

    @concurrent_endpoint
    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Turn:
        """One answer."""
        assert self._engine is not None, "setup comes first"
        return await self._engine.generate(prompt_ids, sampling)

    @concurrent_endpoint
    async def pause(self) -> None:
        """Stop decoding at a token boundary."""
        assert self._engine is not None, "setup comes first"
        await self._engine.pause()

    @concurrent_endpoint
    async def resume(self) -> None:
        """Go on decoding."""
        assert self._engine is not None, "setup comes first"
        await self._engine.resume()

    @concurrent_endpoint
    async def load(self, manifest: Manifest, transport: Transport) -> LoadReport:
        """Fetch a version and put it into the engine, bucket by bucket."""
        assert self._engine is not None, "setup comes first"
        async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
            return await self._engine.load(manifest, buckets, reader=self._name)


def _environment(config: Generator.Config, index: int) -> dict[str, str]:
    """Of an engine's process. In one process with its worker, an engine starts sooner and needs no inner messages."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device_type() == "cuda":
        import torch

        return env | {"CUDA_VISIBLE_DEVICES": str(index % torch.cuda.device_count())}
    threads = max(1, cpu_cores() // config.replicas)
    return env | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
