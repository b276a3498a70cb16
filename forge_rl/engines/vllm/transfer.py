"""Weights into vLLM's model: runs in vLLM's worker, and reads them bucket by bucket from shared memory."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from forge_rl.engines.vllm.memory import release
from forge_rl.errors import ForgeError, WeightsError
from forge_rl.metrics.phases import PhaseClock
from forge_rl.runtime.processes import when_process_ends
from forge_rl.weights.fingerprints import Move, fingerprint, move
from forge_rl.weights.manifest import TensorEntry
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import TensorBucket

BACKEND = "forge_rl"
"""Name of our weight transfer in vLLM."""

OWNER = "forge_rl_owner"
"""Of the entry in vLLM's additional_config that has the process id without which a worker ends."""


def register() -> None:
    """vLLM's plugin hook (see pyproject.toml): makes our weight transfer known in each of vLLM's processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SegmentTransferEngine")


class WorkerExtension:
    """Methods that vLLM adds to its worker, for collective_rpc."""

    weight_transfer_engine: SegmentTransferEngine
    model_runner: Any
    _weight_update_active: bool

    def forge_rl_load_report(self) -> dict[str, Any]:
        """Of the last load: `version`, `fingerprints` and `in_place` as in LoadReport; and the `seconds` that
        fingerprints took, by the stage that they were a part of."""
        return self.weight_transfer_engine.report

    def forge_rl_give_up_load(self) -> tuple[str, str] | None:
        """Make the worker ready for another load after one that failed.

        Returns:
            Message and hint of the ForgeError that failed it here, which vLLM reports without its class.
        """
        self._weight_update_active = False
        return self.weight_transfer_engine.give_up()

    def forge_rl_release_kv_cache(self) -> None:
        """Give back what keys and values take of a CPU's memory, which vLLM's own sleep and discard cannot; they are
        zeros then, as when the engine had started."""
        release(self.model_runner.kv_caches)


@dataclass
class SegmentInitInfo(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class SegmentUpdateInfo(WeightTransferUpdateInfo):
    """One bucket of a version, in types that vLLM sends to a worker in another process."""

    version: int
    bucket: bytes
    """A pickled `TensorBucket`."""

    @staticmethod
    def of(version: int, bucket: TensorBucket) -> dict[str, Any]:
        """The fields for a bucket."""
        return {"version": version, "bucket": pickle.dumps(bucket)}


class SegmentTransferEngine(WeightTransferEngine[SegmentInitInfo, SegmentUpdateInfo]):
    """Loads a version into vLLM's model, one bucket of shared memory after the other.

    vLLM collects what belongs to a layer, such as q, k and v, and puts it into the parameters when it is complete. What
    it still holds of a bucket that was loaded is copied, since the bucket may be gone as soon as the next one is asked
    for: that is less than a layer's weights.
    """

    init_info_cls = SegmentInitInfo
    update_info_cls = SegmentUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.report: dict[str, Any] = {}
        self._problem: ForgeError | None = None
        owner = vllm_config.additional_config.get(OWNER)
        if owner is not None:
            when_process_ends(owner, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def init_transfer_engine(self, init_info: SegmentInitInfo) -> None:
        fingerprint(torch.zeros(8, 8), (8, 8))  # loads the compiled loop, which takes a while

    def start_weight_update(self) -> None:
        self._clock = PhaseClock()
        self._version = -1
        self._entries: list[TensorEntry] = []
        self._fingerprints: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._parameters = _Parameters(self.model)
        initialize_layerwise_reload(self.model)
        self._expected = {name for name, _ in self.model.named_parameters()}
        if self.model_config.hf_config.tie_word_embeddings:
            self._expected.discard("lm_head.weight")

    def receive_weights(self, update_info: SegmentUpdateInfo) -> None:
        try:
            self._load(update_info.version, pickle.loads(update_info.bucket))
        except ForgeError as error:
            self._problem = error
            raise

    def finish_weight_update(self) -> None:
        try:
            self._check_complete()
        except ForgeError as error:
            self._problem = error
            raise
        del self._parameters
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_config.tie_word_embeddings:
            # vLLM reloads the embedding but not the output projection that is tied to it, and on CPU that one computes
            # with a repacked copy of the old weights.
            self.model.lm_head.quant_method.process_weights_after_loading(self.model.lm_head)
        with self._clock.phase("finish"):
            live = dict(_Parameters(self.model).holding(self._entries))
            self._fingerprints |= _fingerprints(live)
        seconds = self._clock.finish_step()
        self.report = {
            "version": self._version,
            "fingerprints": self._fingerprints,
            "in_place": len(live),
            "seconds": {stage: seconds[f"seconds/{stage}"] for stage in ("load", "finish")},
        }

    def give_up(self) -> tuple[str, str] | None:
        """Put vLLM's model back into a state in which a load can begin; its weights are of no version."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)
        problem, self._problem = self._problem, None
        return (problem.message, problem.hint) if problem else None

    def shutdown(self) -> None:
        """Nothing to release."""

    def _load(self, version: int, bucket: TensorBucket) -> None:
        with bucket.open() as tensors:
            with self._clock.phase("load"):
                repacked = [entry for entry in bucket.entries if not self._parameters.hold_bytes_of(entry)]
                self._fingerprints |= _fingerprints({entry: tensors[entry.name] for entry in repacked})
            last = ""

            def weights() -> Iterator[tuple[str, torch.Tensor]]:
                nonlocal last
                for name, tensor in tensors.items():
                    last = name
                    yield name, tensor

            try:
                self._loaded |= self.model.load_weights(weights())
            except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as error:
                raise WeightsError(
                    f"version {version} does not fit the engine's model: {last} of shape "
                    f"{tuple(tensors[last].shape)} led to {type(error).__name__}: {error}",
                    hint="publish the model that the engine was started with",
                ) from error
            self._copy_held(tensors)
        self._version = version
        self._entries += bucket.entries

    def _copy_held(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what vLLM still holds of a bucket for layers that are not complete."""
        passing = {_storage(tensor) for tensor in tensors.values()}

        def owned(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.clone() if _storage(value) in passing else value
            if isinstance(value, tuple):
                return tuple(owned(item) for item in value)
            return {key: owned(item) for key, item in value.items()} if isinstance(value, dict) else value

        for layer in self.model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                call.arguments.update({name: owned(value) for name, value in call.arguments.items()})

    def _check_complete(self) -> None:
        missing = sorted(self._expected - self._loaded)
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            # Of linear layers only: embeddings may be padded.
            if isinstance(layer, LinearBase) and info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0):
                missing.append(f"part of {name}")
        if missing:
            raise WeightsError(
                f"version {self._version} leaves {len(missing)} of the engine's weights as they were: {missing[:3]}",
                hint="publish all of the model's weights, under their Hugging Face names",
            )


class _Parameters:
    """Where a model computes with the published bytes as they are.

    vLLM repacks some layers for the CPU; their bytes as such exist no more. A fused parameter (qkv, gate-up) is the
    rows of its parts, one after the other.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        mapping = getattr(model, "packed_modules_mapping", {})
        self._fused = {part: (whole, parts) for whole, parts in mapping.items() for part in parts}

    def hold_bytes_of(self, entry: TensorEntry) -> bool:
        """Whether a parameter, maybe a fused one, has the entry's format."""
        parameter = self._parameters.get(self._place(entry.name)[0])
        return (
            parameter is not None
            and parameter.dtype == entry.torch_dtype
            and parameter.dim() == len(entry.shape)
            and tuple(parameter.shape[1:]) == entry.shape[1:]
            and parameter.numel() >= entry.numel
        )

    def holding(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """The entries that are in place, with the rows of the live parameters that hold them."""
        rows = {entry.name: entry.shape[0] for entry in entries if entry.shape}
        for entry in entries:
            if self.hold_bytes_of(entry):
                name, earlier = self._place(entry.name)
                first = sum(rows.get(part, 0) for part in earlier)
                live = (
                    self._parameters[name][first : first + rows[entry.name]] if entry.shape else self._parameters[name]
                )
                if tuple(live.shape) == entry.shape:
                    yield entry, live

    def _place(self, name: str) -> tuple[str, list[str]]:
        """Name of the parameter that holds a weight, and the weights that lie before it there."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module not in self._fused:
            return name, []
        whole, parts = self._fused[module]

        def of(part: str) -> str:
            return name.replace(f".{module}.", f".{part}.")

        return of(whole), [of(part) for part in parts[: parts.index(module)]]


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    """Device and address of the bytes behind a tensor; a meta tensor's address is 0."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def _fingerprints(tensors: dict[TensorEntry, torch.Tensor]) -> dict[str, int]:
    moves = [Move(None, values, entry.shape, TensorSlice.whole(entry.shape)) for entry, values in tensors.items()]
    return {entry.name: value for entry, value in zip(tensors, move(moves), strict=True)}
