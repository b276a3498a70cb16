"""The Generator service: vLLM engines that decode. One that dies is replaced, and others go on with its answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.engines.platform import Dtype, resolve_dtype
from forge_rl.errors import (
    ConfigError,
    DeadlineError,
    ForgeError,
    ReplicaError,
    ServiceError,
    WeightsError,
)
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.router import least_loaded
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.runtime.supervision import Restart
from forge_rl.services.completion import ResumableCompletion, validate_chunk
from forge_rl.services.engine_pool import CONTROL_DEADLINE_S, LOAD_DEADLINE_S, EnginePool
from forge_rl.services.generator_actor import GeneratorActor, environment
from forge_rl.services.weight_store import WeightStore
from forge_rl.types import Chunk, Message, Sampling, Turn
from forge_rl.weights.manifest import LoadReport


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
        request_deadline_s: float = 3600.0
        """Longest time between two pieces of an answer. It stands still while the trainer trains."""
        restart: Restart = field(default_factory=Restart)
        """What happens when an engine dies."""

        def __post_init__(self) -> None:
            for flag, value, good, hint in (
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
                    raise ConfigError(f"--generator.{flag} is {value}", hint=f"set --generator.{flag} to {hint}")

    def __init__(
        self,
        config: Config,
        service: Service,
        fleet: EnginePool,
        tokenizer: Tokenizer,
        lent: Callable[[], AbstractAsyncContextManager[object]],
    ) -> None:
        self.config = config
        self._service = service
        self._pool = fleet
        self._tokenizer = tokenizer
        self._lent = lent
        self._stopping = False
        self._loading = asyncio.Lock()
        self._loaded: list[int] = []
        """Versions in the order of their loads."""
        self._complete = 0
        """Place of the current version in there."""
        self.version: int | None = None
        """Version that all engines serve; None before the first load, and after one that failed."""
        self._refusal = "nothing was loaded yet"
        self.attested_in_place = 0.0
        """Share of the weights that the last load attested over the live parameters."""
        self.load_seconds: dict[str, float] = {}
        """Of each stage of the last load, by the slowest engine; see LoadReport."""

    @classmethod
    async def start(
        cls,
        config: Config,
        cluster: Cluster,
        faults: Faults,
        *,
        model: Path,
        seed: int,
        deadline_s: float,
        first_gpu: int = 0,
        lent: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext,
        actor: type[ServiceActor] = GeneratorActor,
        name: str = "generator",
    ) -> Generator:
        """Spawn the engines. They serve nothing until the first load.

        Args:
            config: what they are like.
            cluster: where to spawn.
            faults: where failures are noted.
            model: folder of the model.
            seed: of the engines' own streams.
            deadline_s: for the start of an engine, also of one that is brought back.
            first_gpu: number of the first engine's GPU.
            lent: keeps the engines awake while its body runs; for `chat`.
            actor: what an engine is.
            name: of the service, in errors and logs.
        """
        service = Service(name, cluster, faults)

        def spawn(index: int, again: bool) -> Replica:
            return service.spawn(
                actor,
                config,
                model,
                seed + index,
                f"{name} replica {index}",
                env=environment(config, first_gpu + index),
                index=index if again else None,
            )

        fleet = EnginePool(service, spawn, deadline_s)
        await fleet.start(config.replicas)
        service.supervise(fleet.bring_back, config.restart)
        return cls(config, service, fleet, Tokenizer(model), lent)

    @property
    def sampling(self) -> Sampling:
        """How training episodes are drawn."""
        return Sampling(max_tokens=self.config.max_new_tokens, temperature=self.config.temperature)

    @property
    def dtype(self) -> str:
        """Format of the engines' weights, and so of published versions: "float32" or "bfloat16"."""
        return str(resolve_dtype(self.config.dtype)).removeprefix("torch.")

    @property
    def listeners(self) -> list[Callable[[], None]]:
        """Called, in the loop, after every change of what `engines` says."""
        return self._service.listeners

    def engines(self) -> dict[int, int]:
        """The engines that serve now: index, and most requests that it decodes at a time."""
        return {replica.index: self.config.max_requests for replica in self._service.replicas if replica.serving}

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """One answer from one engine, as it is decoded; its last chunk, and no other, says why it ends.

        `aclose` it when you leave early: that ends the request.

        Args:
            prompt_ids: everything that the model is shown.
            sampling: by default as training episodes are drawn.
            engine: index of the engine; by default the one with the fewest requests in flight.

        Raises:
            WeightsError: no version was loaded yet, or the last load failed.
            ConfigError: prompt and answer can be longer than the engines take, or vLLM takes no such request.
            ReplicaError: the engine died, failed, or gave garbage; what came before is good.
            DeadlineError: nothing came for config.request_deadline_s.
            ServiceError: no engine is left.
        """
        chosen = sampling or self.sampling
        self._check(prompt_ids, chosen)
        replica = await self._choose(engine)
        first, drawn = self._complete, 0
        answer = self._service.stream(
            replica, "stream", tuple(prompt_ids), chosen, deadline_s=self.config.request_deadline_s
        )
        try:
            async with contextlib.aclosing(answer) as chunks:
                async for chunk in chunks:
                    if garbage := validate_chunk(
                        chunk,
                        chosen,
                        drawn=drawn,
                        vocab_size=self._tokenizer.vocab_size,
                        versions=self._loaded[first:],
                    ):
                        raise self._pool.failed(replica, f"its answer is garbage: {garbage}")
                    drawn += len(chunk.token_ids)
                    yield chunk
                    if chunk.finish:
                        return
            raise self._pool.failed(replica, "its answer is garbage: it ended without a reason")
        except (ReplicaError, DeadlineError):
            raise
        except ServiceError as error:  # the engine raised what is not meant for the caller
            if self._stopping:
                raise
            raise self._pool.failed(replica, f"it failed: {error.message}") from error

    async def answer(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """As `stream`, but when the engine dies, another one goes on from the tokens that there are.

        Raises:
            ReplicaError: several engines, one after the other, failed at it without a token.
            WeightsError, ConfigError, DeadlineError, ServiceError: as `stream`.
        """
        async with contextlib.aclosing(
            self._answer(ResumableCompletion(prompt_ids, sampling or self.sampling, self._tokenizer), engine)
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
    ) -> Turn:
        """One whole answer; see `answer`."""
        answer = ResumableCompletion(prompt_ids, sampling or self.sampling, self._tokenizer)
        async with contextlib.aclosing(self._answer(answer, engine)) as chunks:
            async for _ in chunks:
                pass
        return answer.turn()

    async def chat(
        self, message: str | Sequence[Message], *, max_tokens: int | None = None, temperature: float = 0.0
    ) -> str:
        """Ask the current policy something, with the model's chat template; greedy by default.

        Engines that stand while the trainer trains go on for that long.
        """
        messages = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        sampling = Sampling(max_tokens=max_tokens or self.config.max_new_tokens, temperature=temperature)
        async with self._lent():
            return (await self.generate(self._tokenizer.render(messages), sampling)).text

    async def load(self, store: WeightStore, version: int | None = None) -> int:
        """Load a version, the latest by default, into every engine.

        Requests may be in flight: they go on under the new version; paused ones stay paused. Each engine attests what
        it read before it serves it. An engine that dies meanwhile is replaced by one that loads the version too. If
        the version cannot be loaded, all engines refuse requests until a later load succeeds.

        Returns:
            The version that the engines say they read.

        Raises:
            AttestationError: an engine holds other weights than the trainer published; names the tensors.
            WeightsError: the version cannot be read, or the engines read different ones.
            ServiceError: no engine is left.
        """
        async with self._loading, store.lease(version) as manifest, self._becoming(manifest.version, store):
            reports: list[LoadReport] = await self._pool.each(
                "load",
                lambda replica: (manifest, store.transport(replica.host)),
                deadline_s=LOAD_DEADLINE_S,
            )
            if any(report.version != manifest.version for report in reports):
                read = [report.version for report in reports]
                raise WeightsError(f"version {manifest.version} was to be loaded, and the engines read {read}")
        if reports:
            self.attested_in_place = min(report.in_place for report in reports) / len(manifest.tensors)
            self.load_seconds = dict(max(reports, key=lambda report: sum(report.seconds.values())).seconds)
        return manifest.version

    async def serve_model(self) -> None:
        """Serve the weights of the model's folder, as version 0.

        Raises:
            WeightsError: versions were loaded over them.
            ServiceError: no engine is left.
        """
        if self._loaded:
            raise WeightsError(f"the engines have loaded version {self._loaded[-1]}", hint="start a new generator")
        async with self._loading, self._becoming(0, None):
            await self._pool.each("serve_model", deadline_s=CONTROL_DEADLINE_S)

    async def pause(self) -> None:
        """Stop all engines at a token boundary: from then on nothing is decoded. Requests are kept, with their keys and
        values, and new ones wait; loads work."""
        await self._pool.switch("pause", lambda wish: replace(wish, paused=True))

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._pool.switch("resume", lambda wish: replace(wish, paused=False))

    async def sleep(self) -> None:
        """Stop all engines, and give their device's memory back: keys and values, and on CUDA the weights.

        Requests are kept; what was computed of them is computed again after `wake`. Loads work; on CUDA they bring the
        weights back.
        """
        await self._pool.switch("sleep", lambda wish: replace(wish, asleep=True))

    async def wake(self) -> None:
        """Go on after `sleep`; engines that are also paused stay so."""
        await self._pool.switch("wake", lambda wish: replace(wish, asleep=False))

    def take_busy_s(self) -> list[float]:
        """Seconds in which each engine had work, since this was last asked."""
        return self._service.take_busy_s()

    async def stop(self) -> None:
        """End the engines: first vLLM's own processes, then ours."""
        self._stopping = True
        for replica in self._service.replicas:
            if replica.alive:
                with contextlib.suppress(ForgeError):  # what does not close in time is killed by Service.stop
                    await self._service.call(replica, "close", deadline_s=5.0)
        await self._service.stop()

    async def _answer(self, answer: ResumableCompletion, engine: int | None) -> AsyncGenerator[Chunk, None]:
        self._check(answer.prompt_ids, answer.rest)
        while True:
            try:
                async with contextlib.aclosing(self.stream(answer.shown, answer.rest, engine=engine)) as chunks:
                    async for chunk in chunks:
                        yield answer.add(chunk)
                        if answer.finish:
                            return
            except ReplicaError as error:
                answer.move(error)
                engine = None

    async def _choose(self, engine: int | None) -> Replica:
        if engine is None:
            await self._service.available()
            return least_loaded(self._service.name, self._service.replicas)
        for replica in self._service.replicas:
            if replica.index == engine and replica.serving:
                return replica
        raise ReplicaError("it does not serve", service=self._service.name, replica=engine)

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Whether there can be an answer; raises as `stream` does."""
        if self.version is None:
            raise WeightsError(f"the engines hold no weights: {self._refusal}", hint="load a version first")
        if len(prompt_ids) + sampling.max_tokens > self.config.max_model_tokens:
            raise ConfigError(
                f"a prompt of {len(prompt_ids)} tokens and {sampling.max_tokens} new ones exceed "
                f"{self.config.max_model_tokens}",
                hint="raise --generator.max-model-tokens, or choose tasks with shorter prompts",
            )

    @contextlib.asynccontextmanager
    async def _becoming(self, version: int, store: WeightStore | None) -> AsyncIterator[None]:
        """While the body makes the engines serve a version, their tokens may be of either; afterwards it is this."""
        self._loaded.append(version)
        try:
            async with self._pool.becoming(version, store):
                yield
        except BaseException:
            self.version = None
            self._refusal = f"loading version {version} failed"
            raise
        self._complete = len(self._loaded) - 1
        self.version = version

    def __repr__(self) -> str:
        loads = ", ".join(f"{replica.index}: {replica.in_flight}" for replica in self._service.replicas)
        return f"Generator  version {self.version}  {self.dtype}  requests in flight by replica: {loads}"
