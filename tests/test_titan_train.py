"""The training step against plain PyTorch with transformers' model, and against itself: cut, recomputed, sharded."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ranks import run_ranks
from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.logprobs import Scoring
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.engines.titan.blocks import training_state
from forge_rl.engines.titan.shards import named_weights
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.engines.titan.update import Update
from forge_rl.errors import CheckpointError, ConfigError, LossError
from forge_rl.metrics import Max, Mean, merge_all, reduce
from forge_rl.packing.rows import PackedBatch
from forge_rl.types import Batch, Score
from tests.fakes import empty_row, hf_weights, make_model, packed, random_batch, train_batch
from tests.plain_trainer import PlainTrainer

pytestmark = pytest.mark.usefixtures("process_group")

OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.1, warmup_updates=2, decay="linear")
LOSS = ClippedSurrogate()
TOTAL_UPDATES = 5
ODD: dict[str, object] = {
    "hidden_size": 25,
    "intermediate_size": 41,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}
"""No dimension of it can be halved but the attention's."""


def engine_of(folder: Path, *, reference: bool = False, **settings: Any) -> TitanEngine:
    train_settings = {"dtype": "float64", "seq_len": 64, "optimizer": OPTIMIZER, **settings}
    return TitanEngine(folder, TrainSettings(**train_settings), reference=reference)


def step(engine: TitanEngine, laid: PackedBatch, *, loss: Loss = LOSS, **settings: Any) -> dict:
    return train_batch(engine, laid, loss, total_updates=TOTAL_UPDATES, **settings)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def moved(engine: TitanEngine, before: dict[str, torch.Tensor]) -> float:
    return furthest(hf_weights(engine.model), before)


def plain_steps(plain: PlainTrainer, batch: Batch, loss: ClippedSurrogate = LOSS, **how: Any) -> list[dict[str, float]]:
    """Loss, gradient norm and learning rate of a batch's one update in plain PyTorch, with centered rewards."""
    packed_batch = packed(batch, seq_len=256, drop_uniform=False)
    assert [minibatch.tokens for minibatch in packed_batch.minibatches] == [
        sum(minibatch.response_tokens for minibatch in batch.episodes)
    ]
    assert [minibatch.sequences for minibatch in packed_batch.minibatches] == [len(batch.episodes)]
    centered = (batch.rewards - batch.rewards.mean(dim=1, keepdim=True)).flatten().tolist()
    advantages = [
        [np.full(len(turn.token_ids), advantage, np.float32) for turn in episode.turns]
        for episode, advantage in zip(batch.episodes, centered, strict=True)
    ]
    settings = {"epochs": 1, "temperature": 1.0, "total_updates": TOTAL_UPDATES, **how}
    step_values = plain.train_batch(batch, advantages, packed_batch.minibatches, loss, **settings)
    return [dict(zip(("loss", "grad_norm", "lr"), values, strict=True)) for values in step_values]


@pytest.mark.parametrize(
    ("family", "tied", "temperature", "kl_coef"),
    [("llama", False, 1.0, 0.0), ("llama", True, 0.7, 0.0), ("qwen3", True, 1.0, 0.3), ("qwen3", False, 1.0, 0.0)],
)
def test_steps_are_those_of_plain_pytorch(family: str, tied: bool, temperature: float, kl_coef: float, tmp_path: Path):
    model = make_model(tmp_path, family, tie_word_embeddings=tied)
    engine = engine_of(tmp_path, reference=kl_coef > 0)
    plain = PlainTrainer(model, engine.model, OPTIMIZER)
    loss = ClippedSurrogate(kl_coef=kl_coef)
    before = hf_weights(engine.model)
    # Warm-up over 2 steps to 1e-3, then linear over the 3 that are left.
    for seed, lr in enumerate([0.5e-3, 1e-3, 1e-3]):
        batch = random_batch(seed, vocab=43)
        laid = packed(batch, seq_len=32)
        assert len(laid.rows) > 1
        metrics = reduce(step(engine, laid, loss=loss, temperature=temperature))
        (expected,) = plain_steps(plain, batch, loss, temperature=temperature)
        assert metrics["lr"] == pytest.approx(lr)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-10, abs=1e-12)
        assert metrics["grad_norm"] > 0.1, "the clip is not tested"
        assert 0 < metrics["loss/clipped"] < 1
    assert engine.updates == 3
    assert moved(engine, before) > 1e-3
    assert furthest(hf_weights(engine.model), plain.weights(tmp_path / "plain")) < 1e-10


