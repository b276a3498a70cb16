"""Experts of a layer whose rows are spread over expert-parallel ranks by load, see `engines/expert_plan.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torchtitan.models.common.moe import RoutedExperts

from forge_rl.engines.expert_plan import ExpertPlan, plan_experts, routes
from forge_rl.engines.titan.shards import local

Compute: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]
"""Sends rows, [R, dim], through experts: given their weights, the rows sorted by expert, and the rows of each."""


class LeastLoadedExperts(RoutedExperts):
    """torchtitan's routed experts, whose overloaded ranks lend experts to the least loaded ones.

    Parameters stay where they are. Lent weights travel in forward and again in backward, instead of being saved; their
    gradients return to the owner. Every rank takes part in the same exchanges, whether it has rows or not.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    lends = False
    """Whether overloaded ranks lend experts; otherwise each rank computes its own, plain expert parallelism."""
    heaviest: tuple[float, float] | None = None
    """Rows of the heaviest rank over the mean in the last forward pass: without loans, and as computed. None if ranks
    never lend."""

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """Send each token through its experts: [B, L, dim], from this rank's tokens, scores, experts and counts."""
        dispatcher = self.token_dispatcher
        if dispatcher.ep_mesh is None or not self.lends:
            out: torch.Tensor = super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
            return out
        mesh, x = dispatcher.ep_mesh, x_BLD.flatten(0, 1)
        group, rank = mesh.get_group(), mesh.get_local_rank()
        counts = _gathered(num_local_tokens_per_expert_E, group)
        plan = plan_experts(counts.sum(axis=0), ranks=mesh.size())
        self.heaviest = _heaviest(counts, plan)
        route = routes(plan, counts, rank)
        send = topk_expert_ids_BLK.flatten().argsort(stable=True)
        if plan.rounds:
            send = send[_order(*route.sent, device=x.device)]
        tokens = send // topk_scores_BLK.size(-1)
        computed = _order(*route.computed, device=x.device)
        received = dispatcher._dispatch_token_exchange(x[tokens], group, route.receive, route.send)[computed]
        own = len(received) - sum(route.borrowed)
        out = torch.empty_like(received)
        out[computed[:own]] = self.inner_experts(received[:own], torch.from_numpy(route.own).to(x.device))
        if plan.rounds:
            weights = [local(each) for each in self.inner_experts.parameters()]
            loans = _Loans(plan, rank, route.borrowed, group)
            out[computed[own:]] = _Lent.apply(self.inner_experts.compute, loans, received[own:], *weights)
        back = dispatcher._combine_token_exchange(out, group, route.send, route.receive)
        summed: torch.Tensor = dispatcher.summed(back, tokens, topk_scores_BLK.flatten()[send], x)
        return summed.view_as(x_BLD)


