"""Adaptive shares: allots each batch to sources by how much the policy can still learn from each. Pure logic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from forge_rl.errors import ConfigError, TaskError, check_flags
from forge_rl.flags.categories import Category
from forge_rl.types import Group

_FLOOR = 1e-9
"""Minimum score of a source, as a share of the highest."""
_ROUNDING = 1e-12
"""Share of a batch up to which a shift is only rounding."""


@dataclass(frozen=True, kw_only=True)
class Adapting:
    """Mixture settings: fixed weights, or shares that follow each source's success rate."""

    CATEGORY: ClassVar[Category] = Category.TUNABLE

    adapt: Literal["off", "success"] = "off"
    """off: keep the weights as given or set. success: after each batch, a source's share becomes proportional to its
    given weight, times the share of its groups whose rewards differ, times how close its success rate is to the target;
    a source that is always or never solved falls to the minimum share. A weight set by hand is then a share, and stays
    until adapt is set again."""
    least: float = 0.05
    """Minimum share of an adapting source; if shares set by hand leave less, the adapting sources get equal shares."""
    most: float = 0.9
    """Maximum share of an adapting source, if there are several."""
    target: float = 0.5
    """Success rate, or mean reward between 0 and 1, at which the policy learns most."""
    momentum: float = 0.95
    """Momentum of a source's running success rate, updated per group: 0.95 averages over about 20 groups."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--mixture.",
            minimum={"least": 0, "momentum": 0},
            above={"target": 0, "most": 0},
            maximum={"most": 1},
            below={"target": 1, "momentum": 1},
        )
        # Code may compute settings with NumPy, whose numbers JSON does not know and a checkpoint could not hold.
        for name in ("least", "most", "target", "momentum"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.least > self.most:
            raise ConfigError(
                f"--mixture.least is {self.least:g}, above --mixture.most {self.most:g}",
                hint="lower --mixture.least, or raise --mixture.most",
            )


@dataclass(eq=False)
class AdaptiveShares:
    """Tracks each source's success rate and computes its share of the batch.

        adaptive = AdaptiveShares(Adapting(adapt="success"), {"maths": 1.0, "words": 1.0})
        adaptive.observe(batch.groups)
        adaptive.shares()  # {"maths": 0.8, "words": 0.2}

    Each source starts at its target, so the first shares follow the given weights. If the reward is 1 with probability
    p and 0 otherwise, the expected squared advantage of an episode, centered within a group of G, is
    p (1 - p) (1 - 1/G). The signal of a source is therefore p^(2 t) (1 - p)^(2 (1 - t)), which peaks at the target t
    and equals p (1 - p) at t = 1/2. This assumes tasks of equal difficulty: if some are always and others never solved,
    p is in the middle though no group has a signal, hence the factor for groups whose rewards differ. Sampling by
    p (1 - p) follows "Learning to Reason at the Frontier of Learnability" (2025), which does so per question.

    Raises:
        ConfigError: the bounds cannot hold for this many sources.
    """

    config: Adapting
    base: dict[str, float]
    """Given weights; a source with weight 0 is excluded."""
    rates: dict[str, float] = field(default_factory=dict)
    """Running mean reward of each source."""
    signals: dict[str, float] = field(default_factory=dict)
    """Running share of each source's groups whose rewards differ."""
    pinned: dict[str, float] = field(default_factory=dict)
    """Shares set by hand."""

    def __post_init__(self) -> None:
        self.base = dict(self.base)
        # At its target a source has the highest signal, so new ones are tried instead of starved.
        self.rates = dict.fromkeys(self.base, self.config.target) | self.rates
        self.signals = dict.fromkeys(self.base, 1.0) | self.signals
        zero_shares = {name: 0.0 for name, weight in self.base.items() if not weight}
        self.pinned = zero_shares | self.pinned
        free = len(self.base) - len(zero_shares)
        if free * self.config.least > 1 or (free > 1 and free * self.config.most < 1):
            raise ConfigError(
                f"{free} sources cannot each have a share between --mixture.least {self.config.least:g} and "
                f"--mixture.most {self.config.most:g}",
                hint=f"set --mixture.least to {1 / free:.3g} or less, and --mixture.most to that or more",
            )

    def released(self, config: Adapting) -> AdaptiveShares:
        """Return a copy with other settings and the same running means, but no shares set by hand.

        Raises:
            ConfigError: the bounds cannot hold for this many sources.
        """
        return replace(self, config=config, pinned={})

    def observe(self, groups: Iterable[Group]) -> None:
        """Update the running means with a batch's groups, in order; mean rewards are clipped to [0, 1]."""
        keep = self.config.momentum
        for group in groups:
            name, rewards = group.task.source, group.rewards
            mean = min(max(math.fsum(rewards) / len(rewards), 0.0), 1.0)
            # Equal rewards give every episode the advantage 0: such a group teaches nothing, whatever its mean.
            signal = float(max(rewards) > min(rewards))
            self.rates[name] = keep * self.rates[name] + (1 - keep) * mean
            self.signals[name] = keep * self.signals[name] + (1 - keep) * signal

    def pin(self, name: str, share: float) -> None:
        """Fix a source's share, even outside the bounds; the others divide the rest.

        Raises:
            TaskError: the share is not in [0, 1], or exceeds what the other fixed shares leave.
        """
        other_shares = math.fsum(pinned_share for other, pinned_share in self.pinned.items() if other != name)
        # Float error of shares that are meant to sum to 1 must not refuse them.
        if not 0 <= share <= 1 or other_shares + share > 1 + 1e-9:
            rest_text = f", and other sources have {other_shares:g} of it set by hand" if other_shares else ""
            raise TaskError(
                f"the share of {name!r} is set to {share:g} of 1{rest_text}",
                hint="while the mixture adapts, a weight set by hand is a share of each batch, from 0 to 1",
            )
        if other_shares + share == 0 and len({*self.pinned, name}) == len(self.base):
            raise TaskError(
                f"setting {name!r} to 0 leaves all shares at 0", hint="keep at least one source's share above 0"
            )
        self.pinned[name] = share

    def shares(self) -> dict[str, float]:
        """Return the shares of all sources, which sum to 1 while any source adapts."""
        free = [name for name in self.base if name not in self.pinned]
        shares = dict(self.pinned)
        if free:
            rest_share = max(0.0, 1 - math.fsum(self.pinned.values()))
            equal_share = rest_share / len(free)
            scores = {name: self._score(name) for name in free}
            # Shares set by hand may leave too little for the bounds; equal shares are then the only ones within reach.
            min_share, max_share = min(self.config.least, equal_share), max(self.config.most, equal_share)
            shares |= bounded_shares(scores, min_share=min_share, max_share=max_share, total=rest_share)
        return {name: shares[name] for name in self.base}

    def shift(self) -> float:
        """Return the share of a batch, from 0 to 1, that success moves from some sources to others."""
        total = math.fsum(self.base.values())
        shares = self.shares()
        # Half of the absolute differences: what some sources gain, others lose.
        shift = math.fsum(abs(shares[name] - weight / total) for name, weight in self.base.items()) / 2
        return shift if shift > _ROUNDING else 0.0

    def describe(self, name: str) -> str:
        """Describe a source's success in a few words."""
        if name in self.pinned:
            return "set by hand"
        return f"adapts: mean reward {self.rates[name]:.2f}, {self.signals[name]:.0%} of groups differ"

    def state(self) -> dict[str, object]:
        """Return everything that determines the shares, as JSON."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any], sources: Iterable[str]) -> AdaptiveShares:
        """Return an instance that resumes from a saved state.

        Raises:
            TaskError: the state has other sources, or is malformed.
        """
        try:
            base, rates, signals, pinned = (dict(state[name]) for name in ("base", "rates", "signals", "pinned"))
            numbers = [*base.values(), *rates.values(), *signals.values(), *pinned.values()]
            if not (base.keys() == rates.keys() == signals.keys() == set(sources) >= pinned.keys()):
                raise ValueError("other sources")
            if not all(0 <= number < math.inf for number in numbers) or max(*rates.values(), *signals.values()) > 1:
                raise ValueError("a number out of range")
            return cls(Adapting(**state["config"]), base, rates, signals, pinned)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise TaskError(
                f"the saved state of the adaptive mixture is malformed: {error}", hint="start a new run"
            ) from error

    def _score(self, name: str) -> float:
        rate, target = self.rates[name], self.config.target
        signal: float = rate ** (2 * target) * (1 - rate) ** (2 * (1 - target))
        return self.base[name] * self.signals[name] * signal


def bounded_shares(
    scores: Mapping[str, float], *, min_share: float, max_share: float, total: float = 1.0
) -> dict[str, float]:
    """Return shares proportional to scores within bounds: min(max(c score, min_share), max_share), with c such that
    they sum to total.

    This is the Kullback-Leibler projection of the scores onto the bounded simplex. c is exact, because the sum is
    linear in c between the corners at which a share meets a bound.

    Args:
        scores: at least 0.
        min_share: at most total / len(scores).
        max_share: at least total / len(scores).
    """
    highest = max(scores.values())
    # A floor above 0 keeps every corner bound / score finite, and lets a source that is never solved meet min_share.
    floored_scores = {name: max(score / highest, _FLOOR) if highest > 0 else 1.0 for name, score in scores.items()}

    def shares_at(factor: float) -> dict[str, float]:
        return {name: min(max(factor * score, min_share), max_share) for name, score in floored_scores.items()}

    corners = sorted({0.0, *(bound / score for score in floored_scores.values() for bound in (min_share, max_share))})
    # The sum of shares grows with the factor, so the corners around `total` can be told from their sums alone.
    low = max((corner for corner in corners if math.fsum(shares_at(corner).values()) <= total), default=0.0)
    high = next((corner for corner in corners if corner > low), None)
    if high is None:
        return shares_at(low)
    middle = shares_at((low + high) / 2)
    free = [name for name, share in middle.items() if min_share < share < max_share]
    bound_total = math.fsum(share for name, share in middle.items() if name not in free)
    if not free:
        return shares_at(low)
    # Between two corners only free shares grow: total = bound_total + c * (sum of their scores), solved for c.
    return shares_at((total - bound_total) / math.fsum(floored_scores[name] for name in free))