def test_metrics_of_a_step_are_those_of_its_tokens(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path)
    batch = random_batch(0, vocab=43)
    laid = packed(batch)
    before = engine.logprobs(laid.rows, temperature=1.0)
    metrics = step(engine, laid)
    gaps = torch.cat(
        [(logprobs - row.behaviour)[row.mask] for row, logprobs in zip(laid.rows, before, strict=True)]
    ).abs()
    metric_values = reduce(metrics)
    assert (
        metric_values["tokens/trained"]
        == len(gaps)
        == laid.trained_tokens
        == sum(e.response_tokens for e in batch.episodes)
    )
    assert metric_values["logprob_gap"] == pytest.approx(float(gaps.mean()), rel=1e-10)
    assert metric_values["logprob_gap/max"] == pytest.approx(float(gaps.max()), rel=1e-10)
    assert 0 < metric_values["entropy"] < math.log(43)
    assert isinstance(metrics["loss"], Mean)
    assert isinstance(metrics["grad_norm"], Mean)
    assert isinstance(metrics["grad_norm/max"], Max)


def test_both_passes_leave_the_weights_as_they_are_until_the_step(tmp_path: Path):
    make_model(tmp_path)
    engine, other = engine_of(tmp_path), engine_of(tmp_path)
    laid, before = packed(random_batch(0, vocab=43)), hf_weights(engine.model)
    results = engine.forward_backward(Update(minibatch=laid.minibatches[0], loss=LOSS, version=0))
    assert moved(engine, before) == engine.updates == 0
    assert all(parameter.grad is not None for parameter in engine.model.parameters())
    metrics = engine.optimizer_step(results, lr=OPTIMIZER.lr_at(0, TOTAL_UPDATES))
    assert metrics == step(other, laid)
    assert furthest(hf_weights(engine.model), hf_weights(other.model)) == 0 < moved(engine, before)


def test_the_gap_is_of_current_tokens_and_the_drift_of_older_ones(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path)
    (laid,) = packed(random_batch(0, vocab=43)).minibatches
    rows = tuple(
        replace(row, versions=torch.where(row.mask, 2 + torch.arange(len(row), dtype=torch.int32) % 2, -1))
        for row in laid.rows
    )
    before = engine.logprobs(rows, temperature=1.0)
    minibatch = replace(laid, rows=rows)

    def updates(version: int | None) -> list[dict[str, float]]:
        step_metrics = engine.train_batch(
            [minibatch] * 2, StepRequest(loss=LOSS, total_updates=TOTAL_UPDATES, version=version)
        ).metrics
        return [reduce(metrics) for metrics in step_metrics if metrics is not None]

    first, second = updates(3)
    gaps = torch.cat([(score - row.behaviour)[row.mask] for row, score in zip(rows, before, strict=True)]).abs()
    versions = torch.cat([row.versions[row.mask] for row in rows])
    for name, version in (("logprob_gap", 3), ("logprob_drift", 2)):
        expected = gaps[versions == version]
        assert first[name] == pytest.approx(float(expected.mean()), rel=1e-10)
        assert first[f"{name}/max"] == pytest.approx(float(expected.max()), rel=1e-10)
    before = engine.logprobs(rows, temperature=1.0)
    request = StepRequest(loss=LOSS, epochs=2, total_updates=TOTAL_UPDATES, scored_minibatches=1)
    result = engine.train_batch([minibatch], request)
    (metrics, _), scored = result.metrics, result.scores
    assert len(scored) == len(rows), "of the first epoch"
    assert all(torch.equal(scores[:, 0], expected) for scores, expected in zip(scored, before, strict=True))
    assert metrics is not None
    entropies = torch.cat([scores[row.mask, 1] for row, scores in zip(rows, scored, strict=True)])
    assert reduce(metrics)["entropy"] == pytest.approx(float(entropies.mean()), rel=1e-6)
    # After an update the weights are no published version any more.
    assert all("logprob_drift" in metrics and "logprob_gap" not in metrics for metrics in (second, *updates(None)))


