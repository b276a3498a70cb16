"""Plans of least-loaded expert parallelism: each row is computed once, and no rank has much more than the mean."""

import numpy as np
import pytest

from forge_rl.engines.expert_plan import plan_experts, routes


@pytest.mark.parametrize(("ranks", "experts"), [(2, 8), (4, 8), (8, 64)])
@pytest.mark.parametrize("skew", [1, 2, 5, 30, 1000])
def test_each_row_is_computed_once_and_ranks_are_even(ranks: int, experts: int, skew: int):
    generator = np.random.default_rng(skew)
    shares = np.ones(experts)
    shares[: experts // ranks] = skew
    counts = generator.multinomial(20_000, shares / shares.sum(), size=ranks)
    plan = plan_experts(counts.sum(axis=0), ranks=ranks)
    totals = plan.rows.sum(axis=1)
    assert (plan.rows >= 0).all()
    assert (plan.rows.sum(axis=0) == counts.sum(axis=0)).all()
    assert totals.max() <= 1.1 * totals.mean()
    for loans in plan.rounds:  # one expert borrowed and one lent at a time
        assert len({loan.borrower for loan in loans}) == len({loan.owner for loan in loans}) == len(loans)
    is_local = np.kron(np.eye(ranks, dtype=bool), np.ones(experts // ranks, dtype=bool))
    lent = {(loan.borrower, loan.expert) for loans in plan.rounds for loan in loans}
    assert lent == set(zip(*np.nonzero(plan.rows * ~is_local), strict=True))

    # Rows that are labelled (rank, expert, number) meet again where they belong.
    rank_routes = [routes(plan, counts, rank) for rank in range(ranks)]
    labels = [[(rank, e, i) for e in range(experts) for i in range(counts[rank, e])] for rank in range(ranks)]
    sent_labels = [_take(labels[rank], rank_routes[rank].sent_blocks) for rank in range(ranks)]
    computed_rows: set[tuple[int, int, int]] = set()
    for rank, route in enumerate(rank_routes):
        arrivals = []
        for source in range(ranks):
            first = sum(rank_routes[source].send[:rank])
            arrivals += sent_labels[source][first : first + rank_routes[source].send[rank]]
            assert rank_routes[source].send[rank] == route.receive[source]
        rows = _take(arrivals, route.computed_blocks)
        computed_rows |= set(rows)
        borrowed = [next((loan.expert for loan in loans if loan.borrower == rank), -1) for loans in plan.rounds]
        mine = [*range(rank * (experts // ranks), (rank + 1) * (experts // ranks)), *borrowed]
        sizes = [*route.local_rows, *route.borrowed_rows]
        expected = [expert for expert, size in zip(mine, sizes, strict=True) for _ in range(size)]
        assert [label[1] for label in rows] == expected
    assert len(computed_rows) == counts.sum()


def _take(rows: list[tuple[int, int, int]], blocks: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int, int]]:
    return [row for start, length in zip(*blocks, strict=True) for row in rows[start : start + length]]


def test_even_ranks_and_empty_ones_lend_nothing():
    assert plan_experts(np.array([50, 52, 49, 51]), ranks=2).rounds == ()
    assert plan_experts(np.zeros(4, dtype=np.int64), ranks=2).rounds == ()
    assert plan_experts(np.array([1, 0, 0, 0]), ranks=2).rounds == ()


def test_a_hot_expert_is_shared_by_hand():
    plan = plan_experts(np.array([60, 20, 10, 10]), ranks=2)
    assert plan.rows.tolist() == [[30, 20, 0, 0], [30, 0, 10, 10]]
    assert [[(loan.expert, loan.owner, loan.borrower) for loan in loans] for loans in plan.rounds] == [[(0, 0, 1)]]
