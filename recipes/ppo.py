"""PPO: a critic values each token, as one file to copy and edit.

python -m recipes.ppo --help
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train a policy with a critic: generalized advantage estimation, and a value model in a service of its own."""

    loss: rl.LossTexts = ("clipped",)
    critic: rl.CriticConfig = field(default_factory=rl.CriticConfig)
    gae: rl.GaeConfig = field(default_factory=rl.GaeConfig)
    value_clip: float = 0.5
    """Clip values to within this distance of the batch's first ones in the value loss, in units of reward; inf does
    not clip."""
    value_pretraining_steps: int = 0
    """Train the critic alone for this many steps at first, on the episodes of the unchanged policy (VAPO)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.ValueLoss(clip=self.value_clip)  # refuses a clip of 0
        if self.value_pretraining_steps < 0:
            raise rl.ForgeError(f"--value-pretraining-steps is {self.value_pretraining_steps}", hint="set 0 or more")

    @property
    def policy_steps(self) -> int:
        return max(1, self.steps - self.value_pretraining_steps)


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    environment = rl.build_environment(config.env)
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.sources(environment),
        reward=rl.build_reward(config.rewards),
        environment=environment,
        critic=config.critic,
        recipe="ppo",
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: roll out, value, train policy and critic, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("values"):
        values = await run.critic.episode_values(batch)
        episode_advantages, returns = rl.gae(values, rl.token_rewards(batch.episodes), run.config.gae)
        advantages = rl.by_group(batch, episode_advantages)
    with run.phase("train"):
        stats = dict[str, float]()
        packed = await asyncio.to_thread(rl.pack, batch, advantages, run.trainer.layout)
        if run.step >= run.config.value_pretraining_steps:
            stats = await run.trainer.step(packed, run.loss, temperature=run.generator.sampling.temperature)
    with run.phase("train_critic"):
        columns = {"returns": rl.by_group(batch, returns), "old_values": rl.by_group(batch, values)}
        layout, loss = run.critic.layout, rl.ValueLoss(clip=run.config.value_clip)
        targets = await asyncio.to_thread(rl.pack, batch, advantages, layout, drop_uniform=False, columns=columns)
        fitted = await run.critic.step(targets, loss)
    with run.phase("publish"):
        version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
        await run.generator.load(run.weights, version)
    run.log(stats | {f"critic/{name}": value for name, value in fitted.items()}, batch, packed)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
