"""Losses in the engine: statistics over episodes and the minibatch, sums of components, and a loss for each source."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.algorithms.components import CrossEntropy, Entropy, LossBySource, LossSum
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.minibatch_losses import ClipCov, KlCov, M2po
from forge_rl.algorithms.policy_losses import Gmpo, Gspo, Topr
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.metrics import reduce
from forge_rl.types import Batch
from tests.fakes import hf_weights, make_model, packed, random_batch
from tests.test_titan_train import LOSS, OPTIMIZER, engine_of, furthest, moved, step

pytestmark = pytest.mark.usefixtures("process_group")


@dataclass(frozen=True, kw_only=True)
class OverAll(ClippedSurrogate):
    """Weights each token by the mean over the minibatch, its rank in it, and a sum over its group and its episode."""

    scope = "minibatch"

    def statistics(self, tokens: LossInputs) -> dict[str, torch.Tensor]:
        gaps = tokens.logprobs - tokens.behaviour
        ranks = gaps.argsort().argsort().to(gaps.dtype) / len(gaps)
        order = torch.arange(len(gaps), dtype=gaps.dtype) / len(gaps)
        return {"mean": gaps.mean(), "ranks": ranks + order, "wide": torch.stack([gaps, -gaps], dim=1)}

    def token_losses(self, logprobs: Any, old: Any, advantages: Any, inputs: LossInputs) -> Any:
        statistics = inputs.statistics
        torch.testing.assert_close(statistics["wide"].sum(dim=1), torch.zeros_like(logprobs))
        return -(1 + statistics["mean"].exp() + statistics["ranks"]) * advantages * logprobs, {}


def scattered_batch() -> Batch:
    """Episodes of several segments, which rows of this length split."""
    batch = random_batch(3, vocab=43, groups=3, turns=3)

    def rewritten(episode: Any) -> Any:
        first, second, third = episode.turns
        return replace(episode, turns=(first, replace(second, prompt_ids=[41, 42, *second.prompt_ids[:4]]), third))

    groups = [replace(g, episodes=tuple(map(rewritten, g.episodes))) for g in batch.groups]
    return replace(batch, groups=tuple(groups))


CORRECTED = ClippedSurrogate(
    correction=Correction(
        proximal="recompute", mode="truncate", level="sequence", high=1.5, reject="token_k2:0.1+seq_max_k2:0.5"
    ),
    top_entropy_quantile=0.4,
)
SELECTING: list[Loss] = [M2po(), ClipCov(cov_ratio=0.2, cov_low=0.01), KlCov(cov_ratio=0.2), CORRECTED]


@pytest.mark.parametrize(
    "loss", [Gspo(clip_high=0.5), Gmpo(), Topr(), OverAll(), *SELECTING], ids=lambda each: type(each).__name__
)
def test_statistics_do_not_depend_on_the_layout_of_rows(loss: Loss, tmp_path: Path):
    make_model(tmp_path)
    results, scattered = [], []
    for seq_len in (256, 40):
        engine = engine_of(tmp_path, seq_len=seq_len)
        laid = packed(scattered_batch(), seq_len=seq_len)
        scattered.append("episode" in laid.minibatches[0].scattered)
        before = hf_weights(engine.model)
        metrics = reduce(step(engine, laid, loss=loss))
        results.append((metrics["loss"], metrics["grad_norm"], hf_weights(engine.model)))
        assert moved(engine, before) > 1e-6
    assert scattered == [False, True]
    assert results[1][:2] == pytest.approx(results[0][:2], rel=1e-10)
    assert furthest(results[0][2], results[1][2]) < 1e-10


def test_components_have_means_of_their_own_and_do_not_dilute_each_other(tmp_path: Path):
    make_model(tmp_path)
    laid = packed(random_batch(0, vocab=43, turns=3))
    gradients = []
    parts: dict[str, Loss] = {"policy": LOSS, "entropy": Entropy(), "echo": CrossEntropy(on="observations")}
    for loss in (*parts.values(), LossSum(parts, {"entropy": -0.5, "echo": 2.0})):
        engine = engine_of(tmp_path, optimizer=replace(OPTIMIZER, max_grad_norm=1e9))
        step_gradients: list[torch.Tensor] = []
        engine.optimizer.register_step_pre_hook(
            lambda *_, engine=engine, kept=step_gradients: kept.extend(
                p.grad.clone() for p in engine.model.parameters()
            )
        )
        metrics = reduce(step(engine, laid, loss=loss))
        gradients.append(torch.cat([gradient.flatten() for gradient in step_gradients]))
    assert "loss/policy/clipped" in metrics
    policy, entropy, echo, together = gradients
    assert all(gradient.norm() > 1e-3 for gradient in gradients)
    torch.testing.assert_close(together, policy - 0.5 * entropy + 2 * echo, rtol=1e-9, atol=1e-12)


def test_a_loss_for_each_source_is_that_loss_if_all_sources_have_the_same(tmp_path: Path):
    make_model(tmp_path)
    batch = random_batch(0, vocab=43, groups=3)
    named = [replace(g, task=replace(g.task, source=name)) for g, name in zip(batch.groups, "abc", strict=True)]
    laid = packed(replace(batch, groups=tuple(named)))
    results = []
    for loss in (Gspo(), LossBySource({"a": Gspo(), "": Gspo()}), LossBySource({"a": Gspo(), "": Topr()})):
        engine = engine_of(tmp_path)
        results.append((reduce(step(engine, laid, loss=loss)), hf_weights(engine.model)))
    assert results[1][0]["loss"] == pytest.approx(results[0][0]["loss"], rel=1e-10)
    assert furthest(results[0][1], results[1][1]) < 1e-12
    assert furthest(results[0][1], results[2][1]) > 1e-6
    assert {"loss/a/clipped", "loss/clipped"} <= results[1][0].keys()
    assert {"loss/a/clipped", "loss/weight"} <= results[2][0].keys()


def test_metrics_of_a_loss_for_a_source_are_means_over_its_own_tokens(tmp_path: Path):
    make_model(tmp_path)
    batch = random_batch(0, vocab=43, groups=3)
    named = [replace(g, task=replace(g.task, source=name)) for g, name in zip(batch.groups, "abb", strict=True)]
    laid = packed(replace(batch, groups=tuple(named)))
    surrogate = ClippedSurrogate(correction=Correction(proximal="recompute", mode="truncate", high=2.0))
    metrics, parts = (
        reduce(step(engine_of(tmp_path), laid, loss=loss))
        for loss in (surrogate, LossBySource({"a": surrogate, "": surrogate}))
    )
    counts = [sum(episode.response_tokens for episode in group.episodes) for group in batch.groups]
    for name in ("ratio", "surrogate", "correction/weight"):
        of_sources = counts[0] * parts[f"loss/a/{name}"] + sum(counts[1:]) * parts[f"loss/{name}"]
        assert of_sources / sum(counts) == pytest.approx(metrics[f"loss/{name}"], rel=1e-9)
    assert parts["loss/a/ratio"] == pytest.approx(1.0), "the update is the first one"
    assert parts["loss/a/correction/ess"] > 0.5
