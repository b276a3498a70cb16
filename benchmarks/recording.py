"""A step with and without whole episodes kept: how much longer it takes, and the bytes on disk of a token; and how long
the page of a run of 100,000 episodes takes to open in headless Chromium.

Packing, sending to a rank, its answer with logprobs, log and files are the run's own. The rank only waits for as long
as the flags say, and no engine decodes meanwhile: both leave the cores of the controller to the recorder, as GPUs do.

python -m benchmarks.recording --json out.json
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from monarch.actor import concurrent_endpoint

from benchmarks.large_batches import ended, longest_pause
from benchmarks.page_run import PAGE_EPISODES, measure_page
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.errors import check_flags
from forge_rl.metrics import EpisodeSink, RunInfo, Sink, batch_metrics
from forge_rl.metrics.episode_files import RecordedEpisode
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.metrics.recorder import EpisodeRecorder, Recording, recorded_files
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.packing.unpacking import rounded_scores
from forge_rl.run.records.recording import trained_episodes
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.processes import responsive_loop
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service, ServiceActor
from forge_rl.types import Batch, Episode, Group, Score, Task, Turn

_DEADLINE_S = 300.0
_GROUP_SIZE = 8
_PROMPT_TOKENS = 200
_VOCABULARY = 49_152
_WORDS = 30_000


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare steps with and without recording."""

    episodes: int = 1024
    """Number of episodes of a step."""
    tokens: int = 4000
    """Number of tokens of an episode, most of them generated."""
    train_s: float = 20.0
    """Seconds for which the rank waits instead of training."""
    repeats: int = LEAST_REPEATS
    """Number of steps of each kind."""
    page_episodes: int = 100_000
    """Number of episodes of the run whose page is opened; 0 leaves that out."""

    def __post_init__(self) -> None:
        minimum = {"episodes": _GROUP_SIZE, "tokens": _PROMPT_TOKENS + 2, "train_s": 0, "page_episodes": 0}
        check_flags(self, "--", minimum=minimum)
        check_repeats(self.repeats)
        for name, step in (("episodes", _GROUP_SIZE), ("tokens", 2), ("page_episodes", PAGE_EPISODES)):
            if (value := getattr(self, name)) % step:
                raise BenchmarkError(
                    f"--{name.replace('_', '-')} is {value}",
                    hint=f"set it to a multiple of {step}, such as {max(step, value // step * step)}",
                )


class WaitingRank(ServiceActor):
    """A trainer's rank that waits, and then answers with logprobs near the engine's and with entropies, if asked."""

    @concurrent_endpoint
    async def step(self, seconds: float, scored: bool) -> list[npt.NDArray[np.uint16]]:
        until, drawn = time.monotonic() + seconds, np.random.default_rng(0)
        scores = []
        for row in self.take_parcel():
            if scored:
                logprobs = row.behaviour.numpy() + drawn.normal(0, 1e-2, len(row)).astype(np.float32)
                entropies = drawn.exponential(0.6, len(row)).astype(np.float32)
                scores.append(rounded_scores(row, torch.from_numpy(np.stack([logprobs, entropies], axis=1))))
        await asyncio.sleep(until - time.monotonic())
        return scores


