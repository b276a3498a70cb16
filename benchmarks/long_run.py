"""A step late in a run against an early one: controller CPU in a run folder of 50,000 steps and in one of 50, and the
controller's memory by step.

Rollouts, evaluations, log, display and all files of a run are real; engines and environments are staged in the
controller, so that nothing else takes its time. Two runs take steps in turns, one of which has the files of many steps
before it. Every few steps there is an evaluation, whose result comes late, and after each turn a rollback.

python -m benchmarks.long_run --json out.json
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.report import BenchmarkConfig, Report, median, run_benchmark
from benchmarks.staged_services import Kind, Printed, StagedEnvironment, StagedGenerator, StagedSource, StagedTokenizer
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import check_flags
from forge_rl.metrics import (
    Display,
    EpisodeSink,
    EventSink,
    JSONLSink,
    PhaseClock,
    RunInfo,
    RunLog,
    TensorBoardSink,
    batch_metrics,
)
from forge_rl.metrics.recorder import EpisodeRecorder, Recording
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.evaluation.evaluator import HELD_OUT, Evaluator, RolloutEvaluations
from forge_rl.run.records.recording import evaluated_episodes, trained_episodes
from forge_rl.runtime.processes import responsive_loop
from forge_rl.types import Task

_METRICS = {f"group_{i // 8}/metric_{i % 8}": 0.123456789 * i for i in range(64)}
"""About as many metrics as services and trainer log in addition to the batch's."""
_EPISODES = 8
"""Sampled episodes of a step in episodes.jsonl."""
_KIND = Kind(name="tasks", share=1.0, least_s=0.001, most_s=0.002)
_STEPS_IN_TURN = 100
_ROLLED_BACK = 2
_EVERY = 5
_SAVED_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure a step late in a run against an early one."""

    steps: int = 5000
    """Steps of each run, in turns of 100, the first of which warms up."""
    past: int = 50_000
    """Earlier steps in the folder of the late run."""
    early: int = 50
    """Earlier steps in the folder of the early run."""
    groups: int = 8
    """Groups per batch."""
    group_size: int = 4
    """Episodes per group."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"steps": 200, "early": 0, "groups": 1, "group_size": 2})
        check_flags(self, "--", above={"past": self.early})


def make_past(folder: Path, steps: int) -> None:
    """Write the files of a run after so many steps; the files of episodes are empty."""
    (folder / "episodes").mkdir(parents=True)
    sample = {"task": "1", "source": "tasks", "prompt": "a" * 200, "answer": "b" * 200, "reward": 0.5}
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "episodes.jsonl").open("w") as episodes:
        for step in range(1, steps + 1):
            metrics.write(json.dumps({"step": step, "reward/mean": 0.5, **_METRICS}) + "\n")
            episodes.writelines([json.dumps({"step": step, **sample}) + "\n"] * _EPISODES)
            (folder / "episodes" / f"{step:06d}-trained.parquet").touch()
            if step % _EVERY == 0:
                (folder / "episodes" / f"{step:06d}-evaluated.parquet").touch()


