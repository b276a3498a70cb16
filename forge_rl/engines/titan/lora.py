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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.sharding import ShardingConfig

from forge_rl.engines.families.family import Architecture
from forge_rl.engines.lora_config import LoRAConfig, adapted_modules
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
from forge_rl.packing.rows import Row
from forge_rl.system.seeds import derive_seed
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, factor_names
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard

_A, _B = ADAPTERS


@dataclass
class AdapterSwitch:
    """State that all adapters of a model share: whether they act, and the draw of their dropout."""

    lora: LoRAConfig
    seed: int
    on: bool = True
    """False while the model acts as the one that training started from."""
    travel: bool = False
    """True if versions hold adapters and the base's weights, not merged weights."""
    row: tuple[int, ...] = ()
    """Identifies the current row within the run, for dropout: number of earlier minibatches, and token ids."""
    parts: Sequence[RowPart] = ()
    """Parts of the current row, all of its tokens in order; empty if the whole row is of the adapter in the model."""


@dataclass(frozen=True, eq=False)
class RowPart:
    """Tokens of one adapter in a row of several."""

    tokens: slice
    switch: AdapterSwitch
    """The adapter's own scale and draw of dropout."""
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Its A and B of each adapted module, by `adapter_name`."""


def add_adapters(model: Any, architecture: Architecture, lora: LoRAConfig, seed: int) -> None:
    """Freeze a built model, and add adapters to the modules that the settings name, before it is parallelised.

    Raises:
        ConfigError: a target names no module that can have an adapter.
    """
    modules = adapted_modules(architecture, lora)
    model.requires_grad_(False)
    model.adapters = AdapterSwitch(lora, seed, travel=lora.publish == "adapters")
    for layer in model.get_submodule("layers").children():
        for name, module in list(layer.named_modules()):
            if name in modules:
                _adapt(module, model.adapters)


def _adapt(module: Any, switch: AdapterSwitch) -> None:
    """Turn a linear layer into one with an adapter, in place."""
    factory = {"device": module.weight.device, "dtype": module.weight.dtype}
    module.lora_A = nn.Parameter(torch.empty(switch.lora.rank, module.in_features, **factory))
    module.lora_B = nn.Parameter(torch.empty(module.out_features, switch.lora.rank, **factory))
    module.adapters = switch
    kind: Any = type(module)
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

    Tensor-parallel ranks compute on their parts. One that holds all of A or B has the gradient of its part of the other
    only, which the backward pass sums.
    """
    a, b = (rounded_factor(factor, module.adapters.lora) for factor in (module.lora_A, module.lora_B))
    inputs = _dropped(module.adapters, module.adapter_name, inputs)
    if not isinstance(a, DTensor) or not isinstance(b, DTensor):
        return nn.functional.linear(nn.functional.linear(inputs, a), b)
    mesh, (a_place,), (b_place,) = a.device_mesh, a.placements, b.placements
    is_whole = a_place.is_replicate() and b_place.is_replicate()
    placements: list[Placement] = []
    x, grads = inputs, [Replicate()] if is_whole else [Partial()]
    if isinstance(inputs, DTensor):
        input_placements: list[Placement] = list(inputs.placements)
        if not is_whole:
            input_placements = [Shard(inputs.ndim - 1) if isinstance(a_place, Shard) else Replicate()]
        elif not inputs.placements[0].is_replicate():
            grads = [Partial()]  # of this rank's tokens
        x_grads = [Partial()] if isinstance(b_place, Shard) else input_placements
        x = inputs.redistribute(placements=input_placements).to_local(grad_placements=x_grads)
        placements = (
            input_placements if is_whole else [Partial() if isinstance(a_place, Shard) else Shard(inputs.ndim - 1)]
        )
    factors = [
        factor.to_local(grad_placements=list(factor.placements) if factor.placements[0].is_shard() else grads)
        for factor in (a, b)
    ]
    out = nn.functional.linear(nn.functional.linear(x, factors[0]), factors[1])
    return DTensor.from_local(out, mesh, placements, run_check=False) if placements else out


