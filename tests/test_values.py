"""Value models against transformers and NumPy: values, gradients, the value loss, folders, and several ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.ranks import run_ranks
from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.algorithms.value_loss import ValueLoss
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ConfigError
from forge_rl.metrics import ExplainedVariance, merge_all, reduce
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout, PackedBatch
from forge_rl.packing.unpacking import unpack
from forge_rl.types import Batch
from tests.fakes import hf_weights, make_model, random_batch
from tests.plain_trainer import InFloat64, in_float64

pytestmark = pytest.mark.usefixtures("process_group")

OPTIMIZER = OptimizerConfig(lr=1e-3, max_grad_norm=1e9)
LOSS = ValueLoss(clip=0.2)


def engine_of(folder: Path, *, values: bool = True, **settings: Any) -> TitanEngine:
    train_settings = {"dtype": "float64", "seq_len": 64, "optimizer": OPTIMIZER, **settings}
    return TitanEngine(folder, TrainSettings(**train_settings), values=values)


def make_value_model(folder: Path, family: str = "llama", **config: object) -> tuple[torch.nn.Module, torch.Tensor]:
    """A folder with a value head; returns transformers' model without it, and the head's weight, [1, dim]."""
    model = make_model(folder, family, **config)
    weights = load_file(folder / "model.safetensors")
    head = torch.randn(1, 24, generator=torch.Generator().manual_seed(7)) * 0.3
    save_file(weights | {"score.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return model, head


def columns_of(batch: Batch) -> dict[str, list[list[np.ndarray]]]:
    """Targets and old values that are near a model's, so that some are clipped."""
    generator = np.random.default_rng(0)

    def noise() -> list[list[np.ndarray]]:
        return [
            [generator.normal(0, 0.5, e.response_tokens).astype(np.float32) for e in group.episodes]
            for group in batch.groups
        ]

    return {"returns": noise(), "old_values": noise()}


def packed(batch: Batch, **layout: Any) -> PackedBatch:
    return pack(
        batch,
        torch.zeros(batch.rewards.shape),
        Layout(**{"seq_len": 64, **layout}),
        drop_uniform=False,
        columns=columns_of(batch),
    )


