"""Verifiers: rewards that compare an answer with the truth of its task."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forge_rl.errors import TaskError
from forge_rl.rewards.extract import Extract, extract
from forge_rl.types import Score, Task

_Entry = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward:
    """Scores a completion by the verifier of the reasoning-gym data set that its task came from.

    ReasoningGymReward(extract="tagged")(task, "<answer>5</answer>")  # Score(total=1.0, answer="5")
    """

    extract: Extract = "auto"
    """Way in which the final answer is found in the text."""
    strict: bool = True
    """Give 1.0 to answers that the verifier scores fully right, and otherwise 0.0. Many verifiers give a little for any
    wrong answer, or for a right one inside a longer text; without `strict` that partial credit is kept."""

    def __call__(self, task: Task, text: str) -> Score:
        """Return a score from 0 to 1, and the answer.

        Raises:
            TaskError: the task is not of reasoning-gym, or its verifier fails for a reason other than the answer.
        """
        dataset, params, entry = task.truth.get("dataset"), task.truth.get("params", {}), task.truth.get("entry")
        if not isinstance(dataset, str) or not isinstance(params, Mapping) or not isinstance(entry, Mapping):
            raise TaskError(
                f"task {task.id!r} has no reasoning-gym entry to verify by: its truth has {sorted(task.truth)}",
                hint="give the tasks of this source a reward of their own",
            )
        gold = entry.get("answer")
        answer = extract(self.extract, text, gold if isinstance(gold, str) else None)
        if answer is None:
            return Score(total=0.0)
        verify = _verifier(dataset, json.dumps(params, sort_keys=True))
        try:
            score = verify(answer, entry)
        except Exception as error:
            # A verifier may fail on text that a model wrote, which is then a wrong answer. But if it cannot verify the
            # right one either, the verifier or the task is broken.
            if not _accepts_gold(verify, entry):
                raise TaskError(
                    f"the verifier of {dataset!r} failed on task {task.id!r}: {type(error).__name__}: {error}",
                    hint="leave this data set out, or report it to reasoning-gym",
                ) from error
            return Score(total=0.0, answer=answer)
        if not isinstance(score, int | float) or not math.isfinite(score) or not 0 <= score <= 1:
            raise TaskError(
                f"the verifier of {dataset!r} scored {score!r}, not 0 to 1, on task {task.id!r}",
                hint="leave this data set out, or report it to reasoning-gym",
            )
        return Score(total=float(score >= 1) if self.strict else float(score), answer=answer)


@functools.lru_cache(maxsize=64)
def _verifier(dataset: str, params_json: str) -> Callable[[str, _Entry], object]:
    """Return the scoring function of a data set with these parameters, which some verifiers look at."""
    import reasoning_gym

    return reasoning_gym.create_dataset(dataset, seed=0, size=1, **json.loads(params_json)).score_answer


def _accepts_gold(verify: Callable[[str, _Entry], object], entry: _Entry) -> bool:
    gold = entry.get("answer")
    try:
        return isinstance(gold, str) and verify(gold, entry) == 1
    except Exception:
        return False
