"""Tally of rollouts: sums over all groups of a batch, trained on or not, and the cost of discarded work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from forge_rl.packing.trees import decoded_tokens
from forge_rl.rollout.state import GroupState
from forge_rl.types import Episode


class RolloutTally:
    """Counts the completed groups of each batch, including replaced ones, and discarded work.

    A delivered batch has only the groups that dynamic sampling kept, so its mean reward says little about the policy:
    with groups of two and rewards of 0 and 1, it is always 0.5.

        tally.complete(group)
        tally.discard("uniform", tokens=240, seconds=3.1)
        tally.pop_metrics(1)  # {"completed/groups": 1.0, ..., "discarded/uniform_tokens": 240.0, ...}
    """

    def __init__(self) -> None:
        self._completed: dict[int, defaultdict[str, float]] = {}
        """Sums over the completed groups of each batch."""
        self._discarded: defaultdict[str, float] = defaultdict(float)

    def complete(self, group: GroupState) -> None:
        """Count a group whose episodes all have a result, once it is delivered or dropped, for its batch."""
        completed = self._completed.setdefault(group.batch, defaultdict(float))
        completed["groups"] += 1
        completed["uniform"] += group.is_uniform
        completed["episodes"] += len(group.results)
        completed["tokens"] += decoded_tokens([group.results])
        completed["reward"] += sum(episode.reward for episode in group.results)

    def discard(self, reason: str, *, tokens: int, seconds: float) -> None:
        """Count work that no batch will use, by reason."""
        self._discarded[f"{reason}_tokens"] += tokens
        self._discarded[f"{reason}_s"] += seconds

    def discard_episodes(self, reason: str, episodes: Sequence[Episode]) -> None:
        """Count the finished episodes of a group that no batch will use."""
        seconds = sum(episode.seconds for episode in episodes)
        self.discard(reason, tokens=decoded_tokens([episodes]), seconds=seconds)

    def pop_metrics(self, next_batch: int) -> dict[str, float]:
        """Return the sums over batches before `next_batch` and the discarded work, both since the last call."""
        values = {f"discarded/{name}": count for name, count in self._discarded.items()}
        self._discarded.clear()
        # Batches from `next_batch` on may still gain groups.
        delivered = [self._completed.pop(number) for number in sorted(self._completed) if number < next_batch]
        if delivered:
            names = ("groups", "episodes", "tokens", "uniform", "reward")
            groups, episodes, tokens, uniform, reward = (sum(sums[name] for sums in delivered) for name in names)
            values |= {"completed/groups": groups, "completed/episodes": episodes, "completed/tokens": tokens}
            values |= {"completed/uniform": uniform / groups, "completed/reward_mean": reward / episodes}
        return values
