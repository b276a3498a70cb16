"""One vLLM engine: decodes, and loads new weights while requests are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import pickle
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from forge_rl.engines import ENGINE_DIED, ENGINE_STALLED
from forge_rl.engines.devices import device_type
from forge_rl.engines.parts import EnginePart
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.engines.speculation import read_speculation
from forge_rl.engines.vllm.adapters import EngineAdapters, VersionFactors
from forge_rl.engines.vllm.arguments import engine_arguments
from forge_rl.engines.vllm.cache_stats import CacheStats
from forge_rl.engines.vllm.causes import own_log, start_cause
from forge_rl.engines.vllm.cpu import unlink_shared_memory
from forge_rl.engines.vllm.internals import (
    answer_between_steps,
    call_workers,
    draft_counts,
    engine_pids,
    leave_tokens_undecoded,
    stop_decoding,
    version_starts,
)
from forge_rl.engines.vllm.prompt_scores import TEMPERATURE
from forge_rl.engines.vllm.requests import (
    PromptLogprobs,
    check_finish,
    checked_parameters,
    joined_chunk,
    read_prompt_logprobs,
    scored_tokens,
)
from forge_rl.engines.vllm.steps import watch_steps
from forge_rl.engines.vllm.transfer import WorkerReport
from forge_rl.errors import ConfigError, ModelError, WeightsError
from forge_rl.metrics.phases import PhaseClock
from forge_rl.runtime.processes import clean_up_after, when_process_ends
from forge_rl.runtime.signals import children_outlive_stop_signals
from forge_rl.token_arrays import Chunk, ScoredTokens, TokenIds
from forge_rl.types import Sampling
from forge_rl.weights.manifest import LoadReport, Manifest, combine_shards
from forge_rl.weights.transports.protocol import TensorBucket

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

_MOST_GATHERED = 32
"""Maximum tokens of a request that vLLM gathers before it hands them over."""
_CLOSE_S = 0.5
"""Seconds until vLLM's process is killed on shutdown: a graceful exit takes four seconds and saves nothing."""


