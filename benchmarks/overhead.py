"""Overhead of turns and tokens without decoding: scheduler, router, environment, reward; engines answer at once.

python -m benchmarks.overhead --json out.json

Rollouts, Environment and Reward are real, with a process each; engines, tokenizer and trainer are staged in the
controller. An episode is a few turns in its environment, then a score. Runs with few and with many episodes in flight
alternate, along with the lower bound: bare Monarch calls to the same process, one per turn. Then engines in their own
processes answer with 256 tokens at once, through the real Generator; and a large batch is counted, logged, packed and
sent, while the longest block of the controller's event loop is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from benchmarks.large_batches import ANSWER_TOKENS, PromptEngine, measure_large_batch
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, median, run_benchmark
from benchmarks.staged_services import Kind, NoThoughts, Printed, StagedGenerator, StagedSource
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import check_flags
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.processes import responsive_loop
from forge_rl.services.completion import ResumableCompletion
from forge_rl.services.environment import Environment
from forge_rl.services.generator import Generator
from forge_rl.services.reward import RewardService
from forge_rl.services.service_start import ServiceStart
from forge_rl.token_arrays import Chunk, TokenIds
from forge_rl.types import Message, Task

_DEADLINE_S = 300.0
_WARM_UP_BATCHES = 20
"""Most batches in which the episodes in flight may become as many as there should be."""
_GROUP_SIZE = 4
_ENGINES = 8
_REPLY = np.array([1, 2, 3], np.int32)
_ANSWER = np.array([1, 2, 3, 4], np.int32)
_LOGPROBS = np.full(4, -1.0, np.float32)
for _array in (_ANSWER, _LOGPROBS):
    _array.setflags(write=False)  # as those from an engine's process


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure turns per second, and the cost of a turn with few and with many episodes in flight."""

    many: int = 10_000
    """Many concurrent episodes."""
    few: int = 100
    """Few concurrent episodes, for comparison."""
    turns: int = 4
    """Mean turns per episode; a score follows the last."""
    least_turns: int = 10_000
    """Minimum turns per round; at least the number of episodes in flight."""
    repeats: int = 5
    """Rounds of each."""
    warm_up: int = 1
    """Warm-up rounds, not counted."""
    answers: int = 4_000
    """Answers of 256 tokens per round."""
    batch_tokens: int = 16_000_000
    """Tokens of the large batch."""
    smoke: bool = False
    """One short round: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        counts = ("turns", "least_turns", "warm_up", "answers", "batch_tokens")
        check_flags(self, "--", minimum=dict.fromkeys(counts, 1) | dict.fromkeys(("many", "few"), 2 * _GROUP_SIZE))
        if not self.smoke:
            check_repeats(self.repeats)


class ManyTurns:
    """An environment that responds to each turn except the last."""

    def __init__(self, turns: int) -> None:
        self._left = turns

    async def reset(self) -> Observation:
        return Observation(messages=({"role": "user", "content": "go"},))

    async def step(self, answer: str, *, truncated: bool = False) -> Step:
        self._left -= 1
        if self._left:
            return Step(messages=({"role": "tool", "content": "go on"},), done=False)
        return Step(done=True)


class ManyTurnsFactory:
    """Makes environments of different lengths, so that episodes do not run in lockstep.

    Args:
        turns: mean number of turns per episode.
    """

    def __init__(self, turns: int) -> None:
        self._longest = 2 * turns - 1
        self._opened = 0

    def __call__(self, task: Task) -> ManyTurns:
        self._opened += 1
        return ManyTurns(1 + self._opened % self._longest)


def half_are_right(task: Task, text: str) -> float:
    """A plain reward function, like most."""
    return float(int(text) % 2)


class PromptEngines(StagedGenerator):
    """Engines that answer each request at once, in one chunk."""

    def __init__(self, *, engines: int, budget: int) -> None:
        super().__init__(engines=engines, budget=budget)
        self.answered = 0

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None:
        self.answered += 1
        completion.add(
            Chunk.unchecked(
                token_ids=_ANSWER,
                logprobs=_LOGPROBS,
                versions=_versions(self.version),
                text=str(self.answered),
                finish="stop",
            )
        )


@functools.cache
def _versions(version: int) -> npt.NDArray[np.int32]:
    versions = np.full(len(_ANSWER), version, np.int32)
    versions.setflags(write=False)
    return versions


class PromptTokenizer:
    """Tokenizer that renders any messages as a few tokens."""

    thoughts = NoThoughts()

    def render(self, messages: Sequence[Message], **_: object) -> tuple[int, ...]:
        return (1, 2, 3)

    def extend(self, ids: TokenIds, messages: Sequence[Message], **_: object) -> TokenIds:
        return np.concatenate([ids, _REPLY])

    def tagged_text(self, ids: TokenIds, text: str) -> str:
        return text


@dataclass(frozen=True)
class Services:
    """The services with processes."""

    environment: Environment
    single_turn: Environment
    """Environment without a process that only shows its tasks."""
    reward: RewardService
    generator: Generator


def measure(config: Config, report: Report) -> None:
    """Run all rounds."""
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    asyncio.run(_measure(config, report))


async def _measure(config: Config, report: Report) -> None:
    rounds = [True] if config.smoke else [False] * config.warm_up + [True] * config.repeats
    rates: dict[str, list[float]] = {"many": [], "few": [], "monarch": [], "tokens": []}
    async with _services(config) as services:
        for number, counts in enumerate(rounds):
            # The order alternates, so that a machine that slows down favours neither.
            sides = ("few", "many", "monarch", "tokens")
            for side in sides if number % 2 else reversed(sides):
                in_flight = {}
                if side == "monarch":
                    rate = await _bare_calls(config, services)
                elif side == "tokens":
                    rate = await _tokens(config, services)
                else:
                    rate, lowest = await _turns(config, services, config.many if side == "many" else config.few)
                    in_flight = {"least_in_flight": lowest}
                report.rows.append({"side": side, "warm_up": not counts, "per_s": rate, **in_flight})
                print(f"{side}: {rate:.0f} a second", flush=True)
                if counts:
                    rates[side].append(rate)
        tokens = config.batch_tokens // (100 if config.smoke else 1)
        with tempfile.TemporaryDirectory() as folder:
            engines = services.generator._service.replicas
            gc.collect()  # what the rounds left is not the batch's
            large = [await measure_large_batch(tokens, engines, Path(folder)) for _ in rates["many"]]
    report.measure("turns_per_s", rates["many"])
    report.measure("turns_per_s_few", rates["few"])
    report.measure("monarch_calls_per_s", rates["monarch"])
    report.measure("tokens_per_s", rates["tokens"])
    report.rows += [dict(row) for row in large]
    report.results["loop_blocked_ms_max"] = max(row["loop_blocked_ms"] for row in large)
    report.results["loop_blocked_ms_idle"] = max(row["loop_blocked_ms_idle"] for row in large)
    report.results["batch_bytes_per_token"] = max(row["batch_bytes_per_token"] for row in large)
    report.results[f"cost_{config.many}_over_{config.few}"] = median(rates["few"]) / median(rates["many"])


async def _turns(config: Config, services: Services, in_flight: int) -> tuple[float, int]:
    """Return turns per second with `in_flight` concurrent episodes, and their least number at the end of a batch."""
    generator = PromptEngines(engines=_ENGINES, budget=in_flight)
    mixture = Mixture({"tasks": StagedSource(Kind(name="tasks", share=1.0, least_s=1.0, most_s=1.0))})
    tokenizer: Any = PromptTokenizer()
    scheduler = Scheduler(
        ScheduleConfig(max_lag=16, max_episodes=in_flight),
        # Half of the episodes in flight, so that with the batches ahead there are always enough to start.
        groups=in_flight // (2 * _GROUP_SIZE),
        episodes=_GROUP_SIZE,
        tasks=ResumableTaskStream(mixture),
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, generator, tokenizer),
        EpisodeRunner(tokenizer, services.environment, services.reward),
        devices=DeviceHandover(generator),
        version=lambda: generator.version,
        seed=0,
        listener=Printed(),
    )

    async def deliver(turns: int) -> int:
        """Deliver batches of so many turns; return the least number of episodes in flight at the end of one."""
        until, lowest = generator.answered + turns, in_flight
        while generator.answered < until:
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    await rollouts.next_batch()
            except TimeoutError as error:
                raise BenchmarkError(f"after {_DEADLINE_S:g} s, {rollouts.waiting_for()}") from error
            generator.load(generator.version + 1)
            metrics = rollouts.metrics()
            lowest = min(lowest, round(metrics["rollouts/in_flight"]))
            outcomes = {name for name, value in metrics.items() if value and name.startswith("outcomes/")}
            # Failed episodes are cheaper, and would pass for speed.
            if outcomes - {"outcomes/completed"}:
                raise BenchmarkError(f"not all episodes completed: {outcomes}")
        return lowest

    try:
        # Until they are no longer all at the same turn, and all have started: they do so in waves while a batch is
        # awaited, which on a busy machine takes longer than the first batch.
        lowest = await deliver(config.turns * in_flight)
        for _ in range(_WARM_UP_BATCHES):
            if lowest == in_flight:
                break
            lowest = await deliver(1)
        began, before = time.perf_counter(), generator.answered
        lowest = await deliver(max(config.turns * in_flight, 0 if config.smoke else config.least_turns))
        return (generator.answered - before) / (time.perf_counter() - began), lowest
    finally:
        await rollouts.close()


async def _tokens(config: Config, services: Services) -> float:
    """Return tokens per second from engines in other processes through generator, dispatcher and reward to batches."""
    generator, tokenizer = services.generator, PromptTokenizer()
    decoder: Any = generator
    groups = config.few if config.smoke else 256
    scheduler = Scheduler(
        ScheduleConfig(max_lag=2),
        groups=groups // _GROUP_SIZE,
        episodes=_GROUP_SIZE,
        tasks=ResumableTaskStream(
            Mixture({"tasks": StagedSource(Kind(name="tasks", share=1.0, least_s=1.0, most_s=1.0))})
        ),
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, decoder, cast(Any, tokenizer)),
        EpisodeRunner(cast(Any, tokenizer), services.single_turn, services.reward),
        devices=DeviceHandover(decoder),
        version=lambda: 0,
        seed=0,
        listener=Printed(),
    )
    try:
        await rollouts.next_batch()
        tokens, began = 0, time.perf_counter()
        while tokens < (groups if config.smoke else config.answers) * ANSWER_TOKENS:
            batch = await rollouts.next_batch()
            tokens += sum(episode.response_tokens for episode in batch.episodes)
        return tokens / (time.perf_counter() - began)
    finally:
        await rollouts.close()


async def _bare_calls(config: Config, services: Services) -> float:
    """Return calls per second of an empty endpoint, with as many concurrent calls as `few` episodes make."""
    assert services.environment._service is not None
    actor = services.environment._service.replicas[0].actor
    calls = config.few if config.smoke else config.least_turns // 2
    # One iterator for all callers: each takes the next call as soon as it is free.
    left = iter(range(calls))

    async def call() -> None:
        for _ in left:
            await actor.process_id.call_one()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(config.few):
            group.create_task(call())
    return calls / (time.perf_counter() - began)


@contextlib.asynccontextmanager
async def _services(config: Config) -> AsyncIterator[Services]:
    with tempfile.TemporaryDirectory() as logs:
        faults = Faults()
        faults.install()
        cluster = Cluster(Path(logs))
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(responsive_loop())  # as in a run
            stack.push_async_callback(cluster.close)
            start = ServiceStart(cluster=cluster, faults=faults, deadline_s=_DEADLINE_S)
            environment = await Environment.start(Environment.Config(), start, factory=ManyTurnsFactory(config.turns))
            stack.push_async_callback(environment.stop)
            reward = await RewardService.start(RewardService.Config(), start, function=half_are_right)
            stack.push_async_callback(reward.stop)
            single_turn = await Environment.start(Environment.Config(), start, factory=SingleTurn)
            generator = await Generator.start(
                Generator.Config(replicas=2, max_tokens=ANSWER_TOKENS, max_num_seqs=512),
                start,
                model=resolve_model("smollm2-135m", default_cache()),
                seed=0,
                actor=PromptEngine,
            )
            stack.push_async_callback(generator.stop)
            await generator.serve_model()
            gc.freeze()  # as in a run, once everything has started
            stack.callback(setattr, faults, "closing", True)
            yield Services(environment, single_turn, reward, generator)


if __name__ == "__main__":
    run_benchmark("overhead", Config, measure)
