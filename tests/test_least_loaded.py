"""Least-loaded expert parallelism computes what plain does, and owners and borrowers compute at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.ranks import run_ranks

TOKENS, DIM = 64, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """Experts that tokens choose, and what is trained or recomputed."""

    experts: int = 4
    hot: int = 1
    """The first experts get all tokens, evenly."""
    frozen: tuple[str, ...] = ()
    fixed_inputs: bool = False
    recomputed: bool = False
    ranks: int = 2


CASES = {
    "one_hot_expert": Case(),
    "no_rows_for_some_ranks": Case(ranks=4),
    "several_loans_of_a_borrower": Case(experts=16, hot=8),
    "recomputed": Case(experts=16, hot=8, recomputed=True),
    "frozen_experts": Case(frozen=("w1_EFD", "w2_EDF", "w3_EFD")),
    "a_frozen_matrix": Case(frozen=("w1_EFD",)),
    "no_gradient_of_inputs": Case(fixed_inputs=True),
}


def layer(case: Case) -> tuple[Any, list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Make a rank's experts, what is differentiated, and inputs."""
    from torchtitan.distributed.utils import set_spmd_backend

    from forge_rl.engines.families.family import Experts
    from forge_rl.engines.titan.moe import moe_config
    from forge_rl.engines.titan.parallel import BACKEND

    set_spmd_backend(BACKEND)
    rank, size = dist.get_rank(), case.experts // case.ranks
    kind = Experts(layers=(0,), count=case.experts, top_k=1, hidden_dim=24, normalized=True)
    experts = moe_config(kind, DIM).routed_experts.build()
    generator = torch.Generator().manual_seed(0)
    inner = experts.inner_experts
    for name, parameter in list(inner.named_parameters()):
        full_weights = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        rank_weights = full_weights[rank * size : (rank + 1) * size].clone()
        setattr(inner, name, torch.nn.Parameter(rank_weights, requires_grad=name not in case.frozen))
    experts.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("ep",)))
    generator.manual_seed(rank + 1)
    x = torch.randn(1, TOKENS, DIM, generator=generator, dtype=torch.float64).requires_grad_(not case.fixed_inputs)
    scores = torch.rand(1, TOKENS, 1, generator=generator, dtype=torch.float64).requires_grad_()
    expert_ids = (torch.arange(TOKENS) % case.hot)[None, :, None]
    counts = torch.bincount(expert_ids.flatten(), minlength=case.experts)
    trained = [tensor for tensor in (x, scores, *inner.parameters()) if tensor.requires_grad]
    return experts, trained, (x, scores, expert_ids, counts)


def both_ways(rank: int, cases: Sequence[Case]) -> list[list[list[torch.Tensor]]]:
    """Outputs and gradients of plain and least-loaded, after two backward passes through each graph."""
    case_ways = []
    for case in cases:
        experts, trained, inputs = layer(case)
        ways = []
        for experts.lends in (False, True):
            out = checkpoint(experts, *inputs, use_reentrant=False) if case.recomputed else experts(*inputs)
            out.square().sum().backward(retain_graph=not case.recomputed)
            if not case.recomputed:
                out.sum().backward()
            ways.append([out.detach(), *(tensor.grad for tensor in trained)])
            for tensor in trained:
                tensor.grad = None
        assert experts.heaviest[0] > 1.9
        assert experts.heaviest[1] <= 1.1, experts.heaviest
        case_ways.append(ways)
    return case_ways


@pytest.mark.parametrize("ranks", [2, 4])
def test_lent_experts_have_the_outputs_and_gradients_of_plain_ones(ranks: int):
    cases = {name: case for name, case in CASES.items() if case.ranks == ranks}
    for rank_ways in run_ranks(both_ways, ranks, list(cases.values()), deadline_s=120):
        for name, (plain, ours) in zip(cases, rank_ways, strict=True):
            for expected, other in zip(plain, ours, strict=True):
                torch.testing.assert_close(
                    other, expected, rtol=1e-12, atol=1e-11, msg=lambda message, name=name: name + message
                )


def received_shapes(rank: int) -> list[list[tuple[int, ...]]]:
    """Shapes that a rank receives in each exchange of a layer whose experts have frozen weights beside trained ones."""
    from forge_rl.engines.titan import least_loaded

    experts, _, inputs = layer(Case(frozen=("w1_EFD", "w3_EFD")))
    shapes, exchange = list[list[tuple[int, ...]]](), least_loaded._exchange

    def recorded(operation: Any, tensors: Sequence[torch.Tensor], *peer: Any) -> list[dist.Work]:
        if operation is dist.irecv:
            shapes.append([tuple(tensor.shape) for tensor in tensors])
        return exchange(operation, tensors, *peer)

    least_loaded._exchange = recorded
    experts.lends = True
    experts(*inputs).sum().backward()
    return shapes


def test_owners_receive_gradients_of_trained_weights_only():
    owner, borrower = run_ranks(received_shapes, 2, deadline_s=120)
    assert owner == [[(DIM, 24)]]
    assert [len(shapes) for shapes in borrower] == [3, 3], "all weights, in forward and in backward"


class Meeting(torch.autograd.Function):
    """Passes rows on once both ranks are here, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        meet("forward")
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        meet("backward")
        return grad


def meet(where: str) -> None:
    """Wait for the other rank, without a collective of the group; raises after 20 s."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{where} {dist.get_rank()}", "")
    store.wait([f"{where} {1 - dist.get_rank()}"], timedelta(seconds=20))


def meets(rank: int) -> None:
    """Run a layer in which the owner's rows of a lent expert meet the borrower's."""
    experts, _, inputs = layer(Case())
    compute = experts.inner_experts.compute

    def meeting(weights: Sequence[torch.Tensor], rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compute(weights, rows, counts)
        return Meeting.apply(out) if len(rows) else out

    experts.inner_experts.compute = meeting
    experts.lends = True
    experts(*inputs).sum().backward()


def test_owner_and_borrower_compute_at_the_same_time_in_both_passes():
    run_ranks(meets, 2, deadline_s=120)
