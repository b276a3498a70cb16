"""Takes steps of recipes.grpo, then scores probes: python -m benchmarks.peers.probe_cost, with flags of the recipe.

Prints a JSON line with CPU seconds of all processes: of each step, of the trainer's scores of the probes, and what an
engine takes more for a batch's requests if probes are among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

import numpy as np
import psutil  # type: ignore[import-untyped]

from forge_rl import launch
from recipes.grpo import Config, start, step

_WARM_UP, _REPEATS, _PROBES = 2, 5, 8
"""Steps that are not counted, repeats of other measurements, and copies of the probes among an engine's requests: one
costs less than requests differ."""


def cpu_s() -> float:
    """Return the CPU time of this process and its descendants so far."""
    root, total = psutil.Process(), 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def main(config: Config) -> None:
    """Take steps, then score the probes of the last version."""
    seconds: dict[str, list[float]] = {"step": [], "trainer": [], "engine": []}
    async with start(config) as run:
        for number in range(config.steps):
            began = cpu_s()
            await step(run)
            if number >= _WARM_UP:
                seconds["step"].append(cpu_s() - began)
        assert run.trainer.probe is not None, "probes are on by default"
        assert run.last_batch is not None
        packed = run.trainer.probe(run.trainer.layout)
        (row,) = packed.rows
        ids = np.append(row.token_ids, row.targets[-1]).astype(np.int32)
        prompts = [episode.turns[0].prompt_ids for episode in run.last_batch.episodes]

        async def requests_s(probes: int) -> float:
            began = cpu_s()
            scores = (run.generator.score(ids[:1], ids[1:]) for _ in range(probes))
            await asyncio.gather(run.generator.sample(prompts), *scores)
            return cpu_s() - began

        await requests_s(_PROBES)
        for _ in range(_REPEATS):
            began = cpu_s()
            await run.trainer.logprobs(packed)
            seconds["trainer"].append(cpu_s() - began)
            alone = await requests_s(0)
            seconds["engine"].append((await requests_s(_PROBES) - alone) / _PROBES)
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    launch(Config, main)
