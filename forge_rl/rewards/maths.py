"""Reward from math-verify: mathematically equal answers, in any notation."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import ClassVar, cast

from forge_rl.errors import ConfigError, check_flags
from forge_rl.rewards.extract import boxed, tagged, true_answers
from forge_rl.rewards.protocol import TextReward
from forge_rl.rewards.workers import shared_workers
from forge_rl.types import Score, Task

_LONGEST = 1000
"""Maximum length of a reported answer, in characters."""


@dataclass(frozen=True, kw_only=True)
class Maths(TextReward):
    r"""Scores 1.0 for an answer that math-verify finds equal to the true one, as 0.5 and \frac{1}{2} are.

    await Maths()(task, "so it is \\boxed{0.5}")  # Score(total=1.0, answer="1/2")

    Runs in separate processes; one that times out, as some answers cause, is killed and its answer counts as wrong.
    """

    key: str = "answer"
    """Entry of the task's truth that holds the true answer, or a list of them, with or without dollar signs."""
    timeout_s: float = 5.0
    """Timeout for comparing one answer."""
    processes: int = 2
    """Maximum worker processes per replica of the reward service."""
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward math:", least={"processes": 1}, above={"timeout_s": 0})
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("--reward math: math-verify is not installed", hint="pip install math-verify")

    async def __call__(self, task: Task, text: str) -> Score:
        """Raises TaskError for a task without an answer, ForgeError if a worker process does not start."""
        workers = shared_workers(__name__, "compare", self.processes, self.timeout_s, ("math_verify", "sympy"))
        compared = await workers(true_answers(task, self.key, "math"), self.graded(text))
        if compared is None:
            return Score(total=0.0, parts={"late": 1.0})
        equal, answer = cast(tuple[bool, str], compared)
        return Score(total=float(equal), parts={"late": 0.0}, answer=answer)


def compare(right: list[str], text: str) -> tuple[bool, str]:
    """Return whether a completion's answer equals a true one, and the answer in sympy's notation. Runs in a separate
    process, as it has no time limit.

    Raises:
        ValueError: math-verify cannot parse a true answer.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are disabled
    truths = [math_verify.parse(_as_maths(each), parsing_timeout=None) for each in right]
    if not all(truths):
        raise ValueError(f"math-verify cannot parse the true answer {right[truths.index([])]!r:.80}")
    marked = next((part for part in (tagged(text), boxed(text)) if part is not None), None)
    try:
        answer = math_verify.parse(text if marked is None else _as_maths(marked), parsing_timeout=None)
        for true in truths:
            if math_verify.verify(true, answer, timeout_seconds=None):
                return True, str(true[0])
        return False, str(answer[0])[:_LONGEST] if answer else ""
    except Exception:  # model output can fail in any way
        return False, ""


def _as_maths(text: str) -> str:
    return text if "$" in text or "\\boxed" in text or "\\[" in text or "\\(" in text else f"${text}$"
