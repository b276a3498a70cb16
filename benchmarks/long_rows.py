"""Longest row that trains in 8 GiB, before and after chunking and recomputation; and planned versus peak memory.

python -m benchmarks.long_rows --json out.json

Each try is a process that takes an update on one long row once gradients and optimizer state are allocated. "Before" is
the same code with all logits at once, a dense mask, and no recomputation. A row fits if the process's peak resident
memory is within the limit. "After" takes long per try, so it begins with a row of --longest tokens, and looks for a
shorter one only if that does not fit; the maximum according to the plan is printed as well. Its time per token is
compared with the one of a row of 4,096 tokens. Rows of up to 4,096 tokens are measured --repeats times, and their
median is compared: what a CPU's heap wastes between its blocks differs from run to run.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.engines.factory import plan_training, train_environment
from forge_rl.engines.protocol import TrainSettings
from forge_rl.errors import check_flags
from forge_rl.run.plan.memory import PROCESS_BYTES

if TYPE_CHECKING:
    from transformers import LlamaConfig

_STEP = 128
_SHORT = 4096
"""Tokens of the row with which the time per token is compared."""
_CLOSE = 1.08
"""The search ends at this ratio of the shortest row that does not fit to the longest that does."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Find the longest row that trains, and compare the plan with the peak."""

    gib: float = 8.0
    """Memory limit of the process, in GiB."""
    layers: int = 30
    """Layers of the model, which otherwise has SmolLM2-135M's shape."""
    after: str = "full"
    """Activation checkpointing of "after"."""
    longest: int = 40_960
    """Longest row to try, in tokens."""
    longest_before: int = 1 << 20
    """Longest row to try in the search of "before", in tokens."""
    small: int = 1024
    """Tokens of the rows on which the plan is compared, in addition to the long ones."""
    repeats: int = 3
    """Times that each row of up to 4,096 tokens is measured."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"layers": 1, "longest_before": max(_STEP, self.small)})
        if self.repeats < 1:
            raise BenchmarkError(f"--repeats is {self.repeats}", hint="set it to 1 or more")
        if min(self.longest, self.small) < _STEP or self.after not in ("none", "selective", "full"):
            raise BenchmarkError(
                f"nothing to find with --longest {self.longest}, --small {self.small}, --after {self.after}",
                hint=f"set --longest and --small to {_STEP} or more, --after to none, selective or full",
            )


def measure(config: Config, report: Report) -> None:
    """Search both, and compare each try of "after" with the plan."""
    limit = round(config.gib * 2**30)
    with tempfile.TemporaryDirectory(prefix="forge_rl-rows-") as scratch:
        model = Path(scratch)
        _make_model(model, config.layers)

        def planned(mode: str, tokens: int) -> int:
            settings = TrainSettings(dtype="float32", seq_len=tokens)
            settings = replace(settings, activation_checkpointing=mode)  # type: ignore[arg-type]
            return plan_training(model, settings, ranks=1, reference=False).total

        plan_itself = planned(config.after, config.small)
        process = PROCESS_BYTES
        errors: list[float] = []
        peaks: dict[tuple[str, int], float] = {}
        seconds: dict[tuple[str, int], float] = {}

        def peak(mode: str, tokens: int) -> float:
            times = config.repeats if mode != "before" and tokens <= _SHORT else 1
            attempts = sorted(
                (_try(model, mode, tokens, limit) for _ in range(times)), key=lambda attempt: attempt["peak"]
            )
            attempt = attempts[times // 2]
            if attempt["peak"] == float("inf"):
                print(f"{mode}, {tokens} tokens: does not fit by far", flush=True)
                report.rows.append({"how": mode, "tokens": tokens, "peak": None})
                return attempt["peak"]
            row: dict[str, object] = {"how": mode, "tokens": tokens, **attempt}
            line = f"{mode}, {tokens} tokens: peak {attempt['peak'] / 2**30:.2f} GiB in {attempt['seconds']:.0f} s"
            if mode != "before":
                expected = process + planned(mode, tokens)
                errors.append(abs(expected - attempt["peak"]) / attempt["peak"])
                row |= {"planned": expected, "lowest": attempts[0]["peak"], "highest": attempts[-1]["peak"]}
                line += f", planned {expected / 2**30:.2f} GiB ({expected / attempt['peak'] - 1:+.1%})"
            report.rows.append(row)
            print(line, flush=True)
            peaks[mode, tokens], seconds[mode, tokens] = attempt["peak"], attempt["seconds"]
            return attempt["peak"]

        for mode in ("none", "selective", "full"):
            peak(mode, config.small)
        before = _longest(
            lambda tokens: peak("before", tokens), limit, first=config.small, max_tokens=_rounded(config.longest_before)
        )
        max_tokens = _rounded(config.longest)
        peak(config.after, _SHORT)
        after = _longest(lambda tokens: peak(config.after, tokens), limit, first=max_tokens, max_tokens=max_tokens)
        slope = (planned(config.after, 2 * max_tokens) - planned(config.after, max_tokens)) / max_tokens
        report.results |= {
            "longest_over_before": after / before,
            "plan_error": max(errors),
            "token_time_over_4096": (seconds[config.after, after] / after) / (seconds[config.after, _SHORT] / _SHORT),
            "longest_before_tokens": float(before),
            "longest_after_tokens": float(after),
            "peak_before_gib": peaks["before", before] / 2**30,
            "seconds_after": seconds[config.after, after],
            "peak_after_gib": peaks[config.after, after] / 2**30,
            "longest_after_tokens_planned": max_tokens + (limit - process - planned(config.after, max_tokens)) / slope,
            "planned_state_gib": plan_itself / 2**30,
        }


def _longest(peak: Callable[[int], float], limit: int, *, first: int, max_tokens: int) -> int:
    """Return the longest row found within the limit, at most `max_tokens`; assumes that peaks grow with the tokens."""
    peaks: dict[int, float] = {}
    tokens = first
    while True:
        peaks[tokens] = peak(tokens)
        fits = max((size for size in peaks if peaks[size] <= limit), default=0)
        too_long = min((size for size in peaks if peaks[size] > limit), default=max_tokens + _STEP)
        if fits >= max_tokens or (fits and too_long / fits <= _CLOSE) or too_long <= _STEP:
            if not fits:
                raise BenchmarkError(f"no row trains in {limit} bytes", hint="raise --gib")
            return fits
        finite = sorted(size for size in peaks if peaks[size] < float("inf"))
        if len(finite) > 1:
            (a, b) = finite[-2:]
            # Peaks are nearly linear in the tokens: the next try is where the line through the two longest meets the
            # limit.
            guess = a + (0.98 * limit - peaks[a]) * (b - a) / (peaks[b] - peaks[a])
        else:
            guess = tokens * (2 if fits else 0.6)
        tokens = min(max(_rounded(guess), fits + _STEP), too_long - _STEP, max_tokens)
        if tokens <= fits:
            return fits


def _rounded(tokens: float) -> int:
    return max(_STEP, int(tokens // _STEP) * _STEP)


def _try(model: Path, mode: str, tokens: int, limit: int) -> dict[str, float]:
    """Run one update in its own process; the peak is infinite if it requested 1.5 times the limit."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.long_row", str(model), mode, str(tokens)],
        env=os.environ | train_environment(1),
        # A try far beyond the limit fails early instead of filling the machine's memory.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit * 3 // 2, limit * 3 // 2)),
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return result
    if "allocate memory" in done.stderr or "MemoryError" in done.stderr:
        return {"peak": float("inf"), "seconds": 0.0}
    raise BenchmarkError(f"a row of {tokens} tokens, {mode}: {done.stderr[-500:]}", hint="see its output")


def _make_model(folder: Path, layers: int) -> None:
    """Write a random model with SmolLM2-135M's shape and `layers` layers."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(write_config(folder, layers)).to(torch.bfloat16).save_pretrained(folder)


def write_config(folder: Path, layers: int) -> LlamaConfig:
    """Write the config of a model with SmolLM2-135M's shape and `layers` layers."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return config


if __name__ == "__main__":
    run_benchmark("long_rows", Config, measure)
