"""Reward of a whole group: answers that the other episodes of the task do not give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forge_rl.rewards.answers import normalised
from forge_rl.rewards.extract import Extract, extract
from forge_rl.types import Episode, Score, Task


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Scores an episode by the share of the others in its group whose answers differ from its own; alone it scores 1.0.

    Add it with a small weight to a reward for being right: --reward math=1 diversity=0.1
    """

    extract: Extract = "auto"
    """Way in which the answers are found in the completions. They are compared as `match` does."""

    def __call__(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """Return a score from 0 to 1 for each episode."""
        answers = [normalised(extract(self.extract, each.text) or "") for each in episodes]
        counts, others = Counter(answers), max(1, len(answers) - 1)
        return [Score(total=1 - (counts[answer] - 1) / others, answer=answer) for answer in answers]
