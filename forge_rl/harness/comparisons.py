"""Scores of evaluated models by task set, and differences between models over the tasks that both have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console

from forge_rl.algorithms.evaluation import Comparison, compare_paired
from forge_rl.harness.results_file import Results, Sets
from forge_rl.harness.score_tables import plain_table
from forge_rl.rollout.evaluation import score_set
from forge_rl.types import Episode

_ALL_PAIRS = 3
"""Number of models up to which each pair is compared."""


def pairs_of(models: Sequence[str]) -> list[tuple[str, str]]:
    """Return the models to compare: each pair, or if there are many, each model with the first."""
    if len(models) <= _ALL_PAIRS:
        return list(itertools.combinations(models, 2))
    return [(models[0], other) for other in models[1:]]


def score(sets: Sets, results: Results, *, k: int, success: float) -> dict[str, dict[str, float]]:
    """Return a model's scores by set, see `score_set`; without the sets of which all episodes failed."""
    episodes_by_set = {name: results.of_set(name, tasks) for name, tasks in sets.items()}
    return {
        name: score_set(name, tasks, k=k, success=success)
        for name, tasks in episodes_by_set.items()
        if any(episode.outcome.scored for episodes in tasks for episode in episodes)
    }


def check_scored(sets: Sets, results: Results) -> None:
    """Check that each set has a score.

    Raises:
        ForgeError: all episodes of a set failed; says how the last one did.
    """
    for name, tasks in sets.items():
        score_set(name, results.of_set(name, tasks), k=1)


def compare(sets: Sets, first: Results, second: Results) -> dict[str, Comparison]:
    """Compare two models, by set, on their mean rewards of the tasks that both have scores for."""
    comparisons = {}
    for name, tasks in sets.items():
        means = zip(*(map(_mean, results.of_set(name, tasks)) for results in (first, second)), strict=True)
        # Paired by task: differences between tasks, which both models share, do not widen the interval.
        pairs = [(a, b) for a, b in means if a is not None and b is not None]
        if pairs:
            comparisons[name] = compare_paired([a for a, _ in pairs], [b for _, b in pairs])
    return comparisons


def print_comparisons(console: Console, comparisons: Sequence[tuple[str, str, str, Comparison]]) -> None:
    """Print the table of differences, if there are any."""
    if not comparisons:
        return
    table = plain_table("differences", "95% interval over tasks that both models have in common; bold if it excludes 0")
    for column in ("set", "from", "to"):
        table.add_column(column, overflow="fold")
    for column in ("difference", "95% interval", "won", "lost", "tasks"):
        table.add_column(column, justify="right", no_wrap=True)
    for first, second, name, comparison in comparisons:
        is_certain = comparison.low > 0 or comparison.high < 0
        table.add_row(
            *(name, first, second, f"{comparison.difference:+.3f}", f"{comparison.low:+.3f} to {comparison.high:+.3f}"),
            *(str(comparison.won), str(comparison.lost), str(comparison.tasks)),
            style="bold" if is_certain else "",
        )
    console.print(table)


def _mean(episodes: Sequence[Episode]) -> float | None:
    # Episodes that failed have no reward; counting them as 0 would blame the model for its machine.
    rewards = [episode.reward for episode in episodes if episode.outcome.scored]
    return sum(rewards) / len(rewards) if rewards else None
