"""Numerics of engines: whether a completion depends on its batch, and the gap to the trainer, in each format.

python -m benchmarks.numerics --json out.json

For each format, a real engine decodes the same seeded completions one at a time, one at a time again, and all at once.
`repeat_equal` and `batch_equal` are the shares of completions whose tokens and logprobs are bitwise the same as the
first time; with a batch-invariant engine, both are 1. `batch_gap` is the largest difference of a logprob up to where
tokens differ.

The trainer then scores the completions, in float32 and in bfloat16, with weights that are not rounded. `mean_gap` and
`max_gap` are of |trainer logprob - engine logprob|, `equal` is the share of tokens where it is 0, and `ess` what the
corrected ratio is worth: the effective sample size of tokens weighted by trainer probability / engine probability, as a
share of their number.

invariant is bfloat16 on a batch-invariant engine. int8 and fp8 are models of compressed-tensors: a scale for each
output of a linear layer, and for each token's input. Where vLLM has no kernel for the processor, the row has its
reason.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.real_engines import serving
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.engines.platform import init_distributed
from forge_rl.engines.protocol import Dtype, TrainSettings
from forge_rl.errors import ConfigError, ModelError
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, Row
from forge_rl.services.generator import Generator
from forge_rl.types import Batch, Episode, Group, Sampling, Task, Turn

Format = Literal["float32", "bfloat16", "invariant", "int8", "fp8"]
_TRAINERS: tuple[Dtype, ...] = ("float32", "bfloat16")
_TASK = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))
_PROMPT_TOKENS = 16
"""Less than a block of the prefix cache, so that nothing is read from it."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure the numerics of engines and trainer."""

    model: str = "smollm2-135m"
    """Bundled model name, folder, or hub id."""
    formats: tuple[Format, ...] = ("float32", "bfloat16", "invariant", "int8", "fp8")
    """Formats of the engines' weights and linear layers; activations of int8 and fp8 are otherwise in bfloat16.
    invariant: bfloat16 with batch-invariant kernels."""
    completions: int = 32
    """Number of completions."""
    tokens: int = 64
    """Tokens per completion."""

    def __post_init__(self) -> None:
        if self.completions < 2 or not 1 <= self.tokens <= 400 or not self.formats:
            raise BenchmarkError("there is nothing to compare", hint="raise --completions, --tokens or --formats")


def measure(config: Config, report: Report) -> None:
    """Decode in each format, score, and print a table."""
    model = resolve_model(config.model, default_cache()).resolve()
    decoded: dict[Format, list[Turn]] = {}
    for kind in config.formats:
        with tempfile.TemporaryDirectory(prefix="numerics-") as name:
            folder = _quantized(model, Path(name) / "model", kind) if kind in ("int8", "fp8") else model
            try:
                first, repeated, together = asyncio.run(_decode(folder, kind, config))
            except (ConfigError, ModelError) as error:  # vLLM has no kernel
                report.rows.append({"engine": kind, "refused": error.message.splitlines()[0][:300]})
                continue
        decoded[kind] = first
        figures = {
            "repeat_equal": _share_equal(first, repeated),
            "batch_equal": _share_equal(first, together),
            "batch_gap": _largest_difference(first, together),
        }
        report.rows.append({"engine": kind, **figures})
        report.results |= {f"{name}_{kind}": value for name, value in figures.items()}
    if not decoded:
        raise BenchmarkError("vLLM runs in none of the formats here", hint="add float32 to --formats")
    init_distributed(0, 1, "127.0.0.1", 0)
    for trainer in _TRAINERS:
        for kind, gaps in _gaps(model, trainer, decoded).items():
            figures = _summary(gaps)
            report.rows.append({"engine": kind, "trainer": trainer, **figures})
            report.results |= {f"{name}_{kind}_{trainer}": value for name, value in figures.items()}
    torch.distributed.destroy_process_group()
    for table in _tables(report):
        Console(highlight=False).print(table)


