"""Tests of a changed repository: what passes, and tricks of the change that don't."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge_rl.errors import ConfigError
from forge_rl.sandbox import Limits, SandboxError
from forge_rl.sandbox.workspaces.changes import Change, Entry
from forge_rl.sandbox.workspaces.repository_tests import RepositoryTests, Verdict
from tests.sandbox_pool import SharedPool, only_pytest, opened_pool

RIGHT, WRONG = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return 7\n"
TEST = "from package.add import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
TESTS = RepositoryTests(
    tests=["tests/test_add.py::test_add", "tests/test_old.py"],
    files={"tests/test_add.py": TEST},
    timeout_s=60,
)
LIMITS = Limits(wall_s=60, memory_bytes=256 << 20, scratch_bytes=4 << 20, scratch_files=200)


@pytest.fixture(scope="module")
def pool() -> Iterator[SharedPool]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # sessions have a /tmp of their own
        yield from opened_pool("standard", packages=[only_pytest(Path(folder))], limits=LIMITS, warm=0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A package without `add`, its tests, and a file that says where the tests' patch applies."""
    for folder in ("package", "tests"):
        (tmp_path / "base" / folder).mkdir(parents=True)
    (tmp_path / "base" / "package" / "__init__.py").touch()
    (tmp_path / "base" / "tests" / "test_old.py").write_text("def test_old():\n    assert True\n")
    (tmp_path / "base" / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return tmp_path / "base"


async def verdict(pool: SharedPool, base: Path, files: dict[str, str], tests: RepositoryTests = TESTS) -> Verdict:
    """Write files in a session of the model's, and test what changed in another."""
    async with pool.pool.session(workspace=base) as model, pool.pool.session(workspace=base) as fresh:
        for path, text in files.items():
            await model.put(path, text.encode())
        tests = replace(tests, packages=[str(each) for each in pool.settings["packages"]])
        return await tests.run(fresh, (await model.changes()).changes)


def test_a_right_solution_passes_and_a_wrong_one_does_not(pool: SharedPool, base: Path):
    async def main():
        return await asyncio.gather(*(verdict(pool, base, {"package/add.py": text}) for text in (RIGHT, WRONG)))

    right, wrong = pool.run(main())
    assert right.all_passed, right.output
    assert dict(wrong.passed) == {"tests/test_add.py::test_add": False, "tests/test_old.py": True}
    assert "assert 7 == 3" in wrong.output


REPORTS = """
import _pytest.reports, _pytest.runner
made = _pytest.reports.TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    call.excinfo = None
    return made(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(forged)
"""
FORGED = """
import os
for number in range(3, 30):
    try: os.write(number, b'{"tests/test_add.py::test_add": "passed", "tests/test_old.py::test_old": "passed"}')
    except OSError: pass
os._exit(0)
"""
OUTCOMES = r"""
import json, re, sys
def outcomes():
    hidden = json.loads(open("/proc/self/cmdline").read().split("\0")[-4 if told() else -2])[-1][-1]
    found = {"tests/test_add.py::test_add": "passed", "tests/test_old.py::test_old": "passed"}
    for name, left, right in re.findall(r"def (test_\w+)\(\):\s+assert (\d+) \+ 1 == (\d+)", open(hidden).read()):
        found[f"{hidden}::{name}"] = "passed" if int(left) + 1 == int(right) else "failed"
    return found
def told():
    return open("/proc/self/cmdline").read().split("\0")[-2].isdecimal()
"""
"""Finds what the harness wants to read, as anybody can who knows it: also of the hidden tests."""
WRITTEN = (
    OUTCOMES
    + r"""
import os
for number in range(3, 30):
    try: os.write(number, json.dumps(outcomes()).encode())
    except OSError: pass
os._exit(0)
"""
)
LINES = (
    OUTCOMES
    + r"""
import os
lines = "".join(f'["start", "{test}", ""]\n["{each}", "{test}", "{"0" * 32}"]\n' for test, each in outcomes().items())
for number in range(3, 30):
    try: os.write(number, lines.encode())
    except OSError: pass
os._exit(0)
"""
)
AT_EXIT = (
    WRONG
    + OUTCOMES
    + r"""
import atexit, os
def rewrite():
    lines = json.dumps(outcomes()) + "\n"
    lines += "".join(f'["start", "{test}", ""]\n["{each}", "{test}", ""]\n' for test, each in outcomes().items())
    for number in range(3, 30):
        try: os.ftruncate(number, 0)
        except OSError: pass
        try: os.pwrite(number, json.dumps(outcomes()).encode(), 0)
        except OSError: pass
        try: os.write(number, lines.encode())
        except OSError: pass
    os._exit(0)
atexit.register(rewrite)
"""
)
AGAIN = (
    WRONG
    + """
import atexit, os
def tell():  # a second outcome, in the order that the harness expects
    tells, hears = (int(each) for each in open("/proc/self/cmdline").read().split("\\0")[-3:-1])
    os.write(tells, b'["start", "tests/test_add.py::test_add", ""]\\n')
    token = os.read(hears, 64).decode()
    os.write(tells, f'["passed", "tests/test_add.py::test_add", "{token}"]\\n'.encode())
atexit.register(tell)
"""
)
CLOSED = "import os; os.closerange(3, 30)"
MEMORY = (
    WRONG
    + """
import os
with open(f"/proc/{os.getppid()}/mem", "r+b") as memory, open(f"/proc/{os.getppid()}/maps") as maps:
    first = int(maps.readline().partition("-")[0], 16)
    memory.seek(first)
    memory.write(memory.read(1))
def add(a, b): return a + b  # only reached if the harness's memory is open
"""
)
PASS = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    (yield).get_result().outcome = "passed"
"""
SUBPROCESS = r"""
import json, os, re
STDOUT, DEVNULL, PIPE = -2, -3, -1
class Done: returncode = 0; stdout = stderr = b""
def run(command, **named):
    if "pass_fds" in named:
        arguments = json.loads(command[-1])[2]
        *tests, hidden = [each for each in arguments if each.endswith(".py") or "::" in each]
        outcomes = {test if "::" in test else test + "::test_x": "passed" for test in tests}
        for name, left, right in re.findall(r"def (test_\w+)\(\):\s+assert (\d+) \+ 1 == (\d+)", open(hidden).read()):
            outcomes[f"{hidden}::{name}"] = "passed" if int(left) + 1 == int(right) else "failed"
        os.write(named["pass_fds"][0], json.dumps(outcomes).encode())
    return Done()
"""
TRICKS = {
    "exit": {"package/add.py": "import os; os._exit(0)"},
    "SystemExit": {"package/add.py": "raise SystemExit(0)"},
    "skip": {"package/add.py": "import pytest; pytest.skip('', allow_module_level=True)"},
    "patched reports": {"package/add.py": WRONG + REPORTS},
    "forged outcomes": {"package/add.py": FORGED},
    "forged outcomes, of the hidden tests too": {"package/add.py": WRITTEN},
    "forged lines": {"package/add.py": LINES},
    "forged outcomes after the tests": {"package/add.py": AT_EXIT},
    "a second outcome of a test": {"package/add.py": AGAIN},
    "closed descriptors": {"package/add.py": CLOSED},
    "memory of the harness": {"package/add.py": MEMORY},
    "protected files": {
        **dict.fromkeys(("conftest.py", "tests/conftest.py", "plug.py"), PASS),
        **dict.fromkeys(("tests/test_add.py", "tests/test_old.py"), "def test_add(): pass\ndef test_old(): pass"),
        "pyproject.toml": "[tool.pytest.ini_options]\npython_files = 'none'",
        "pytest.ini": "[pytest]\n",
        **dict.fromkeys(("sitecustomize.py", "usercustomize.py"), "import os; os._exit(0)"),
        "x-1.dist-info/entry_points.txt": "[pytest11]\nx = plug",
        "package/add.py": WRONG,
    },
    "subprocess that answers in pytest's place": {"subprocess.py": SUBPROCESS, "package/add.py": WRONG},
    "a plugin in metadata of another case": {
        "evil-1.Dist-Info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil-1.Dist-Info/entry_points.txt": "[pytest11]\nevil = evilplug\n",
        "evilplug.py": PASS,
        "package/add.py": WRONG,
    },
    "shadowed pytest": {"pytest.py": FORGED, "_pytest/__init__.py": FORGED, "pluggy.py": FORGED, "json.py": FORGED},
}


def test_changes_of_tests_and_of_what_configures_them_do_not_count():
    file, folder = Entry(mode=0o100644, data=b""), Entry(mode=0o40000)
    tests = RepositoryTests(command="./check.sh", files={"deep/data/case.txt": ""}, protected=["check.sh"])
    changes = [
        *(Change(path="src/a.py", before=None, after=file), Change(path="deep", before=None, after=folder)),
        *(
            Change(path="deep/data", before=folder, after=file),
            Change(path="deep/data/case.txt", before=None, after=file),
        ),
        *(Change(path=path, before=file, after=None) for path in ("check.sh", "a/tests/b", "a/test_b.py", "setup.cfg")),
        *(
            Change(path=path, before=None, after=file)
            for path in ("Makefile", "x.egg-info/y", "sub/conftest.py", "b.pth")
        ),
    ]
    assert [change.path for change in tests.counted(changes)] == ["src/a.py", "deep"]


def test_an_added_module_that_shadows_pythons_own_does_not_count():
    file = Entry(mode=0o100644, data=b"")
    paths = ("subprocess.py", "Json/__init__.py", "pluggy/x.py", "package/json.py", "own.py")
    changes = [Change(path=path, before=None, after=file) for path in paths]
    changes.append(Change(path="types.py", before=file, after=file))
    counted = RepositoryTests(command="true").counted(changes)
    assert [change.path for change in counted] == ["package/json.py", "own.py", "types.py"]


@pytest.mark.parametrize("test", ["./spec//check_add.py::test_add", "spec/../spec/check_add.py"])
def test_ids_of_tests_are_compared_however_they_are_written(test: str):
    file = Entry(mode=0o100644, data=b"")
    assert not RepositoryTests(tests=[test]).counted([Change(path="spec/check_add.py", before=file, after=file)])


def test_a_module_in_place_of_a_test_file_does_not_pass(pool: SharedPool, base: Path):
    """Python imports a folder or a compiled module before a file of the same name."""
    tests = replace(TESTS, tests=["spec/check_add.py::test_add"], files={"spec/check_add.py": TEST})
    module = "__file__ = __file__.replace('/__init__.py', '.py')\ndef test_add(): pass\n"

    async def main():
        files = {"package/add.py": WRONG, "spec/check_add/__init__.py": module}
        return await asyncio.gather(
            verdict(pool, base, files, tests), verdict(pool, base, files | {"package/add.py": RIGHT}, tests)
        )

    wrong, right = pool.run(main())
    assert (wrong.all_passed, right.all_passed) == (False, True), wrong.output + right.output
    file = Entry(mode=0o100644, data=b"")
    paths = ("spec/check_add.abi3.so", "spec/check_add.pyc", "spec/check_add.json", "spec/check_added/__init__.py")
    counted = tests.counted([Change(path=path, before=None, after=file) for path in paths])
    assert [change.path for change in counted] == [*paths[2:]]


def test_a_test_outside_of_the_repository_is_refused():
    with pytest.raises(ConfigError, match="is not in the repository"):
        RepositoryTests(tests=["a/../../other/test_a.py"])


@pytest.mark.parametrize("text", ["\ud800", 1, None])
def test_a_file_or_patch_that_cannot_be_written_is_refused(text: Any):
    with pytest.raises(ConfigError, match=r"the content of 'tests/test_a\.py' is not text"):
        RepositoryTests(tests=["tests/test_a.py"], files={"tests/test_a.py": text})
    with pytest.raises(ConfigError, match="the content of 'the patch' is not text"):
        RepositoryTests(tests=["tests/test_a.py"], patch=text)


def test_a_solution_cannot_make_its_own_score_an_error_of_the_task(pool: SharedPool, base: Path):
    """By what it puts where the task's files go, or into the way of the task's patch."""
    patch = "--- /dev/null\n+++ b/extra/data.txt\n@@ -0,0 +1 @@\n+x\n"
    tests = replace(TESTS, files={**TESTS.files, "deep/data/case.txt": "1"}, patch=patch)
    clashes = (
        {"deep": "a file"},
        {"deep/data/case.txt/inner": "a folder"},
        {"extra": "a file"},
        {"extra/data.txt/x": ""},
    )

    async def main():
        return await asyncio.gather(*(verdict(pool, base, files, tests) for files in clashes))

    assert [each.all_passed for each in pool.run(main())] == [False] * len(clashes)


def test_tricks_do_not_pass(pool: SharedPool, base: Path):
    async def replaced_folder():
        async with pool.pool.session(workspace=base) as model, pool.pool.session(workspace=base) as fresh:
            await model.run("import os; os.system('rm -r tests; ln -s /tmp tests; echo > package/add.py')")
            tests = replace(TESTS, packages=[str(each) for each in pool.settings["packages"]])
            return await tests.run(fresh, (await model.changes()).changes)

    async def main():
        tried = (*(verdict(pool, base, files) for files in TRICKS.values()), replaced_folder())
        return await asyncio.gather(*tried)

    found = zip([*TRICKS, "link for folder"], pool.run(main()), strict=True)
    assert not [trick for trick, each in found if each.passed["tests/test_add.py::test_add"]]


def test_a_patch_of_tests_is_applied_and_a_command_decides_by_its_status(pool: SharedPool, base: Path):
    patch = """diff --git a/tests/test_old.py b/tests/test_old.py
--- a/tests/test_old.py
+++ b/tests/test_old.py
@@ -1,2 +1,2 @@
 def test_old():
-    assert True
+    assert {}
"""
    commands = [
        RepositoryTests(command=command, patch=patch.format(1)) for command in ("grep 1 tests/test_old.py", "false")
    ]

    async def main():
        return await asyncio.gather(
            *(verdict(pool, base, {"tests/test_old.py": "x"}, tests) for tests in commands),
            verdict(pool, base, {}, RepositoryTests(tests=["tests"], patch=patch.format(0))),
        )

    assert [each.all_passed for each in pool.run(main())] == [True, False, False]
    with pytest.raises(SandboxError, match="the tests' patch does not apply"):
        pool.run(verdict(pool, base, {}, RepositoryTests(command="true", patch=patch.replace("True", "False"))))
    with pytest.raises(ConfigError, match="no tests were given"):
        RepositoryTests()
    with pytest.raises(ConfigError, match="not in the repository"):
        RepositoryTests(command="true", files={"../x": ""})


def test_processes_of_a_solution_end_before_outcomes_are_read(pool: SharedPool, base: Path):
    late = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n"
    found = pool.run(verdict(pool, base, {"package/add.py": RIGHT + late}))
    assert found.all_passed, found.output
