"""Reads logs of test runs with the parsers of the package swebench, in an interpreter that has it.

Run as a program: takes a JSON object on standard input, and prints one. Imports none of our code.
"""

import contextlib
import json
import os
import sys
import tempfile


def main():
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # the package prints messages, and stdout is for the answer
        from swebench.harness.constants import EvalType
        from swebench.harness.grading import get_eval_tests_report, get_logs_eval
        from swebench.types import TestSpec

        row = request["row"]
        spec = TestSpec(eval_script_list=[], **row)
        statuses = [_statuses(get_logs_eval, spec, log) for log in request["logs"]]
        report = get_eval_tests_report(
            statuses[0] or {},
            {"FAIL_TO_PASS": row["FAIL_TO_PASS"], "PASS_TO_PASS": row["PASS_TO_PASS"]},
            eval_type=EvalType(row["eval_type"]),
        )
    passed_tests = [test for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in report[kind]["success"]]
    print(json.dumps({"passed": passed_tests if statuses[0] is not None else [], "statuses": statuses}))


def _statuses(get_logs_eval, spec, log):
    """Return the status of each test; None if the log is not of a whole run."""
    fd, path = tempfile.mkstemp()
    try:
        with open(fd, "w") as file:
            file.write(log)
        statuses, is_whole = get_logs_eval(spec, path)
        return statuses if is_whole else None
    finally:
        os.unlink(path)


main()
