"""Small moments: AdamW with them follows AdamW in float64, and what is stored is what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.ranks import run_ranks
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.factory import plan_training
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.shards import local
from forge_rl.engines.titan.small_adamw import Moment, SmallAdamW, _codes, _rounded
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.services.trainer_config import TrainerConfig
from tests.fakes import make_model, packed, random_batch, train_batch

KINDS = ("bfloat16", "int8")
MODEL: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 130}


def test_codes_are_the_papers():
    # Worked by hand: the lowest decade has one centre of 0.1 to 1, 0.55, or two, 0.325 and 0.775, times 1e-6; the
    # highest 64 or 128 parts of 0.1 to 1.
    signed, unsigned = _codes(True), _codes(False)
    assert [len(code.unique()) for code in (signed, unsigned)] == [256, 256]
    assert signed[127 : 127 + 2].tolist() == pytest.approx([0.0, 0.55e-6])
    assert unsigned[:3].tolist() == pytest.approx([0.0, 0.325e-6, 0.775e-6])
    assert signed[[0, -2, -1]].tolist() == pytest.approx([0.45 / 64 - 1, 1 - 0.45 / 64, 1.0])
    assert unsigned[[-2, -1]].tolist() == pytest.approx([1 - 0.45 / 128, 1.0])


def test_rounding_keeps_the_mean_and_is_to_a_neighbour():
    noise = torch.Generator().manual_seed(0)
    value = torch.tensor(1 + 2**-7 * 0.25)  # a quarter of the way from 1 to the next bfloat16
    rounded_values = _rounded(value.expand(40_000), noise)
    assert set(rounded_values.tolist()) == {1.0, 1 + 2**-7}
    assert float((rounded_values > 1).double().mean()) == pytest.approx(0.25, abs=0.01)  # 4.6 standard deviations
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    assert torch.equal(_rounded(odd, noise).nan_to_num(7.0), odd.nan_to_num(7.0))


@pytest.mark.parametrize("signed", [True, False])
def test_read_values_are_stored_unchanged_and_rounding_is_unbiased(signed: bool):
    torch.manual_seed(0)
    size = 3 * 256 + 100
    values = torch.randn(size) * 10.0 ** torch.randint(-9, 1, (size,))
    values[256:512] = 0.0
    values = values if signed else values.abs()
    moment = Moment(torch.zeros(size, dtype=torch.uint8), torch.zeros(4), signed=signed)
    noise, reads = torch.Generator().manual_seed(1), []
    for _ in range(400):
        moment.write(values, noise=noise)
        reads.append(moment.read())
        before = moment.values.clone(), moment.scales.clone()
    moment.write_all(reads[-1])
    assert torch.equal(moment.values, before[0])
    assert torch.equal(moment.scales, before[1])
    assert not reads[0][256:512].any()
    scale = torch.repeat_interleave(moment.scales.abs(), 256)[:size]
    codes = _codes(signed).double()
    inside = (values.abs() > 1e-6 * scale) & (values.abs() < 0.99 * scale)
    relative = values.double() / moment.scales.repeat_interleave(256)[:size]
    gap = codes.diff()[(torch.bucketize(relative, codes) - 1).clamp(0, 254)]
    off = (torch.stack(reads).double().mean(0) - values.double()).abs() / scale
    assert float((off / gap)[inside].max()) < 0.5 * 5 / 400**0.5  # 5 standard deviations of a coin's mean
    if not signed:
        assert bool((reads[-1] > 0).eq(values > 0).all()), "a divisor was rounded to 0"


def course(kind: str, steps: int = 300) -> tuple[torch.Tensor, list[float]]:
    """Weights and losses of least squares whose features differ in scale by 1e4, trained with noise."""
    torch.manual_seed(0)
    dtype = torch.float64 if kind == "float64" else torch.float32
    scales = torch.logspace(-3, 1, 96, dtype=torch.float64)
    inputs = torch.randn(256, 96, dtype=torch.float64) * scales
    targets = inputs @ (torch.randn(96, 64, dtype=torch.float64) / scales[:, None])
    weights = torch.nn.Parameter(torch.zeros(96, 64, dtype=dtype))
    if kind == "float64":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([weights], lr=0.02, betas=(0.9, 0.95), weight_decay=0.01)
    else:
        optimizer = SmallAdamW([{"params": [weights]}], kind=kind, lr=0.02, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step in range(steps):
        rows = torch.randperm(256, generator=torch.Generator().manual_seed(step))[:64]
        loss = (inputs[rows].to(dtype) @ weights - targets[rows].to(dtype)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return weights.detach().double(), losses


@pytest.mark.parametrize("kind", KINDS)
def test_it_follows_adamw_in_float64(kind: str):
    exact, exact_losses = course("float64")
    weights, losses = course(kind)
    away = float((weights - exact).norm() / exact.norm())
    assert away < {"bfloat16": 0.005, "int8": 0.03}[kind]
    assert losses[0] == pytest.approx(exact_losses[0])
    assert losses[-1] == pytest.approx(exact_losses[-1], rel=0.05)
    assert exact_losses[-1] < 0.9 * exact_losses[0]


def engine_of(folder: Path, kind: str) -> TitanEngine:
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    return TitanEngine(folder, TrainSettings(dtype="float32", seq_len=64, optimizer=optimizer, optimizer_state=kind))


def step(engine: TitanEngine, seed: int, ranks: int = 1) -> None:
    train_batch(engine, packed(random_batch(seed, vocab=43, groups=3), shares=ranks, seq_len=32), ClippedSurrogate())


def state_of(engine: TitanEngine) -> list[torch.Tensor]:
    tensors = [local(parameter).detach().clone() for parameter in engine.model.parameters()]
    for parameter in engine.model.parameters():
        tensors += [value.clone() for value in engine.optimizer.state[parameter].values()]
    return tensors


def check_resumes(rank: int, folder: Path) -> None:
    """A run that was saved and loaded goes on bit for bit as one that was not, in either kind; ranks stay equal."""
    ranks = torch.distributed.get_world_size()
    for kind in KINDS:
        whole_engine, resumed = engine_of(folder / "hf", kind), engine_of(folder / "hf", kind)
        for seed in range(2):
            step(whole_engine, seed, ranks)
        out = folder / kind
        if rank == 0:
            for part in ("model", "training"):
                (out / part).mkdir(parents=True)
        torch.distributed.barrier()
        whole_engine.save(out, folder / "hf", version=2).result()
        assert resumed.load_training_state(out / "training") == 2
        for engine in (whole_engine, resumed):
            step(engine, 7, ranks)
        assert all(torch.equal(a, b) for a, b in zip(state_of(whole_engine), state_of(resumed), strict=True))
        assert any(a.dtype == torch.uint8 for a in state_of(whole_engine)) == (kind == "int8")


@pytest.mark.usefixtures("process_group")
def test_a_run_resumes_exactly(tmp_path: Path):
    make_model(tmp_path / "hf", **MODEL)
    check_resumes(0, tmp_path)
    with pytest.raises(CheckpointError, match="moments of bfloat16 or int8") as caught:
        engine_of(tmp_path / "hf", "float32").load_training_state(tmp_path / "int8" / "training")
    assert "--trainer.optimizer-state" in caught.value.hint
    engine_of(tmp_path / "hf", "bfloat16").load_training_state(tmp_path / "int8" / "training")


def test_so_do_two_ranks(tmp_path: Path):
    make_model(tmp_path / "hf", **MODEL)
    run_ranks(check_resumes, 2, tmp_path)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("kind", "bytes_each"), [("float32", 8.0), ("bfloat16", 4.0), ("int8", 2 + 8 / 256)])
def test_the_plan_counts_the_moments_that_are_there(kind: str, bytes_each: float, tmp_path: Path):
    make_model(tmp_path, **MODEL)
    engine = engine_of(tmp_path, kind)
    step(engine, 0)
    state_bytes = sum(
        state_tensor.nbytes
        for state in engine.optimizer.state.values()
        for state_tensor in state.values()
        if state_tensor.dim()
    )
    planned = plan_training(tmp_path, engine._settings, ranks=1, reference=False)
    assert planned.optimizer == pytest.approx(state_bytes, rel=0.001)
    norms = 8 * sum(parameter.numel() for parameter in engine.model.parameters() if parameter.numel() < 4096)
    large = sum(parameter.numel() for parameter in engine.model.parameters() if parameter.numel() >= 4096)
    assert large * bytes_each == pytest.approx(
        state_bytes - (norms if kind == "int8" else norms * bytes_each / 8), rel=0.001
    )
    assert planned.moments == 2 * planned.weights
    assert planned.copy == 3 * planned.weights + planned.largest


def test_float64_has_no_small_moments():
    with pytest.raises(ConfigError, match="float64 moments, not int8"):
        TrainerConfig(dtype="float64", optimizer_state="int8")
