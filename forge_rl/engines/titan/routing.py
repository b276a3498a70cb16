"""Mixture-of-experts routers that can replay the engine's choices and count the tokens of each expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter

from forge_rl.engines.titan.block_kernels import has_kernels
from forge_rl.engines.titan.expert_choice import ChoiceRule, chosen_experts
from forge_rl.engines.titan.shards import local
from forge_rl.errors import ForgeError
from forge_rl.metrics import Mean, Value

_NEVER = -1e30
"""Added to the scores of experts not to be chosen. Finite, so that groups, which are ranked by sums of scores, still
rank by the chosen experts they have."""


# How far one update moves a bias, see `steer`.
_STEP = 0.001


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router, with optional replay of given experts for a row's tokens.

    Gate weights are still its own scores, normalised as in the family, with their gradient. Without replay, engine and
    trainer round differently, so close scores select different experts and a token's logprob jumps: see
    "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    layer = 0
    """Index of its layer in the model, including dense layers."""
    real: torch.Tensor | None = None
    """[1, L] bool, False in padding; None to count nothing."""
    replayed: torch.Tensor | None = None
    """Experts to use, [1, L, top_k] int64, -1 where unknown; None to choose all of them."""
    counts: torch.Tensor | None = None
    """Counts of this rank's tokens in the last forward pass, [experts + 3] int64: tokens per expert; then all tokens,
    replayed tokens, and replayed tokens for which the router would have chosen differently."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return gate weights and expert ids, both [B, L, top_k], and all scores, [B, L, experts]; with the kernel, all
        logits, as a `MoE` reads nothing but their shape."""
        bias = expert_bias_E
        if self.replayed is not None:
            # torchtitan adds the bias to the scores in the choice only, so the weights stay the router's own.
            bias = _like(self._aversion(self.replayed), x_BLD)
            bias = bias if expert_bias_E is None else bias + expert_bias_E
        # The kernel does not know groups of experts.
        fuses = has_kernels(x_BLD, "experts") and self.num_expert_groups is None
        if fuses:
            scores = self.gate(x_BLD)
            weights, expert_ids = self._chosen(scores, bias)
        else:
            weights, expert_ids, scores = super().forward(x_BLD, bias)
        if self.real is not None:
            self.counts = self._count(expert_ids, scores, expert_bias_E, self.real, fuses)
        return weights, expert_ids, scores

    def _chosen(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts by logits, [B, L, experts]; returns their weights and ids, both [B, L, top_k]."""
        rule = ChoiceRule(self.top_k, self.score_func == "sigmoid", self.route_norm, self.route_scale)
        token_bias = bias.flatten(0, 1) if bias is not None and bias.ndim == logits.ndim else bias
        weights, expert_ids = chosen_experts(logits.flatten(0, 1), token_bias, rule)
        return weights.unflatten(0, logits.shape[:-1]), expert_ids.unflatten(0, logits.shape[:-1])

    def _aversion(self, replayed: torch.Tensor) -> torch.Tensor:
        """Return a bias that excludes all experts but the replayed ones, [1, L, experts] float32; 0 if unknown."""
        is_known = (replayed >= 0).all(-1, keepdim=True)
        shape = (*replayed.shape[:-1], self.num_experts)
        # Adding -1e30 drowns any score in float32, so only the replayed experts can be chosen.
        aversion = torch.full(shape, _NEVER, device=replayed.device).scatter(-1, replayed.clamp(min=0), 0.0)
        # A token without a full record chooses freely.
        return aversion.where(is_known, 0.0)

    @torch.no_grad()
    def _count(
        self,
        expert_ids: torch.Tensor,
        scores: torch.Tensor,
        bias: torch.Tensor | None,
        real: torch.Tensor,
        fuses: bool,
    ) -> torch.Tensor:
        real = local(_like(real, expert_ids, sharded=True))
        ids = local(expert_ids)
        if self.replayed is None:
            return choice_counts(ids, ids, real, None, self.num_experts)
        is_replayed = (local(_like(self.replayed, expert_ids, sharded=True)) >= 0).all(-1)
        # Chosen once more without the replay, to count the tokens for which the router would differ.
        if fuses:
            return choice_counts(ids, self._chosen(scores, bias)[1], real, is_replayed, self.num_experts)
        router_scores = local(scores) if bias is None else local(scores) + local(bias)
        if self.num_expert_groups is not None:
            router_scores = self._get_node_limited_routing_scores(router_scores)
        router_ids = router_scores.topk(self.top_k, dim=-1).indices
        return choice_counts(ids, router_ids, real, is_replayed, self.num_experts)


