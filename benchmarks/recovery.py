"""Time to recover when one of two real engines is killed or stopped in mid-rollout.

python -m benchmarks.recovery --json out.json

A spare engine takes the dead one's place; the same without a spare, `_cold`, follows for comparison. Rollouts,
generator and weight store are real; environments and trainer are staged in the controller, and each batch is followed
by a new version. Seconds count from the signal: until the fault is noticed, until the last of the engine's
requests has a token from the other engine, and until a new engine serves the current version. Each engine has room for
the other's requests: without it, interrupted requests would go first, but wait for a free slot.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from unittest import mock

from benchmarks.real_engines import Engines, Stories, engines
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from benchmarks.staged_services import Kind, Printed, StagedSource
from benchmarks.watched_generator import Request, Watched
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import Fault, check_flags
from forge_rl.rollout.dispatcher import Dispatcher, PolicyClient
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.runtime import supervision
from forge_rl.services.generator import Generator
from forge_rl.system.tasks import task_group
from forge_rl.types import Batch, Episode, Task

_SIGNALS = {"": signal.SIGKILL, "_stopped": signal.SIGSTOP}
"""Signals by result suffix."""
_SPARE_PATIENCE_S = 900.0
"""Timeout of a spare engine's start, which has low priority."""
_IN_THE_MIDDLE = 16
"""Minimum tokens of a request that is worth interrupting."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure recovery from killed and stopped engines."""

    model: str = "smollm2-135m"
    """Bundled model name, folder, or hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "bfloat16"
    """Dtype of the engines' weights."""
    runs: int = 3
    """Number of runs with spares, one after the other. One without follows."""
    spares: int = 1
    """Number of spare engines that stand by before each signal."""
    repeats: int = 2
    """Number of kills, and of stops, in each of these runs."""
    cold_repeats: int = LEAST_REPEATS
    """Number of kills, and of stops, in the run without spares."""
    requests: int = 16
    """Concurrent episodes on both engines together; each engine has room for all of them."""
    interrupted: int = 4
    """Send a signal once this many requests of the engine have 16 tokens."""
    tokens: tuple[int, int] = (64, 192)
    """Minimum and maximum tokens per episode."""
    groups: int = 4
    """P."""
    group_size: int = 4
    """G."""
    smoke: bool = False
    """One kill: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"groups": 1, "group_size": 1})
        if not self.smoke:
            check_repeats(self.runs * self.repeats, "--runs times --repeats")
            check_repeats(self.cold_repeats, "--cold-repeats")
        if self.runs < 1 or self.spares < 1:
            raise BenchmarkError(f"--runs is {self.runs}, --spares is {self.spares}", hint="set both to 1 or more")
        if not 1 <= self.interrupted <= self.requests // 2:
            raise BenchmarkError(f"--interrupted is {self.interrupted}", hint="set it from 1 to half of the --requests")
        if not 1 <= self.tokens[0] <= self.tokens[1]:
            raise BenchmarkError(f"--tokens is {self.tokens}", hint="set it to two counts, the smaller one first")


class _Bench:
    """Continuous rollouts, and the signals that they survive."""

    def __init__(self, config: Config, served: Engines) -> None:
        self.config = config
        self.lost = self.duplicated = 0
        self.last: int | None = None
        """Number of the last batch."""
        self._served = served
        self._number = 0
        self._rolling = False
        self._watched = Watched(served.generator)
        self._made: dict[int, tuple[tuple[str, int], Episode]] = {}
        """Task, place in the group, and the episode (kept so that its id is not reused), by the episode's id."""
        self._delivered: Counter[tuple[str, int]] = Counter()
        low, high = config.tokens
        self._stories = Stories(
            served.tokenizer, lambda episode: low + (37 * episode.group.order + 101 * episode.index) % (high - low + 1)
        )
        scheduler = Scheduler(
            ScheduleConfig(max_episodes=config.requests),
            groups=config.groups,
            episodes=config.group_size,
            tasks=ResumableTaskStream(
                Mixture({"stories": StagedSource(Kind(name="stories", share=1.0, least_s=1.0, most_s=1.0))})
            ),
        )
        self._rollouts = RolloutExecutor(
            Dispatcher(scheduler, self._watched, served.tokenizer),
            self._run_episode,
            devices=DeviceHandover(served.generator),
            version=lambda: served.version,
            seed=0,
            listener=Printed(),
        )
        served.faults.listeners.add(lambda fault: self._watched.tell())

    async def deliver(self) -> None:
        """Deliver batches, each followed by a new version."""
        try:
            while self.last is None or self._number <= self.last:
                self._rolling = True
                batch = await self._rollouts.next_batch()
                self._rolling = False
                self._count(batch)
                self._number += 1
                await self._served.advance()
        finally:
            await self._rollouts.close()

    async def interrupt(self, victim: int, number: signal.Signals) -> dict[str, float]:
        """Send an engine a signal and measure the recovery: seconds and counts."""
        watched, faults = self._watched, self._served.faults
        await watched.until(self._has_spares, "a spare engine that stands by", patience_s=_SPARE_PATIENCE_S)
        await watched.until(lambda: self._in_the_middle(victim), "a rollout that keeps the engine busy")
        (pid,) = self._served.generator._service.replicas[victim].tree.roots
        # Only requests and faults from here on belong to this signal.
        watched.asked, noted = [], len(faults.seen)
        signal_time = time.monotonic()
        os.kill(pid, number)
        interrupted = [request for request in watched.running if request.engine == victim]
        token_times: list[float] = []

        def all_run_again() -> bool:
            nonlocal token_times
            token_times = self._again(interrupted)
            return len(faults.seen) > noted and len(token_times) == sum(not request.ended for request in interrupted)

        await watched.until(all_run_again, "a token for each request of the dead engine")
        boundary = self._number
        fault = self._the_fault(noted, victim)
        await watched.until(lambda: fault.recovered_s is not None, "full strength")
        full_at = time.monotonic()
        watched.asked = []
        await watched.until(
            lambda: any(r.engine == victim and r.token_ids for r in watched.asked), "a token from the new engine"
        )
        self._the_fault(noted, victim)
        return {
            "noticed_s": fault.at_s - signal_time,
            "first_again_s": min(token_times, default=signal_time) - signal_time,
            "running_again_s": max(token_times, default=signal_time) - signal_time,
            "full_strength_s": full_at - signal_time,
            "interrupted": len(interrupted),
            "interrupted_with_tokens": sum(bool(request.token_ids) for request in interrupted),
            "tokens_kept": sum(len(request.token_ids) for request in interrupted),
            "batches_meanwhile": self._number - boundary,
        }

    async def _run_episode(self, task: Task, client: PolicyClient) -> Episode:
        episode = await self._stories(task, client)
        self._made[id(episode)] = ((task.id, client.episode.index), episode)
        return episode

    def _has_spares(self) -> bool:
        generator = self._served.generator
        return generator.spares == generator.config.spares

    def _in_the_middle(self, victim: int) -> bool:
        """Return True if a batch is far from complete and the engine has enough requests worth interrupting."""
        done, groups = self._rollouts.status().groups_done, self.config.groups
        decoded = sum(r.engine == victim and len(r.token_ids) >= _IN_THE_MIDDLE for r in self._watched.running)
        has_all_engines = len(self._watched.engines()) == self._served.generator.config.replicas
        return (
            self._rolling
            and has_all_engines
            and self._has_spares()
            and done <= groups // 2
            and decoded >= self.config.interrupted
        )

    def _again(self, interrupted: Sequence[Request]) -> list[float]:
        """Return the times at which interrupted requests got a token from another engine, unless already finished."""
        times, left = [], [request for request in self._watched.asked if request.first_at is not None]
        for request in interrupted:
            other = next((other for other in left if other.goes_on_for(request)), None)
            if other is not None and not request.ended:
                assert other.first_at is not None
                times.append(other.first_at)
                left.remove(other)
        return times

    def _the_fault(self, noted: int, victim: int) -> Fault:
        """Return the only fault since then, which must be this engine's."""
        faults = self._served.faults.seen[noted:]
        if len(faults) != 1 or faults[0].replica != victim or faults[0].fatal:
            raise BenchmarkError("something else failed: " + "; ".join(f"{f.service} {f.cause}" for f in faults))
        return faults[0]

    def _count(self, batch: Batch) -> None:
        """Check that a batch has each episode of its tasks, which are drawn in order, once, and no other batch has."""
        first = self._number * self.config.groups + 1
        planned = {
            (str(task), index)
            for task in range(first, first + self.config.groups)
            for index in range(self.config.group_size)
        }
        episode_keys = [self._made[id(episode)][0] for episode in batch.episodes]
        self._delivered.update(episode_keys)
        self.lost += len(planned - set(episode_keys))
        self.duplicated = sum(count - 1 for count in self._delivered.values())


