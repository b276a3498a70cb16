"""Measure the seconds of a publish and a load by part, with a trainer and an engine, and fit a cost model to them.

python -m benchmarks.weights_model --json out.json --costs forge_rl/forecast/version_costs.json

Runs GRPO on Llamas of several sizes with SmolLM2's tokenizer, from 25 MB to 2 GB in float32, and times each publish and
load from the end of the optimizer step to serving. Each size is predicted from a fit to the other sizes alone.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.algorithms.advantages import group_advantages
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.platform import resolve_dtype
from forge_rl.forecast.probe import this_device
from forge_rl.forecast.transfer import LOAD, PARTS, PUBLISH, PartCost, VersionCosts
from forge_rl.models.bundled import bundled_model, default_cache
from forge_rl.packing.pack import pack
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.run.run_config import RunConfig
from forge_rl.run.start.starting import start
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.trainer_config import TrainerConfig
from forge_rl.services.weight_store_config import WeightStoreConfig
from forge_rl.types import Task


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """Dimensions of a Llama; head size, vocabulary and tokenizer are SmolLM2's."""

    layers: int
    heads: int
    kv_heads: int
    hidden_dim: int

    @property
    def config(self) -> dict[str, int]:
        return {
            "hidden_size": 64 * self.heads,
            "intermediate_size": self.hidden_dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 64,
        }


SHAPES = {
    "flat": _Shape(layers=1, heads=3, kv_heads=1, hidden_dim=512),
    "tiny": _Shape(layers=2, heads=2, kv_heads=1, hidden_dim=384),
    "deep": _Shape(layers=60, heads=2, kv_heads=1, hidden_dim=384),
    "135m": _Shape(layers=30, heads=9, kv_heads=3, hidden_dim=1536),
    "wide": _Shape(layers=12, heads=16, kv_heads=4, hidden_dim=2816),
    "half_b": _Shape(layers=32, heads=18, kv_heads=6, hidden_dim=3072),
}
"""Sizes by name: few and many tensors with few bytes, and the other way round. Two are small, so that either
can be predicted without the other. 135m has the bundled model's shape."""
_SMOKE = ("tiny", "deep", "135m")


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure publishing and loading by part, and predict each size from the others."""

    repeats: int = 7
    """Versions of each size that count."""
    warm_up: int = 3
    """Versions before them: fresh shared memory is slow to touch."""
    costs: Path | None = None
    """File to write the fitted costs to, from which plans predict: forge_rl/forecast/version_costs.json."""
    smoke: bool = False
    """Three sizes, one repeat: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        if not self.smoke:
            check_repeats(self.repeats)
        if self.warm_up < 1:
            raise BenchmarkError(f"--warm-up is {self.warm_up}", hint="set --warm-up to 1 or more")


@dataclass(frozen=True, kw_only=True)
class MeasuredVersion:
    """A version of one size of model, and median seconds of each of `PARTS`."""

    size: float
    """Bytes."""
    tensors: float
    parts: dict[str, float]

    def seconds(self, phase: str) -> float:
        """Return the sum of a phase's parts: "publish", "load", or "total" for both."""
        return sum(value for name, value in self.parts.items() if phase == "total" or name.startswith(phase))


def measure(config: Config, report: Report) -> None:
    """Measure each size, fit the costs of parts, and predict each size from a fit to the others."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    names = _SMOKE if config.smoke else tuple(SHAPES)
    rates = [_copied_bytes_per_s()]
    sizes: dict[str, MeasuredVersion] = {}
    for name in names:
        sizes[name] = asyncio.run(_measure_size(name, config, report))
        rates.append(_copied_bytes_per_s())
    bandwidth = statistics.harmonic_mean(rates)
    report.results["copy_gb_s"] = bandwidth / 1e9
    for name, size in sizes.items():
        report.results |= {f"tensors_{name}": size.tensors, f"mb_{name}": size.size / 1e6}
        report.results |= {f"{part}_s_{name}": seconds for part, seconds in size.parts.items()}
        other_sizes = [sizes[key] for key in names if key != name]
        predicted = predictions(other_sizes, size, bandwidth)
        for phase, seconds in predicted.items():
            report.results[f"{phase}_s_{name}"] = size.seconds(phase)
            report.results[f"{phase}_predicted_s_{name}"] = seconds
            report.results[f"{phase}_predicted_over_measured_{name}"] = seconds / size.seconds(phase)
    source = f"{report.command} (commit {report.commit}, {report.date}, {report.machine['cpu']})"
    costs = costs_of(list(sizes.values()), bandwidth, source)
    if config.costs is not None:
        costs.write(config.costs)
    for part, cost in costs.parts.items():
        report.results |= {
            f"{part}_call_ms": 1e3 * cost.call_s,
            f"{part}_tensor_us": 1e6 * cost.tensor_s,
            f"{part}_passes": cost.memory,
        }


def predictions(other_sizes: Sequence[MeasuredVersion], size: MeasuredVersion, bandwidth: float) -> dict[str, float]:
    """Predict a size's seconds of a publish, of a load, and of both ("total"), from costs fitted to the other sizes."""
    costs = costs_of(other_sizes, bandwidth, "")
    seconds = {
        part: cost.call_s + cost.tensor_s * size.tensors + cost.memory * size.size / bandwidth
        for part, cost in costs.parts.items()
    }
    predicted = MeasuredVersion(size=size.size, tensors=size.tensors, parts=seconds)
    return {phase: predicted.seconds(phase) for phase in ("publish", "load", "total")}


