"""The tiny recipe on engines without vLLM, which prints the tasks that each step trained on.

FORGE_RL_FAKE_ENGINES=FOLDER python -m tests.tiny_own --tasks FILE:id=n --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

from functools import partial

from forge_rl import launch
from forge_rl.services.generator import Generator
from recipes import grpo
from tests.fake_engine import FakeEngine
from tests.tiny_fake import Config


async def main(config: Config) -> None:
    """Trains, without evaluation."""
    async with grpo.start(config) as run:
        while run.step < config.steps:
            async with run.recovering():
                await grpo.step(run)
                assert run.last_batch is not None
                print(f"trained {run.step}: {' '.join(group.task.id for group in run.last_batch.groups)}", flush=True)
                if run.due(config.checkpoint_every):
                    await run.checkpoint()


if __name__ == "__main__":
    Generator.start = partial(Generator.start, actor=FakeEngine)  # type: ignore[method-assign]
    launch(Config, main)
