"""The settings of recipes whose tasks, environment and reward are named by flags."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.data.mixture import Mixture, as_mixture
from forge_rl.envs.env_flag import sources_of
from forge_rl.envs.protocol import EnvFactory
from forge_rl.errors import ConfigError
from forge_rl.flags.categories import Tunable
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
    eval_tasks: Tunable[tuple[str, ...]] = ()
    """Tasks for evaluation only, as [NAME=]TASKS; by default a share of --tasks is held out."""
    data: DataConfig = field(default_factory=DataConfig)
    env: str = ""
    """Environment, as MODULE:CLASS, FILE.py:CLASS or NAME[:KEY=VALUE,...]; by default the model answers once."""
    rewards: RewardTexts = ("auto",)

    def sources(self, environment: EnvFactory) -> Mixture:
        """Return the sources of the tasks: built from `tasks`, or else provided by the environment that `env` names.

        Args:
            environment: the result of `build_environment(config.env)`.

        Raises:
            ConfigError: no tasks are given, a source cannot be built, or --data is set for tasks that it does not make.
        """
        tasks = self.tasks or (() if self.env else (ONE_DIGIT_ADDITION,))
        if not tasks:
            # Tasks of --eval-tasks are still read with these settings, except that nothing is held out of them.
            unused = [
                f"--data.{field.name.replace('_', '-')}"
                for field in fields(self.data)
                if getattr(self.data, field.name) != field.default
                and (not self.eval_tasks or field.name == "held_out_share")
            ]
            if unused:
                raise ConfigError(
                    f"{', '.join(unused)} has no effect on the environment's own tasks",
                    hint="leave it out, or name the tasks with --tasks",
                )
            mixture = as_mixture(sources_of(environment, self.seed), seed=self.seed)
            evaluation = self.data.eval_sources(self.eval_tasks, seed=self.seed, cache=self.cache)
            if not evaluation:
                return mixture
            return Mixture(mixture.sources, evaluation=evaluation, holds_out=False, overlap=self.data.overlap)
        return self.data.build(tasks, seed=self.seed, eval_tasks=self.eval_tasks, cache=self.cache)