def mixed_batch(seed: int) -> Batch:
    """Four groups, of which two have equal rewards, but not at the start."""
    batch = random_batch(seed, vocab=43, groups=4)
    groups = [
        replace(group, episodes=tuple(replace(episode, score=Score(total=0.1)) for episode in group.episodes))
        if p in (1, 2)
        else group
        for p, group in enumerate(batch.groups)
    ]
    return replace(batch, groups=tuple(groups))


def tokens_of(batch: Batch, *groups: int) -> int:
    return sum(episode.response_tokens for p in groups for episode in batch.groups[p].episodes)


AGGREGATIONS = [Aggregation(), Aggregation(kind="sequence_mean"), Aggregation(kind="constant", tokens=10)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda aggregation: aggregation.kind)
def test_the_scale_counts_groups_that_are_left_out_whatever_the_rows(aggregation: Aggregation, tmp_path: Path):
    model, loss = make_model(tmp_path), ClippedSurrogate(aggregation=aggregation)
    (expected,) = plain_steps(PlainTrainer(model, engine_of(tmp_path).model, OPTIMIZER), mixed_batch(0), loss)
    for laid in (packed(mixed_batch(0), seq_len=32), packed(mixed_batch(0), seq_len=256, drop_uniform=False)):
        metric_values = reduce(step(engine_of(tmp_path), laid, loss=loss))
        assert {name: metric_values[name] for name in expected} == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda aggregation: aggregation.kind)