def _product_of_parts(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Multiply the tokens of each part of a row, [..., L, inputs], by its own adapter: [..., L, outputs].

    Each adapter has products of its own: in one product with the others masked out, 0 times their NaN would be NaN.
    """
    outputs = []
    for part in module.adapters.parts:
        tokens = _dropped(part.switch, module.adapter_name, inputs[..., part.tokens, :])
        a, b = (factor.to(tokens) for factor in part.factors[module.adapter_name])
        outputs.append(part.switch.lora.scale * nn.functional.linear(nn.functional.linear(tokens, a), b))
    return torch.cat(outputs, dim=-2)


def rounded_factor(factor: torch.Tensor, lora: LoRAConfig) -> torch.Tensor:
    """Return float32 values of A or B rounded to the settings' dtype, still in float32 and with the gradient of the
    rounded values; others unchanged."""
    if lora.dtype == "float32" or factor.dtype != torch.float32:
        return factor
    # Exact: the difference has no more bits than the factor. Gradients pass a sum without being rounded themselves.
    values = factor.detach()
    return factor + (values.bfloat16().float() - values)


def _dropped(switch: AdapterSwitch, module_name: str, inputs: torch.Tensor) -> torch.Tensor:
    """Set a share of the inputs to 0, the same when the forward pass is recomputed; none if gradients are disabled."""
    share = switch.lora.dropout
    if not share or not torch.is_grad_enabled():
        return inputs
    if inputs.is_meta:
        return inputs * inputs.bool() / (1 - share)
    generator = torch.Generator(inputs.device)
    generator.manual_seed(derive_seed(switch.seed, "dropout", switch.row, module_name))
    mask = torch.rand(inputs.shape, generator=generator, device=inputs.device) >= share
    return inputs * mask.to(inputs.dtype) / (1 - share)


def adapted_modules_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules with adapters by torchtitan's name of their weight."""
    for name, module in model.named_modules():
        if hasattr(module, _A):
            yield name.replace("_checkpoint_wrapped_module.", "") + ".weight", module


def init_adapters(model: Any) -> None:
    """Give adapters their first values, the same in any layout: A is uniform within 1 / sqrt(inputs), as in peft, and B
    is 0, which leaves the model's outputs unchanged."""
    if model.adapters is None:
        return
    with torch.no_grad():
        for weight_name, module in adapted_modules_of(model):
            module.adapter_name = model.names.to_hf(weight_name)
            first = first_factor(module, model.adapters.lora.rank, model.adapters.seed)
            values_of(module.lora_A).copy_(slice_of(module.lora_A).of(first))
            values_of(module.lora_B).zero_()


def first_factor(module: Any, rank: int, seed: int) -> torch.Tensor:
    """Draw the first A of a module that `init_adapters` has named: [rank, inputs] float32, in host memory."""
    bound = 1 / math.sqrt(module.in_features)
    generator = torch.Generator().manual_seed(derive_seed(seed, "adapter", module.adapter_name))
    return torch.empty(rank, module.in_features).uniform_(-bound, bound, generator=generator)


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
    """Let each part of a row have its own adapter during the body, which runs the row's passes, both of them: the
    backward pass may compute layers again."""
    model.adapters.parts = parts
    try:
        yield
    finally:
        model.adapters.parts = ()


def draw_dropout(model: Any, row: Row, planned: int) -> None:
    """Set the draw of dropout for a row's forward and backward pass.

    Args:
        planned: number of earlier minibatches of the run.
    """
    if model.adapters is not None and model.adapters.lora.dropout:
        model.adapters.row = (planned, *row.token_ids.tolist())


def published_specs(model: Any) -> tuple[TensorSpec, ...]:
    """Return the specs of all published tensors; the factors of adapters come before the weights they are added to."""
    weights = specs(model)
    if model.adapters is None or not model.adapters.travel:
        return weights
    factors, adapted = list[TensorSpec](), set[str]()
    for name, module in adapted_modules_of(model):
        adapted.add(weight := model.names.to_hf(name))
        for factor, kind in zip(factor_names(weight), ADAPTERS, strict=True):
            shape, dtype = tuple(getattr(module, kind).shape), _factor_dtype(model)
            factors.append(TensorSpec(name=factor, shape=shape, dtype=dtype))
    scale = model.adapters.lora.scale
    return (*factors, *(replace(spec, adapter_scale=scale) if spec.name in adapted else spec for spec in weights))


def _factor_dtype(model: Any) -> str:
    """Return the dtype of factors in versions; "" for the dtype of the weights."""
    parameter = next(module.lora_A for _, module in adapted_modules_of(model))
    lora = model.adapters.lora
    return "" if lora.dtype == "float32" or parameter.dtype == torch.float64 else lora.dtype


def published_shards(model: Any, ranks: range) -> Iterator[LocalShard]:
    """Yield the shards that this rank publishes: weights and, if adapters travel, whole factors on the first rank;
    otherwise weights with the adapters added. Every rank calls this.

    Args:
        ranks: ranks that hold the model.
    """
    products = _products(model, ranks)
    if model.adapters is None or not model.adapters.travel:
        return local_shards(model, ranks, lambda name, weight: _added(products.get(name), weight))
    factors = (
        []
        if dist.get_rank() != ranks.start
        else [
            LocalShard(name=factor, tensor_slice=TensorSlice.whole(values.shape), values=values)
            for name, product in products.items()
            for factor, values in zip(factor_names(model.names.to_hf(name)), product.factors, strict=True)
        ]
    )
    return itertools.chain(factors, local_shards(model, ranks))


def merged_reports(model: Any, ranks: range, drafted: Manifest) -> list[ShardReport]:
    """Fingerprint this rank's slices of adapted weights with the adapters added, as readers of a version have to hold
    them; none if adapters do not travel. Every rank calls this."""
    if model.adapters is None or not model.adapters.travel:
        return []
    entries = {entry.name: entry for entry in drafted.tensors}
    published_dtype = next((e.torch_dtype for e in drafted.tensors if e.name.endswith(factor_names(""))), torch.float32)
    products = _products(model, ranks, published_dtype)
    reports = []
    for name, parameter in named_weights(model):
        tensor_slice = slice_of(parameter)
        if name not in products or not tensor_slice.numel or not publishes(parameter, ranks):
            continue
        entry = entries[model.names.to_hf(name)]
        merged = _added(products[name], parameter, dtype=entry.torch_dtype)
        (value,) = move([Move(None, merged, entry.shape, tensor_slice)])
        reports.append(ShardReport(name=entry.name, tensor_slice=tensor_slice, fingerprint=value))
    return reports


def _added(product: _Product | None, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return this rank's slice of a weight in a dtype, by default its own, with an adapter's product added."""
    if product is None:
        return weight
    values = values_of(weight)
    return product.sum.added_to(values.to(dtype or values.dtype), *slice_of(weight).start)


@dataclass(frozen=True)
class _Product:
    factors: tuple[torch.Tensor, torch.Tensor]
    """A and B, whole."""
    sum: AdapterProduct


def _products(model: Any, ranks: range, published_dtype: torch.dtype = torch.float32) -> dict[str, _Product]:
    """Gather the adapters of all ranks, by torchtitan's name of the weight. Every rank calls this.

    Args:
        published_dtype: dtype that factors are rounded to if adapters travel, as readers get them.
    """
    if model.adapters is None:
        return {}
    factors = [(name, module, kind) for name, module in adapted_modules_of(model) for kind in ADAPTERS]
    parameters = [getattr(module, kind) for _, module, kind in factors]
    device = values_of(parameters[0]).device
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
    by_weight = zip(whole_factors[::2], whole_factors[1::2], factors[::2], strict=True)
    scale = model.adapters.lora.scale
    return {name: _Product((a, b), AdapterProduct(a, b, scale)) for a, b, (name, _, _) in by_weight}