def batch_of(config: Config, seed: int) -> Batch:
    """Make a batch of episodes with one turn, whose tokens and words are as frequent as in text (Zipf's law)."""
    drawn = np.random.default_rng(seed)
    words = np.array(["".join(map(chr, drawn.integers(97, 123, 1 + place % 9))) for place in range(_WORDS)])
    answer = config.tokens - _PROMPT_TOKENS

    def zipf(count: int, upper: int) -> npt.NDArray[np.int32]:
        # The exponential of a uniform number has a density proportional to 1 / rank: Zipf's law.
        return np.asarray(np.exp(drawn.random(count) * np.log(upper)) - 1, np.int32)

    groups = []
    for number in range(config.episodes // _GROUP_SIZE):
        question = " ".join(words[zipf(_PROMPT_TOKENS * 3 // 4, _WORDS)])
        task = Task(
            id=str(number), source="tasks", messages=({"role": "user", "content": question},), truth={"answer": "1"}
        )
        prompt = zipf(_PROMPT_TOKENS, _VOCABULARY)
        episodes = []
        for index in range(_GROUP_SIZE):
            turn = Turn(
                prompt_ids=prompt,
                token_ids=zipf(answer, _VOCABULARY),
                logprobs=-drawn.exponential(0.6, answer).astype(np.float32),
                versions=np.repeat(np.array([seed, seed + 1], np.int32), answer // 2),
                text=" ".join(words[zipf(answer * 3 // 4, _WORDS)]),
                messages=task.messages,
            )
            score = Score(total=float(drawn.random()), parts={"right": float(index % 2)})
            episodes.append(Episode(task=task, turns=(turn,), score=score))
        groups.append(Group(task=task, episodes=tuple(episodes)))
    return Batch(groups=tuple(groups), version=seed + 1)


async def _step(
    number: int, batch: Batch, rank: Replica, sinks: list[Sink], config: Config, *, keeps: bool
) -> tuple[float, Callable[[], Iterator[RecordedEpisode]]]:
    """Take a step; return its seconds, and what makes its records."""
    began = time.perf_counter()
    advantages = batch.rewards - batch.rewards.mean(dim=1, keepdim=True)
    packed = await asyncio.to_thread(pack, batch, advantages, Layout(seq_len=4 * config.tokens))
    await rank.send(packed.rows, for_call="step", deadline_s=_DEADLINE_S)
    scored = await rank.call("step", config.train_s, keeps, deadline_s=_DEADLINE_S, rank=0)
    values = batch_metrics(batch)
    records = partial(trained_episodes, number, batch, packed, scored)
    for sink in sinks:
        sink.log(number, values, batch)
        if keeps:
            sink.record(number, "trained", records)
    return time.perf_counter() - began, records


async def _measure(config: Config, report: Report, folder: Path) -> None:
    with responsive_loop():
        cluster = Cluster(folder)
        service = Service("trainer", cluster, Faults())
        try:
            rank = service.spawn(WaitingRank)
            await service.watch(rank, deadline_s=_DEADLINE_S)
            recorder = EpisodeRecorder(folder, Recording(gib=1000.0))
            sinks: list[Sink] = [EpisodeSink(folder / "episodes.jsonl"), recorder]
            for sink in sinks:
                sink.start(RunInfo(recipe="", model="", folder=folder, steps=1))
            batches = [await asyncio.to_thread(batch_of, config, seed) for seed in range(2)]
            times: dict[bool, list[float]] = {False: [], True: []}
            blocked: dict[bool, list[float]] = {False: [], True: []}
            number = 0
            # In turn, so that other load falls on both kinds.
            for keeps in (False, True, False, True):
                for repeat in range(1 + -(-config.repeats // 2)):  # the first one of a kind has no files to write yet
                    number += 1
                    heart = asyncio.create_task(longest_pause())
                    seconds, records = await _step(number, batches[number % 2], rank, sinks, config, keeps=keeps)
                    pause = await ended(heart) * 1e3
                    report.rows.append(
                        {"keeps": keeps, "seconds": seconds, "blocked_ms": pause, "warm_up": repeat == 0}
                    )
                    if repeat:
                        times[keeps].append(seconds)
                        blocked[keeps].append(pause)
                await asyncio.to_thread(recorder.flush)
            began, used = time.perf_counter(), time.process_time()
            recorder.record(number, "evaluated", records)
            await asyncio.to_thread(recorder.flush)
            report.results["recorder_s"] = time.perf_counter() - began
            report.results["recorder_cpu_s"] = time.process_time() - used
            recorder.close()
        finally:
            await service.stop()
            await cluster.close()
    files = [path for _, kind, path in recorded_files(folder) if kind == "trained"]
    sizes = [path.stat().st_size / (config.episodes * config.tokens) for path in files]
    with_, without = report.measure("step_s", times[True]), report.measure("step_s_without", times[False])
    report.results["slowdown"] = with_ / without
    report.measure("bytes_a_token", sizes)
    report.measure("blocked_ms", blocked[True])
    report.measure("blocked_ms_without", blocked[False])
    listing = []
    for path in files:
        began = time.perf_counter()
        assert len(EpisodeFile(path).listing()) == config.episodes
        listing.append(time.perf_counter() - began)
    report.measure("list_s", listing)


def measure(config: Config, report: Report) -> None:
    """Fill the report."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_measure(config, report, Path(folder)))
    if config.page_episodes:
        with tempfile.TemporaryDirectory() as folder:
            measure_page(report, Path(folder), config.page_episodes)


if __name__ == "__main__":
    run_benchmark("recording", Config, measure)
