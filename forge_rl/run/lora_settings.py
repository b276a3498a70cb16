"""Effects of the flags `--lora` on a run's settings: the trainer's adapters, and their learning rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forge_rl.engines.lora_config import LR_FACTOR, LoRAConfig, adapter_parameters
from forge_rl.errors import ConfigError
from forge_rl.flags.fields import flags_of
from forge_rl.flags.given import is_given

if TYPE_CHECKING:
    from forge_rl.services.trainer_config import TrainerConfig
    from forge_rl.services.weight_store_config import WeightStoreConfig


class AdaptedRun(Protocol):
    """The settings of a run that the flags `--lora` concern."""

    @property
    def trainer(self) -> TrainerConfig:
        """Settings of the trainer."""

    @property
    def lora(self) -> LoRAConfig:
        """Settings of the adapters."""

    @property
    def seed(self) -> int:
        """Seed of the run."""

    @property
    def weights(self) -> WeightStoreConfig:
        """Settings of the store of versions."""


def with_lora(config: AdaptedRun) -> TrainerConfig:
    """Return the trainer's settings with the run's adapters and, if the user did not set it, their learning rate.

    In a config that is not parsed, a learning rate equal to the recipe's default counts as not set.
    """
    lora = replace(config.lora, publish="merged") if config.weights.mirror else config.lora
    trainer = replace(config.trainer, lora=lora, lora_seed=config.seed)
    # With adapters in the trainer's settings, this config is a changed copy of one whose learning rate is decided.
    is_decided = config.trainer.lora.rank > 0 or is_given("trainer.optimizer.lr")
    if config.lora.rank and not is_decided and trainer.optimizer.lr == _default_lr(config):
        trainer = replace(trainer, optimizer=replace(trainer.optimizer, lr=LR_FACTOR * trainer.optimizer.lr))
    return trainer


def lora_lines(config: AdaptedRun, *, values: bool) -> list[str]:
    """Describe the adapters and their learning rate for the start of a run; no lines without adapters.

    Raises:
        ConfigError: the model is a value model, whose head has no adapter.
    """
    if not config.lora.rank:
        return []
    if values:
        raise ConfigError(
            f"--lora.rank {config.lora.rank} trains adapters, and a value model's head has none",
            hint="leave it out: policies have adapters, a reward model or critic is trained whole",
        )
    lr, default = config.trainer.optimizer.lr, _default_lr(config)
    if lr == LR_FACTOR * default:
        source = f"{LR_FACTOR:g} times the {default:g} of full training"
    else:
        source = f"as given; {LR_FACTOR:g} times that of full training is usual"
    return [config.lora.describe(), f"--trainer.optimizer.lr {lr:g} for adapters: {source}"]


def checkpoint_bytes(lora: LoRAConfig, parameters: int, model: Path) -> int:
    """Return the disk space in bytes that a trainer's checkpoint needs: weights, moments and the exported model, or if
    it trains adapters, the same of these alone.

    Args:
        parameters: number of the model's parameters.
        model: folder of the model.
    """
    if lora.rank:
        from forge_rl.engines.architecture import read_architecture  # loads torch, which --help does without

        parameters = adapter_parameters(read_architecture(model), lora)
    return 16 * parameters


def _default_lr(config: AdaptedRun) -> float:
    """Return the learning rate of the recipe without adapters."""
    values = (flag.value for flag in flags_of(type(config)) if flag.dotted == "trainer.optimizer.lr")
    lr = next(values)
    assert isinstance(lr, float)
    return lr
