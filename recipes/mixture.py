"""Train on maths, tools and a game at once, as one file to copy and edit: mixture weights follow success rates.

python -m recipes.mixture --help

While it runs, `forge_rl.attach(folder).mixture["game"] = 0.5` in another terminal changes a weight by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True, kw_only=True)
class Config(rl.RunConfig):
    """Train on several kinds of tasks with group-relative advantages."""

    maths: float = 1.0
    """Weight of additions, answered directly."""
    tools: float = 1.0
    """Weight of products, with a calculator."""
    game: float = 1.0
    """Weight of a number-guessing game."""
    mixture: rl.Adapting = field(default_factory=lambda: rl.Adapting(adapt="success", least=0.1))
    data: rl.DataConfig = field(default_factory=lambda: rl.DataConfig(instruction=""))
    guess: rl.GuessNumber = field(default_factory=lambda: rl.GuessNumber(highest=10, max_turns=4))
    rewards: rl.RewardTexts = ("auto",)
    """Rewards of answers, as in recipes.grpo; the game scores itself."""
    loss: rl.LossTexts = ("clipped",)
    generator: rl.GeneratorConfig = field(default_factory=lambda: rl.GeneratorConfig(max_tokens=40))

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.check_group_size(self.group_size)


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    texts = (f"maths={rl.ONE_DIGIT_ADDITION}", f"tools={PRODUCTS}")
    # Add a source here, its weight to the mixture, and its environment below.
    rows = config.data.build(texts, seed=config.seed, cache=config.cache)
    sources = {**rows.sources, **config.guess.sources(config.seed)}
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=rl.Mixture(sources, {"maths": config.maths, "tools": config.tools, "game": config.game}),
        reward=rl.build_reward(config.rewards),
        environment=rl.BySource({"maths": rl.SingleTurn, "tools": WORLD, "game": config.guess}),
        recipe="mixture",
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
