"""Tree search: answers fork while they are written, as one file to copy and edit.

python -m recipes.tree_search --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import forge_rl as rl


class Forking:
    """An answer in parts of --generator.max-tokens, which forks in two after the first and second part."""

    leaves = 4
    parts = 8

    def __init__(self, task: rl.Task) -> None:
        self.task, self.written = task, list[str]()

    async def reset(self) -> rl.Observation:
        return rl.Observation(messages=self.task.messages)

    async def step(self, completion: str, *, truncated: bool) -> rl.Step:
        self.written.append(completion)
        # A part that ends by itself is the end of the answer; a truncated one goes on, in two branches at first.
        if truncated and len(self.written) < self.parts:
            return rl.Step(done=False, continues=True, branches=2 if len(self.written) <= 2 else 1)
        return rl.Step(done=True, output="".join(self.written))


class Regrowing:
    """A whole answer, of which others of its group rewrite the rest from its three most surprising tokens."""

    leaves = 4

    def __init__(self, task: rl.Task) -> None:
        self.task = task

    async def reset(self) -> rl.Observation:
        return rl.Observation(messages=self.task.messages)

    async def step(self, completion: str) -> rl.Step:
        return rl.Step(done=True, forks=3)


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train a policy on trees of answers, by the advantages of TreeRL (arXiv 2506.11902)."""

    loss: rl.LossTexts = ("clipped",)
    fork_at: Literal["length", "entropy"] = "length"
    """Where answers fork in this recipe's worlds. length: after parts of --generator.max-tokens. entropy: at the
    most surprising tokens of whole answers, as in TreeRL."""
    generator: rl.GeneratorConfig = field(default_factory=lambda: rl.GeneratorConfig(max_tokens=8))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.env and self.fork_at != "length":
            raise rl.ForgeError("--fork-at is of this recipe's worlds, and --env names another", hint="leave one out")


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    default_environment = Regrowing if config.fork_at == "entropy" else Forking
    # An environment of your own forks by returning `branches` or `forks` in a Step, as those above do.
    environment = rl.build_environment(config.env) if config.env else default_environment
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.sources(environment),
        reward=rl.build_reward(config.rewards),
        environment=environment,
        recipe="tree_search",
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: roll out, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    await run.train_on(batch, rl.tree_advantages(batch))


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
