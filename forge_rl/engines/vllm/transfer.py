"""Loads weights into vLLM's model, bucket by bucket; runs in vLLM's workers."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from vllm.distributed.weight_transfer import WeightTransferEngine
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.request import LoRARequest

from forge_rl.engines.cpu import trim_heap
from forge_rl.engines.parts import BucketOnHosts
from forge_rl.engines.speculation import read_speculation
from forge_rl.engines.vllm import cpu, internals
from forge_rl.engines.vllm.drafting import Drafter
from forge_rl.engines.vllm.prompt_scores import scale_prompt_logits
from forge_rl.engines.vllm.sampling import sample_by_position
from forge_rl.engines.vllm.slicing import SliceWatch
from forge_rl.engines.vllm.stack_loaders import StackLoaders
from forge_rl.errors import ConfigError, ForgeError, WeightsError
from forge_rl.metrics.phases import PhaseClock
from forge_rl.models.adapter_products import fits, merged_weights
from forge_rl.models.hf_folder import HEAD
from forge_rl.runtime.processes import when_process_ends
from forge_rl.weights.fingerprints import Move, move, warm_up
from forge_rl.weights.manifest import ShardReport, TensorEntry, factor_names
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.stacks import stacks_of
from forge_rl.weights.transports.protocol import TensorBucket

if TYPE_CHECKING:
    from forge_rl.engines.vllm.cpu_routing import RoutingCapture

_FACTORS = factor_names("")
"""Suffixes of the names of adapters' factors."""


@dataclass(frozen=True)
class Owner:
    """Process whose death ends the worker; passed as vLLM's additional_config."""

    pid: int

    def compute_hash(self) -> str:
        """Return this part of vLLM's compile hash: a constant, so that engines share compiled graphs."""
        return "forge_rl"


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """A worker's report of a load."""

    version: int
    bytes: int
    """Bytes read, in the published dtype."""
    shards: list[ShardReport]
    """Slices read, with their fingerprints."""
    repacked: list[str]
    """Names of repacked tensors, whose fingerprints are of the loader's input instead of live parameters."""
    fingerprint_s: float
    """Seconds spent on fingerprints of live parameters; the others are taken while copying."""
    quantized_bytes: int = 0
    """Bytes of the live parameters that hold weights rounded to 8 bits."""


def _answered(work: Callable[..., object]) -> Callable[..., bytes]:
    """Make a method return its pickled result, or the pickled error that it raised."""

    @functools.wraps(work)
    def answer(*args: object) -> bytes:
        try:
            return pickle.dumps(work(*args))
        except ForgeError as error:
            return pickle.dumps(error)
        except Exception as error:
            traceback.print_exc()
            return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))

    return answer


class WorkerExtension:
    """Methods that vLLM adds to its worker, for collective_rpc.

    They never raise: when one worker fails, vLLM leaves the other workers' answers unread and takes them for answers to
    the next call. Answers are pickled because vLLM only sends plain types.
    """

    weight_transfer_engine: BucketTransferEngine
    forge_rl_routing: RoutingCapture

    @_answered
    def forge_rl_process_id(self) -> int:
        return os.getpid()

    @_answered
    def forge_rl_start_load(self, adds_adapters: bool = True) -> None:
        """Begin to load a version, possibly after a failed load: its weights with the adapters added, or without.

        On CPU this frees the KV cache's memory, so the scheduler must have dropped all of its blocks.
        """
        worker: Any = self
        if worker.device.type == "cpu":  # free blocks are taken in turn: before long, all would have been written
            cpu.release_kv_cache(worker)
        self.weight_transfer_engine.adds_adapters = adds_adapters
        # A load that failed in another worker was never finished in this one, and vLLM would refuse the next.
        internals.allow_another_update(worker)
        worker.start_weight_update()

    @_answered
    def forge_rl_load_bucket(self, version: int, bucket: bytes) -> None:
        """Load a bucket of the version, a pickled `TensorBucket`."""
        worker: Any = self
        worker.update_weights({"version": version, "bucket": bucket})

    @_answered
    def forge_rl_finish_load(self) -> WorkerReport:
        worker: Any = self
        worker.finish_weight_update()
        report = self.weight_transfer_engine.report()
        if worker.device.type == "cpu":
            trim_heap()  # the last version's weights and this one's before they were repacked: as much as the model
        return report

    @_answered
    def forge_rl_give_up_load(self) -> None:
        """Reset the worker after a load that failed here or in another worker."""
        self.weight_transfer_engine.give_up()

    @_answered
    def forge_rl_scale_prompt_logits(self) -> None:
        worker: Any = self
        scale_prompt_logits(worker.model_runner)

    @_answered
    def forge_rl_sample_by_position(self) -> None:
        worker: Any = self
        sample_by_position(worker.model_runner)

    @_answered
    def forge_rl_speculate(self, settings: str) -> None:
        """Start drafting, by settings as for `DecodeSettings.speculation`."""
        worker: Any = self
        worker.model_runner.drafter.bind(worker.model_runner, read_speculation(settings))

    @_answered
    def forge_rl_capture_routing(self) -> None:
        """Start recording the experts that each request's tokens are routed to."""
        from forge_rl.engines.vllm.cpu_routing import RoutingCapture

        self.forge_rl_routing = RoutingCapture(self)

    @_answered
    def forge_rl_take_routing(self, request: str) -> npt.NDArray[Any] | None:
        """Return `RoutingCapture.take`'s answer; None from all but the first tensor-parallel rank, as all hold the
        same."""
        worker: Any = self
        routed_experts = self.forge_rl_routing.take(request)
        return routed_experts if worker.rank % worker.parallel_config.tensor_parallel_size == 0 else None

    @_answered
    def forge_rl_add_adapter(self, name: str, number: int, folder: str) -> None:
        """Load an adapter in PEFT's format, under a number of its own."""
        worker: Any = self
        try:
            worker.add_lora(LoRARequest(name, number, folder))
        except ValueError as error:
            raise ConfigError(
                f"vLLM does not serve the adapter {name!r:.80}: {error}", hint="merge it by: forge_rl merge"
            ) from error
        # If served, its answers would not be those of the trained model.
        if inert_modules := internals.inert_modules(worker.model_runner, number):
            worker.remove_lora(number)
            raise ConfigError(
                f"vLLM loads the adapter {name!r:.80} and ignores it in {len(inert_modules)} modules, such as "
                f"{inert_modules[0]!r:.120}",
                hint="merge it by: forge_rl merge",
            )

    @_answered
    def forge_rl_remove_adapter(self, number: int) -> None:
        worker: Any = self
        worker.remove_lora(number)

    @_answered
    def forge_rl_forget_adapters(self) -> None:
        """Forget all adapters, whose memory was freed; the next request of each reads its files again."""
        worker: Any = self
        worker.model_runner.reset_lora_state()

    @_answered
    def forge_rl_release_kv_cache(self) -> None:
        worker: Any = self
        cpu.release_kv_cache(worker)
        if isinstance(drafter := getattr(worker.model_runner, "drafter", None), Drafter):
            drafter.release()


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """Empty: the transfer needs no setup."""


