"""Token benchmarks of `overhead`: a generator with engines that answer at once, and a batch of millions of tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
from monarch.actor import concurrent_endpoint

from forge_rl.metrics import batch_metrics
from forge_rl.metrics.sinks import EpisodeSink
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import ServiceActor
from forge_rl.token_arrays import Chunk, TokenIds
from forge_rl.types import Batch, Episode, Group, Sampling, Score, Task, Turn

ANSWER_TOKENS = 256
_GROUP_SIZE = 8
_PROMPT_TOKENS = 512
_EPISODE_TOKENS = 8192
_BEAT_S = 0.002


class PromptEngine(ServiceActor):
    """An engine in its own process that answers each request at once."""

    def __init__(self, model: Path, settings: object, seed: int, name: str) -> None:
        self._numbers = itertools.count(seed)
        self._ids = np.arange(1000, 1000 + ANSWER_TOKENS, dtype=np.int32)
        self._logprobs = np.full(ANSWER_TOKENS, -1.0, np.float32)

    @concurrent_endpoint
    async def setup(self) -> None:
        """Nothing to start."""

    @concurrent_endpoint
    async def serve_model(self) -> None:
        """Nothing to load: tokens have version 0."""

    @concurrent_endpoint
    async def hold(self, paused: bool, asleep: bool) -> None:
        """Nothing to pause."""

    @concurrent_endpoint
    async def close(self) -> None:
        """Nothing to close."""

    async def stream(self, prompt_ids: TokenIds, sampling: Sampling, gather_s: float) -> AsyncGenerator[Chunk, None]:
        yield Chunk(
            token_ids=self._ids,
            logprobs=self._logprobs,
            versions=np.zeros(ANSWER_TOKENS, np.int32),
            text=str(next(self._numbers)),
            finish="stop",
        )

    async def count_rows(self) -> int:
        """Return the number of rows received."""
        return len(self.take_parcel())


def large_batch(tokens: int) -> Batch:
    """Make a batch with this many tokens, in groups that share their prompts."""
    drawn = np.random.default_rng(0)
    task = Task(id="1", source="tasks", messages=({"role": "user", "content": "go"},))
    answer = _EPISODE_TOKENS - _PROMPT_TOKENS
    groups = []
    for _ in range(max(1, tokens // (_EPISODE_TOKENS * _GROUP_SIZE))):
        prompt = drawn.integers(0, 150_000, _PROMPT_TOKENS, np.int32)
        turns = (
            Turn(
                prompt_ids=prompt,
                token_ids=drawn.integers(0, 150_000, answer, np.int32),
                logprobs=-drawn.random(answer, np.float32),
                versions=np.repeat(np.array([3, 4], np.int32), answer // 2),
                text="word " * answer,
            )
            for _ in range(_GROUP_SIZE)
        )
        episodes = tuple(
            Episode(task=task, turns=(turn,), score=Score(total=float(index))) for index, turn in enumerate(turns)
        )
        groups.append(Group(task=task, episodes=episodes))
    return Batch(groups=tuple(groups), version=4)


async def measure_large_batch(tokens: int, ranks: list[Replica], folder: Path) -> dict[str, float]:
    """Count, log, pack and send a batch; return the longest block of the event loop in milliseconds.

    Also returns the same for an idle loop over the same time, which measures the machine's other load, and the memory
    per token including its text.
    """
    before = psutil.Process().memory_info().rss
    batch = await asyncio.to_thread(large_batch, tokens)
    num_tokens = await asyncio.to_thread(_count_tokens, batch)
    batch_bytes = psutil.Process().memory_info().rss - before
    sink = EpisodeSink(folder / "episodes.jsonl")
    sink.rollback(0)
    advantages = torch.randn(len(batch.groups), _GROUP_SIZE)
    heart = asyncio.create_task(longest_pause())
    await asyncio.sleep(2 * _BEAT_S)  # it beats before there is anything to block it
    began = time.perf_counter()
    values = batch_metrics(batch)
    sink.log(1, values, batch)
    packed = await asyncio.to_thread(pack, batch, advantages, Layout(shares=len(ranks), seq_len=4 * _EPISODE_TOKENS))
    async with asyncio.TaskGroup() as group:
        for rank, replica in enumerate(ranks):
            group.create_task(replica.send(packed.rows[rank :: len(ranks)], for_call="step", deadline_s=300.0))
    seconds = time.perf_counter() - began
    blocked = await ended(heart)
    rows = [await replica.ask("count_rows", deadline_s=300.0) for replica in ranks]
    assert sum(rows) == len(packed.rows), f"{rows} rows arrived, of {len(packed.rows)}"
    heart = asyncio.create_task(longest_pause())
    await asyncio.sleep(seconds)
    return {
        "loop_blocked_ms": blocked * 1e3,
        "loop_blocked_ms_idle": await ended(heart) * 1e3,
        "batch_tokens": float(num_tokens),
        "batch_bytes_per_token": batch_bytes / num_tokens,
        "batch_seconds": seconds,
    }


def _count_tokens(batch: Batch) -> int:
    return sum(len(segment.token_ids) for episode in batch.episodes for segment in episode.segments)


async def longest_pause() -> float:
    """Return, once cancelled, the maximum delay of a short sleep."""
    longest = 0.0
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            await asyncio.sleep(_BEAT_S)
        except asyncio.CancelledError:
            return longest
        # A short sleep that takes longer than it should was held up by something on the event loop.
        longest = max(longest, loop.time() - began - _BEAT_S)


async def ended(heart: asyncio.Task[float]) -> float:
    await asyncio.sleep(2 * _BEAT_S)  # count the last block too
    heart.cancel()
    return await heart
