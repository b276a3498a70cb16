"""Speculation: tokens per second of a rollout with and without drafts from siblings and earlier epochs.

python -m benchmarks.speculation --json out.json

The policy is the bundled model after supervised fine-tuning, as RL starts from one: `recipes.sft` first teaches it to
add numbers step by step. Two engines serve it, one of which drafts, and take turns on the same tasks. Answers are
sampled at the recipe's temperature, 1; their lengths follow how many numbers there are to add, which are quantiles of
a heavy tail, so that one task is far longer than the others. Texts of both engines differ, so speeds are tokens per
second. The first epoch has only siblings to draft from and is not counted.

`tail_speedup` is of the time with 4 or fewer running requests, `step_speedup` of whole epochs. `distribution_p` is the
smallest p-value of three chi-square tests that the first tokens of answers to one prompt are distributed alike, at a
temperature where they differ.
`entropy` is the policy's, in nats per token: the mean negative logprob of the tokens it sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.peer_environments import ROOT
from benchmarks.real_engines import serving
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.engines.speculation import resolve_draft_model
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.services.generator import Generator
from forge_rl.token_arrays import Chunk
from forge_rl.types import Sampling

_TAIL = 4
"""Maximum running requests in the tail."""
_BINS = 10
_MOST_NUMBERS = 40
_SPREAD = Sampling(max_tokens=4, temperature=2.0, extra={"top_k": 4})
"""Settings of the answers whose distribution is compared: a taught model's own hardly differ."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure speculation on real engines."""

    model: str = "smollm2-135m"
    """Bundled model name, folder, or hub id; this model is fine-tuned first."""
    taught_steps: int = 64
    """Number of steps of the fine-tuning, of 32 answers each."""
    taught: Path | None = None
    """Folder for the fine-tuned model, in which a finished one is used again; by default a temporary one."""
    speculation: str = "suffix"
    """Settings of the engine that drafts, as for --generator.speculation."""
    tasks: int = 8
    """Number of tasks of an epoch."""
    group_size: int = 4
    """Number of answers to a task."""
    most_tokens: int = 480
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
    nats: float = 0.0
    """Sum of the sampled tokens' negative logprobs."""

    def __str__(self) -> str:
        tail = f", {self.tail_tokens / self.tail_seconds:.0f} in the tail" if self.tail_tokens else ""
        return f"{self.tokens / self.seconds:.0f} tokens/s{tail}"


def _sum(count: int, drawn: random.Random) -> dict[str, str]:
    """Return a question for the sum of some numbers, and its answer step by step: 12 tokens a number."""
    numbers = [drawn.randrange(10, 99) for _ in range(count)]
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    return {"question": f"Add {', '.join(map(str, numbers))}.", "answer": "\n".join(steps)}


def _heavy_tailed(most: int, level: float) -> int:
    """Return a quantile of the Pareto distribution of shape 1 from 3 on: half of it is below 6."""
    return min(most, int(3 / (1 - level)))


