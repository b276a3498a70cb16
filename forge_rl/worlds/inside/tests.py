"""Runs tests in their own session; calls of the solution go out as requests and come back as plain data.

Tests run in a thread: `start` and `resume` return its next request. `plain` comes before this in the same module.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import queue
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_rl.worlds.inside.plain import NotPlainError, decode, encode

_MOST_TOLD = 500
_FILES = ("<setup>", "<test ")
"""Beginnings of the file names under which the task's code is compiled."""
_NEVER = (StopIteration, StopAsyncIteration, Warning)
"""Exceptions that would silently end a loop in the tests, and warnings, which are not errors."""


class SolutionError(Exception):
    """The solution failed in a way that has no exception of Python's own."""


class BrokenTestsError(BaseException):
    """The tests themselves cannot be run."""


class RequestText:
    """JSON text whose `repr` is the text itself, because a cell returns its value's `repr`."""

    def __init__(self, **fields: object) -> None:
        self.text = json.dumps(fields)

    def __repr__(self) -> str:
        return self.text


class Tests:
    """A thread that runs tests."""

    def __init__(self, setup: str, tests: list[str], target: str) -> None:
        self.setup, self.tests, self.target = setup, tests, target
        self.requests: queue.SimpleQueue[RequestText] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self.calling = threading.RLock()
        self.calls = 0
        self.from_solution: list[BaseException] = []
        self.module = types.ModuleType("tests")
        sys.modules["tests"] = self.module

    def run(self) -> None:
        results: list[str] = []
        try:
            names = self.prepare()
            for index, test in enumerate(self.tests):
                results.append(self.told(index, test, names))
            if not self.calls:
                raise BrokenTestsError(f"they never call {' or '.join(names) or 'a function of the solution'}")
        except BrokenTestsError as error:
            self.requests.put(RequestText(broken=str(error)[:_MOST_TOLD]))
        else:
            self.requests.put(RequestText(results=results))

    def prepare(self) -> list[str]:
        """Run the setup, and put functions that ask the solution where the tests name its functions."""
        space = self.module.__dict__
        try:
            exec(compile(self.setup, "<setup>", "exec"), space)
            trees = [ast.parse(test) for test in self.tests]
        except BaseException as error:
            raise BrokenTestsError(described(error)) from error
        names = [self.target] if self.target else free_names(trees, space)
        for name in names:
            # Tests call `Class().method` by the method's name.
            space[name.rpartition(".")[2]] = self.function(name)
        return names

    def told(self, index: int, test: str, names: list[str]) -> str:
        """Run one test; return "" if it passes, or why it does not."""
        try:
            self.run_one(test, f"<test {index + 1}>", names)
        except BrokenTestsError:
            raise
        except BaseException as error:
            # An error that the solution raised is a failed test, not a broken one.
            if error not in self.from_solution and self.is_own(error):
                raise BrokenTestsError(described(error)) from error
            return described(error)[:_MOST_TOLD] or "it failed"
        return ""

    def is_own(self, error: BaseException) -> bool:
        """Return True if an error shows that the tests themselves lack a name or a module.

        A test may evaluate or import text that the solution returned. An error in that text is the solution's.
        """
        if isinstance(error, SyntaxError):
            return error.filename is not None and error.filename.startswith(_FILES)
        if not isinstance(error, ImportError | NameError):
            return False
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        is_in_tests = trace is not None and trace.tb_frame.f_code.co_filename.startswith(_FILES)
        return is_in_tests and any((error.name or "") in text for text in (self.setup, *self.tests))

    def run_one(self, test: str, name: str, names: list[str]) -> None:
        space = self.module.__dict__
        # Definitions of earlier tests stay in the module; only those of this one are run.
        before = dict(space)
        exec(compile(test, name, "exec"), space)
        definitions = {key: value for key, value in space.items() if value is not before.get(key)}
        for key, value in definitions.items():
            # Only tests that import unittest have cases of it: the import takes longer than most tests.
            unittest: Any = sys.modules.get("unittest")
            if unittest and inspect.isclass(value) and issubclass(value, unittest.TestCase):
                outcome = unittest.TestResult()
                unittest.defaultTestLoader.loadTestsFromTestCase(value).run(outcome)
                for _, trace in [*outcome.errors, *outcome.failures]:
                    raise AssertionError(trace.strip().rpartition("\n")[2])
            elif inspect.isfunction(value) and key.startswith("test"):
                value()
            elif inspect.isfunction(value) and key == "check":
                value(space[names[0].rpartition(".")[2]])

    def function(self, name: str) -> Any:
        def ask(*arguments: object, **keywords: object) -> object:
            try:
                packed_arguments = encode([list(arguments), dict(keywords)])
            except NotPlainError as error:
                raise BrokenTestsError(f"they call {name} with an argument that cannot cross: {error}") from None
            # Tests may use threads, and one exchange with the solution must end before the next begins.
            with self.calling:
                self.calls += 1
                self.requests.put(RequestText(call=name, arguments=packed_arguments))
                answer, text = self.answers.get()
            if answer == "value":
                try:
                    return decode(text)
                except (ValueError, TypeError, LookupError, RecursionError, MemoryError):
                    answer, text = "BadValue", "it returned no plain data"
            raise self.error(answer, text)

        ask.__name__ = name.rpartition(".")[2]
        return ask

    def error(self, name: str, message: str) -> Exception:
        """Return an exception of Python's own if the solution raised one that tests may expect."""
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, _NEVER):
            error: Exception = SolutionError(f"{name}: {message}")
        else:
            try:
                error = kind(message)
            except TypeError:  # one with more arguments
                error = SolutionError(f"{name}: {message}")
        self.from_solution.append(error)
        return error


def free_names(trees: list[ast.Module], space: dict[str, object]) -> list[str]:
    """Return the names that tests read and that nothing defines, in order of appearance."""
    names: dict[str, None] = {}
    bound = {*space, *dir(builtins)}
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                names[name] = None
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=asname):
                bound.add(asname or name.partition(".")[0])
    return [name for name in names if name not in bound]


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


_running: list[Tests] = []


def start(setup: str, tests: list[str], target: str) -> RequestText:
    """Start the tests; return their first request, or the results."""
    _running.append(Tests(setup, tests, target))
    # A thread keeps a test's stack alive while its cell returns with a request.
    threading.Thread(target=_running[0].run, daemon=True).start()
    return _running[0].requests.get()


def resume(answer: str, text: str) -> RequestText:
    """Give the tests the solution's answer; return their next request, or the results."""
    _running[0].answers.put([answer, text])
    return _running[0].requests.get()


def same(result: object, expected: object) -> bool:
    """Compare a result with data from JSON, which has lists in place of tuples."""
    return _listed(result) == expected


def _listed(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return {key: _listed(item) for key, item in value.items()} if isinstance(value, dict) else value