def test_minibatches_and_epochs_are_updates_of_plain_pytorch(aggregation: Aggregation, tmp_path: Path):
    model, loss = make_model(tmp_path), ClippedSurrogate(aggregation=aggregation)
    engine = engine_of(tmp_path)
    plain = PlainTrainer(model, engine.model, OPTIMIZER)
    batch = mixed_batch(1)
    laid = packed(batch, seq_len=32, minibatches=2)
    dealt = [{e // 3 for row in part.rows for e in row.episodes[row.mask].tolist()} for part in laid.minibatches]
    assert [len(part) for part in dealt] == [1, 1], "two groups have equal rewards"
    assert [part.sequences for part in laid.minibatches] == [6, 6]
    uniform = [p for p in range(4) if p not in dealt[0] | dealt[1]]
    first = next(p for p in uniform if laid.minibatches[0].tokens == tokens_of(batch, p, *dealt[0]))
    uniform.remove(first)
    pairs = [(*dealt[0], first), (*dealt[1], *uniform)]
    parts = [replace(batch, groups=tuple(batch.groups[p] for p in pair)) for pair in pairs]
    expected = [update for part in parts * 2 for update in plain_steps(plain, part, loss)]
    # Warm-up over 2 updates to 1e-3, then linear over the 3 that are left.
    assert [update["lr"] for update in expected] == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3 * 2 / 3])
    metric_values = reduce(step(engine, laid, loss=loss, epochs=2))
    assert engine.updates == 4
    assert metric_values["loss"] == pytest.approx(sum(update["loss"] for update in expected) / 4, rel=1e-10, abs=1e-12)
    norms = [update["grad_norm"] for update in expected]
    assert metric_values["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-10)
    assert metric_values["grad_norm/max"] == pytest.approx(max(norms), rel=1e-10)
    assert furthest(hf_weights(engine.model), plain.weights(tmp_path / "plain")) < 1e-10


@dataclass(frozen=True, kw_only=True)
class Recording(ClippedSurrogate):
    """Keeps what it was given."""

    needs = ("proximal",)
    seen: list[LossInputs] = field(default_factory=list)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.seen.append(inputs)
        return super().__call__(inputs)


def test_a_loss_sees_the_row_and_the_policy_from_before_the_first_update(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path)
    laid = packed(random_batch(0, vocab=43, groups=4), minibatches=2, seq_len=32)
    before = engine.logprobs(laid.rows, temperature=0.7)
    loss = Recording(aggregation=Aggregation(kind="sequence_mean"))
    step(engine, laid, loss=loss, epochs=2, temperature=0.7)
    assert len(loss.seen) == 2 * len(laid.rows)
    for index, inputs in enumerate(loss.seen):
        row = laid.rows[index % len(laid.rows)]
        for name in ("behaviour", "advantages", "mask", "versions", "episodes", "turns", "segments"):
            value = getattr(inputs, name)
            assert torch.equal(value, getattr(row, name).to(value.dtype)), name
        assert torch.equal(inputs.weights, 1 / row.lengths.double())
        assert inputs.reference is None
        assert inputs.proximal is not None
        torch.testing.assert_close(inputs.proximal, before[index % len(laid.rows)])
        epoch, place = divmod(index, len(laid.rows))
        assert inputs.version == (2 * epoch + (place >= len(laid.minibatches[0].rows))) / 4
        moved_by = (inputs.logprobs.detach() - inputs.proximal).abs().max()
        assert moved_by < 1e-12 if index < len(laid.minibatches[0].rows) else moved_by > 1e-4


def test_a_loss_that_needs_a_reference_where_there_is_none_is_refused(tmp_path: Path):
    make_model(tmp_path)
    with pytest.raises(ConfigError, match="the loss needs a frozen reference"):
        step(engine_of(tmp_path), packed(random_batch(0, vocab=43)), loss=ClippedSurrogate(kl_coef=0.1))


def test_cutting_a_batch_into_microbatches_changes_nothing(tmp_path: Path):
    make_model(tmp_path)
    start = None
    results = []
    for settings in ({"seq_len": 256}, {"seq_len": 32}, {"seq_len": 64, "share_prefixes": False}):
        engine = engine_of(tmp_path, seq_len=256)
        start = hf_weights(engine.model)
        laids = [packed(random_batch(seed, vocab=43, groups=3), **settings) for seed in range(2)]
        metrics = [reduce(step(engine, laids[0]))]
        states = engine.optimizer.state
        gradient = torch.cat([states[weight]["exp_avg"].flatten() for weight in engine.model.parameters()])
        metrics.append(reduce(step(engine, laids[1])))
        results.append((len(laids[0].rows), metrics, gradient.clone(), hf_weights(engine.model)))
    (row_count, metrics, gradient, weights), *later_results = results
    assert row_count == 1
    for rows, other_metrics, other_gradient, other_weights in later_results:
        assert rows > 1
        assert (gradient - other_gradient).norm() < 1e-12 * gradient.norm()
        assert furthest(weights, other_weights) < 1e-10
        for mine, theirs in zip(metrics, other_metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10, abs=1e-12)
    assert furthest(weights, start) > 1e-3


def test_recomputing_activations_changes_nothing(tmp_path: Path):
    make_model(tmp_path)
    kept, *recomputed = (
        engine_of(tmp_path, activation_checkpointing=policy_name) for policy_name in ("none", "selective", "full")
    )
    laid = packed(random_batch(0, vocab=43))
    expected = reduce(step(kept, laid))
    for engine in recomputed:
        assert reduce(step(engine, laid)) == expected
        assert furthest(hf_weights(kept.model), hf_weights(engine.model)) == 0


def test_recomputing_activations_runs_the_layers_twice(tmp_path: Path):
    make_model(tmp_path)
    counts = []
    for checkpointing in ("none", "full"):
        engine = engine_of(tmp_path, activation_checkpointing=checkpointing)
        calls: list[int] = []
        for module in engine.model.modules():
            if type(module).__name__ == "TreeAttention":
                module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        step(engine, packed(random_batch(0, vocab=43), seq_len=256))
        counts.append(len(calls))
    assert counts == [2, 4]


def test_the_reference_stays_where_it_started(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path, reference=True)
    laid = packed(random_batch(0, vocab=43))
    loss = ClippedSurrogate(kl_coef=0.1)
    assert reduce(step(engine, laid, loss=loss))["kl_reference/k3"] == pytest.approx(0, abs=1e-9)
    assert reduce(step(engine, laid, loss=loss))["kl_reference/k3"] > 1e-4
    assert furthest(hf_weights(engine._reference), hf_weights(engine_of(tmp_path).model)) == 0


def test_scoring_leaves_the_shards_in_place_and_steps_as_they_were(tmp_path: Path):
    make_model(tmp_path)
    scored, plain = (engine_of(tmp_path, dtype="bfloat16") for _ in range(2))  # its passes run on copies
    laid = packed(random_batch(0, vocab=43))
    step(plain, laid)
    step(scored, laid)
    before = dict(scored.model.named_parameters())
    scored.logprobs(laid.rows, temperature=1.0)
    after = dict(scored.model.named_parameters())
    assert [name for name in before if after[name] is not before[name]] == []
    step(plain, laid)
    step(scored, laid)
    assert furthest(hf_weights(scored.model), hf_weights(plain.model)) == 0


def test_weights_are_cast_once_for_all_rows_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_model(tmp_path)
    engine, laid = engine_of(tmp_path, dtype="bfloat16"), packed(random_batch(0, vocab=43, groups=6), seq_len=64)
    assert [len(minibatch.rows) > 1 for minibatch in laid.minibatches] == [True]
    step(engine, laid)
    copy = torch._foreach_copy_
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, weights: copied.extend(weights) or copy(to, weights))
    step(engine, laid)
    assert set(copied) == set(engine.model.parameters())
    assert len(copied) == len(set(copied))


