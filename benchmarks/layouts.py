"""Trainer layouts versus one process: deviation of loss, gradient norm and weights after a few updates.

python -m benchmarks.layouts --json out.json

Small random models of each family train on the same batches of packed rows with shared prefixes, in each layout and in
one process, in float64. Some episodes are longer than one device's share of a split row. The deviation of a layout is
the maximum of three:

    loss, grad_norm  |found - expected| / |expected|, the worst update
    weights          ||found - expected|| / ||expected||, over all weights of the model, after the last update

The learning rate is so high that the weights move by several percent, and a single weight tensor that missed its
updates would be off by more than 1e-4. The deviation relative to the weights' movement, ||found - expected|| /
||expected - start||, is also reported; it too should be no more than rounding. Weights are assembled from what the
ranks would publish; each element must come from exactly one rank.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.ranks import run_ranks
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark, without_nan
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.metrics import Value, merge_all, reduce
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch
from forge_rl.types import Batch, Episode, Group, Score, Task, Turn
from forge_rl.weights.slices import TensorSlice, tiling_error

_ROW_TOKENS = 72
"""Maximum tokens of a row over all devices that split it; the longest episodes have more than half as many."""
_VOCAB = 96
_OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.1, warmup_updates=2)
_LOSS = ClippedSurrogate()
_SMALL: dict[str, object] = {
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": True, "num_hidden_layers": 5},
    "qwen3": {"tie_word_embeddings": False},
    "seed_oss": {"tie_word_embeddings": False, "pad_token_id": None},
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 7,
    },
    "deepseek_v3": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,  # RoPE's head_dim in transformers
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
}
"""Transformers model families by model_type, with the specific settings of their small models."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare the trainer's layouts with one process."""

    families: tuple[str, ...] = tuple(FAMILIES)
    """Model families."""
    updates: int = 3
    """Updates per layout."""
    most_ranks: int = 8
    """Leave out layouts of more ranks."""

    def __post_init__(self) -> None:
        if unknown := set(self.families) - FAMILIES.keys():
            raise BenchmarkError(f"there is no family {min(unknown)!r}", hint=f"known: {', '.join(FAMILIES)}")
        if not self.families or self.updates < 1 or self.most_ranks < 2:
            raise BenchmarkError(
                "there is nothing to compare", hint="set --families, --updates to 1 or more, --most-ranks to 2 or more"
            )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family in a layout."""

    family: str
    name: str
    """Readable name of the layout."""
    ranks: int
    degrees: tuple[tuple[str, int | str], ...] = ()
    """The trainer's parallel settings, by field."""

    @property
    def settings(self) -> TrainSettings:
        """Engine settings: the longest row has the same number of tokens in all layouts."""
        degrees: dict[str, Any] = dict(self.degrees)
        degrees["seq_len"] = _ROW_TOKENS // degrees.get("context_parallel_degree", 1)
        return TrainSettings(dtype="float64", optimizer=_OPTIMIZER, **degrees)


