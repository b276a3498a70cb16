"""DAPO: clip-higher, a mean over tokens, dynamic sampling and a soft limit of length, as one file to copy and edit.

python -m recipes.dapo --help
"""

from __future__ import annotations

from dataclasses import dataclass, field

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train a policy with DAPO (arXiv 2503.14476): GRPO's advantages, without a KL penalty."""

    UNSCALED = ("generator.max_tokens",)  # the penalty of long answers is made of it before a start
    loss: rl.LossTexts = ("dapo:dual_clip=10",)
    schedule: rl.ScheduleConfig = field(default_factory=lambda: rl.ScheduleConfig(dynamic_sampling=True))
    overlong_share: float = 0.2
    """Share of --generator.max-tokens, at their end, over which the penalty of long answers grows from 0 to 1; 4096 of
    20480 tokens in the paper. 0 has no penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.check_group_size(self.group_size)

    @property
    def overlong(self) -> tuple[str, ...]:
        """The penalty, as a text in the form of `rewards`."""
        tokens = self.generator.max_tokens
        cache = round(self.overlong_share * tokens)
        return (f"overlong:max_tokens={tokens},cache_tokens={cache}",) if cache else ()


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    environment = rl.build_environment(config.env)
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.sources(environment),
        reward=rl.build_reward([*config.rewards, *config.overlong]),
        environment=environment,
        recipe="dapo",
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: roll out, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    await run.train_on(batch, rl.batch_advantages(batch))


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
