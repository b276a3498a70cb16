"""REINFORCE++: one answer to each task, with the whole batch as baseline, as one file to copy and edit.

python -m recipes.reinforce --help
"""

from __future__ import annotations

from dataclasses import dataclass

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train a policy with advantages relative to the batch: as many tasks as possible, of one answer each."""

    groups_per_batch: int = 64
    group_size: int = 1
    """G: episodes per task; reinforce_pp_baseline needs 2 or more."""
    loss: rl.LossTexts = ("ppo",)
    advantages: rl.Estimator = "reinforce_pp"
    """Advantage estimator: reinforce_pp (REINFORCE++, arXiv 2501.03262) whitens rewards over the batch's tokens,
    reinforce over its episodes. Both need no group; reinforce_pp_baseline subtracts a group's mean before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.check_group_size(self.group_size, self.advantages)


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    environment = rl.build_environment(config.env)
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.sources(environment),
        reward=rl.build_reward(config.rewards),
        environment=environment,
        recipe="reinforce",
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: roll out, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    await run.train_on(batch, rl.batch_advantages(batch, estimator=run.config.advantages))


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