class VLLMEngine:
    """A `DecodeEngine` on vLLM, in child processes or, with a single worker, in this one."""

    def __init__(self, llm: AsyncLLM, settings: DecodeSettings, cache: CacheStats) -> None:
        self._llm = llm
        self._cache = cache
        self._returns_routing = settings.routed_experts
        self._adapters = EngineAdapters(Path(llm.vllm_config.model_config.model), settings, call=self._all_workers)
        self._base: dict[str, int] = {}
        """Fingerprints of the loaded base if versions are adapters of it; empty otherwise."""
        self._closing = False
        self._requests = 0
        """Requests in flight."""
        self._token_s = math.inf
        """Seconds per token of the last completion."""
        self._failure = ""
        self._paused = False
        self._asleep = False
        self._working = 0
        """Number of calls to the workers in progress, during which no step is taken."""
        self._changing = asyncio.Lock()
        """Held during loads, and while vLLM's actual state (below) is brought to the requested state (above)."""
        self._stopped = False
        """True while vLLM is stopped."""
        self._cleared = False
        """True if the KV cache was cleared since vLLM last decoded."""
        self._released: list[str] = []
        """Parts that were freed: "weights", "kv_cache"."""
        self._loaded = False
        """True once a published version was loaded: its weights can be loaded again."""
        self._dropped = False
        """True while the weights are freed without a copy."""
        pids = engine_pids(llm)
        # Workers end with this process, and engines with their workers; vLLM's coordinator does not.
        self._guard = clean_up_after((), pids) if len(pids) > 1 else None
        # Ends this process, which the supervisor notices, when a process of vLLM's dies.
        for pid in pids:
            when_process_ends(pid, self._on_engine_death)
        self._watching = asyncio.ensure_future(self._watch(settings.stall_s))

    @classmethod
    async def start(
        cls, folder: Path, settings: DecodeSettings, seed: int, part: EnginePart | None = None
    ) -> VLLMEngine:
        try:
            cache = CacheStats()
            with children_outlive_stop_signals():  # vLLM's processes have handlers that end them
                arguments = engine_arguments(folder, settings, seed, part)
                llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[cache.logger()])
            return await cls.over(llm, settings, cache, hosts=part.count if part else 1)
        except (ValueError, RuntimeError) as error:
            raise ModelError(
                f"vLLM does not start with {folder}: {start_cause(error, own_log())}",
                hint="see logs/generator-*.log in the run folder for vLLM's output",
            ) from error

    @classmethod
    async def over(cls, llm: AsyncLLM, settings: DecodeSettings, cache: CacheStats, *, hosts: int = 1) -> VLLMEngine:
        """Prepare a vLLM engine that was started with this package's worker extension and weight transfer.

        Args:
            hosts: number of hosts with equally many of its workers; the first ones are on this host.
        """
        leave_tokens_undecoded()
        engine = cls(llm, settings, cache)
        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await engine._all_workers("scale_prompt_logits")
        await engine._all_workers("sample_by_position")
        if read_speculation(settings.speculation):
            await engine._all_workers("speculate", settings.speculation)
        if settings.routed_experts and device_type() == "cpu":
            await engine._all_workers("capture_routing")
        pids = await engine._all_workers("process_id")
        for pid in pids[: len(pids) // hosts]:
            unlink_shared_memory(pid)
            when_process_ends(pid, engine._on_engine_death)
        if device_type() == "cpu":  # vLLM writes zeros to the whole cache
            await engine._all_workers("release_kv_cache")
        # Full collections would scan all that was imported, again and again: twice the time of each token.
        gc.freeze()
        return engine

    async def stream(
        self, prompt_ids: TokenIds, sampling: Sampling, *, gather_s: float = 0.0
    ) -> AsyncGenerator[Chunk, None]:
        if self._failure:
            raise WeightsError(f"the engine serves nothing: {self._failure}", hint="load a version that can be read")
        request, num_sent, clock = self._cache.request_id(), 0, asyncio.get_running_loop().time
        prompt = {"type": "token", "prompt_token_ids": np.asarray(prompt_ids).tolist()}
        # vLLM's core joins as many tokens as fit into `gather_s` at the last request's speed; the rest is gathered
        # below. Before the first request, _token_s is infinite and tokens come one by one.
        interval = int(min(max(gather_s / self._token_s, 1), _MOST_GATHERED))
        gathered: list[CompletionOutput] = []
        prompt_logprobs: PromptLogprobs = ()
        first = chunk_start = 0.0
        self._requests += 1
        try:
            parameters = checked_parameters(sampling, interval)
            async with contextlib.AsyncExitStack() as stack:
                # Entered first and left last: the adapter must outlive vLLM's request, which ends with its generator.
                lora, version = stack.enter_context(self._adapters.using(sampling.adapter))
                generated = self._llm.generate(prompt, parameters, request_id=request, lora_request=lora)
                outputs = await stack.enter_async_context(contextlib.aclosing(generated))
                async for output in outputs:
                    # One completion a request (n = 1).
                    (completion,) = output.outputs
                    if output.prompt_logprobs:
                        prompt_logprobs = read_prompt_logprobs(output.prompt_logprobs)
                    if completion.finish_reason == "error" and "structured_outputs" in sampling.extra:
                        # A client must not be able to bring down an engine; only the grammar compiler can tell.
                        raise ConfigError(
                            "vLLM cannot decode under the constraint of the request",
                            hint="see logs/generator-*.log, and change the schema, regular expression or grammar",
                        )
                    check_finish(completion)
                    if not gathered:
                        chunk_start = clock()
                        first = first or chunk_start
                    gathered.append(completion)
                    if completion.finish_reason is None and clock() < chunk_start + gather_s:
                        continue
                    # An adapter's version was fixed when the request began; the base's may change between two tokens.
                    starts = version_starts(self._llm, request, completion) if version is None else [(str(version), 0)]
                    chunk = joined_chunk(gathered, sampling, starts, num_sent)
                    num_sent += len(chunk.token_ids)
                    if chunk.finish:
                        self._token_s = max(clock() - first, 1e-6) / (num_sent - 1) if num_sent > 1 else self._token_s
                        drafted, accepted, verified = draft_counts(completion)
                        chunk = replace(chunk, drafted=drafted, accepted=accepted, verified=verified)
                    if prompt_logprobs:
                        chunk, prompt_logprobs = replace(chunk, prompt=prompt_logprobs), ()
                    if self._returns_routing and chunk.finish:
                        # The last token was sampled, but never computed, so it has no experts.
                        routed = await self._routing_of(request, completion)
                        chunk = replace(chunk, routed=routed[: len(prompt_ids) + num_sent - 1])
                    if chunk.finish or self._cache.fitting is not None:
                        chunk = replace(chunk, cache=self._cache.pop())
                    gathered = []
                    yield chunk
        # The request's fault: the engine serves on.
        except VLLMValidationError as error:
            raise ConfigError(
                f"vLLM does not take the request: {error}", hint="change the prompt or the sampling"
            ) from error
        except EngineDeadError:
            self._on_engine_death()  # no need to wait for its process to end
            raise
        finally:
            self._requests -= 1

    async def score(
        self,
        prompt_ids: TokenIds,
        token_ids: TokenIds,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        adapter: str = "",
    ) -> ScoredTokens:
        if self._failure:
            raise WeightsError(f"the engine serves nothing: {self._failure}", hint="load a version that can be read")
        # All tokens are one prompt to vLLM, and nothing is sampled but the one token that it must decode.
        ids = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(token_ids, np.int32)])
        params = SamplingParams(
            temperature=0.0,  # of the one token that vLLM must decode
            max_tokens=1,
            prompt_logprobs=top_k,
            flat_logprobs=True,
            detokenize=False,
            extra_args=None if temperature == 1 else {TEMPERATURE: temperature},
        )
        prompt = {"type": "token", "prompt_token_ids": ids.tolist()}
        prompt_logprobs: object = None
        self._requests += 1
        try:
            async with contextlib.AsyncExitStack() as stack:
                lora, _ = stack.enter_context(self._adapters.using(adapter))
                request = self._cache.request_id()
                generated = self._llm.generate(prompt, params, request_id=request, lora_request=lora)
                outputs = await stack.enter_async_context(contextlib.aclosing(generated))
                async for output in outputs:
                    check_finish(*output.outputs)
                    prompt_logprobs = output.prompt_logprobs
        except VLLMValidationError as error:
            raise ConfigError(
                f"vLLM does not take the request: {error}", hint="shorten prompt and tokens, or raise max_model_len"
            ) from error
        except EngineDeadError:
            self._on_engine_death()
            raise
        finally:
            self._requests -= 1
        return scored_tokens(prompt_logprobs, len(ids) - len(prompt_ids), top_k)

    async def _routing_of(self, request: str, completion: CompletionOutput) -> npt.NDArray[Any]:
        """Return the experts of an ended request, `[tokens, layers, top_k]`."""
        routings = [completion.routed_experts]
        if device_type() == "cpu":
            # Only the data-parallel rank that ran the request has its experts.
            routings = [rows for rows in await self._all_workers("take_routing", request) if rows is not None]
        if len(routings) != 1 or routings[0] is None:
            raise RuntimeError(f"{len(routings)} workers returned the experts of a request, not 1")
        rows: npt.NDArray[Any] = routings[0]
        return rows

    async def hold(self, *, paused: bool, asleep: bool) -> bool:
        # Recorded before any wait: a load in progress brings vLLM to the state that is requested when it ends.
        self._paused, self._asleep = paused, asleep
        await self._apply()
        return not self._dropped

    async def serve_model(self) -> None:
        await self._llm.update_weight_version("0")

    async def load(self, manifest: Manifest, buckets: AsyncIterator[TensorBucket], *, reader: str) -> LoadReport:
        served, factors = self._adapters.serve_versions and bool(manifest.adapter_scales), VersionFactors()
        # The base is in place, bit for bit: only its adapters change, and nothing needs to pause.
        if served and self._base == manifest.base and not self._dropped:
            return await self._load_adapted(manifest, buckets, reader=reader)
        clock = PhaseClock()
        with clock.phase("wait"):
            # Wait for the first bucket while requests still decode; pause only then.
            bucket = await anext(buckets, None)
        if not served or self._base != manifest.base:
            await self._adapters.forget_versions()  # before anything changes: it may be refused
        self._base = {}
        async with self._changing:
            with clock.phase("pause"):
                # This also clears the prefix cache. Nothing is computed until the engine resumes, so no block computed
                # with the old weights remains.
                await self._stop(clear_cache=True)
                await self._restore(["weights"])
            try:
                # Versions that are served keep their adapters apart; otherwise workers add them to the weights.
                await self._all_workers("start_load", not served)
                while bucket is not None:
                    if served:
                        factors.read(bucket)
                    with clock.phase("load"):
                        await self._all_workers("load_bucket", manifest.version, pickle.dumps(bucket))
                    with clock.phase("wait"):
                        bucket = await anext(buckets, None)
                with clock.phase("finish"):
                    reports: list[WorkerReport] = await self._all_workers("finish_load")
                    report = _joined(reports)
                    # Before the version gets its number: no token may be reported under weights that are not attested.
                    manifest.attest(report.fingerprints, reader, merged=not served)
                    if served:
                        await self._adapters.load_version(manifest, factors)
                        report = replace(report, served_versions=self._adapters.num_versions)
                        self._base = manifest.base
                    await self._llm.update_weight_version(str(report.version))
            except BaseException:
                # The weights may be a mixture of two versions: the engine stays stopped, and new requests are refused,
                # until a load succeeds.
                self._failure = f"version {manifest.version} could not be loaded"
                await self._all_workers("give_up_load")
                raise
            self._failure, self._loaded, self._dropped = "", True, False
        with clock.phase("pause"):
            await self._apply()
        # Fingerprints of live parameters are taken within "finish".
        phase_metrics, fingerprint_s = clock.finish_step(), max(worker.fingerprint_s for worker in reports)
        seconds = {name: phase_metrics.get(f"seconds/{name}", 0.0) for name in ("wait", "pause", "load", "finish")}
        seconds |= {"finish": seconds["finish"] - fingerprint_s, "fingerprint": fingerprint_s}
        return replace(report, seconds=seconds)

    async def _load_adapted(
        self, manifest: Manifest, buckets: AsyncIterator[TensorBucket], *, reader: str
    ) -> LoadReport:
        """Load a version whose base is already loaded: only its adapters, while requests in flight continue."""
        clock, factors = PhaseClock(), VersionFactors()
        async with self._changing:
            try:
                with clock.phase("load"):
                    async for bucket in buckets:
                        factors.read(bucket)
                # The base was attested when it was loaded; its fingerprints stand for it.
                manifest.attest(self._base | factors.fingerprints, reader)
                with clock.phase("finish"):
                    await self._adapters.load_version(manifest, factors)
                    await self._llm.update_weight_version(str(manifest.version))
            except BaseException:
                self._failure = f"version {manifest.version} could not be loaded"
                await self._stop(clear_cache=False)
                raise
            self._failure = ""
        await self._apply()
        seconds = clock.finish_step()
        return LoadReport(
            version=manifest.version,
            fingerprints=self._base | factors.fingerprints,
            in_place=len(self._base),
            bytes_read=(factors.bytes,),
            served_versions=self._adapters.num_versions,
            seconds={
                name: seconds.get(f"seconds/{name}", 0.0) for name in ("wait", "pause", "load", "fingerprint", "finish")
            },
        )

    async def load_adapter(self, name: str, folder: Path) -> None:
        await self._adapters.load(name, folder, awake="weights" not in self._released)

    async def drop_adapter(self, name: str) -> None:
        await self._adapters.drop(name)

    async def _all_workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of WorkerExtension on each worker; return the answers in order, or raise the first error."""
        with self._at_work():
            # A collective call occupies the workers between steps, and a load may take longer than a step's timeout:
            # `_watch` must not take it for a hang.
            pickled = await call_workers(self._llm, f"forge_rl_{method}", *args)
        answers = [pickle.loads(answer) for answer in pickled]
        # Workers return errors instead of raising them; see WorkerExtension.
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def _apply(self) -> None:
        """Bring vLLM to the last requested state."""
        async with self._changing:
            # Order matters: free memory only after decoding has stopped, and resume only once everything is back.
            if self._asleep and "kv_cache" not in self._released:
                await self._stop(clear_cache=True)
                await self._release()
            elif not self._asleep and not self._dropped:
                await self._restore(self._released)
            if self._asleep or self._paused or self._dropped:
                await self._stop(clear_cache=False)
            elif self._stopped and not self._failure:
                if self._cleared:
                    self._cache.cleared()
                    self._cleared = False
                await self._llm.resume_generation()
                self._stopped = False

    async def _stop(self, *, clear_cache: bool) -> None:
        if not self._stopped or clear_cache:
            await stop_decoding(self._llm, clear_cache=clear_cache)
            self._stopped = True
            self._cleared |= clear_cache

    async def _release(self) -> None:
        """Free memory, without AsyncLLM.sleep: its wake_up would resume a paused engine."""
        if device_type() == "cpu":
            await self._all_workers("release_kv_cache")
            self._released = ["kv_cache"]
        else:
            # Level 1 copies the weights to newly pinned host memory first: half a minute for 60 GB.
            with self._at_work():
                await self._llm.collective_rpc("sleep", kwargs={"level": 2 if self._loaded else 1})
            # Level 2 keeps no copy, and the next version to load brings the weights back.
            self._dropped = self._loaded
            self._released = ["weights", "kv_cache"]

    async def _restore(self, tags: Sequence[str]) -> None:
        woken_tags = [tag for tag in self._released if tag in tags]
        if woken_tags and device_type() != "cpu":  # on CPU, pages are allocated again when written
            with self._at_work():
                await self._llm.collective_rpc("wake_up", kwargs={"tags": woken_tags})
            # Adapters lay in the memory that sleep has freed: their buffers come back, without their values.
            if "weights" in woken_tags and self._adapters.are_served:
                await self._all_workers("forget_adapters")
        self._released = [tag for tag in self._released if tag not in woken_tags]

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Tell `_watch` that no step will end while the body runs."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    async def _watch(self, stall_s: float) -> None:
        """End this process, and the engine with it, once the engine hangs in a step."""
        await watch_steps(
            lambda: answer_between_steps(self._llm),
            lambda: self._requests > 0 and not self._working,
            stall_s=stall_s,
        )
        if not self._closing:
            print(f"forge_rl: no step of the vLLM engine ended within {stall_s:g} s", file=sys.stderr, flush=True)
            # A hung step cannot be interrupted. The exit code tells the supervisor why; vLLM's processes end with this
            # one.
            os._exit(ENGINE_STALLED)

    def let_go(self) -> None:
        """Stop watching vLLM's processes, as their owner is about to end them."""
        self._closing = True
        self._watching.cancel()

    def close(self) -> None:
        self.let_go()
        self._adapters.close()
        if self._guard is not None:
            self._guard.kill()
        self._llm.shutdown(timeout=_CLOSE_S)

    def _on_engine_death(self) -> None:
        if not self._closing:
            print("forge_rl: the vLLM engine process died", file=sys.stderr, flush=True)
            os._exit(ENGINE_DIED)


def _joined(workers: Sequence[WorkerReport]) -> LoadReport:
    """Combine the workers' reports into the engine's.

    Raises:
        WeightsError: workers read different versions, or different values of the same slice.
    """
    versions = {worker.version for worker in workers}
    if len(versions) > 1:
        raise WeightsError(f"the engine's workers read versions {sorted(versions)}", hint="load one version again")
    (version,) = versions
    # Slices of tensor-parallel workers add up to whole tensors; data-parallel copies must agree.
    fingerprints = combine_shards((shard for worker in workers for shard in worker.shards), version=version)
    return LoadReport(
        version=version,
        fingerprints=fingerprints,
        in_place=len(fingerprints.keys() - {name for worker in workers for name in worker.repacked}),
        bytes_read=tuple(worker.bytes for worker in workers),
        quantized_bytes=sum(worker.quantized_bytes for worker in workers),
    )
