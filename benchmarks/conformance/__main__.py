"""Losses and advantages compared with TRL's and verl's own functions on the same random batches.

python -m benchmarks.conformance --json out.json

Each library has an environment of its own under .bench, and runs its own code there: a real TRL trainer, of which only
forward passes, generation and rewards are replaced, and verl's functions. Batches have uneven lengths, equal rewards,
masked tokens and episodes, extreme ratios, and are split differently on each side: ours into episodes of several turns,
some tokens of which have no logprob, packed into rows and given to the loss by the trainer's own functions; theirs into
micro-batches of two ranks (for TRL, two processes). All in float64, as far as a peer and the rows' float32 allow it.
Of two minibatches, each must be as if its groups were alone.

A deviation is the largest of any element on any batch, relative to its size, or to the median size of the elements that
are not 0 if that is larger.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.conformance.batches import draw
from benchmarks.conformance.ours import LossOf, minibatch_deviation
from benchmarks.conformance.table import COMPARISONS, Comparison
from benchmarks.peer_environments import ROOT, TRL, VERL, set_up
from benchmarks.peers.exchange import Job, read_result, read_versions, write_jobs
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark

BOUND = 1e-5
"""Largest deviation of methods that are said to be equal, and less than the smallest of those that are not."""
_RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
_PEERS = {"TRL": (TRL, (*_RANKS, "benchmarks.peers.trl_methods")), "verl": (VERL, ("benchmarks.peers.verl_methods",))}
"""Environment and module of each peer; TRL has two ranks, verl's functions take their number."""
_DEADLINE_S = 1800.0
_RESULTS = ("loss", "gradient", "entropy_gradient", "advantages", "returns")


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare losses and advantages with TRL and verl."""

    draws: int = 5
    """Random batches of each kind."""
    smoke: bool = False
    """One batch of each kind."""

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise BenchmarkError(f"--draws is {self.draws}", hint="set --draws to 1 or more")


Results = Sequence[Mapping[str, npt.NDArray[Any]]]
"""A peer's results for the batches of a comparison."""


