"""One rank's weights: passes run on copies, and the masters get the sums of their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan import gradient_sums
from forge_rl.engines.titan.cpu_attention import TreeMask
from forge_rl.engines.titan.gradient_sums import GradientSum, SumPlace, room_for_parts, summed_parts
from forge_rl.engines.titan.loading import load_weights
from forge_rl.engines.titan.master_weights import MasterWeights, joint_weight
from forge_rl.engines.titan.model import build_model
from tests.fakes import make_model


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
