"""The Tinker API's program: what it refuses before a service starts, and which GPUs are whose."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import ones

from apps.tinker import Config, engine_hosts, serving
from forge_rl.engines.devices import assumed_gpus
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.models.adapters import write_adapter
from forge_rl.run.records.run_dir import lock_folder
from forge_rl.services.generator import Generator
from forge_rl.services.trainer import Trainer


def test_engines_get_the_gpus_that_the_trainer_leaves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_hosts(Generator.Config(), 1) is None
    with assumed_gpus(4, 80 << 30):
        hosts = engine_hosts(Generator.Config(replicas=1, tensor_parallel_size=2), 2)
        assert hosts is not None
        assert dict(hosts.gpus) == {"local": ("2", "3")}
        with pytest.raises(ConfigError, match="3 ranks of the trainer and 2 devices of engines share 4 GPUs"):
            engine_hosts(Generator.Config(replicas=2), 3)
        assert engine_hosts(Generator.Config(replicas=2, gpu_memory_utilization=0.3), 3) is None


async def test_a_start_that_would_spoil_trainings_or_leave_flags_idle_is_refused(tiny_model: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * values for name, values in weights.items()}, other / "model.safetensors", {"format": "pt"})
    out = tmp_path / "out"
    snapshot = out / "models" / "a:train:0" / "snapshot-4"
    snapshot.mkdir(parents=True)
    factors = {"a.weight": (ones(2, 6), ones(4, 2))}
    write_adapter(snapshot, factors, base=tiny_model, alpha=1.0, rslora=False, dropout=0.0)
    with pytest.raises(ConfigError, match="holds trainings over another model than") as raised:
        async with serving(Config(model=str(other), out=out, port=0)):
            pass
    assert "--out" in raised.value.hint
    trainer = Trainer.Config()
    object.__setattr__(trainer, "seq_len", 0)  # as it is on a GPU if nobody sets it
    with pytest.raises(ConfigError, match=r"--trainer\.seq-len is 0"):
        async with serving(Config(model=str(tiny_model), out=out, port=0, trainer=trainer)):
            pass
    for settings, flag in (
        ({"trainer": Trainer.Config(optimizer=OptimizerConfig(lr=1e-3))}, "--trainer.optimizer.lr"),
        ({"generator": Generator.Config(temperature=0.5)}, "--generator.temperature"),
    ):
        with pytest.raises(ConfigError, match=f"{flag} has no effect: requests"):
            Config(**settings).check_effects()
    Config().check_effects()
    lock_folder(out)
    with pytest.raises(CheckpointError, match="this process has a run in"):
        async with serving(Config(model=str(tiny_model), out=out, port=0)):
            pass
