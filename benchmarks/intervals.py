"""How often 95% intervals of evaluation scores hold the true value, by simulation.

python -m benchmarks.intervals --json out.json

Each task has k episodes and a chance of success, the same for all or drawn from a wide beta distribution, of parameters
that add up to 1. The second model's chances are 0.96 times the first's plus 0.02, a fifth of them drawn again. Each
table cell is the lowest coverage over k and distributions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.algorithms.evaluation import compare_paired, mean_over_tasks

TASKS = (10, 30, 100, 1000)
CHANCES = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
EPISODES = (1, 4, 16)


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure the coverage of intervals of scores and of differences."""

    draws: int = 1000
    """Simulated evaluations of each kind."""

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise BenchmarkError(f"--draws is {self.draws}", hint="set --draws to 1 or more")


def coverage(
    tasks: int, chance: float, episodes: int, *, varies: bool, draws: int, random: np.random.Generator
) -> tuple[float, float]:
    """Return how often the intervals of the first model's score, and of the difference, hold the true values."""

    def draw_chances() -> npt.NDArray[np.float64]:
        return random.beta(chance, 1 - chance, tasks) if varies else np.full(tasks, chance)

    hits = np.zeros(2)
    for _ in range(draws):
        first = draw_chances()
        # Correlated with the first model task by task, as two models are; its mean is 0.96 chance + 0.02.
        second = 0.96 * np.where(random.random(tasks) < 0.2, draw_chances(), first) + 0.02
        scores, second_scores = (random.binomial(episodes, chances) / episodes for chances in (first, second))
        score, difference = mean_over_tasks(scores.tolist()), compare_paired(scores.tolist(), second_scores.tolist())
        hits += score.low <= chance <= score.high, difference.low <= 0.02 - 0.04 * chance <= difference.high
    return float(hits[0] / draws), float(hits[1] / draws)


def measure(config: Config, report: Report) -> None:
    """Simulate every kind of evaluation, and print the tables that the documentation has."""
    random = np.random.default_rng(0)
    lowest: dict[tuple[int, float], tuple[float, float]] = {}
    for tasks, chance in itertools.product(TASKS, CHANCES):
        kinds = [(episodes, varies) for episodes in EPISODES for varies in (False, True) if episodes > 1 or not varies]
        shares = [
            coverage(tasks, chance, episodes, varies=varies, draws=config.draws, random=random)
            for episodes, varies in kinds
        ]
        for (episodes, varies), (score, difference) in zip(kinds, shares, strict=True):
            kind: dict[str, object] = {"tasks": tasks, "chance": chance, "episodes": episodes, "varies": varies}
            report.rows.append(kind | {"score": score, "difference": difference})
        lowest[tasks, chance] = min(score for score, _ in shares), min(difference for _, difference in shares)
    for column, name in enumerate(("score", "difference")):
        cells = [(f"{name} of", *(f"{chance:.0%}" for chance in CHANCES)), ("---",) * (1 + len(CHANCES))]
        cells += [
            (f"{tasks:,} tasks", *(f"{lowest[tasks, chance][column]:.0%}" for chance in CHANCES)) for tasks in TASKS
        ]
        Console(highlight=False, width=120).print(*(f"| {' | '.join(row)} |" for row in cells), "", sep="\n")
        report.results[f"lowest_coverage_{name}"] = min(shares[column] for shares in lowest.values())


if __name__ == "__main__":
    run_benchmark("intervals", Config, measure)
