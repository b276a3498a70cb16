"""Effects of the flags `--lora` on a run's settings: the trainer's adapters, and their learning rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forge_rl.engines.lora_config import EXPERTS, HEAD, LR_FACTOR, LoRAConfig, adapted_modules, adapter_parameters
from forge_rl.errors import ConfigError
from forge_rl.flags.fields import flags_of
from forge_rl.flags.given import is_given
from forge_rl.models.adapter_limits import served_modules, served_rank

if TYPE_CHECKING:
    from forge_rl.engines.architecture import Architecture
    from forge_rl.rollout.state import ScheduleConfig
    from forge_rl.services.generator_config import GeneratorConfig
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
    def generator(self) -> GeneratorConfig:
        """Settings of the engines."""

    @property
    def schedule(self) -> ScheduleConfig:
        """Settings of the schedule."""

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


def with_served_versions(config: AdaptedRun) -> GeneratorConfig:
    """Return the engines' settings. If versions are served as adapters, they have room for all that requests may sample
    with: as many as the bound on the lag, and the latest."""
    generator = config.generator
    if generator.adapters == "merged" or not config.lora.rank:
        return generator
    # Requests keep the version that they began with for as long as the bound on the lag allows.
    max_loras = max(generator.max_loras, config.schedule.lag + 1)
    return replace(generator, max_loras=max_loras, max_lora_rank=max(generator.max_lora_rank, config.lora.rank))


def check_served_versions(config: AdaptedRun, model: Path, architecture: Architecture) -> None:
    """Refuse --generator.adapters served if engines cannot serve the run's versions as adapters.

    Args:
        model: folder of the model.

    Raises:
        ConfigError: versions hold no adapters, or vLLM cannot serve an adapter of one of the targets.
    """
    if config.generator.adapters == "merged" or not config.lora.rank:
        return
    if config.trainer.lora.publish != "adapters":
        flag = "--weights.mirror" if config.weights.mirror else "--lora.publish merged"
        raise ConfigError(
            f"--generator.adapters served applies adapters, and versions with {flag} have none",
            hint=f"leave out one of {flag} and --generator.adapters",
        )
    check_served_targets(config.lora, model, architecture)


def check_served_targets(lora: LoRAConfig, model: Path, architecture: Architecture) -> None:
    """Refuse adapters of modules that engines cannot serve.

    Args:
        model: folder of the model.

    Raises:
        ConfigError: vLLM cannot serve an adapter of one of the targets.
    """
    modules = {name.removesuffix(".weight").rpartition(".")[2] for name in served_modules(model)}
    targets = {name.rpartition(".")[2] for name in adapted_modules(architecture, lora).values()}
    targets |= {EXPERTS, HEAD} & set(lora.targets)
    if unserved := sorted(targets - modules):
        raise ConfigError(
            f"engines cannot serve an adapter of {unserved[0]}, which is among the targets {' '.join(lora.targets)}",
            hint=f"set --lora.targets {' '.join(sorted(targets & modules))}; a run with --generator.adapters merged "
            "trains the others, too",
        )


def lora_lines(config: AdaptedRun, *, values: bool) -> list[str]:
    """Describe the adapters for the start of a run; no lines without adapters.

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
    lines = [config.lora.describe()]
    if config.generator.adapters == "served":
        generator = config.generator
        lines.append(
            f"--generator.adapters served: engines serve {generator.max_loras} versions at a time, as adapters of at "
            f"most rank {served_rank(generator.max_lora_rank)}, and keep those with requests in flight"
        )
    return lines


def checkpoint_bytes(lora: LoRAConfig, parameters: int, model: Path) -> int:
    """Return the disk space in bytes that a trainer's checkpoint needs: weights, moments and the exported model. If it
    trains adapters, only these are counted.

    Args:
        parameters: number of the model's parameters.
        model: folder of the model.
    """
    if lora.rank:
        from forge_rl.engines.architecture import read_architecture  # loads torch, which --help does without

        parameters = adapter_parameters(read_architecture(model), lora)
    # In float32: the weights, two moments, and the exported copy at most.
    return 16 * parameters


def _default_lr(config: AdaptedRun) -> float:
    """Return the learning rate of the recipe without adapters."""
    values = (flag.value for flag in flags_of(type(config)) if flag.dotted == "trainer.optimizer.lr")
    lr = next(values)
    assert isinstance(lr, float)
    return lr
