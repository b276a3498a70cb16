"""GRPO: group-relative policy optimisation, as one file to copy and edit.

python -m recipes.grpo --help
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import forge_rl
from forge_rl import ClippedSurrogate, Run, RunConfig, Starting, group_advantages, launch, pack
from forge_rl.data.config import ONE_DIGIT_ADDITION, ReasoningGymData
from forge_rl.rewards.verifiers import ReasoningGymReward


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Train a policy with group-relative advantages."""

    tasks: tuple[str, ...] = (ONE_DIGIT_ADDITION,)
    """The mixture: reasoning-gym data sets as NAME[:KEY=VALUE,...][*WEIGHT]."""
    data: ReasoningGymData = field(default_factory=ReasoningGymData)
    verifier: ReasoningGymReward = field(default_factory=ReasoningGymReward)
    loss: ClippedSurrogate = field(default_factory=ClippedSurrogate)
    advantage_scale: Literal["std", "none"] = "std"
    """Divide a group's centered rewards by their standard deviation, or leave them."""


def start(config: Config) -> Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    sources = config.data.build(config.tasks, seed=config.seed)
    return forge_rl.start(config, loss=config.loss, sources=sources, reward=config.verifier, recipe="grpo")


async def step(run: Run[Config]) -> None:
    """One step: roll out, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("train"):
        advantages = group_advantages(batch.rewards, scale=run.config.advantage_scale)  # [P, G]
        keep_uniform = run.config.loss.needs_reference
        packed = await asyncio.to_thread(pack, batch, advantages, run.trainer.layout, drop_uniform=not keep_uniform)
        stats = await run.trainer.step(packed, run.config.loss, temperature=run.generator.sampling.temperature)
    with run.phase("publish"):
        version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
        await run.generator.load(run.weights, version)
    run.log(stats, batch, packed)


async def main(config: Config) -> None:
    """The whole run, or what is left of it."""
    async with start(config) as run:
        if not run.scores:
            await run.evaluate()
        while run.step < config.steps:
            async with run.recovering():
                await step(run)
                if run.due(config.eval_every):
                    await run.evaluate()
                if run.due(config.checkpoint_every):
                    await run.checkpoint()


if __name__ == "__main__":
    launch(Config, main)
