"""Optimizer settings: the course of the learning rate, worked by hand, and refused values."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.errors import ConfigError
from forge_rl.run.start import services
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_config import CriticConfig, TrainerConfig, TrainingRun
from recipes import ppo


def course(total_steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig(lr=8.0, **settings)
    return [config.lr_at(step, total_steps) for step in range(total_steps)]


def test_a_constant_rate_stays():
    assert course(3) == [8, 8, 8]


def test_the_warm_up_rises_to_the_peak_and_its_first_step_is_not_lost():
    assert course(6, warmup_updates=4) == [2, 4, 6, 8, 8, 8]


def test_linear_decay_falls_by_equal_steps():
    assert course(4, decay="linear") == [8, 6, 4, 2]


def test_linear_decay_begins_after_the_warm_up():
    assert course(6, decay="linear", warmup_updates=2) == [4, 8, 8, 6, 4, 2]


async def test_the_policys_rate_decays_over_the_steps_that_train_it(monkeypatch: pytest.MonkeyPatch):
    arguments: dict[str, object] = {}

    async def record(*_: object, **named: object) -> None:
        arguments.update(named)

    monkeypatch.setattr(Trainer, "start", record)
    monkeypatch.setattr(services, "_devices_free", lambda *_: None)
    config = ppo.Config(steps=10, value_pretraining_steps=4)
    models = SimpleNamespace(policy=Path(), reference=False, values=False)
    checked = SimpleNamespace(config=config, models=models)
    hosts = SimpleNamespace(cluster=None, placed=SimpleNamespace(of=lambda name: None))
    faults = SimpleNamespace(faults=None)
    prepared = SimpleNamespace(monitor=faults, checkpoint=None, folder=Path())
    await services._start_trainer(checked, hosts, prepared, after=None)  # type: ignore[arg-type]
    run = arguments["run"]
    assert isinstance(run, TrainingRun)
    assert run.total_steps == 6, "the first four train the critic alone"


def test_cosine_decay_is_half_way_at_half_time():
    # 0.5 + 0.5 cos(0, pi/4, pi/2, 3 pi/4) = 1, 0.853553, 0.5, 0.146447
    assert course(4, decay="cosine") == pytest.approx([8, 6.828427, 4, 1.171573], abs=1e-6)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_rate_is_zero_when_the_run_is_over_and_stays_so(decay: str):
    config = OptimizerConfig(lr=8.0, decay=decay)
    assert config.lr_at(4, 4) == 0
    assert config.lr_at(9, 4) == 0


def test_a_warm_up_longer_than_the_run_never_reaches_the_peak():
    assert course(2, warmup_updates=4, decay="linear") == [2, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("weight_decay", -0.1),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("warmup_updates", -1),
        ("max_grad_norm", 0.0),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_flag(field: str, value: float):
    for kind, service in ((TrainerConfig, "trainer"), (CriticConfig, "critic")):
        flag = f"--{service}.optimizer.{field.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"{flag} is {value}\n") as caught:
            kind(optimizer=OptimizerConfig(**{field: value}))
        assert f"{flag} " in caught.value.hint
