"""One trainer rank on CUDA in bfloat16: it learns, frees its device, and continues from a checkpoint."""

from pathlib import Path

import pytest
import torch

from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.metrics import reduce
from tests.fakes import hf_weights, make_model, packed, random_batch, train_batch

pytestmark = pytest.mark.usefixtures("process_group")

DEVICE = "cuda"
SHAPE: dict[str, object] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def engine_of(folder: Path, **settings: object):  # type: ignore[no-untyped-def]
    from forge_rl.engines.titan.train import TitanEngine

    optimizer = OptimizerConfig(lr=1e-3)
    train_settings = {"dtype": "bfloat16", "seq_len": 256, "optimizer": optimizer, **settings}
    return TitanEngine(folder, TrainSettings(**train_settings))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", "qwen3", **SHAPE)
    return tmp_path / "model"


def laid():  # type: ignore[no-untyped-def]
    return packed(random_batch(0, vocab=43, groups=3), seq_len=256, pad_multiple=128)


def state_of(engine) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    moments = [
        state_tensor
        for state in engine.optimizer.state.values()
        for state_tensor in state.values()
        if state_tensor.dim()
    ]
    return [tensor.detach().cpu().clone() for tensor in (*engine.model.parameters(), *moments)]


def gradient_norm(engine) -> float:  # type: ignore[no-untyped-def]
    """Take an update; its gradient's norm."""
    norm = reduce(train_batch(engine, laid()))["grad_norm"]
    assert 0 < norm < float("inf")
    return norm


def test_bfloat16_updates_move_float32_weights_and_keep_the_norm(folder: Path):
    norms = {}
    for dtype in ("float32", "bfloat16"):
        engine = engine_of(folder, dtype=dtype)
        assert {parameter.device.type for parameter in engine.model.parameters()} == {DEVICE}
        before = hf_weights(engine.model)
        norms[dtype] = gradient_norm(engine)
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
        assert max(float((value - before[name]).abs().max()) for name, value in hf_weights(engine.model).items()) > 0
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.05)


def test_what_leaves_the_device_comes_back_bit_by_bit_and_trains_on(folder: Path):
    engine, other = engine_of(folder), engine_of(folder)
    for engine_of_pair in (engine, other):
        train_batch(engine_of_pair, laid())
    before = state_of(engine)
    allocated_bytes = torch.cuda.memory_allocated()
    moved = engine.offload()
    assert moved > 0
    assert engine.offload() == 0
    assert torch.cuda.memory_allocated() <= allocated_bytes - moved
    assert engine.onload() == moved
    assert all(map(torch.equal, before, state_of(engine)))
    assert gradient_norm(engine) == pytest.approx(gradient_norm(other), rel=1e-3)


def test_a_checkpoint_is_continued_from(folder: Path, tmp_path: Path):
    engine = engine_of(folder)
    train_batch(engine, laid())
    saved = tmp_path / "saved"
    for name in ("training", "model"):
        (saved / name).mkdir(parents=True)
    engine.offload()
    write = engine.save(saved, folder, version=7)
    expected = state_of(engine)
    train_batch(engine, laid())  # while it is written
    write.result()
    resumed_engine = engine_of(folder)
    assert resumed_engine.load_training_state(saved / "training") == 7
    assert resumed_engine.updates == 1
    assert all(map(torch.equal, expected, state_of(resumed_engine)))
