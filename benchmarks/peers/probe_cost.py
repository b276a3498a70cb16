"""Takes steps of recipes.grpo, then scores probes: python -m benchmarks.peers.probe_cost, with flags of the recipe.

Prints a JSON line with CPU seconds of all processes: of each step, and of the trainer's and an engine's scores of the
probes. Engines score probes beside other requests, which costs less than alone.
"""

from __future__ import annotations

import contextlib
import json

import numpy as np
import psutil

from forge_rl import launch
from recipes.grpo import Config, start, step

_WARM_UP, _SCORES = 2, 5
"""Steps that are not counted, and scores of the probes, after a first one."""


def cpu_s() -> float:
    """Return the CPU time of this process and its descendants so far."""
    root, total = psutil.Process(), 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def main(config: Config) -> None:
    """Take steps, then score."""
    seconds: dict[str, list[float]] = {"step": [], "trainer": [], "engine": []}
    async with start(config) as run:
        for number in range(config.steps):
            began = cpu_s()
            await step(run)
            if number >= _WARM_UP:
                seconds["step"].append(cpu_s() - began)
        assert run.trainer.probe is not None, "probes are on by default"
        packed = run.trainer.probe(run.trainer.layout)
        (row,) = packed.rows
        ids = np.append(row.token_ids, row.targets[-1]).astype(np.int32)
        for number in range(1 + _SCORES):
            began = cpu_s()
            await run.trainer.logprobs(packed)
            middle = cpu_s()
            await run.generator.score(ids[:1], ids[1:])
            if number:
                seconds["trainer"].append(middle - began)
                seconds["engine"].append(cpu_s() - middle)
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    launch(Config, main)