@torch.no_grad()
def choice_counts(
    expert_ids: torch.Tensor,
    router_ids: torch.Tensor,
    real: torch.Tensor,
    is_replayed: torch.Tensor | None,
    experts: int,
) -> torch.Tensor:
    """Count a router's choices, see `ReplayRouter.counts`.

    Args:
        expert_ids: the chosen experts, [..., top_k] int64.
        router_ids: experts that the router would have chosen itself, [..., top_k].
        real: [...] bool, False in padding.
        is_replayed: [...] bool, None if none are replayed.
        experts: number of experts.
    """
    # Padding adds 0 instead of being filtered out, which would need its size on the host.
    increments = real[..., None].expand_as(expert_ids).flatten().long()
    counts = increments.new_zeros(experts + 3)
    load = counts[:experts].scatter_add_(0, expert_ids.flatten(), increments)
    if is_replayed is None:
        torch.sum(real, dim=tuple(range(real.ndim)), out=counts[experts])
        return counts
    is_replayed = is_replayed & real
    # Order within a token's choice does not matter.
    differs = (router_ids.sort(-1).values != expert_ids.sort(-1).values).any(-1) & is_replayed
    return torch.cat([load, torch.stack([real.sum(), is_replayed.sum(), differs.sum()])])


def routers(model: nn.Module) -> list[Any]:
    """List a model's routers from the first layer to the last, each a `ReplayRouter` or `GeneralRouter`; empty for a
    dense model."""
    general: list[Any] | None = getattr(model, "routers", None)
    return [module for module in model.modules() if isinstance(module, ReplayRouter)] if general is None else general


def set_routing(model: nn.Module, real: torch.Tensor, routed: torch.Tensor | None) -> None:
    """Set the tokens and experts of the next forward and backward pass on each router of a model.

    Activations recomputed in the backward pass are routed as in the forward pass, as nothing changes in between.

    Args:
        real: [L] bool, False in padding.
        routed: experts to use in all layers, see `Row.routed`; None if the model chooses them.

    Raises:
        ForgeError: the experts come from a model of another shape.
    """
    for router in routers(model):
        router.real = real[None]
        if routed is None:
            router.replayed = None
            continue
        if router.layer >= routed.shape[1] or routed.shape[2] != router.top_k:
            raise ForgeError(
                f"engines sent {routed.shape[2]} experts for each of {routed.shape[1]} layers, and layer {router.layer}"
                f" of the trainer has {router.top_k}",
                hint="leave out --trainer.router-replay",
            )
        router.replayed = routed[None, :, router.layer].long()


def routing_counts(model: nn.Module) -> torch.Tensor | None:
    """Return the routers' counts of the last forward pass, [layers with experts, experts + 3]; None if dense."""
    counts = [router.counts for router in routers(model) if router.counts is not None]
    return torch.stack(counts) if counts else None


def routing_metrics(counts: torch.Tensor, *, replays: bool) -> dict[str, Value]:
    """Make metrics from counts summed over rows and ranks. A token on several ranks counts once for each.

    `experts/load_max_over_mean` is the busiest expert's tokens over the mean expert's, averaged over layers: 1 is even.
    `experts/replayed` is the share of choices (one per token and layer) that were replayed, and
    `experts/replay_differs` the share of these where the trainer would have chosen differently.
    """
    counts = counts.cpu()  # the one wait
    load, (tokens, replayed, differs) = counts[:, :-3].double(), counts[:, -3:].sum(dim=0).tolist()
    mean = load.mean(dim=1).clamp(min=1e-9)
    metrics: dict[str, Value] = {"experts/load_max_over_mean": Mean(float((load.amax(dim=1) / mean).mean()), 1)}
    if replays:
        metrics["experts/replayed"] = Mean(replayed / max(1, tokens), 1)
        metrics["experts/replay_differs"] = Mean(differs / max(1, replayed), 1)
    return metrics


def rank_metrics(loads: torch.Tensor) -> dict[str, Value]:
    """Make metrics of the heaviest ranks' loads, [rows, layers, 2], see `LeastLoadedExperts.heaviest`."""
    plain, computed = loads.mean(dim=0).unbind(-1)
    return {
        "experts/rank_max_over_mean": Mean(float(computed.mean()), 1),
        "experts/rank_max_over_mean/plain": Mean(float(plain.mean()), 1),
        "experts/rank_max_over_mean/worst_layer": Mean(float(computed.max()), 1),
    }


@torch.no_grad()
def steer(model: nn.Module, counts: torch.Tensor) -> None:
    """Move each expert's bias in the choice of experts by a fixed step towards even loads.

    b_e += 0.001 sign(mean load - load of e), as in "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.1.2.

    Args:
        counts: the routers' counts summed over rows and ranks, [layers with experts, experts + 3].
    """
    mixtures = (module for module in model.modules() if isinstance(module, MoE))
    for mixture, load in zip(mixtures, counts[:, :-3].double(), strict=True):
        # Every rank holds all biases, and moves them alike: the counts are of all ranks.
        bias = local(mixture.expert_bias_E)
        bias += _STEP * (load.mean() - load).sign().to(bias)


def _like(values: torch.Tensor, other: torch.Tensor, *, sharded: bool = False) -> torch.Tensor:
    """Return values that all tensor-parallel ranks hold, as a DTensor if `other` is one: whole, or sharded alike."""
    if not isinstance(other, DTensor):
        return values
    # Every rank has the same values, so torch need not compare them.
    replicated = DTensor.from_local(values, other.device_mesh, run_check=False)
    return replicated.redistribute(placements=other.placements) if sharded else replicated
