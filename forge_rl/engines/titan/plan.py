"""Estimates a training step's memory by running the model on one row of meta tensors, forward and backward."""

from __future__ import annotations

import contextlib
import math
import re
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_rl.engines.architecture import Architecture
from forge_rl.engines.cpu import MAPPED_BYTES
from forge_rl.engines.devices import device_type
from forge_rl.engines.memory import TrainMemory, adds_up_once
from forge_rl.engines.optimizer import LEAST_INT8, moments_bytes
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.stage_plan import stage_layers
from forge_rl.engines.titan.cpu_attention import MASK_BYTES, TreeAttention, TreeMask
from forge_rl.engines.titan.general_model import GeneralModel, build_general
from forge_rl.engines.titan.general_parallel import TensorPeers
from forge_rl.engines.titan.model import PolicyModel, build_model, recompute_activations
from forge_rl.engines.titan.shards import freeze, named_weights, names_of
from forge_rl.errors import ForgeError, ModelError
from forge_rl.packing.rows import Row

_EXPERTS = re.compile(r"\.(inner_)?experts\.")
"""Matches names of stacked experts' weights, torchtitan's and transformers'."""


@dataclass(frozen=True, kw_only=True)
class MemoryTrace:
    """A model's parameters, and the bytes of one row on one device, before anything is split over ranks."""

    count: int
    """Number of parameters, in which quantised matrices count by their bytes, see `_elements`."""
    trained: int
    """Number of parameters that are not frozen."""
    few: int
    """Number of trained parameters in tensors too small for moments in int8."""
    largest: int
    """Elements of the largest parameter."""
    small: int
    """Number of trained parameters in tensors whose gradients are in a CPU's heap, see `cpu.HEAP_ENVIRONMENT`."""
    units: tuple[tuple[int, int], ...]
    """Elements of each unit that FSDP gathers: of its experts, and of its other weights. The last unit is outside the
    layers."""
    row: int
    """Peak bytes of the layers in both passes, without weights and their gradients."""
    head: int
    """Bytes that the output head adds."""
    tensors: int
    """Number of tensors that a version holds."""
    stacked: int
    """Number of those that the model keeps in stacks, such as experts', of which a rank has some."""
    stacks: int
    """Number of stacks that engines load these as: one for each projection of a layer's experts."""
    shapes: int
    """Number of distinct shapes of its tensors."""


Traces = MutableMapping[tuple[object, ...], MemoryTrace]
"""Traces of one model by the settings that they depend on, kept because making one takes seconds."""


