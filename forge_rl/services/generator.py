"""The Generator service: vLLM engines that decode. Dead engines are replaced, and others resume their completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forge_rl.engines import EXIT_MEANINGS
from forge_rl.engines.architecture import stored_bytes
from forge_rl.engines.decode_layout import check_decode_layout
from forge_rl.engines.platform import resolve_dtype
from forge_rl.errors import (
    ConfigError,
    ReplicaError,
    WeightsError,
)
from forge_rl.models.adapter_bytes import AdapterFiles
from forge_rl.runtime.seats import ReplicaSize, Seats, ServiceHosts
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.runtime.supervisor import Supervisor
from forge_rl.services.completion import (
    GATHER_S,
    DraftCounts,
    Observer,
    ResumableCompletion,
)
from forge_rl.services.device_sharing import DeviceSharing, Guests
from forge_rl.services.engine_pool import EnginePool, EngineStart, Lend, serve_model
from forge_rl.services.engine_processes import EngineProcesses, seats_of
from forge_rl.services.engine_requests import EngineRequests
from forge_rl.services.generator_actor import GeneratorActor
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.non_finite import NonFiniteTokens
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.weight_store import WeightStore
from forge_rl.system.listeners import Listeners
from forge_rl.system.tasks import task_group
from forge_rl.token_arrays import ScoredTokens, TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Message, Sampling, Turn
from forge_rl.weights.manifest import LoadReport

_MAX_NAME = 128
"""Maximum characters of an adapter's name."""


async def _start_engines(processes: EngineProcesses, supervisor: Supervisor, count: int, deadline_s: float) -> None:
    # Engines are forked from a process that has imported their modules, which must be ready first.
    await processes.import_first(deadline_s)
    await supervisor.start(count)