def _teach(config: Config, folder: Path) -> Path:
    """Fine-tune the model on sums, and return the new folder; one that was finished before is returned at once."""
    taught = folder / "taught" / "checkpoints" / f"step-{config.taught_steps:06d}" / "model"
    if taught.is_dir():
        return taught
    folder.mkdir(parents=True, exist_ok=True)
    drawn, tasks = random.Random(1), folder / "sums.jsonl"
    rows = [_sum(_heavy_tailed(_MOST_NUMBERS, drawn.random()), drawn) for _ in range(32 * config.taught_steps)]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "--model": config.model,
        "--tasks": tasks,
        "--steps": config.taught_steps,
        "--groups-per-batch": 32,
        "--trainer.optimizer.lr": 2e-4,
        "--trainer.optimizer.decay": "linear",
        "--evaluation.every": 0,
        "--out": folder / "taught",
        "--display": "plain",
    }
    command = [sys.executable, "-m", "recipes.sft", *(str(part) for flag in flags.items() for part in flag)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BenchmarkError(f"the fine-tuning failed: {done.stdout[-2000:]}")
    return taught


@contextlib.asynccontextmanager
async def _generators(config: Config) -> AsyncIterator[dict[str, Generator]]:
    """Start a generator without speculation, "plain", and one with, "drafted"; both serve the taught model."""
    folder = resolve_model(config.model, default_cache())
    drafts = resolve_draft_model(config.speculation, folder, default_cache())
    with tempfile.TemporaryDirectory(prefix="speculation-") as scratch:
        if not config.smoke:
            folder = _teach(config, config.taught or Path(scratch))
        settings = Generator.Config(
            max_model_len=1024, max_tokens=config.most_tokens, kv_cache_gib=0.5, gpu_memory_utilization=0.3
        )
        async with (
            serving(settings, folder) as plain,
            serving(replace(settings, speculation=drafts), folder) as drafted,
        ):
            yield {"plain": plain, "drafted": drafted}


def _prompt(generator: Generator, numbers: int, drawn: random.Random) -> list[int]:
    """Return the tokens of a question as the fine-tuning has shown it."""
    messages = [{"role": "user", "content": _sum(numbers, drawn)["question"]}]
    return list(generator.tokenizer.render(messages))


async def _epoch(generator: Generator, requests: Sequence[tuple[list[int], int]]) -> _Speed:
    """Complete all requests at once, each to its most tokens, and measure."""
    speed, running = _Speed(), len(requests)
    began = last = time.monotonic()

    def observe(chunk: Chunk) -> None:
        nonlocal last
        now = time.monotonic()
        speed.tokens += len(chunk.token_ids)
        speed.nats -= float(chunk.logprobs.sum())
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
        turns = await asyncio.gather(*(generator.generate(prompt, _SPREAD) for _ in range(_TAIL)))
        found.update(tuple(turn.token_ids[1:3].tolist()) for turn in turns)
    return found


def p_value(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """Test by chi-square that two samples have one distribution; returns the p-value.

    The most frequent outcomes of both have a bin each, and all others one; a single bin gives 1.
    """
    common = [outcome for outcome, _ in (one + other).most_common(_BINS - 1)]
    table = torch.tensor([[sample[key] for key in common] for sample in (one, other)]).double()
    rest = torch.tensor([[one.total()], [other.total()]]) - table.sum(1, keepdim=True)
    table = torch.cat([table, rest], 1) if rest.any() else table
    if table.shape[1] == 1:
        return 1.0
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((table.shape[1] - 1) / 2).double(), statistic / 2))


async def _measure(config: Config, report: Report) -> None:
    drawn = random.Random(0)
    tasks, epochs, samples = (2, 1, 8) if config.smoke else (config.tasks, config.epochs, config.samples)
    lengths = (24, 48) if config.smoke else (config.most_tokens,)  # an untaught model's answers do not end
    speedups: dict[str, list[float]] = {"tail_speedup": [], "step_speedup": []}
    async with _generators(config) as generators:
        lengths_of_tasks = [_heavy_tailed(_MOST_NUMBERS, (at + 0.5) / tasks) for at in range(tasks)]
        prompts = [_prompt(generators["plain"], numbers, drawn) for numbers in lengths_of_tasks]
        requests = [(prompt, lengths[at % len(lengths)]) for prompt in prompts for at in range(config.group_size)]
        for epoch in range(1 + epochs):
            found: dict[str, _Speed] = {}
            for name in sorted(generators, reverse=epoch % 2 == 1):
                speed = found[name] = await _epoch(generators[name], requests)
                drafts = generators[name].drain_drafts()
                print(f"epoch {epoch}, {name}: {speed}", flush=True)
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
            if values:  # answers that all end at once have no tail
                report.measure(name, values)
        counted = [row for row in report.rows if not row["warm_up"]]
        report.results["entropy"] = _sum_of(counted, "nats") / _sum_of(counted, "tokens")
        if drafted := _sum_of(counted, "drafted"):
            report.results["accepted_share"] = _sum_of(counted, "accepted") / drafted
        p_values = []
        for _ in range(3):
            prompt = _prompt(generators["plain"], 5, drawn)
            counts = [await _first_tokens(generator, prompt, samples) for generator in generators.values()]
            p_values.append(p_value(*counts))
        report.results["distribution_p"] = min(p_values)


def _sum_of(rows: Sequence[Mapping[str, object]], name: str) -> float:
    return sum(float(str(row[name])) for row in rows)


def _ratio(tokens: int, seconds: float, plain_tokens: int, plain_seconds: float) -> float:
    return (tokens / seconds) / (plain_tokens / plain_seconds)


def measure(config: Config, report: Report) -> None:
    """Measure into the report."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    asyncio.run(_measure(config, report))


if __name__ == "__main__":
    run_benchmark("speculation", Config, measure)