def deviation(ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> float:
    """Return the largest difference relative to the size of an element, see the module; inf if one is not finite."""
    if ours.shape != theirs.shape or not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return math.inf
    sizes = np.maximum(abs(ours), abs(theirs))
    if not sizes.any():
        return 0.0
    # The median of sizes as a floor: elements that nearly cancel would otherwise show rounding as a large deviation.
    return float((abs(ours - theirs) / np.maximum(sizes, np.median(sizes[sizes > 0]))).max())


def compare(comparison: Comparison, seeds: Sequence[int], peer_results: Results) -> dict[str, float]:
    """Compute our side and return its largest deviation from the peer's, by the name of the result."""
    deviations: dict[str, float] = {}
    batches = [draw(kind, seed) for kind in comparison.batches for seed in seeds]
    for batch, expected in zip(batches, peer_results, strict=True):
        results = comparison.ours(batch)
        assert results.keys() == expected.keys(), f"{results.keys()} are not {expected.keys()}"
        for name, values in results.items():
            deviations[name] = max(deviations.get(name, 0.0), deviation(values, expected[name]))
    return deviations


def run_peer(
    name: str, comparisons: Sequence[Comparison], seeds: Sequence[int]
) -> tuple[list[Results], dict[str, str]]:
    """Let a peer compute its side of its comparisons, in its environment.

    Returns:
        Its results for each comparison, and the versions of its packages.

    Raises:
        BenchmarkError: the environment cannot be made, or the peer failed.
    """
    peer, module = _PEERS[name]
    python = set_up(peer)
    print(f"running {name}", flush=True)
    kinds = sorted({kind for comparison in comparisons for kind in comparison.batches})
    jobs = [
        Job(function=comparison.function, settings=comparison.settings, batch=f"{kind}-{seed}")
        for comparison in comparisons
        for kind in comparison.batches
        for seed in seeds
    ]
    with tempfile.TemporaryDirectory(prefix="conformance-") as scratch:
        folder = Path(scratch)
        write_jobs(folder, jobs, {f"{kind}-{seed}": draw(kind, seed) for kind in kinds for seed in seeds})
        command = [str(python), "-m", *module, str(folder)]
        # The peer runs its own packages on the CPU, with one thread, for results that do not depend on the machine.
        hidden = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | hidden,
                check=True,
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
            )
        except subprocess.CalledProcessError as error:
            last = "\n".join(error.stderr.splitlines()[-40:])
            raise BenchmarkError(f"{last}\n{name} ended with status {error.returncode}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BenchmarkError(f"{name} cannot be run: {error}") from error
        results = iter([read_result(folder, number) for number in range(len(jobs))])
        by_comparison: list[Results] = [
            [next(results) for _ in comparison.batches for _ in seeds] for comparison in comparisons
        ]
        return by_comparison, read_versions(folder)


def measure(config: Config, report: Report, comparisons: Sequence[Comparison] = COMPARISONS) -> None:
    """Compare every method, print the table, and check the reasons for differences."""
    seeds = range(1 if config.smoke else config.draws)
    all_deviations: list[tuple[Comparison, dict[str, float]]] = []
    for name in _PEERS:
        peer_comparisons = [comparison for comparison in comparisons if comparison.peer == name]
        peer_results, report.versions[name] = run_peer(name, peer_comparisons, seeds)
        all_deviations += [
            (comparison, compare(comparison, seeds, results))
            for comparison, results in zip(peer_comparisons, peer_results, strict=True)
        ]
    for comparison, deviations in all_deviations:
        row: dict[str, object] = {
            "method": comparison.method,
            "peer": comparison.peer,
            "function": comparison.shown_function,
        }
        row |= {"batches": comparison.batches, "settings": comparison.settings}
        row |= {name: value if math.isfinite(value) else None for name, value in deviations.items()}
        report.rows.append(row | {"differs_on_purpose": comparison.differs})
    Console(highlight=False).print(table(all_deviations))
    check(all_deviations)
    equal = [(comparison, deviations) for comparison, deviations in all_deviations if not comparison.differs]
    report.results["methods_compared"] = float(len({comparison.method for comparison, _ in equal}))
    report.results["comparisons_equal"] = float(len(equal))
    report.results["comparisons_different_on_purpose"] = float(len(all_deviations) - len(equal))
    losses = [(item.ours, item.batches) for item in comparisons if isinstance(item.ours, LossOf)]
    report.results["worst_deviation_of_minibatches"] = max(
        (
            minibatch_deviation(ours, draw(kind, seed), deviation)
            for ours, kinds in losses
            for kind in kinds
            for seed in seeds
        ),
        default=0.0,
    )
    report.results["worst_deviation"] = max(max(deviations.values()) for _, deviations in equal)


def check(all_deviations: Sequence[tuple[Comparison, Mapping[str, float]]]) -> None:
    """Refuse results that contradict the table of comparisons.

    Raises:
        BenchmarkError: methods that are said to differ are equal, or a result that should be equal is not finite.
    """
    for comparison, deviations in all_deviations:
        worst = max(deviations.values())
        # A difference that has gone away must go from the table too, or its reason would stay as a false claim.
        if comparison.differs and worst <= BOUND:
            raise BenchmarkError(
                f"{comparison.method} is said to differ from {comparison.peer}'s, and does not ({worst:.1e})",
                hint="remove its reason from benchmarks/conformance/table.py",
            )
        if not comparison.differs and not math.isfinite(worst):
            raise BenchmarkError(
                f"{comparison.method} or {comparison.peer}'s form of it has a result that is not finite"
            )


def table(all_deviations: Sequence[tuple[Comparison, Mapping[str, float]]]) -> Table:
    """Return the deviations as a table for the terminal; a method that should be equal and differs is red."""
    table = Table(title="deviation from peers", title_justify="left")
    for column in ("method", "peer", *_RESULTS, "differs on purpose"):
        table.add_column(column, justify="right" if column in _RESULTS else "left")
    for comparison, deviations in all_deviations:
        values = [f"{deviations[name]:.1e}" if name in deviations else "" for name in _RESULTS]
        wrong = not comparison.differs and max(deviations.values()) > BOUND
        table.add_row(comparison.method, comparison.peer, *values, comparison.differs, style="red" if wrong else None)
    return table


if __name__ == "__main__":
    run_benchmark("conformance", Config, measure)
