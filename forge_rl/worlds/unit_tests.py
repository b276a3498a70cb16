"""Reward from unit tests: the tests and the model's code run in separate sandbox sessions."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from forge_rl.errors import TaskError, check_flags
from forge_rl.rewards.protocol import TextReward
from forge_rl.sandbox import Limits, PoolSession, Result, SandboxError
from forge_rl.sandbox.fences import last_code
from forge_rl.sandbox.shared import a_cpu_of_shared_pool, check_shared_pool
from forge_rl.types import Score, Task

_SHARE = 4
"""Ratio of a test's wall time limit to its CPU time limit, as other processes use the CPUs too."""
_PLACE_S = 120.0
_MOST_TOLD = 500
_OWN_NAME = """import builtins, sys
builtins.exit = builtins.quit = sys.exit
__name__ = "solution"
sys.modules["solution"] = sys.modules["__main__"]"""
"""A solution's `if __name__ == "__main__":` does not run: only its functions are used."""


@dataclass(frozen=True, kw_only=True)
class UnitTests(TextReward):
    """Scores 1.0 if code passes the tests of its task, else 0.0.

        --reward unit_tests                                        # columns tests, and entry_point if there is one
        --reward unit_tests:tests=test,setup=prompt                # HumanEval
        --reward unit_tests:tests=test_list,setup=test_setup_code  # MBPP

    The code is the last fenced block of the completion. It runs in a sandbox session, and the tests in another. When
    they call the solution, arguments and results cross as plain data, so that nothing the model wrote runs, or can be
    seen, where its result is compared. A failure of the sandbox gives no score.
    """

    tests: str = "tests"
    """Entry of the task's truth with the tests: Python, or a list of it. Statements such as `assert` are run, then
    functions named test..., classes of unittest, and `check(candidate)` as in HumanEval."""
    entry_point: str = "entry_point"
    """Entry of the truth with the name of the function that is tested, or `Class().method`. Without it, tests call the
    solution by all names that they do not define."""
    setup: str = "setup"
    """Entry of the truth with Python that runs before the tests, such as their imports and helpers."""
    timeout_s: float = 10.0
    """CPU seconds that one test may take; the time that passes may be 4 times as long."""
    partial: bool = False
    """Score the share of the list's tests that pass, instead of 1.0 if all do."""
    deadline_s: ClassVar[float] = 3600.0
    """Deadline of one score, including time in the queue."""
    scores_code: ClassVar[bool] = True
    """The answer is a block of code."""

    def __post_init__(self) -> None:
        check_flags(self, "--reward unit_tests:", above={"timeout_s": 0})

    def load(self, folder: Path | None) -> None:
        """Raises SandboxError if this machine cannot isolate code."""
        check_shared_pool()

    async def __call__(self, task: Task, text: str) -> Score:
        """Return the score; `feedback` is the first failure.

        Raises:
            TaskError: the task has no tests, or they cannot be run: they raise before they call the solution, never
                call it, or call it with other than plain data.
            SandboxError: the sandbox failed.
        """
        tests, code = self._tests(task), last_code(text)
        # No code is a wrong answer of the model, not an error of the task.
        if code is None:
            return Score(total=0.0, parts={"passed": 0.0}, feedback="there is no code")
        setup, target = (self._text(task, key) for key in (self.setup, self.entry_point))
        num_passed, feedback = await run_tests(
            code, tests, setup=setup, target=target, timeout_s=self.timeout_s, task=task
        )
        share = num_passed / len(tests)
        return Score(total=share if self.partial else float(share == 1), parts={"passed": share}, feedback=feedback)

    def _tests(self, task: Task) -> list[str]:
        value = task.truth.get(self.tests)
        tests = [value] if isinstance(value, str) else value
        if not (isinstance(tests, list | tuple) and tests and all(isinstance(test, str) for test in tests)):
            raise TaskError(
                f"--reward unit_tests: the truth of task {task.id!r} of {task.source!r} has no tests: {self.tests!r} "
                f"is {value!r:.80}; it has {', '.join(sorted(task.truth)) or 'nothing'}",
                hint="name the column of the tests with --reward unit_tests:tests=COLUMN",
            )
        return list(tests)

    def _text(self, task: Task, key: str) -> str:
        value = task.truth.get(key) or ""
        if not isinstance(value, str):
            raise TaskError(f"{key!r} of task {task.id!r} is {value!r:.80}", hint="give it as text")
        return value


