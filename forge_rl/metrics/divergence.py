"""Divergence: an update broke the policy, which shows in several of its metrics at once, within two steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

_USUAL = 10
"""Steps whose median is usual."""
_LEAST_WEIGHT = 2


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A change of a metric that an update of usual size does not make in two steps."""

    kind: str
    """Signs of a kind count once, as they have a cause in common: drift and ratios also grow with the lag."""
    metric: str
    growth: float
    noise: float
    """Value up to which a metric is noise."""
    fall: float = 0.0
    enough: float = math.inf
    """Value above which no other sign is needed."""

    def holds(self, usual: float, value: float) -> bool:
        # Growth by a factor means nothing for negative values.
        if usual < 0 or value < 0:
            return False
        return (value > self.growth * usual and value > self.noise) or (
            value < self.fall * usual and usual > self.noise
        )


_SIGNS = (
    _Sign(kind="entropy", metric="entropy", growth=3, noise=0.1, fall=1 / 3),
    _Sign(kind="norm", metric="grad_norm", growth=10, noise=1),
    _Sign(kind="gap", metric="logprob_gap", growth=5, noise=0.05),
    _Sign(kind="ratio", metric="ratio/p99", growth=4, noise=5, enough=1e3),
    _Sign(kind="ratio", metric="logprob_drift", growth=5, noise=0.3, enough=2),
    _Sign(kind="length", metric="tokens/completion_mean", growth=2.5, noise=32, fall=0.4),
)


class Divergence:
    """Recognises divergence in the metrics of a run, step by step.

    divergence = Divergence()
    divergence.add({"entropy": 0.9, "grad_norm": 0.4, "lr": 1e-3})
    divergence.add({"entropy": 9.1, "grad_norm": 50.0, "lr": 1e-3})
    divergence.text  # "the policy has diverged: within two steps, entropy went from 0.9 to 9.1, ..."
    """

    def __init__(self) -> None:
        self.text = ""
        """Advice to the user; "" while the policy has not diverged."""
        self._past: dict[str, deque[float]] = {sign.metric: deque(maxlen=_USUAL + 1) for sign in _SIGNS}
        self._usual: dict[str, float] = {}
        """Values before the policy diverged, to which it may return."""

    def add(self, values: Mapping[str, float]) -> None:
        """Add the metrics of a step; other values, such as an evaluation's, are ignored."""
        if "grad_norm" not in values:
            return
        # Without the latest value, which may already belong to the break: it can take two steps.
        usual = self._usual or {name: median([*past][:-1] or past) for name, past in self._past.items() if past}
        signs = [
            sign
            for sign in _SIGNS
            if sign.metric in usual and sign.metric in values and sign.holds(usual[sign.metric], values[sign.metric])
        ]
        for name, past in self._past.items():
            if name in values:
                past.append(values[name])
        # Signs of one kind count once; a sign beyond `enough` suffices alone.
        weights = {sign.kind: 1 for sign in signs}
        weights |= {sign.kind: _LEAST_WEIGHT for sign in signs if values[sign.metric] > sign.enough}
        if sum(weights.values()) < _LEAST_WEIGHT:
            self._usual, self.text = {}, ""
            return
        # Kept while the policy is broken, so that it is compared with its healthy values, not with broken ones.
        self._usual = usual
        changes = ", ".join(
            f"{sign.metric} went from {usual[sign.metric]:.3g} to {values[sign.metric]:.3g}" for sign in signs
        )
        rate = f", now {values['lr']:.2g}" if "lr" in values else ""
        self.text = (
            f"the policy has diverged: within two steps, {changes}: first lower --trainer.optimizer.lr{rate}, tenfold "
            "or more, and start again from a checkpoint before; tasks and --generator.max-tokens are not the cause"
        )
