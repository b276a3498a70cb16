"""GRPO: group-relative policy optimisation, as one file to copy and edit.

python -m recipes.grpo --help
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train a policy with group-relative advantages."""

    loss: rl.LossTexts = ("clipped",)
    advantages: rl.Estimator = "grpo"
    """Advantage estimator. grpo divides by a group's standard deviation, dr_grpo does not; reinforce and reinforce_pp
    have the whole batch as baseline, which --group-size 1 requires. The documentation has a formula for each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.check_group_size(self.group_size, self.advantages)


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    # Any of these may be your own object: a loss class, a function (task, text) as reward, an environment class.
    environment = rl.build_environment(config.env)
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.sources(environment),
        reward=rl.build_reward(config.rewards),
        environment=environment,
        recipe="grpo",
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: roll out, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("train"):
        advantages = rl.batch_advantages(batch, estimator=run.config.advantages)
        packed = await asyncio.to_thread(rl.pack, batch, advantages, run.trainer.layout)
        stats = await run.trainer.step(packed, run.loss, temperature=run.generator.sampling.temperature)
    with run.phase("publish"):
        version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
        await run.generator.load(run.weights, version)
    run.log(stats, batch, packed)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        if not run.scores:
            async with run.recovering():
                await run.evaluate()
        while run.step < config.steps:
            async with run.recovering():
                await step(run)
                if run.due(config.evaluation.every):
                    await run.evaluate()
                if run.due(config.checkpoint_every):
                    await run.checkpoint()


if __name__ == "__main__":
    rl.launch(Config, main)
