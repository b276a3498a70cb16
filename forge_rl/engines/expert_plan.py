"""Plans least-loaded expert parallelism: which rank computes which rows of which expert.

The plan depends on the counts alone, so every rank that gathers them makes the same one. It follows "Least-Loaded
Expert Parallelism: Load Balancing An Imbalanced Mixture-of-Experts", arXiv:2601.17111.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

_PLAIN_BELOW = 1.1
"""Ratio of the heaviest rank's rows to the mean up to which each rank computes its own experts."""
_EVEN = 1.02
"""Ratio of the heaviest rank's rows to the mean at which a plan is even enough."""


@dataclass(frozen=True, kw_only=True)
class Loan:
    """An expert whose weights a rank fetches from the owner to compute some of its rows."""

    expert: int
    owner: int
    borrower: int


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """Assignment of each expert's rows to ranks.

    plan = plan_experts(counts.sum(axis=0), ranks=4)
    plan.rows[2, 5]  # rows of expert 5 that rank 2 computes
    """

    rows: Counts
    """[ranks, experts]: rows that each rank computes of each expert. The columns sum up to the experts' loads."""
    rounds: tuple[tuple[Loan, ...], ...]
    """Loans, in the order of exchange: in a round, a rank lends at most one expert and borrows at most one. Empty if
    each rank computes its own experts."""


def plan_experts(load: Counts, *, ranks: int) -> ExpertPlan:
    """Spread the rows of overloaded ranks' experts over the least loaded ranks.

    Rank r owns the experts from r * experts / ranks on. An owner lends only its surplus over the mean, its largest
    expert first, always to the rank with the fewest rows.

    Args:
        load: [experts], rows of each expert over all ranks.
        ranks: a divisor of the number of experts.
    """
    experts = len(load)
    experts_per_rank = experts // ranks
    rows = np.zeros((ranks, experts), dtype=np.int64)
    # The plain plan: each rank computes all rows of its own experts.
    rows[np.arange(experts) // experts_per_rank, np.arange(experts)] = load
    totals = rows.sum(axis=1)
    mean = float(totals.mean())
    loans: dict[tuple[int, int, int], int] = {}
    if totals.max() > _PLAIN_BELOW * mean:
        target_rows = int(np.ceil(mean))
        while totals.max() > _EVEN * mean:
            owner, borrower = int(totals.argmax()), int(totals.argmin())
            # The expert of which it still has the most rows: few loans, each a transfer of an expert's weights.
            expert = owner * experts_per_rank + int(
                rows[owner, owner * experts_per_rank : (owner + 1) * experts_per_rank].argmax()
            )
            moved_rows = int(min(totals[owner] - target_rows, target_rows - totals[borrower], rows[owner, expert]))
            if moved_rows <= 0:  # the heaviest rank has the mean, rounded up
                break
            rows[owner, expert] -= moved_rows
            rows[borrower, expert] += moved_rows
            totals[owner] -= moved_rows
            totals[borrower] += moved_rows
            loan = expert, owner, borrower
            loans[loan] = loans.get(loan, 0) + moved_rows
    return ExpertPlan(rows=rows, rounds=_rounds(loans))


def _rounds(loans: dict[tuple[int, int, int], int]) -> tuple[tuple[Loan, ...], ...]:
    """Put each loan, the largest first, into the first round in which its owner and its borrower are free."""
    rounds: list[list[Loan]] = []
    for expert, owner, borrower in sorted(loans, key=lambda loan: (-loans[loan], loan)):
        for round_loans in rounds:
            if all(owner != other.owner and borrower != other.borrower for other in round_loans):
                break
        else:
            rounds.append(round_loans := [])
        round_loans.append(Loan(expert=expert, owner=owner, borrower=borrower))
    return tuple(map(tuple, rounds))


@dataclass(frozen=True, kw_only=True)
class Routes:
    """One rank's part in a plan: the rows that it sends, receives and computes.

    Rows are sent in the order of `sent_blocks`, and computed in the order of `computed_blocks`: first the rows of the
    rank's own experts, then of borrowed ones, round by round; within an expert, by the rank that sent them.
    """

    sent_blocks: tuple[Counts, Counts]
    """Starts and lengths of blocks of this rank's rows, which are sorted by expert, in the order of sending."""
    computed_blocks: tuple[Counts, Counts]
    """Starts and lengths of blocks of the received rows, in the order of computing."""
    send: list[int]
    """[ranks], rows sent to each rank."""
    receive: list[int]
    """[ranks], rows received from each rank."""
    local_rows: Counts
    """[own experts], rows of each of this rank's experts that it computes itself."""
    borrowed_rows: list[int]
    """[rounds], rows of the expert that it borrows in each round; 0 if it borrows none."""


def routes(plan: ExpertPlan, counts: Counts, rank: int) -> Routes:
    """Work out one rank's part of a plan.

    An expert's rows are numbered in the order of the ranks that hold them, and each computing rank takes consecutive
    ones.

    Args:
        counts: [ranks, experts], each rank's rows of each expert; their sum over ranks is the load that was planned.
    """
    ranks, experts = counts.shape
    experts_per_rank = experts // ranks
    # [ranks, experts]: numbered rows of each expert, this rank's range of them against each computing rank's, and the
    # reverse.
    sent_rows = _overlap(counts[rank], _before(counts)[rank], plan.rows, _before(plan.rows))
    received_rows = _overlap(plan.rows[rank], _before(plan.rows)[rank], counts, _before(counts))
    loans = [next((loan for loan in round_loans if loan.borrower == rank), None) for round_loans in plan.rounds]
    local_experts = [
        *range(rank * experts_per_rank, (rank + 1) * experts_per_rank),
        *(loan.expert for loan in loans if loan is not None),
    ]
    # This rank's rows are sorted by expert, within it by the computing rank; they are sent by rank, then expert.
    sent_starts = _starts(sent_rows.T).T
    # Received rows are sorted by sender, then expert; they are computed by expert, then sender.
    received_starts = _starts(received_rows)
    return Routes(
        sent_blocks=(sent_starts.ravel(), sent_rows.ravel()),
        computed_blocks=(received_starts[:, local_experts].T.ravel(), received_rows[:, local_experts].T.ravel()),
        send=sent_rows.sum(axis=1).tolist(),
        receive=received_rows.sum(axis=1).tolist(),
        local_rows=plan.rows[rank, rank * experts_per_rank : (rank + 1) * experts_per_rank],
        borrowed_rows=[0 if loan is None else int(plan.rows[rank, loan.expert]) for loan in loans],
    )


def _before(rows: Counts) -> Counts:
    """Return the sum of the rows of earlier ranks, [ranks, experts]."""
    return rows.cumsum(axis=0) - rows


def _starts(lengths: Counts) -> Counts:
    """Return where each block starts if blocks lie one after the other, in the order of the array."""
    flat = lengths.ravel()
    starts: Counts = flat.cumsum() - flat
    return starts.reshape(lengths.shape)


def _overlap(rank_rows: Counts, rank_starts: Counts, all_rows: Counts, all_starts: Counts) -> Counts:
    """Count the rows that one rank's ranges, [experts], share with every rank's, [ranks, experts]."""
    ends = np.minimum(rank_starts + rank_rows, all_starts + all_rows)
    shared: Counts = np.maximum(ends - np.maximum(rank_starts, all_starts), 0)
    return shared
