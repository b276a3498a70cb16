"""Speculation: how much sooner a batch of episodes is complete with drafts from siblings and earlier epochs.

python -m benchmarks.speculation --json out.json

The policy is the bundled model after supervised fine-tuning, as RL starts from one: `recipes.sft` first teaches it to
add numbers step by step. Two generators serve it, one of which drafts, and take turns on the same batches, which a
run's rollouts execute: episodes with a run's seeds, engines of the schedule, a score. An epoch is a batch of all tasks,
and the first, which has only siblings to draft from, is not counted. Answers are sampled at the recipe's temperature,
1; their lengths follow how many numbers there are to add, which are quantiles of a heavy tail, so that one task is far
longer than the others.

`step_speedup` is the ratio of the seconds of whole batches, `tail_speedup` of those in which 4 or fewer episodes ran.
`equal_episodes` is the share of episodes of which both generators wrote the same tokens, which all should be: only
rounding, by which tokens of nearly the same score change places, may differ. `entropy` is the policy's, in nats per
token: the mean negative logprob of the tokens it sampled.
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
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from operator import eq
from pathlib import Path

from benchmarks.peer_environments import ROOT
from benchmarks.real_engines import serving
from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.engines.speculation import resolve_draft_model
from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import check_flags
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.rollout.dispatcher import Dispatcher, PolicyClient
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.services.generator import Generator
from forge_rl.types import Episode, Task

_TAIL = 4
"""Maximum running episodes in the tail."""
_MOST_NUMBERS = 40


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
    """Number of episodes of a task."""
    most_tokens: int = 480
    """Maximum tokens of an answer."""
    epochs: int = LEAST_REPEATS
    """Number of measured epochs."""
    seed: int = 0
    """Seed of the episodes' random numbers, as a run's --seed."""
    smoke: bool = False
    """Only try everything once, on few short answers; measures nothing."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"taught_steps": 1, "tasks": 1, "group_size": 2, "most_tokens": 1, "epochs": 1})


def _sum(count: int, drawn: random.Random) -> dict[str, str]:
    """Return a question for the sum of some numbers, and its answer step by step: 12 tokens a number."""
    numbers = [drawn.randrange(10, 99) for _ in range(count)]
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    return {"question": f"Add {', '.join(map(str, numbers))}.", "answer": "\n".join(steps)}


def _heavy_tailed(max_tokens: int, level: float) -> int:
    """Return a quantile of the Pareto distribution of shape 1 from 3 on: half of it is below 6."""
    return min(max_tokens, int(3 / (1 - level)))


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


class _Sums:
    """Source that repeats some sums, epoch after epoch."""

    name = "sums"

    def __init__(self, tasks: int) -> None:
        drawn, self._drawn = random.Random(0), 0
        rows = [_sum(_heavy_tailed(_MOST_NUMBERS, (place + 0.5) / tasks), drawn) for place in range(tasks)]
        self._tasks = [
            Task(
                id=str(place),
                source=self.name,
                messages=({"role": "user", "content": row["question"]},),
                truth={"answer": row["answer"]},
            )
            for place, row in enumerate(rows)
        ]

    def draw(self) -> Task:
        self._drawn += 1
        return self._tasks[(self._drawn - 1) % len(self._tasks)]

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        return ()

    def state(self) -> dict[str, object]:
        return {"drawn": self._drawn}

    def restore(self, state: Mapping[str, object]) -> None:
        self._drawn = int(str(state["drawn"]))


