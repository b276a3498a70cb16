"""Verifiers: rewards that compare an answer with the truth of its task."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from forge_rl.errors import TaskError, check_flags
from forge_rl.rewards.extract import Extract, extract
from forge_rl.rewards.procedural import LEAST, OWN
from forge_rl.rewards.workers import shared_workers
from forge_rl.types import Score, Task

REASONING_GYM = "reasoning_gym"
"""`Task.verifier` of the tasks that this module scores."""

_Entry = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward:
    """Scores a completion by the verifier of the reasoning-gym data set that its task came from.

    await ReasoningGymReward(extract="tagged")(task, "<answer>5</answer>")  # Score(total=1.0, answer="5")

    Verifiers work in confined processes; one that takes too long is killed, and its answer wrong.
    """

    extract: Extract = "auto"
    """Way in which the final answer is found in the text."""
    strict: bool = True
    """Give 1.0 to answers that the verifier scores fully right, and otherwise 0.0. Many verifiers give a little for any
    wrong answer, or for a right one inside a longer text; without `strict` that partial credit is kept."""
    timeout_s: float = 10.0
    """Longest time for a verifier to score one answer."""
    processes: int = 2
    """Most processes that verify, in each replica of the reward service."""
    deadline_s: ClassVar[float] = 3600.0
    """Longest time for one score, with the wait for others before it."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward reasoning_gym:", least={"processes": 1}, above={"timeout_s": 0})

    async def __call__(self, task: Task, text: str) -> Score:
        """Return a score from 0 to 1, and the answer.

        Raises:
            TaskError: the task is not of reasoning-gym, or its verifier fails for a reason other than the answer.
        """
        dataset, params, entry = task.truth.get("dataset"), task.truth.get("params", {}), task.truth.get("entry")
        if task.verifier != REASONING_GYM or not isinstance(dataset, str) or not isinstance(entry, Mapping):
            raise TaskError(
                f"task {task.id!r} of {task.source!r} does not come from reasoning-gym: "
                f"its truth has {sorted(task.truth)}",
                hint="give the tasks of this source a reward of their own",
            )
        gold = entry.get("answer")
        answer = extract(self.extract, text, gold if isinstance(gold, str) else None)
        if answer is None:
            return Score(total=0.0, parts={"late": 0.0})
        workers = shared_workers(__name__, "verify", self.processes, self.timeout_s, ("reasoning_gym", "sympy"))
        found = await workers(dataset, params, entry, answer)
        if found is None:
            return Score(total=0.0, parts={"late": 1.0}, answer=answer)
        if isinstance(found, str):
            raise TaskError(
                f"the verifier of {dataset!r} failed on task {task.id!r}: {found}",
                hint="leave this data set out, or report it to reasoning-gym",
            )
        if not isinstance(found, int | float) or not math.isfinite(found) or not 0 <= found <= 1:
            raise TaskError(
                f"the verifier of {dataset!r} scored {found!r:.100}, not 0 to 1, on task {task.id!r}",
                hint="leave this data set out, or report it to reasoning-gym",
            )
        return Score(total=float(found >= 1) if self.strict else float(found), parts={"late": 0.0}, answer=answer)


def verify(dataset: str, params: Mapping[str, object], entry: _Entry, answer: str) -> float | str:
    """Return the score of an answer, or a text that says how the data set's verifier fails on the right answer too.

    Runs in a confined process: reasoning-gym's verifiers bound neither time nor memory.
    """
    if dataset in OWN:
        try:
            return OWN[dataset](answer, entry, params)
        except Exception:  # of what a model wrote
            return LEAST.get(dataset, 0.0)
    check = _verifier(dataset, json.dumps(params, sort_keys=True))
    try:
        score = check(answer, entry)
    except Exception as error:
        # A verifier may fail on text that a model wrote, which is then a wrong answer. But if it cannot verify the
        # right one either, the verifier or the task is broken.
        return 0.0 if _accepts_gold(check, entry) else f"{type(error).__name__}: {error}"
    return float(score) if isinstance(score, int | float) else f"{score!r:.100} is no number"


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