FROZEN = ("model.embed_tokens.*", "model.layers.0.*", "model.norm.*")


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_freezing_weights_changes_nothing_for_the_others(checkpointing: str, tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path, frozen=FROZEN, activation_checkpointing=checkpointing)
    masked = engine_of(tmp_path)
    frozen = {name for name, parameter in named_weights(engine.model) if not parameter.requires_grad}
    assert frozen == {n for n, _ in named_weights(masked.model) if n.startswith(("tok_", "layers.0.", "norm."))}
    for name, parameter in named_weights(masked.model):
        if name in frozen:  # without a gradient AdamW leaves a weight alone
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    before = hf_weights(engine.model)
    for seed in range(2):
        laid = packed(random_batch(seed, vocab=43))
        assert reduce(step(engine, laid)) == pytest.approx(reduce(step(masked, laid)), rel=1e-12)
    assert moved(engine, before) > 1e-4
    assert furthest(hf_weights(engine.model), hf_weights(masked.model)) < 1e-13


@dataclass(frozen=True, kw_only=True)
class Broken(ClippedSurrogate):
    """A loss whose gradient is not finite where there is a token of this episode."""

    episode: int
    value: float

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, sums = super().__call__(inputs)
        return loss * (self.value if (inputs.episodes == self.episode).any() else 1), sums


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True)])
def test_bfloat16_is_close_and_keeps_float32_weights(family: str, tied: bool, tmp_path: Path):
    make_model(tmp_path, family, tie_word_embeddings=tied)
    exact, rounded = engine_of(tmp_path), engine_of(tmp_path, dtype="bfloat16")
    laid = packed(random_batch(0, vocab=43))
    for moved_weight, other in zip(
        exact.logprobs(laid.rows, temperature=1.0), rounded.logprobs(laid.rows, temperature=1.0), strict=True
    ):
        assert other.dtype == torch.float32
        assert 0 < (moved_weight - other).abs().max() < 0.1
    expected, rounded_metrics = reduce(step(exact, laid)), reduce(step(rounded, laid))
    assert rounded_metrics["loss"] == pytest.approx(expected["loss"], abs=0.02)
    assert rounded_metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    weights = hf_weights(rounded.model)
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in weights.values())
    # A first step of AdamW moves each weight by about lr in the gradient's direction; few directions may differ.
    differ = [(weights[name] - tensor).abs() > 1e-4 for name, tensor in hf_weights(exact.model).items()]
    assert sum(int(d.sum()) for d in differ) < 0.05 * sum(d.numel() for d in differ)


