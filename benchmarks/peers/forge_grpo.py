"""Runs a step of recipes.grpo per line on stdin: python -m benchmarks.peers.forge_grpo, with the recipe's flags.

Stdout gets a JSON line once the services have started, and one per step; nothing is computed between steps.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from forge_rl import launch
from recipes.grpo import Config, start, step


async def main(config: Config) -> None:
    """Take steps until stdin ends."""
    async with start(config) as run:
        print(json.dumps({"started": True}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            began = time.perf_counter()
            await step(run)
            print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    launch(Config, main)
