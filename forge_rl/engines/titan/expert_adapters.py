"""LoRA on stacked experts: each expert has factors of its own, which multiply its rows in grouped products."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.sharding import ShardingConfig

from forge_rl.engines.families.tensor_plan import stacked_projections
from forge_rl.engines.titan.adapter_switch import AdapterSwitch, rounded_factor
from forge_rl.engines.titan.expert_products import expert_linear
from forge_rl.engines.titan.shards import ADAPTERS

_ALIGNED_BYTES = 16
"""Grouped products on a GPU need rows of a multiple of this many bytes; a small rank's are shorter."""


def adapt_experts(module: Any, switch: AdapterSwitch, rank: int) -> None:
    """Add factors to a module of stacked experts, torchtitan's or transformers', in place.

    Gate and up-projection share A, as in PEFT, which adapts the stack that transformers makes of both.

    Args:
        rank: rank of each expert's adapter.
    """
    is_native = isinstance(module, GroupedExperts)
    layouts = _native_layouts(module) if is_native else _general_layouts(module)
    module.adapters, module.adapted_weights = switch, layouts
    names = []
    for prefix, rows in layouts.items():
        weights = [getattr(module, name) for name in rows]
        is_transposed = getattr(module, "is_transposed", False)
        count, outputs, inputs = weights[0].mT.shape if is_transposed else weights[0].shape
        options = {"device": weights[0].device, "dtype": weights[0].dtype}
        shapes = (count, rank, inputs), (count, outputs * len(weights), rank)
        for kind, shape in zip(ADAPTERS, shapes, strict=True):
            names.append(f"{prefix}{kind}")
            module.register_parameter(names[-1], nn.Parameter(torch.empty(shape, **options)))
    if not is_native:
        module.forward = functools.partial(_general_forward, module)
        return
    module._param_init = dict(module._param_init or {}) | dict.fromkeys(names, skip_param_init)
    sharding = module._sharding_config
    if sharding is not None and sharding.state_shardings:
        fields = {name: getattr(sharding, name) for name in ShardingConfig.__dataclass_fields__}
        placement = next(iter(sharding.state_shardings.values()))  # of whole experts: others are refused
        states = {**sharding.state_shardings, **dict.fromkeys(names, placement)}
        module._sharding_config = ShardingConfig(**(fields | {"state_shardings": states}))


def expert_sum(
    module: Any, out: torch.Tensor, x: torch.Tensor, factors: Sequence[torch.Tensor], ends: torch.Tensor
) -> torch.Tensor:
    """Add the outputs of adapters to the outputs of experts, [R, outputs].

    Args:
        module: module of the experts.
        x: their inputs, [R, inputs], sorted by expert.
        factors: A, [experts, rank, inputs], and B, [experts, outputs, rank]; none without adapters.
        ends: end of each expert's rows, [experts] int32.
    """
    if not factors or not module.adapters.on:
        return out
    a, b = (rounded_factor(factor, module.adapters.lora) for factor in factors)
    rank = a.shape[1]
    # Zero columns in A and B leave their product unchanged.
    padding = 0 if x.dtype == torch.float64 else -rank % (_ALIGNED_BYTES // x.element_size())
    if padding:
        a, b = nn.functional.pad(a, (0, 0, 0, padding)), nn.functional.pad(b, (0, padding))
    # The scale belongs to the adapter's own rank, without the padding.
    scale: float = module.adapters.lora.scale_of(rank)
    return out + scale * expert_linear(expert_linear(x, a, ends), b, ends)


def _native_layouts(module: Any) -> Mapping[str, Mapping[str, slice]]:
    if hasattr(module, "mlp1_weight_EGD"):
        return {"gate_up_": {"mlp1_weight_EGD": slice(None)}, "down_": {"mlp2_weight_EDF": slice(None)}}
    width = module.w1_EFD.shape[1]
    gate_up = {"w1_EFD": slice(0, width), "w3_EFD": slice(width, 2 * width)}
    return {"gate_up_": gate_up, "down_": {"w2_EDF": slice(None)}}


def _general_layouts(module: Any) -> Mapping[str, Mapping[str, slice]]:
    return {name.removesuffix("proj"): {name: slice(None)} for name in stacked_projections(module)}


def _general_forward(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute transformers' experts with their adapters: [T, dim], from [T, dim] and [T, k] ids and weights.

    An id past the last expert stands for an expert of another rank.
    """
    sorted_ids, order = expert_ids.flatten().sort(stable=True)
    # Such ids sort to the end, and are dropped. On the meta device they cannot be counted, so a plan keeps all rows.
    if module._is_expert_parallel and not hidden.is_meta:
        order = order[: int((sorted_ids < module.num_experts).sum())]
        sorted_ids = sorted_ids[: len(order)]
    experts = torch.arange(module.num_experts, device=hidden.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    top_k = expert_ids.shape[1]
    x = hidden[order // top_k]
    up, down = stacked_projections(module)
    x = _projected(module, up, x, sorted_ids, ends)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _projected(module, down, x, sorted_ids, ends) * weights.flatten()[order, None]
    placed = x.new_zeros(expert_ids.numel(), x.shape[1]).index_copy(0, order, x)
    return placed.view(*expert_ids.shape, -1).sum(dim=1).to(hidden.dtype)


def _projected(module: Any, name: str, x: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Project rows, [R, inputs], by one of the stacks and its adapter."""
    stack, prefix = getattr(module, name), name.removesuffix("proj")
    out = expert_linear(x, stack.mT if module.is_transposed else stack, ends)
    if module.has_bias:
        out = out + getattr(module, f"{name}_bias")[expert_ids]
    return expert_sum(module, out, x, [getattr(module, f"{prefix}{kind}") for kind in ADAPTERS], ends)
