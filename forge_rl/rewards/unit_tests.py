"""Reward from unit tests: the tests and what the model wrote run in separate sandbox sessions."""

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
from forge_rl.sandbox import Limits, Result, SandboxError, Session
from forge_rl.sandbox.fences import last_code
from forge_rl.sandbox.shared import a_cpu_of_shared_pool, check_shared_pool
from forge_rl.types import Score, Task

_SHARE = 4
"""Wall time of a test over its CPU time, as other processes have the CPUs too."""
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
        """Raises SandboxError if this machine cannot isolate what runs."""
        check_shared_pool()

    async def __call__(self, task: Task, text: str) -> Score:
        """Return the score; `feedback` is the first failure.

        Raises:
            TaskError: the task has no tests, or they cannot be run: they raise before they call the solution, never
                call it, or call it with other than plain data.
            SandboxError: the sandbox failed.
        """
        tests, code = self._tests(task), last_code(text)
        if code is None:
            return Score(total=0.0, parts={"passed": 0.0}, feedback="there is no code")
        setup, target = (self._text(task, key) for key in (self.setup, self.entry_point))
        passed, told = await run_tests(code, tests, setup=setup, target=target, timeout_s=self.timeout_s, task=task)
        share = passed / len(tests)
        return Score(total=share if self.partial else float(share == 1), parts={"passed": share}, feedback=told)

    def _tests(self, task: Task) -> list[str]:
        found = task.truth.get(self.tests)
        tests = [found] if isinstance(found, str) else found
        if not (isinstance(tests, list | tuple) and tests and all(isinstance(each, str) for each in tests)):
            raise TaskError(
                f"--reward unit_tests: the truth of task {task.id!r} of {task.source!r} has no tests: {self.tests!r} "
                f"is {found!r:.80}; it has {', '.join(sorted(task.truth)) or 'nothing'}",
                hint="name the column of the tests with --reward unit_tests:tests=COLUMN",
            )
        return list(tests)

    def _text(self, task: Task, key: str) -> str:
        found = task.truth.get(key) or ""
        if not isinstance(found, str):
            raise TaskError(f"{key!r} of task {task.id!r} is {found!r:.80}", hint="give it as text")
        return found


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
        pool.session(limits=limits, wait_s=_PLACE_S) as inside,
        # Without a CPU limit: its signal would reach the tests' thread, and kill the session instead of its cell.
        pool.session(limits=replace(limits, cpu_s=None), wait_s=_PLACE_S) as outside,
    ):
        solution = _Solution(inside)
        if failed := await solution.load(code):
            return 0, failed[:_MOST_TOLD]
        found = await _Tests(outside, task, len(tests) * limits.wall_s).run(setup, tests, target, solution)
    return found.count(""), next((each for each in found if each), "")[:_MOST_TOLD]


class _Solution:
    """The session of what the model wrote. What it answers is the solution's claim, and may be any text."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._over = ""
        """Why it is not asked any more; "" while it is."""

    async def load(self, code: str) -> str:
        """Run the solution; return why it failed, or ""."""
        ready = await self._session.run(f"{_OWN_NAME}\n{_module('forge_solution', 'solution')}")
        if ready.error is not None:
            raise SandboxError(f"the session of a solution cannot be prepared: {ready.error.message}")
        result = await self._session.run(code)
        return "" if result.error is None else f"{result.error.name}: {result.error.message}"

    async def call(self, name: str, given: str) -> tuple[str, str]:
        """Return "value" and the packed value, or the error's class and message."""
        if self._over or (not self._session.alive and not self._session.lost):
            return "Ended", self._over or "its session has ended"
        result = await self._session.run(f"forge_solution.call({name!r}, {given!r})")
        if result.error is None:
            return "value", result.value or ""
        if not self._session.alive or result.error.name == "CellOverrun":  # it would only take as long again
            self._over = result.error.message or "its session has ended"
        return result.error.name, result.error.message


class _Tests:
    """The session of the tests, which runs nothing of the solution and is believed."""

    def __init__(self, session: Session, task: Task, limit_s: float) -> None:
        self._session, self._task = session, task
        self._limit_s = limit_s

    async def run(self, setup: str, tests: Sequence[str], target: str, solution: _Solution) -> list[str]:
        """Return "" for each test that passed, and for others why it did not."""
        prepared = await self._session.run(_module("forge_tests", "tests"))
        if prepared.error is not None:
            raise SandboxError(f"the session of the tests cannot be prepared: {prepared.error.message}")
        clock = asyncio.get_running_loop().time
        ends, calls = clock() + self._limit_s, 0
        cell = f"forge_tests.start({setup!r}, {list(tests)!r}, {target!r})"
        while True:
            result = await self._session.run(cell, wall_s=max(0.01, ends - clock()))
            if result.error is not None:
                return self._ended(result, calls, len(tests))
            said: Mapping[str, Any] = json.loads(result.value or "")
            if "broken" in said:
                raise self._broken(said["broken"])
            if "results" in said:
                results: list[str] = said["results"]
                return results
            calls += 1
            answer, text = await solution.call(said["call"], said["given"])
            cell = f"forge_tests.resume({answer!r}, {text!r})"

    def _ended(self, result: Result, calls: int, tests: int) -> list[str]:
        """Return the results of tests that did not come to an end."""
        assert result.error is not None
        name, message = result.error.name, result.error.message
        if name not in ("CellOverrun", "OutOfMemory", "MemoryError"):
            raise SandboxError(f"the session of the tests of {self._task.id!r} failed: {name}: {message}")
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
    """Return code that makes a module of a session from a file of `inside`, so that no name there meets the user's."""
    folder = resources.files("forge_rl.rewards.inside")
    sources = "\n".join((folder / f"{each}.py").read_text() for each in ("plain", file))
    sources = sources.replace("from __future__ import annotations\n", "")
    made = f"{name} = __import__('types').ModuleType({name!r})"
    return f"{made}\nexec(compile({sources!r}, {name!r}, 'exec'), {name}.__dict__)"
