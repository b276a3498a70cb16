"""Tests of what a model changed in a repository, run in a fresh session, where edited tests don't count.

What is protected: the tests and their configuration are the base's or the task's own, put in place after the changes;
nothing that ran in the model's session is left. A process that the tests cannot write to keeps the outcomes (see
`tests_outside`). It accepts one outcome of a test, between its start and the next one's, with a token made at its
start: an early, late or second report spoils all outcomes. The verdict needs an outcome for each required test, and
runs hidden tests last, of which some must fail, so that exiting early, patching pytest's reports or making everything
equal does not pass.

Not protected: pytest runs in the process of the tested code, as tests import it. Code that patches exactly these tests
in pytest (their functions, reports or comparisons), and leaves the hidden ones alone, passes; so does code that plays
the plugin's part, token by token. With a command, only its exit status counts.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import random
import re
import stat
import sys
import unicodedata
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import Result, SandboxError
from forge_rl.sandbox.session import PoolSession
from forge_rl.sandbox.workspaces.changes import Change

PROTECTED = (
    *("test_*.py", "*_test.py", "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("pytest.toml", ".pytest.toml", "Makefile", "makefile", "GNUmakefile", "noxfile.py"),
    *("sitecustomize.py", "usercustomize.py", "*.pth", "*.dist-info", "*.egg-info", "pytest.py", "_pytest"),
    *("tests", "test", "testing"),
)
"""Names of files and folders, as patterns, in which a solution's changes don't count."""
_FROM_SITE = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")
_IMPORTED = frozenset(sys.stdlib_module_names) | frozenset(_FROM_SITE)
"""Modules that pytest imports: a solution may change such a file of the repository, and add none."""
_PATCHED = re.compile(r"(?:\+\+\+ b/|--- a/|rename from |rename to |copy to )(.+?)(?:\t.*)?")
_INSIDE = Path(__file__).with_name("pytest_inside.py")
_OPTIONS = ("-p", "no:cacheprovider", "--rootdir=.", "--tb=short", "-q", "-o", "addopts=")
_HIDDEN_TESTS = 6
_MOST_TOLD = 2000
_OUTSIDE = Path(__file__).with_name("tests_outside.py")
_CELL = """import sys
sys.path[:] = [each for each in sys.path if each.startswith((sys.prefix, sys.base_prefix))]  # none of the workspace
import types
_outside = types.ModuleType("tests_outside")
exec({outside!r}, vars(_outside))
_command = {command!r}
_outside.run([sys.executable, *_command[1:]] if _command[0] == "PYTHON" else _command, {results!r})
"""


@dataclass(frozen=True, kw_only=True)
class RepositoryTests:
    """Tests of one task.

    RepositoryTests(tests=["tests/test_add.py::test_sum"], files={"tests/test_add.py": "..."})
    """

    tests: Sequence[str] = ()
    """Ids of pytest that must pass; a file or folder stands for all tests in it."""
    command: str = ""
    """Shell command that must exit with 0, for tests that pytest cannot run. Easier to cheat than `tests`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Test files that are put in place after the changes, by path."""
    patch: str = ""
    """Unified diff that is applied after the changes."""
    protected: Sequence[str] = ()
    """Patterns of further names, besides PROTECTED, whose changes don't count, such as scripts that a command runs."""
    packages: Sequence[str] = ()
    """The pool's folders of packages, one of which has pytest."""
    timeout_s: float = 300.0
    """Wall time of all tests."""

    def __post_init__(self) -> None:
        if not self.tests and not self.command:
            raise ConfigError("no tests were given", hint="give ids of pytest tests, or a command")
        for path, text in (*self.files.items(), ("the patch", self.patch)):
            if not (isinstance(text, str) and text.encode("utf-8", "replace").decode() == text):
                raise ConfigError(f"the content of {path!r:.200} is not text", hint="give it as a string of Unicode")
        for path in self.files:
            if posixpath.isabs(path) or ".." in path.split("/"):
                raise ConfigError(f"the test file {path!r:.200} is not in the repository", hint="give a relative path")
        for test in self.tests:
            path = _normal(test).partition("::")[0]
            if posixpath.isabs(path) or path.startswith(".."):
                raise ConfigError(f"the test {test!r:.200} is not in the repository", hint="give a relative path")

    def counted(self, changes: Sequence[Change]) -> list[Change]:
        """Return the changes that touch neither tests nor their configuration."""
        test_paths = [*map(posixpath.normpath, self.files), *(_normal(test).partition("::")[0] for test in self.tests)]
        matches = (_PATCHED.fullmatch(line) for line in self.patch.splitlines())
        test_paths += [match[1] for match in matches if match]
        return [
            change
            for change in changes
            if not (self._is_protected(change) or _shadows(change) or _touches(change, test_paths))
        ]

    def _is_protected(self, change: Change) -> bool:
        patterns = [_folded(pattern) for pattern in (*PROTECTED, *self.protected)]
        parts = map(_folded, change.path.split("/"))
        return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in patterns)

    async def run(self, session: PoolSession, changes: Sequence[Change]) -> Verdict:
        """Run the tests on changes in a new session whose workspace is the base.

        Raises:
            SandboxError: the sandbox failed, or the tests cannot be put in place.
        """
        # The task's files come first: what does not fit then is the task's fault, and afterwards the solution's.
        for path, text in self.files.items():
            await session.put(path, text.encode())
        if self.patch:
            await session.put("../0/tests.patch", self.patch.encode())
            await self._succeed(session, "git apply --whitespace=nowarn ../0/tests.patch", "the tests' patch")
        try:
            await session.apply(self.counted(changes))
        except SandboxError:
            if session.lost:
                raise
            return Verdict(
                passed=dict.fromkeys(self.tests or (self.command,), False), output="the changes do not apply"
            )
        return await (self._run_pytest(session) if self.tests else self._run_command(session))

    async def _succeed(self, session: PoolSession, command: str, step: str) -> None:
        result = await session.run(_cell(["/bin/sh", "-c", command]))
        if result.error is not None or result.value != "0":
            reason = result.error.message if result.error else result.stdout.strip()[-300:]
            raise SandboxError(f"{step} does not apply: {reason}", hint="check the task's revision")

    async def _run_command(self, session: PoolSession) -> Verdict:
        result = await session.run(_cell(["/bin/sh", "-c", self.command]), wall_s=self.timeout_s)
        return Verdict(passed={self.command: result.error is None and result.value == "0"}, output=_told(result))

    async def _run_pytest(self, session: PoolSession) -> Verdict:
        # Their names and results are random for each run: a patched pytest that makes everything pass, or compare
        # equal, fails them.
        hidden, text, expected_outcomes = _hidden_tests()
        await session.put(hidden, text.encode())
        await session.put("../0/run_tests.py", _INSIDE.read_bytes())
        # The hidden tests come last: whatever the tested code has patched by then holds for them too.
        arguments = json.dumps([list(self.packages), [*_OPTIONS, *map(_normal, self.tests), hidden]])
        # A name that the tested code cannot guess, so that it cannot put a file or link there first.
        results = f"../0/{uuid.uuid4().hex}"
        cell = _cell(["PYTHON", "-I", "../0/run_tests.py", arguments], results)
        result = await session.run(cell, wall_s=self.timeout_s)
        outcomes = _outcomes(await session.get(results)) if session.alive and result.error is None else {}
        # Exactly the expected outcomes, failures included; otherwise no outcome of this run is believed.
        honest = {name: outcome for name, outcome in outcomes.items() if name.startswith(hidden)} == expected_outcomes
        passed = {test: honest and _passed(test, outcomes) for test in self.tests}
        return Verdict(passed=passed, output=_told(result))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which tests passed."""

    passed: Mapping[str, bool]
    """Whether each test passed, by its id as given, or by the command."""
    output: str = ""
    """The end of the output, which the tested code can have written."""

    @property
    def all_passed(self) -> bool:
        return all(self.passed.values())


def _cell(command: Sequence[str], results: str = "") -> str:
    """Return the code that runs a command in a session, see `tests_outside.run`; PYTHON is the session's own."""
    return _CELL.format(outside=_OUTSIDE.read_text(), command=list(command), results=results)


