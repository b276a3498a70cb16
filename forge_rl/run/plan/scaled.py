"""Settings that follow the model's size and the device unless the user names them, and that a resumed run keeps.

A flag is open if neither the command line nor a config file names it and its value is the recipe's default. A config
that was made by code names lengths; its other values count as open where they equal the default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from forge_rl.engines.architecture import Architecture
from forge_rl.engines.context import positions
from forge_rl.engines.lora_config import LR_FACTOR
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.flags.fields import flags_of
from forge_rl.run.run_config import RunConfig
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.services.trainer_config import CriticConfig

C = TypeVar("C", bound=RunConfig)

LR = "trainer.optimizer.lr"
CRITIC_LR = "critic.optimizer.lr"
CONTEXT = "generator.max_model_len"
NEW_TOKENS = "generator.max_tokens"
SCALED: Mapping[str, type[int] | type[float] | type[str] | type[bool]] = {
    LR: float,
    CRITIC_LR: float,
    CONTEXT: int,
    NEW_TOKENS: int,
    "trainer.seq_len": int,
    "trainer.activation_checkpointing": str,
    "trainer.optimizer_state": str,
    "trainer.enable_cpu_offload": bool,
}
"""Flags that are chosen if they are open, with the types of their values."""
_TUNED_WEIGHTS = 134_515_008
"""Weights of SmolLM2-135M, the model for which the recipes' learning rate was tuned."""
_LEAST_LR = 1e-6
"""Learning rate of full training that verl, TRL and slime publish for GRPO with models of 0.6 to 32 billion weights."""
_SUPERVISED_POWER = 0.5
"""Power of the number of weights by which rates of supervised training fall, as in
`tinker_cookbook.hyperparam_utils.get_full_finetune_lr_multiplier`."""


def open_flags(config: RunConfig, critic: CriticConfig | None = None) -> frozenset[str]:
    """Return the flags of `SCALED` that are open; see the module."""
    defaults = {flag.dotted: flag.value for flag in flags_of(type(config))}
    base_lr = float(str(defaults[LR]))
    if config.lora.rank:
        # `with_lora` has multiplied an open rate already.
        defaults[LR] = LR_FACTOR * base_lr
    values = _values(config, critic)
    # A config that was made by code names its lengths.
    named = (CONTEXT, NEW_TOKENS) if config.named is None else config.named
    candidates = {name for name in SCALED if name in defaults and name not in named}
    if defaults.get(NEW_TOKENS) != GeneratorConfig().max_tokens:
        candidates -= {NEW_TOKENS}  # a recipe's own
    if base_lr != OptimizerConfig().lr:
        candidates -= {LR}  # a recipe's own, for the model that it has in mind
    if critic is None:
        candidates -= {CRITIC_LR}
    return frozenset(name for name in candidates - {*config.UNSCALED} if values[name] == defaults[name])


def with_scaled(
    config: C,
    critic: CriticConfig | None,
    *,
    architecture: Architecture,
    critics: Architecture | None = None,
    earlier: Mapping[str, Any] | None = None,
) -> tuple[C, CriticConfig | None, list[str]]:
    """Give open flags the values that the run began with or, in a new run, that suit the models.

    Learning rates are the recipe's for models up to SmolLM2-135M's size, and fall above it with the number of weights,
    to 1e-6 at the least; supervised training's and a critic's with the root of that number. The context is at most the
    model's positions. What depends on a GPU's memory is chosen later, see `run.plan.defaults.choose`.

    Args:
        architecture: architecture of the trained model.
        critics: architecture of the critic's model.
        earlier: the `chosen_values` of a resumed run. A value of another type is ignored. If a value is missing,
            because the flag was named then and no longer is, it is chosen as in a new run. Empty for a run of an
            earlier version, whose learning rates and lengths stay as the flags have them.

    Returns:
        The settings, the critic's, and a line for each value that tells where it comes from.
    """
    flags, lines = open_flags(config, critic), list[str]()
    if earlier is not None:
        config, critic, lines = _as_begun(config, critic, flags, earlier)
        flags = open_flags(config, critic)
    factor = LR_FACTOR if config.lora.rank else 1.0
    if LR in flags:
        base_lr = config.trainer.optimizer.lr / factor
        lr, reason = _lr_for(base_lr, architecture, config.LR_POWER)
        config = _with(config, LR, _rounded(lr * factor))
        times = f", times {factor:g} for adapters" if config.lora.rank else ""
        lines.append(f"--{LR} {config.trainer.optimizer.lr:g}: {reason}{times}")
    elif config.lora.rank and earlier is None:
        lines.append(
            f"--{LR} {config.trainer.optimizer.lr:g} for adapters: as given; 10 times full training's is usual"
        )
    if critic is not None and critics is not None and CRITIC_LR in flags:
        lr, reason = _lr_for(critic.optimizer.lr, critics, _SUPERVISED_POWER)
        critic = replace(critic, optimizer=replace(critic.optimizer, lr=_rounded(lr)))
        lines.append(f"--{CRITIC_LR} {critic.optimizer.lr:g}: {reason}")
    longest = positions(architecture) if config.starts_engines else 0
    if CONTEXT in flags and config.generator.max_tokens < longest < config.generator.max_model_len:
        config = _with(config, CONTEXT, longest)
        lines.append(f"--generator.max-model-len {longest}: the model's positions")
    return config, critic, lines


