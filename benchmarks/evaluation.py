"""Time of a run with an evaluation every two steps: riding along with training episodes versus stopping everything.

python -m benchmarks.evaluation --json out.json

Rollouts, scheduler and evaluations are real, on real vLLM engines, and each version is really published and loaded; a
training step is a pause that makes up a fifth of the cluster's work. Episodes, including evaluation episodes, are
heavy-tailed as in schedules.py: 40% have less than a sixtieth of the longest one's tokens, 10% more than a third. Runs
of both kinds alternate on the same engines. As in a recipe's run, the evaluation before the first step ends before the
weights change, and the run waits for the one after the last step, in both kinds.

Results named real_ are from these runs; on two compute-bound cores, idle slots make the others faster, and so cost less
than on a GPU. The other results are from the same code on a virtual clock, with more engines and with tools between
turns, where a request decodes at the same speed alone or with others.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.real_engines import Engines, Stories, engines
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from benchmarks.schedules_real import Real, draw_tokens, full_rate, kind_at
from benchmarks.staged_services import (
    HEAVY_TAILED,
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
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import EVALUATION, InflightEpisode, ScheduleConfig
from forge_rl.services.generator import Generator
from forge_rl.types import Sampling, Task

_GROUP_SIZE = 4
_TRAIN_SHARE = 0.2
"""Training's share of the work when engines are always busy."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Compare overlapped evaluations with blocking ones."""

    repeats: int = 5
    """Measured pairs of runs."""
    steps: int = 6
    """Steps per run."""
    every: int = 2
    """Steps between evaluations."""
    tasks_per_slot: float = 2.0
    """Evaluation tasks per concurrent request of the engines; a batch has four episodes per request."""
    seed: int = 0
    """Seed of the episodes' lengths."""
    on: Real = field(default_factory=lambda: Real(engines=1, budget=8, most_tokens=120))
    """Settings of the real engines."""
    virtual_engines: int = 8
    """Number of engines on the virtual clock."""
    smoke: bool = False
    """One short pair: shows that everything runs, and measures nothing."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"virtual_engines": 1})
        check_repeats(self.repeats)
        if self.steps < 2 * self.every or self.every < 1 or self.tasks_per_slot <= 0:
            raise BenchmarkError(
                f"{self.steps} steps with an evaluation every {self.every}",
                hint="set --steps to twice --every or more, and --tasks-per-slot above 0",
            )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Duration of a run, and the weights used by its evaluations."""

    seconds: float
    other_versions: float
    """Mean share of evaluation tokens from other weights than the evaluated ones."""


async def whole_run(
    rollouts: RolloutExecutor,
    tasks: Sequence[Task],
    *,
    config: Config,
    steps: int,
    blocking: bool,
    version: Callable[[], int],
    train: Callable[[], Awaitable[None]],
    clock: Callable[[], float],
) -> Outcome:
    """Run a recipe's loop: roll out, train and publish, with periodic evaluations.

    Args:
        version: returns the served version.
        train: stands in for a training step and its publish.
    """
    shares: list[float] = []
    began = clock()

    async def evaluate(step: int) -> None:
        await rollouts.finish_evaluation()
        if rollouts.evaluation is not None:
            shares.append(rollouts.evaluation.other_versions("held_out"))
        evaluation = Evaluation(
            {"held_out": tasks},
            episodes=1,
            sampling=Sampling(max_tokens=1 << 20, temperature=0.0),
            version=version(),
            one_version=step == 0,
        )
        rollouts.start_evaluation(evaluation)
        if blocking or step == steps:
            await rollouts.finish_evaluation()

    await evaluate(0)
    for step in range(1, steps + 1):
        await rollouts.next_batch()
        await train()
        if step % config.every == 0 or step == steps:
            await evaluate(step)
    assert rollouts.evaluation is not None, "there is one after the last step"
    shares.append(rollouts.evaluation.other_versions("held_out"))
    return Outcome(seconds=clock() - began, other_versions=statistics.fmean(shares))


def measure(config: Config, report: Report) -> None:
    """Run both kinds on a virtual clock, then alternately on real engines."""
    steps = 2 * config.every if config.smoke else 8 * config.every
    outcomes = {blocking: run(_virtual(config, steps, blocking)) for blocking in (True, False)}
    report.results["overlapped_over_blocking"] = outcomes[False].seconds / outcomes[True].seconds
    report.results["other_versions"] = outcomes[False].other_versions
    print(f"virtual clock: {report.results['overlapped_over_blocking']:.3f}", flush=True)
    asyncio.run(_real(config, report))


