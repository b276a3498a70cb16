"""What an engine answers to requests with seeds, as JSON: python -m tests.seeded_answers MODEL SPECULATION

Its exit from a process of its own leaves no engine behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from forge_rl.engines.factory import decode_environment, start_decode_engine
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.types import Sampling
from tests.engine_conformance import Stream

PROMPT = [11, 12, 13, 14, 15, 16] * 6
EAGER = "max_tokens=4,max_running=64,min_accepted=0,adaptive=false"
"""Options of speculation that drafts whenever it can."""


def seeded_answers(model: Path, speculation: str) -> dict[str, Any]:
    """Return the tokens of eight answers, the rest of the fourth by its first 20, and the number of drafted tokens."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.seeded_answers", str(model), speculation],
        env=os.environ | decode_environment(0, replicas=1),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    answers: dict[str, Any] = json.loads(line.removeprefix("ANSWERS"))
    return answers


async def main(model: Path, speculation: str) -> None:
    settings = DecodeSettings(
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.25,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        speculation=speculation,
    )
    engine = await start_decode_engine(model, settings, seed=0)

    def stream(seed: int, start: list[int]) -> Stream:
        sampling = Sampling(max_tokens=60 - len(start), seed=seed, extra={"top_k": 2, "ignore_eos": True})
        return Stream(engine, sampling, [*PROMPT, *start])

    try:
        await engine.serve_model()
        streams = [stream(seed, []) for seed in range(8)]
        answers = [(await request.turn()).token_ids.tolist() for request in streams]
        rest = (await stream(3, answers[3][:20]).turn()).token_ids.tolist()
    finally:
        engine.close()
    drafted = sum(request.chunks[-1].drafted for request in streams)
    print("ANSWERS" + json.dumps({"answers": answers, "rest": rest, "drafted": drafted}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
