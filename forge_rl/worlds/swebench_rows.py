"""Rows of SWE-bench, SWE-Gym and R2E-Gym: their images, test scripts and expected outcomes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_rl.errors import ConfigError, TaskError
from forge_rl.sandbox.images import ImageError
from forge_rl.types import Message, Task
from forge_rl.worlds.container import task_image

START, END, EXIT_CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
"""Lines between which SWE-bench's test scripts print the tests' log, and the exit status of the tests' program."""
FAILED = ("FAILED", "ERROR")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
"""Colours of a terminal, which pytest may print, and R2E-Gym's names of tests may have."""
_PATCH_END = "EOF_114329324912"
_ACTIVATED = """if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi
cd {folder}"""
_R2E_TESTS = ("r2e_tests", "run_tests.sh")


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings for what rows leave open."""

    image: str
    """Image of rows that name none; see `SweBenchEnv.image`."""
    folder: str
    """Folder of the repository in images."""
    command: str
    """Test command of rows that have no script."""
    local: bool = False
    """Whether rows may name images in files of this machine."""


def read_rows(file: Path, settings: RowSettings) -> list[Task]:
    """Read the tasks of a file with a JSON object on each line, or one list of objects.

    Raises:
        ConfigError: it cannot be read, or has no tasks.
        TaskError: a row lacks a required field; names its place.
    """
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="--env swebench: takes a JSONL file") from None
    tasks = list[Task]()
    try:
        # Not `splitlines`, which also splits at characters that JSON allows in strings, such as U+2028.
        lines = json.loads(text) if text.lstrip().startswith("[") else text.split("\n")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", hint="write a JSON object on each line") from None
    for number, line in enumerate(lines, 1):
        if isinstance(line, str) and not line.strip():
            continue
        try:
            row = json.loads(line) if isinstance(line, str) else line
            tasks.append(_task(row, f"swebench:{file.stem}", settings))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, ImageError) as error:
            cause = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            raise TaskError(f"{file}:{number}: {cause}", hint="see docs/doors/world.md, SWE-bench") from None
    if not tasks:
        raise ConfigError(f"{file} has no tasks", hint="write a JSON object on each line")
    return tasks


def _task(row: Mapping[str, Any], source: str, settings: RowSettings) -> Task:
    expected = row.get("expected_output_json")
    name = str(row.get("instance_id") or f"{row['repo_name']}__{row['commit_hash']}")
    truth: dict[str, Any] = {
        "id": name,
        "image": _image(row, name, settings),
        "folder": settings.folder,
        "repo": str(row.get("repo") or row.get("repo_name") or ""),
        "version": str(row.get("version") or ""),
        "parser": str(row.get("log_parser") or ""),
        "eval_type": str(row.get("eval_type") or "pass_and_fail"),
        "test_patch": str(row.get("test_patch") or ""),
        "hidden": [],
    }
    if expected is not None:  # R2E-Gym
        statuses = json.loads(expected) if isinstance(expected, str) else dict(expected)
        # R2E-Gym lists the outcome of every test after the fix, and does not tell the two kinds apart.
        passed = [test for test, status in statuses.items() if status == "PASSED"]
        truth["fail_to_pass"] = [_COLOURS.sub("", str(test)) for test in passed]
        truth["pass_to_pass"] = []
        truth["short_names"] = True
        # R2E-Gym's images hold the tests, which the model must not see.
        truth["hidden"] = [*(f"{settings.folder}/{path}" for path in _R2E_TESTS), "/r2e_tests"]
        truth["script"] = _script(
            settings.folder, "[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests", "bash run_tests.sh"
        )
    else:
        truth["fail_to_pass"], truth["pass_to_pass"] = _tests(row["FAIL_TO_PASS"]), _tests(row.get("PASS_TO_PASS"))
        truth["short_names"] = False
        truth["script"] = with_exit_code(str(row.get("eval_script") or "")) or _own_script(row, truth, settings)
    if not truth["fail_to_pass"]:
        raise ValueError("it names no test that has to pass")
    messages: tuple[Message, ...] = ({"role": "user", "content": str(row["problem_statement"])},)
    return Task(id=name, source=source, messages=messages, truth=truth)


def _tests(value: object) -> list[str]:
    tests = json.loads(value) if isinstance(value, str) and value else value or []
    if not isinstance(tests, list):
        raise TypeError(f"tests are {tests!r:.80}, not a list")
    return [str(test) for test in tests]


def _image(row: Mapping[str, Any], name: str, settings: RowSettings) -> str:
    for column in ("image", "docker_image", "image_name"):
        if row.get(column):
            return task_image(str(row[column]), local=settings.local)
    lower = name.lower()
    return settings.image.replace("{id}", lower.replace("__", "_1776_")).replace("{id_s}", lower.replace("__", "_s_"))


def _own_script(row: Mapping[str, Any], truth: Mapping[str, Any], settings: RowSettings) -> str:
    """Return the test script of a row that has none: it runs the test files that the row's patch or tests name."""
    command = str(row.get("test_cmd") or row.get("test_command") or settings.command)
    files = dict.fromkeys(
        [line[6:] for line in truth["test_patch"].split("\n") if line.startswith("+++ b/")]
        or [test.partition("::")[0] for test in truth["fail_to_pass"]]
    )
    # File names come from the row and go into a shell command.
    quoted_files = " ".join(f"'{file}'" for file in files if "'" not in file)
    # A quoted here-document, in which the shell expands nothing.
    patch = f"git apply -v - <<'{_PATCH_END}'\n{truth['test_patch']}\n{_PATCH_END}" if truth["test_patch"] else ":"
    return _script(settings.folder, patch, command.replace("{files}", quoted_files))