LAYOUTS: tuple[tuple[str, int, dict[str, int | str]], ...] = (
    ("FSDP", 2, {}),
    ("TP", 2, {"tensor_parallel_degree": 2}),
    ("CP", 2, {"context_parallel_degree": 2}),
    ("DDP", 2, {"data_parallel_replicate_degree": 2}),
    ("HSDP", 4, {"data_parallel_replicate_degree": 2}),
    ("FSDP x TP", 4, {"tensor_parallel_degree": 2}),
    ("FSDP x CP", 4, {"context_parallel_degree": 2}),
    ("TP x CP", 4, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
    ("HSDP x TP", 8, {"data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2}),
    ("HSDP x CP", 8, {"data_parallel_replicate_degree": 2, "context_parallel_degree": 2}),
    ("TP x FSDP x CP", 8, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
    ("EP", 2, {"expert_parallel_degree": 2}),
    ("FSDP x EP", 4, {"expert_parallel_degree": 2}),
    ("FSDP x EP x CP", 4, {"expert_parallel_degree": 2, "context_parallel_degree": 2}),
    ("FSDP x EP x TP", 4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    ("HSDP x EP", 4, {"expert_parallel_degree": 2, "data_parallel_replicate_degree": 2}),
    ("EP, least loaded", 2, {"expert_parallel_degree": 2, "expert_balance": "least_loaded"}),
    (
        "FSDP x EP x CP, least loaded, recomputed",
        4,
        {
            "expert_parallel_degree": 2,
            "context_parallel_degree": 2,
            "expert_balance": "least_loaded",
            "activation_checkpointing": "full",
        },
    ),
    (
        "EP x TP, least loaded, router replay",
        4,
        {
            "expert_parallel_degree": 4,
            "tensor_parallel_degree": 2,
            "expert_balance": "least_loaded",
            "activation_checkpointing": "selective",
            "router_replay": True,
        },
    ),
    ("PP", 2, {"pipeline_parallel_degree": 2}),
    ("PP, recomputed", 3, {"pipeline_parallel_degree": 3, "activation_checkpointing": "full"}),
    ("PP of 4", 4, {"pipeline_parallel_degree": 4}),
    ("PP x FSDP", 4, {"pipeline_parallel_degree": 2}),
    ("PP x HSDP", 4, {"pipeline_parallel_degree": 2, "data_parallel_replicate_degree": 2}),
    ("PP x TP", 4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
    ("PP x CP", 4, {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}),
    ("PP x FSDP x CP", 8, {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}),
    ("PP x EP", 4, {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2}),
    (
        "PP x EP x TP, least loaded, recomputed, router replay",
        6,
        {
            "pipeline_parallel_degree": 3,
            "expert_parallel_degree": 2,
            "tensor_parallel_degree": 2,
            "expert_balance": "least_loaded",
            "activation_checkpointing": "full",
            "router_replay": True,
        },
    ),
    ("TP, router replay", 2, {"tensor_parallel_degree": 2, "router_replay": True}),
    ("CP, router replay", 2, {"context_parallel_degree": 2, "router_replay": True}),
    ("EP, router replay", 2, {"expert_parallel_degree": 2, "router_replay": True}),
    (
        "FSDP x EP x CP, router replay",
        4,
        {"expert_parallel_degree": 2, "context_parallel_degree": 2, "router_replay": True},
    ),
    (
        "FSDP x EP x TP, router replay",
        4,
        {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "router_replay": True},
    ),
)
"""Name, ranks and degrees of each layout."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of training in one layout."""

    metrics: list[dict[str, float]]
    """Metrics of each update, merged over the data-parallel ranks."""
    start: dict[str, torch.Tensor]
    """Whole weights before the first update, by name, as they would be published."""
    weights: dict[str, torch.Tensor]
    """Whole weights after the last update."""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Deviation of a layout from one process; see the module docstring."""

    loss: float
    grad_norm: float
    weights: float
    of_way: float
    """Difference of all weights relative to their movement."""

    @property
    def worst(self) -> float:
        return max(self.loss, self.grad_norm, self.weights)


def cases(families: Sequence[str], *, most_ranks: int = 8) -> list[Case]:
    """List the layouts of some families on up to `most_ranks` ranks."""
    return [
        Case(family=family, name=name, ranks=ranks, degrees=tuple(degrees.items()))
        for family, (name, ranks, degrees) in itertools.product(families, LAYOUTS)
        if ranks <= most_ranks
        and (is_mixture(family) or "expert_parallel_degree" not in degrees)
        and (family == "qwen3_moe" or "router_replay" not in degrees)
        and layers_of(family) >= int(degrees.get("pipeline_parallel_degree", 1))
    ]


def is_mixture(family: str) -> bool:
    """Return True if models of a family have experts."""
    return "num_experts_per_tok" in FAMILIES.get(family, {})


def layers_of(family: str) -> int:
    """Return the number of layers of a family's models."""
    return int(str(_shape(family)["num_hidden_layers"]))


def _shape(family: str) -> dict[str, object]:
    """Return the config of a family's models; one that is not compared has Llama's shape."""
    return _SMALL | FAMILIES.get(family, FAMILIES["llama"])


def make_models(folder: Path, families: Sequence[str]) -> None:
    """Save a small random model of each family to a folder with its name, with weights that make logits differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in families:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **_shape(family))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms near 1 and large weights: with the usual small ones all logits are alike, and mistakes would not
                # show.
                parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
        model.save_pretrained(folder / family)


def batches(count: int) -> list[Batch]:
    """Make batches of groups with a shared prompt, with two-turn episodes and different rewards.

    Experts depend only on the position, so that it does not matter which rows share a prefix.
    """
    experts = np.random.default_rng(1).random((256, 3, 4)).argsort(axis=-1)[..., :2].astype(np.uint8)
    task = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))
    drawn = np.random.default_rng(0)

    def ids(low: int, high: int) -> list[int]:
        token_ids: list[int] = drawn.integers(0, _VOCAB, drawn.integers(low, high)).tolist()
        return token_ids

    def episode(prompt: list[int], reward: float, longest: int) -> Episode:
        history, turns = list(prompt), []
        for _ in range(2):
            answer = ids(longest // 2, longest)
            logprobs = (-drawn.gamma(4.0, 1.0, len(answer))).astype(np.float32)
            versions = np.zeros(len(answer), np.int32)
            turns.append(
                Turn(
                    prompt_ids=tuple(history),
                    token_ids=tuple(answer),
                    logprobs=logprobs,
                    versions=versions,
                    text="",
                    routed=experts[: len(history) + len(answer) - 1],
                )
            )
            # Some tokens of the world between the turns, which are not trained.
            history += [*answer, *ids(1, 4)]
        return Episode(task=task, turns=tuple(turns), score=Score(total=reward))

    return [
        Batch(
            groups=tuple(
                Group(task=task, episodes=tuple(episode(prompt, float(index), longest) for index in range(3)))
                for prompt, longest in ((ids(4, 10), longest) for longest in (8, 8, 8, 24))
            ),
            version=0,
        )
        for _ in range(count)
    ]


def packed(case: Case, batch: Batch) -> PackedBatch:
    """Pack a batch for a layout like the Trainer service, with centered rewards as advantages."""
    settings = case.settings
    layout = Layout(
        shares=len(settings.heads(case.ranks)),
        seq_len=settings.seq_len,
        context_parallel_degree=settings.context_parallel_degree,
        tensor_parallel_degree=settings.tensor_parallel_degree,
    )
    return pack(batch, batch.rewards - batch.rewards.mean(dim=1, keepdim=True), layout)


def train(folder: Path, every: Sequence[Case], updates: int, loss: Loss = _LOSS) -> list[Trained]:
    """Train in several layouts with the same number of ranks, in processes that are started once.

    Args:
        folder: output folder of make_models.

    Raises:
        BenchmarkError: a rank failed, or an element of the weights is not published by exactly one rank.
    """
    (ranks,) = {case.ranks for case in every}
    by_rank = run_ranks(_train, ranks, folder, every, updates, loss)
    results = []
    for index, case in enumerate(every):
        parts = [results[index] for results in by_rank]
        shares = [parts[rank] for rank in case.settings.heads(case.ranks)]
        metrics = [reduce(merge_all(metrics[update] for metrics, _, _ in shares)) for update in range(updates)]
        start, weights = (assemble(case, [part[position] for part in parts]) for position in (1, 2))
        results.append(Trained(metrics=metrics, start=start, weights=weights))
    return results


def compare(actual: Trained, expected: Trained) -> Deviation:
    """Compare a layout with one process.

    Raises:
        BenchmarkError: they trained on different tokens, or started from different weights.
    """
    for mine, theirs in zip(actual.metrics, expected.metrics, strict=True):
        if _shared_names(mine) != _shared_names(theirs) or mine["tokens/trained"] != theirs["tokens/trained"]:
            raise BenchmarkError(f"a layout has the metrics {mine}, and one process {theirs}")
    # Bit for bit, as nothing has been computed yet: a difference is a mistake in reading or in slicing.
    if any(not torch.equal(start, expected.start[name]) for name, start in actual.start.items()):
        raise BenchmarkError("a layout published other weights at its start than one process")

    def relative(name: str) -> float:
        pairs = [(mine[name], theirs[name]) for mine, theirs in zip(actual.metrics, expected.metrics, strict=True)]
        return max(without_nan(abs(mine - theirs) / abs(theirs)) for mine, theirs in pairs)

    end, start, other = (
        torch.cat([weights[name].flatten().double() for name in sorted(weights)])
        for weights in (expected.weights, expected.start, actual.weights)
    )
    return Deviation(
        loss=relative("loss"),
        grad_norm=relative("grad_norm"),
        weights=without_nan(float((other - end).norm() / end.norm())),
        of_way=without_nan(float((other - end).norm() / (end - start).norm())),
    )


def _shared_names(metrics: Mapping[str, float]) -> set[str]:
    """Return the names of metrics that every layout has. Metrics per rank or stage need several ranks or stages."""
    return {name for name in metrics if not name.startswith(("attention/rank_", "experts/rank_", "pipeline/"))}


def alone(case: Case) -> Case:
    """Return the single-process case that a layout is compared with."""
    replays = tuple(degree for degree in case.degrees if degree[0] == "router_replay")
    return Case(family=case.family, name="one process", ranks=1, degrees=replays)


Shards = list[tuple[str, TensorSlice, torch.Tensor]]
"""Shards of weights with their names."""


def _train(
    rank: int, folder: Path, every: Sequence[Case], updates: int, loss: Loss
) -> list[tuple[list[dict[str, Value]], Shards, Shards]]:
    """Train in each layout as one of its ranks; return metrics, and shards before and after."""
    from forge_rl.engines.titan.train import TitanEngine

    results = []
    for case in every:
        engine = TitanEngine(folder / case.family, case.settings)
        start = shards_of(engine)
        metrics = [update(engine, case, batch, rank, updates, loss) for batch in batches(updates)]
        results.append((metrics, start, shards_of(engine)))
    return results


def update(
    engine: Any, case: Case, batch: Batch, rank: int, total_updates: int, loss: Loss = _LOSS
) -> dict[str, Value]:
    """Train on a batch as one rank of a layout; return the update's metrics."""
    settings = case.settings
    # Rows are dealt out in turn, as the Trainer service sends them.
    share = slice(settings.share_of(rank, case.ranks), None, len(settings.heads(case.ranks)))
    (update_metrics,) = engine.train_batch(
        [replace(minibatch, rows=minibatch.rows[share]) for minibatch in packed(case, batch).minibatches],
        StepRequest(loss=loss, temperature=0.9, total_updates=total_updates, version=0),
    ).metrics
    assert update_metrics is not None, "the gradient is not finite"
    metrics: dict[str, Value] = update_metrics
    return metrics


def shards_of(engine: Any) -> Shards:
    """Copy the shards that a rank would publish."""
    return [(shard.name, shard.tensor_slice, shard.values.clone()) for shard in engine.local_shards()]


def assemble(case: Case, by_rank: Sequence[Shards]) -> dict[str, torch.Tensor]:
    """Assemble whole weights from the shards that all ranks would publish."""
    by_name: dict[str, list[tuple[TensorSlice, torch.Tensor]]] = {}
    for name, tensor_slice, values in itertools.chain.from_iterable(by_rank):
        by_name.setdefault(name, []).append((tensor_slice, values))
    weights = {}
    for name, shards in by_name.items():
        spans = [[start + size for start, size in zip(s.start, s.size, strict=True)] for s, _ in shards]
        weights[name] = torch.empty([max(ends) for ends in zip(*spans, strict=True)], dtype=shards[0][1].dtype)
        if error := tiling_error(weights[name].shape, [tensor_slice for tensor_slice, _ in shards]):
            raise BenchmarkError(f"{case.family} in {case.name}: the shards of {name} do not tile it: {error}")
        for (tensor_slice, values), ends in zip(shards, spans, strict=True):
            weights[name][tuple(map(slice, tensor_slice.start, ends))] = values
    return weights


def measure(config: Config, report: Report) -> None:
    """Train every layout of every family, compare, and print a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder, config.families)
        laid_out = cases(config.families, most_ranks=config.most_ranks)
        every = [*dict.fromkeys(map(alone, laid_out)), *laid_out]
        trained: dict[Case, Trained] = {}
        for ranks in sorted({case.ranks for case in every}):
            together = [case for case in every if case.ranks == ranks]
            trained |= zip(together, train(folder, together, config.updates), strict=True)
    deviations = {case: compare(result, trained[alone(case)]) for case, result in trained.items() if case.ranks > 1}
    for case, deviation in deviations.items():
        report.rows.append(
            {"family": case.family, "layout": case.name, "ranks": case.ranks, **dict(case.degrees), **vars(deviation)}
        )
    report.results["worst_deviation"] = max(deviation.worst for deviation in deviations.values())
    report.results["layouts_shown"] = float(len(deviations))
    Console(highlight=False).print(_table(deviations))


def _table(deviations: Mapping[Case, Deviation]) -> Table:
    table = Table(title="deviation from one process", title_justify="left")
    for column in ("family", "layout", "ranks", "loss", "grad norm", "weights", "(of their way)"):
        table.add_column(column, justify="left" if column in ("family", "layout") else "right")
    for case, deviation in deviations.items():
        values = (
            f"{value:.1e}" for value in (deviation.loss, deviation.grad_norm, deviation.weights, deviation.of_way)
        )
        table.add_row(case.family, case.name, str(case.ranks), *values)
    return table


if __name__ == "__main__":
    run_benchmark("layouts", Config, measure)
