"""CPU time of updates whose branches start from the state of their shared prefix, and of ones that compute it again.

python -m benchmarks.prefix_states --json out.json

Layers with a state compute a shared prefix once and hand its state to each branch (`--trainer.prefix-states shared`),
or compute it again for each branch, in fewer calls (`recomputed`). A small model of each kind, three layers with a
state and a full one, trains both ways by turns in float32, in one process and on one thread:

    cpu_s_WAY_KIND_SHAPE   CPU seconds of an update
    factor_KIND_SHAPE      median over pairs of neighbouring updates of seconds with `recomputed` over `shared`

A shape PROMPTxANSWERxBRANCHES is one group whose episodes share a prompt. `tree` is sixteen short episodes of six
turns.
"""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.adapter_updates import advantages_of, drawn_batch
from benchmarks.ranks import run_ranks
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": (
        "Qwen/Qwen3.5-4B, its text model",
        {
            "full_attention_interval": 4,
            "head_dim": 64,
            "linear_key_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 64,
        },
    ),
    "mamba2": (
        "ibm-granite/granite-4.0-h-1b",
        {"mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_heads": 8, "shared_intermediate_size": 512},
    ),
}
"""Folder of the zoo and sizes of its small model, by the kind of its layers with a state."""
WAYS: tuple[Literal["shared", "recomputed"], ...] = ("shared", "recomputed")
_SHAPE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})x([2-9]|[1-9]\d)")
_DEADLINE_S = 1800


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare states of shared prefixes that are handed to branches with prefixes that are computed again."""

    shapes: tuple[str, ...] = ("512x64x8", "128x128x8", "tree")
    """Groups to train on: tokens of the prompt, of an answer, and answers; or "tree"."""
    repeats: int = LEAST_REPEATS
    """Updates of each, after one that is not measured."""

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if unknown := [shape for shape in self.shapes if shape != "tree" and not _SHAPE.fullmatch(shape)]:
            raise BenchmarkError(
                f"--shapes has {unknown[0]!r}", hint="write PROMPTxANSWERxBRANCHES, such as 512x64x8, or tree"
            )


def measure(config: Config, report: Report) -> None:
    """Train each kind on each shape both ways."""
    for kind in MODELS:
        for shape in config.shapes:
            with tempfile.TemporaryDirectory() as scratch:
                arguments = Path(scratch), kind, shape, config.repeats
                (updates,) = run_ranks(update_seconds, 1, *arguments, deadline_s=_DEADLINE_S)
            report.rows += [{"kind": kind, "shape": shape} | update for update in updates]
            seconds = {
                way: [update["cpu_s"] for update in updates if update["way"] == way and not update["warmup"]]
                for way in WAYS
            }
            for way in WAYS:
                report.measure(f"cpu_s_{way}_{kind}_{shape}", seconds[way])
            pairs = zip(seconds["recomputed"], seconds["shared"], strict=True)
            report.measure(f"factor_{kind}_{shape}", [recomputed / shared for recomputed, shared in pairs])


def update_seconds(rank: int, scratch: Path, kind: str, shape: str, repeats: int) -> list[dict[str, object]]:
    """Time updates both ways, by turns; returns a row for each update."""
    from forge_rl.engines.titan.train import TitanEngine
    from tests.fakes import train_batch
    from tests.zoo.folders import write

    name, sizes = MODELS[kind]
    folder = write(name, scratch / "hf", **_SIZES, **sizes)
    batch, seq_len = _packed(shape)
    engines = {
        way: TitanEngine(
            folder,
            TrainSettings(
                dtype="float32",
                seq_len=seq_len,
                modelling="transformers",
                prefix_states=way,
                optimizer=OptimizerConfig(lr=1e-4),
            ),
        )
        for way in WAYS
    }
    updates: list[dict[str, object]] = []
    for repeat in range(repeats + 1):
        # The order alternates, so that a machine that slows down favours neither.
        for way in WAYS if repeat % 2 else WAYS[::-1]:
            start = time.process_time()
            metrics: dict[str, Any] = train_batch(engines[way], batch)
            row: dict[str, object] = {"way": way, "warmup": repeat == 0, "cpu_s": time.process_time() - start}
            row |= {"recomputed_tokens": metrics["states/recomputed_tokens"].total} if way == "recomputed" else {}
            updates.append(row)
    return updates


def _packed(shape: str) -> tuple[PackedBatch, int]:
    """Return a shape's batch, and the tokens of a row."""
    from tests.fakes import packed, random_batch
    from tests.zoo.packed import VOCABULARY

    if shape == "tree":
        return packed(random_batch(1, vocab=VOCABULARY, groups=4, group_size=4, turns=6), seq_len=512), 512
    prompt, answer, branches = map(int, shape.split("x"))
    batch = drawn_batch(VOCABULARY, groups=1, group_size=branches, prompt=prompt, answer=answer)
    seq_len = prompt + answer * branches
    return pack(batch, advantages_of(batch), Layout(seq_len=seq_len), drop_uniform=False), seq_len


if __name__ == "__main__":
    run_benchmark("prefix_states", Config, measure)
