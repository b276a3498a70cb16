"""DPO: a policy learns from pairs of a preferred and another answer, as one file to copy and edit.

python -m recipes.dpo --help
"""

from __future__ import annotations

from dataclasses import dataclass, field

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.ExampleConfig):
    """Train a policy on pairs of answers, against the policy that it starts from."""

    LR_POWER = 1.0  # as reinforcement learning's: preferences take smaller rates than supervised training
    loss: rl.Dpo = field(default_factory=rl.Dpo)


def start(config: Config) -> rl.Starting[Config]:
    """Start the trainer: `async with start(config) as run`, or `run = await start(config).open()`."""
    # `preference_episodes` makes two episodes of each pair, the preferred one first, as the loss expects.
    return rl.start_examples(
        config, rl.preference_episodes, loss=config.loss, sources=config.sources("pair"), recipe="dpo"
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: draw pairs, train."""
    with run.phase("draw"):
        batch = await run.examples.next_batch()
    await run.train_on(batch)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
