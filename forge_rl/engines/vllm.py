"""Decoding on vLLM: the only place that imports it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM

from forge_rl.engines.platform import device_type
from forge_rl.errors import WeightsError
from forge_rl.runtime.faults import ENGINE_DIED
from forge_rl.types import Sampling, Turn
from forge_rl.weights.fingerprint import fingerprint
from forge_rl.weights.manifest import LoadReport, Manifest, TensorEntry
from forge_rl.weights.segment import SegmentRef, read_segment

BACKEND = "forge_rl"


def register() -> None:
    """vLLM's plugin hook (see pyproject.toml): makes our weight-transfer engine known in each of vLLM's processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SegmentTransferEngine")


class VLLMEngine:
    """One vLLM engine, in processes of its own below this one."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._closing = False
        for process in llm.engine_core.resources.engine_manager.processes:
            _when_process_ends(process.pid, self._on_engine_death)

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
            worker_extension_cls=f"{__name__}.WorkerExtension",
            additional_config={"forge_rl_owner": os.getpid()},
        )
        engine = cls(AsyncLLM.from_engine_args(arguments))
        await engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        return engine

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Turn:
        """Decode one answer.

        Greedy answers carry no logprobs (NaN): they are for evaluation, not for training.
        """
        greedy = sampling.temperature == 0
        parameters = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed,
            logprobs=None if greedy else 0,
        )
        final = None
        prompt = {"type": "token", "prompt_token_ids": list(prompt_ids)}
        async for output in self._llm.generate(prompt, parameters, request_id=uuid.uuid4().hex):
            final = output
        assert final is not None, "vLLM ended a request without an answer"
        answer = final.outputs[0]
        ids = tuple(answer.token_ids)
        if greedy:
            logprobs = (math.nan,) * len(ids)
        else:
            logprobs = tuple(step[token].logprob for step, token in zip(answer.logprobs, ids, strict=True))
        versions = [-1] * len(ids)
        for span in answer.weight_versions or ():
            if span.version.isdecimal():
                versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        return Turn(
            prompt_ids=tuple(prompt_ids),
            token_ids=ids,
            logprobs=logprobs,
            versions=tuple(versions),
            text=answer.text,
            truncated=answer.finish_reason == "length",
        )

    async def load(self, ref: SegmentRef, manifest: Manifest) -> LoadReport:
        """Replace the weights by those of a segment; no request may be in flight.

        Raises:
            WeightsError: the segment or the manifest does not fit the model.
        """
        update = {
            "pid": ref.pid,
            "fd": ref.fd,
            "version": manifest.version,
            "names": [entry.name for entry in manifest.tensors],
            "shapes": [list(entry.shape) for entry in manifest.tensors],
            "dtypes": [entry.dtype for entry in manifest.tensors],
        }
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self._llm.collective_rpc("finish_weight_update")
        (report,) = await self._llm.collective_rpc("forge_rl_load_report")
        await self._llm.update_weight_version(str(report["version"]))
        await self._llm.reset_prefix_cache()
        return LoadReport(**report)

    def close(self) -> None:
        """End the engine's processes."""
        self._closing = True
        self._llm.shutdown()

    def _on_engine_death(self) -> None:
        if not self._closing:
            print("forge_rl: the vLLM engine process died", file=sys.stderr, flush=True)
            os._exit(ENGINE_DIED)


class WorkerExtension:
    """Methods that vLLM adds to its worker, for collective_rpc."""

    weight_transfer_engine: SegmentTransferEngine

    def forge_rl_load_report(self) -> dict[str, Any]:
        """LoadReport's fields, of the last load."""
        return self.weight_transfer_engine.report


@dataclass
class SegmentInitInfo(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class SegmentUpdateInfo(WeightTransferUpdateInfo):
    """Where a version lies, and what it consists of."""

    pid: int
    fd: int
    version: int
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]


class SegmentTransferEngine(WeightTransferEngine[SegmentInitInfo, SegmentUpdateInfo]):
    """Loads a version from shared memory into vLLM's model, in the worker's process."""

    init_info_cls = SegmentInitInfo
    update_info_cls = SegmentUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.report: dict[str, Any] = {}
        owner = vllm_config.additional_config.get("forge_rl_owner")
        if owner is not None:
            _when_process_ends(owner, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def init_transfer_engine(self, init_info: SegmentInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SegmentUpdateInfo) -> None:
        entries = tuple(
            TensorEntry(name=name, shape=tuple(shape), dtype=dtype, fingerprint=0, shards=())
            for name, shape, dtype in zip(update_info.names, update_info.shapes, update_info.dtypes, strict=True)
        )
        manifest = Manifest(version=update_info.version, tensors=entries)
        fingerprints: dict[str, int] = {}

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for entry, tensor in read_segment(SegmentRef(pid=update_info.pid, fd=update_info.fd), manifest):
                fingerprints[entry.name] = fingerprint(tensor, entry.shape)
                yield entry.name, tensor

        expected = {name for name, _ in self.model.named_parameters()}
        if self.model_config.hf_config.tie_word_embeddings:
            expected.discard("lm_head.weight")
        loaded = self.model.load_weights(weights())
        if missing := sorted(expected - loaded):
            raise WeightsError(
                f"version {manifest.version} leaves {len(missing)} of the engine's weights as they were: {missing[:3]}"
            )
        self.report = {"version": manifest.version, "fingerprints": fingerprints, "in_place": 0}
        self._entries = entries

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
            # vLLM reloads the embedding but not the output projection that is tied to it, and on CPU that one computes
            # with a repacked copy of the old weights.
            self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)
        live = _live_fingerprints(self.model, self._entries)
        self.report["fingerprints"] |= live
        self.report["in_place"] = len(live)

    def shutdown(self) -> None:
        """Nothing to release."""


def _live_fingerprints(model: torch.nn.Module, entries: Sequence[TensorEntry]) -> dict[str, int]:
    """Fingerprints over the parameters that the model computes with, where they still hold the published bytes.

    A fused parameter (qkv, gate-up) is the rows of its parts, one after the other.
    """
    parameters = dict(model.named_parameters())
    fused = {
        part: (whole, parts) for whole, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts
    }
    rows = {entry.name: entry.shape[0] for entry in entries}
    found: dict[str, int] = {}
    for entry in entries:
        name, first = entry.name, 0
        module = name.split(".")[-2]
        if module in fused:
            whole, parts = fused[module]
            earlier = parts[: parts.index(module)]
            first = sum(rows.get(name.replace(f".{module}.", f".{part}."), 0) for part in earlier)
            name = name.replace(f".{module}.", f".{whole}.")
        parameter = parameters.get(name)
        if parameter is None or str(parameter.dtype) != f"torch.{entry.dtype}":
            continue
        live = parameter.detach()[first : first + entry.shape[0]]
        if tuple(live.shape) == entry.shape:
            found[entry.name] = fingerprint(live, entry.shape)
    return found


def _when_process_ends(pid: int, action: Callable[[], None]) -> None:
    """Run an action in a thread as soon as a process of this user ends; at once if it has ended already."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            select.select([fd], [], [])
            os.close(fd)
        action()

    threading.Thread(target=watch, name=f"watch-{pid}", daemon=True).start()
