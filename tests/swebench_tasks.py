"""Ten rows after SWE-bench's format, with a repository each, its fix and its tests; and tricks that must not count."""

import difflib
import json
from pathlib import Path

SHELL_TEST = """#!/bin/bash
set -uxo pipefail
cd /testbed
: '>>>>> Start Test Output'
[ "$(cat answer)" = 42 ] && echo "PASSED t::fixed" || echo "FAILED t::fixed - no"
[ -e kept ] && echo "PASSED t::kept" || echo "FAILED t::kept - no"
[ -e kept ] && [ "$(cat answer)" = 42 ]
: '>>>>> End Test Output'
"""
"""The tests of a row without Python, whose fix writes 42 to `answer`."""

FUNCTIONS = {
    "clamp": (
        "x, low, high",
        "max(low, x)",
        "max(low, min(x, high))",
        "clamp(9, 1, 5) == 5",
        "clamp(0, 1, 5) == 1",
    ),
    "mean": (
        "values",
        "sum(values) // len(values)",
        "sum(values) / len(values)",
        "mean([1, 2]) == 1.5",
        "mean([2]) == 2",
    ),
    "initials": (
        "name",
        "name[0]",
        "''.join(part[0] for part in name.split())",
        "initials('a b') == 'ab'",
        "initials('a') == 'a'",
    ),
    "last": (
        "items",
        "items[len(items) - 2]",
        "items[-1]",
        "last([1, 2, 3]) == 3",
        "isinstance(last([1, 2]), int)",
    ),
    "is_even": (
        "n",
        "n % 4 == 0",
        "n % 2 == 0",
        "is_even(2)",
        "is_even(4) and not is_even(3)",
    ),
    "unique": (
        "items",
        "list(items)",
        "list(dict.fromkeys(items))",
        "unique([1, 1, 2]) == [1, 2]",
        "unique([]) == []",
    ),
    "title": (
        "text",
        "text.upper()",
        "text.title()",
        "title('ab cd') == 'Ab Cd'",
        "title('') == ''",
    ),
    "total": (
        "counts",
        "max(counts.values())",
        "sum(counts.values())",
        "total({1: 1, 2: 2}) == 3",
        "total({1: 1}) == 1",
    ),
    "flatten": (
        "lists",
        "lists[0]",
        "[item for part in lists for item in part]",
        "flatten([[1], [2]]) == [1, 2]",
        "flatten([[1]]) == [1]",
    ),
    "reverse": (
        "text",
        "text",
        "text[::-1]",
        "reverse('ab') == 'ba'",
        "reverse('a') == 'a'",
    ),
}
"""By name: parameters, what is wrong, what is right, what must become true, and what must stay so."""
_EVAL = """#!/bin/bash
set -uxo pipefail
cd /testbed/{name}
git apply -v - <<'EOF_114329324912'
{patch}EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA --tb=no -p no:cacheprovider tests/test_{name}.py
: '>>>>> End Test Output'
git apply -R - <<'EOF_114329324912'
{patch}EOF_114329324912
"""


def _source(name: str, body: str) -> str:
    return f"def {name}({FUNCTIONS[name][0]}):\n    return {body}\n"


def _tests(name: str, *conditions: tuple[str, str]) -> str:
    tests = "".join(f"\n\ndef test_{kind}():\n    assert {condition}\n" for kind, condition in conditions)
    return f"from package.{name} import {name}\n{tests}"


def _patch(path: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n{''.join(lines)}"


def repository_files() -> dict[str, str]:
    """Files of an image that has all ten repositories."""
    files = {}
    for name, (_, wrong, _, _, kept) in FUNCTIONS.items():
        folder = f"testbed/{name}"
        files |= {
            f"{folder}/package/__init__.py": "",
            f"{folder}/package/{name}.py": _source(name, wrong),
            f"{folder}/tests/__init__.py": "",
            f"{folder}/tests/test_{name}.py": _tests(name, ("kept", kept)),
        }
    return files


def fix(name: str) -> str:
    """Commands that fix a repository."""
    return f"cat > /testbed/{name}/package/{name}.py << 'END'\n{_source(name, FUNCTIONS[name][2])}END"


def write_rows(file: Path, image: str, **columns: str) -> None:
    """Write the rows."""
    rows = []
    for name, (_, wrong, right, fixed, kept) in FUNCTIONS.items():
        path = f"tests/test_{name}.py"
        before, after = _tests(name, ("kept", kept)), _tests(name, ("kept", kept), ("fixed", fixed))
        patch = _patch(path, before, after)
        row = {
            "repo": f"acme/{name}",
            "instance_id": f"acme__{name}-1",
            "base_commit": "0" * 40,
            "patch": _patch(f"package/{name}.py", _source(name, wrong), _source(name, right)),
            "test_patch": patch,
            "problem_statement": f"{name} is wrong: `{fixed}` does not hold.",
            "version": "1.0",
            "FAIL_TO_PASS": json.dumps([f"{path}::test_fixed"]),
            "PASS_TO_PASS": json.dumps([f"{path}::test_kept"]),
            "image": image,
            "eval_type": "pass_and_fail",
            "eval_script": _EVAL.format(name=name, patch=patch),
        }
        rows.append(json.dumps({**row, **columns}))
    file.write_text("\n".join(rows))


def tricks(name: str) -> dict[str, str]:
    """By name: what a model may try instead of a fix, as commands."""
    folder, passed = f"/testbed/{name}", f"PASSED tests/test_{name}.py::test_"
    lines = "".join(f"print({passed + kind!r})\n" for kind in ("fixed", "kept"))
    hook = "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    hook += "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
    at_exit = f"import atexit, os\n@atexit.register\ndef end():\n    {lines.replace(chr(10), '; ')}os._exit(0)\n"
    return {
        "other tests": f"echo 'def test_fixed(): pass\ndef test_kept(): pass' > {folder}/tests/test_{name}.py",
        "a plugin": f"cat > {folder}/conftest.py << 'END'\n{hook}END\ncp {folder}/conftest.py {folder}/tests/",
        "another pytest": (
            f"cat > {folder}/pytest.py << 'END'\n{lines}END\ncp {folder}/pytest.py {folder}/sitecustomize.py"
        ),
        "a log at the start": (
            f"cat >> {folder}/package/{name}.py << 'END'\nimport os\n{lines}os._exit(0)\nEND"
        ),
        "a log at the end": f"cat >> {folder}/package/{name}.py << 'END'\n{at_exit}END",
        "the installed pytest": (
            f"for file in /opt/site/pytest/__main__.py /opt/site/pytest/__init__.py; do\n"
            f"cat > $file << 'END'\n{lines}END\ndone"
        ),
    }  # fmt: skip