FROZEN_OF = {"qwen3 untied": FROZEN, "llama tied": ("model.layers.*.mlp.*", "model.layers.1.*")}
"""Some models are trained in part: some of FSDP's groups, and parts of others, have no gradient."""


def batches() -> list[Batch]:
    return [random_batch(seed, vocab=43, groups=3) for seed in range(3)]


SEQUENCES = ClippedSurrogate(aggregation=Aggregation(kind="sequence_mean"), correction=Correction.presets["decoupled"])


def train_as_rank(
    rank: int, folders: dict[str, Path]
) -> dict[str, tuple[list[dict], dict[str, torch.Tensor], tuple[object, float]]]:
    """Three steps on each model, the last with nothing for rank 1; metrics and whole weights; and a broken update."""
    results = {}
    for name, folder in folders.items():
        checkpointing = "full" if name == "llama tied" else "none"
        engine = engine_of(folder, activation_checkpointing=checkpointing, frozen=FROZEN_OF.get(name, ()))
        metrics = []
        for batch, loss, epochs, minibatches in zip(batches(), (LOSS, SEQUENCES), (1, 2), (1, 2), strict=False):
            laid = packed(batch, shares=2, seq_len=32, minibatches=minibatches)
            assert len(laid.rows) > 2
            with Reductions() as several:
                metrics.append(step(engine, laid, loss=loss, epochs=epochs))
        (laid,) = packed(batches()[2], seq_len=256).minibatches
        last = packed(batches()[2], seq_len=256)
        with Reductions() as reductions:
            metrics.append(step(engine, replace(last, minibatches=(replace(laid, rows=(laid.rows[0], empty_row())),))))
        assert several.count == 4 * reductions.count > 0, "once an update, whatever the number of its rows"
        weights = hf_weights(engine.model)
        rank_batch = replace(laid, rows=[laid.rows[0], empty_row()][rank : rank + 1])
        broken = Broken(episode=0, value=float("nan"))  # on rank 0 alone
        skipped = engine.train_batch([rank_batch], StepRequest(loss=broken, total_updates=9)).metrics
        with pytest.raises(LossError, match="a bug of a user"):  # on both ranks, though it raises on one
            engine.train_batch([rank_batch], StepRequest(loss=Failing(at=1 - rank), total_updates=9))
        results[name] = (metrics, weights, (skipped, moved(engine, weights)))
    return results