def plain_values(reference: Any, head: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Value of each trained token of each episode: the head's output one token before it."""
    row_values = []
    for episode in batch.episodes:
        (segment,) = episode.segments
        ids = torch.tensor(np.asarray(segment.token_ids), dtype=torch.int64)
        with InFloat64():
            hidden = reference.model(ids[None]).last_hidden_state[0]
        row_values.append((hidden[:-1] @ head[0])[torch.tensor(np.asarray(segment.trained))[1:]])
    return row_values


@pytest.mark.parametrize("family", [*FAMILIES, "granite", "olmo2"])
def test_values_and_their_gradients_are_those_of_transformers(family: str, tmp_path: Path):
    model, head = make_value_model(tmp_path, family)
    engine = engine_of(tmp_path)
    reference, weight = in_float64(model, engine.model), head.double().requires_grad_()
    batch = random_batch(3, vocab=43)
    laid = packed(batch)
    expected = plain_values(reference, weight, batch)
    policy_values = unpack(laid, engine.values(laid.rows))
    assert torch.cat(expected).std() > 0.1
    assert (
        max(
            float((policy_values[e] - expected_values.detach()).abs().max())
            for e, expected_values in enumerate(expected)
        )
        < 1e-10
    )

    columns = columns_of(batch)
    returns, old = (
        [torch.from_numpy(array).double() for group in columns[name] for array in group]
        for name in ("returns", "old_values")
    )
    total, clipped = torch.zeros((), dtype=torch.float64), 0
    for value, target, before in zip(expected, returns, old, strict=True):
        clipped_value = before + torch.clamp(value - before, -0.2, 0.2)
        total = total + (0.5 * torch.maximum((value - target) ** 2, (clipped_value - target) ** 2)).sum()
        clipped += int(((clipped_value - target) ** 2 > (value - target) ** 2).sum())
    tokens = sum(map(len, expected))
    (total / tokens).backward()

    gradients: list[torch.Tensor] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.extend(p.grad.clone() for p in engine.model.parameters())
    )
    (metrics,) = engine.train_batch(
        laid.minibatches, StepRequest(loss=LOSS, temperature=0.3, total_updates=5, version=0)
    ).metrics
    assert metrics is not None
    measured = reduce(metrics)
    assert measured["loss"] == pytest.approx(float(total.detach()) / tokens, rel=1e-10)
    assert measured["loss/clipped"] == pytest.approx(clipped / tokens)
    assert 0 < clipped < tokens
    targets, values = torch.cat(returns), torch.cat(expected).detach()
    explained = 1 - (targets - values).var() / targets.var()
    assert measured["values/explained_variance"] == pytest.approx(float(explained), rel=1e-9)
    assert measured["values/mean"] == pytest.approx(float(values.mean()))
    assert not {"entropy", "logprob_gap", "ratio/max"} & measured.keys()

    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()} | {"score.weight": weight.grad}
    compared = set()
    for (name, weights), grad in zip(engine.model.named_parameters(), gradients, strict=True):
        for part in engine.model.names.parts(name, weights.shape):
            if part.name in theirs:  # transformers stacks what most families' files keep apart
                expected_grad = theirs[part.name]
                error = (part.of(grad) - expected_grad).abs().max() / expected_grad.abs().max()
                assert error < 1e-9, part.name
                compared.add(part.name)
    assert {"score.weight", "model.embed_tokens.weight", "model.norm.weight"} <= compared


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_value_head_starts_at_0_and_its_export_loads_elsewhere(family: str, tied: bool, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    make_model(tmp_path, family, tie_word_embeddings=tied)
    engine = engine_of(tmp_path)
    batch = random_batch(0, vocab=43)
    laid = packed(batch)
    assert all(not values.any() for values in engine.values(laid.rows))
    for _ in range(3):
        engine.train_batch(laid.minibatches, StepRequest(loss=LOSS, total_updates=5))
    for part in ("training", "model"):
        (tmp_path / "saved" / part).mkdir(parents=True)
    engine.save(tmp_path / "saved", tmp_path, version=2).result()
    folder = tmp_path / "saved" / "model"
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    opened, notes = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"]
    assert not notes["unexpected_keys"]
    assert opened.config.num_labels == 1
    assert opened.score.weight.abs().max() > 1e-3
    # The export is in float32, so compare with an engine that reads it.
    resumed_engine = engine_of(folder)
    values = unpack(laid, resumed_engine.values(laid.rows))
    reference = in_float64(opened, resumed_engine.model)
    expected = plain_values(reference, reference.score.weight, batch)
    assert max(float((values[e] - expected_values).abs().max()) for e, expected_values in enumerate(expected)) < 1e-10
    resumed = engine_of(tmp_path)
    assert resumed.load_training_state(tmp_path / "saved" / "training") == 2
    for resumed_values, other in zip(resumed.values(laid.rows), engine.values(laid.rows), strict=True):
        assert torch.equal(resumed_values, other)
    assert resumed.updates == 3


def test_a_reset_head_is_0_again(tmp_path: Path):
    make_model(tmp_path)
    engine, laid = engine_of(tmp_path), packed(random_batch(0, vocab=43))
    for _ in range(2):
        engine.train_batch(laid.minibatches, StepRequest(loss=LOSS, total_updates=5))
    assert any(values.any() for values in engine.values(laid.rows))
    engine.reset(OptimizerConfig())
    assert not any(values.any() for values in engine.values(laid.rows))


def test_values_are_refused_of_a_policy_and_logprobs_of_a_value_model(tmp_path: Path):
    make_model(tmp_path)
    laid = packed(random_batch(0, vocab=43))
    policy, critic = engine_of(tmp_path, values=False), engine_of(tmp_path)
    for call in (
        lambda: policy.values(laid.rows),
        lambda: critic.logprobs(laid.rows, temperature=1.0),
        lambda: policy.train_batch(laid.minibatches, StepRequest(loss=LOSS, total_updates=5)),
        lambda: critic.train_batch(laid.minibatches, StepRequest(loss=ClippedSurrogate(), total_updates=5)),
    ):
        with pytest.raises(ConfigError, match=r"values|logprobs"):
            call()
    try_loss(LOSS)


def test_a_values_loss_by_hand():
    # Old value 1, clip 0.5. Of the value 2 and the target 3 the clipped value is 1.5: the errors are 1 and 2.25, so the
    # clipped one counts and there is no gradient. With the target 0 the errors are 4 and 2.25; of an unclipped value
    # they are equal. The last token is not trained.
    values = torch.tensor([2.0, 2.0, 1.2, 5.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    unit, index = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int32)
    inputs = LossInputs(
        logprobs=0 * unit,
        behaviour=0 * unit,
        advantages=0 * unit,
        weights=unit,
        mask=mask,
        versions=index,
        episodes=index,
        turns=index,
        segments=index,
        lengths=index + 3,
        counts=Counts(tokens=3, sequences=1),
        values=values,
        columns={
            "returns": torch.tensor([3.0, 0.0, 2.2, torch.nan], dtype=torch.float64),
            "old_values": torch.tensor([1.0, 1.0, 1.0, torch.nan], dtype=torch.float64),
        },
    )
    total, sums = ValueLoss(clip=0.5)(inputs)
    assert float(total) == pytest.approx((2.25 + 4 + 1) / 2)
    assert float(sums["clipped"]) == 1  # type: ignore[arg-type]
    total.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, 2, -1, 0])
    free, _ = ValueLoss(clip=float("inf"))(inputs)
    assert float(free) == pytest.approx((1 + 4 + 1) / 2)


