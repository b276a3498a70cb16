"""Runs all GPU benchmarks that a machine supports, part by part, and continues after failures.

python -m benchmarks.gpu --json benchmarks/gpu/h200.json
python -m benchmarks.gpu --only device_copies training_large --json out.json

Detects what the machine has: with torch it measures copies, kernels and attention; with torchtitan, the trainer; with
vLLM and Monarch, engines and whole runs; with several GPUs, layouts and memory per GPU. Each part is a separate process
with a time limit. The file always holds the results so far. Needs only Python itself; each part declares its needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.machine import describe, has
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.runner import Outcome, run_parts, table
from forge_rl.system.streams import outlive_readers


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the file; return 1 if a part failed."""
    outlive_readers()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file for the figures; logs go next to it")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="PART", help=", ".join(names))
    flags = parser.parse_args(arguments)
    about, outcomes = describe(), list[Outcome]()
    folder = flags.json.with_suffix(".logs")
    folder.mkdir(exist_ok=True)
    for old_file in folder.iterdir():  # so that a failed part does not show old figures
        old_file.unlink()
    print(json.dumps(about, indent=1), f"logs are in {folder}", sep="\n", flush=True)

    # Written after each part: a machine that is lent may be taken back at any time.
    def tell(outcome: Outcome) -> None:
        outcomes.append(outcome)
        write(flags.json, {**about, "parts": [dataclasses.asdict(outcome) for outcome in outcomes]})
        print(table([outcome]).partition("\n")[2], flush=True)

    run_parts([part for part in PARTS if part.name in flags.only], has(), folder, tell)
    print(table(outcomes), f"wrote {flags.json}", sep="\n")
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def write(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main())
