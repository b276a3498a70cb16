"""The settings of recipes whose tasks, environment and reward are named by flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.data.mixture import Mixture
from forge_rl.envs.env_flag import sources_of
from forge_rl.envs.protocol import EnvFactory
from forge_rl.rewards.reward_flag import RewardTexts
from forge_rl.run.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TaskConfig(RunConfig):
    """Settings that name the tasks, their environment and the reward; a recipe adds its method's own.

    @dataclass(frozen=True, kw_only=True)
    class Config(TaskConfig):
        loss: LossTexts = ("clipped",)

    environment = build_environment(config.env)
    start(config, sources=config.sources(environment), reward=build_reward(config.rewards), environment=environment)
    """

    tasks: tuple[str, ...] = ()
    """The mixture, as NAME[:KEY=VALUE,...][*WEIGHT]: files, folders, hub ids, reasoning-gym data sets, or FILE.py:NAME.
    Keys of files name columns: data/*.jsonl:question=problem,answer=solution*0.7. By default the tasks of --env, or
    one-digit additions."""
    eval_tasks: tuple[str, ...] = ()
    """Tasks for evaluation only, as [NAME=]TASKS; by default a share of --tasks is held out."""
    data: DataConfig = field(default_factory=DataConfig)
    env: str = ""
    """Environment, as MODULE:CLASS, FILE.py:CLASS or NAME[:KEY=VALUE,...]; by default the model answers once."""
    rewards: RewardTexts = ("auto",)

    def sources(self, environment: EnvFactory) -> Mixture | Mapping[str, Any]:
        """Return the sources of the tasks: built from `tasks`, or else provided by the environment that `env` names.

        Args:
            environment: the result of `build_environment(config.env)`.

        Raises:
            ConfigError: no tasks are given, or a source cannot be built.
        """
        tasks = self.tasks or (() if self.env else (ONE_DIGIT_ADDITION,))
        if not tasks:
            return sources_of(environment, self.seed)
        return self.data.build(tasks, seed=self.seed, eval_tasks=self.eval_tasks)
