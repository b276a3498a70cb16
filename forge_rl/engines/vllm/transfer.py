"""Loads weights into vLLM's model, bucket by bucket; runs in vLLM's worker."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from forge_rl.engines.vllm import internals
from forge_rl.errors import ForgeError, WeightsError
from forge_rl.metrics.phases import PhaseClock
from forge_rl.runtime.processes import when_process_ends
from forge_rl.weights.fingerprints import Move, move, warm_up
from forge_rl.weights.manifest import TensorEntry
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import TensorBucket

OWNER = "forge_rl_owner"
"""Entry in vLLM's additional_config with the id of the process without which a worker ends."""


class WorkerExtension:
    """Methods that vLLM adds to its worker, for collective_rpc."""

    weight_transfer_engine: BucketTransferEngine

    def forge_rl_load_report(self) -> dict[str, Any]:
        """Report the last load: `version`, `fingerprints` and `in_place` as in LoadReport; and the `seconds` that
        fingerprints took, by the stage that they were a part of."""
        return self.weight_transfer_engine.report

    def forge_rl_give_up_load(self) -> tuple[str, str] | None:
        """Make the worker ready for another load after one that failed.

        Returns:
            Message and hint of the ForgeError that failed it here, which vLLM reports without its class.
        """
        internals.allow_another_update(self)
        return self.weight_transfer_engine.give_up()

    def forge_rl_release_kv_cache(self) -> None:
        """Give back what keys and values take of a CPU's memory."""
        internals.release_kv_cache(self)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """One bucket of a version, in types that vLLM sends to a worker in another process."""

    version: int
    bucket: bytes
    """A pickled `TensorBucket`."""


class BucketTransferEngine(WeightTransferEngine[NoInitInfo, BucketUpdateInfo]):
    """Loads a version into vLLM's model, one bucket after the other.

    vLLM collects what belongs to a layer, such as q, k and v, and puts it into the parameters when it is complete. What
    it still holds of a bucket that was loaded is copied, since the bucket may be gone as soon as the next one is asked
    for: that is less than a layer's weights.
    """

    init_info_cls = NoInitInfo
    update_info_cls = BucketUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.report: dict[str, Any] = {}
        self._problem: ForgeError | None = None
        owner = vllm_config.additional_config.get(OWNER)
        if owner is not None:
            when_process_ends(owner, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        warm_up()

    def start_weight_update(self) -> None:
        self._clock = PhaseClock()
        self._version = -1
        self._entries: list[TensorEntry] = []
        self._fingerprints: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._parameters = _Parameters(self.model)
        internals.begin_reload(self.model)
        self._expected = {name for name, _ in self.model.named_parameters()}
        if self.model_config.hf_config.tie_word_embeddings:
            self._expected.discard("lm_head.weight")

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
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
        internals.finish_reload(self.model, self.model_config)
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
        internals.abandon_reload(self.model, self.model_config)
        problem, self._problem = self._problem, None
        return (problem.message, problem.hint) if problem else None

    def shutdown(self) -> None:
        pass

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
                with internals.collecting(self.model):
                    self._loaded |= self.model.load_weights(weights())
            except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as error:
                raise WeightsError(
                    f"version {version} does not fit the engine's model: {last} of shape "
                    f"{tuple(tensors[last].shape)} led to {type(error).__name__}: {error}",
                    hint="publish the model that the engine was started with",
                ) from error
            internals.copy_held(self.model, tensors)
        self._version = version
        self._entries += bucket.entries

    def _check_complete(self) -> None:
        tied = self.model_config.hf_config.tie_word_embeddings
        missing = sorted(self._expected - self._loaded)
        missing += [f"part of {name}" for name in internals.partly_loaded(self.model, tied=tied)]
        if missing:
            raise WeightsError(
                f"version {self._version} leaves {len(missing)} of the engine's weights as they were: {missing[:3]}",
                hint="publish all of the model's weights, under their Hugging Face names",
            )


class _Parameters:
    """Finds the parameters in which a model computes with the published bytes as they are.

    vLLM repacks some layers for the CPU; their bytes as such exist no more. A fused parameter (qkv, gate-up) is the
    rows of its parts, one after the other.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        mapping = getattr(model, "packed_modules_mapping", {})
        self._fused = {part: (whole, parts) for whole, parts in mapping.items() for part in parts}

    def hold_bytes_of(self, entry: TensorEntry) -> bool:
        """Return True if a parameter, maybe a fused one, has the entry's format."""
        parameter = self._parameters.get(self._place(entry.name)[0])
        return (
            parameter is not None
            and parameter.dtype == entry.torch_dtype
            and parameter.dim() == len(entry.shape)
            and tuple(parameter.shape[1:]) == entry.shape[1:]
            and parameter.numel() >= entry.numel
        )

    def holding(self, entries: Sequence[TensorEntry]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """Yield the entries that are in place, with the rows of the live parameters that hold them."""
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
        """Return the parameter that holds a weight, and the weights that lie before it there."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module not in self._fused:
            return name, []
        whole, parts = self._fused[module]

        def of(part: str) -> str:
            return name.replace(f".{module}.", f".{part}.")

        return of(whole), [of(part) for part in parts[: parts.index(module)]]


def _fingerprints(tensors: dict[TensorEntry, torch.Tensor]) -> dict[str, int]:
    moves = [Move(None, values, entry.shape, TensorSlice.whole(entry.shape)) for entry, values in tensors.items()]
    return {entry.name: value for entry, value in zip(tensors, move(moves), strict=True)}
