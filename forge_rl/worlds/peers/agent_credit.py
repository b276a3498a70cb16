"""The reward of an episode that several agents play with one policy; imports nothing from forge_rl."""

from __future__ import annotations

from collections.abc import Sequence

_TOLERANCE = 1e-9
_EPISODES = 16
"""Episodes with one and the same mean after which a game counts as one of a constant sum."""


class AgentCredit:
    """Averages the rewards of the policy's agents, and refuses games whose mean teaches nothing.

    In a constant-sum game, what one agent wins another loses: the mean is the same however the policy plays. A sum of
    zero shows in one episode, any other sum only in several episodes with different winners: if the same agent always
    wins, the others may just be too weak.

        AgentCredit().mean(["first", "second"], [1.0, 0.0])  # 0.5
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._episodes = 0
        """Episodes in a row in which the agents' rewards differed and had this mean."""
        self._rewards: tuple[float, ...] = ()
        """Rewards of the first of them."""
        self._varies = False
        """Whether a later one of them had other rewards."""

    def mean(self, names: Sequence[str], rewards: Sequence[float]) -> float:
        """Return the mean reward of an episode's agents.

        Raises:
            RuntimeError: it is the same however they play.
        """
        mean = sum(rewards) / len(rewards)
        if max(rewards) - min(rewards) <= _TOLERANCE:
            # Equal rewards show no winner; with another mean, the sum is not constant.
            self._episodes = self._episodes if abs(mean - self._mean) <= _TOLERANCE else 0
            return mean
        is_same = self._episodes > 0 and abs(mean - self._mean) <= _TOLERANCE
        if is_same:
            self._episodes, self._varies = self._episodes + 1, self._varies or tuple(rewards) != self._rewards
        else:
            self._mean, self._episodes, self._rewards, self._varies = mean, 1, tuple(rewards), False
        if abs(mean) <= _TOLERANCE or (self._episodes >= _EPISODES and self._varies):
            raise RuntimeError(
                f"the rewards of {', '.join(names)} add up to {mean * len(rewards):g} in each game, so their mean "
                "teaches nothing: let the environment train one of them"
            )
        return mean
