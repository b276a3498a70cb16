"""Schedules on heavy-tailed episodes: engine utilisation, tokens per hour, lag, and mixture.

python -m benchmarks.schedules --json out.json
python -m benchmarks.schedules --real --json out.json

Scheduler and rollouts are real; engines, environments and trainer are staged, in virtual time. 40% of the episodes
decode for less than 30 s, 10% for 10 to 30 minutes, with tools between turns; a batch has four episodes per concurrent
request of the engines. Schedules that decode while training split the cluster between the two so that neither waits for
the other on average; the others use all of it for both, one after the other. The second command runs real engines on
this machine instead: see schedules_real.py.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from benchmarks.schedules_real import Real, measure_real
from benchmarks.staged_services import (
    HEAVY_TAILED,
    STEP_S,
    Printed,
    StagedEnvironment,
    StagedGenerator,
    StagedSource,
    StagedTokenizer,
)
from benchmarks.virtual_time import run
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import check_flags
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.types import Batch

_SCHEDULES = ("synchronous", "one_step", "asynchronous", "pipelined")
_TOKENS_S = 50.0
"""Tokens per second of one request."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare the schedules on a virtual clock."""

    engines: tuple[int, ...] = (1024, 64)
    """Cluster sizes, in engines; results of the first have no suffix."""
    budget: int = 4
    """Maximum concurrent requests per engine."""
    group_size: int = 8
    """G."""
    batches: int = 8
    """Number of measured batches."""
    warm_up: int = 3
    """Number of warm-up batches, not counted."""
    max_lag: int = 2
    """Lag bound of the pipelined schedule."""
    asynchronous_lag: int = 8
    """Lag bound of the asynchronous schedule: high enough that its engines never wait."""
    train_share: float = 0.2
    """Training's share of the cluster's work."""
    turn_s: float = 60.0
    """Maximum seconds of decoding between two tool calls."""
    tool_s: float = 5.0
    """Mean seconds of a tool call."""
    seed: int = 0
    """Seed of the episodes."""
    real: bool = False
    """Run ten batches with each schedule on real engines, without a virtual clock."""
    on: Real = field(default_factory=Real)
    """Settings of --real."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"budget": 1, "group_size": 1, "max_lag": 0, "asynchronous_lag": 0})
        if not 0 < self.train_share < 1:
            raise BenchmarkError(f"--train-share is {self.train_share}", hint="set it between 0 and 1")
        if self.batches < 2 or self.warm_up < 1 or not self.engines:
            raise BenchmarkError(
                "too few batches or engines", hint="set --batches to 2 or more, --warm-up to 1 or more"
            )


Name = Literal["synchronous", "one_step", "asynchronous", "pipelined"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one schedule, over the measured batches."""

    busy_share: float
    """Decoding requests divided by the engines' budgets, in the rollout phases."""
    busy_share_run: float
    """Same, over the whole run and the whole cluster."""
    mixture_deviation: float
    """Maximum difference of a source's share of a batch from its quota, which carries rounding over to the next."""
    tokens_per_hour: float
    lag_mean: float
    lag_max: float
    length_deviation: float
    """Standard deviation of the batches' mean episode length, divided by the mean."""


