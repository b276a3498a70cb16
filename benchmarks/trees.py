"""An update on episodes of many turns that fork at every turn: shared prefixes against separate sequences.

python -m benchmarks.trees --json out.json

Each group has one episode of `--turns` turns, and for each of these turns an episode that departs from it
there: a tree with a level for every turn. `separate` trains the same tokens with each segment as a sequence of its own.
Both take updates in turns, of a random model of SmolLM2-135M's shape with fewer layers, in float32. `tokens_saved` is
the number of input tokens of all sequences over the number that is computed, padding included.

`worst_deviation` compares both in float64 on a small model, after two updates, as benchmarks.layouts does: the loss,
the gradient's norm, and all weights relative to their movement; in one process, and on two ranks with context
parallelism.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import layouts
from benchmarks.ranks import run_ranks
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.errors import check_flags
from forge_rl.metrics import merge_all, reduce
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch
from forge_rl.types import Batch, Episode, Group, Score, Task, Turn

_WAYS = {"shared": True, "separate": False}
_TASK = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare trees of turns with separate sequences."""

    turns: int = 20
    prompt: int = 400
    """Tokens of the prompt."""
    answer: int = 20
    """Tokens of an answer."""
    observation: int = 10
    """Tokens between two turns."""
    groups: int = 1
    layers: int = 8
    """Layers of the model that is timed."""
    seq_len: int = 2048
    """Maximum tokens of a row."""
    repeats: int = LEAST_REPEATS
    """Updates of each way, after one that warms up."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"observation": 0, "seq_len": 1})
        check_repeats(self.repeats)
        if min(self.turns, self.prompt, self.answer, self.groups, self.layers) < 1:
            raise BenchmarkError(
                "there is nothing to train", hint="raise --turns, --prompt, --answer, --groups, --layers"
            )


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """Sizes of a batch, in tokens."""

    turns: int
    prompt: int
    answer: int
    observation: int
    groups: int
    vocab: int


def measure(config: Config, report: Report) -> None:
    """Compare the results of both ways, then time them."""
    small = _Shape(turns=config.turns, prompt=12, answer=3, observation=2, groups=2, vocab=96)
    large = _Shape(
        turns=config.turns,
        prompt=config.prompt,
        answer=config.answer,
        observation=config.observation,
        groups=config.groups,
        vocab=49152,
    )
    with tempfile.TemporaryDirectory(prefix="forge_rl-trees-") as scratch:
        folder = Path(scratch)
        layouts.make_models(folder, ["llama"])
        _make_model(folder / "smollm2", config.layers)
        worst = 0.0
        for degree in (1, 2):
            trained = run_ranks(_train, degree, folder / "llama", small, degree)
            ways = [_together([rank[way] for rank in trained], degree) for way in _WAYS]
            deviation = layouts.compare(*ways)
            report.rows.append({"context_parallel_degree": degree, **vars(deviation)})
            worst = max(worst, deviation.loss, deviation.grad_norm, deviation.of_way)
        (timed,) = run_ranks(_time, 1, folder / "smollm2", large, config, deadline_s=3600)
    report.results["worst_deviation"] = worst
    report.results["tokens_saved"] = timed["tokens_saved"]
    for way in _WAYS:
        report.measure(f"seconds_{way}", timed["seconds"][way])
    pairs = zip(timed["seconds"]["separate"], timed["seconds"]["shared"], strict=True)
    report.measure("speedup", [separate / shared for separate, shared in pairs])


def _make_model(folder: Path, layers: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def _batch(shape: _Shape, seed: int) -> Batch:
    """Make groups of an episode with many turns, and one more for each turn, which forks there."""
    drawn = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        token_ids: list[int] = drawn.integers(3, shape.vocab, count).tolist()
        return token_ids

    def turn(history: Sequence[int]) -> Turn:
        answer = ids(shape.answer)
        logprobs = (-drawn.gamma(4.0, 1.0, len(answer))).astype(np.float32)
        return Turn(
            prompt_ids=tuple(history),
            token_ids=tuple(answer),
            logprobs=logprobs,
            versions=np.zeros(len(answer), np.int32),
            text="",
        )

    def group() -> Group:
        history, turns, forks = ids(shape.prompt), list[Turn](), list[Turn]()
        for _ in range(shape.turns):
            turns.append(turn(history))
            forks.append(turn(history))
            history += [*turns[-1].token_ids, *ids(shape.observation)]
        turn_lists = [tuple(turns), *((fork,) for fork in forks)]
        return Group(
            task=_TASK,
            episodes=tuple(
                Episode(task=_TASK, turns=turns, score=Score(total=float(i))) for i, turns in enumerate(turn_lists)
            ),
        )

    return Batch(groups=tuple(group() for _ in range(shape.groups)), version=0)


def _packed(batch: Batch, way: str, settings: TrainSettings) -> PackedBatch:
    layout = Layout(
        seq_len=settings.seq_len,
        context_parallel_degree=settings.context_parallel_degree,
        share_prefixes=_WAYS[way],
    )
    return pack(batch, batch.rewards - batch.rewards.mean(dim=1, keepdim=True), layout)


def _update(engine: Any, laid: PackedBatch) -> Any:
    (metrics,) = engine.train_batch(
        laid.minibatches, StepRequest(loss=ClippedSurrogate(), total_updates=100, version=0)
    ).metrics
    assert metrics is not None, "the gradient is not finite"
    return metrics


def _train(rank: int, folder: Path, shape: _Shape, degree: int) -> dict[str, Any]:
    """Take two updates each way; returns metrics, and shards before and after."""
    from forge_rl.engines.titan.train import TitanEngine

    settings = TrainSettings(
        dtype="float64",
        seq_len=256 // degree,
        context_parallel_degree=degree,
        optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=0.1),
    )
    results = {}
    for way in _WAYS:
        engine = TitanEngine(folder, settings)
        start = layouts.shards_of(engine)
        metrics = [_update(engine, _packed(_batch(shape, seed), way, settings)) for seed in range(2)]
        results[way] = metrics, start, layouts.shards_of(engine)
    return results


def _together(by_rank: Sequence[Any], degree: int) -> layouts.Trained:
    """Assemble what the ranks trained; ranks that split a row have the same metrics."""
    case = layouts.Case(family="llama", name="trees", ranks=degree)
    start, weights = (layouts.assemble(case, [part[position] for part in by_rank]) for position in (1, 2))
    metrics = [reduce(merge_all([update])) for update in by_rank[0][0]]
    return layouts.Trained(metrics=metrics, start=start, weights=weights)


def _time(_: int, folder: Path, shape: _Shape, config: Config) -> dict[str, Any]:
    """Time updates of both ways, in turns."""
    from forge_rl.engines.titan.train import TitanEngine

    # `run_ranks` gives each rank one thread; this one has the machine to itself.
    torch.set_num_threads(os.cpu_count() or 1)
    assert dist.get_world_size() == 1
    settings = TrainSettings(dtype="float32", seq_len=config.seq_len, optimizer=OptimizerConfig(lr=1e-6))
    engine = TitanEngine(folder, settings)
    laid = {way: _packed(_batch(shape, 0), way, settings) for way in _WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    for repeat in range(config.repeats + 1):
        for way in _WAYS:
            began = time.perf_counter()
            _update(engine, laid[way])
            if repeat:
                seconds[way].append(time.perf_counter() - began)
    return {"seconds": seconds, "tokens_saved": laid["shared"].sequence_tokens / laid["shared"].packed_tokens}


if __name__ == "__main__":
    run_benchmark("trees", Config, measure)
