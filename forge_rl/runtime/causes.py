"""One-line causes of a replica's death, from Monarch's messages and the output of its processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from forge_rl.runtime.processes import describe_exit

_LOG_TAIL_BYTES = 1 << 16
_EXCEPTION = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt): \S.*)")
"""Last line of a traceback, possibly after a logger's prefix."""
_POINTER = re.compile(r"root cause|EngineDead|Engine core init")
"""vLLM exceptions that only point to another one."""


def last_error(log: Path) -> str:
    """Return the last exception in a log, ignoring those that only point to another one; "" if none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    found = (match[1] for line in reversed(lines) if (match := _EXCEPTION.search(line)))
    return next((error[:300] for error in found if not _POINTER.search(error)), "")


def cause_of(text: str, exit_meanings: Mapping[int, str] | None = None) -> str:
    """Extract a one-line cause from Monarch's message about a failure."""
    if found := re.search(r"Killed\(sig=(\d+)\)", text):
        return describe_exit(-int(found[1]))
    if found := re.search(r"exited with non-zero code (\d+)", text):
        return describe_exit(int(found[1]), exit_meanings)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "unknown"