def plan_training(
    architecture: Architecture,
    settings: TrainSettings,
    *,
    ranks: int,
    reference: bool,
    values: bool = False,
    tokens: int | None = None,
    traces: Traces | None = None,
) -> TrainMemory:
    """Estimate one rank's memory before anything is loaded.

    State is split over all ranks of one copy of the policy, except gradients reduced once per update. A row's
    activations are split by tensor parallelism, as torchtitan also splits the sequence between its matrices;
    transformers' models do not, and are counted as one rank runs them. With a pipeline, each figure is the maximum
    over its stages.

    Args:
        values: plan a value model in place of a policy.
        tokens: tokens of a row on one device; by default the most that the settings allow.
        traces: earlier traces of this model, to which new ones are added.
    """
    dtype = resolve_dtype(settings.dtype)
    state_itemsize = torch.promote_types(dtype, torch.float32).itemsize
    tokens = tokens or settings.seq_len
    traces = {} if traces is None else traces
    tp, cp, pp = (
        settings.tensor_parallel_degree,
        settings.context_parallel_degree,
        settings.pipeline_parallel_degree,
    )
    split = 1 if architecture.family.general else tp  # parts of a row's tokens
    key = (dtype, settings.activation_checkpointing, settings.frozen, settings.lora, tokens, values, tp // split)
    if key not in traces:
        traces[key] = _trace(architecture, settings, values, tokens)
    trace = traces[key]
    num_shards = ranks // settings.data_parallel_replicate_degree // pp
    whole_gradients = adds_up_once(architecture.weights, settings, ranks=ranks)
    kept_layers = architecture.layers  # over all rows under way
    if pp > 1:
        kept_layers = _layers_under_way(architecture, pp)
        trace = _heaviest_stage(trace, architecture, pp, tied=architecture.tied and not values)
    row, offloaded = trace.row // split, 0
    hidden_bytes = tokens * architecture.dim * dtype.itemsize // split
    if settings.enable_activation_offload:  # the layer that is recomputed has its input on the device
        row, offloaded = row - (kept_layers - 1) * hidden_bytes, kept_layers * hidden_bytes
    if cp > 1:  # each rank keeps the keys and values of the whole row, and one layer's also as they were gathered
        layers = kept_layers if settings.activation_checkpointing == "none" else 1
        # The other cp - 1 parts of each kept layer, and all cp parts of one layer as they were gathered.
        kv_elements = tokens * (layers * (cp - 1) + cp) * architecture.kv_heads * architecture.head_dim
        row += 2 * kv_elements * dtype.itemsize // tp
    is_recomputed = settings.activation_checkpointing != "none" and hidden_bytes < MAPPED_BYTES
    # With adapters, frozen weights are in the dtype of the passes.
    num_trained = trace.trained if settings.lora.rank else trace.count
    heap_bytes = (
        state_itemsize * trace.small // (tp if whole_gradients else num_shards) // 2
        + is_recomputed * kept_layers * hidden_bytes
    )
    return TrainMemory(
        weights=(state_itemsize * num_trained + dtype.itemsize * (trace.count - num_trained)) // num_shards,
        gradients=state_itemsize * trace.trained // (tp if whole_gradients else num_shards),
        optimizer=_moments(trace, settings, state_itemsize) // num_shards,
        moments=2 * state_itemsize * trace.trained // num_shards,
        reference=dtype.itemsize * trace.count // num_shards if reference and not settings.lora.rank else 0,
        gathered=_gathered(trace, dtype, num_shards, settings.expert_parallel_degree) // tp,
        activations=row,
        hot_experts=_hot_expert_bytes(architecture, settings, tokens // split, kept_layers),
        head=trace.head // split,
        masks=min(MASK_BYTES, tokens * tokens * dtype.itemsize) * 2,
        offloaded=offloaded,
        largest=state_itemsize * trace.largest // num_shards,
        heap=(50 << 20) + heap_bytes + hidden_bytes * 7 // 2 if device_type() == "cpu" else 0,  # a fit, see TrainMemory
    )


def _hot_expert_bytes(architecture: Architecture, settings: TrainSettings, tokens: int, kept_layers: int) -> int:
    """Return a rank's additional bytes if its experts are chosen twice as often as the other ranks' experts.

    Of N ranks, it has 2 N / (N + 1) times the mean's rows: their inputs, both halves of the hidden activations,
    SwiGLU and results in each layer, or with selective recomputation the inputs, which came from other ranks, and all
    of them twice in one layer, for its backward pass. Ranks that lend experts have the mean's rows, and the weights and
    gradients of borrowed experts.
    """
    experts, ep = architecture.experts, settings.expert_parallel_degree
    if experts is None or ep == 1:
        return 0
    itemsize, dim, hidden = resolve_dtype(settings.dtype).itemsize, architecture.dim, experts.hidden_dim
    if settings.expert_balance == "least_loaded":
        borrowed = math.ceil(experts.count / (2 * ep * ep))  # the excess over the mean, shared by the others
        return 2 * borrowed * 3 * dim * hidden * itemsize
    elements = 2 * dim + 3 * hidden
    saved_elements = {"none": elements, "selective": dim, "full": 0}[settings.activation_checkpointing]
    layers = max(1.0, kept_layers * len(experts.layers) / architecture.layers)
    excess_rows = tokens * experts.top_k * (ep - 1) / (ep + 1)
    return round(excess_rows * itemsize * (2 * elements + (layers - 1) * saved_elements))


def _layers_under_way(architecture: Architecture, stages: int) -> int:
    """Return the most layers whose activations a stage holds: its own layers, times its rows under way."""
    layers = stage_layers(architecture, stages)
    return max(len(stage) * (stages - index) for index, stage in enumerate(layers))


def _heaviest_stage(trace: MemoryTrace, architecture: Architecture, stages: int, *, tied: bool) -> MemoryTrace:
    """Return a trace with the weights of the stage that has the most, and the most activations of any stage."""
    a, layers = architecture, stage_layers(architecture, stages)
    stage_weights = [sum(sum(trace.units[number]) for number in stage) for stage in layers]
    embedding, outside = a.vocab * a.dim, sum(trace.units[-1])
    stage_weights[0] += embedding
    stage_weights[-1] += outside if tied else outside - embedding
    # Trained and small parameters are taken to be spread like all others.
    share = max(stage_weights) / trace.count
    row = trace.row * _layers_under_way(a, stages) // a.layers
    last = trace.row * len(layers[-1]) // a.layers + trace.head
    return replace(
        trace,
        count=max(stage_weights),
        trained=round(trace.trained * share),
        few=round(trace.few * share),
        small=round(trace.small * share),
        row=row,
        head=max(0, last - row),
    )


def _moments(trace: MemoryTrace, settings: TrainSettings, state_itemsize: int) -> int:
    """Return the bytes of both moments; with int8, small tensors keep float32 ones."""
    if settings.optimizer_state == "float32":
        return 2 * state_itemsize * trace.trained
    few = trace.few if settings.optimizer_state == "int8" else 0
    return 8 * few + round(moments_bytes(settings.optimizer_state) * (trace.trained - few))


def _trace(architecture: Architecture, settings: TrainSettings, values: bool, tokens: int) -> MemoryTrace:
    """Build the model on the meta device and run a row through it."""
    model: PolicyModel | GeneralModel
    if architecture.family.general:
        model = build_general(architecture, settings, values=values).to("meta")
    else:
        with torch.device("meta"):
            model = build_model(architecture, settings, values=values)
    if model.adapters is None:
        freeze(model, settings.frozen)
    itemsize = resolve_dtype(settings.dtype).itemsize
    sizes = [(_elements(parameter, itemsize), parameter.requires_grad) for parameter in model.parameters()]
    layers: list[Any] = list(model.get_submodule("layers").children())
    inside = {id(p) for layer in layers for p in layer.parameters()}
    units = [
        tuple(
            sum(
                _elements(p, itemsize)
                for name, p in layer.named_parameters()
                if bool(_EXPERTS.search(name)) == of_experts
            )
            for of_experts in (True, False)
        )
        for layer in layers
    ]
    outside = sum(_elements(p, itemsize) for p in model.parameters() if id(p) not in inside)
    parts = [list(names_of(model).parts(name, weight.shape)) for name, weight in named_weights(model)]
    # Split last: the figures above are of whole weights.
    if isinstance(model, GeneralModel) and settings.tensor_parallel_degree > 1:
        model.split(TensorPeers(size=settings.tensor_parallel_degree))
    try:
        row, head = _row_bytes(model, settings, resolve_dtype(settings.dtype), tokens, architecture.window is not None)
    except ForgeError:
        raise
    except Exception as error:
        if not architecture.family.general:
            raise
        cause = next(iter(str(error).strip().splitlines()), "")
        raise ModelError(
            f"transformers' code of a {architecture.family.model_type!r} does not run on packed rows: "
            f"{type(error).__name__}: {cause:.200}",
            hint="use a model of another architecture",
        ) from error
    return MemoryTrace(
        count=sum(size for size, _ in sizes),
        trained=sum(size for size, is_trained in sizes if is_trained),
        few=sum(size for size, is_trained in sizes if is_trained and size < LEAST_INT8),
        largest=max(size for size, _ in sizes),
        small=sum(size for size, is_trained in sizes if is_trained and 4 * size < MAPPED_BYTES),
        units=tuple((experts, dense) for experts, dense in [*units, (0, outside)]),
        row=row,
        head=head,
        tensors=sum(map(len, parts)),
        stacked=sum(part.index is not None for weight_parts in parts for part in weight_parts),
        stacks=sum(part.index == 0 for weight_parts in parts for part in weight_parts),
        shapes=len({part.shape for weight_parts in parts for part in weight_parts}),
    )


def _elements(parameter: torch.Tensor, itemsize: int) -> int:
    """Return a parameter's number of elements; for codes and scales of a quantised matrix, as many elements in the
    dtype of the passes as take the same bytes."""
    return parameter.numel() if parameter.is_floating_point() else parameter.nbytes // itemsize


def _row(tokens: int) -> Row:
    """Return a row of one episode, from which a general model makes its masks."""
    index = torch.arange(tokens)
    zeros, ends = torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), tokens, dtype=torch.int32)
    numbers: dict[str, Any] = dict.fromkeys(
        ("behaviour", "advantages", "versions", "episodes", "segments", "turns", "lengths", "targets"), zeros
    )
    flags: dict[str, Any] = dict.fromkeys(("mask", "observed"), zeros.bool())
    return Row(token_ids=index, positions=index, trees=zeros, until=ends, **numbers, **flags)


