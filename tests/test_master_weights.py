"""One rank's weights: passes run on copies, and the masters get the sums of their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.adapter_settings import AdamStep, AdapterPass, AdapterSettings
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan import gradient_sums
from forge_rl.engines.titan.adapter_engine import TitanAdapters
from forge_rl.engines.titan.blocks import training_state
from forge_rl.engines.titan.cpu_attention import TreeMask
from forge_rl.engines.titan.gradient_sums import GradientSum, SumPlace, room_for_parts, summed_parts
from forge_rl.engines.titan.loading import load_weights
from forge_rl.engines.titan.master_weights import MasterWeights, joint_weight
from forge_rl.engines.titan.model import build_model
from forge_rl.engines.titan.train import TitanEngine
from tests.fakes import make_model, packed, random_batch, train_batch

ROWS = packed(random_batch(0, vocab=43))


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    model = build_model(read_architecture(folder), TrainSettings(dtype="float32", seq_len=16)).to(dtype)
    with torch.no_grad():
        model.init_states()
    load_weights(model, folder, tied=model.enable_weight_tying)
    return model


def run(model: Any, first: int) -> None:
    """Run both passes over a row."""
    positions = torch.arange(16)[None]
    until = torch.full((16,), 16, dtype=torch.int32)
    mask = (TreeMask(first=0, until=until, queries=16, branched=False, positions=positions[0]),)
    model((positions + first) % 40, positions, mask).log_softmax(-1)[0, :, 3].sum().backward()


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False), ("qwen3_moe", False)])
def test_gradients_over_rows_are_those_of_plain_autograd(family: str, tied: bool, tmp_path: Path):
    make_model(tmp_path, family, tie_word_embeddings=tied)
    plain, model = (loaded(tmp_path, torch.float64) for _ in range(2))
    weights = list(model.parameters())
    model.masters = MasterWeights(model, torch.float64)
    for first in (0, 7):
        run(plain, first)
        run(model, first)
    assert not {*weights} & {*model.parameters()}, "passes run on copies"
    model.masters.release()
    for weight, master, expected in zip(weights, model.parameters(), plain.parameters(), strict=True):
        assert master is weight
        torch.testing.assert_close(master.grad, expected.grad, rtol=1e-12, atol=1e-12)


def test_copies_follow_their_masters_and_frozen_weights_have_no_gradient(tmp_path: Path):
    make_model(tmp_path)
    model = loaded(tmp_path, torch.float32)
    masters = MasterWeights(model, torch.bfloat16)
    model.norm.weight.requires_grad_(False)
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.norm.weight.fill_(value)
        masters.cast()
        assert model.norm.weight.dtype == torch.bfloat16
        assert bool((model.norm.weight == value).all())
        masters.release()
    run(model, 0)
    masters.release()
    assert model.norm.weight.grad is None
    assert model.norm.weight.dtype == torch.float32
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Masters that were copied so far."""
    masters = list[torch.Tensor]()
    copy = torch._foreach_copy_

    def count(copies: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        masters.extend(sources)
        copy(copies, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", count)
    return masters


def engine_of(folder: Path, **settings: Any) -> TitanEngine:
    optimizer = OptimizerConfig(lr=1e-2)
    return TitanEngine(folder, TrainSettings(dtype="bfloat16", seq_len=64, optimizer=optimizer, **settings))


def scores(engine: TitanEngine) -> torch.Tensor:
    return torch.cat(engine.logprobs(ROWS.rows, temperature=1.0))


def freed(engine: TitanEngine) -> TitanEngine:
    """The engine without copies, so that its next pass makes new ones."""
    assert engine.model.masters is not None
    engine.model.masters.free()
    return engine


@pytest.mark.usefixtures("process_group")
def test_passes_that_score_share_their_copies_with_the_next_update(tmp_path: Path, casts: list[torch.Tensor]):
    make_model(tmp_path)
    engine = engine_of(tmp_path)
    first = scores(engine)
    assert set(casts) == set(engine.model.parameters())
    casts.clear()
    assert torch.equal(scores(engine), first)
    train_batch(engine, ROWS)
    assert casts == []
    assert not torch.equal(scores(engine), first)
    assert len(casts) == len({*engine.model.parameters()})


def change_gradients_and_step(engine: TitanEngine, _: Path) -> None:
    for weight in engine.model.parameters():
        weight.grad = torch.ones_like(weight)
    engine.optimizer.step()


def change_memory(engine: TitanEngine, _: Path) -> None:
    """Give a weight other memory after scores, and then memory where the first was, if that is free by then."""
    weight = engine.model.get_parameter("tok_embeddings.weight")
    weight.data = torch.zeros_like(weight, requires_grad=False)
    scores(engine)
    address = weight.data_ptr()
    weight.data = torch.zeros_like(weight, requires_grad=False)
    values = [torch.ones_like(weight, requires_grad=False) for _ in range(1000)]
    weight.data = next((tensor for tensor in values if tensor.data_ptr() == address), values[0])


def change_state(engine: TitanEngine, folder: Path) -> None:
    for part in ("saved/model", "saved/training"):
        (folder / part).mkdir(parents=True)
    trained = engine_of(folder)
    train_batch(trained, ROWS)
    trained.save(folder / "saved", folder, version=1).result()
    scores(engine)
    engine.load_training_state(folder / "saved" / "training")


def change_back(engine: TitanEngine, folder: Path) -> None:
    load_weights(engine.model, folder / "other", tied=engine.model.enable_weight_tying)
    assert not torch.equal(scores(engine), scores(engine_of(folder)))
    engine.reset(OptimizerConfig())


CHANGES: dict[str, Callable[[TitanEngine, Path], object]] = {
    "update": lambda engine, _: train_batch(engine, ROWS),
    "optimizer": change_gradients_and_step,
    "weights": lambda engine, folder: load_weights(engine.model, folder / "other", tied=False),
    "state": change_state,
    "reset": change_back,
    "write": lambda engine, _: engine.model.get_parameter("norm.weight").detach().view(-1)[:3].fill_(7.0),
    "memory": change_memory,
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("change", "optimizer_state"),
    [*((change, "float32") for change in CHANGES), ("update", "int8"), ("optimizer", "bfloat16")],
)
def test_no_pass_runs_on_copies_of_earlier_weights(change: str, optimizer_state: str, tmp_path: Path):
    other = make_model(tmp_path, tie_word_embeddings=False)
    torch._foreach_neg_([weight.detach() for weight in other.parameters()])
    other.save_pretrained(tmp_path / "other")
    engine = engine_of(tmp_path, optimizer_state=optimizer_state)
    before = scores(engine)
    CHANGES[change](engine, tmp_path)
    after = scores(engine)
    assert torch.equal(after, scores(freed(engine)))
    assert torch.equal(after, before) == (change == "reset")


@pytest.mark.usefixtures("process_group")
def test_no_pass_runs_on_copies_of_another_adapter(tmp_path: Path):
    make_model(tmp_path, "qwen3")
    engine = engine_of(tmp_path, lora=LoRAConfig(rank=4))
    adapters, loss, (minibatch,) = TitanAdapters(engine, tmp_path), ClippedSurrogate(), ROWS.minibatches

    def adapter_scores(name: str) -> torch.Tensor:
        return torch.cat(adapters.run(name, minibatch, loss, backward=False).logprobs)

    latest = dict[str, torch.Tensor]()
    for name in ("a", "b"):
        adapters.open(name, AdapterSettings(lora=LoRAConfig(rank=4), seed=ord(name)))
        latest[name] = adapter_scores(name)
    for name in ("a", "b", "a"):
        adapters.run_many([AdapterPass(name=name, minibatch=minibatch, loss=loss)])
        # Scores between a pass and its step, after which nothing but the step changes the weights.
        adapter_scores(name)
        adapters.step(name, AdamStep(lr=1e-2))
        stepped = adapter_scores(name)
        freed(engine)
        assert torch.equal(stepped, adapter_scores(name))
        assert not torch.equal(stepped, latest[name])
        latest[name] = stepped
        for scored in ("b", "a", "b"):
            assert torch.equal(adapter_scores(scored), latest[scored])
    assert not torch.equal(latest["a"], latest["b"])


def test_copies_leave_no_memory_behind_once_weights_are_trained_or_saved(tmp_path: Path):
    make_model(tmp_path)
    model = loaded(tmp_path, torch.float32)
    model.masters = masters = MasterWeights(model, torch.bfloat16)

    def copy_after(*stays: bool) -> weakref.ref[torch.Tensor]:
        for value in stays:
            masters.cast(stays=value)
        reference = weakref.ref(model.norm.weight)
        masters.release()
        return reference

    assert copy_after(True)() is not None
    assert copy_after(True, True)() is not None
    assert copy_after(True, False)() is None
    assert copy_after(False, True)() is None
    copy = copy_after(True)
    training_state(model, torch.optim.AdamW(model.parameters(), fused=True), {})
    assert copy() is None


def test_only_all_weights_of_a_unit_in_their_order_are_one(tmp_path: Path):
    make_model(tmp_path)
    model = loaded(tmp_path, torch.float32)
    masters = MasterWeights(model, torch.bfloat16)
    masters.cast()
    network = model.layers["0"].feed_forward
    gate, up, down = network.w1.weight, network.w3.weight, network.w2.weight
    joint = joint_weight(gate, up)
    assert joint is not None
    assert torch.equal(joint, torch.cat([gate, up]))
    assert joint_weight(up, gate) is None
    assert joint_weight(gate) is None
    assert joint_weight(gate, down) is None
    masters.release()
    assert joint_weight(network.w1.weight, network.w3.weight) is None


def test_a_sum_takes_gradients_of_one_weight_and_of_all():
    masters = [torch.nn.Parameter(torch.zeros(length, 2)) for length in (3, 1)]
    gradients = GradientSum(masters)
    every_row, first = SumPlace(gradients, None), SumPlace(gradients, 0)
    ones = torch.ones(4, 2, dtype=torch.bfloat16)
    first.add(ones[:3])
    every_row.add(ones)
    every_row.add_product(ones[:, :1], ones[:1])
    assert masters[0].grad is not None
    assert masters[0].grad.tolist() == [[3.0, 3.0]] * 3
    assert masters[1].grad is not None
    assert masters[1].grad.tolist() == [[2.0, 2.0]]
    for master in masters:
        master.grad = None  # as an optimizer does
    every_row.add(ones)
    every_row.add_product(ones[:, :1], ones[:1])
    first.add(ones[:3])
    first.add_rows(torch.tensor([1, 1]), ones[:2], 3)
    assert masters[0].grad.tolist() == [[3.0, 3.0], [5.0, 5.0], [3.0, 3.0]]
    assert masters[1].grad.tolist() == [[2.0, 2.0]]


def test_vectors_that_do_not_lie_one_after_the_other_share_no_room():
    masters = [torch.nn.Parameter(torch.zeros(length)) for length in (3, 1, 2)]
    gradients = GradientSum(masters)
    places = [SumPlace(gradients, member) for member in range(3)]
    room = room_for_parts(places[1:], masters[1:], 4)
    assert room.shape == (4, 3)
    assert not room.is_contiguous()
    for apart in (places[::2], [places[0], None], places[::-1]):
        assert room_for_parts(apart, masters[: len(apart)], 4).is_contiguous()


@pytest.mark.parametrize("members", [range(3), range(1, 3), range(1)])
def test_parts_of_each_row_count_even_if_some_vectors_write_none(members: range, monkeypatch: pytest.MonkeyPatch):
    def sum_parts(parts: torch.Tensor, total: torch.Tensor, adds: bool) -> None:
        total.copy_(parts.sum(dim=0) + (total if adds else 0))

    monkeypatch.setattr(gradient_sums, "_sum_parts", sum_parts)  # the kernel is for GPUs
    masters = [torch.nn.Parameter(torch.zeros(length)) for length in (3, 1, 2)]
    gradients = GradientSum(masters)
    vectors = [masters[member] for member in members]
    places = [SumPlace(gradients, member) for member in members]
    for row in (1.0, 10.0, 100.0):
        parts = room_for_parts(places, vectors, 4)
        parts.fill_(row)
        assert summed_parts(parts, places, vectors) == [None] * len(vectors)
    gradients.settle()
    for member, master in enumerate(masters):
        if member in members:
            assert master.grad is not None
            assert master.grad.tolist() == [444.0] * len(master)
        else:
            assert master.grad is None
