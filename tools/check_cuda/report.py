"""Prints a check's figures, and writes them to a file if the command line names one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def report(figures: Mapping[str, object], failures: Sequence[str] = ()) -> int:
    """Print figures and failures, write the figures to the file `sys.argv[1]`, if any, and return the exit status."""
    for name, value in figures.items():
        print(f"{name}: {value}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(figures))
    for failure in failures:
        print(f"FAILED {failure}")
    return int(bool(failures))