def _gathered(trace: MemoryTrace, dtype: torch.dtype, num_shards: int, ep: int) -> int:
    """Bytes of gathered weights in the dtype of the passes: two units, as FSDP prefetches one. A rank gathers only its
    own experts."""
    if num_shards == 1:  # they are cast once, and stay
        return 0 if dtype.itemsize >= 4 else dtype.itemsize * trace.count
    units = [experts // ep + dense for experts, dense in trace.units]
    return int(dtype.itemsize * sum(sorted(units)[-2:]))


def _row_bytes(model: Any, settings: TrainSettings, dtype: torch.dtype, tokens: int, windowed: bool) -> tuple[int, int]:
    """Return the layers' peak bytes in both passes over one row, without weights and their gradients, and the bytes
    that the head adds."""
    model.to(dtype)
    is_general = isinstance(model, GeneralModel)
    if not is_general:
        for layer in model.layers.values():
            layer.attention.inner_attention = TreeAttention(TreeAttention.Config())  # saves the same as FlexAttention
    recompute_activations(model, settings.activation_checkpointing)
    # Gradients are planned separately; dropping each at once keeps them out of the peak.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    ids, targets = (torch.zeros(1, tokens, dtype=torch.int64, device="meta") for _ in range(2))
    positions = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    zeros = torch.zeros(tokens, dtype=torch.int32)
    mask = TreeMask(first=0, until=zeros, queries=tokens, branched=False, positions=zeros)
    masks: Any = (mask,)
    if is_general:
        masks = _row(tokens)
    elif windowed:
        masks = {"basic_mask": (mask,), "sliding_window_mask": (mask,)}
    peaks = []
    # Scoring one position and then all of them: the difference is what the head adds.
    for score in (False, True):
        scored_indices = slice(None) if score else slice(0, 1)
        with _without_autocast(), LiveBytes() as live:
            scores = model(ids, positions, masks, scored_indices=scored_indices, targets=targets[0, scored_indices])
            (scores.logprobs if scores.values is None else scores.values).sum().backward()
        del scores
        peaks.append(live.peak)
    return peaks[0], max(0, peaks[1] - peaks[0])


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Let torchtitan's routers run on the meta device, which has no autocast; `FloatGate` needs none."""
    original = torch.autocast
    torch.autocast = lambda **_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.autocast = original  # type: ignore[misc]


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Meta version of torch._grouped_mm: torch's own only supports bfloat16 with some strides."""
    shape = (a.shape[-2], b.shape[-1])
    return a.new_empty((len(offsets), *shape) if a.ndim == b.ndim == 2 else shape)


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of all tensors created by operations."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].device.type == "meta":
            outputs = _grouped_mm(args[0], args[1], args[2])
        else:
            outputs = func(*args, **(kwargs or {}))
        input_keys = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(outputs):
            storage = tensor.untyped_storage()
            key = storage._cdata
            # Views and in-place results bring no new memory.
            if key in input_keys or key in self._known:
                continue
            self._known.add(key)
            self.live += storage.nbytes()
            # The storage dies with its last tensor, and its bytes with it.
            weakref.finalize(storage, self._gone, key, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return outputs

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
