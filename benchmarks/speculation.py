"""Speculation: tokens per second of a rollout with and without drafts from siblings and earlier epochs.

python -m benchmarks.speculation --json out.json

Two engines with the bundled model, one of which drafts, take turns on the same tasks: sums that a small policy answers
in steps, as its demonstrations in the prompt do. Answers are sampled at the recipe's temperature, 1, to lengths from
a heavy tail, which are the same for both engines; the texts are not, so speeds are tokens per second. The first epoch
has only siblings to draft from and is not counted.

`tail_speedup` is of the time with 4 or fewer running requests, `step_speedup` of whole epochs. `distribution_p` is the
smallest p-value of three chi-square tests that the first tokens of answers to one prompt are distributed alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, Report, run_benchmark
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.services.generator import Generator
from forge_rl.token_arrays import Chunk
from forge_rl.types import Sampling

_DEADLINE_S = 900.0
_TAIL = 4
"""Maximum running requests in the tail."""
_BINS = 10


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure speculation on real engines."""

    model: str = "smollm2-135m"
    """Bundled model name, folder, or hub id."""
    speculation: str = "suffix"
    """Settings of the engine that drafts, as for --generator.speculation."""
    tasks: int = 6
    """Number of tasks of an epoch."""
    group_size: int = 4
    """Number of answers to a task."""
    most_tokens: int = 400
    """Maximum tokens of an answer."""
    epochs: int = LEAST_REPEATS
    """Number of measured epochs."""
    samples: int = 400
    """Number of answers of each engine in each test of the distribution."""
    smoke: bool = False
    """Only try everything once, on few short answers; measures nothing."""


@dataclass
class _Speed:
    """Tokens and seconds of an epoch, and of its tail."""

    tokens: int = 0
    seconds: float = 0.0
    tail_tokens: int = 0
    tail_seconds: float = 0.0


@contextlib.asynccontextmanager
async def _generators(config: Config) -> AsyncIterator[dict[str, Generator]]:
    """Start a generator without speculation, "plain", and one with, "drafted"; both serve the model's own weights."""
    folder = resolve_model(config.model, default_cache())
    with tempfile.TemporaryDirectory(prefix="speculation-") as logs:
        cluster, faults = Cluster(Path(logs)), Faults()
        faults.install()
        made: dict[str, Generator] = {}
        try:
            for name, speculation in (("plain", "off"), ("drafted", config.speculation)):
                settings = Generator.Config(
                    max_model_len=1024, max_tokens=config.most_tokens, kv_cache_gib=0.5, speculation=speculation
                )
                made[name] = await Generator.start(
                    settings, cluster, faults, model=folder, seed=0, deadline_s=_DEADLINE_S, name=name
                )
                await made[name].serve_model()
            yield made
        finally:
            faults.closing = True
            for generator in made.values():
                await generator.stop()
            await cluster.close()


def _prompts(generator: Generator, count: int, drawn: random.Random) -> list[list[int]]:
    """Return prompts that ask for a sum after two that are worked out."""

    def worked(numbers: Sequence[int]) -> str:
        steps, total = [], numbers[0]
        for number in numbers[1:]:
            steps.append(f"{total} + {number} = {total + number}.")
            total += number
        return f"Question: {' + '.join(map(str, numbers))}\nAnswer: {' '.join(steps)} The sum is {total}.\n\n"

    def numbers() -> list[int]:
        return [drawn.randrange(10, 99) for _ in range(5)]

    asked = [
        f"{worked(numbers())}{worked(numbers())}Question: {' + '.join(map(str, numbers()))}\nAnswer:"
        for _ in range(count)
    ]
    return [list(generator.tokenizer.encode(text)) for text in asked]


async def _epoch(generator: Generator, requests: Sequence[tuple[list[int], int]]) -> _Speed:
    """Complete all requests at once, each to its length, and measure."""
    speed, running = _Speed(), len(requests)
    began = last = time.monotonic()

    def observe(chunk: Chunk) -> None:
        nonlocal last
        now = time.monotonic()
        speed.tokens += len(chunk.token_ids)
        if running <= _TAIL:
            speed.tail_tokens += len(chunk.token_ids)
            speed.tail_seconds += now - last
        last = now

    async def complete(prompt: list[int], tokens: int) -> None:
        nonlocal running
        await generator.generate(prompt, Sampling(max_tokens=tokens), observe=observe, gather_s=0)
        running -= 1

    await asyncio.gather(*(complete(prompt, tokens) for prompt, tokens in requests))
    speed.seconds = time.monotonic() - began
    return speed


