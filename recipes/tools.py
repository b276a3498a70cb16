"""GRPO on multi-turn tool use, as one file to copy and edit: products that are easy with a calculator.

python -m recipes.tools --help
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import forge_rl as rl

PRODUCTS = (
    "basic_arithmetic:min_terms=2,max_terms=2,min_digits=2,max_digits=2,operators=[*],allow_parentheses=false,"
    "format_style=natural"
)
"""Products such as "Calculate 47 * 12.", none of which the untrained model can solve without the calculator."""


def example(question: str, expression: str, result: str) -> tuple[rl.Message, ...]:
    """Return a correct episode, shown before each question."""
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return (
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": result},
        {"role": "assistant", "content": result},
    )


# Any functions can be tools: their signatures and docstrings become the schemas that the model is shown.
WORLD = rl.ToolEnv(
    [rl.calculator],
    max_turns=3,
    instruction="Use the calculator to answer.",
    examples=(
        *example("Calculate 31 * 24.", "31 * 24", "744"),
        *example("What is 58 * 67?", "58 * 67", "3886"),
        *example("Evaluate: 45 * 19.", "45 * 19", "855"),
    ),
)


async def score(task: rl.Task, episode: rl.Episode) -> rl.Score:
    """Score 1 for a correct answer; the share of episodes that called a tool is reported next to it."""
    correct = await rl.ReasoningGymReward()(task, episode.text)
    return replace(correct, parts={"called": float(len(episode.turns) > 1)})


@dataclass(frozen=True, kw_only=True)
class Config(rl.RunConfig):
    """Train a policy that calls tools with group-relative advantages."""

    tasks: tuple[str, ...] = (PRODUCTS,)
    """The mixture: reasoning-gym data sets, whose verifiers score, as NAME[:KEY=VALUE,...][*WEIGHT]."""
    data: rl.DataConfig = field(default_factory=lambda: rl.DataConfig(instruction=""))
    env: str = ""
    """Environment as MODULE:CLASS, FILE.py:CLASS or NAME[:KEY=VALUE,...]; by default this recipe's calculator."""
    loss: rl.LossTexts = ("clipped",)
    groups_per_batch: int = 4
    group_size: int = 16
    steps: int = 4
    evaluation: rl.EvalConfig = field(default_factory=lambda: rl.EvalConfig(every=4, tasks=64))
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(minibatches=2))
    generator: rl.GeneratorConfig = field(default_factory=lambda: rl.GeneratorConfig(max_tokens=40))

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.check_group_size(self.group_size)


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.data.build(config.tasks, seed=config.seed, cache=config.cache),
        reward=score,
        environment=rl.build_environment(config.env) if config.env else WORLD,
        recipe="tools",
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
