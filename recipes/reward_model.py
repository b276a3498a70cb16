"""Reward models: a classifier learns to score answers from pairs of them, as one file to copy and edit.

python -m recipes.reward_model --help
"""

from __future__ import annotations

from dataclasses import dataclass, field

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.ExampleConfig):
    """Train a model with one output to score the preferred answer of a pair above the other."""

    loss: rl.BradleyTerry = field(default_factory=rl.BradleyTerry)


def start(config: Config) -> rl.Starting[Config]:
    """Start the trainer: `async with start(config) as run`, or `run = await start(config).open()`."""
    # `comparison_episodes` puts one token after each conversation, at which the score is read.
    return rl.start_examples(
        config, rl.comparison_episodes, loss=config.loss, sources=config.sources("pair"), recipe="reward_model"
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
