"""Mixtures of experts on torchtitan, computing in the model's dtype on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.config_utils import make_ffn_config, make_moe_config
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, swiglu
from torchtitan.ops.scatter_add import deterministic_scatter_add

from forge_rl.engines.families.family import Experts
from forge_rl.engines.titan.block_kernels import has_kernels
from forge_rl.engines.titan.block_kernels import swiglu as plain_swiglu
from forge_rl.engines.titan.expert_adapters import expert_sum
from forge_rl.engines.titan.expert_products import expert_bias, expert_linear, joint_swiglu
from forge_rl.engines.titan.expert_rows import clamped_swiglu
from forge_rl.engines.titan.least_loaded import LeastLoadedExperts
from forge_rl.engines.titan.linear import FloatGate
from forge_rl.engines.titan.master_weights import joint_weight
from forge_rl.engines.titan.routing import ReplayRouter
from forge_rl.engines.titan.shards import local

_GPT_OSS = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
_LOADED = dict.fromkeys(("weight", "bias", "w1_EFD", "w2_EDF", "w3_EFD", *_GPT_OSS), skip_param_init)
"""No initialisation: every weight is read from the folder."""


def moe_config(
    experts: Experts, dim: int, *, kind: type[GroupedExperts] | None = None, bias: bool = False, **fields: Any
) -> Any:
    """Make torchtitan's `MoE.Config` for a layer, without load balancing, which would change the policy.

    Args:
        experts: experts of the architecture.
        dim: model dimension.
        kind: class of the experts; PlainExperts by default.
        bias: add a bias to the router's logits.
        fields: further fields of that class's config.
    """
    shared = None
    if experts.shared_dim:
        shared = make_ffn_config(dim=dim, hidden_dim=experts.shared_dim, w1_param_init=_LOADED, w2w3_param_init=_LOADED)
    return make_moe_config(
        num_experts=experts.count,
        # Creates the bias used in the choice of experts; only torchtitan's own optimizer would update it.
        load_balance_coeff=1.0 if experts.steered else None,
        router=ReplayRouter.Config(
            num_experts=experts.count,
            gate=FloatGate.Config(in_features=dim, out_features=experts.count, bias=bias, param_init=_LOADED),
            top_k=experts.top_k,
            score_func=experts.score,
            route_norm=experts.normalized,
            route_scale=experts.scale,
            num_expert_groups=experts.groups if experts.groups > 1 else None,
            num_limited_groups=experts.top_groups if experts.groups > 1 else None,
        ),
        routed_experts=LeastLoadedExperts.Config(
            inner_experts=(kind or PlainExperts).Config(
                dim=dim, hidden_dim=experts.hidden_dim, num_experts=experts.count, param_init=_LOADED, **fields
            ),
            token_dispatcher=WideDispatcher.Config(num_experts=experts.count, top_k=experts.top_k),
        ),
        shared_experts=shared,
    )


class WideDispatcher(AllToAllTokenDispatcher):
    """torchtitan's dispatcher, multiplying results by scores in the wider dtype of both instead of float32.

    Without expert parallelism nothing is exchanged.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the experts' results to their tokens, and sum them weighted by score: [T, dim]."""
        out = routed_output_RD
        if self.ep_mesh is not None:
            out = self._unpermute(out, metadata.input_shape, metadata.permuted_indices)
            group = self.ep_mesh.get_group()
            out = self._combine_token_exchange(out, group, metadata.input_splits, metadata.output_splits)
        return self.summed(out, metadata.token_indices_experts_sorted_N, metadata.topk_scores_experts_sorted_N, x_TD)

    def summed(
        self, rows: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, x_TD: torch.Tensor
    ) -> torch.Tensor:
        """Sum rows of results, [N, dim], by their tokens, [N], weighted by score, [N]: [T, dim]."""
        # Scores are at least float32; the product is rounded once, before the sum.
        weighed = (rows * scores[:, None]).to(rows.dtype)
        index = tokens[:, None].expand(-1, x_TD.shape[-1])
        combined: torch.Tensor = deterministic_scatter_add(torch.zeros_like(x_TD), index, weighed)
        return combined


class PlainExperts(GroupedExperts):
    """SwiGLU experts that compute in the dtype of their input; torchtitan's round to bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    @property
    def joint_weights(self) -> list[tuple[nn.Parameter, ...]]:
        """See `MasterWeights`."""
        # Only a single rank has masters, and weights that are plain tensors.
        return [] if isinstance(self.w1_EFD, DTensor) else [(self.w1_EFD, self.w3_EFD)]

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Send rows of [R, dim], sorted by expert, through their experts; [experts] int64 counts the rows of each."""
        return self.compute([local(parameter) for parameter in self.parameters()], x_RD, num_tokens_per_expert_E)

    def compute(self, weights: Sequence[torch.Tensor], x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send rows through experts with the given weights, which are ordered as this module's parameters."""
        # torchtitan names them w1, w2 and w3, in this order; adapters' factors come after them.
        gate, down, up, *factors = weights
        ends = counts.cumsum(0, dtype=torch.int32)
        joint = joint_weight(gate, up)
        # Without adapters, gate and up-projection are one product if their copies lie one after the other.
        if joint is not None and not factors and has_kernels(x, "swiglu"):
            return expert_linear(joint_swiglu(expert_linear(x, joint, ends)), down, ends)
        a, b = expert_linear(x, gate, ends), expert_linear(x, up, ends)
        if factors:
            # Gate and up-projection share an A, so their adapters act on both outputs joined.
            a, b = expert_sum(self, torch.cat([a, b], dim=-1), x, factors[:2], ends).chunk(2, dim=-1)
        hidden = plain_swiglu(a, b) if has_kernels(a, "swiglu") else nn.functional.silu(a) * b
        return expert_sum(self, expert_linear(hidden, down, ends), hidden, factors[2:], ends)


class ClampedExperts(GptOssGroupedExperts):
    """Experts of gpt-oss, with biases and a clamped SwiGLU, that compute in the dtype of their input."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Send rows of [R, dim], sorted by expert, through their experts; [experts] int64 counts the rows of each."""
        return self.compute([local(parameter) for parameter in self.parameters()], x_RD, num_tokens_per_expert_E)

    def compute(self, weights: Sequence[torch.Tensor], x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send rows through experts with the given weights, which are ordered as this module's parameters."""
        up, up_bias, down, down_bias, *factors = weights
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = expert_bias(expert_linear(x, up, ends), up_bias, ends)
        hidden = expert_sum(self, hidden, x, factors[:2], ends)
        if has_kernels(hidden, "experts"):
            activated = clamped_swiglu(hidden, self.swiglu_limit)
        else:
            activated = swiglu(hidden, limit=self.swiglu_limit)
        out = expert_sum(self, expert_linear(activated, down, ends), activated, factors[2:], ends)
        weight = self.mlp1_weight_EGD
        axes = (weight.device_mesh.mesh_dim_names or ()) if isinstance(weight, DTensor) else ()
        # Tensor-parallel ranks sum their results, which must add the bias once.
        shares = weight.device_mesh.size(axes.index("tp")) if "tp" in axes else 1
        return expert_bias(out, down_bias, ends, shares)