async def simulate(config: Config, name: Name, engines: int) -> Outcome:
    """Run one schedule."""
    policy = _policy(config, name)
    split = policy.decodes_while_training
    decoding = round(engines * (1 - config.train_share)) if split else engines
    groups = 4 * engines * config.budget // config.group_size
    mean_s = math.fsum(kind.share * kind.mean_s for kind in HEAVY_TAILED)
    rollout_s = groups * config.group_size * mean_s / (engines * config.budget)
    train_s = rollout_s * config.train_share / (1 - config.train_share)
    if split:
        # The same work takes longer on the part of the cluster that trains.
        train_s *= engines / (engines - decoding)
    loop = asyncio.get_running_loop()
    generator = StagedGenerator(engines=decoding, budget=config.budget)
    # A second mixture of the same shares gives the quotas that batches should have.
    mixture, twin = (
        Mixture({k.name: StagedSource(k) for k in HEAVY_TAILED}, {k.name: k.share for k in HEAVY_TAILED})
        for _ in range(2)
    )
    quotas = [Counter(twin.source_order(groups)) for _ in range(config.warm_up + config.batches)][config.warm_up :]
    tokenizer: Any = StagedTokenizer()
    environment = StagedEnvironment(kinds=HEAVY_TAILED, turn_s=config.turn_s, tool_s=config.tool_s, seed=config.seed)
    trained = 0
    scheduler = Scheduler(
        policy,
        groups=groups,
        episodes=config.group_size,
        tasks=ResumableTaskStream(mixture),
        clock=loop.time,
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, generator, tokenizer),
        EpisodeRunner(tokenizer, environment, None, clock=loop.time),  # type: ignore[arg-type]  # the environments score
        devices=DeviceHandover(generator, clock=loop.time),
        version=lambda: trained,
        seed=config.seed,
        listener=Printed(),
    )
    batches: list[Batch] = []
    began = decoded = 0.0
    for number in range(config.warm_up + config.batches):
        if number == config.warm_up:
            began, decoded = loop.time(), generator.decoded_s
            rollouts.metrics()
        batch = await rollouts.next_batch()
        await asyncio.sleep(train_s)
        trained += 1
        generator.load(trained)
        if number >= config.warm_up:
            batches.append(batch)
    busy_share = rollouts.metrics()["rollouts/slots_busy"]
    wall, decoded = loop.time() - began, generator.decoded_s - decoded
    await rollouts.close()
    lags = Counter(
        batch.version - version
        for batch in batches
        for e in batch.episodes
        for turn in e.turns
        for version in turn.versions.tolist()
    )
    tokens = lags.total()
    lengths = [statistics.fmean(e.response_tokens for e in batch.episodes) for batch in batches]
    return Outcome(
        busy_share=busy_share,
        busy_share_run=decoded / (wall * engines * config.budget),
        mixture_deviation=max(_deviation(batch, quota) for batch, quota in zip(batches, quotas, strict=True)),
        tokens_per_hour=tokens * STEP_S * _TOKENS_S / wall * 3600,
        lag_mean=sum(lag * count for lag, count in lags.items()) / tokens,
        lag_max=float(max(lags)),
        length_deviation=statistics.stdev(lengths) / statistics.fmean(lengths),
    )


def measure(config: Config, report: Report) -> None:
    """Run all schedules, at all sizes or on real engines."""
    if config.real:
        policies = {name: _policy(config, name) for name in get_args(Name)}
        measure_real(config.on, policies, report, seed=config.seed)
        return
    for engines in config.engines:
        suffix = "" if engines == config.engines[0] else f"_{engines}"
        for name in get_args(Name):
            outcome = run(simulate(config, name, engines))
            values_text = "  ".join(f"{key} {value:.4g}" for key, value in vars(outcome).items())
            print(f"{engines} engines, {name}: {values_text}", flush=True)
            report.results |= {f"{key}_{name}{suffix}": value for key, value in vars(outcome).items()}
        report.results[f"pipelined_over_asynchronous{suffix}"] = (
            report.results[f"tokens_per_hour_pipelined{suffix}"]
            / report.results[f"tokens_per_hour_asynchronous{suffix}"]
        )


def _policy(config: Config, name: Name) -> ScheduleConfig:
    lag = config.asynchronous_lag if name == "asynchronous" else config.max_lag
    return ScheduleConfig(kind=name, max_lag=lag, max_episodes=1 << 30)


def _deviation(batch: Batch, quota: Counter[str]) -> float:
    counts = Counter(group.task.source for group in batch.groups)
    return max(abs(counts[name] - quota[name]) for name in counts | quota) / len(batch.groups)


if __name__ == "__main__":
    run_benchmark("schedules", Config, measure)