def test_explained_variance_is_that_of_all_parts_together():
    generator = np.random.default_rng(0)
    targets, values = generator.normal(3, 1, 20), generator.normal(3, 1, 20)
    errors = targets - values
    parts = [
        {"a": ExplainedVariance(t.sum(), (t * t).sum(), e.sum(), (e * e).sum(), len(t))}
        for t, e in ((targets[:5], errors[:5]), (targets[5:], errors[5:]))
    ]
    assert reduce(merge_all(parts))["a"] == pytest.approx(1 - errors.var() / targets.var())
    assert np.isnan(ExplainedVariance(0.3, 0.1 * 0.1 * 3, 1.0, 2.0, 3).share), "the targets are equal"
    assert np.isnan(ExplainedVariance(0, 0, 0, 0, 0).share)


LAYOUTS: dict[str, dict[str, int]] = {
    "FSDP": {},
    "CP": {"context_parallel_degree": 2},
    "TP": {"tensor_parallel_degree": 2},
    "PP": {"pipeline_parallel_degree": 2},
}


def train_as_rank(rank: int, folder: Path, families: list[str]) -> dict[str, Any]:
    results = {}
    for family in families:
        for name, degrees in LAYOUTS.items():
            engine = engine_of(folder / family, **degrees)
            settings = TrainSettings(**degrees)
            shares = len(settings.heads(2))
            laid = packed(
                random_batch(0, vocab=43, groups=4),
                shares=shares,
                seq_len=64 // settings.context_parallel_degree,
                **{name: value for name, value in degrees.items() if name[0] != "p"},
            )
            mine = [replace(m, rows=m.rows[settings.share_of(rank, 2) :: shares]) for m in laid.minibatches]
            valued = engine.values(mine[0].rows)
            metrics = engine.train_batch(mine, StepRequest(loss=LOSS, epochs=2, total_updates=5)).metrics
            engine.save(saved := folder / f"{family} {name}", folder / family, version=0).result()
            heads = load_file(saved / "model" / "model.safetensors")["score.weight"]
            results[f"{family} {name}"] = metrics, hf_weights(engine.model), valued, heads
    return results


def test_two_ranks_value_and_train_as_one(tmp_path: Path):
    families = ["llama", "qwen3"]
    for family in families:
        make_value_model(tmp_path / family, family)
        for name in LAYOUTS:
            for part in ("training", "model"):
                (tmp_path / f"{family} {name}" / part).mkdir(parents=True)
    ranks = run_ranks(train_as_rank, 2, tmp_path, families)
    for family in families:
        alone = engine_of(tmp_path / family)
        laid = packed(random_batch(0, vocab=43, groups=4))
        before = unpack(laid, alone.values(laid.rows))
        metrics = alone.train_batch(laid.minibatches, StepRequest(loss=LOSS, epochs=2, total_updates=5)).metrics
        expected, weights = [reduce(update or {}) for update in metrics], hf_weights(alone.model)
        for name in LAYOUTS:
            shares = [ranks[rank] for rank in TrainSettings(**LAYOUTS[name]).heads(2)]
            parts = [rank[f"{family} {name}"] for rank in shares]
            for index, update in enumerate(expected):
                merged = reduce(merge_all(part[0][index] for part in parts))
                of_ranks = ("attention/", "pipeline/")
                together = {key: value for key, value in merged.items() if not key.startswith(of_ranks)}
                assert together == pytest.approx(update, rel=1e-9, abs=1e-12), (family, name)
            for rank in ranks:
                rank_results = rank[f"{family} {name}"]
                assert rank_results[1].keys() <= weights.keys()
                assert (
                    max(float((rank_results[1][key] - weights[key]).abs().max()) for key in rank_results[1]) < 1e-10
                ), (family, name)
                assert torch.equal(rank_results[3], weights["score.weight"].float()), "the export"
            flat = torch.cat([values for part in parts for values in part[2]])
            values = torch.cat(list(before.values()))
            assert float(flat.sum()) == pytest.approx(float(values.sum()), rel=1e-9), (family, name)