@dataclass
class BucketUpdateInfo(WeightTransferUpdateInfo):
    """One bucket of a version, in types that vLLM can send to another process."""

    version: int
    bucket: bytes
    """A pickled `TensorBucket`."""


class BucketTransferEngine(WeightTransferEngine[NoInitInfo, BucketUpdateInfo]):
    """Loads a version into vLLM's model, one bucket after the other.

    vLLM collects the weights of a layer, such as q, k and v, and writes them to the parameters once the layer is
    complete. Weights still held after a bucket is loaded, less than a layer's, are copied, since the bucket may be gone
    once the next one is requested.
    """

    init_info_cls = NoInitInfo
    update_info_cls = BucketUpdateInfo
    adds_adapters = True
    """True if the version's adapters are added to its weights."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":
            cpu.patch(model)
        self._part: int = vllm_config.parallel_config.node_rank
        owner = vllm_config.additional_config
        if isinstance(owner, Owner):
            when_process_ends(owner.pid, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        warm_up()
        if self.device.type == "cpu":
            trim_heap()  # the weights of the model folder, before they were repacked

    def start_weight_update(self) -> None:
        self._version = -1
        self._loaded: set[str] = set()
        self._factors: dict[str, torch.Tensor] = {}
        """Factors of the version's adapters, by name."""
        self._factor_reports: list[ShardReport] = []
        # Formats before the reload, by which SliceWatch finds parameters that keep the published bytes. Packed experts
        # are left out: their kernel may have reordered them in place, with the same shape.
        before = {
            name: parameter.detach()
            for name, parameter in self.model.named_parameters()
            if not name.endswith(internals.PACKED)
        }
        internals.begin_reload(self.model)
        self._stack_loaders = StackLoaders(self.model)
        self._watch = SliceWatch(self.model, before)
        self._tied = HEAD not in before
        self._aliases = internals.aliases(self.model, before)
        first_names = [name for name, _ in self.model.named_parameters() if name not in self._aliases]
        # Weights that loaders must report at the end; under modules with adapters, they do so without the wrapper's
        # name.
        names = {name.replace(internals.WRAPPED, ".") for name in first_names}
        self._expected = names - ({HEAD} if self._tied else set())

    def receive_weights(self, update_info: BucketUpdateInfo) -> None:
        bucket: TensorBucket = pickle.loads(update_info.bucket)
        if isinstance(bucket, BucketOnHosts):
            # Each host of the engine opens its own copy.
            bucket = replace(bucket, part=self._part)
        with bucket.open() as stored_tensors:
            # Adapters are added before the loaders slice and repack, with the trainer's bits.
            entries, tensors = self._merged(bucket.entries, stored_tensors)
            stacks = list(stacks_of(entries, tensors))
            last = "the first tensor"

            def weights() -> Iterator[tuple[str, torch.Tensor]]:
                nonlocal last
                for name, tensor in self._stack_loaders.tensors(stacks):
                    last = f"{name} of shape {tuple(tensor.shape)}"
                    yield name, tensor

            try:
                with self._watch.reading(stacks):
                    with internals.collecting(self.model), self._watch:
                        # SliceWatch on top, so that it sees copies before `collecting` redirects any.
                        self._loaded |= self.model.load_weights(weights())
                    internals.copy_held(self.model, tensors, self._watch.keep)
            # What vLLM's loaders raise for a tensor of another model: unknown names, wrong shapes.
            except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError) as error:
                raise WeightsError(
                    f"version {update_info.version} does not fit the engine's model: {last} led to "
                    f"{type(error).__name__}: {error}",
                    hint="publish the model that the engine was started with",
                ) from error
        self._version = update_info.version

    def _merged(
        self, entries: Sequence[TensorEntry], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[list[TensorEntry], dict[str, torch.Tensor]]:
        """Keep the factors of adapters and return the other tensors; unless versions are served, the adapters are added
        to them.

        Raises:
            WeightsError: the factors of an adapter have not come, or do not fit.
        """
        # A version publishes factors before the weights that they are added to.
        weights = [entry for entry in entries if not entry.name.endswith(_FACTORS)]
        for entry in entries:
            if entry.name.endswith(_FACTORS):
                tensor_slice = TensorSlice.whole(entry.shape)
                self._factors[entry.name] = values = torch.empty_like(tensors[entry.name])
                # Copied, as the weights that need these factors may come in a later bucket.
                (fingerprint,) = move([Move(values, tensors[entry.name], entry.shape, tensor_slice)])
                report = ShardReport(name=entry.name, tensor_slice=tensor_slice, fingerprint=fingerprint)
                self._factor_reports.append(report)
        merged = {entry.name: tensors[entry.name] for entry in weights}
        factors: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for entry in weights:
            if entry.adapter_scale is None or not self.adds_adapters:
                continue
            a, b = (self._factors.get(name) for name in factor_names(entry.name))
            if a is None or b is None or not fits(entry.shape, a.shape, b.shape):
                raise WeightsError(
                    f"the adapter of {entry.name!r} came after it, or does not fit its shape {entry.shape}",
                    hint="publish adapters before the weights that they are added to",
                )
            factors[entry.name] = a, b, entry.adapter_scale
        return weights, merged | merged_weights(tensors, factors)

    def finish_weight_update(self) -> None:
        self._check_complete()
        with self._watch:
            internals.finish_reload(self.model, self.model_config, tied=self._tied)
        # Second names never get values of their own: they are only right while they share memory with the first.
        live = dict(self.model.named_parameters(remove_duplicate=False))
        if parted := [
            alias for alias, name in self._aliases.items() if live[alias].data_ptr() != live[name].data_ptr()
        ]:
            raise WeightsError(
                f"version {self._version} leaves {parted[:3]} unchanged, which shared memory with "
                f"{[self._aliases[alias] for alias in parted[:3]]}",
                hint=f"install vLLM {internals.TRIED_ON}",
            )

    def report(self) -> WorkerReport:
        """Report the last load, once its weights are in place."""
        clock = PhaseClock()
        with clock.phase("fingerprint"):
            # Taken here rather than while loading, so that the fingerprints cover what the model will compute with.
            shards = self._watch.shards() + self._factor_reports
        return WorkerReport(
            version=self._version,
            bytes=self._watch.bytes + sum(values.nbytes for values in self._factors.values()),
            shards=shards,
            repacked=self._watch.repacked,
            fingerprint_s=clock.finish_step()["seconds/fingerprint"],
            quantized_bytes=sum(weights.nbytes for weights in self.model.parameters() if weights.itemsize == 1),
        )

    def give_up(self) -> None:
        """Reset vLLM's model so that another load can begin; its weights then belong to no version."""
        internals.abandon_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass

    def _check_complete(self) -> None:
        if self._tied and HEAD in self._loaded:
            raise WeightsError(
                f"version {self._version} has an {HEAD!r} of its own, and the engine's model none",
                hint='set "tie_word_embeddings" to false in config.json of the model that the engine starts with',
            )
        # The folder's head was not the embedding, against its config.json; that of this version is.
        self._tied |= HEAD not in self._loaded and internals.was_untied(self.model_config)
        missing = sorted(self._expected - self._loaded - ({HEAD} if self._tied else set()))
        layers = {name.rpartition(".")[0] for name in missing}
        partly = internals.partly_loaded(self.model, tied=self._tied)
        missing += [f"part of {name}" for name in partly if name not in layers]
        if missing:
            raise WeightsError(
                f"version {self._version} leaves {len(missing)} of the engine's weights unchanged: {missing[:3]}",
                hint="publish all of the model's weights, under their Hugging Face names",
            )
