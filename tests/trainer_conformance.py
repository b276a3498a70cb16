"""The checks that every train engine must pass, against `forge_rl/engines/protocol.py` alone.

test_engine_conformance runs those in TRAIN. None depends on another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainEngine
from forge_rl.packing.rows import Row
from forge_rl.weights.slices import TensorSlice, tiling_error
from tests.fakes import packed, random_batch, train_batch


@dataclass(frozen=True)
class Trainers:
    """Makes engines under check, each from the same folder."""

    make: Callable[[], TrainEngine]
    optimizer: OptimizerConfig
    folder: Path
    scratch: Path


def step(engine: TrainEngine, seed: int) -> None:
    laid = packed(random_batch(seed, vocab=43), seq_len=256)
    train_batch(engine, laid)


def published(engine: TrainEngine) -> dict[tuple[str, TensorSlice], torch.Tensor]:
    return {(shard.name, shard.tensor_slice): shard.values.clone() for shard in engine.local_shards()}


def same(one: TrainEngine, other: TrainEngine) -> bool:
    """Return True if both have the same weights, bit for bit, after as many updates."""
    mine, theirs = published(one), published(other)
    assert mine.keys() == theirs.keys()
    return one.updates == other.updates and all(torch.equal(mine[key], theirs[key]) for key in mine)


def an_update_changes_every_weight(trainers: Trainers) -> None:
    engine = trainers.make()
    before = published(engine)
    assert engine.updates == 0
    step(engine, 0)
    assert engine.updates == 1
    assert not any(torch.equal(values, before[key]) for key, values in published(engine).items())


def logprobs_score_the_next_token(trainers: Trainers) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.arange(3, 17) % 11
    zeros = torch.zeros(len(ids), dtype=torch.int32)
    row = Row(
        token_ids=ids,
        positions=torch.arange(len(ids)),
        trees=zeros,
        until=zeros + len(ids),
        targets=torch.cat([ids[1:], ids[:1]]),
        mask=(torch.arange(len(ids)) >= 5) & (torch.arange(len(ids)) < len(ids) - 1),
        behaviour=torch.zeros(len(ids)),
        advantages=torch.zeros(len(ids)),
        versions=zeros - 1,
        episodes=zeros - 1,
        segments=zeros - 1,
        turns=zeros - 1,
        lengths=zeros + 1,
        observed=torch.zeros(len(ids), dtype=torch.bool),
    )
    (found,) = trainers.make().logprobs([row], temperature=0.7)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(trainers.folder, dtype=torch.float32)
        expected = (model(ids[None]).logits[0] / 0.7).log_softmax(-1).gather(1, row.targets[:, None])[:, 0]
    assert torch.allclose(found[row.mask], expected[row.mask], atol=1e-4)
    assert not found[~row.mask].any()


def shards_tile_every_tensor(trainers: Trainers) -> None:
    engine = trainers.make()
    slices: dict[str, list[TensorSlice]] = {}
    for name, tensor_slice in published(engine):
        slices.setdefault(name, []).append(tensor_slice)
    specs = engine.specs()
    assert slices.keys() == {spec.name for spec in specs}
    assert not [wrong for spec in specs if (wrong := tiling_error(spec.shape, slices[spec.name]))]
    assert engine.parameters == sum(math.prod(spec.shape) for spec in specs)


def state_that_leaves_comes_back_bit_by_bit(trainers: Trainers) -> None:
    leaves, stays = trainers.make(), trainers.make()
    for seed in range(2):
        assert leaves.onload() == 0
        moved = leaves.offload()
        assert moved > 0
        assert leaves.offload() == 0
        assert leaves.onload() == moved
        assert same(leaves, stays)
        leaves.offload()
        step(leaves, seed)
        step(stays, seed)
        assert same(leaves, stays)


def a_run_continues_bit_by_bit(trainers: Trainers) -> None:
    through = trainers.make()
    for seed in range(2):
        step(through, seed)
    for part in ("model", "training"):
        (trainers.scratch / part).mkdir(parents=True)
    through.save(trainers.scratch, trainers.folder, version=7).result()
    resumed = trainers.make()
    assert resumed.load_training_state(trainers.scratch / "training") == 7
    assert resumed.updates == 2
    assert same(resumed, through)
    for seed in range(2, 4):
        step(through, seed)
        step(resumed, seed)
    assert resumed.updates == 4
    assert same(resumed, through)


def a_reset_engine_trains_as_a_new_one_bit_by_bit(trainers: Trainers) -> None:
    engine, new, optimizer = trainers.make(), trainers.make(), trainers.optimizer
    engine.reset(replace(optimizer, lr=3e-3, beta1=0.5, weight_decay=0.0))
    before = published(engine)
    for seed in (5, 6):
        step(engine, seed)
    largest = max(float((values - before[key]).abs().max()) for key, values in published(engine).items())
    assert 1e-3 < largest < 7e-3, "of its own learning rate"
    engine.offload()
    engine.reset(optimizer)
    assert (engine.updates, engine.planned) == (0, 0)
    for seed in range(3):
        assert same(engine, new)
        step(engine, seed)
        step(new, seed)
    assert same(engine, new)


OTHER = OptimizerConfig(
    lr=3e-3, weight_decay=0.5, beta1=0.5, beta2=0.5, warmup_updates=3, decay="linear", max_grad_norm=1e-9
)
"""Each setting with another value than an engine under check starts with."""


def a_reset_applies_every_setting_of_the_optimizer(trainers: Trainers) -> None:
    engine, trained = trainers.make(), list[dict[tuple[str, TensorSlice], torch.Tensor]]()
    names = [field.name for field in fields(OptimizerConfig)]
    for changed in [{}, *({name: getattr(OTHER, name)} for name in names)]:
        assert all(getattr(trainers.optimizer, name) != value for name, value in changed.items())
        engine.reset(replace(trainers.optimizer, **changed))
        step(engine, 0)
        step(engine, 1)
        trained.append(published(engine))
    for name, weights in zip(names, trained[1:], strict=True):
        assert any(not torch.equal(values, weights[key]) for key, values in trained[0].items()), f"{name} has no effect"


TRAIN: dict[str, Callable[[Trainers], None]] = {
    check.__name__: check
    for check in (
        an_update_changes_every_weight,
        logprobs_score_the_next_token,
        shards_tile_every_tensor,
        state_that_leaves_comes_back_bit_by_bit,
        a_run_continues_bit_by_bit,
        a_reset_engine_trains_as_a_new_one_bit_by_bit,
        a_reset_applies_every_setting_of_the_optimizer,
    )
}
