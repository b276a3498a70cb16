"""Seconds until an engine serves: the first of a run, another one, and the one that replaces a killed one.

python -m benchmarks.engine_start --json out.json

Each round is a process of its own, as a run is: it starts an engine, which imports vLLM (`cold_s`), stops it and starts
another (`warm_s`), kills that (`respawn_s`, until its successor serves), and before each round a fresh Python imports
vLLM's engine (`import_s`). `warm_over_imports` is the median of the rounds' ratios, `warm_s` over `import_s`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark

if TYPE_CHECKING:
    from forge_rl.runtime.faults import Faults
    from forge_rl.services.generator import Generator

_IMPORT = "from vllm.v1.engine.async_llm import AsyncLLM"
_DEADLINE_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure starts of an engine."""

    model: str = "smollm2-135m"
    """Bundled model name, folder, or hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the engine's weights."""
    repeats: int = LEAST_REPEATS
    """Number of rounds."""
    smoke: bool = False
    """One round: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        if not self.smoke:
            check_repeats(self.repeats)


def measure(config: Config, report: Report) -> None:
    """Run the rounds, each after an import of vLLM alone."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    rows: list[dict[str, float]] = []
    for number in range(1 if config.smoke else config.repeats + 1):
        begin = time.monotonic()
        _run("-c", _IMPORT)
        seconds = {"import_s": time.monotonic() - begin}
        output = _run("-m", "benchmarks.engine_start", "round", config.model, config.dtype)
        seconds |= json.loads(output.splitlines()[-1])
        print("  ".join(f"{name} {value:.2f}" for name, value in seconds.items()), flush=True)
        is_warm_up = number == 0 and not config.smoke
        report.rows.append({"warm_up": is_warm_up, **seconds})
        if not is_warm_up:
            rows.append(seconds)
    for name in ("import_s", "cold_s", "warm_s", "respawn_s"):
        report.measure(name, [row[name] for row in rows])
    report.measure("warm_over_imports", [row["warm_s"] / row["import_s"] for row in rows])


def _run(*words: str) -> str:
    """Run Python; return its output.

    Raises:
        BenchmarkError: it failed; quotes the end of its output.
    """
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"python {' '.join(words)} exited with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


async def _round(model: str, dtype: Literal["auto", "float32", "bfloat16"]) -> dict[str, float]:
    """Start, stop, start, kill and replace an engine; return the seconds."""
    from forge_rl.models.bundled import default_cache
    from forge_rl.models.resolve import resolve_model
    from forge_rl.runtime.cluster import Cluster
    from forge_rl.runtime.faults import Faults
    from forge_rl.services.generator import Generator
    from forge_rl.services.service_start import ServiceStart

    folder = resolve_model(model, default_cache())
    config = Generator.Config(replicas=1, dtype=dtype, max_model_len=1024, max_num_seqs=16, kv_cache_gib=0.5)
    seconds: dict[str, float] = {}
    # Twice in one process: the second start finds imports and files in caches.
    for name in ("cold_s", "warm_s"):
        with tempfile.TemporaryDirectory(prefix="engine-start-") as logs:
            cluster, faults = Cluster(Path(logs)), Faults()
            faults.install()
            begin = time.monotonic()
            start = ServiceStart(cluster=cluster, faults=faults, deadline_s=_DEADLINE_S)
            generator = await Generator.start(config, start, model=folder, seed=0)
            try:
                await generator.serve_model()
                seconds[name] = time.monotonic() - begin
                if name == "warm_s":
                    seconds["respawn_s"] = await _respawn(generator, faults)
            finally:
                faults.closing = True
                await generator.stop()
                await cluster.close()
    return seconds


async def _respawn(generator: Generator, faults: Faults) -> float:
    """Kill the engine; return the seconds until its successor serves."""
    recovery = asyncio.Event()
    faults.listeners.add(lambda fault: recovery.set() if fault.recovered_s is not None else None)
    (pid,) = generator._service.replicas[0].tree.roots
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(_DEADLINE_S):
        await recovery.wait()
    return time.monotonic() - begin


if __name__ == "__main__":
    if sys.argv[1:2] == ["round"]:
        print(json.dumps(asyncio.run(_round(sys.argv[2], sys.argv[3]))))  # type: ignore[arg-type]
    else:
        run_benchmark("engine_start", Config, measure)