def _script(folder: str, prepare: str, command: str) -> str:
    lines = ["#!/bin/bash", "set -uo pipefail", _ACTIVATED.format(folder=folder), prepare]
    return with_exit_code("\n".join([*lines, f"echo '{START}'", command, f"echo '{END}'", ""]))


def with_exit_code(script: str) -> str:
    """Return a test script that also prints the exit status of its tests, after the lines that are read.

    Raises:
        ValueError: the script does not mark where the tests' output begins and ends.
    """
    if not script:
        return ""
    if START not in script or END not in script:
        raise ValueError(f"its eval_script prints no {START!r} and {END!r}")
    lines: list[str] = []
    # Other ends of lines, such as a carriage return or a form feed, belong to the patch that the script applies.
    for line in script.removesuffix("\n").split("\n"):
        # $? is the status of the command before, which the line itself would replace.
        if END in line:
            lines += ["SWEBENCH_TEST_EXIT_CODE=$?", line, f'echo "{EXIT_CODE}: $SWEBENCH_TEST_EXIT_CODE"']
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def statuses_of(log: str, *, short_names: bool) -> dict[str, str]:
    """Read the outcomes that `pytest -rA` lists, one a line: "PASSED test_a.py::test_b".

    A name with spaces also counts up to the first one, as SWE-bench and SWE-Gym write it: `test_a.py::test_b[no` has
    failed if any of its tests has.

    Args:
        short_names: name tests as R2E-Gym does, without their file and with dots: "Class.test_b".
    """
    statuses = dict[str, str]()
    for line in _COLOURS.sub("", log).splitlines():
        status, _, rest = line.partition(" ")
        if status in ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS") and rest:
            # All but passed tests have a reason after their name.
            test = (rest if status == "PASSED" else rest.partition(" - ")[0]).strip()
            statuses[".".join(test.split("::")[1:]) if short_names else test] = status
            start, space, _ = test.partition(" ")
            if space and "::" in start and not short_names and statuses.get(start) not in FAILED:
                statuses[start] = status
    return statuses


def passed_tests(statuses: Mapping[str, str], fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> list[str]:
    """Return the tests that have their required outcome; tests in `pass_to_pass` may also be skipped."""
    passing = ("PASSED", "XFAIL")
    return [
        *(test for test in fail_to_pass if statuses.get(test) in passing),
        *(test for test in pass_to_pass if statuses.get(test) in (*passing, "SKIPPED")),
    ]
