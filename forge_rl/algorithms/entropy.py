"""Adaptive entropy control: sets the coefficient of the entropy bonus from the entropy that was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from forge_rl.algorithms.losses import PolicyLoss
from forge_rl.algorithms.protocol import Loss
from forge_rl.errors import ConfigError


class AdaptiveEntropy:
    """Raises the entropy bonus while the policy's entropy is below a target, and lowers it above.

        entropy = rl.AdaptiveEntropy(target=0.2)
        run.keep("entropy", entropy)  # goes with checkpoints
        ...
        stats = await run.trainer.step(packed, entropy.loss(run.loss))
        entropy.update(stats.get("entropy"))

    After each step, a variable c grows by `delta` if the mean entropy of the step's tokens is at most `target`, else it
    shrinks by as much, within 0 and `largest`. The coefficient of the next step is c if that entropy was at most
    `target`, else 0: Skywork-OR1 (arXiv 2505.22312, section 3.2.5), with TRL's bounds.

    Args:
        target: entropy in nats, 0.2 in the paper. Choose it close to the entropy early in training.
        delta: change of c a step, 0.005 in the paper.
        largest: maximum of c.
        initial: c at the start.
    """

    def __init__(
        self, *, target: float = 0.2, delta: float = 0.005, largest: float = 1.0, initial: float = 0.0
    ) -> None:
        if not (0 < target < math.inf and 0 < delta < math.inf and 0 <= initial <= largest < math.inf):
            raise ConfigError(
                f"target is {target}, delta {delta}, initial {initial} and largest {largest}",
                hint="give a target and a delta above 0, and initial from 0 to largest",
            )
        self.target = target
        self._delta = delta
        self._largest = largest
        self._coefficient = initial
        self._is_low = True

    @property
    def coefficient(self) -> float:
        """Coefficient of the next step's entropy bonus."""
        return self._coefficient if self._is_low else 0.0

    def loss(self, loss: Loss) -> PolicyLoss:
        """Return the loss with this coefficient as its entropy_coef; it measures groups of equal rewards, too.

        Raises:
            ConfigError: it is not a policy loss.
        """
        if not isinstance(loss, PolicyLoss):
            raise ConfigError(
                f"a {type(loss).__name__} has no entropy_coef",
                hint="adapt the entropy of a policy loss, such as clipped",
            )
        return replace(loss, entropy_coef=self.coefficient, measures_uniform=True)

    def update(self, entropy: float | None) -> None:
        """Adapt to the mean entropy of a step; None or NaN, as of a step without trained tokens, changes nothing."""
        if entropy is None or math.isnan(entropy):
            return
        # c moves a step at a time, and is kept while the bonus is off.
        self._is_low = entropy <= self.target
        coefficient = self._coefficient + (self._delta if self._is_low else -self._delta)
        self._coefficient = min(max(coefficient, 0.0), self._largest)

    def state_dict(self) -> dict[str, float]:
        """Return the state, as JSON."""
        return {"coefficient": self._coefficient, "is_low": float(self._is_low)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Replace the state with one of `state_dict`.

        Raises:
            ConfigError: it is not one.
        """
        try:
            coefficient, is_low = float(state["coefficient"]), bool(state["is_low"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the state of an adaptive entropy is malformed: {error!r}", hint="give what state_dict returned"
            ) from error
        self._coefficient, self._is_low = min(max(coefficient, 0.0), self._largest), is_low

    def __repr__(self) -> str:
        return f"AdaptiveEntropy(target={self.target}, coefficient={self.coefficient:.4g})"
