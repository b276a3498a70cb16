"""GRPO on a Python tool of many turns, as one file to copy and edit: questions that a few characters of code answer.

python -m recipes.code --help
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import forge_rl as rl

SUMS = "chain_sum:min_terms=3,max_terms=5,min_digits=3,max_digits=4"
"""Sums such as "4123 - 588 + 911", hardly any of which the untrained model gets right without code."""
BITS = "count_bits:max_n=1000000"
"""How many bits of a number are 1: the model has to know how Python counts them."""

# The example shows the form of an episode: code in a fenced block, its output, and the bare answer.
WORLD = rl.PythonEnv(
    max_turns=3,
    timeout_s=5,
    max_output_chars=200,
    examples=(
        {"role": "user", "content": 'How many letters does "program" have?'},
        {"role": "assistant", "content": '```python\nprint(len("program"))\n```'},
        {"role": "user", "content": "Output:\n7"},
        {"role": "assistant", "content": "7"},
    ),
)


async def score(task: rl.Task, episode: rl.Episode) -> rl.Score:
    """Score 1 for a correct answer; the share of episodes that ran code is reported next to it."""
    correct = await rl.ReasoningGymReward()(task, episode.text)
    return replace(correct, parts={"ran": float(len(episode.turns) > 1)})


@dataclass(frozen=True, kw_only=True)
class Config(rl.RunConfig):
    """Train a policy that writes Python, sees its output and answers, with group-relative advantages."""

    tasks: tuple[str, ...] = (SUMS, BITS)
    """The mixture: reasoning-gym data sets, whose verifiers score, as NAME[:KEY=VALUE,...][*WEIGHT]."""
    data: rl.DataConfig = field(default_factory=lambda: rl.DataConfig(instruction=""))
    env: str = ""
    """Environment as MODULE:CLASS, FILE.py:CLASS or NAME[:KEY=VALUE,...]; by default Python with one example."""
    loss: rl.LossTexts = ("clipped",)
    groups_per_batch: int = 4
    group_size: int = 16
    steps: int = 4
    evaluation: rl.EvalConfig = field(default_factory=lambda: rl.EvalConfig(every=4, tasks=64))
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(minibatches=2))
    generator: rl.GeneratorConfig = field(default_factory=lambda: rl.GeneratorConfig(max_tokens=48, temperature=0.6))
    """A lower temperature than 1: few of the small model's hotter samples are code at all."""

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
        recipe="code",
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
