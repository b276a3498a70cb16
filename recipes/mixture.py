"""Train on maths, tools and a game at once, as one file to copy and edit: mixture weights follow success rates.

python -m recipes.mixture --help

While it runs, `forge_rl.attach(folder).mixture["game"] = 0.5` in another terminal changes a weight by hand.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import forge_rl
from forge_rl import ClippedSurrogate, Run, RunConfig, Starting, batch_advantages, launch, pack
from forge_rl.algorithms.advantages import check_group_size
from forge_rl.data.adaptive import Adapting
from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.data.mixture import Mixture
from forge_rl.envs.by_source import BySource
from forge_rl.envs.game import GuessNumber
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.rewards.reward_flag import RewardTexts, build_reward
from recipes.tools import PRODUCTS, WORLD


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Train on several kinds of tasks with group-relative advantages."""

    maths: float = 1.0
    """Weight of additions, answered directly."""
    tools: float = 1.0
    """Weight of products, with a calculator."""
    game: float = 1.0
    """Weight of a number-guessing game."""
    mixture: Adapting = field(default_factory=lambda: Adapting(adapt="success", least=0.1))
    data: DataConfig = field(default_factory=lambda: DataConfig(instruction=""))
    guess: GuessNumber = field(default_factory=lambda: GuessNumber(highest=10, max_turns=4))
    rewards: RewardTexts = ("auto",)
    """Rewards of answers, as in recipes.grpo; the game scores itself."""
    loss: ClippedSurrogate = field(default_factory=ClippedSurrogate)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)


def start(config: Config) -> Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    texts = (f"maths={ONE_DIGIT_ADDITION}", f"tools={PRODUCTS}")
    sources = {**config.data.build(texts, seed=config.seed).sources, **config.guess.sources(config.seed)}
    return forge_rl.start(
        config,
        loss=config.loss,
        sources=Mixture(sources, {"maths": config.maths, "tools": config.tools, "game": config.game}),
        reward=build_reward(config.rewards),
        environment=BySource({"maths": SingleTurn, "tools": WORLD, "game": config.guess}),
        recipe="mixture",
    )


async def step(run: Run[Config]) -> None:
    """Run one step: roll out, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("train"):
        advantages = batch_advantages(batch)
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