class Reductions(TorchDispatchMode):
    """Counts how often gradients are added up over ranks."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Failing(ClippedSurrogate):
    """Raises at one of its calls."""

    at: int
    calls: list[None] = field(default_factory=list)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.calls.append(None)
        if len(self.calls) == self.at:
            raise ValueError("a bug of a user")
        return super().__call__(inputs)


def test_weights_that_are_not_the_optimizers_are_not_saved(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path, dtype="bfloat16")
    (row,) = packed(random_batch(0, vocab=43)).rows
    with torch.no_grad():  # copies stay in place of the masters
        engine.scorer.score(engine.model, engine.scorer.on_device(row), Scoring())
    with pytest.raises(CheckpointError, match="are not those that the optimizer trains"):
        training_state(engine.model, engine.optimizer, {})


def test_the_learning_rate_ends_at_0_although_minibatches_gave_no_update(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path, optimizer=OptimizerConfig(lr=1e-3, decay="linear"))
    (minibatch,) = packed(random_batch(0, vocab=43)).minibatches
    nothing = replace(minibatch, rows=())
    minibatches = [minibatch, nothing, nothing, minibatch]
    step_metrics = engine.train_batch(minibatches, StepRequest(loss=LOSS, total_updates=4)).metrics
    rates = [metrics and reduce(metrics)["lr"] for metrics in step_metrics]
    assert rates == [pytest.approx(1e-3), {}, {}, pytest.approx(1e-3 / 4)]
    assert (engine.updates, engine.planned) == (2, 4)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_a_reference_in_the_forward_dtype_scores_as_its_source(family: str, tmp_path: Path):
    make_model(tmp_path, family)
    rows = packed(random_batch(0, vocab=43), seq_len=64).rows
    for name in ("bfloat16", "float32"):
        engine = engine_of(tmp_path, dtype=name, reference=True)
        assert engine._reference is not None
        assert {parameter.dtype for parameter in engine._reference.parameters()} == {getattr(torch, name)}
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
        buffers = [{key: buffer.dtype for key, buffer in m.named_buffers()} for m in (engine.model, engine._reference)]
        assert buffers[0] == buffers[1]
        expected = engine.logprobs(rows, temperature=1.0)
        logprobs = engine.scorer.logprobs(engine._reference, rows, 1.0)
        assert all(torch.equal(*pair) for pair in zip(logprobs, expected, strict=True))
        assert any(bool(logprobs.any()) for logprobs in expected)


def test_two_ranks_train_as_one(tmp_path: Path):
    folders = {}
    for family in ("llama", "qwen3"):
        for tied in (False, True):
            name = f"{family} {'tied' if tied else 'untied'}"
            folders[name] = tmp_path / name
            make_model(folders[name], family, tie_word_embeddings=tied, **ODD)
    ranks = run_ranks(train_as_rank, 2, folders)
    for name, folder in folders.items():
        engine = engine_of(folder, seq_len=256, frozen=FROZEN_OF.get(name, ()))
        before = hf_weights(engine.model)
        for index, batch in enumerate(batches()):
            many = index == 1
            laid = packed(batch, seq_len=256, minibatches=1 + many)
            alone = reduce(step(engine, laid, loss=SEQUENCES if many else LOSS, epochs=1 + many))
            parts = [rank[name][0][index] for rank in ranks]
            assert parts[0]["grad_norm"] == parts[1]["grad_norm"]
            together = reduce(merge_all(parts))
            assert together.keys() == alone.keys()
            for metric, value in alone.items():
                assert together[metric] == pytest.approx(value, rel=1e-10, abs=1e-12), (name, index, metric)
        assert moved(engine, before) > 1e-3
        for rank in ranks:
            assert furthest(hf_weights(engine.model), rank[name][1]) < 1e-10, name
            assert rank[name][2] == ([None], 0.0), "all ranks skip what is not finite on one"


def test_noise_in_a_layer_moves_logprobs_and_leaves_nothing_behind(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path)
    rows = packed(random_batch(0, vocab=43)).rows
    before = engine.logprobs(rows, temperature=0.7)
    small, large = (engine.layer_noise(rows, temperature=0.7, relative=scale) for scale in (1e-9, 1e-6))
    assert [count for _, count in small] == [sum(int(row.mask.sum()) for row in rows)] * len(engine.model.layers)
    assert all(total > 0 for total, _ in small)
    assert all(990 < b / a < 1010 for (a, _), (b, _) in zip(small, large, strict=True)), "it grows with the noise"
    assert all(torch.equal(a, b) for a, b in zip(before, engine.logprobs(rows, temperature=0.7), strict=True))
