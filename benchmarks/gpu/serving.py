"""Engine benchmarks: two starts, loads, sleep and wake, tokens/s, and recovery from a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from benchmarks.real_engines import Engines, engines
from forge_rl.services.generator import Generator
from forge_rl.types import Sampling, Turn

_REQUESTS = 256
_TOKENS = 256
_PROMPT = tuple(range(1000, 1040))


def engine() -> dict[str, float]:
    """Measure an engine with the bundled model, started twice: the second start reuses compiled code."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    config = Generator.Config(max_num_seqs=_REQUESTS, max_model_len=1024, max_tokens=_TOKENS)
    figures: dict[str, float] = {}
    greedy: list[tuple[int, ...]] = []
    for name in ("first", "second"):
        began = time.perf_counter()
        async with engines(config, "smollm2-135m") as served:
            figures[f"{name}_start_and_load_s"] = time.perf_counter() - began
            greedy.append(tuple((await _decode(served, 1, 0.0))[0].token_ids.tolist()))
            if name == "second":
                figures |= await _while_it_runs(served)
    return figures | {"greedy_equal": float(greedy[0] == greedy[1])}


async def _while_it_runs(served: Engines) -> dict[str, float]:
    generator, figures = served.generator, {}

    async def timed(name: str, work: object) -> None:
        began = time.perf_counter()
        await work  # type: ignore[misc]
        figures[f"{name}_s"] = time.perf_counter() - began

    await _decode(served, _REQUESTS, 1.0)  # warm-up
    began = time.perf_counter()
    turns = await _decode(served, _REQUESTS, 1.0)
    figures["tokens_per_s"] = sum(len(turn.token_ids) for turn in turns) / (time.perf_counter() - began)
    await timed("publish_and_load", served.advance())
    await timed("publish_and_load_again", served.advance())
    (load,) = generator.last_load
    figures |= {f"load_{name}_s": seconds for name, seconds in load.seconds.items()}
    figures["attested_in_place"] = load.in_place / len(load.fingerprints)
    figures["loaded_bytes"] = sum(load.bytes_read)
    before = (await _decode(served, 1, 0.0))[0].token_ids.tolist()
    await timed("sleep", generator.sleep())
    await timed("wake_with_its_own_load", generator.wake())
    await generator.sleep()
    await timed("load_asleep", served.advance())
    await timed("wake_after_a_load", generator.wake())
    figures["greedy_equal_after_sleep"] = float((await _decode(served, 1, 0.0))[0].token_ids.tolist() == before)
    (pid,) = generator._service.replicas[0].tree.roots
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await _decode(served, 1, 0.0)  # waits for the new engine
    figures["killed_to_next_answer_s"] = time.perf_counter() - began
    return figures


async def _decode(served: Engines, requests: int, temperature: float) -> list[Turn]:
    """Decode concurrent completions."""
    sampling = Sampling(max_tokens=_TOKENS, temperature=temperature)
    return await asyncio.gather(*[served.generator.generate(_PROMPT, sampling) for _ in range(requests)])