async def run_tests(
    code: str, tests: Sequence[str], *, setup: str, target: str, timeout_s: float, task: Task
) -> tuple[int, str]:
    """Run tests of a solution.

    Args:
        target: name of the tested function, or `Class().method`; "" for all names that tests do not define.
        timeout_s: CPU seconds for each test.
        task: for errors.

    Returns:
        The number of tests that passed, and the first failure.

    Raises:
        TaskError, SandboxError: see `UnitTests`.
    """
    limits = Limits(wall_s=_SHARE * timeout_s, cpu_s=timeout_s, output_bytes=1 << 20)
    async with (
        a_cpu_of_shared_pool() as pool,
        pool.session(limits=limits, wait_s=_PLACE_S) as solution_session,
        # Without a CPU limit: its signal would reach the tests' thread, and kill the session instead of its cell.
        pool.session(limits=replace(limits, cpu_s=None), wait_s=_PLACE_S) as tests_session,
    ):
        solution = _Solution(solution_session)
        if failure := await solution.load(code):
            return 0, failure[:_MOST_TOLD]
        results = await _TestsSession(tests_session, task, len(tests) * limits.wall_s).run(
            setup, tests, target, solution
        )
    return results.count(""), next((result for result in results if result), "")[:_MOST_TOLD]


class _Solution:
    """The session of the model's code. Its answers come from that code, and may be any text."""

    def __init__(self, session: PoolSession) -> None:
        self._session = session
        self._over = ""
        """Why the session can answer no more calls; "" while it can."""

    async def load(self, code: str) -> str:
        """Run the solution; return why it failed, or ""."""
        ready = await self._session.run(f"{_OWN_NAME}\n{_module('forge_solution', 'solution')}")
        if ready.error is not None:
            raise SandboxError(f"the session of a solution cannot be prepared: {ready.error.message}")
        result = await self._session.run(code)
        return "" if result.error is None else f"{result.error.name}: {result.error.message}"

    async def call(self, name: str, packed_arguments: str) -> tuple[str, str]:
        """Return "value" and the packed value, or the error's class and message."""
        # A lost session is the sandbox's failure, which `run` raises; an ended one is the solution's.
        if self._over or (not self._session.alive and not self._session.lost):
            return "Ended", self._over or "its session has ended"
        result = await self._session.run(f"forge_solution.call({name!r}, {packed_arguments!r})")
        if result.error is None:
            return "value", result.value or ""
        if not self._session.alive or result.error.name == "CellOverrun":  # it would only take as long again
            self._over = result.error.message or "its session has ended"
        return result.error.name, result.error.message


class _TestsSession:
    """The session of the tests, which runs nothing of the solution, and whose results are trusted."""

    def __init__(self, session: PoolSession, task: Task, limit_s: float) -> None:
        self._session, self._task = session, task
        self._limit_s = limit_s

    async def run(self, setup: str, tests: Sequence[str], target: str, solution: _Solution) -> list[str]:
        """Return "" for each test that passed, and the reason for each that failed."""
        prepared = await self._session.run(_module("forge_tests", "tests"))
        if prepared.error is not None:
            raise SandboxError(f"the session of the tests cannot be prepared: {prepared.error.message}")
        clock = asyncio.get_running_loop().time
        ends, calls = clock() + self._limit_s, 0
        # Each cell ends with the tests' next call of the solution, or with their results.
        cell = f"forge_tests.start({setup!r}, {list(tests)!r}, {target!r})"
        while True:
            result = await self._session.run(cell, wall_s=max(0.01, ends - clock()))
            if result.error is not None:
                return self._ended(result, calls, len(tests))
            message: Mapping[str, Any] = json.loads(result.value or "")
            if "broken" in message:
                raise self._broken(message["broken"])
            if "results" in message:
                results: list[str] = message["results"]
                return results
            calls += 1
            answer, text = await solution.call(message["call"], message["arguments"])
            cell = f"forge_tests.resume({answer!r}, {text!r})"

    def _ended(self, result: Result, calls: int, tests: int) -> list[str]:
        """Return the results of tests that did not finish."""
        assert result.error is not None
        name, message = result.error.name, result.error.message
        # Only these come from what the tests ran; all others are failures of the sandbox.
        if name not in ("CellOverrun", "OutOfMemory", "MemoryError"):
            raise SandboxError(f"the session of the tests of {self._task.id!r} failed: {name}: {message}")
        # Nothing of the solution was called yet, so that the tests themselves are at fault.
        if not calls:
            raise self._broken(f"{name}: {message}")
        return [f"{name}: {message}"] * tests

    def _broken(self, cause: str) -> TaskError:
        return TaskError(
            f"the tests of task {self._task.id!r} of {self._task.source!r} cannot be run: {cause}",
            hint="they call functions of plain data; name imports and helpers in the task's setup",
        )


@functools.lru_cache(maxsize=4)
def _module(name: str, file: str) -> str:
    """Return code that makes a module in a session from a file of `inside`, so that its names do not clash with the
    names of the code that runs there."""
    folder = resources.files("forge_rl.worlds.inside")
    sources = "\n".join((folder / f"{stem}.py").read_text() for stem in ("plain", file))
    # A __future__ import is only allowed at the beginning, and two files are joined here.
    sources = sources.replace("from __future__ import annotations\n", "")
    statement = f"{name} = __import__('types').ModuleType({name!r})"
    return f"{statement}\nexec(compile({sources!r}, {name!r}, 'exec'), {name}.__dict__)"
