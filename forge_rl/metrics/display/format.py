"""Numbers as a person reads them: durations, counts, bars and sparklines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "·"
"""Drawn in a sparkline where there is no number."""


def duration(seconds: float) -> str:
    """How long something took: `0.04s`, `2.1s`, `1:05`, `1:02:03`."""
    if seconds < 0.095:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 59.95 else countdown(seconds)


def countdown(seconds: float) -> str:
    """How long something will take: `0:09`, `2:13`, `1:02:03`."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float, decimals: int) -> str:
    """Fixed decimals, unless they would show 0 for what is not 0, or more digits than a person reads."""
    fixed = f"{value:.{decimals}f}"
    if math.isfinite(value) and (abs(value) >= 1e5 or (value != 0.0 and float(fixed) == 0.0)):
        return f"{value:.1e}"
    return "0." + "0" * decimals if math.isfinite(value) and float(fixed) == 0.0 else fixed


def count(value: float) -> str:
    """Three digits or so: `512`, `12.3k`, `1.2M`."""
    if not math.isfinite(value):
        return str(value)
    for unit, size in (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9)):
        scaled = value / size
        if scaled < 999.5:
            return f"{scaled:.0f}{unit}" if not unit or scaled >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{value:.1e}"


def percent(share: float) -> str:
    return f"{share * 100:.0f}%" if math.isfinite(share) else str(share)


def sparkline(values: Sequence[float], width: int) -> str:
    """One block a value, from the lowest ▁ to the highest █; more values than width are averaged in even buckets.

    Values that are not finite are left out of the averages, and are a dot where nothing else is.
    """
    if width <= 0 or not values:
        return ""
    cells = min(width, len(values))
    edges = [i * len(values) // cells for i in range(cells + 1)]
    means = [_mean(values[a:b]) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return GAP * cells
    low, high = min(finite), max(finite)
    if low == high:
        return "".join(BLOCKS[3] if math.isfinite(mean) else GAP for mean in means)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((mean - low) / (high - low) * top)] if math.isfinite(mean) else GAP for mean in means)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def keep_end(text: str, width: int) -> str:
    """The end of a path that is too long: `…/grpo-01`."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :] if width > 0 else ""


def keep_start(text: str, width: int) -> str:
    """The start of a text that is too long: `the trainer wai…`."""
    return text if len(text) <= width else text[: width - 1] + "…" if width > 0 else ""
