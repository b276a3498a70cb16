"""One vLLM engine: decodes, and takes new weights while requests are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import torch
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from forge_rl.engines import ENGINE_DIED
from forge_rl.engines.platform import device_type
from forge_rl.engines.vllm.stream import decode
from forge_rl.engines.vllm.transfer import BACKEND, OWNER, SegmentUpdateInfo, WorkerExtension
from forge_rl.errors import WeightsError
from forge_rl.metrics.phases import PhaseClock
from forge_rl.runtime.processes import when_process_ends
from forge_rl.types import Chunk, Sampling, Turn
from forge_rl.weights.manifest import LoadReport, Manifest
from forge_rl.weights.transports.protocol import TensorBucket


class VLLMEngine:
    """One vLLM engine, in processes of its own below this one."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._closing = False
        self._failure = ""
        self._paused = False
        self._asleep = False
        self._changing = asyncio.Lock()
        """Held while what is below changes, so that it follows what is above and what was loaded."""
        self._stopped = False
        """Whether vLLM decodes nothing."""
        self._released: list[str] = []
        """What is not in memory: "weights", "kv_cache"."""
        for process in llm.engine_core.resources.engine_manager.processes:
            when_process_ends(process.pid, self._on_engine_death)

    @classmethod
    async def start(
        cls,
        folder: Path,
        *,
        dtype: torch.dtype,
        max_model_tokens: int,
        max_requests: int,
        kv_cache_bytes: int | None,
        memory_share: float,
        eager: bool,
        seed: int,
    ) -> VLLMEngine:
        """Start an engine; its weights are the folder's until the first load.

        Args:
            folder: Hugging Face model folder.
            dtype: of weights and activations.
            max_model_tokens: longest prompt and answer together.
            max_requests: most requests decoded at a time; more wait.
            kv_cache_bytes: room for keys and values; None takes what memory_share leaves on CUDA.
            memory_share: of the GPU's memory that the engine may take.
            eager: no compilation and no CUDA graphs; always so on CPU.
            seed: of the engine's own stream.
        """
        arguments = AsyncEngineArgs(
            model=str(folder),
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_tokens,
            max_num_seqs=max_requests,
            kv_cache_memory_bytes=kv_cache_bytes,
            gpu_memory_utilization=memory_share,
            enforce_eager=eager or device_type() == "cpu",
            enable_sleep_mode=device_type() == "cuda",
            distributed_executor_backend="uni",
            # vLLM cannot roll back a CPU generator: a seeded request whose prompt was split kills the engine.
            enable_chunked_prefill=device_type() != "cpu",
            max_num_batched_tokens=max(max_model_tokens, 4096),
            logprobs_mode="processed_logprobs",
            # The output projection in float32, as in the trainer: logits rounded to bfloat16 alone cost 0.03 a logprob.
            hf_overrides={"head_dtype": "float32"},
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=seed,
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
            additional_config={OWNER: os.getpid()},
        )
        engine = cls(AsyncLLM.from_engine_args(arguments))
        await engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        return engine

    async def stream(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Decode one answer, a chunk for each step; closing the generator ends the request.

        Greedy answers carry no logprobs (NaN): they are for evaluation, not for training.

        Raises:
            WeightsError: the last load failed.
            ConfigError: vLLM does not take such a request.
        """
        if self._failure:
            raise WeightsError(f"the engine serves nothing: {self._failure}", hint="load a version that can be read")
        try:
            async with contextlib.aclosing(decode(self._llm, prompt_ids, sampling)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineDeadError:
            self._on_engine_death()  # as soon as its process has ended this one would: no need to wait for that
            raise

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Turn:
        """One whole answer; see stream."""
        async with contextlib.aclosing(self.stream(prompt_ids, sampling)) as chunks:
            parts = [chunk async for chunk in chunks]
        return Turn(
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(token for chunk in parts for token in chunk.token_ids),
            logprobs=tuple(logprob for chunk in parts for logprob in chunk.logprobs),
            versions=tuple(version for chunk in parts for version in chunk.versions),
            text="".join(chunk.text for chunk in parts),
            truncated=parts[-1].finish == "length",
        )

    async def pause(self) -> None:
        """Stop at a token boundary: from then on nothing is decoded. Requests are kept, with their keys and values."""
        self._paused = True
        await self._settle()

    async def resume(self) -> None:
        """Go on after pause; nothing happens while the engine sleeps, or holds no whole version."""
        self._paused = False
        await self._settle()

    async def sleep(self) -> None:
        """Stop as pause does, and give memory back: keys and values, and on CUDA the weights, which go to the host.

        Requests are kept; what was computed of them is computed again after wake.
        """
        self._asleep = True
        await self._settle()

    async def wake(self) -> None:
        """Go on after sleep, unless the engine is also paused."""
        self._asleep = False
        await self._settle()

    async def serve_model(self) -> None:
        """Call the weights that the engine was started with version 0."""
        await self._llm.update_weight_version("0")

    async def load(
        self, manifest: Manifest, buckets: AsyncIterator[TensorBucket], *, reader: str = "an engine"
    ) -> LoadReport:
        """Replace the weights by those of a version.

        Requests in flight stop at a token boundary, keep their tokens, and go on under the new version; all that was
        computed from them with the old weights is computed again. A paused engine stays paused. When a load has begun
        and fails, the engine serves nothing until another one succeeds.

        Args:
            manifest: of the version.
            buckets: its buckets; one may be gone as soon as the next one is asked for.
            reader: this engine, in errors.

        Raises:
            WeightsError: a bucket is gone, or the version does not fit the model.
            AttestationError: what was read is not what was published.
        """
        clock = PhaseClock()
        with clock.phase("wait"):
            bucket = await anext(buckets, None)
        async with self._changing:
            with clock.phase("pause"):
                # This clears the prefix cache too. Nothing is computed until the engine resumes, and so no block of the
                # old weights is left for anybody.
                await self._stop(clear_cache=True)
                await self._restore(["weights"])
            try:
                await self._llm.start_weight_update()
                while bucket is not None:
                    with clock.phase("load"):
                        update = SegmentUpdateInfo.of(manifest.version, bucket)
                        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
                    with clock.phase("wait"):
                        bucket = await anext(buckets, None)
                with clock.phase("finish"):
                    await self._llm.finish_weight_update()
                    (read,) = await self._llm.collective_rpc("forge_rl_load_report")
                    manifest.attest(read["fingerprints"], reader)
                    await self._llm.update_weight_version(str(read["version"]))
            except BaseException as error:
                self._failure = f"version {manifest.version} could not be loaded"
                (problem,) = await self._llm.collective_rpc("forge_rl_give_up_load")
                if problem is not None:
                    message, hint = problem
                    raise WeightsError(message, hint=hint) from error
                raise
            self._failure = ""
        with clock.phase("pause"):
            await self._settle()
        return LoadReport(
            version=read["version"],
            fingerprints=read["fingerprints"],
            in_place=read["in_place"],
            seconds=_stages(clock.finish_step(), read["seconds"]),
        )

    async def _settle(self) -> None:
        """Bring vLLM to the state that was asked for last."""
        async with self._changing:
            if self._asleep and "kv_cache" not in self._released:
                await self._stop(clear_cache=True)
                await self._release()
            elif not self._asleep:
                await self._restore(list(self._released))
            if self._asleep or self._paused:
                await self._stop(clear_cache=False)
            elif self._stopped and not self._failure:
                await self._llm.resume_generation()
                self._stopped = False

    async def _stop(self, *, clear_cache: bool) -> None:
        if not self._stopped or clear_cache:
            # AsyncLLM.pause_generation does this, and then sleeps for 20 ms so that all outputs have been handed out.
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
            self._stopped = True

    async def _release(self) -> None:
        """Give memory back. Not by AsyncLLM.sleep: its wake_up would resume a paused engine."""
        if device_type() == "cpu":
            await self._llm.collective_rpc("forge_rl_release_kv_cache")
            self._released = ["kv_cache"]
        else:
            await self._llm.collective_rpc("sleep", kwargs={"level": 1})
            self._released = ["weights", "kv_cache"]

    async def _restore(self, what: list[str]) -> None:
        back = [tag for tag in self._released if tag in what]
        if back and device_type() != "cpu":  # a CPU's pages come back when they are written
            await self._llm.collective_rpc("wake_up", kwargs={"tags": back})
        self._released = [tag for tag in self._released if tag not in back]

    def close(self) -> None:
        """End the engine's processes."""
        self._closing = True
        self._llm.shutdown()

    def _on_engine_death(self) -> None:
        if not self._closing:
            print("forge_rl: the vLLM engine process died", file=sys.stderr, flush=True)
            os._exit(ENGINE_DIED)


def _stages(whole: dict[str, float], inside: dict[str, float]) -> dict[str, float]:
    """Seconds by stage, each counted once: those that the worker measured were inside the calls that we measured."""
    names = ("wait", "pause", "load", "finish")
    seconds = {name: whole.get(f"seconds/{name}", 0.0) for name in names}
    for name in ("load", "finish"):
        seconds[name] -= inside[name]
    return seconds | {"fingerprint": sum(inside.values())}