class _Loans:
    """One rank's exchanges of experts in a plan.

    Args:
        plan: has at least one round.
        rows: rows of the expert that this rank borrows in each round; 0 if it borrows none.
    """

    def __init__(self, plan: ExpertPlan, rank: int, rows: Sequence[int], group: ProcessGroup) -> None:
        ranks, experts = plan.rows.shape
        self.rows = list(rows)
        self._group = group
        self._ranks = ranks
        first = rank * (experts // ranks)
        self._lends, self._owners = list[tuple[int, int] | None](), list[int | None]()
        for loans in plan.rounds:
            self._lends.append(
                next(((loan.expert - first, loan.borrower) for loan in loans if loan.owner == rank), None)
            )
            self._owners.append(next((loan.owner for loan in loans if loan.borrower == rank), None))

    def fetch(self, index: int, weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Exchange the experts of a round; returns the weights of the borrowed one, each with an axis of 1 expert."""
        size = sum(each[0].numel() for each in weights)
        lends, owner = self._lends[index], self._owners[index]
        given = None if lends is None else torch.cat([each[lends[0]].flatten() for each in weights])
        came = self._exchange(given, None if lends is None else lends[1], owner, size, weights[0])
        if came is None:
            return None
        parts = came.split([each[0].numel() for each in weights])
        return [part.view(1, *each.shape[1:]) for part, each in zip(parts, weights, strict=True)]

    def give_back(
        self, index: int, own: Sequence[torch.Tensor] | None, sums: Sequence[torch.Tensor], like: torch.Tensor
    ) -> None:
        """Return the gradients of a round's borrowed expert to its owner, which adds them to its `sums`.

        `sums` is empty on ranks that lend nothing.
        """
        lends, owner = self._lends[index], self._owners[index]
        size = sum(each[0].numel() for each in sums)
        given = None if own is None else torch.cat([each.flatten() for each in own])
        came = self._exchange(given, owner, None if lends is None else lends[1], size, like)
        if lends is not None and came is not None:
            parts = came.split([each[0].numel() for each in sums])
            for total, part in zip(sums, parts, strict=True):
                total[lends[0]] += part.view(total.shape[1:])

    @property
    def lends(self) -> bool:
        """Whether this rank lends an expert in any round."""
        return any(each is not None for each in self._lends)

    def _exchange(
        self, given: torch.Tensor | None, to: int | None, source: int | None, size: int, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Send a flat tensor to a rank, and receive one of `size` from another."""
        out_sizes, in_sizes = [0] * self._ranks, [0] * self._ranks
        if given is not None and to is not None:
            out_sizes[to] = given.numel()
        if source is not None:
            in_sizes[source] = size
        came = like.new_empty(sum(in_sizes))
        dist.all_to_all_single(came, like.new_empty(0) if given is None else given, in_sizes, out_sizes, self._group)
        return came if source is not None else None


class _Lent(torch.autograd.Function):
    """Sends rows through borrowed experts, whose weights are not kept for backward."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, loans: _Loans, rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.compute, ctx.loans = compute, loans
        ctx.save_for_backward(rows, *weights)
        found = []
        for index, part in enumerate(rows.split(loans.rows)):
            fetched = loans.fetch(index, weights)
            found.append(part if fetched is None else compute(fetched, part, _count(part)))
        return torch.cat(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        loans: _Loans = ctx.loans
        trained = any(ctx.needs_input_grad[3:])
        sums = [torch.zeros_like(each) for each in weights] if trained and loans.lends else []
        row_grads = []
        for index, (part, own) in enumerate(zip(rows.split(loans.rows), grad.split(loans.rows), strict=True)):
            fetched = loans.fetch(index, weights)
            given = None
            if fetched is None:
                row_grads.append(part)
            else:
                with torch.enable_grad():
                    inputs = [part.detach().requires_grad_(), *(each.requires_grad_() for each in fetched)]
                    out = ctx.compute(inputs[1:], inputs[0], _count(part))
                wanted = inputs if trained else inputs[:1]
                row_grad, *given_back = torch.autograd.grad(out, wanted, own)
                row_grads.append(row_grad)
                given = given_back if trained else None
            if trained:
                loans.give_back(index, given, sums, weights[0])
        weight_grads: Sequence[torch.Tensor | None] = sums or [None] * len(weights)
        return None, None, torch.cat(row_grads), *weight_grads


def rank_loads(model: nn.Module) -> torch.Tensor | None:
    """Return the heaviest ranks' loads in the last forward pass, see `LeastLoadedExperts.heaviest`, [layers, 2]; None
    if ranks never lend."""
    modules = (module for module in model.modules() if isinstance(module, LeastLoadedExperts))
    found = [module.heaviest for module in modules if module.heaviest is not None]
    return torch.tensor(found, dtype=torch.float64) if found else None


def _count(rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor([len(rows)], device=rows.device)


def _gathered(counts: torch.Tensor, group: ProcessGroup) -> Any:
    """Gather every rank's counts, [experts], to the host: [ranks, experts]."""
    whole = counts.new_empty(group.size() * len(counts))
    dist.all_gather_single(whole, counts.contiguous(), group=group)
    return whole.view(group.size(), -1).cpu().numpy()


def _heaviest(counts: Any, plan: ExpertPlan) -> tuple[float, float]:
    ranks = len(counts)
    mean = max(1.0, counts.sum() / ranks)
    plain = counts.sum(axis=0).reshape(ranks, -1).sum(axis=1).max()
    return float(plain / mean), float(plan.rows.sum(axis=1).max() / mean)


def _order(starts: Any, lengths: Any, *, device: torch.device) -> torch.Tensor:
    """Return the indices of blocks of rows, in the order of the blocks."""
    ends = lengths.cumsum()
    return torch.from_numpy(np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])).to(device)
