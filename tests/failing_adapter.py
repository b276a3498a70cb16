"""recipes.adapters, with a loss that is not a number for one of the adapters.

python -m tests.failing_adapter --tasks good=... bad=...
"""

from __future__ import annotations

import asyncio

import forge_rl as rl
from recipes.adapters import Config, start
from tests.test_run_adapters import NotANumber


async def step(run: rl.Run[Config]) -> None:
    """Run one step."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("train"):
        packed = {
            name: await asyncio.to_thread(rl.pack, part, rl.batch_advantages(part), run.trainer.layout)
            for name, part in batch.by_source.items()
        }
        stats = await run.adapters.step(packed, {"good": run.loss, "bad": NotANumber()})
    with run.phase("publish"):
        await run.adapters.publish()
    run.log(stats, batch)


async def main(config: Config) -> None:
    """Run all steps."""
    async with start(config) as run:
        await run.adapters.open(*run.mixture.sources)
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
