"""Whole runs of the bundled recipe, started like a user would, and their metrics."""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.training import QWEN3_1_7B, random_model
from forge_rl.engines.devices import gpus
from forge_rl.errors import ForgeError
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.run.live.attach import attach

_ROOMY = ("--trainer.seq-len", "4096", "--generator.max-num-seqs", "256", "--evaluation.every", "0")
_DEMO = ("--generator.max-tokens", "16", "--generator.max-model-len", "1024", *_ROOMY)
_EXPERTS: dict[str, object] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_REWARD = """def score(task, text):
    return sum(map(text.count, "aeiou")) / max(1, len(text))
"""
_KEPT = ("logprob_gap", "reward", "grad_norm", "utilisation", "tokens_per_s", "transition/", "seconds/", "memory")
"""Prefixes of metrics whose medians are kept."""
_WAIT_S = 600.0


def demo() -> dict[str, float]:
    """Run the demo on one device, shared by trainer and engine."""
    return _run("--steps", "10", "--placement", "colocated", *_DEMO)


def quantised() -> dict[str, float]:
    """Run the demo with engines that round each version to FP8, and correct for it."""
    rounded = ("--generator.quantization", "fp8", "--loss", "clipped:correction=tis")
    return _run("--steps", "10", "--placement", "colocated", *_DEMO, *rounded)


def large() -> dict[str, float]:
    """Run five steps on a random model of Qwen3-1.7B's shapes with the bundled model's tokenizer."""
    rows = ("--trainer.seq-len", "8192", "--generator.max-num-seqs", "256", "--evaluation.every", "0")
    return _random_run("qwen3", QWEN3_1_7B, "1024", *rows, "--groups-per-batch", "16", "--checkpoint-every", "5")


def experts() -> dict[str, float]:
    """Run five steps on a random mixture of 32 experts, 8 a token, whose routes the trainer replays."""
    return _random_run("qwen3_moe", _EXPERTS, "256", *_ROOMY, "--trainer.router-replay")


def _random_run(kind: str, shape: dict[str, object], tokens: str, *arguments: str) -> dict[str, float]:
    """Run five steps on a random model with the bundled model's tokenizer, with answers of a number of tokens."""
    with tempfile.TemporaryDirectory(prefix="forge_rl-model-") as scratch:
        folder = Path(scratch)
        special: dict[str, object] = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
        random_model(folder, shape | special, kind)
        bundled = resolve_model("smollm2-135m", default_cache())
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(bundled / name, folder / name)
        (folder / "vowels.py").write_text(_REWARD)
        lengths = ("--generator.max-tokens", tokens, "--generator.max-model-len", str(2 * int(tokens)))
        shared = ("--model", str(folder), "--reward", f"{folder / 'vowels.py'}:score", "--placement", "colocated")
        return _run("--steps", "5", *shared, *lengths, *arguments)


def sharded() -> dict[str, float]:
    """Run the demo with FSDP over all GPUs except the engine's."""
    return _run("--steps", "10", "--placement", "separate", "--trainer.ranks", str(gpus() - 1), *_DEMO)


def split() -> dict[str, float]:
    """Run the demo with context parallelism, and with tensor parallelism of 3 if there are enough GPUs."""
    shared = ("--steps", "5", "--placement", "colocated", *_DEMO)
    figures = {
        f"context_{name}": value for name, value in _run(*shared, "--trainer.context-parallel-degree", "2").items()
    }
    if gpus() > 2:  # the bundled model has 9 heads
        tensor = _run(*shared, "--trainer.tensor-parallel-degree", "3")
        figures |= {f"tensor_{name}": value for name, value in tensor.items()}
    return figures


def killed() -> dict[str, float]:
    """Kill the engine while the trainer has the device, then a rank, then the run, and resume it."""
    with tempfile.TemporaryDirectory(prefix="forge_rl-run-") as scratch:
        out = Path(scratch) / "run"
        arguments = ("--steps", "30", "--placement", "colocated", "--checkpoint-every", "3", *_DEMO)
        figures: dict[str, float] = {}
        with _running(out, *arguments) as process:
            _wait(process, lambda: _steps(out) >= 4)
            for service in ("generator", "trainer"):
                _wait(process, lambda: _phase(out) == "train")
                kill_time, step = time.monotonic(), _steps(out)
                _actor(process, service).kill()
                _wait(process, lambda step=step: _steps(out) >= step + 2)  # type: ignore[misc]
                figures[f"{service}_killed_to_two_steps_s"] = time.monotonic() - kill_time
            process.kill()
        last = _steps(out)
        resumed_figures = _run("--steps", str(last + 2), *arguments[2:], out=out)
        return figures | {f"continued_{name}": value for name, value in resumed_figures.items()}


def _run(*arguments: str, out: Path | None = None) -> dict[str, float]:
    """Run the recipe to its end; return medians of its metrics, without the first two steps."""
    with tempfile.TemporaryDirectory(prefix="forge_rl-run-") as scratch:
        folder = out or Path(scratch) / "run"
        began = time.monotonic()
        with _running(folder, *arguments) as process:
            if process.wait():
                raise RuntimeError(f"the run ended with {process.returncode}")
        # The first steps include compilation and warm-up.
        rows = [row for row in _rows(folder) if "updates" in row][2:]
        names = sorted({name for row in rows for name in row if name.startswith(_KEPT)})
        medians = {
            name: statistics.median(row[name] for row in rows if isinstance(row.get(name), float | int))
            for name in names
            if any(isinstance(row.get(name), float | int) for row in rows)
        }
        return {"whole_run_s": time.monotonic() - began} | medians


@contextlib.contextmanager
def _running(out: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the recipe in a separate process, which is killed at the end of the body."""
    command = [sys.executable, "-m", "recipes.grpo", "--out", str(out), "--display", "plain", *arguments]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not until():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the awaited condition did not occur within {_WAIT_S:g} s")
        time.sleep(0.05)


def _rows(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _steps(out: Path) -> int:
    return int(max((row["step"] for row in _rows(out)), default=0))


def _phase(out: Path) -> str:
    """Return a run's reported phase."""
    with contextlib.suppress(ForgeError):
        return str(attach(out).ask("status")["phase"])
    return ""


def _actor(process: subprocess.Popen[bytes], service: str) -> psutil.Process:
    """Find the first process of a service's first replica, by its log file."""
    processes = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            # Each replica's output goes to a log of its own, whose name tells the service.
            if Path(f"/proc/{child.pid}/fd/1").resolve().name.startswith(f"{service}-0."):
                processes.append((child.create_time(), child.pid))
    return psutil.Process(min(processes)[1])
