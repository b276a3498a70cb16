"""Reward from inputs and outputs, as in competitive programming: each input is given to a program of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forge_rl.errors import TaskError, check_flags
from forge_rl.rewards.protocol import TextReward
from forge_rl.sandbox import Limits, Pool
from forge_rl.sandbox.fences import PYTHON, last_code
from forge_rl.sandbox.host import check_layers
from forge_rl.sandbox.languages import LANGUAGES, check_language, run_source
from forge_rl.sandbox.shared import a_cpu_of_shared_pool, check_shared_pool
from forge_rl.types import Score, Task
from forge_rl.worlds.unit_tests import run_tests

_PYTHON = "python"
_SHARE = 4
"""Ratio of a program's wall time limit to its CPU time limit, as other processes use the CPUs too."""
_LEAST_OUTPUT = 1 << 16
_PLACE_S = 120.0
_READ_INPUT = """import builtins, os, sys
builtins.exit = builtins.quit = sys.exit
opened = os.open("input", os.O_RDONLY)
os.dup2(opened, 0)
os.close(opened)
os.unlink("input")
sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
del opened"""
_SAME = "from __main__ import forge_tests\nsame = forge_tests.same"


@dataclass(frozen=True, kw_only=True)
class Programs(TextReward):
    """Scores 1.0 if a program prints the right output for each input of its task, else 0.0.

        --reward programs                # the column cases: [{"input": "1 2\\n", "output": "3\\n"}, ...]
        --reward programs:cases=input_output  # APPS, TACO: {"inputs": [...], "outputs": [...], "fn_name": ...}
        --reward programs:language=c++  # compiled again for each input; also c, go, rust, java, javascript, ruby, ...

    The program is the last fenced block of the completion. Each input is read by a fresh sandbox session, which never
    has the expected output: outputs are compared outside. Spaces at the ends of lines, and empty lines at the
    end, do not count. With "fn_name", inputs are lists of arguments and outputs are results, compared as `unit_tests`
    does. A failure of the sandbox gives no score.
    """

    cases: str = "cases"
    """Entry of the task's truth with the cases, or with their JSON."""
    timeout_s: float = 10.0
    """CPU seconds that a program may take for one input; the time that passes may be 4 times as long."""
    tolerance: float = 0.0
    """Maximum relative or absolute error of numbers in an output; with 0 they are compared as text."""
    language: str = "python"
    """Language of the programs, a name in `forge_rl.sandbox.languages`. Programs in languages other than python run as
    commands, with the case's standard input."""
    partial: bool = False
    """Score the share of inputs with the right output, instead of 1.0 if all have it."""
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""
    scores_code: ClassVar[bool] = True
    """The answer is a block of code."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward programs:", minimum={"tolerance": 0}, above={"timeout_s": 0})

    def load(self, folder: Path | None) -> None:
        """Check the machine.

        Raises:
            SandboxError: it cannot isolate code.
            ConfigError: it does not have the language.
        """
        if self.language == _PYTHON:
            check_shared_pool()
        else:
            check_layers("process")
            check_language(self.language)

    async def __call__(self, task: Task, text: str) -> Score:
        """Return the score; `feedback` is the first failure.

        Raises:
            TaskError: the task has no cases.
            SandboxError: the sandbox failed.
        """
        function, cases = self._cases(task)
        languages = PYTHON if self.language == _PYTHON else {*LANGUAGES[self.language].fences, self.language}
        # No code is a wrong answer of the model, not an error of the task.
        if (code := last_code(text, languages)) is None:
            return Score(total=0.0, parts={"passed": 0.0}, feedback="there is no code")
        if function and self.language != _PYTHON:
            raise TaskError(
                f"--reward programs: task {task.id!r} of {task.source!r} names a function, {function}",
                hint=f"with language={self.language}, cases are inputs and outputs of programs",
            )
        if function:
            # The expected value is in the tests' session only, which the solution never sees.
            tests = [f"assert same({function}(*{arguments!r}), {expected!r})" for arguments, expected in cases]
            # LeetCode's form has the function as a method of a class Solution.
            target, timeout_s = f"Solution().{function}" if "class Solution" in code else function, self.timeout_s
            num_passed, feedback = await run_tests(
                code, tests, setup=_SAME, target=target, timeout_s=timeout_s, task=task
            )
        else:
            num_passed, feedback = await self._passed(code, cases)
        share = num_passed / len(cases)
        return Score(total=share if self.partial else float(share == 1), parts={"passed": share}, feedback=feedback)

    async def _passed(self, code: str, cases: Sequence[tuple[Any, Any]]) -> tuple[int, str]:
        """Return the number of inputs with the right output, and the first failure; stops there if it decides."""
        num_passed, feedback = 0, ""
        async with a_cpu_of_shared_pool(None if self.language == _PYTHON else "process") as pool:
            for case_input, expected in cases:
                failure = await self._failed(pool, code, _as_text(case_input), _as_text(expected))
                num_passed += not failure
                feedback = feedback or failure
                # Without partial scores, one failure decides.
                if failure and not self.partial:
                    break
        return num_passed, feedback

    async def _failed(self, pool: Pool, code: str, stdin: str, expected: str) -> str:
        """Return why a program fails, or "" if its output is right."""
        # Twice the expected output is wrong already; more would only take memory.
        max_bytes = max(_LEAST_OUTPUT, 2 * len(expected.encode()))
        limits = Limits(wall_s=_SHARE * self.timeout_s, cpu_s=self.timeout_s, output_bytes=max_bytes)
        async with pool.session(limits=limits, wait_s=_PLACE_S) as session:
            if self.language == _PYTHON:
                # `_READ_INPUT` makes this file the standard input of the next cell, and deletes it.
                await session.put("input", stdin.encode())
                await session.run(_READ_INPUT)
                result = await session.run(code)
            else:
                result = await run_source(session, self.language, code, stdin=stdin.encode())
        error = result.error
        # A program may end itself with status 0.
        if error is not None and not (error.name == "SystemExit" and error.message in ("", "0", "None")):
            return f"{error.name}: {error.message}"[:500]
        if result.status:
            return f"exit status {result.status}: {result.stderr.strip()}"[:500]
        if result.cut:
            return f"it printed more than {max_bytes} bytes"
        return "" if equal(result.stdout, expected, self.tolerance) else "it printed something else"

    def _cases(self, task: Task) -> tuple[str, list[tuple[Any, Any]]]:
        """Return the name of the function to call, or "", and pairs of inputs and outputs."""
        value: Any = task.truth.get(self.cases)
        try:
            value = json.loads(value) if isinstance(value, str) else value
            # APPS and TACO have two lists, and the name of a function if there is one.
            if isinstance(value, dict):
                function = value.get("fn_name") or ""
                cases = list(zip(value["inputs"], value["outputs"], strict=True))
            else:
                function, cases = "", [(case["input"], case["output"]) for case in value]
            if not cases or not (function == "" or str(function).isidentifier()):
                raise ValueError("there are none")
        except (ValueError, TypeError, KeyError, RecursionError):
            raise TaskError(
                f"--reward programs: the truth of task {task.id!r} of {task.source!r} has no cases: {self.cases!r} is "
                f"{value!r:.80}",
                hint='name their column with --reward programs:cases=COLUMN, a list of {"input": ..., "output": ...}',
            ) from None
        return function, cases


def equal(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compare outputs line by line, without spaces at the ends of lines and empty lines at the end.

    equal("1 2 \\n\\n", "1 2\\n")  # True

    Args:
        tolerance: compare words instead, and those that are numbers within this relative or absolute error.
    """
    if _lines(output) == _lines(expected):
        return True
    words, expected_words = output.split(), expected.split()
    return (
        tolerance > 0
        and len(words) == len(expected_words)
        and all(map(_close, words, expected_words, [tolerance] * len(words)))
    )


def _close(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    try:
        # float also reads nan and inf, which are not numbers to compare.
        values = float(word), float(expected)
        return all(map(math.isfinite, values)) and math.isclose(*values, rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def _lines(text: str) -> list[str]:
    # Not `splitlines`, to which a form feed ends a line as well.
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _as_text(value: object) -> str:
    """Return an input or output as text; some data sets have a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