def _quantized(model: Path, folder: Path, kind: Format) -> Path:
    """Write a model as llm-compressor does, with its linear layers but the head in int8 or E4M3; return the folder."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    dtype, largest = (torch.int8, 127.0) if kind == "int8" else (torch.float8_e4m3fn, 448.0)
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            if name.endswith("_proj.weight"):
                # One scale for each output: its largest weight becomes the largest number of the format.
                scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
                scaled = (weight.float() / scale).clamp(-largest, largest)
                weights[name] = (scaled.round() if kind == "int8" else scaled).to(dtype)
                weights[f"{name}_scale"] = scale
            else:
                weights[name] = weight
    save_file(weights, folder / "model.safetensors")
    scheme = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": scheme | {"strategy": "channel", "dynamic": False},
        "input_activations": scheme | {"strategy": "token", "dynamic": True},
    }
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


async def _decode(folder: Path, kind: Format, config: Config) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Return the same completions decoded one at a time, one at a time again, and all at once."""
    settings = Generator.Config(
        dtype="float32" if kind == "float32" else "bfloat16",
        max_model_len=512,
        max_tokens=config.tokens,
        kv_cache_gib=0.5,
        gpu_memory_utilization=0.3,
        batch_invariant=kind == "invariant",
    )
    drawn = np.random.default_rng(0)
    async with serving(settings, folder) as generator:
        top = generator.tokenizer.vocab_size
        prompts = [drawn.integers(3, top, _PROMPT_TOKENS, dtype=np.int32) for _ in range(config.completions)]

        async def complete(index: int) -> Turn:
            return await generator.generate(prompts[index], Sampling(max_tokens=config.tokens, seed=index))

        alone = [[await complete(index) for index in range(config.completions)] for _ in range(2)]
        together = await asyncio.gather(*map(complete, range(config.completions)))
    return alone[0], alone[1], list(together)


def _share_equal(first_turns: Sequence[Turn], second_turns: Sequence[Turn]) -> float:
    """Return the share of completions with the same tokens and bitwise the same logprobs."""
    equal = [
        np.array_equal(first.token_ids, second.token_ids) and first.logprobs.tobytes() == second.logprobs.tobytes()
        for first, second in zip(first_turns, second_turns, strict=True)
    ]
    return sum(equal) / len(equal)


def _largest_difference(first_turns: Sequence[Turn], second_turns: Sequence[Turn]) -> float:
    """Return the largest difference between logprobs of tokens that follow the same tokens and are the same."""
    largest = 0.0
    for first, second in zip(first_turns, second_turns, strict=True):
        length = min(len(first.token_ids), len(second.token_ids))
        # Once tokens differ, their logprobs are of different contexts, and say nothing about rounding.
        differs = np.flatnonzero(first.token_ids[:length] != second.token_ids[:length])
        common_length = int(differs[0]) if len(differs) else length
        gaps = np.abs(first.logprobs[:common_length] - second.logprobs[:common_length])
        largest = max(largest, float(gaps.max(initial=0.0)))
    return largest


def _gaps(model: Path, trainer: Dtype, decoded: dict[Format, list[Turn]]) -> dict[Format, torch.Tensor]:
    """Return trainer logprob - engine logprob of all tokens, for each format of the engine."""
    from forge_rl.engines.titan.train import TitanEngine

    engine = TitanEngine(model, TrainSettings(dtype=trainer, seq_len=1024))
    return {
        kind: torch.cat(
            [(engine.logprobs([row], temperature=1.0)[0] - row.behaviour)[row.mask].double() for row in _rows(turns)]
        )
        for kind, turns in decoded.items()
    }


def _rows(turns: Sequence[Turn]) -> tuple[Row, ...]:
    """Pack completions into rows that score all of their tokens."""
    episodes = tuple(Episode(task=_TASK, turns=(turn,)) for turn in turns)
    signs = torch.tensor([[(-1.0) ** index for index in range(len(episodes))]])
    batch = Batch(groups=(Group(task=_TASK, episodes=episodes),), version=0)
    return pack(batch, signs, Layout(seq_len=1024)).rows


def _summary(gaps: torch.Tensor) -> dict[str, float]:
    ratios = gaps.exp()
    return {
        "mean_gap": float(gaps.abs().mean()),
        "max_gap": float(gaps.abs().max()),
        "equal": float((gaps == 0).double().mean()),
        # ESS / n = (sum w)^2 / (n sum w^2).
        "ess": float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())),
    }


def _tables(report: Report) -> list[Table]:
    """Return a table of the engines, and one of the gaps to the trainer."""
    engines = Table(
        "engine", "equal again", "equal in a batch", "largest difference", title="engines", title_justify="left"
    )
    gaps = Table(
        "engine", "trainer", "mean gap", "max", "equal", "ess", title="gap to the trainer", title_justify="left"
    )
    for row in report.rows:
        values = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        if "refused" in row:
            engines.add_row(values[0], values[1])
        else:
            (gaps if "trainer" in row else engines).add_row(*values)
    return [engines, gaps]


if __name__ == "__main__":
    run_benchmark("numerics", Config, measure)
