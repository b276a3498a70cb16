"""LoRA on torchtitan: linear layers with adapters in any layout, and weights with the adapters merged into them.

torchtitan's own component (`torchtitan.components.lora`) rewrites configs before the model is built. There, k and v
are one config, so neither can be a target alone; adapters start from draws that depend on the layout, have no dropout,
and cannot be switched off, as the frozen reference needs. So adapters are added to the built model instead, with
torchtitan's rule for tensor parallelism: A is split as the inputs of the matrix are, B as its outputs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import spmd_types as spmd  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.sharding import ShardingConfig

from forge_rl.engines.families.family import Architecture
from forge_rl.engines.families.tensor_plan import stacked_projections
from forge_rl.engines.lora_config import EXPERTS, HEAD, adapted_modules, linear_modules
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.adapter_switch import AdapterSwitch, RowPart, rounded_factor
from forge_rl.engines.titan.expert_adapters import adapt_experts
from forge_rl.engines.titan.factor_pairs import FactorPair, factor_pairs
from forge_rl.engines.titan.head import FloatHead
from forge_rl.engines.titan.quantized_base import quantize_base
from forge_rl.engines.titan.shards import (
    ADAPTERS,
    local_shards,
    named_weights,
    publishes,
    slice_of,
    specs,
    values_of,
)
from forge_rl.models.adapter_products import AdapterProduct
from forge_rl.system.seeds import derive_seed
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, factor_names
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard

_A, _B = ADAPTERS
_WholeFactors = Sequence[tuple[FactorPair, tuple[torch.Tensor, torch.Tensor]]]
"""Adapters with A and B of all ranks."""


def add_adapters(model: Any, architecture: Architecture, settings: TrainSettings) -> None:
    """Freeze a built model, and add adapters to the modules that the settings name, before it is parallelised; hold
    all linear layers of its layers as `LoRAConfig.base_format` says.

    Raises:
        ConfigError: a target names no module that can have an adapter.
    """
    lora, experts = settings.lora, architecture.experts
    modules = adapted_modules(architecture, lora)
    linear = linear_modules(architecture)
    # Only the base: the adapters' parameters, added below, stay trained.
    model.requires_grad_(False)
    model.adapters = AdapterSwitch(lora, settings.lora_seed, travel=lora.publish == "adapters")
    for layer in model.get_submodule("layers").children():
        for name, module in list(layer.named_modules()):
            # Kept from before quantisation: the adapter takes its device and dtype.
            weight: Any = getattr(module, "weight", None)
            if lora.base_format != "full" and name in linear:
                quantize_base(module, lora.base_format, resolve_dtype(settings.dtype))
            if name in modules:
                _adapt(module, weight, model.adapters)
            elif EXPERTS in lora.targets and (isinstance(module, GroupedExperts) or stacked_projections(module)):
                assert experts is not None, "adapted_modules refuses the target"
                adapt_experts(module, model.adapters, lora.expert_rank(experts.top_k))
    if HEAD in lora.targets:
        _adapt(model.lm_head, model.lm_head.weight, model.adapters)


def _adapt(module: Any, weight: torch.Tensor, switch: AdapterSwitch) -> None:
    """Turn a linear layer into one with an adapter, on the device and in the dtype of the layer's original weight."""
    factory: Any = {"device": weight.device, "dtype": weight.dtype}
    module.lora_A = nn.Parameter(torch.empty(switch.lora.rank, module.in_features, **factory))
    module.lora_B = nn.Parameter(torch.empty(module.out_features, switch.lora.rank, **factory))
    module.adapters, module.adapted_weights = switch, {"": {"weight": slice(None)}}
    kind: Any = type(module)
    if not isinstance(module, FloatHead):  # which has a product of its own for its adapter
        module.__class__ = _adapted_class(kind)
    if not isinstance(module, Linear):
        return  # of transformers
    module._param_init = dict(module._param_init or {}) | dict.fromkeys(ADAPTERS, skip_param_init)
    sharding = module._sharding_config
    placement = sharding.state_shardings.get("weight") if sharding is not None else None
    if sharding is None or placement is None:
        return
    replicated = dense_param_placement(tp=spmd.R)
    places = {_A: replicated, _B: replicated}
    # A column-parallel matrix splits its outputs, and so B. A row-parallel one splits its inputs, and so A. The other
    # factor is whole on each rank.
    for dim, name in ((0, _B), (1, _A)):
        if placement == dense_param_placement(tp=spmd.S(dim)):
            places[name] = placement
    states = {**sharding.state_shardings, **places}
    fields = {name: getattr(sharding, name) for name in ShardingConfig.__dataclass_fields__}
    module._sharding_config = ShardingConfig(**(fields | {"state_shardings": states}))


@functools.cache
def _adapted_class(kind: Any) -> Any:
    """Derive a class of linear layers whose instances have an adapter."""

    class AdaptedLinear(kind):
        adapters: AdapterSwitch
        adapter_name: str = ""  # a plan's models are not named
        lora_A: nn.Parameter
        lora_B: nn.Parameter

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            """Project [..., inputs] to [..., outputs]."""
            # The base's own product, quantised or not.
            out: torch.Tensor = super().forward(input)
            if not self.adapters.on:
                return out
            if self.adapters.parts:
                return out + _product_of_parts(self, input)
            return out + self.adapters.lora.scale * _adapter_product(self, input)

    AdaptedLinear.__name__ = AdaptedLinear.__qualname__ = f"Adapted{kind.__name__}"
    return AdaptedLinear