class StagedRun:
    """A run that continues after the steps whose files are in its folder."""

    def __init__(self, folder: Path, past: int, config: Config) -> None:
        self.step = past
        self._recorder = EpisodeRecorder(folder, Recording())
        display = Display("none", phase_clock=PhaseClock())
        sinks = (EventSink(folder / "events.jsonl"), EpisodeSink(folder / "episodes.jsonl", _EPISODES))
        curves = TensorBoardSink(folder / "tensorboard")
        self._log = RunLog(display, JSONLSink(folder / "metrics.jsonl"), *sinks, self._recorder, curves)
        self._log.start(
            RunInfo(recipe="staged", model="none", folder=folder, steps=past + config.steps, step=past, config={})
        )
        self._generator = StagedGenerator(engines=2, budget=64)
        tokenizer: Any = StagedTokenizer()
        environment: Any = StagedEnvironment(kinds=[_KIND], turn_s=1.0, tool_s=0.001, seed=0)
        generator: Any = self._generator
        scheduler = Scheduler(
            ScheduleConfig(),
            groups=config.groups,
            episodes=config.group_size,
            tasks=ResumableTaskStream(Mixture({"tasks": StagedSource(_KIND)})),
        )
        reward: Any = None
        self._rollouts = RolloutExecutor(
            Dispatcher(scheduler, generator, tokenizer),
            EpisodeRunner(tokenizer, environment, reward),
            devices=DeviceHandover(generator),
            version=lambda: self._generator.version,
            seed=0,
            listener=Printed(),
        )
        source = StagedSource(_KIND)
        held_out: list[Task] = [source.draw() for _ in range(8)]
        evaluations = RolloutEvaluations(EvalConfig(every=_EVERY), self._rollouts, max_tokens=1 << 20, warn=_ignore)
        self._evaluator = Evaluator({HELD_OUT: held_out}, evaluations)
        self._evaluator.scores = dict.fromkeys(range(0, past + 1, _EVERY), 0.5)

    async def take_steps(self, count: int) -> float:
        """Take steps, roll the last ones back, and return the process's CPU seconds for each step."""
        begun = time.process_time()
        for _ in range(count):
            self.step += 1
            batch = await self._rollouts.next_batch()
            self._generator.load(self._generator.version + 1)
            values = batch_metrics(batch) | self._rollouts.metrics() | _METRICS | {"seconds/step": 1.0}
            self._log.log(self.step, values, batch)
            self._log.record(self.step, "trained", functools.partial(trained_episodes, self.step, batch, None, None))
            if (result := self._evaluator.pop()) is not None:
                self._log.log(result.step, result.metrics)
                records = functools.partial(evaluated_episodes, result.step, result.episodes)
                self._log.record(result.step, "evaluated", records)
            if self.step % _EVERY == 0 and self._evaluator.step is None:
                self._evaluator.start(self.step, self._generator.version)
            if self.step % _SAVED_EVERY == 0:
                json.dumps({"evaluator": self._evaluator.state(), "rollouts": self._rollouts.state()})
        await self._evaluator.finish()
        self.step -= _ROLLED_BACK
        self._evaluator.rollback(self.step)
        self._log.rollback(self.step)
        self._recorder.flush()
        return (time.process_time() - begun) / count

    async def close(self) -> None:
        """End the run's episodes and close its files."""
        await self._rollouts.close()
        self._log.close()


def _ignore(_: str) -> None:
    """Take a warning, such as that weights changed during an evaluation, which here they always do."""


def measure(config: Config, report: Report) -> None:
    """Measure both runs."""
    asyncio.run(_measure(config, report))


async def _measure(config: Config, report: Report) -> None:
    with tempfile.TemporaryDirectory() as root, responsive_loop():
        runs = {}
        for name, past in (("early", config.early), ("late", config.past)):
            make_past(Path(root) / name, past)
            begun = time.perf_counter()
            runs[name] = StagedRun(Path(root) / name, past, config)
            report.results[f"start_s_{past}"] = time.perf_counter() - begun
        costs: dict[str, list[float]] = {name: [] for name in runs}
        memory = [0.0]
        turns = max(2, config.steps // _STEPS_IN_TURN)
        for turn in range(turns):
            # The order alternates, so that a machine that slows down favours neither.
            for name, run in sorted(runs.items(), reverse=turn % 2 == 1):
                cpu_s = await run.take_steps(min(_STEPS_IN_TURN, config.steps))
                report.rows.append({"run": name, "warm_up": turn == 0, "step": run.step, "cpu_ms": 1000 * cpu_s})
                if turn:
                    costs[name].append(1000 * cpu_s)
            memory.append(_held_mib())
            print(f"turn {turn + 1} of {turns}: {memory[-1]:.0f} MiB", flush=True)
        for run in runs.values():
            await run.close()
    early, late = config.early, config.past
    report.measure(f"step_cpu_ms_{early}", costs["early"])
    report.measure(f"step_cpu_ms_{late}", costs["late"])
    # Each turn of the one with that of the other beside it, as the machine's speed varies.
    pairs = zip(costs["late"], costs["early"], strict=True)
    report.measure(f"cost_{late}_over_{early}", [slow / fast for slow, fast in pairs])
    third = max(1, len(costs["late"]) // 3)
    report.results["last_third_over_first"] = median(costs["late"][-third:]) / median(costs["late"][:third])
    measured_thousands = 2 * _STEPS_IN_TURN * (turns - 1) / 1000
    # The allocators of TensorBoard and Arrow fill up during the first turns.
    settled = memory[len(memory) // 2 :]
    report.results["mib_per_1000_steps"] = (settled[-1] - settled[0]) / (
        measured_thousands * (len(settled) - 1) / (turns - 1)
    )


def _held_mib() -> float:
    """Return the memory that this process alone holds, without garbage."""
    gc.collect()
    return float(psutil.Process().memory_full_info().uss) / 2**20


if __name__ == "__main__":
    run_benchmark("long_run", Config, measure)
