"""Longest row that trains in 8 GiB, before and after chunks and recomputation; and the plan's bytes beside the peak.

python -m benchmarks.long_rows --json out.json

Each try is a process that takes an update on one long row, when gradients and the optimizer's state are there. "Before"
is the same code with all logits at once, a dense mask, and nothing computed again. A row fits if the process's peak
resident memory is within the limit. After takes minutes a try, so it stops where it is --stop-at times as long; how far
the plan says that it goes is printed beside.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.engines.factory import plan_training
from forge_rl.engines.protocol import TrainSettings

_STEP = 128
_CLOSE = 1.08
"""Ratio of the shortest row that does not fit to the longest that does, at which the search ends."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Find the longest row that trains, and compare the plan with the peak."""

    gib: float = 8.0
    """Memory of the process."""
    layers: int = 30
    """Layers of the model, which otherwise has SmolLM2-135M's shape."""
    after: str = "full"
    """Activation checkpointing of "after"."""
    stop_at: float = 4.0
    """How many times as long as before a row is tried at most."""
    small: int = 1024
    """Tokens of the rows that the plan is compared on, besides the long ones."""

    def __post_init__(self) -> None:
        if self.stop_at < 3 or self.small < _STEP or self.after not in ("none", "selective", "full"):
            raise BenchmarkError(
                f"nothing to find with --stop-at {self.stop_at}, --small {self.small}, --after {self.after}",
                hint=f"set --stop-at to 3 or more, --small to {_STEP} or more, --after to none, selective or full",
            )


def measure(config: Config, report: Report) -> None:
    """Search both, and compare each try but those of before with the plan."""
    limit = round(config.gib * 2**30)
    with tempfile.TemporaryDirectory(prefix="forge_rl-rows-") as made:
        model = Path(made)
        _make_model(model, config.layers)

        def planned(how: str, tokens: int) -> int:
            settings = TrainSettings(dtype="float32", row_tokens=tokens)
            settings = replace(settings, activation_checkpointing=how)  # type: ignore[arg-type]
            return plan_training(model, settings, ranks=1, reference=False).total

        plan_itself = planned(config.after, config.small)  # now all that a trainer imports is imported
        process = psutil.Process().memory_info().rss
        errors: list[float] = []

        def peak(how: str, tokens: int) -> int:
            found = _try(model, how, tokens)
            row: dict[str, object] = {"how": how, "tokens": tokens, **found}
            said = f"{how}, {tokens} tokens: peak {found['peak'] / 2**30:.2f} GiB in {found['seconds']:.0f} s"
            if how != "before":
                expected = process + planned(how, tokens)
                errors.append(abs(expected - found["peak"]) / found["peak"])
                row |= {"planned": expected}
                said += f", planned {expected / 2**30:.2f} GiB ({expected / found['peak'] - 1:+.1%})"
            report.rows.append(row)
            print(said, flush=True)
            return round(found["peak"])

        for how in ("none", "selective", "full"):
            peak(how, config.small)
        before = _longest(lambda tokens: peak("before", tokens), limit, first=config.small, most=1 << 20)
        most = _rounded(before * config.stop_at)
        after = _longest(lambda tokens: peak(config.after, tokens), limit, first=most, most=most)
        slope = (planned(config.after, 2 * most) - planned(config.after, most)) / most
        report.results |= {
            "longest_over_before": after / before,
            "plan_error": max(errors),
            "longest_before_tokens": float(before),
            "longest_after_tokens": float(after),
            "longest_after_tokens_planned": most + (limit - process - planned(config.after, most)) / slope,
            "planned_state_gib": plan_itself / 2**30,
        }


def _longest(peak: object, limit: int, *, first: int, most: int) -> int:
    raise NotImplementedError


def _rounded(tokens: float) -> int:
    return max(_STEP, round(tokens / _STEP) * _STEP)
