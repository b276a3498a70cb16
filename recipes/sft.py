"""SFT: supervised fine-tuning on given answers, as one file to copy and edit.

python -m recipes.sft --help
"""

from __future__ import annotations

from dataclasses import dataclass

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.ExampleConfig):
    """Train a model to write given answers."""

    @property
    def loss(self) -> rl.Loss:
        """Mean negative logprob of the answers' tokens."""
        return rl.CrossEntropy()


def start(config: Config) -> rl.Starting[Config]:
    """Start the trainer: `async with start(config) as run`, or `run = await start(config).open()`."""
    # To train on rows of another form, replace `conversation_episodes` by a function from a task to episodes.
    return rl.start_examples(
        config, rl.conversation_episodes, loss=config.loss, sources=config.sources("conversation"), recipe="sft"
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: draw examples, train."""
    with run.phase("draw"):
        batch = await run.examples.next_batch()
    await run.train_on(batch)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