def _normal(test: str) -> str:
    """Return the id of a test with its path normalised: `./a//b.py::test` is `a/b.py::test`."""
    path, colons, name = test.partition("::")
    return f"{posixpath.normpath(path)}{colons}{name}"


def _folded(name: str) -> str:
    """Fold a name as file systems that ignore case do, and importlib where it looks for metadata."""
    return unicodedata.normalize("NFKC", name).casefold()


def _touches(change: Change, test_paths: Sequence[str]) -> bool:
    """Return True if a change is to a test file, puts something else in place of it or of a folder of it, or would be
    imported instead."""
    is_folder = change.after is not None and stat.S_ISDIR(change.after.mode)
    modules = [path.removesuffix(".py") for path in test_paths if path.endswith(".py")]
    if any(change.path == module or _is_module(change.path, module) for module in modules):
        return True
    return any(path == change.path or (path.startswith(f"{change.path}/") and not is_folder) for path in test_paths)


def _is_module(path: str, module: str) -> bool:
    """Return True for a path in a package, or of a compiled module, that Python takes for MODULE.py."""
    return path.startswith(f"{module}/") or (path.startswith(f"{module}.") and path.endswith((".so", ".pyc")))


def _shadows(change: Change) -> bool:
    """Return True if a change adds a module to the repository's root that would be imported instead of Python's own."""
    name, _, rest = change.path.partition("/")
    return change.before is None and _folded(name if rest else name.partition(".")[0]) in _IMPORTED