def measure(config: Config, report: Report) -> None:
    """Kill and stop engines repeatedly."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    asyncio.run(_measure(config, report))


async def _measure(config: Config, report: Report) -> None:
    seconds: dict[str, list[float]] = {}
    num_lost = num_duplicated = 0
    for run in range(1 if config.smoke else config.runs + 1):
        spares = config.spares if config.smoke or run < config.runs else 0
        bench = await _one_run(config, report, seconds, spares=spares, cold="" if spares else "_cold")
        num_lost, num_duplicated = num_lost + bench.lost, num_duplicated + bench.duplicated
        print(f"run {run}: {bench.lost} episodes lost, {bench.duplicated} duplicated", flush=True)
    for name, values in seconds.items():
        report.measure(name, values)
    report.results |= {"lost_episodes": num_lost, "duplicated_episodes": num_duplicated}


@mock.patch.object(supervision, "HEALTHY_S", 0.0)  # each death counts as the first
async def _one_run(
    config: Config, report: Report, seconds: dict[str, list[float]], *, spares: int, cold: str
) -> _Bench:
    """Send the signals in one run, and add each measurement to `seconds`, by name with the suffix `cold`."""
    generator = Generator.Config(
        replicas=2,
        spares=spares,
        dtype=config.dtype,
        max_model_len=4 * config.tokens[1] + 128,  # room for turns that stop early
        max_num_seqs=config.requests,
        kv_cache_gib=0.75,
    )
    signals = {"": signal.SIGKILL} if config.smoke else _SIGNALS
    async with engines(generator, config.model) as served:
        bench = _Bench(config, served)
        async with task_group() as running:
            running.create_task(bench.deliver())
            repeats = config.repeats if spares else config.cold_repeats
            for repeat in range(1 if config.smoke else repeats):
                for suffix, number in signals.items():
                    row = await bench.interrupt(repeat % 2, number)
                    print(f"{number.name}: " + "  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
                    report.rows.append({"signal": number.name, "spares": spares, "warm_up": False, **row})
                    for name in ("noticed_s", "running_again_s", "full_strength_s"):
                        seconds.setdefault(name + suffix + cold, []).append(row[name])
            bench.last = bench._number + 1  # all interrupted episodes are delivered by then
    return bench


if __name__ == "__main__":
    run_benchmark("recovery", Config, measure)
