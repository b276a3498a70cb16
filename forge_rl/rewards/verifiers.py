"""Reward from reasoning-gym's verifiers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from forge_rl.errors import TaskError, check_flags
from forge_rl.rewards.extract import Extract, extract
from forge_rl.rewards.procedural import CHECKS, LEAST, OWN
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.workers import shared_workers
from forge_rl.types import Score, Task

REASONING_GYM = "reasoning_gym"
"""Value of `Task.verifier` for tasks that this module scores."""

_Entry = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class ReasoningGymReward(TextReward):
    """Scores a completion with the verifier of its task's reasoning-gym data set.

    await ReasoningGymReward(extract="tagged")(task, "<answer>5</answer>")  # Score(total=1.0, answer="5")

    Verifiers run in confined processes; one that times out is killed, and its answer counts as wrong.
    """

    extract: Extract = "auto"
    """Method of extracting the final answer from the text."""
    strict: bool = True
    """Score 1.0 if the verifier's score is 1, otherwise 0.0. Many verifiers give partial credit for any wrong answer,
    or for a right one inside a longer text, which is kept if not strict."""
    timeout_s: float = 10.0
    """Timeout for verifying one answer."""
    processes: int = 2
    """Maximum worker processes per replica of the reward service."""
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward reasoning_gym:", minimum={"processes": 1}, above={"timeout_s": 0})

    async def __call__(self, task: Task, text: str) -> Score:
        """Return a score from 0 to 1, and the answer.

        Raises:
            TaskError: the task is not from reasoning-gym, or its verifier fails for another reason than the answer.
        """
        dataset, params, entry = task.truth.get("dataset"), task.truth.get("params", {}), task.truth.get("entry")
        if task.verifier != REASONING_GYM or not isinstance(dataset, str) or not isinstance(entry, Mapping):
            raise TaskError(
                f"task {task.id!r} of {task.source!r} is not from reasoning-gym: its truth has {sorted(task.truth)}",
                hint="use another reward for the tasks of this source",
            )
        gold = entry.get("answer")
        answer = extract(self.extract, self.graded(text), gold if isinstance(gold, str) else None)
        if answer is None:
            return Score(total=0.0, parts={"late": 0.0})
        workers = shared_workers(__name__, "verify", self.processes, self.timeout_s, ("reasoning_gym", "sympy"))
        result = await workers(dataset, params, entry, answer)
        if result is None:
            return Score(total=0.0, parts={"late": 1.0}, answer=answer)
        if isinstance(result, str):
            raise TaskError(
                f"the verifier of {dataset!r} failed on task {task.id!r}: {result}",
                hint="leave this data set out, or report it to reasoning-gym",
            )
        if isinstance(result, float) and math.isnan(result):
            result = 0.0  # a distance to an answer that is no number
        if not isinstance(result, int | float) or not math.isfinite(result) or not 0 <= result <= 1:
            raise TaskError(
                f"the verifier of {dataset!r} scored {result!r:.100}, not 0 to 1, on task {task.id!r}",
                hint="leave this data set out, or report it to reasoning-gym",
            )
        return Score(total=float(result >= 1) if self.strict else float(result), parts={"late": 0.0}, answer=answer)


def verify(dataset: str, params: Mapping[str, object], entry: _Entry, answer: str) -> float | str:
    """Return the score of an answer, or an error message if the verifier also fails on the true answer.

    Runs in a confined process, as reasoning-gym's verifiers limit neither time nor memory.
    """
    # reasoning-gym's scorers of these data sets evaluate the answer as code or accept a constant.
    if dataset in OWN:
        try:
            return OWN[dataset](answer, entry, params)
        except Exception:  # model output can fail in any way
            return LEAST.get(dataset, 0.0)
    check = _verifier(dataset, json.dumps(params, sort_keys=True))
    try:
        score = check(answer, entry)
    except Exception as error:
        # If a verifier fails on model output, the answer is wrong. But if it cannot verify the true answer either, the
        # verifier or the task is broken; puzzles with many solutions have no true answer to try.
        has_many = entry.get("answer") is None and isinstance(entry.get("metadata"), Mapping)
        return 0.0 if has_many or _accepts_gold(check, entry) else f"{type(error).__name__}: {error}"
    if not isinstance(score, int | float):
        return f"{score!r:.100} is not a number"
    # NaN is a distance to an answer such as "nan". Checks only take away: they never raise a score.
    if math.isnan(score) or (score >= 1 and dataset in CHECKS and not CHECKS[dataset](answer, entry)):
        return 0.0
    return float(score)


@functools.lru_cache(maxsize=64)
def _verifier(dataset: str, params_json: str) -> Callable[[str, _Entry], object]:
    """Return the scoring function of a data set with these parameters, which some verifiers use."""
    import reasoning_gym

    data_set = reasoning_gym.create_dataset(dataset, seed=0, size=1, **json.loads(params_json))
    score: Callable[[str, _Entry], object] = data_set.score_answer
    return score


def _accepts_gold(verify: Callable[[str, _Entry], object], entry: _Entry) -> bool:
    gold = entry.get("answer")
    try:
        return isinstance(gold, str) and verify(gold, entry) == 1
    except Exception:
        return False
