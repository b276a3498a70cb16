"""Runs pytest inside of a session and writes each test's outcome to a descriptor.

The tested code runs in the same process and can forge all of this; see `repository_tests`. Run as a script, alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Outcomes:
    """A plugin that keeps the outcome of each test, and of each file that could not be collected."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or (report.when == "call" and self.by_test.get(report.nodeid) != "failed") or report.skipped:
            self.by_test[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.by_test[report.nodeid] = "failed"


def main(descriptor: int, packages: list[str], arguments: list[str]) -> None:
    """Run pytest in the current folder."""
    sys.path[:0] = packages
    import pytest

    outcomes = Outcomes()
    sys.path.insert(0, os.getcwd())  # only now: a file of the workspace is not taken for pytest, or what it imports
    pytest.main(arguments, plugins=[outcomes])
    with open(descriptor, "w") as file:
        json.dump(outcomes.by_test, file)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
