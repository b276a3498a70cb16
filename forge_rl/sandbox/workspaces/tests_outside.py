"""Runs tests in a session, and keeps the outcomes they report out of their reach.

Sent to a session as text. Imports nothing of this library, and nothing of the workspace.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Sequence

_MOST_BYTES = 1 << 22
_POLL_MS = 50


class Outcomes:
    """Reads the reports of the tests' process: each test's start, which gets a token, then its outcome with that token.

    A report is final: a failure never becomes a success, and a line out of order spoils all outcomes.
    """

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}
        self.spoiled = False
        self._running = self._token = ""
        self._rest, self._bytes = b"", 0

    def add(self, data: bytes) -> bytes:
        """Read reports, and return the answers to them."""
        self._bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.spoiled |= self._bytes > _MOST_BYTES
        return b"".join(self._answer(line) for line in lines if not self.spoiled)

    def _answer(self, line: bytes) -> bytes:
        try:
            outcome, test, token = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            outcome = test = token = None
        if not (isinstance(outcome, str) and isinstance(test, str) and isinstance(token, str)):
            self.spoiled = True
        elif outcome == "start":
            self.spoiled |= bool(self._running)
            self._running, self._token = test, secrets.token_hex(16)
            return self._token.encode()
        elif token:
            self.spoiled |= (test, token) != (self._running, self._token)
            self._keep(test, outcome)
            self._running = self._token = ""
        else:  # a file that could not be collected, which needs no token
            self.spoiled |= outcome != "failed"
            self._keep(test, "failed")
        return b""

    def _keep(self, test: str, outcome: str) -> None:
        # A failure is final.
        if self.by_test.get(test) != "failed":
            self.by_test[test] = outcome


def run(command: Sequence[str], results: str = "") -> int:
    """Run a command and return its status. Then nothing that it has started in this session is left.

    Args:
        results: file for the outcomes by test, as JSON. The command then gets two descriptors as its last arguments:
            one to report to, and one with the answers. Empty for a command that reports nothing.
    """
    (reports, tells), (hears, answers) = os.pipe(), os.pipe()
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    descriptors = (tells, hears) if results else ()
    process = subprocess.Popen(
        [*command, *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        pass_fds=descriptors,
        env=environment,
    )
    os.close(tells)
    try:
        outcomes = _outcomes(process, reports, answers)
        status = process.wait()
    except BaseException:
        process.kill()
        raise
    with contextlib.suppress(ProcessLookupError):
        # Before the outcomes are written, as what the tests left running could write to the file.
        os.kill(-1, signal.SIGKILL)
    if results:
        with open(results, "w") as file:
            json.dump({} if outcomes.spoiled else outcomes.by_test, file)
    return status


def _outcomes(process: subprocess.Popen[bytes], reports: int, answers: int) -> Outcomes:
    """Listen to a process until it ends, closes its descriptor, or breaks the protocol and is killed."""
    os.set_blocking(reports, False)
    os.set_blocking(answers, False)
    outcomes, poll = Outcomes(), select.poll()
    poll.register(reports, select.POLLIN)
    while not outcomes.spoiled:
        ended = process.poll() is not None  # looked at first, so that what it told before its end is read
        poll.poll(0 if ended else _POLL_MS)
        try:
            data = os.read(reports, 1 << 16)
        except BlockingIOError:
            if ended:
                return outcomes
            continue
        if not data:  # nobody has the other end
            return outcomes
        try:
            os.write(answers, outcomes.add(data))
        except BlockingIOError:  # it asks and does not listen
            outcomes.spoiled = True
    process.kill()
    return outcomes
