"""Router replay: the engine's experts in packed rows, and in training, against transformers routed by hand."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.algorithms.logprobs import Scoring
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.routing import routers, set_routing
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.metrics import reduce
from forge_rl.packing.rows import PackedBatch, Row
from forge_rl.run.run_config import RunConfig
from forge_rl.services.trainer import Trainer
from forge_rl.types import Batch
from tests.fakes import hf_weights, make_model, packed, random_batch, train_batch
from tests.plain_trainer import in_float64, logits_of

pytestmark = pytest.mark.usefixtures("process_group")

LAYERS, EXPERTS, TOP_K = 2, 4, 2


def with_experts(batch: Batch, draw: Any) -> Batch:
    """The same batch, whose turns have the experts that `draw(group, episode, turn, tokens)` returns."""
    groups = []
    for g, group in enumerate(batch.groups):
        episodes = []
        for e, episode in enumerate(group.episodes):
            turns = (replace(turn, routed=draw(g, e, t, len(turn.context) - 1)) for t, turn in enumerate(episode.turns))
            episodes.append(replace(episode, turns=tuple(turns)))
        groups.append(replace(group, episodes=tuple(episodes)))
    return replace(batch, groups=tuple(groups))


def random_experts(seed: int = 0, layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K) -> Any:
    """Draws different experts for each token of an episode, the same ones for each of its turns."""

    def draw(group: int, episode: int, turn: int, tokens: int) -> np.ndarray:
        drawn = np.random.default_rng([seed, group, episode])
        return drawn.random((256, layers, experts)).argsort(axis=-1)[:tokens, :, :top_k].astype(np.uint8)

    return draw


def engine_of(folder: Path, **settings: Any) -> TitanEngine:
    return TitanEngine(folder, TrainSettings(dtype="float64", seq_len=64, **settings))


def own_choices(engine: TitanEngine, laid: PackedBatch) -> PackedBatch:
    """The rows, with the experts that the engine chooses itself."""
    expert_ids: list[torch.Tensor] = []
    for router in routers(engine.model):
        router.register_forward_hook(lambda _, __, out: expert_ids.append(out[1][0]))
    rows = []
    for row in laid.rows:
        expert_ids.clear()
        engine.logprobs([replace(row, routed=None)], temperature=1.0)
        rows.append(replace(row, routed=torch.stack(expert_ids, dim=1).to(torch.int16)))
    return replace(laid, minibatches=(replace(laid.minibatches[0], rows=tuple(rows)),))


def branches_of(row: Row, tree: int) -> torch.Tensor:
    """The branch of each token of a tree with one level: 0 in the prefix that they share, 1 and up after it."""
    positions = row.positions[row.trees == tree]
    begins = positions.diff(prepend=positions.new_tensor([-1])) != 1
    prefix = int(positions[begins].max()) if begins.any() else 0
    begins[prefix] = True
    return begins.cumsum(0)


def test_rows_carry_the_experts_of_each_input_token() -> None:
    unknown = (1, 1)  # an episode of the second group
    draw = random_experts()
    batch = with_experts(random_batch(0, vocab=43), lambda g, e, t, n: None if (g, e) == unknown else draw(g, e, t, n))
    laid = packed(batch, tensor_parallel_degree=8)
    checked = 0
    for row in laid.rows:
        assert row.routed is not None
        assert row.routed.dtype == torch.int16
        assert row.routed.shape == (len(row), LAYERS, TOP_K)
        assert (row.routed[row.trees < 0] == -1).all()
        for tree in range(int(row.trees.max()) + 1):
            branches = branches_of(row, tree)
            tree_positions = (row.trees == tree).nonzero()[:, 0]
            episodes = [
                int(row.episodes[tree_positions[branches == b]].max()) for b in range(1, int(branches.max()) + 1)
            ]
            known_episodes = [e for e in episodes if divmod(e, 3) != unknown]
            for branch, episode in enumerate([known_episodes[0], *episodes]):
                branch_positions = tree_positions[branches == branch]
                expected = -torch.ones(len(branch_positions), LAYERS, TOP_K)
                if divmod(episode, 3) != unknown:
                    drawn = draw(*divmod(episode, 3), 0, 256)
                    expected = torch.tensor(drawn)[row.positions[branch_positions]]
                assert row.routed[branch_positions].tolist() == expected.tolist()
                checked += len(branch_positions)
    assert checked == sum(int((row.trees >= 0).sum()) for row in laid.rows)
    assert any((branches_of(row, 0) == 0).any() for row in laid.rows), "prefixes are shared"
    assert all(row.routed is None for row in packed(random_batch(0, vocab=43)).rows)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_replay_of_the_trainers_own_choice_changes_nothing(family: str, tmp_path: Path) -> None:
    make_model(tmp_path, family)
    plain, replaying = engine_of(tmp_path), engine_of(tmp_path, router_replay=True)
    laid = packed(random_batch(0, vocab=43), seq_len=32)
    routed_batch = own_choices(plain, laid)
    if family == "deepseek_v3":  # the first layer is dense: what stands there is of no use
        routed_batch = replace(
            routed_batch,
            minibatches=(
                replace(
                    routed_batch.minibatches[0],
                    rows=tuple(
                        replace(row, routed=torch.cat([torch.zeros_like(row.routed[:, :1]), row.routed], dim=1))
                        for row in routed_batch.rows
                        if row.routed is not None
                    ),
                ),
            ),
        )
    expected, replay_metrics = (
        reduce(train_batch(*arguments)) for arguments in ((plain, laid), (replaying, routed_batch))
    )
    for name in ("loss", "grad_norm", "entropy", "experts/load_max_over_mean"):
        assert replay_metrics[name] == pytest.approx(expected[name], rel=1e-12), name
    assert expected["experts/load_max_over_mean"] > 1
    assert (replay_metrics["experts/replayed"], replay_metrics["experts/replay_differs"]) == (1, 0)
    assert "experts/replayed" not in expected
    theirs = hf_weights(plain.model)
    assert all(
        torch.allclose(value, theirs[name], rtol=0, atol=1e-12) for name, value in hf_weights(replaying.model).items()
    )


class Routed:
    """Transformers' Qwen3-MoE, whose routers take the experts that they are told."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.experts = torch.empty(0)
        for number, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
            layer.mlp.gate.forward = self.gate(layer.mlp.gate, number)

    def gate(self, gate: Any, number: int) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            scores = logits.softmax(-1).gather(1, self.experts[:, number])
            return logits, scores / scores.sum(-1, keepdim=True), self.experts[:, number]

        return forward

    def logprobs(self, ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        self.experts = experts
        logits = logits_of(self.model, ids)[:-1]
        return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def test_a_replay_of_other_experts_is_what_transformers_computes_with_them(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3_moe")
    engine = engine_of(tmp_path, router_replay=True)
    model = in_float64(model, engine.model)
    # All episodes of a group share the experts of their prompt.
    prompts = random_experts(1)
    draw = random_experts()

    def experts(group: int, episode: int, turn: int, tokens: int) -> np.ndarray:
        drawn = draw(group, episode, turn, tokens)
        drawn[:2] = prompts(group, 0, 0, 2)
        return drawn

    batch = with_experts(random_batch(0, vocab=43), experts)
    laid = packed(batch, drop_uniform=False)
    theirs = Routed(model)
    expected: dict[int, torch.Tensor] = {}
    for index, episode in enumerate(batch.episodes):
        (segment,) = episode.segments
        assert segment.routed is not None
        routed = torch.tensor(segment.routed).long()
        # What lies in a tree's shared prefix has the experts of its first branch.
        row = next(row for row in laid.rows if (row.episodes == index).any())
        tree = int(row.trees[(row.episodes == index)][0])
        assert row.routed is not None
        prefix = row.routed[row.trees == tree][branches_of(row, tree) == 0]
        routed[: len(prefix)] = prefix.long()
        ids = torch.tensor(segment.token_ids, dtype=torch.int64)
        expected[index] = theirs.logprobs(ids, routed)[torch.tensor(segment.trained[1:])]
    logprobs = engine.logprobs(laid.rows, temperature=1.0)
    plain = engine_of(tmp_path).logprobs(laid.rows, temperature=1.0)
    loss = torch.zeros(())
    for row, values, plain_values in zip(laid.rows, logprobs, plain, strict=True):
        for index in row.episodes.unique().tolist():
            if index >= 0:
                mask = row.mask & (row.episodes == index)
                torch.testing.assert_close(values[mask], expected[index].detach(), rtol=0, atol=1e-10)
                assert (plain_values[mask] - expected[index]).abs().max() > 0.01, "without replay it chooses others"
                loss = loss - expected[index].sum()
    # Gradients: of the sum of the logprobs.
    loss.backward()
    total = torch.zeros(())
    for row in laid.rows:
        total = total - engine.scorer.score(engine.model, engine.scorer.on_device(row), Scoring()).logprobs.sum()
        total.backward()
        total = torch.zeros(())
    for number, layer in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]
        titan = engine.model.layers[str(number)].moe.router.gate.weight.grad
        assert layer.mlp.gate.weight.grad.abs().max() > 1e-3
        torch.testing.assert_close(titan, layer.mlp.gate.weight.grad, rtol=1e-10, atol=1e-10)


def test_tokens_with_unknown_experts_are_routed_by_the_trainer(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    engine = engine_of(tmp_path, router_replay=True)
    batch = with_experts(random_batch(0, vocab=43), random_experts())
    (row,) = packed(batch, seq_len=128).rows
    assert row.routed is not None
    (plain_logprobs,) = engine.logprobs([replace(row, routed=None)], temperature=1.0)
    (none,) = engine.logprobs([replace(row, routed=torch.full_like(row.routed, -1))], temperature=1.0)
    assert torch.equal(plain_logprobs, none)
    partly = row.routed.clone()
    partly[row.trees == 1] = -1
    (logprobs,) = engine.logprobs([replace(row, routed=partly)], temperature=1.0)
    assert torch.allclose(logprobs[row.trees == 1], plain_logprobs[row.trees == 1], rtol=0, atol=1e-12)
    assert (logprobs - plain_logprobs)[row.trees == 0].abs().max() > 0.01
    laid = replace(packed(batch, seq_len=128), minibatches=())
    minibatch = packed(batch, seq_len=128).minibatches[0]
    laid = replace(laid, minibatches=(replace(minibatch, rows=(replace(row, routed=partly),)),))
    metrics = reduce(train_batch(engine, laid))
    assert metrics["experts/replayed"] == pytest.approx(float((row.trees == 0).sum() / (row.trees >= 0).sum()))
    assert 0.3 < metrics["experts/replay_differs"] <= 1, "of 6 pairs of experts one is its own"


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_what_is_computed_again_is_routed_as_before(checkpointing: str, tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    laid = packed(with_experts(random_batch(0, vocab=43), random_experts()), seq_len=32)
    assert len(laid.rows) > 1
    plain = engine_of(tmp_path, router_replay=True)
    replay_engine = engine_of(tmp_path, router_replay=True, activation_checkpointing=checkpointing)
    expected, replay_metrics = reduce(train_batch(plain, laid)), reduce(train_batch(replay_engine, laid))
    assert replay_metrics == pytest.approx(expected, rel=1e-12)
    weights = hf_weights(plain.model)
    assert all(
        torch.allclose(value, weights[name], rtol=0, atol=1e-12)
        for name, value in hf_weights(replay_engine.model).items()
    )


def test_the_reference_chooses_for_itself(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe")
    engine = TitanEngine(tmp_path, TrainSettings(dtype="float64", seq_len=64, router_replay=True), reference=True)
    row = packed(with_experts(random_batch(0, vocab=43), random_experts())).rows[0]
    (plain_logprobs,) = engine.logprobs([replace(row, routed=None)], temperature=1.0)
    (reference,) = engine.scorer.logprobs(engine._reference, [row], 1.0)
    assert torch.equal(plain_logprobs, reference)


def test_biases_in_the_choice_of_experts_move_towards_even_loads(tmp_path: Path) -> None:
    make_model(tmp_path, "deepseek_v3")
    engine = engine_of(tmp_path, expert_balance="bias")

    def biases() -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in engine.model.named_buffers() if name.endswith("expert_bias_E")}

    before = biases()
    laid = packed(random_batch(0, vocab=43), seq_len=128)
    assert len(laid.rows) == 1
    metrics = reduce(train_batch(engine, laid))
    loads = [router.counts[:-3].double() for router in routers(engine.model) if router.counts is not None]
    assert metrics["experts/load_max_over_mean"] > 1
    for (name, after), load in zip(biases().items(), loads, strict=True):
        moved = (after - before[name]) / 0.001
        torch.testing.assert_close(moved, (load.mean() - load).sign().to(moved), rtol=0, atol=1e-3)
        assert moved.abs().sum() > 0
    assert all(spec.changed for spec in engine.specs()), "engines get the biases, too"
    for family, problem in (("deepseek_v3", ""), ("qwen3_moe", "no biases in its choice")):
        make_model(tmp_path, family)
        settings = TrainSettings(expert_balance="bias")
        with pytest.raises(ConfigError, match=problem) if problem else contextlib.nullcontext():
            check_model(settings, 1, read_architecture(tmp_path))
    with pytest.raises(ConfigError, match="each rank has all experts"):
        check_model(TrainSettings(expert_balance="least_loaded"), 1, read_architecture(tmp_path))


def test_flags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = RunConfig(trainer=Trainer.Config(router_replay=True))
    assert config.generator.routed_experts
    assert not RunConfig().generator.routed_experts
    with pytest.raises(ConfigError, match="has no experts") as error:
        check_model(config.trainer, 1, read_architecture(tmp_path))
    assert "--trainer.router-replay" in error.value.hint
    make_model(tmp_path, "qwen3_moe")
    engine = engine_of(tmp_path)
    with pytest.raises(ForgeError, match="3 experts for each of 2 layers"):
        set_routing(engine.model, torch.ones(4, dtype=torch.bool), torch.zeros(4, 2, 3, dtype=torch.int16))