class Generator:
    """Typed handle of the Generator service.

    generator = await Generator.start(Generator.Config(replicas=2), start, model=folder, seed=0)
    await generator.load(store)
    turn = await generator.generate(prompt_ids, Sampling(max_tokens=64))
    print(await generator.chat("What is 2 + 3?"))
    """

    Config: TypeAlias = GeneratorConfig

    def __init__(
        self,
        config: Config,
        service: Service,
        supervisor: Supervisor,
        seats: Seats,
        pool: EnginePool,
        tokenizer: Tokenizer,
        lend: Lend,
    ) -> None:
        self.config = config
        self._service = service
        self._supervisor = supervisor
        self._seats = seats
        self._pool = pool
        self._tokenizer = tokenizer
        self._lend = lend
        self._loading = asyncio.Lock()
        self._requests = EngineRequests(config, service, pool, tokenizer, lend)
        self.last_load: Sequence[LoadReport] = ()
        """Each engine's report of the last load."""
        self.load_s: dict[str, float] = {}
        """Seconds of each stage of the last load on the slowest engine, see `LoadReport.seconds`, and of the calls
        around them, including the lease; empty once `pop_metrics` has returned them."""

    @classmethod
    async def start(
        cls,
        config: Config,
        start: ServiceStart,
        *,
        model: Path,
        seed: int,
        sharing: DeviceSharing | None = None,
        make_tokenizer: Callable[[Path], Tokenizer] = Tokenizer,
        actor: type[ServiceActor] = GeneratorActor,
    ) -> Generator:
        """Spawn the engines, which serve nothing until the first load.

        Args:
            seed: seed of the engines' random streams.
            sharing: how the engines share devices with a trainer, if they do.
            make_tokenizer: reads the tokenizer, also for chats, from the model's folder.

        Raises:
            ConfigError: an engine of several devices cannot hold the model, or there are too few GPUs.
        """
        if start.hosts is None:
            check_decode_layout(model, config, engines=config.replicas)
        sharing = sharing or DeviceSharing()
        service = Service(start.name or "generator", start.cluster, start.faults, exit_meanings=EXIT_MEANINGS)
        seats = seats_of(config, start.cluster, start.hosts or ServiceHosts())
        # Guests sit on the trainer's hosts, all others on the generator's own.
        guests = Seats(
            start.cluster,
            sharing.trainer_hosts or seats.hosts,
            ReplicaSize(gpus=config.devices),
            replicas=config.guests,
        )
        processes = EngineProcesses(
            service=service,
            config=config,
            actor=actor,
            model=model,
            seed=seed,
            seats=seats,
            guests=guests,
            patience_s=start.deadline_s / 2,
        )
        pool = EnginePool(
            service,
            EngineStart(spawn=processes.spawn, set_up=processes.set_up, deadline_s=start.deadline_s),
            weights_bytes=stored_bytes(model),
            replace=sharing.replace,
            spares=processes.spares(start.deadline_s),
            remote=range(len(config.urls)),
            guests=config.guest_indices,
        )
        supervisor = Supervisor(service, pool.start_one, config.restart, seats=seats, uniform=True)
        async with task_group() as group:
            tokenizer = group.create_task(asyncio.to_thread(make_tokenizer, model))  # imports take seconds
            group.create_task(_start_engines(processes, supervisor, config.engines, start.deadline_s))
        return cls(config, service, supervisor, seats, pool, tokenizer.result(), sharing.lend)

    @property
    def version(self) -> int | None:
        """Version that all engines serve; None before the first load and after a failed load."""
        return self._pool.version

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of training episodes."""
        return Sampling(max_tokens=self.config.max_tokens, temperature=self.config.temperature)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its completion together."""
        return self.config.max_model_len

    @property
    def dtype(self) -> str:
        """Dtype of the engines' weights and thus of published versions: "float32" or "bfloat16"."""
        return str(resolve_dtype(self.config.dtype)).removeprefix("torch.")

    @property
    def listeners(self) -> Listeners[[]]:
        """Callbacks that run in the loop after every change of the result of `engines`."""
        return self._service.listeners

    def engines(self) -> dict[int, int]:
        """Return the serving engines: maximum concurrent requests by index, as their KV caches allow."""
        return {
            replica.index: self._requests.limits.of(replica) for replica in self._service.replicas if replica.serving
        }

    @property
    def replicas(self) -> int:
        """Target number of engines on the present hosts; some may still be starting."""
        return self._seats.wanted

    def scale(self, replicas: int) -> None:
        """Start or stop engines in the background until this many run on the present hosts.

        Other engines resume the completions of stopped ones.

        Raises:
            ConfigError: the hosts lack room for so many.
        """
        self._seats.scale(replicas)
        self._supervisor.rescale()

    def join(self, host: str, gpus: Sequence[str], cores: int) -> None:
        """Add a host, which gets engines if more are allowed than there are."""
        self._seats.add(host, gpus, cores)
        self._supervisor.rescale()

    async def leave(self, host: str) -> None:
        """Stop the engines on a host that is about to go; see `Supervisor.leave`."""
        await self._supervisor.leave(host)

    @property
    def spares(self) -> int:
        """Number of spare engines that can take a dead engine's place now."""
        return self._pool.spares.ready

    @property
    def answers(self) -> bool:
        """True while a serving engine is idle, makes progress, or is paused or loading on purpose."""
        return self._pool.answers(loading=self._loading.locked())

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None:
        """Decode the rest of a completion on one engine; see `EngineRequests.decode`."""
        await self._requests.decode(completion, engine=engine)

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: Sampling | None = None,
        *,
        engine: int | None = None,
        observe: Observer | None = None,
        gather_s: float = GATHER_S,
    ) -> Turn:
        """Decode one completion. If an engine dies, another one resumes from the tokens so far.

        Args:
            prompt_ids: the whole prompt.
            sampling: by default the settings of training episodes.
            engine: index of the first engine; by default the one with the fewest requests in flight.
            observe: called with each chunk as it comes; returning True ends the completion.
            gather_s: seconds for which an engine gathers tokens into one chunk; 0 sends each at once.

        Raises:
            PoisonError: several engines in a row failed without a token.
            WeightsError, ConfigError, DeadlineError, ServiceError: as `decode`.
        """
        completion = ResumableCompletion(
            prompt_ids, sampling or self.sampling, self._tokenizer, observe=observe, gather_s=gather_s
        )
        while not completion.finish:
            try:
                await self.decode(completion, engine=engine)
            except ReplicaError as error:
                completion.fail_over(error)
            # Any engine may resume: the one that was asked for is gone.
            engine = None
        return completion.turn()

    async def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        adapter: str = "",
    ) -> ScoredTokens:
        """Score given tokens after a prompt; see `EngineRequests.score`."""
        return await self._requests.score(prompt_ids, token_ids, temperature=temperature, top_k=top_k, adapter=adapter)

    async def score_on_each(
        self, ids: TokenIds, *, adapter: str = ""
    ) -> dict[tuple[int, int], npt.NDArray[np.float64]]:
        """Score a text on every engine that serves; see `EngineRequests.score_on_each`."""
        return await self._requests.score_on_each(ids, adapter=adapter)

    async def sample(self, prompts: Sequence[TokenIds]) -> list[Turn]:
        """Complete prompts with the current policy, as training episodes are sampled.

        Engines that are paused, or have lent their devices to the trainer, resume for the duration.
        """
        async with self._lend():
            return await asyncio.gather(*(self.generate(prompt) for prompt in prompts))

    async def chat(
        self, message: str | Sequence[Message], *, max_tokens: int | None = None, temperature: float = 0.0
    ) -> str:
        """Chat with the current policy, with the model's chat template; greedy by default.

        Engines that are paused, or have lent their devices to the trainer, resume for the duration.
        """
        messages = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        sampling = Sampling(max_tokens=max_tokens or self.config.max_tokens, temperature=temperature)
        async with self._lend():
            return (await self.generate(self._tokenizer.render(messages), sampling)).text

    async def load(self, store: WeightStore, version: int | None = None) -> int:
        """Load a version, by default the latest, into every engine.

        Requests in flight continue under the new version; paused ones stay paused. Each engine attests the weights that
        it read before it serves them. An engine that dies meanwhile is replaced by one that also loads the version. If
        loading fails, all engines refuse requests until a later load succeeds.

        Returns:
            The version that the engines report having read.

        Raises:
            AttestationError: an engine's weights differ from those published by the trainer; names the tensors.
            WeightsError: the version cannot be read, or the engines read different ones.
            ServiceError: no engine is left.
        """
        began = time.monotonic()
        async with self._loading, store.lease(version) as manifest:
            # While engines decode, the version is brought to their hosts first, so that they pause only to load it.
            # Engines that are paused or asleep lose nothing by loading each bucket as it arrives.
            if not self._pool.held:
                serving = [replica for replica in self._service.replicas if replica.serving]
                await store.prefetch(manifest, {host for replica in serving for host in replica.hosts})
            async with self._pool.serving_next(manifest.version, store, epoch=manifest.epoch):
                reports = await self._pool.load(manifest, store)
                # Reports name the version that was read, which the argument of the call cannot attest.
                if any(report.version != manifest.version for report in reports):
                    versions = [report.version for report in reports]
                    raise WeightsError(f"the engines read versions {versions} instead of {manifest.version}")
        self.last_load = reports
        # Engines load at the same time, so the slowest one's stages explain the duration.
        stages = max((report.seconds for report in reports), key=lambda seconds: sum(seconds.values()), default={})
        self.load_s = {**stages, "calls": time.monotonic() - began - sum(stages.values())}
        return manifest.version

    async def serve_model(self) -> None:
        """Serve the weights of the model's folder as version 0.

        Raises:
            WeightsError: another version has been loaded.
            ServiceError: no engine is left.
        """
        # Version 0 would be older than what the engines already serve.
        if self._pool.versions:
            raise WeightsError(
                f"the engines have already loaded version {self._pool.versions[-1]}", hint="start a new generator"
            )
        async with self._loading, self._pool.serving_next(0, None):
            await self._pool.each("serve_model", serve_model)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter in PEFT's format into every engine; requests then sample with it by
        `Sampling(adapter=name)`. See `DecodeEngine.load_adapter`.

        The files are read once, here, so that engines that start later serve the same values.

        Raises:
            ConfigError: the engines serve no adapters, or not this one.
            ModelError: a file is missing or malformed.
            ServiceError: no engine is left.
        """
        if not self.config.max_loras:
            raise ConfigError(
                f"the engines serve no adapters, and {name!r:.80} is one",
                hint="set --generator.max-loras to the number of adapters in a step",
            )
        if not name or len(name) > _MAX_NAME or not name.isprintable():
            raise ConfigError(
                f"an adapter is called {name!r:.80}", hint=f"give a printable name of at most {_MAX_NAME} characters"
            )
        await self._pool.load_adapter(name, await asyncio.to_thread(AdapterFiles.read, folder))

    async def drop_adapter(self, name: str) -> None:
        """Have every engine forget an adapter, if it is loaded. Requests that sample with it go on."""
        await self._pool.drop_adapter(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._pool.adapters)

    async def pause(self) -> None:
        """Pause all engines at a token boundary. Requests keep their KV cache, new ones wait, and loads work."""
        await self._pool.hold(paused=True)

    async def resume(self) -> None:
        """Resume decoding after `pause`."""
        await self._pool.hold(paused=False)

    async def sleep(self) -> None:
        """Pause all engines and free their device memory: the KV cache, and on CUDA the weights.

        Requests are kept; their KV cache is recomputed after `wake`. Loads work and restore the weights; without one,
        `wake` reloads the version.
        """
        await self._pool.hold(asleep=True)

    async def wake(self) -> None:
        """Resume decoding after `sleep`; engines that are also paused stay paused."""
        await self._pool.hold(asleep=False)

    @property
    def guests(self) -> Guests:
        """The engines on the trainer's devices."""
        return Guests(self._pool)

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics since the last call.

        These are the metrics of the engines' KV caches, see `RequestLimits.pop_metrics`; the numbers of spares that
        stand by, and of versions that each engine serves as adapters; the bytes of weights that the engines hold in 8
        bits; and the seconds of each stage of the last load.
        """
        metrics = self._requests.limits.pop_metrics() | {f"load/{part}_s": value for part, value in self.load_s.items()}
        self.load_s = {}
        if self.config.spares:
            metrics["generator/spares"] = float(self.spares)
        if self.config.adapters == "served" and self.last_load:
            metrics["generator/served_versions"] = float(min(load.served_versions for load in self.last_load))
        if self.config.quantization != "none" and self.last_load:
            metrics["generator/quantized_bytes"] = float(sum(load.quantized_bytes for load in self.last_load))
        return metrics

    def drain_busy_s(self) -> list[float]:
        """Return each engine's busy seconds since the last call."""
        return self._service.drain_busy_s()

    def drain_drafts(self) -> DraftCounts:
        """Return the counts of drafted tokens since the last call."""
        return self._requests.drain_drafts()

    @property
    def non_finite(self) -> NonFiniteTokens:
        """Tokens whose logprobs were not finite."""
        return self._requests.non_finite

    async def stop(self) -> None:
        """Stop the engines: first vLLM's processes, then ours."""
        self._requests.stop()
        replicas = (*self._service.replicas, *self._service.spares.values())
        live_replicas = [replica for replica in replicas if replica.alive]
        # Also on the other hosts of an engine, each of which has workers of its own.
        calls = [replica.call_ranks("close", lambda _: (), deadline_s=5.0) for replica in live_replicas]
        await asyncio.gather(*calls, return_exceptions=True)  # Service.stop kills those that do not close in time
        await self._service.stop()

    def __repr__(self) -> str:
        loads = ", ".join(f"{replica.index}: {replica.in_flight}" for replica in self._service.replicas)
        return f"Generator  version {self.version}  {self.dtype}  requests in flight by replica: {loads}"
