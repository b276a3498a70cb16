"""GRPO: group-relative policy optimisation, as one file to copy and edit.

python -m recipes.grpo --help
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import forge_rl
from forge_rl import ClippedSurrogate, Run, RunConfig, Starting, batch_advantages, launch, pack
from forge_rl.algorithms.advantages import check_group_size
from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.data.mixture import AnySources
from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.rewards.reward_flag import RewardTexts, build_reward


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Train a policy with group-relative advantages."""

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
    """Rewards, as NAME[:KEY=VALUE,...][*WEIGHT], or your own as MODULE:FUNCTION[=WEIGHT] or FILE.py:FUNCTION[=WEIGHT];
    several are summed. auto compares with the task's answer; other names: diversity, exact, format, json_schema, judge,
    length, match, math, model, number, overlong, reasoning_gym, regex."""
    loss: ClippedSurrogate = field(default_factory=ClippedSurrogate)
    advantage_scale: Literal["std", "none", "batch"] = "std"
    """std: divide a group's centered rewards by their standard deviation. none: leave them. batch: treat the whole
    batch as one group, which --group-size 1 requires (REINFORCE)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size, self.advantage_scale)


def start(config: Config) -> Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    environment = build_environment(config.env)
    if config.env and not config.tasks:
        sources: AnySources = sources_of(environment, config.seed)
    else:
        tasks = config.tasks or (ONE_DIGIT_ADDITION,)
        sources = config.data.build(tasks, seed=config.seed, eval_tasks=config.eval_tasks)
    return forge_rl.start(
        config,
        loss=config.loss,
        sources=sources,
        reward=build_reward(config.rewards),
        environment=environment,
        recipe="grpo",
    )


async def step(run: Run[Config]) -> None:
    """Run one step: roll out, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("train"):
        advantages = batch_advantages(batch, scale=run.config.advantage_scale)
        keep_uniform = run.config.loss.needs_reference
        packed = await asyncio.to_thread(pack, batch, advantages, run.trainer.layout, drop_uniform=not keep_uniform)
        stats = await run.trainer.step(packed, run.config.loss, temperature=run.generator.sampling.temperature)
    with run.phase("publish"):
        version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
        await run.generator.load(run.weights, version)
    run.log(stats, batch, packed)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        if not run.scores:
            await run.evaluate()
        while run.step < config.steps:
            async with run.recovering():
                await step(run)
                if run.due(config.evaluation.every):
                    await run.evaluate()
                if run.due(config.checkpoint_every):
                    await run.checkpoint()


if __name__ == "__main__":
    launch(Config, main)