async def _real(config: Config, report: Report) -> None:
    on, slots = config.on, config.on.engines * config.on.budget
    generator = Generator.Config(
        replicas=on.engines,
        dtype="bfloat16",
        max_model_len=4 * on.most_tokens + 128,  # room for turns that stop early
        max_num_seqs=on.budget,
        kv_cache_gib=0.5,
    )
    steps = 2 * config.every if config.smoke else config.steps
    async with engines(generator, on.model) as served:
        rate = await full_rate(served, on)
        mean = statistics.fmean(draw_tokens(random.Random(i), kind_at(i / 1000), on) for i in range(1000))
        # t / (t + r) is _TRAIN_SHARE, where r is the time of a batch of 4 episodes a slot at the engines' full rate.
        train_s = _TRAIN_SHARE / (1 - _TRAIN_SHARE) * 4 * slots * mean / rate
        report.results |= {"real_full_tokens_per_s": rate, "real_train_s": train_s}
        print(f"full engines: {rate:.0f} tokens/s; a training step: {train_s:.2f} s", flush=True)
        pairs = 1 if config.smoke else 1 + config.repeats
        outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
        for pair in range(pairs):
            # The order alternates from pair to pair, so that a machine that slows down favours neither.
            for blocking in (True, False) if pair % 2 == 0 else (False, True):
                outcome = await _real_run(config, served, steps=steps, train_s=train_s, blocking=blocking)
                warm_up = pair == 0 and not config.smoke
                kind = "blocking" if blocking else "overlapped"
                report.rows.append({"kind": kind, "pair": pair, "warm_up": warm_up, **vars(outcome)})
                print(f"{kind}: {outcome.seconds:.1f} s, other versions {outcome.other_versions:.1%}", flush=True)
                if not warm_up:
                    outcomes[blocking].append(outcome)
    ratios = [ours.seconds / theirs.seconds for ours, theirs in zip(outcomes[False], outcomes[True], strict=True)]
    report.measure("real_overlapped_over_blocking", ratios)
    report.measure("real_overlapped_s", [outcome.seconds for outcome in outcomes[False]])
    report.measure("real_blocking_s", [outcome.seconds for outcome in outcomes[True]])
    report.measure("real_other_versions", [outcome.other_versions for outcome in outcomes[False]])


async def _real_run(config: Config, served: Engines, *, steps: int, train_s: float, blocking: bool) -> Outcome:
    # Engines serve several runs one after another, so versions of this run start where the last one ended.
    first, slots = served.version, config.on.engines * config.on.budget

    def tokens(episode: InflightEpisode) -> int:
        batch, *rest = episode.place
        number = batch if episode.group.batch == EVALUATION else batch - first
        # Lengths depend on an episode's place in the run alone: both kinds of runs draw the same ones.
        place = "/".join(map(str, (config.seed, number, *rest)))
        return draw_tokens(random.Random(place), episode.group.task.source, config.on)

    async def train() -> None:
        await asyncio.sleep(train_s)
        await served.advance()

    devices = DeviceHandover(served.generator)
    scheduler = Scheduler(
        ScheduleConfig(),
        groups=4 * slots // _GROUP_SIZE,
        episodes=_GROUP_SIZE,
        tasks=ResumableTaskStream(_mixture()),
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, served.generator, served.tokenizer),
        Stories(served.tokenizer, tokens),
        devices=devices,
        version=lambda: served.version,
        seed=config.seed,
    )
    await rollouts.restore(rollouts.state() | {"batches": first})  # number batches like versions
    try:
        return await whole_run(
            rollouts,
            _tasks(round(config.tasks_per_slot * slots)),
            config=config,
            steps=steps,
            blocking=blocking,
            version=lambda: served.version,
            train=train,
            clock=time.monotonic,
        )
    finally:
        await rollouts.close()
        await devices.hand_to_engines()  # so that the next run starts like the first


async def _virtual(config: Config, steps: int, blocking: bool) -> Outcome:
    loop = asyncio.get_running_loop()
    budget = config.on.budget
    slots = config.virtual_engines * budget
    generator = StagedGenerator(engines=config.virtual_engines, budget=budget)
    tokenizer: Any = StagedTokenizer()
    environment = StagedEnvironment(kinds=HEAVY_TAILED, turn_s=60.0, tool_s=5.0, seed=config.seed)
    mean_s = sum(kind.share * kind.mean_s for kind in HEAVY_TAILED)
    trained = 0

    async def train() -> None:
        nonlocal trained
        await asyncio.sleep(_TRAIN_SHARE / (1 - _TRAIN_SHARE) * 4 * mean_s)
        trained += 1
        generator.load(trained)

    scheduler = Scheduler(
        ScheduleConfig(max_episodes=1 << 30),
        groups=4 * slots // _GROUP_SIZE,
        episodes=_GROUP_SIZE,
        tasks=ResumableTaskStream(_mixture()),
        clock=loop.time,
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, generator, tokenizer),
        EpisodeRunner(tokenizer, environment, None, clock=loop.time),  # type: ignore[arg-type]  # the environments score
        devices=DeviceHandover(generator, clock=loop.time),
        version=lambda: trained,
        seed=config.seed,
    )
    try:
        return await whole_run(
            rollouts,
            _tasks(round(config.tasks_per_slot * slots)),
            config=config,
            steps=steps,
            blocking=blocking,
            version=lambda: trained,
            train=train,
            clock=loop.time,
        )
    finally:
        await rollouts.close()


def _mixture() -> Mixture:
    kinds = {kind.name: kind for kind in HEAVY_TAILED}
    return Mixture(
        {name: StagedSource(kind) for name, kind in kinds.items()}, {name: kind.share for name, kind in kinds.items()}
    )


def _tasks(count: int) -> list[Task]:
    """Make the evaluation tasks, of all kinds in proportion to their shares."""
    kinds = [kind_at((index + 0.5) / count) for index in range(count)]
    random.Random(0).shuffle(kinds)
    return [
        Task(id=f"{index}", source=kind, messages=({"role": "user", "content": kind},))
        for index, kind in enumerate(kinds)
    ]


if __name__ == "__main__":
    run_benchmark("evaluation", Config, measure)
