"""State that leaves its device: training goes on as if it had stayed, and meanwhile its memory is free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks.ranks import run_ranks
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan import host_memory
from forge_rl.engines.titan.host_memory import HostCopies, HostCopy, OffloadedTensors
from forge_rl.engines.titan.plan import plan_training
from forge_rl.engines.titan.shards import named_weights, values_of
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.metrics import Sum, Value
from forge_rl.services import trainer_config
from forge_rl.services.trainer_config import TrainerConfig
from tests.fakes import make_model, packed, random_batch, train_batch

pytestmark = pytest.mark.usefixtures("process_group")

LOSS = ClippedSurrogate(kl_coef=0.1)
ODD: dict[str, object] = {
    "hidden_size": 25,
    "intermediate_size": 41,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}
"""FSDP pads most of its weights."""
CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "frozen": {"dtype": "float32", "frozen": ("model.embed_tokens.*", "model.layers.0.*")},
}


def engine_of(folder: Path, **settings: Any) -> TitanEngine:
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1)
    train_settings = {"dtype": "float32", "seq_len": 64, "optimizer": optimizer, **settings}
    return TitanEngine(folder, TrainSettings(**train_settings), reference=True)


def step(engine: TitanEngine, seed: int, ranks: int = 1) -> dict[str, Value]:
    laid = packed(random_batch(seed, vocab=43, groups=3), shares=ranks, seq_len=32)
    return train_batch(engine, laid, LOSS, total_updates=4)


def logprobs(engine: TitanEngine) -> torch.Tensor:
    rows = packed(random_batch(7, vocab=43), seq_len=256).rows
    return torch.cat(engine.logprobs(rows, temperature=1.0))


def published(engine: TitanEngine) -> dict[tuple[object, ...], torch.Tensor]:
    return {(shard.name, *shard.tensor_slice.start): shard.values.clone() for shard in engine.local_shards()}


def held(engine: TitanEngine) -> dict[str, torch.Tensor]:
    """This rank's part of all that a step reads or writes, not copied."""
    assert engine._reference is not None
    for module in engine._reference.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a step leaves some of its weights whole
    tensors = {}
    for kind, model in (("policy", engine.model), ("reference", engine._reference)):
        tensors |= {f"{kind}.{name}": values_of(parameter) for name, parameter in named_weights(model)}
        tensors |= {f"{kind}.{name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in named_weights(engine.model):
        state = engine.optimizer.state.get(parameter, {})
        tensors |= {f"{kind}.{name}": values_of(value) for kind, value in state.items()}
    return tensors


def sizes(engine: TitanEngine) -> dict[str, int]:
    """Bytes of the storages of what is larger than a number."""
    return {name: tensor.untyped_storage().nbytes() for name, tensor in held(engine).items() if tensor.dim()}


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def differing(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> set[object]:
    """Names of what is not the same, bit for bit."""
    equal_names = {
        name
        for name in one.keys() & other.keys()
        if one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
    }
    return (one.keys() | other.keys()) - equal_names


def check_steps(folder: Path, settings: dict[str, Any], ranks: int) -> None:
    """Two engines take the same two steps and one is offloaded wherever it can be."""
    stays, leaves = engine_of(folder, **settings), engine_of(folder, **settings)
    began = copied(held(leaves))

    def check_offload() -> None:
        moved = leaves.offload()
        assert set(sizes(leaves).values()) == {0}
        assert leaves.offload() == 0
        assert leaves.onload() == moved
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in held(stays).values() if tensor.dim()
        }
        assert moved == sum(storage.nbytes() for storage in storages.values()) > 0
        assert not differing(held(leaves), held(stays))
        assert leaves.onload() == 0
        assert leaves.offload() == moved
        assert set(sizes(leaves).values()) == {0}

    check_offload()
    for seed in range(2):
        assert step(leaves, seed, ranks) == step(stays, seed, ranks)
        check_offload()
        assert torch.equal(logprobs(leaves), logprobs(stays))
        assert set(sizes(leaves).values()) - {0}
        check_offload()
        assert not differing(published(leaves), published(stays))
        leaves.offload()
    leaves.onload()
    current_tensors = held(leaves)
    assert not differing(current_tensors, held(stays))
    trained = {
        name
        for name, parameter in named_weights(leaves.model)
        if parameter.requires_grad and len(current_tensors[f"policy.{name}"])
    }
    assert trained == {
        name.removeprefix("policy.") for name in differing({n: current_tensors[n] for n in began}, began)
    }, "only the policy's trained weights moved"
    assert {f"exp_avg.{name}" for name in trained} <= current_tensors.keys()


def test_state_that_stays_by_the_settings_does_not_leave(tmp_path: Path):
    make_model(tmp_path)
    engine = engine_of(tmp_path, stays_on_device=True)
    step(engine, 0)
    before = sizes(engine)
    assert (engine.offload(), engine.onload()) == (0, 0)
    assert sizes(engine) == before
    assert 0 not in before.values()


def check_ranks(rank: int, folders: list[Path]) -> None:
    for settings, folder in zip(CASES.values(), folders, strict=True):
        check_steps(folder, settings, ranks=2)
    check_scoring(folders[0])


def check_scoring(folder: Path) -> None:
    """Scoring ends a forward pass that no backward pass follows, after which FSDP keeps whole weights."""
    engine = engine_of(folder, dtype="bfloat16")
    step(engine, 0, torch.distributed.get_world_size())
    before, shards = copied(held(engine)), published(engine)
    logprobs(engine)
    assert not differing(held(engine), before)
    assert not differing(published(engine), shards)


@pytest.mark.parametrize("case", CASES)
def test_offloading_between_steps_does_not_change_training(case: str, tmp_path: Path):
    make_model(tmp_path, tie_word_embeddings=case == "float32")
    check_steps(tmp_path, CASES[case], ranks=1)


def test_so_do_two_ranks(tmp_path: Path):
    folders = [tmp_path / case for case in CASES]
    for index, folder in enumerate(folders):
        make_model(folder, ("llama", "qwen3")[index % 2], tie_word_embeddings=index < 2, **ODD)
    run_ranks(check_ranks, 2, folders)


def test_scoring_leaves_the_shards_in_their_place(tmp_path: Path):
    make_model(tmp_path)
    check_scoring(tmp_path)


def test_a_checkpoint_is_written_and_read_while_the_state_is_offloaded(tmp_path: Path):
    make_model(tmp_path / "hf")
    engine, other = engine_of(tmp_path / "hf"), engine_of(tmp_path / "hf")
    step(engine, 0)
    before = copied(held(engine))
    for part in ("model", "training"):
        (tmp_path / "checkpoint" / part).mkdir(parents=True)
    engine.offload()
    engine.save(tmp_path / "checkpoint", tmp_path / "hf", version=1).result()
    other.offload()
    other.load_training_state(tmp_path / "checkpoint" / "training")
    assert other.updates == 1
    assert not differing(held(engine), before)
    assert not differing(held(other), before)
    step(other, 1)
    step(engine, 1)
    assert not differing(held(other), held(engine))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_layers_with_their_inputs_in_host_memory_are_the_same(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On a CPU host memory is a copy too: inputs leave the tensors that the layers were given."""
    make_model(tmp_path, "qwen3")
    monkeypatch.setattr(host_memory, "BUFFER_BYTES", 1000)
    host_copies: list[HostCopy] = []
    copy = HostCopies.of

    def counted(self: HostCopies, values: torch.Tensor) -> HostCopy:
        host_copies.append(copy(self, values))
        return host_copies[-1]

    monkeypatch.setattr(HostCopies, "of", counted)
    engine_settings = {"dtype": dtype, "activation_checkpointing": "full"}
    plain, offloading = (
        engine_of(tmp_path, **engine_settings),
        engine_of(tmp_path, enable_activation_offload=True, **engine_settings),
    )
    for seed in range(2):
        expected = step(plain, seed)
        assert not host_copies
        metrics = step(offloading, seed)
        inputs = [sum(map(len, host_copy.pieces)) for host_copy in host_copies]
        assert metrics == expected | {"activations/offloaded_bytes": Sum(float(sum(inputs)))}
        host_copies.clear()
    assert not differing(held(plain), held(offloading))
    architecture, each = offloading.architecture, max(inputs)
    layers = architecture.layers
    assert inputs.count(each) >= layers, "each layer of a row has its input copied"
    tokens = each // (architecture.dim * getattr(torch, dtype).itemsize)
    settings = replace(plain._settings, seq_len=tokens)
    with_it = replace(settings, enable_activation_offload=True)
    before, after = (plan_training(architecture, s, ranks=1, reference=True) for s in (settings, with_it))
    assert (after.offloaded, before.offloaded) == (layers * each, 0)
    assert before.total - after.total == before.activations - after.activations == (layers - 1) * each


def test_activations_are_offloaded_where_they_can_be(monkeypatch: pytest.MonkeyPatch):
    offloading = TrainerConfig(enable_activation_offload=True, activation_checkpointing="full")
    with pytest.raises(ConfigError, match="in host memory already"):
        offloading.check_devices()
    monkeypatch.setattr(trainer_config, "device_type", lambda: "cuda")
    TrainerConfig(enable_activation_offload=True, activation_checkpointing="full").check_devices()
    with pytest.raises(ConfigError, match="selective keeps more"):
        TrainerConfig(enable_activation_offload=True, activation_checkpointing="selective")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven bytes a piece: storages take several, and end within one."""
    monkeypatch.setattr(host_memory, "BUFFER_BYTES", 7)


@pytest.mark.usefixtures("small_pieces")
def test_a_storage_leaves_once_and_whole_however_many_share_it():
    base = torch.arange(12.0)
    tensors = [base[2:5], base.view(3, 4).t(), base, torch.arange(5, dtype=torch.int16), torch.empty(0)]
    before = [tensor.clone() for tensor in tensors]
    offloaded = OffloadedTensors(iter(tensors))
    assert offloaded.bytes == 12 * 4 + 5 * 2
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * 5
    offloaded.bring_back()
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    base[2] = -1.0
    assert float(tensors[0][0]) == -1.0, "a view lost its base"


def test_what_finds_no_room_can_come_back_later(monkeypatch: pytest.MonkeyPatch):
    tensors = [torch.arange(10.0) + index for index in range(3)]
    before = [tensor.clone() for tensor in tensors]
    offloaded = OffloadedTensors(tensors)
    resize, calls = torch.UntypedStorage.resize_, []

    def full(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        calls.append(size)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", full)
    with pytest.raises(ForgeError, match=r"no room to bring .* back to cpu: CUDA out of memory") as caught:
        offloaded.bring_back()
    assert "--generator.gpu-memory-utilization" in caught.value.hint
    offloaded.bring_back()
    assert calls == [40] * 4
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    assert offloaded.bytes == 120


def test_when_host_memory_runs_out_nothing_has_left(monkeypatch: pytest.MonkeyPatch):
    tensors = [torch.arange(10.0), torch.arange(20.0)]
    copies = HostCopies.of

    def full(self: HostCopies, values: torch.Tensor) -> HostCopy:
        if values.nbytes == 80:
            raise RuntimeError("no memory")
        return copies(self, values)

    monkeypatch.setattr(HostCopies, "of", full)
    with pytest.raises(RuntimeError, match="no memory"):
        OffloadedTensors(tensors)
    assert [tensor.tolist() for tensor in tensors] == [list(range(10)), list(range(20))]


def test_copies_lie_without_gaps_in_buffers_of_one_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "BUFFER_BYTES", 64)
    tensors = [
        torch.arange(50.0),
        torch.tensor(3),
        torch.arange(24, dtype=torch.bfloat16).view(4, 6).t(),
        torch.empty(0),
    ]
    copies = HostCopies()
    host_copies = [copies.of(values) for values in tensors]
    buffers = {
        piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes()
        for host_copy in host_copies
        for piece in host_copy.pieces
    }
    assert list(buffers.values()) == [64] * -(-(50 * 4 + 8 + 24 * 2) // 64)
    for values, host_copy in zip(tensors[:3], host_copies[:3], strict=True):
        assert torch.equal(host_copy.joined(), values)
    assert host_copies[3].pieces == []