def costs_of(sizes: Sequence[MeasuredVersion], bandwidth: float, source: str) -> VersionCosts:
    """Fit the cost of each part to measured sizes; bytes count in passes through memory at `bandwidth`."""
    parts = {}
    for part in PARTS:
        seconds = [max(size.parts[part], 1e-9) for size in sizes]
        call_s, tensor_s, byte_s = fit_cost([size.tensors for size in sizes], [size.size for size in sizes], seconds)
        parts[part] = PartCost(call_s=call_s, tensor_s=tensor_s, memory=byte_s * bandwidth)
    return VersionCosts(parts=parts, source=source, shared=True)


def fit_cost(tensors: Sequence[float], size: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit `call_s + tensors * tensor_s + size * byte_s` to measured seconds.

    Minimises the sum of squared relative errors over coefficients that are not negative, by solving least squares for
    every subset of the three columns and taking the best solution without a negative coefficient.

    Args:
        tensors, size: number and bytes of each measured version's tensors.
        seconds: seconds of each measured version, above 0.

    Returns:
        `call_s`, `tensor_s` and `byte_s`.
    """
    measured = np.asarray(seconds, np.float64)
    columns = np.stack([np.ones_like(measured), np.asarray(tensors, np.float64), np.asarray(size, np.float64)], axis=1)
    # Divided by the measured seconds, so that errors are relative and small versions count as much as large ones.
    relative: npt.NDArray[np.float64] = columns / measured[:, None]
    # Bytes and tensors differ by many orders of magnitude; scaled columns keep least squares well conditioned.
    scale = np.abs(relative).max(axis=0)
    best, smallest_error = np.zeros(3), np.inf
    for count in range(1, 4):
        for subset in itertools.combinations(range(3), count):
            solution = np.linalg.lstsq(relative[:, subset] / scale[list(subset)], np.ones_like(measured), rcond=None)[0]
            coefficients = np.zeros(3)
            coefficients[list(subset)] = solution / scale[list(subset)]
            error = float(np.square(relative @ coefficients - 1).sum())
            if (coefficients >= 0).all() and error < smallest_error * (1 - 1e-9):
                best, smallest_error = coefficients, error
    call_s, tensor_s, byte_s = best.tolist()
    return call_s, tensor_s, byte_s


def vowels(task: Task, text: str) -> float:
    """Reward that differs between texts of a random model: the share of vowels, and the length to break ties."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text)) + len(text) * 1e-6


async def _measure_size(name: str, config: Config, report: Report) -> MeasuredVersion:
    """Run the recipe's services and steps with a model, and measure each step's publish and load."""
    counted_steps = [False, True] if config.smoke else [False] * config.warm_up + [True] * config.repeats
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="weights-") as scratch:
        folder = Path(scratch) / "model"
        _write_model(SHAPES[name], folder)
        settings = RunConfig(
            model=str(folder),
            steps=len(counted_steps),
            groups_per_batch=1,
            group_size=2,
            evaluation=EvalConfig(every=0),
            checkpoint_every=0,
            out=Path(scratch) / "run",
            display="none",
            trainer=TrainerConfig(optimizer_state="int8"),
            weights=WeightStoreConfig(keep_versions=1),
            generator=GeneratorConfig(max_model_len=256, max_tokens=8, kv_cache_gib=0.25),
        )
        loss = ClippedSurrogate()
        sources = DataConfig().build([ONE_DIGIT_ADDITION], seed=settings.seed)
        async with start(settings, loss=loss, sources=sources, reward=vowels) as run:
            for counts in counted_steps:
                batch = await run.rollouts.next_batch()
                packed = pack(batch, group_advantages(batch.rewards), run.trainer.layout)
                await run.trainer.step(packed, loss, temperature=run.generator.sampling.temperature)
                start_s = time.perf_counter()
                version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
                publish_end_s = time.perf_counter()
                await run.generator.load(run.weights, version)
                load_end_s = time.perf_counter()
                parts = {f"publish_{part}": run.trainer.publish_s[part] for part in PUBLISH}
                parts |= {f"load_{part}": run.generator.load_s[part] for part in LOAD}
                times = {"publish": publish_end_s - start_s, "load": load_end_s - publish_end_s, **parts}
                report.rows.append({"size": name, "warm_up": not counts, **times})
                print(f"{name}: " + "  ".join(f"{part} {value:.4f}" for part, value in times.items()), flush=True)
                if counts:
                    rows.append(parts)
                run.log({}, batch, packed)
            (load,) = run.generator.last_load
            return MeasuredVersion(
                size=sum(load.bytes_read),
                tensors=len(load.fingerprints),
                parts={part: statistics.median(row[part] for row in rows) for part in PARTS},
            )


def _write_model(shape: _Shape, folder: Path) -> None:
    """Write a random Llama in float32 with the bundled model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    bundled = bundled_model(default_cache())
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(bundled, **shape.config)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(bundled / name, folder / name)


def _copied_bytes_per_s() -> float:
    """Return the memory bandwidth that `--plan --on local` measures."""
    a = read_architecture(bundled_model(default_cache()))
    return this_device(a.dim, a.hidden_dim, resolve_dtype("auto")).bandwidth


if __name__ == "__main__":
    run_benchmark("weights_model", Config, measure)
