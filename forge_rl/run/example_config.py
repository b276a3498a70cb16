"""The settings of recipes that train on given examples, which are named by flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro

from forge_rl.data.data_config import DataConfig
from forge_rl.data.mixture import Mixture
from forge_rl.data.sources.rows import Kind
from forge_rl.errors import ConfigError
from forge_rl.flags.categories import Tunable
from forge_rl.flags.fields import changed_flags
from forge_rl.rewards.composition import WeightedSum
from forge_rl.rewards.protocol import RewardFunction
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.run.placement_flag import read_placement
from forge_rl.run.run_config import RunConfig

_OF_BATCHES = tuple(
    f"schedule.{name}"
    for name in ("kind", "max_lag", "over_sampling", "dynamic_sampling", "least_advantage", "max_replaced")
)
"""Settings that act on batches of generated episodes, and not on evaluations."""
_OF_ANSWERS = (
    *("generator", "schedule", "reward", "weights", "tool_parser"),
    *(f"evaluation.{name}" for name in ("episodes", "temperature", "max_tokens", "success")),
)
"""Settings that act on answers that engines generate, or on their weights."""


@dataclass(frozen=True, kw_only=True)
class ExampleConfig(RunConfig):
    """Settings that name the examples of a run; a recipe adds its method's own.

    @dataclass(frozen=True, kw_only=True)
    class Config(ExampleConfig):
        beta: float = 0.1

    start_examples(config, preference_episodes, sources=config.sources("pair"), loss=Dpo(beta=config.beta))
    """

    USED: ClassVar[tuple[str, ...]] = tuple(
        name for name in RunConfig.USED if name.partition(".")[0] not in ("schedule", "generator", "group_size")
    )
    """Flags that `--help` lists, next to the recipe's own."""
    UNUSED: ClassVar[tuple[str, ...]] = ("group_size", "environment", "evaluation.blocking")
    LR_POWER: ClassVar[float] = 0.5

    tasks: tuple[str, ...] = ()
    """The mixture of examples, as NAME[:KEY=VALUE,...][*WEIGHT]: files, folders, hub ids, or FILE.py:NAME. Keys of
    files name columns: data/*.jsonl:question=problem,answer=solution*0.7. The documentation lists the forms of
    rows."""
    eval_tasks: Tunable[tuple[str, ...]] = ()
    """Examples for evaluation only, as [NAME=]TASKS; by default a share of --tasks is held out."""
    data: DataConfig = field(default_factory=DataConfig)
    rewards: Tunable[Annotated[tuple[str, ...], tyro.conf.arg(name="reward")]] = ()
    """Rewards as in recipes/grpo.py, such as auto, of answers that evaluations then generate: engines start for it, and
    a set's score is the answers' mean. By default the score is the negative loss."""

    @property
    def starts_engines(self) -> bool:
        """Whether evaluations generate answers and score them by `rewards`, which takes engines."""
        return bool(self.rewards)

    def __post_init__(self) -> None:
        super().__post_init__()
        rewarded = {"mixture.adapt": self.mixture.adapt, "curriculum.pools": self.curriculum.pools}
        for name, value in rewarded.items():
            if value != "off":
                raise ConfigError(
                    f"--{name} is {value}, which follows rewards, and given examples have none",
                    hint=f"leave out --{name}",
                )

    def check_effects(self) -> None:
        super().check_effects()
        if self.trainer.router_replay:
            raise ConfigError(
                "--trainer.router-replay repeats the experts that engines chose, and no engine wrote the examples",
                hint="leave it out",
            )
        if not self.starts_engines and (devices := read_placement(self.placement).devices) != "auto":
            raise ConfigError(
                f"--placement {devices} is of trainer and engines, and the run has no engines",
                hint="leave it out, or add --reward, for which evaluations generate answers",
            )
        # Engines that answer in evaluations use their own settings, but still generate no training batches.
        unused_groups = _OF_BATCHES if self.starts_engines else _OF_ANSWERS
        if changed := changed_flags(self, unused_groups):
            needs = "acts on batches that engines generate" if self.starts_engines else "needs engines"
            raise ConfigError(
                f"{changed[0]} {needs}, and this recipe trains on given examples",
                hint=f"leave out {changed[0]}"
                + ("" if self.starts_engines else ", or add --reward, for which evaluations generate answers"),
            )

    def answer_reward(self) -> RewardFunction | WeightedSum | None:
        """Return the reward for answers that evaluations generate; None if evaluations measure the loss alone.

        Raises:
            ConfigError: a reward cannot be built.
        """
        return build_reward(self.rewards) if self.rewards else None

    def sources(self, kind: Kind) -> Mixture:
        """Return the sources of the examples.

        Args:
            kind: what a row is; see `Columns`.

        Raises:
            ConfigError: no tasks are given.
            TaskError: a source cannot be built.
        """
        return self.data.build(self.tasks, seed=self.seed, eval_tasks=self.eval_tasks, kind=kind, cache=self.cache)