class _Answer:
    """Session of an episode of one turn, scored by whether the answer is right."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def step(self, answer: str, *, truncated: bool = False, parsed: object = None) -> Step:
        return Step(done=True, reward=float(answer.strip() == self._task.truth["answer"]))

    async def close(self) -> None:
        """Nothing to close."""

    def abandon(self) -> None:
        """Nothing to close."""


class _Sessions:
    """Opens the episodes' sessions."""

    thoughts = False
    """They are not shown to the sessions."""

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Episodes wait for nothing that could be fetched."""

    async def open(self, task: Task) -> tuple[_Answer, Observation]:
        return _Answer(task), Observation(messages=task.messages)


class _Rollouts:
    """A run's rollouts on one generator, with the times at which their episodes ended."""

    def __init__(self, generator: Generator, config: Config, tasks: int) -> None:
        self.generator = generator
        self._run_episode = EpisodeRunner(generator.tokenizer, _Sessions(), None)  # type: ignore[arg-type]  # scores itself
        self._ended: list[float] = []
        scheduler = Scheduler(
            ScheduleConfig(kind="synchronous"),
            groups=tasks,
            episodes=config.group_size,
            tasks=ResumableTaskStream(Mixture({"sums": _Sums(tasks)})),
        )
        self.executor = RolloutExecutor(
            Dispatcher(scheduler, generator, generator.tokenizer),
            self._timed,
            devices=DeviceHandover(generator),
            version=lambda: 0,
            seed=config.seed,
        )

    async def batch(self) -> tuple[list[Episode], float, float]:
        """Complete a batch; returns its episodes, its seconds, and the seconds of its tail."""
        self._ended.clear()
        began = time.monotonic()
        batch = await self.executor.next_batch()
        seconds = time.monotonic() - began
        # The tail begins when all but _TAIL episodes have ended.
        tail_began = self._ended[-_TAIL - 1] if len(self._ended) > _TAIL else began
        return list(batch.episodes), seconds, self._ended[-1] - tail_began

    async def _timed(self, task: Task, client: PolicyClient) -> Episode:
        episode = await self._run_episode(task, client)
        self._ended.append(time.monotonic())
        return episode


async def _measure(config: Config, report: Report) -> None:
    tasks, epochs = (2, 1) if config.smoke else (config.tasks, config.epochs)
    seconds: dict[str, dict[str, list[float]]] = {"plain": {}, "drafted": {}}
    episodes = equal = 0
    async with _generators(config) as generators, contextlib.AsyncExitStack() as closing:
        rollouts = {name: _Rollouts(generator, config, tasks) for name, generator in generators.items()}
        for rollout in rollouts.values():
            closing.push_async_callback(rollout.executor.close)
        for epoch in range(1 + epochs):
            answers: dict[str, list[list[int]]] = {}
            # The order alternates, so that a machine that slows down favours neither.
            for name in sorted(rollouts, reverse=epoch % 2 == 1):
                batch, step_s, tail_s = await rollouts[name].batch()
                turns = [turn for episode in batch for turn in episode.turns]
                answers[name] = [turn.token_ids.tolist() for turn in turns]
                drafts = generators[name].drain_drafts()
                row = {
                    "tokens": sum(map(len, answers[name])),
                    "seconds": step_s,
                    "tail_seconds": tail_s,
                    "nats": -sum(float(turn.logprobs.sum()) for turn in turns),
                    "reward": sum(episode.reward for episode in batch) / len(batch),
                    "drafted": drafts.drafted,
                    "accepted": drafts.accepted,
                    "drafting": drafts.share_of_steps,
                }
                print(f"epoch {epoch}, {name}: {step_s:.1f} s, {tail_s:.1f} s of them in the tail", flush=True)
                report.rows.append({"epoch": epoch, "engine": name, "warm_up": epoch == 0} | row)
                if epoch:
                    for kind, value in (("step", step_s), ("tail", tail_s)):
                        seconds[name].setdefault(kind, []).append(value)
            episodes += len(answers["plain"])
            equal += sum(starmap(eq, zip(answers["plain"], answers["drafted"], strict=True)))
        for kind in ("tail", "step"):
            pairs = zip(seconds["plain"][kind], seconds["drafted"][kind], strict=True)
            report.measure(f"{kind}_speedup", [plain / drafted for plain, drafted in pairs])
        measured_rows = [row for row in report.rows if not row["warm_up"]]
        report.results["equal_episodes"] = equal / episodes
        report.results["entropy"] = _sum_of(measured_rows, "nats") / _sum_of(measured_rows, "tokens")
        if drafted := _sum_of(measured_rows, "drafted"):
            report.results["accepted_share"] = _sum_of(measured_rows, "accepted") / drafted


def _sum_of(rows: Sequence[Mapping[str, object]], name: str) -> float:
    return sum(float(str(row[name])) for row in rows)


def measure(config: Config, report: Report) -> None:
    """Measure into the report."""
    if config.smoke:
        config = replace(config, most_tokens=48, group_size=2)  # an untaught model's answers do not end
        report.benchmark += " (smoke: no measurement)"
    asyncio.run(_measure(config, report))


if __name__ == "__main__":
    run_benchmark("speculation", Config, measure)
