"""Predicts how many answers of a batch are still being decoded after each step. Pure arithmetic.

Lengths are assumed to be exponentially distributed, cut at the longest that the flags allow: a few answers are several
times as long as the mean, and answers that an engine has not finished have as far to go as new ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_GROUPS = 64
"""Number of groups of neighbouring lengths in which the answers of a tail are followed."""


def longest_of(answers: float, *, mean: float, longest: float) -> float:
    """Return the tokens of the longest of N answers: the length that a share of 1 - 1 / (2 N) does not exceed.

    From 2 answers on, this is within 0.12 means of the expected maximum of uncut lengths: the mean times the sum of
    1 / k for k from 1 to N.

    Args:
        mean: mean tokens of an answer; if it equals `longest`, all answers have this length.
        longest: maximum tokens of an answer.
    """
    return _quantile(1 - 0.5 / max(1.0, answers), _scale(mean, longest), longest)


def tail(running: float, *, mean: float, longest: float, last: float) -> Iterator[tuple[float, float]]:
    """Yield numbers of steps, and of the answers that are decoded in each, from `running` answers until the last ends.

    Args:
        last: tokens of the longest answer.
    """
    # Answers end in order of length; `groups` quantiles of the distribution stand for all of them.
    scale, groups, passed = _scale(mean, longest), min(_GROUPS, math.ceil(running)), 0.0
    for group in range(groups):
        end = last if group == groups - 1 else min(last, _quantile((group + 0.5) / groups, scale, longest))
        if end > passed:
            yield end - passed, running * (1 - group / groups)
            passed = end


def _quantile(share: float, scale: float, longest: float) -> float:
    """Return the length that a share of the answers do not exceed."""
    return longest if math.isinf(scale) else min(longest, -scale * math.log1p(-share))


def _scale(mean: float, longest: float) -> float:
    """Return the mean of the exponential distribution which, cut at the longest, has the given mean."""
    if mean >= longest:
        return math.inf
    # Bisection: the cut distribution's mean, scale * (1 - exp(-longest / scale)), grows with the scale.
    low, high = mean, 1e6 * longest
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * -math.expm1(-longest / middle) < mean else (low, middle)
    return (low + high) / 2
