"""Tool calls a second with results that are kept, at many concurrent episodes, for shares of repeated calls.

python -m benchmarks.tools --json out.json

All episodes begin at once, each in an environment with a pure tool that runs Python in a fresh sandbox session; then
each in a durable session, whose cells keep state. Of 100 calls at 90% repeated, 10 differ, in random order over all
episodes; of 100 durable sessions, 10 have different cells. The peer is the same without a cache. Each measurement
begins with an empty cache. Latency is from the call until its result, under all the load.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.envs.pure import tool
from forge_rl.envs.tools import ToolEnv
from forge_rl.errors import check_flags
from forge_rl.sandbox import DurableSessions, run_code, shared_pool
from forge_rl.system.result_cache import ResultCache
from forge_rl.types import Task, ToolCall

_OPEN_FILES = 8192
_TASK = Task(id="1", source="tools", messages=({"role": "user", "content": "Compute."},))


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure tool calls a second with and without repeated calls."""

    episodes: int = 1000
    """Concurrent episodes."""
    turns: int = 4
    """Tool calls of an episode."""
    work: int = 20_000
    """Numbers that each call adds up: about 1 ms."""
    repeats: int = LEAST_REPEATS
    """Measurements of each result."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"episodes": 1, "turns": 1, "work": 0})
        check_repeats(self.repeats)


async def python_without_cache(code: str) -> str:
    """Run Python code and return its value."""
    result = await run_code(code)
    if result.value is None:
        raise BenchmarkError(f"a cell failed: {result.error}")
    return result.value


@tool(pure=True)
async def python(code: str) -> str:
    """Run Python code and return its value."""
    return await python_without_cache(code)


def measure(config: Config, report: Report) -> None:
    """Measure pure tools, then durable sessions."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _OPEN_FILES), hard))
    asyncio.run(_measure(config, report))


async def _measure(config: Config, report: Report) -> None:
    for kind, play in (("", _tool_episodes), ("cells_", _cell_episodes)):
        rates: dict[str, float] = {}
        for name, share, cached in (
            ("0", 0.0, True),
            ("50", 0.5, True),
            ("90", 0.9, True),
            ("90_no_cache", 0.9, False),
        ):
            call_rates, latencies = [], list[float]()
            for repeat in range(config.repeats):
                rng = random.Random(repeat)
                began = time.perf_counter()
                with tempfile.TemporaryDirectory() as folder:
                    seconds = await play(config, share, folder if cached else None, rng)
                elapsed = time.perf_counter() - began
                call_rates.append(len(seconds) / elapsed)
                latencies += seconds
                row = {"kind": kind or "tool", "repeated": share, "cached": cached, "calls_per_s": call_rates[-1]}
                report.rows.append(row)
            rates[name] = report.measure(f"{kind}calls_per_s_{name}", call_rates)
            latencies.sort()
            report.results[f"{kind}p50_ms_{name}"] = 1000 * latencies[len(latencies) // 2]
            report.results[f"{kind}p99_ms_{name}"] = 1000 * latencies[len(latencies) * 99 // 100]
        report.results[f"{kind}speedup_at_50"] = rates["50"] / rates["0"]
        report.results[f"{kind}speedup_at_90"] = rates["90"] / rates["0"]
        report.results[f"{kind}speedup_at_90_over_no_cache"] = rates["90"] / rates["90_no_cache"]


async def _tool_episodes(config: Config, share: float, folder: str | None, rng: random.Random) -> list[float]:
    """Play episodes with a pure tool; return the seconds of each call."""
    work, numbers = config.work, _repeated(config.episodes * config.turns, share, rng)
    tool = python if folder is not None else python_without_cache
    world = ToolEnv([tool], cache=folder or "", max_turns=config.turns + 1, timeout_s=600)

    async def episode(episode_numbers: Sequence[int]) -> list[float]:
        env, seconds = world(_TASK), []
        await env.reset()
        for number in episode_numbers:
            code = f"sum(range({number}, {number + work}))"
            call = ToolCall(id="1", name=tool.__name__, arguments=json.dumps({"code": code}))
            began = time.perf_counter()
            step = await env.step("", truncated=False, calls=(call,))
            seconds.append(time.perf_counter() - began)
            _check(work * number + _sum(work), str(step.messages[0]["content"]))
        await env.close()
        return seconds

    episode_seconds = await asyncio.gather(
        *(episode(numbers[index :: config.episodes]) for index in range(config.episodes))
    )
    return [seconds for call_seconds in episode_seconds for seconds in call_seconds]


async def _cell_episodes(config: Config, share: float, folder: str | None, rng: random.Random) -> list[float]:
    """Play episodes of durable sessions; return the seconds of each cell."""
    cache = ResultCache(Path(folder)) if folder is not None else None
    sessions = DurableSessions(await shared_pool(), cache=cache, parked=0)

    async def episode(first: int) -> list[float]:
        seconds = []
        async with sessions.open() as session:
            for turn in range(config.turns):
                code = f"x = {first}; x" if turn == 0 else f"x += sum(range({config.work})); x"
                began = time.perf_counter()
                result = await session.run(code)
                seconds.append(time.perf_counter() - began)
                _check(first + turn * _sum(config.work), result.value)
        return seconds

    episode_seconds = await asyncio.gather(*map(episode, _repeated(config.episodes, share, rng)))
    await sessions.close()
    if cache is not None:
        cache.close()
    return [seconds for call_seconds in episode_seconds for seconds in call_seconds]


def _repeated(count: int, share: float, rng: random.Random) -> list[int]:
    """Return numbers, of which a share repeats others, in random order."""
    distinct = range(max(1, round(count * (1 - share))))
    numbers = [*distinct, *rng.choices(distinct, k=count - len(distinct))]
    rng.shuffle(numbers)
    return numbers


def _sum(numbers: int) -> int:
    return numbers * (numbers - 1) // 2


def _check(expected: int, value: str | None) -> None:
    if value != str(expected):
        raise BenchmarkError(f"a call gave {value}, not {expected}")


if __name__ == "__main__":
    run_benchmark("tools", Config, measure)
