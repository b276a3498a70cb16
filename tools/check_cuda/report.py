"""Figures of a check: printed, and written to a file where one is named, as `python -m tools.check_cuda` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def report(figures: Mapping[str, object], failures: Sequence[str] = ()) -> int:
    """Print figures and failures, write the figures to the file that the command line names, and return the status."""
    for name, value in figures.items():
        print(f"{name}: {value}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(figures))
    for failure in failures:
        print(f"FAILED {failure}")
    return int(bool(failures))
