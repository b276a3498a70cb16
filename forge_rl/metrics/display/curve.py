"""A metric's curve, of a size that does not grow with the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_POINTS = 512
"""Maximum points of a curve, a power of 2; a terminal shows a few dozen."""


class _Point(NamedTuple):
    """Consecutive values."""

    step: int
    """Step of the first one."""
    values: int
    finite: int
    """Number of finite ones among them."""
    total: float
    """Sum of the finite ones."""
    low: float
    high: float

    def joined(self, later: _Point) -> _Point:
        """Return one point of this one's values and of later ones."""
        return _Point(
            self.step,
            self.values + later.values,
            self.finite + later.finite,
            self.total + later.total,
            min(self.low, later.low),
            max(self.high, later.high),
        )

    @property
    def mean(self) -> float:
        return self.total / self.finite if self.finite else math.nan


@dataclass(frozen=True)
class Curve:
    """Values in the order of their steps, in a bounded number of points, each the mean of equally many values.

    curve = Curve().extended(1, 0.25).extended(2, 0.75)
    curve.means, curve.low, curve.last  # ((0.25, 0.75), 0.25, 0.75)
    """

    points: tuple[_Point, ...] = ()
    first: float = math.nan
    """The first value."""
    last: float = math.nan
    """The last value."""

    def extended(self, step: int, value: float) -> Curve:
        """Return the curve with another value."""
        points, finite = self.points, math.isfinite(value)
        point = _Point(step, 1, 1, value, value, value) if finite else _Point(step, 1, 0, 0.0, math.inf, -math.inf)
        # The last point has room until it holds as many values as the first.
        if points and points[-1].values < points[0].values:
            points = (*points[:-1], points[-1].joined(point))
        elif len(points) == _POINTS:
            # All points are full: neighbours are joined, which halves their number and doubles what each holds.
            pairs = zip(points[::2], points[1::2], strict=True)
            points = (*(earlier.joined(later) for earlier, later in pairs), point)
        else:
            points = (*points, point)
        return Curve(points, self.first if self.points else value, value)

    def cut(self, step: int) -> Curve:
        """Return the curve without the values after a step; values that share a point with it stay."""
        points = tuple(point for point in self.points if point.step <= step)
        if len(points) == len(self.points):
            return self
        return Curve(points, self.first, points[-1].mean) if points else Curve()

    @property
    def means(self) -> tuple[float, ...]:
        """Mean of each point; NaN without a finite value."""
        return tuple(point.mean for point in self.points)

    @property
    def low(self) -> float:
        """The lowest finite value; NaN without one."""
        return min((point.low for point in self.points if point.finite), default=math.nan)

    @property
    def high(self) -> float:
        """The highest finite value; NaN without one."""
        return max((point.high for point in self.points if point.finite), default=math.nan)
