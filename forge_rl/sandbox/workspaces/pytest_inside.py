"""Runs pytest in a session and reports each test's outcome to the harness, another process.

The tested code runs in this process and can pretend to be this plugin; see `repository_tests`. Run as a script, alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class PluginOutcomes:
    """A plugin that reports each test's start and outcome, and files that could not be collected.

    The harness answers each start with a token, which the outcome must carry.
    """

    def __init__(self, output_fd: int, heard: int) -> None:
        self._told, self._heard = output_fd, heard
        self._outcome = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell("start", nodeid)
        self._token, self._outcome = os.read(self._heard, 64).decode(), ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        # Three reports for a test: setup, call and teardown. A failure in any of them is the test's.
        if report.failed or (report.when == "call" and self._outcome != "failed") or report.skipped:
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tell(self._outcome, nodeid, self._token)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)

    def _tell(self, outcome: str, nodeid: str, token: str = "") -> None:
        line = json.dumps([outcome, nodeid, token]).encode() + b"\n"
        while line:
            line = line[os.write(self._told, line) :]


def main(output_fd: int, heard: int, packages: list[str], arguments: list[str]) -> None:
    """Run pytest in the current folder."""
    sys.path[:0] = packages
    import pytest

    outcomes = PluginOutcomes(output_fd, heard)
    sys.path.insert(0, os.getcwd())  # only now: a file of the workspace is not taken for pytest, or what it imports
    pytest.main(arguments, plugins=[outcomes])


if __name__ == "__main__":
    main(int(sys.argv[2]), int(sys.argv[3]), *json.loads(sys.argv[1]))
