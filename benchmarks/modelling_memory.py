"""Memory of updates in native code and in transformers'.

python -m benchmarks.modelling_memory --json out.json

Each update is in a process of its own, on one thread in float32, with the heap of a trainer's rank: a model of each
family, and one row in which eight answers share a prompt. What the process had before the model does not count, nor
does what a tiny model has loaded by then. Private memory is sampled while the model is loaded and trained:

    peak_gib_CODE_FAMILY     peak: weights, gradients, optimizer state and activations
    update_gib_CODE_FAMILY   what of the peak an update adds to what was allocated after an update on a short row
    peak_factor_FAMILY       median over pairs of processes of transformers' peak over the native one
    update_factor_FAMILY     the same of what an update adds
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.adapter_updates import advantages_of, drawn_batch
from benchmarks.memory import private_bytes, sampled_peak
from benchmarks.ranks import run_ranks
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import Modelling, TrainSettings
from forge_rl.errors import check_flags
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout

if TYPE_CHECKING:
    from forge_rl.engines.titan.train import TitanEngine

FAMILIES = ("llama", "qwen3", "qwen3_moe")
CODES: tuple[Modelling, ...] = ("native", "transformers")
_BRANCHES, _VOCABULARY = 8, 8192
_EVERY_S = 0.005
_DEADLINE_S = 1800


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare the memory of native code with that of transformers'."""

    families: tuple[str, ...] = FAMILIES
    """Families to measure."""
    width: int = 1024
    """Width of the hidden states, a multiple of 128."""
    layers: int = 4
    tokens: int = 2048
    """Tokens of the row, a multiple of 16."""
    repeats: int = LEAST_REPEATS
    """Processes of each."""

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        check_flags(self, "--", minimum={"width": 128, "layers": 1, "tokens": 64})
        if self.width % 128 or self.tokens % (2 * _BRANCHES):
            raise BenchmarkError(
                f"--width is {self.width}, --tokens {self.tokens}",
                hint=f"set them to multiples of 128 and {2 * _BRANCHES}",
            )
        if unknown := set(self.families) - set(FAMILIES):
            raise BenchmarkError(f"--families has {min(unknown)}", hint=f"choose from {', '.join(FAMILIES)}")


def measure(config: Config, report: Report) -> None:
    """Measure each family in both codes, by turns."""
    from tests.fakes import make_model

    for family in config.families:
        with tempfile.TemporaryDirectory() as scratch:
            folder, tiny = Path(scratch) / "model", Path(scratch) / "tiny"
            make_model(folder, family, **_sizes(config.width, config.layers))
            make_model(tiny, family, **_sizes(128, 1))
            peaks: dict[str, list[int]] = {code: [] for code in CODES}
            additions: dict[str, list[int]] = {code: [] for code in CODES}
            for repeat in range(config.repeats):
                for code in CODES if repeat % 2 else CODES[::-1]:
                    arguments = folder, tiny, code, config.tokens
                    ((peak, addition),) = run_ranks(update_memory, 1, *arguments, deadline_s=_DEADLINE_S)
                    peaks[code].append(peak)
                    additions[code].append(addition)
                    row = {"family": family, "modelling": code, "peak_bytes": peak, "update_bytes": addition}
                    report.rows.append(row)
        for name, sizes in (("peak", peaks), ("update", additions)):
            for code in CODES:
                report.measure(f"{name}_gib_{code}_{family}", [size / 2**30 for size in sizes[code]])
            pairs = zip(sizes["transformers"], sizes["native"], strict=True)
            report.measure(f"{name}_factor_{family}", [first / second for first, second in pairs])


def _sizes(width: int, layers: int) -> dict[str, Any]:
    """Return the sizes of a family's model: heads of 64, and half as many key heads."""
    return {
        "head_dim": 64,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": width,
        "num_attention_heads": width // 64,
        "num_experts": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": width // 128,
        "vocab_size": _VOCABULARY,
    }


def update_memory(rank: int, folder: Path, tiny: Path, code: Modelling, tokens: int) -> tuple[int, int]:
    """Return the peak of a model's memory in bytes, and what of it an update adds."""
    _update(_engine(tiny, code, tokens), 2 * _BRANCHES)
    before = private_bytes()
    with sampled_peak(private_bytes, _EVERY_S) as peak:
        engine = _engine(folder, code, tokens)
        _update(engine, 2 * _BRANCHES)
        state = private_bytes()
        with sampled_peak(private_bytes, _EVERY_S) as update_peak:
            _update(engine, tokens)
    return peak[0] - before, update_peak[0] - state


def _engine(folder: Path, code: Modelling, tokens: int) -> TitanEngine:
    from forge_rl.engines.titan.train import TitanEngine

    optimizer = OptimizerConfig(lr=1e-5)
    return TitanEngine(folder, TrainSettings(dtype="float32", seq_len=tokens, modelling=code, optimizer=optimizer))


def _update(engine: TitanEngine, tokens: int) -> None:
    """Train on one row of so many tokens: one half is a prompt, the other its answers."""
    from tests.fakes import train_batch

    answer = tokens // (2 * _BRANCHES)
    prompt = tokens - answer * _BRANCHES
    batch = drawn_batch(_VOCABULARY, groups=1, group_size=_BRANCHES, prompt=prompt, answer=answer)
    train_batch(engine, pack(batch, advantages_of(batch), Layout(seq_len=tokens), drop_uniform=False))


if __name__ == "__main__":
    run_benchmark("modelling_memory", Config, measure)