async def _first_tokens(generator: Generator, prompt: list[int], count: int) -> Counter[tuple[int, ...]]:
    """Count the second and third tokens of answers to a prompt, which are drafted once some are known."""
    found: Counter[tuple[int, ...]] = Counter()
    for _ in range(0, count, _TAIL):
        turns = await asyncio.gather(*(generator.generate(prompt, Sampling(max_tokens=4)) for _ in range(_TAIL)))
        found.update(tuple(turn.token_ids[1:3].tolist()) for turn in turns)
    return found


def p_value(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """Test by chi-square that two samples have one distribution; returns the p-value.

    The most frequent outcomes of both have a bin each, and all others one.
    """
    common = [outcome for outcome, _ in (one + other).most_common(_BINS - 1)]
    table = torch.tensor([[sample[key] for key in common] for sample in (one, other)]).double()
    rest = torch.tensor([[one.total()], [other.total()]]) - table.sum(1, keepdim=True)
    table = torch.cat([table, rest], 1) if rest.any() else table
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((table.shape[1] - 1) / 2).double(), statistic / 2))


async def _measure(config: Config, report: Report) -> None:
    drawn = random.Random(0)
    tasks, epochs, samples = (2, 1, 8) if config.smoke else (config.tasks, config.epochs, config.samples)
    most = 24 if config.smoke else config.most_tokens
    speedups: dict[str, list[float]] = {"tail_speedup": [], "step_speedup": []}
    async with _generators(config) as generators:
        prompts = _prompts(generators["plain"], tasks, drawn)
        for epoch in range(1 + epochs):
            # Pareto lengths of shape 1: half of the answers are below twice the shortest.
            lengths = [min(most, int(most / 12 / (1 - drawn.random()))) for _ in range(tasks * config.group_size)]
            requests = [(prompts[at % tasks], max(4, length)) for at, length in enumerate(lengths)]
            found: dict[str, _Speed] = {}
            for name in sorted(generators, reverse=epoch % 2 == 1):
                speed = found[name] = await _epoch(generators[name], requests)
                drafts = generators[name].drain_drafts()
                report.rows.append(
                    {"epoch": epoch, "engine": name, "warm_up": epoch == 0}
                    | vars(speed)
                    | {"drafted": drafts.drafted, "accepted": drafts.accepted, "drafting": drafts.share_of_steps}
                )
            plain, with_drafts = found["plain"], found["drafted"]
            if epoch:
                speedups["step_speedup"].append(
                    _ratio(with_drafts.tokens, with_drafts.seconds, plain.tokens, plain.seconds)
                )
                tails = (with_drafts.tail_tokens, with_drafts.tail_seconds, plain.tail_tokens, plain.tail_seconds)
                if all(tails):
                    speedups["tail_speedup"].append(_ratio(*tails))
        for name, values in speedups.items():
            report.measure(name, values)
        share = [row for row in report.rows if row["engine"] == "drafted" and not row["warm_up"]]
        drafted_tokens = sum(int(str(row["drafted"])) for row in share)
        if drafted_tokens:
            report.results["accepted_share"] = sum(int(str(row["accepted"])) for row in share) / drafted_tokens
        p_values = []
        for _ in range(3):
            (prompt,) = _prompts(generators["plain"], 1, drawn)
            counts = [await _first_tokens(generator, prompt, samples) for generator in generators.values()]
            p_values.append(p_value(*counts))
        report.results["distribution_p"] = min(p_values)


def _ratio(tokens: int, seconds: float, plain_tokens: int, plain_seconds: float) -> float:
    return (tokens / seconds) / (plain_tokens / plain_seconds)


def measure(config: Config, report: Report) -> None:
    """Measure into the report."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    asyncio.run(_measure(config, report))


if __name__ == "__main__":
    run_benchmark("speculation", Config, measure)