def _hidden_tests() -> tuple[str, str, dict[str, str]]:
    """Return the path and text of a file with tests, some of which must fail, and the expected outcomes."""
    name = f"test_{uuid.uuid4().hex[:12]}.py"
    rng = random.SystemRandom()
    passing_indices = rng.sample(range(_HIDDEN_TESTS), _HIDDEN_TESTS // 2)
    lines, outcomes = list[str](), dict[str, str]()
    for index in range(_HIDDEN_TESTS):
        test, number = f"test_{uuid.uuid4().hex[:12]}", rng.randrange(1000)
        lines.append(f"def {test}():\n    assert {number} + 1 == {number + 1 + (index not in passing_indices)}\n")
        outcomes[f"{name}::{test}"] = "passed" if index in passing_indices else "failed"
    return name, "\n\n".join(lines), outcomes


def _outcomes(data: bytes) -> dict[str, str]:
    """Read the outcomes of the tests as the session reports them; the tested code may have written anything."""
    try:
        outcomes = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return (
        outcomes
        if isinstance(outcomes, dict) and all(isinstance(outcome, str) for outcome in outcomes.values())
        else {}
    )


def _passed(test: str, outcomes: Mapping[str, str]) -> bool:
    """Return True if at least one test of an id, file or folder passed, and none failed."""
    test = _normal(test)
    test_outcomes = [
        outcome for name, outcome in outcomes.items() if name == test or name.startswith((f"{test}::", f"{test}/"))
    ]
    # A test with parameters reports one outcome for each, as NAME[PARAMETERS].
    test_outcomes += [outcome for name, outcome in outcomes.items() if name.startswith(f"{test}[")]
    return "passed" in test_outcomes and "failed" not in test_outcomes


def _told(result: Result) -> str:
    text = result.stdout[-_MOST_TOLD:]
    return text if result.error is None else f"{text}\n{result.error.name}: {result.error.message}"[-_MOST_TOLD:]
