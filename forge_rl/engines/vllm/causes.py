"""Finds the line in vLLM's errors and logs that says why it failed to start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

_TAIL_BYTES = 256 << 10
_EMPTY = ("For further information visit", "Traceback", "Process ", "[rank")
_ELSEWHERE = ("See root cause above", "See stack trace", "Engine core initialization failed", "Executor failed")
"""Phrases in lines that only point to a cause reported elsewhere."""
_RAISED = re.compile(r"\b(\w{1,60}(?:Error|Exception|Interrupt)): (.{1,2000})")


def start_cause(error: BaseException, log: str = "") -> str:
    """Return the reason why vLLM did not start, as one line.

        start_cause(error, own_log())  # "max_model_len (99999) is greater than the derived max_model_len ..."

    Args:
        error: raised by vLLM; its causes are searched first.
        log: output of the process, where vLLM's child processes print errors that the exception omits.
    """
    for cause in _chain(error):
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        messages = [
            line for line in lines if not line.startswith(_EMPTY) and not any(word in line for word in _ELSEWHERE)
        ]
        # pydantic's first line counts errors and names a class, the second says what is wrong.
        values = [line.removeprefix("Value error, ") for line in messages if line.startswith("Value error, ")]
        if values or messages:
            return (values or messages[-1:])[0].split(" [type=", 1)[0]
    # The exception only says that a child process failed: the last error in the log is the child's.
    for line in reversed(log.splitlines()):
        match = _RAISED.search(line)
        if match and not any(word in line for word in _ELSEWHERE):
            return f"{match[1]}: {match[2]}".strip()
    return type(error).__name__


def own_log() -> str:
    """Return the end of the output of this process and its children, or "" if it does not go to a file."""
    try:
        with open("/proc/self/fd/2", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, root cause first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    return reversed(chain)