def _adapter_product(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Multiply [..., inputs] by A and B: [..., outputs], distributed as the layer's own product.

    Tensor-parallel ranks compute on their parts. Where one factor is whole on each rank, a rank's gradient of it covers
    only the rank's part of the other factor; the backward pass sums over ranks.
    """
    a, b = (rounded_factor(factor, module.adapters.lora) for factor in (module.lora_A, module.lora_B))
    inputs = module.adapters.dropped(module.adapter_name, inputs)
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        return nn.functional.linear(nn.functional.linear(inputs, a), b)
    mesh, (a_place,), (b_place,) = a.device_mesh, a.placements, b.placements
    # Replicated matrices let each rank compute on its own tokens. Otherwise x must be split like A's inputs, and the
    # result is a partial sum (A split) or a split of the outputs (B split).
    is_whole = a_place.is_replicate() and b_place.is_replicate()
    placements: list[Placement] = []
    x, grads = inputs, [Replicate()] if is_whole else [Partial()]
    if isinstance(inputs, DTensor):
        input_placements: list[Placement] = list(inputs.placements)
        if not is_whole:
            input_placements = [Shard(inputs.ndim - 1) if isinstance(a_place, Shard) else Replicate()]
        elif not inputs.placements[0].is_replicate():
            grads = [Partial()]  # of this rank's tokens
        # With B split, each rank sees only its outputs' share of x's gradient.
        x_grads = [Partial()] if isinstance(b_place, Shard) else input_placements
        x = inputs.redistribute(placements=input_placements).to_local(grad_placements=x_grads)
        placements = (
            input_placements if is_whole else [Partial() if isinstance(a_place, Shard) else Shard(inputs.ndim - 1)]
        )
    parts = [
        # A split factor's gradient is complete on its rank; a whole one's is summed where it is partial.
        factor.to_local(grad_placements=list(factor.placements) if factor.placements[0].is_shard() else grads)
        for factor in (a, b)
    ]
    out = nn.functional.linear(nn.functional.linear(x, parts[0]), parts[1])
    return DTensor.from_local(out, mesh, placements, run_check=False) if placements else out


def _product_of_parts(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Multiply the tokens of each part of a row, [..., L, inputs], by its own adapter: [..., L, outputs].

    Each adapter has products of its own: in one product with the others masked out, 0 times their NaN would be NaN.
    """
    outputs = []
    for part in module.adapters.parts:
        tokens = part.switch.dropped(module.adapter_name, inputs[..., part.tokens, :])
        a, b = (factor.to(tokens) for factor in part.factors[module.adapter_name])
        outputs.append(part.switch.lora.scale * nn.functional.linear(nn.functional.linear(tokens, a), b))
    return torch.cat(outputs, dim=-2)


def adapted_modules_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers with adapters by torchtitan's name of their weight."""
    for name, module in model.named_modules():
        if hasattr(module, _A):
            yield name.replace("_checkpoint_wrapped_module.", "") + ".weight", module


def init_adapters(model: Any) -> None:
    """Give adapters their first values, the same in any layout: A is uniform within 1 / sqrt(inputs), as in peft, and B
    is 0, which leaves the model's outputs unchanged."""
    if model.adapters is None:
        return
    with torch.no_grad():
        for pair in factor_pairs(model):
            a, b = pair.parameters
            # Dropout is drawn by this name, the same in every layout.
            if not pair.prefix:
                pair.module.adapter_name = pair.name
            values_of(a).copy_(slice_of(a).of(first_factor(pair.name, a.shape, model.adapters.seed)))
            values_of(b).zero_()


def first_factor(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draw the first A of an adapter by its name: [..., rank, inputs] float32, in host memory."""
    bound = 1 / math.sqrt(shape[-1])
    generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", name))
    return torch.empty(tuple(shape)).uniform_(-bound, bound, generator=generator)


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Let a model with adapters act as the one that training started from while the body runs."""
    if model.adapters is None:
        yield
        return
    model.adapters.on = False
    try:
        yield
    finally:
        model.adapters.on = True


@contextlib.contextmanager
def row_parts(model: Any, parts: Sequence[RowPart]) -> Iterator[None]:
    """Give each part of a row its own adapter while the body runs. The body must include the backward pass, which may
    recompute layers."""
    model.adapters.parts = parts
    try:
        yield
    finally:
        model.adapters.parts = ()


def published_specs(model: Any) -> tuple[TensorSpec, ...]:
    """Return the specs of all published tensors; the factors of adapters come before the weights they are added to."""
    if model.adapters is None:
        return specs(model)
    factors, scales, dtype = list[TensorSpec](), dict[str, float](), _factor_dtype(model)
    for pair in factor_pairs(model):
        # Only shapes matter here.
        a, b = (torch.empty(factor.shape, device="meta") for factor in pair.parameters)
        for name, *views in pair.published(model, (a, b)):
            scales[name] = pair.scale
            for factor, view in zip(factor_names(name), views, strict=True):
                factors.append(TensorSpec(name=factor, shape=tuple(view.shape), dtype=dtype))
    if not model.adapters.travel:
        return specs(model, changed=scales)
    # Readers need the factors before the weights that they are added to.
    return (*factors, *(replace(spec, adapter_scale=scales.get(spec.name)) for spec in specs(model)))


def _factor_dtype(model: Any) -> str:
    """Return the dtype of factors in versions; "" for the dtype of the weights."""
    parameter = next(factor_pairs(model)).parameters[0]
    lora = model.adapters.lora
    return "" if lora.dtype == "float32" or parameter.dtype == torch.float64 else lora.dtype


def published_shards(model: Any, ranks: range) -> Iterator[LocalShard]:
    """Yield the shards that this rank publishes: weights and, if adapters travel, whole factors on the first rank;
    otherwise weights with the adapters added. Every rank calls this.

    Args:
        ranks: ranks that hold the model.
    """
    if model.adapters is None:
        return local_shards(model, ranks)
    whole_factors = _whole_factors(model, ranks)
    if not model.adapters.travel:
        return local_shards(model, ranks, _Merge(model, whole_factors))
    factors = (
        LocalShard(name=factor, tensor_slice=TensorSlice.whole(values.shape), values=values.contiguous())
        for pair, factor_pair in (whole_factors if dist.get_rank() == ranks.start else ())
        for name, *views in pair.published(model, factor_pair)
        for factor, values in zip(factor_names(name), views, strict=True)
    )
    return itertools.chain(factors, local_shards(model, ranks))


def merged_reports(model: Any, ranks: range, drafted: Manifest) -> list[ShardReport]:
    """Fingerprint this rank's slices of adapted weights with the adapters added, which is what readers of a version
    must hold; empty if adapters do not travel. Every rank calls this."""
    if model.adapters is None or not model.adapters.travel:
        return []
    entries = {entry.name: entry for entry in drafted.tensors}
    published_dtype = next((e.torch_dtype for e in drafted.tensors if e.name.endswith(factor_names(""))), torch.float32)
    merge = _Merge(model, _whole_factors(model, ranks, published_dtype))
    reports = []
    for name, parameter in named_weights(model):
        tensor_slice = slice_of(parameter)
        # Like `local_shards`, only one of the ranks that hold a slice reports it.
        if name not in merge.products or not tensor_slice.numel or not publishes(parameter, ranks):
            continue
        parts = list(model.names.parts(name, parameter.shape, tensor_slice))
        # Readers hold the base in its published dtype, so the sum starts from the rounded weight.
        merged = merge(name, tensor_slice, values_of(parameter).to(entries[parts[0].name].torch_dtype))
        moves = [Move(None, part.of(merged), entries[part.name].shape, part.tensor_slice) for part in parts]
        reports += [
            ShardReport(name=part.name, tensor_slice=part.tensor_slice, fingerprint=value)
            for part, value in zip(parts, move(moves), strict=True)
        ]
    return reports


class _Merge:
    """Adds products of adapters to slices of weights."""

    def __init__(self, model: Any, whole_factors: _WholeFactors) -> None:
        self.products: dict[str, list[tuple[slice, AdapterProduct]]] = {}
        for pair, factors in whole_factors:
            for name, rows, product in pair.products(model, factors):
                self.products.setdefault(name, []).append((rows, product))

    def __call__(self, name: str, tensor_slice: TensorSlice, values: torch.Tensor) -> torch.Tensor:
        """Return a slice of a weight, by the model's name, with its adapter's product added, if it has one."""
        parts = [
            product.added_to(values[..., rows, :], *tensor_slice.start) for rows, product in self.products.get(name, ())
        ]
        return torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0] if parts else values


def _whole_factors(model: Any, ranks: range, published_dtype: torch.dtype = torch.float32) -> _WholeFactors:
    """Gather A and B of all ranks' adapters. Every rank calls this.

    Args:
        published_dtype: dtype that factors are rounded to if adapters travel, as readers get them.
    """
    pairs = list(factor_pairs(model))
    parameters = [factor for pair in pairs for factor in pair.parameters]
    device = values_of(parameters[0]).device
    # One collective for all factors, instead of one for each.
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=device)
    whole_factors = [
        part.view(p.shape) for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True)
    ]
    for parameter, place in zip(parameters, whole_factors, strict=True):
        if publishes(parameter, ranks):
            slice_of(parameter).of(place).copy_(values_of(parameter))
    if dist.get_world_size() > 1:
        dist.all_reduce(flat)  # sums one rank's values and zeros: no rounding
    whole_factors = [rounded_factor(factor, model.adapters.lora) for factor in whole_factors]
    if model.adapters.travel:  # as they are published
        whole_factors = [factor.to(published_dtype).float() for factor in whole_factors]
    return list(zip(pairs, zip(whole_factors[::2], whole_factors[1::2], strict=True), strict=True))
