"""Schedules on real engines: vLLM on this machine, heavy-tailed answers, weights from a store. See schedules.py.

Episodes have the simulator's lengths, in tokens instead of seconds, and no tools. Training is a pause of equal length
for all schedules, as if on its own device: schedules that decode meanwhile gain that time. Each version is really
published and loaded, even while requests are in flight, whose KV cache is then recomputed.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.real_engines import Engines, Stories, engines
from benchmarks.report import Report
from benchmarks.staged_services import HEAVY_TAILED, Printed, StagedSource
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import InflightEpisode, ScheduleConfig
from forge_rl.services.generator import Generator
from forge_rl.system.tasks import task_group
from forge_rl.types import Batch, Sampling

_WARM_UP = 2
"""Warm-up batches, not counted, as schedules that work ahead start with nothing ahead."""
_BATCHES = 10
_GROUP_SIZE = 4
_KINDS = {kind.name: kind for kind in HEAVY_TAILED}


@dataclass(frozen=True, kw_only=True)
class Real:
    """Settings of runs on real engines."""

    model: str = "smollm2-135m"
    """Bundled model name, folder, or hub id."""
    engines: int = 2
    """Number of vLLM engines; on a CPU they divide its cores."""
    budget: int = 4
    """Maximum concurrent requests per engine."""
    most_tokens: int = 60
    """Tokens of the simulator's longest episode."""


def measure_real(config: Real, policies: Mapping[str, ScheduleConfig], report: Report, *, seed: int) -> None:
    """Run ten batches with each schedule, one schedule after the other on the same engines.

    Args:
        config: settings of the run.
        policies: schedules by name.
        report: receives `real_<result>_<name>`.
        seed: seed of the episodes' lengths.
    """
    asyncio.run(_measure(config, policies, report, seed))


async def _measure(config: Real, policies: Mapping[str, ScheduleConfig], report: Report, seed: int) -> None:
    generator = Generator.Config(
        replicas=config.engines,
        dtype="bfloat16",
        max_model_len=4 * config.most_tokens + 128,  # room for turns that stop early
        max_num_seqs=config.budget,
        kv_cache_gib=0.5,
    )
    async with engines(generator, config.model) as served:
        rate = await full_rate(served, config)
        episodes = 4 * config.engines * config.budget
        mean = statistics.fmean(draw_tokens(random.Random(i), kind_at(i / 1000), config) for i in range(1000))
        train_s = 0.25 * episodes * mean / rate  # a fifth of the total time if engines are always busy
        report.results |= {"real_full_tokens_per_s": rate, "real_train_s": train_s}
        print(f"full engines: {rate:.0f} tokens/s; a training phase: {train_s:.2f} s", flush=True)
        devices = DeviceHandover(served.generator)
        for name, policy in policies.items():
            figures = await _ten_batches(config, policy, served, devices, episodes // _GROUP_SIZE, train_s, seed)
            print(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()), flush=True)
            report.rows.append({"schedule": name, "warm_up": False, **figures})
            report.results |= {f"real_{key}_{name}": value for key, value in figures.items()}


async def _ten_batches(
    config: Real,
    policy: ScheduleConfig,
    served: Engines,
    devices: DeviceHandover,
    groups: int,
    train_s: float,
    seed: int,
) -> dict[str, float]:
    def tokens(episode: InflightEpisode) -> int:
        place = "/".join(map(str, (seed, *episode.place[1:])))
        return draw_tokens(random.Random(f"{episode.place[0] - first}/{place}"), episode.group.task.source, config)

    first = served.version
    scheduler = Scheduler(
        policy,
        groups=groups,
        episodes=_GROUP_SIZE,
        tasks=ResumableTaskStream(
            Mixture(
                {kind.name: StagedSource(kind) for kind in HEAVY_TAILED},
                {kind.name: kind.share for kind in HEAVY_TAILED},
            )
        ),
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, served.generator, served.tokenizer),
        Stories(served.tokenizer, tokens),
        devices=devices,
        version=lambda: served.version,
        seed=seed,
        listener=Printed(),
    )
    await rollouts.restore(rollouts.state() | {"batches": first})  # number batches like versions
    batches: list[Batch] = []
    try:
        began = 0.0
        for number in range(_WARM_UP + _BATCHES):
            if number == _WARM_UP:
                rollouts.metrics()
                began = time.monotonic()
            batch = await rollouts.next_batch()
            await asyncio.sleep(train_s)
            await served.advance()
            if number >= _WARM_UP:
                batches.append(batch)
        seconds = time.monotonic() - began
        busy_share = rollouts.metrics()["rollouts/slots_busy"]
    finally:
        await rollouts.close()
    await devices.hand_to_engines()  # so that the next schedule starts like the first
    lags = [
        batch.version - version
        for batch in batches
        for episode in batch.episodes
        for turn in episode.turns
        for version in turn.versions.tolist()
    ]
    return {
        "busy_share": busy_share,
        "seconds": seconds,
        "tokens_per_s": len(lags) / seconds,
        "lag_mean": statistics.fmean(lags),
        "lag_max": float(max(lags)),
    }


async def full_rate(served: Engines, config: Real) -> float:
    """Measure the tokens per second of full engines, after a warm-up."""
    prompt = served.tokenizer.render([{"role": "user", "content": "Tell me a very long story."}])
    rate = 0.0
    for tokens in (8, 64):
        began = time.monotonic()
        async with task_group() as running:
            answers = [
                running.create_task(
                    served.generator.generate(prompt, Sampling(max_tokens=tokens, seed=seed), engine=engine)
                )
                for engine in range(config.engines)
                for seed in range(config.budget)
            ]
        rate = sum(len(answer.result().token_ids) for answer in answers) / (time.monotonic() - began)
    return rate


def kind_at(share: float) -> str:
    """Return the kind of the episode at this quantile of all episodes."""
    for kind in HEAVY_TAILED:
        share -= kind.share
        if share < 0:
            return kind.name
    return HEAVY_TAILED[-1].name


def draw_tokens(drawn: random.Random, source: str, config: Real) -> int:
    """Draw the length of an episode, in tokens."""
    kind, longest_s = _KINDS[source], max(kind.most_s for kind in HEAVY_TAILED)
    # Log-uniform, as in the simulator, then scaled from seconds to tokens.
    seconds = math.exp(drawn.uniform(math.log(kind.least_s), math.log(kind.most_s)))
    return max(1, round(seconds / longest_s * config.most_tokens))
