"""The tiny recipe on engines without vLLM, whose rollbacks wait for a minute in the call that SLOW names.

SLOW=publish FORGE_RL_FAKE_ENGINES=FOLDER python -m tests.slow_recovery --model FOLDER --out FOLDER ...
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

from forge_rl import launch
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.services.generator import Generator
from recipes import grpo
from tests.fake_engine import FakeEngine
from tests.tiny_fake import Config


def slow(owner: type, name: str, quick_calls: int) -> None:
    """Wait in a method once it has been called so often."""
    method, calls = getattr(owner, name), [0]

    async def waiting(self: object, *args: Any) -> object:
        calls[0] += 1
        if calls[0] > quick_calls:
            print(f"waits in {name}", flush=True)
            await asyncio.sleep(60)
        return await method(self, *args)

    setattr(owner, name, waiting)


if __name__ == "__main__":
    if os.environ["SLOW"] == "publish":
        slow(Checkpointer, "publish", 1)  # the first publishes the first weights
    if os.environ["SLOW"] == "restore":
        slow(RolloutExecutor, "restore", 0)
    Generator.start = partial(Generator.start, actor=FakeEngine)  # type: ignore[method-assign]
    launch(Config, grpo.main)
