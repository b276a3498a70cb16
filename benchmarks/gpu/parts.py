"""The parts, in order of importance: torch only, the trainer, engines, whole runs.

python -m benchmarks.gpu.parts NAME FILE runs a function part and writes its figures.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu.runner import Part

_TRAINER = ("gpu", "torch", "torchtitan", "transformers")
_STACK = (*_TRAINER, "vllm", "monarch")


def _function(name: str, says: str, needs: tuple[str, ...], limit_s: float = 300.0) -> Part:
    module, _, function = name.partition(".")
    command = (sys.executable, "-m", "benchmarks.gpu.parts", f"benchmarks.gpu.{module}.{function}", "{json}")
    return Part(name=name.replace(".", "_"), says=says, command=command, needs=needs, limit_s=limit_s)


def _tests(name: str, says: str, *arguments: str, needs: tuple[str, ...] = (), limit_s: float = 300.0) -> Part:
    command = (sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *arguments)
    return Part(name=name, says=says, command=command, needs=("gpu", "torch", "pytest", *needs), limit_s=limit_s)


def _benchmark(module: str, says: str, *arguments: str, needs: tuple[str, ...], limit_s: float) -> Part:
    command = (sys.executable, "-m", f"benchmarks.{module}", "--json", "{json}", *arguments)
    return Part(name=module, says=says, command=command, needs=needs, limit_s=limit_s)


PARTS: tuple[Part, ...] = (
    _function("device.copies", "GB/s to and from the host: pageable, pinned, registered, read-only", ("gpu", "torch")),
    _function("device.products", "bfloat16 FLOP/s of matrix products, the baseline of MFU", ("gpu", "torch")),
    _tests("weights_tests", "fingerprints and segments", "tests/gpu/test_weights_cuda.py"),
    _tests("model_tests", "the head and attention", "tests/gpu/test_titan_cuda.py", needs=("torchtitan",)),
    _tests("trainer_tests", "step, offload, checkpoint", "tests/gpu/test_trainer_cuda.py", needs=_TRAINER[2:]),
    _function("device.attention", "graphs of FlexAttention over rows of many lengths", _TRAINER, 600.0),
    _function("training.small", "an update of a small model", _TRAINER),
    _function("training.large", "Qwen3-1.7B's shapes, rows of 8,192 tokens: tokens/s, MFU, peak", _TRAINER, 900.0),
    _tests("engine_tests", "start, load, sleep, wake", "tests/gpu/test_engine_cuda.py", needs=_STACK[2:], limit_s=600),
    _function("serving.engine", "an engine: starts, loads, sleep, wake, tokens/s, a kill", _STACK, 900.0),
    _benchmark("weights", "a version from trainer to readers", needs=_STACK, limit_s=600),
    _function("runs.demo", "the demo, colocated: gap, transitions, phases", _STACK, 900.0),
    _function("runs.killed", "an engine and a rank killed while the trainer has the device; resumed", _STACK, 1200.0),
    _function("runs.quantised", "the demo with rollouts in FP8: gap, reward", _STACK, 900.0),
    _function("runs.experts", "a run on a mixture of experts, with router replay", _STACK, 900.0),
    _benchmark("numerics", "engine and trainer in each format, and batch-invariant", needs=_STACK, limit_s=900),
    _benchmark("speculation", "seconds and tokens of batches with and without drafts", needs=_STACK, limit_s=900),
    _function("runs.large", "a run on Qwen3-1.7B's shapes with rows of 8,192 tokens", _STACK, 1200.0),
    _tests("contexts", "no rank uses memory on another's GPU", "tests/gpu/test_ranks_cuda.py", needs=("gpus",)),
    _function("runs.sharded", "the demo with the trainer on all GPUs but one", (*_STACK, "gpus"), 900.0),
    _function("runs.split", "the demo with tensor and context parallelism on two GPUs", (*_STACK, "gpus"), 900.0),
    _benchmark("recovery", "an engine killed in a rollout", needs=(*_STACK, "gpus"), limit_s=900),
    _tests(
        "check", "the tests that start no services", "-m", "not processes and not long", needs=_STACK[2:], limit_s=1800
    ),
)


def main(name: str, path: Path) -> None:
    """Run a function and write the figures that it returns."""
    module, _, function = name.rpartition(".")
    figures = getattr(importlib.import_module(module), function)()
    path.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
