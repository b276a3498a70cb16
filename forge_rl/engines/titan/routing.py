"""Routers of mixtures of experts: they can take the experts that the engine chose, and count what each expert gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from forge_rl.errors import ForgeError
from forge_rl.metrics import Mean, Value

_NEVER = -1e30
"""Added to the scores that an expert is chosen by. Finite, so that of groups, ranked by sums of scores, those come
first that have a chosen expert."""


class ReplayRouter(TokenChoiceTopKRouter):
    """torchtitan's router, which can be told the experts of a row's tokens.

    The experts' weights are its own scores all the same, normalised as the family does, with their gradient. Engine
    and trainer round differently, so that close scores choose other experts, and a token's logprob jumps: see
    "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv:2510.11370.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    layer = 0
    """Number of its layer in the model, dense ones counted too."""
    real: torch.Tensor | None = None
    """[1, L] bool, False in padding; None where nothing is counted."""
    replayed: torch.Tensor | None = None
    """Experts to take, [1, L, top_k] int64, -1 where they are not known; None where it chooses them all."""
    counts: torch.Tensor | None = None
    """Of the last forward pass, [experts + 3] int64: tokens that each expert got; tokens, those whose experts were
    replayed, and those among them for which it would have chosen others. Of this rank's tokens alone."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the experts' weights and ids, both [B, L, top_k], and all scores, [B, L, experts]."""
        bias = expert_bias_E
        if self.replayed is not None:
            bias = _like(self._aversion(self.replayed), x_BLD)
            bias = bias if expert_bias_E is None else bias + expert_bias_E
        weights, chosen, scores = super().forward(x_BLD, bias)
        if self.real is not None:
            self.counts = self._count(chosen, scores, expert_bias_E, self.real)
        return weights, chosen, scores

    def _aversion(self, replayed: torch.Tensor) -> torch.Tensor:
        """Return what keeps all other experts from being chosen, [1, L, experts] float32; 0 where none are known."""
        known = (replayed >= 0).all(-1, keepdim=True)
        shape = (*replayed.shape[:-1], self.num_experts)
        aversion = torch.full(shape, _NEVER, device=replayed.device).scatter(-1, replayed.clamp(min=0), 0.0)
        return aversion.where(known, 0.0)

    @torch.no_grad()
    def _count(
        self, chosen: torch.Tensor, scores: torch.Tensor, bias: torch.Tensor | None, real: torch.Tensor
    ) -> torch.Tensor:
        real = _local(_like(real, chosen, sharded=True))
        ids = _local(chosen)
        each = real[..., None].expand_as(ids).flatten().long()
        load = each.new_zeros(self.num_experts).scatter_add(0, ids.flatten(), each)
        if self.replayed is None:
            return torch.cat([load, torch.stack([real.sum()]), load.new_zeros(2)])
        known = (_local(_like(self.replayed, chosen, sharded=True)) >= 0).all(-1) & real
        own = _local(scores) if bias is None else _local(scores) + _local(bias)
        if self.num_expert_groups is not None:
            own = self._get_node_limited_routing_scores(own)
        own_ids = own.topk(self.top_k, dim=-1).indices
        differs = (own_ids.sort(-1).values != ids.sort(-1).values).any(-1) & known
        return torch.cat([load, torch.stack([real.sum(), known.sum(), differs.sum()])])


def routers(model: nn.Module) -> list[ReplayRouter]:
    """List a model's routers, from the first layer to the last; none if it is dense."""
    return [module for module in model.modules() if isinstance(module, ReplayRouter)]


def set_routing(model: nn.Module, real: torch.Tensor, routed: torch.Tensor | None) -> None:
    """Tell each router of a model about the tokens of the next forward pass, and of its backward pass.

    What is computed again in the backward pass is routed as in the forward pass, since nothing changes in between.

    Args:
        real: [L] bool, False in padding.
        routed: experts to take, see `Row.routed`, of all layers; None if the model chooses them.

    Raises:
        ForgeError: the experts are those of a model of another shape.
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
    """Return what the routers counted in the last forward pass, [layers with experts, experts + 3]; None if dense."""
    found = [router.counts for router in routers(model) if router.counts is not None]
    return torch.stack(found) if found else None


def routing_metrics(counts: torch.Tensor, *, replays: bool) -> dict[str, Value]:
    """Make metrics of counts, added up over rows and ranks. A token that several ranks have counts once for each.

    `experts/load_max_over_mean` is the tokens of the busiest expert over those of the mean one, averaged over layers:
    1 is even. `experts/replayed` is the share of choices (a token's in a layer) that were the engine's, and
    `experts/replay_differs` the share of these that the trainer would have made otherwise.
    """
    load, (tokens, known, differs) = counts[:, :-3].double(), counts[:, -3:].sum(dim=0).tolist()
    mean = load.mean(dim=1).clamp(min=1e-9)
    found: dict[str, Value] = {"experts/load_max_over_mean": Mean(float((load.amax(dim=1) / mean).mean()), 1)}
    if replays:
        found["experts/replayed"] = Mean(known / max(1, tokens), 1)
        found["experts/replay_differs"] = Mean(differs / max(1, known), 1)
    return found


def _like(values: torch.Tensor, other: torch.Tensor, *, sharded: bool = False) -> torch.Tensor:
    """Return values that all tensor-parallel ranks have as a DTensor where `other` is one; sharded as that is, or
    whole."""
    if not isinstance(other, DTensor):
        return values
    whole = DTensor.from_local(values, other.device_mesh, run_check=False)
    return whole.redistribute(placements=other.placements) if sharded else whole


def _local(values: torch.Tensor) -> torch.Tensor:
    return values.to_local() if isinstance(values, DTensor) else values
