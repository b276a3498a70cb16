"""Group reward for answers that differ from those of the task's other episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forge_rl.rewards.answers import normalised
from forge_rl.rewards.extract import Extract, extract
from forge_rl.types import Episode, Score, Task


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Scores an episode by the share of its group's other episodes with a different answer; 1.0 if it is alone.

    Add it with a small weight to a reward for correctness: --reward math=1 diversity=0.1
    """

    extract: Extract = "auto"
    """Method of extracting the answers from the completions; they are compared as in `match`."""

    def __call__(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """Return a score from 0 to 1 for each episode."""
        answers = [normalised(extract(self.extract, each.text) or "") for each in episodes]
        counts, others = Counter(answers), max(1, len(answers) - 1)
        return [Score(total=1 - (counts[answer] - 1) / others, answer=answer) for answer in answers]
