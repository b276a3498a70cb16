"""A vLLM engine on CUDA: what a decode engine must do, and that its memory is free while it sleeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from forge_rl.engines.factory import decode_environment
from tests.seeded_answers import EAGER, seeded_answers
from tests.tiny import bundled_folder

SCRIPT = """
import asyncio, contextlib, json, sys
from pathlib import Path
import torch
from forge_rl.engines.factory import start_decode_engine
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.types import Sampling
from tests.engine_conformance import Stream, fetch, publish
from tests.family_engine import Weights

async def main(folder, scratch):
    settings = DecodeSettings(max_model_len=256, gpu_memory_utilization=0.3, enforce_eager=True)
    engine = await start_decode_engine(folder, settings, seed=0)
    found = {"free": [], "whole": [], "greedy": []}

    async def look(**held):
        if held:
            found["whole"].append(await engine.hold(paused=False, **held))
        found["free"].append(torch.cuda.mem_get_info()[0])

    async def decode():
        turn = await Stream(engine, Sampling(max_tokens=16, temperature=0.0), range(1000, 1040)).turn()
        found["greedy"].append(turn.token_ids.tolist())

    async def load(version):
        async with contextlib.aclosing(fetch(manifests[version], scratch, -1)) as buckets:
            report = await engine.load(manifests[version], buckets, reader="engine")
        found.setdefault("in_place", []).append(report.in_place / len(manifests[version].tensors))

    try:
        (scratch / "versions").mkdir()
        given = {"bucket_bytes": 64 << 20, "dtype": torch.bfloat16}
        manifests = {each: publish(Weights(folder), scratch / "versions", each, **given) for each in (1, 2)}
        await decode()
        await look()
        await look(asleep=True)  # weights of the folder go to the host
        await look(asleep=False)
        await decode()
        await load(1)
        await decode()
        await look(asleep=True)  # those that were loaded are dropped
        await look(asleep=False)
        await load(2)
        await look(asleep=False)
        await decode()
    finally:
        engine.close()
    print("FOUND" + json.dumps(found))

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_an_engine_starts_loads_sleeps_and_wakes_with_the_same_weights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(bundled_folder()), str(tmp_path)],
        env=os.environ | decode_environment(0, replicas=1),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    report = json.loads(line.removeprefix("FOUND"))
    awake, asleep, woken, dropped, gone_bytes, back = report["free"]
    assert report["whole"] == [True, True, False, False, True]
    assert min(asleep, dropped, gone_bytes) > awake + (8 << 30), "keys and values take most of 0.3 of a GPU"
    assert max(woken, back) < asleep - (8 << 30)
    assert len(set(map(tuple, report["greedy"]))) == 1, "the versions are the folder's own weights"
    assert min(report["in_place"]) > 0.99


def test_a_seed_gives_the_same_tokens_with_and_without_drafts() -> None:
    """By vLLM's first model runner with drafts, and by its second one without."""
    model = bundled_folder()
    plain, drafting = (seeded_answers(model, speculation) for speculation in ("off", f"ngram:{EAGER}"))
    assert plain["drafted"] == 0 < drafting["drafted"]
    assert plain["answers"] == drafting["answers"]
    assert plain["rest"] == drafting["rest"] == plain["answers"][3][20:]
