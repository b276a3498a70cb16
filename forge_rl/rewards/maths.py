"""Reward by math-verify: answers that are equal as mathematics, however they are written."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import ClassVar, cast

from forge_rl.errors import ConfigError, check_flags
from forge_rl.rewards.extract import boxed, tagged
from forge_rl.rewards.truth import true_answers
from forge_rl.rewards.workers import shared_workers
from forge_rl.types import Score, Task

_LONGEST = 1000
"""Most letters of an answer that are told."""


@dataclass(frozen=True, kw_only=True)
class Maths:
    r"""Scores 1.0 for an answer that math-verify finds equal to the true one, as 0.5 and \frac{1}{2} are.

    await Maths()(task, "so it is \\boxed{0.5}")  # Score(total=1.0, answer="1/2")

    It works in processes of its own; one that takes too long, as some answers make it, is killed, and its answer wrong.
    """

    key: str = "answer"
    """Entry of the task's truth that holds the right answer, or a list of right ones, with or without dollar signs."""
    timeout_s: float = 5.0
    """Longest time for math-verify to compare one answer."""
    processes: int = 2
    """Most processes that compare, in each replica of the reward service."""
    deadline_s: ClassVar[float] = 3600.0
    """Longest time for one score, with the wait for others before it."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward math:", least={"processes": 1}, above={"timeout_s": 0})
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("--reward math: math-verify is not installed", hint="pip install math-verify")

    async def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without an answer, ForgeError where math-verify does not start."""
        workers = shared_workers(__name__, "compare", self.processes, self.timeout_s, ("math_verify", "sympy"))
        compared = await workers(true_answers(task, self.key, "math"), text)
        if compared is None:
            return Score(total=0.0, parts={"late": 1.0})
        equal, answer = cast(tuple[bool, str], compared)
        return Score(total=float(equal), parts={"late": 0.0}, answer=answer)


def compare(right: list[str], text: str) -> tuple[bool, str]:
    """Tell whether a completion's answer equals one of the right ones, and how it is written in sympy. Of its own
    process, as it has no time limit.

    Raises:
        ValueError: math-verify does not understand a right answer.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that nothing bounds its time
    truths = [math_verify.parse(_as_maths(each), parsing_timeout=None) for each in right]
    if not all(truths):
        raise ValueError(f"math-verify does not understand the right answer {right[truths.index([])]!r:.80}")
    marked = next((part for part in (tagged(text), boxed(text)) if part is not None), None)
    try:
        answer = math_verify.parse(text if marked is None else _as_maths(marked), parsing_timeout=None)
        for true in truths:
            if math_verify.verify(true, answer, timeout_seconds=None):
                return True, str(true[0])
        return False, str(answer[0])[:_LONGEST] if answer else ""
    except Exception:  # of what a model wrote
        return False, ""


def _as_maths(text: str) -> str:
    return text if "$" in text or "\\boxed" in text or "\\[" in text or "\\(" in text else f"${text}$"