def chosen_values(flags: Collection[str], config: RunConfig, critic: CriticConfig | None) -> dict[str, Any]:
    """Return the values that a start chose for open flags, which its resumed run keeps.

    Args:
        flags: flags that were open.
        config, critic: settings with all choices.
    """
    values = _values(config, critic)
    return {name: values[name] for name in sorted(flags)}


def _as_begun(
    config: C, critic: CriticConfig | None, flags: frozenset[str], earlier: Mapping[str, Any]
) -> tuple[C, CriticConfig | None, list[str]]:
    # A run of an earlier version recorded nothing: it began with what its flags say.
    texts, begun = [], set() if earlier else {LR, CRITIC_LR, CONTEXT, NEW_TOKENS}
    for name in sorted(flags & earlier.keys()):
        begun.add(name)
        value = earlier[name]
        # A file could be edited or damaged; the flag then keeps its default, and counts as begun with it.
        if type(value) is not SCALED[name]:
            continue
        if value != _values(config, critic)[name]:
            texts.append(f"--{name.replace('_', '-')} {value}")
        if name == CRITIC_LR:
            assert critic is not None
            critic = replace(critic, optimizer=replace(critic.optimizer, lr=float(value)))
        else:
            config = _with(config, name, value)
    named = (CONTEXT, NEW_TOKENS) if config.named is None else config.named
    # Named from here on, so that these flags are not chosen again.
    config = replace(config, named=(*named, *sorted(begun)))
    return config, critic, [f"{' '.join(texts)}: as the run began"] if texts else []


def _values(config: RunConfig, critic: CriticConfig | None) -> dict[str, Any]:
    values = {flag.dotted: flag.value for flag in flags_of(type(config), config)}
    return values if critic is None else values | {CRITIC_LR: critic.optimizer.lr}


def _with(config: C, name: str, value: object) -> C:
    """Return settings with another value of a flag."""

    def replaced(part: Any, path: list[str]) -> Any:
        name, *rest = path
        return replace(part, **{name: replaced(getattr(part, name), rest) if rest else value})

    changed: C = replaced(config, name.split("."))
    return changed


def _lr_for(lr: float, architecture: Architecture, power: float) -> tuple[float, str]:
    """Scale a learning rate from SmolLM2-135M to another model; returns it, and why. Below that size nothing was
    tuned, and it stays.

    Args:
        power: power of the ratio of their weights by which it falls; 1 or 0.5.
    """
    ratio = architecture.weights / _TUNED_WEIGHTS
    if ratio <= 1:
        return lr, f"{lr:g} for models up to SmolLM2-135M's size"
    root = "" if power == 1 else "the root of "
    reason = f"{lr:g} for SmolLM2-135M, over {root}{ratio:.3g} times the weights"
    if (scaled := lr / ratio**power) >= _LEAST_LR:
        return scaled, reason
    return min(lr, _LEAST_LR), f"{reason}, but at least {_LEAST_LR:g}"


def _rounded(lr: float) -> float:
    return float(f"{lr:.2g}")
