"""Quantities that go up and down while a phase lasts, such as the depth of a queue."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from forge_rl.metrics.trace import Trace

_DRAW_EVERY_S = 0.1
"""A queue may change thousands of times a second, and a trace has its bound."""


@dataclass(slots=True)
class _Gauge:
    value: float
    since: float
    begun: float
    highest: float
    area: float = 0.0
    """Sum over time of value times seconds, up to `since`."""
    drawn: float = -math.inf


class Gauges:
    """Keeps each quantity's mean over time and its highest value, and draws it in the trace.

    Args:
        trace: gets the values as counters, of each quantity one in 0.1 s at most, and those that are taken.
        clock: monotonic seconds.
    """

    def __init__(self, trace: Trace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._clock = clock
        self._gauges: dict[str, _Gauge] = {}

    def set(self, name: str, value: float) -> None:
        """A quantity has a value from now on."""
        now, gauge = self._clock(), self._gauges.get(name)
        if gauge is None:
            self._gauges[name] = gauge = _Gauge(value, since=now, begun=now, highest=value)
        else:
            gauge.area += gauge.value * (now - gauge.since)
            gauge.value, gauge.since, gauge.highest = value, now, max(gauge.highest, value)
        if now - gauge.drawn >= _DRAW_EVERY_S:
            self._draw(name, gauge, now)

    def take(self) -> dict[str, float]:
        """`<name>/mean` and `<name>/max` since the last call, or since a quantity was first known."""
        now, values = self._clock(), {}
        for name, gauge in self._gauges.items():
            lasted = now - gauge.begun
            area = gauge.area + gauge.value * (now - gauge.since)
            values[f"{name}/mean"] = area / lasted if lasted > 0.0 else gauge.value
            values[f"{name}/max"] = gauge.highest
            gauge.area, gauge.highest = 0.0, gauge.value
            gauge.begun = gauge.since = now
            self._draw(name, gauge, now)
        return values

    def _draw(self, name: str, gauge: _Gauge, now: float) -> None:
        gauge.drawn = now
        if self._trace is not None:
            self._trace.counter(name, value=gauge.value)
