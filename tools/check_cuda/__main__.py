"""Checks as much of the CUDA path as a machine without a GPU can, part by part; continues after failures.

python -m tools.check_cuda
python -m tools.check_cuda forward kernels

Runs in the CUDA environment, which `make check-cuda` installs first. Each part is a process with a time limit, and can
be run alone: `python -m tools.check_cuda.forward`. Nothing here runs on a GPU, even if there is one, so it cannot check
the speed and results of kernels, backward passes, NCCL, or memory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.runner import Outcome, Part, run_parts, table


def _module(name: str, says: str, limit_s: float) -> Part:
    command = (sys.executable, "-m", f"tools.check_cuda.{name}", "{json}")
    return Part(name=name, says=says, command=command, needs=(), limit_s=limit_s)


PARTS: Sequence[Part] = (
    _module("imports", "all modules import: ours, and what they use of the stack", 900.0),
    _module("config", "vLLM's configuration resolves on an H200 for all families, with one compile hash", 900.0),
    _module("forward", "the trainer's forward pass of all families and layouts on fake tensors", 1800.0),
    _module("masks", "rows of many lengths take fewer graphs of attention than we allow", 1800.0),
    _module("kernels", "the sampler's Triton kernels compile for sm_90", 900.0),
    Part(
        name="check",
        says="lint, types and the tests that start no services",
        command=("make", "check", "EXTRA=cuda", f"VENV={sys.prefix}", "MACHINE=--without-driver"),
        needs=(),
        limit_s=3600.0,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, printing a line as each one ends and a table at the end; return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.check_cuda", description=(__doc__ or "").split("\n")[0])
    names = [part.name for part in PARTS]
    listed = "; ".join(f"{part.name}: {part.says}" for part in PARTS)
    parser.add_argument("parts", nargs="*", choices=[*names, []], default=[], metavar="PART", help=listed)
    only = parser.parse_args(arguments).parts or names
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print("no GPU is used: this shows what holds without one", flush=True)

    def tell(outcome: Outcome) -> None:
        print(f"{outcome.part}: {outcome.status} after {outcome.seconds:.0f} s", flush=True)
        if outcome.said:
            print(outcome.said, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_parts([part for part in PARTS if part.name in only], (), Path(folder), tell)
    print(table(outcomes))
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
