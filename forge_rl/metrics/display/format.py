"""Human-readable durations, metrics and sparklines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Format seconds: `0.04s`, `2.1s`, `1:05`, `1:02:03`."""
    if seconds < 59.95:
        return f"{max(seconds, 0.0):.{2 if seconds < 0.095 else 1}f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Format a metric with three significant digits: `0.453`, `-2e-05`; never `-0`."""
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{value + 0.0:.3g}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw one block per value, from the lowest ▁ to the highest █.

    More values than `width` are averaged in even buckets. A bucket without a finite value is a dot.
    """
    cells = min(width, len(values))
    edges = [i * len(values) // cells for i in range(cells + 1)] if cells else []
    buckets = [[value for value in values[a:b] if math.isfinite(value)] for a, b in itertools.pairwise(edges)]
    means = [sum(bucket) / len(bucket) for bucket in buckets if bucket]
    low, span = (min(means), max(means) - min(means)) if means else (0.0, 0.0)
    heights = iter([round((mean - low) / span * (len(BLOCKS) - 1)) if span else 3 for mean in means])
    return "".join(BLOCKS[next(heights)] if bucket else "·" for bucket in buckets)
