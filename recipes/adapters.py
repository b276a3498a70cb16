"""Several adapters over one base, each trained by GRPO on a source of its own, as one file to copy and edit.

python -m recipes.adapters --help
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train an adapter for each source of tasks: one trainer and one set of engines for all of them."""

    tasks: tuple[str, ...] = (
        "sums=chain_sum:max_terms=2,max_digits=1",
        "letters=letter_counting:min_words=2,max_words=4",
    )
    loss: rl.LossTexts = ("clipped",)
    lora: rl.LoRAConfig = field(default_factory=lambda: rl.LoRAConfig(rank=16))
    mix_rows: rl.Operational[bool] = True
    """Compute rows of several adapters together: faster, and what each alone gets within rounding."""
    schedule: rl.ScheduleConfig = field(default_factory=lambda: rl.ScheduleConfig(kind="synchronous"))


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    environment, loss = rl.build_environment(config.env), rl.build_loss(config.loss)
    sources = config.sources(environment)
    return rl.start(
        rl.with_adapters(config, loss, list(sources.sources)),
        loss=loss,
        sources=sources,
        reward=rl.build_reward(config.rewards),
        environment=environment,
        recipe="adapters",
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: roll out, train each source's adapter on its episodes, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("train"):
        # One packed batch for each adapter, of the groups of its own source.
        packed = {
            name: await asyncio.to_thread(rl.pack, part, rl.batch_advantages(part), run.trainer.layout)
            for name, part in batch.by_source.items()
        }
        stats = await run.adapters.step(packed, run.loss, mix_rows=run.config.mix_rows)
    with run.phase("publish"):
        await run.adapters.publish()
    run.log(stats, batch)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.adapters.open(*run.mixture.sources)
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
