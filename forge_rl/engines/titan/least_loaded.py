"""Experts of a layer whose rows are spread over expert-parallel ranks by load, see `engines/expert_plan.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torchtitan.models.common.moe import RoutedExperts

from forge_rl.engines.expert_plan import ExpertPlan, plan_experts, routes
from forge_rl.engines.titan.block_kernels import has_kernels
from forge_rl.engines.titan.expert_rows import places_of, spread_rows, weighted_sum
from forge_rl.engines.titan.shards import local


class LeastLoadedExperts(RoutedExperts):
    """torchtitan's routed experts, whose overloaded ranks lend experts to the least loaded ones.

    Parameters stay where they are. Lent weights travel to the borrower in forward and again in backward, as they are
    not kept in between; their gradients return to the owner. Owner and borrower compute at the same time, in both
    passes: weights are sent before any computation, and gradients after all of it.

    While it computes, a rank holds the weights of all experts that it borrows, besides its own. The owner sends its
    parameters without copying them, and adds returned gradients one expert at a time.
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
        # Without expert parallelism, rows only have to be sorted by expert: two kernels do it, in place of a
        # dispatcher.
        if dispatcher.ep_mesh is None and has_kernels(x_BLD, "experts"):
            places = places_of(topk_expert_ids_BLK.flatten(0, 1))
            computed_rows = self.inner_experts(spread_rows(x_BLD.flatten(0, 1), places), num_local_tokens_per_expert_E)
            return weighted_sum(computed_rows, topk_scores_BLK.flatten(0, 1), places).view_as(x_BLD)
        if dispatcher.ep_mesh is None or not self.lends:
            out: torch.Tensor = super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
            return out
        mesh, x = dispatcher.ep_mesh, x_BLD.flatten(0, 1)
        group, rank = mesh.get_group(), mesh.get_local_rank()
        # Every rank makes the same plan from the same counts, so ranks agree without a further exchange.
        counts = _gathered(num_local_tokens_per_expert_E, group)
        plan = plan_experts(counts.sum(axis=0), ranks=mesh.size())
        self.heaviest = _heaviest(counts, plan)
        route = routes(plan, counts, rank)
        # By expert first. If several ranks compute an expert, its rows are then split into blocks by rank.
        send_order = topk_expert_ids_BLK.flatten().argsort(stable=True)
        if plan.rounds:
            send_order = send_order[_order(*route.sent_blocks, device=x.device)]
        tokens = send_order // topk_scores_BLK.size(-1)
        compute_order = _order(*route.computed_blocks, device=x.device)
        loans = _Loans(plan, rank, compute_order.split([int(route.local_rows.sum()), *route.borrowed_rows]), group)
        local_counts = torch.from_numpy(route.local_rows).to(x.device)
        out = self._spread(
            loans, local_counts, dispatcher._dispatch_token_exchange(x[tokens], group, route.receive, route.send)
        )
        # Results travel back the way the rows came: send and receive counts are swapped.
        returned_rows = dispatcher._combine_token_exchange(out, group, route.send, route.receive)
        summed: torch.Tensor = dispatcher.summed(returned_rows, tokens, topk_scores_BLK.flatten()[send_order], x)
        return summed.view_as(x_BLD)

    def _spread(self, loans: _Loans, counts: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """Send rows, [R, dim], through own and borrowed experts; `counts`, [own experts], is of the own ones' rows."""
        experts = self.inner_experts
        weights = [local(parameter) for parameter in experts.parameters()]
        # Sends and receives run while this rank computes with its own experts.
        rows, *extra_outputs = _Lend.apply(loans, received, *weights)
        # `_Lend` has copied the rows, sorted; autograd does not need the received ones.
        del received
        borrowed_rows, borrowed_weights = extra_outputs[: loans.borrows], extra_outputs[loans.borrows :]
        outs = [experts(rows, counts)]
        # Received weights are needed from here on; own experts have been computed meanwhile.
        loans.receive()
        for index, part in enumerate(borrowed_rows):
            expert_weights = borrowed_weights[index * len(weights) : (index + 1) * len(weights)]
            outs.append(experts.compute(expert_weights, part, torch.tensor([len(part)], device=part.device)))
        # Backward receives into the storage that other nodes have saved; `data` has a version of its own, which theirs
        # is not compared with.
        out: torch.Tensor = _Join.apply(
            loans, *outs, *(weight.data for weight in borrowed_weights), *(weight.detach() for weight in weights)
        )
        return out


class _Loans:
    """One rank's exchanges of experts in a plan, each between an owner and a borrower.

    Args:
        places: indices of the received rows that this rank computes with its own experts, and then, for each round,
            with the expert that it borrows; none if it borrows none.
    """

    def __init__(self, plan: ExpertPlan, rank: int, places: Sequence[torch.Tensor], group: ProcessGroup) -> None:
        ranks, experts = plan.rows.shape
        first = rank * (experts // ranks)
        self._group = group
        self._rounds = list[tuple[tuple[int, int] | None, int | None]]()
        """For each round, the own expert that is lent and its borrower, and the owner of the borrowed one."""
        for loans in plan.rounds:
            lent = next(((loan.expert - first, loan.borrower) for loan in loans if loan.owner == rank), None)
            self._rounds.append((lent, next((loan.owner for loan in loans if loan.borrower == rank), None)))
        local_places, *borrowed_places = places
        self.places = [
            local_places,
            *(
                expert_places
                for expert_places, (_, owner) in zip(borrowed_places, self._rounds, strict=True)
                if owner is not None
            ),
        ]
        self.borrows = len(self.places) - 1
        """Number of experts that this rank borrows."""
        self._sent, self._coming = list[dist.Work](), list[dist.Work]()

    def start(self, weights: Sequence[torch.Tensor], borrowed: Sequence[torch.Tensor]) -> None:
        """Start to send the experts that this rank lends, and to receive those that it borrows.

        Args:
            weights: parameters of the own experts, each [own experts, ...].
            borrowed: the same of each borrowed expert, each [1, ...], one expert after the other.
        """
        buffers = iter(borrowed)
        # Owner and borrower go through the rounds in the same order, so their messages pair up.
        for lent, owner in self._rounds:
            if lent is not None:
                lent_weights = [weight[lent[0]].contiguous() for weight in weights]
                self._sent += _exchange(dist.isend, lent_weights, lent[1], self._group)
            if owner is not None:
                self._coming += _exchange(dist.irecv, [next(buffers) for _ in weights], owner, self._group)

    def receive(self) -> None:
        """Wait until the borrowed experts have come."""
        _wait(self._coming)

    def finish(self) -> None:
        """Wait until the lent experts have been sent."""
        _wait(self._sent)

    def give_back(
        self, grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], is_trained: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of borrowed experts to their owners.

        Args:
            grads: by the weights of each borrowed expert, one expert after the other.
            weights: parameters of the own experts.
            is_trained: for each of them, whether it has a gradient.

        Returns:
            For each of `weights`, the sum of the borrowers' gradients; None if it has none, or this rank lends no
            expert.
        """
        trained = list(itertools.compress(weights, is_trained))
        sums = [torch.zeros_like(weight) for weight in trained] if any(lent for lent, _ in self._rounds) else []
        grad_iterator = itertools.compress(grads, itertools.cycle(is_trained))
        # One round at a time, which bounds the memory of received gradients to one expert's.
        for lent, owner in self._rounds:
            works = list[dist.Work]()
            if owner is not None:
                works += _exchange(dist.isend, [next(grad_iterator).contiguous() for _ in trained], owner, self._group)
            if lent is not None:
                received = [weight.new_empty(weight.shape[1:]) for weight in trained]
                works += _exchange(dist.irecv, received, lent[1], self._group)
            _wait(works)
            if lent is not None:
                for total, part in zip(sums, received, strict=True):
                    total[lent[0]] += part
        sum_iterator = iter(sums)
        return [next(sum_iterator, None) if has_grad else None for has_grad in is_trained]


def _exchange(
    operation: Callable[..., Any], tensors: Sequence[torch.Tensor], peer: int, group: ProcessGroup
) -> list[dist.Work]:
    """Start to send tensors to a rank of the group, or to receive them from it."""
    works: list[dist.Work] = dist.batch_isend_irecv(
        [dist.P2POp(operation, tensor, group=group, group_peer=peer) for tensor in tensors]
    )
    return works


def _wait(works: list[dist.Work]) -> None:
    while works:
        works.pop(0).wait()


class _Lend(torch.autograd.Function):
    """Starts the exchange of lent experts, and sorts rows by who owns their experts.

    All computation of forward uses its results, so that its backward, which returns the gradients of borrowed experts,
    comes after all computation.
    """

    @staticmethod
    def forward(ctx: Any, loans: _Loans, rows: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.loans = loans
        ctx.save_for_backward(*weights)
        borrowed = [weight.new_empty(1, *weight.shape[1:]) for _ in range(loans.borrows) for weight in weights]
        loans.start(weights, borrowed)
        # Frozen weights get no gradient, so borrowers send none back.
        is_trained = ctx.needs_input_grad[2:] * loans.borrows
        ctx.mark_non_differentiable(
            *(weight for weight, has_grad in zip(borrowed, is_trained, strict=True) if not has_grad)
        )
        return *(rows[places] for places in loans.places), *borrowed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        loans: _Loans = ctx.loans
        parts, borrowed_grads = grads[: loans.borrows + 1], grads[loans.borrows + 1 :]
        loans.finish()
        weights = ctx.saved_tensors
        is_trained = ctx.needs_input_grad[2:]
        weight_grads = (
            loans.give_back(borrowed_grads, weights, is_trained) if any(is_trained) else [None] * len(weights)
        )
        return None, _placed(parts, loans.places) if ctx.needs_input_grad[1] else None, *weight_grads


class _Join(torch.autograd.Function):
    """Puts computed rows back into the order in which they came, and frees the weights of borrowed experts.

    Its backward, which fetches them again, comes before all other computation.
    """

    @staticmethod
    def forward(ctx: Any, loans: _Loans, *inputs: torch.Tensor) -> torch.Tensor:
        parts = inputs[: loans.borrows + 1]
        weights = inputs[loans.borrows + 1 :]
        size = len(weights) // (loans.borrows + 1)
        borrowed, local_weights = weights[:-size], weights[-size:]
        ctx.loans, ctx.size = loans, size
        ctx.save_for_backward(*borrowed, *local_weights)
        # Release the weights until the backward pass, which refills the same storage for the nodes that saved it.
        for weight in borrowed:
            weight.untyped_storage().resize_(0)
        loans.finish()
        return _placed(parts, loans.places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        loans: _Loans = ctx.loans
        saved_weights = ctx.saved_tensors  # read once, as recomputation demands
        borrowed, local_weights = saved_weights[: -ctx.size], saved_weights[-ctx.size :]
        for weight in borrowed:
            weight.untyped_storage().resize_(weight.nbytes)
        loans.start(local_weights, borrowed)
        parts = [grad[places] for places in loans.places]
        loans.receive()
        return None, *parts, *([None] * len(saved_weights))


def _placed(parts: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put parts of rows, each [its rows, dim], to their places among all: [rows, dim]."""
    rows = parts[0].new_empty(sum(map(len, places)), *parts[0].shape[1:])
    for part, indices in zip(parts, places, strict=True):
        rows[indices] = part
    return rows


def rank_loads(model: nn.Module) -> torch.Tensor | None:
    """Return the heaviest ranks' loads in the last forward pass, see `LeastLoadedExperts.heaviest`, [layers, 2]; None
    if ranks never lend."""
    modules = (module for module in model.modules() if isinstance(module, LeastLoadedExperts))
    loads = [module.heaviest for module in modules if module.heaviest is not None]
    return torch.tensor(loads, dtype=torch.float64) if loads else None


def _gathered(counts: torch.Tensor, group: ProcessGroup) -> Any:
    """Gather every rank's counts, [experts], to the host: [ranks, experts]."""
    all_counts = counts.new_empty(group.size() * len(counts))
    dist.all_gather_single(all_counts, counts.contiguous(), group=group)
    return all_counts.view(group.size(), -1).cpu().numpy()


def _heaviest(counts: Any, plan: ExpertPlan) -> tuple[float, float]:
    ranks = len(counts)
    mean = max(1.0, counts.sum() / ranks)
    plain = counts.sum(axis=0).reshape(ranks, -1).sum(axis=1).max()
    return float(plain / mean), float(plan.rows.sum(axis=1).max() / mean)


def _order(starts: Any, lengths: Any, *, device: torch.device) -> torch.Tensor:
    """Return the indices of blocks of rows, in the order of the blocks."""
    ends = lengths.cumsum()
    return torch.from_numpy(np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1])).to(device)
