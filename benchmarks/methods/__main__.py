"""Learning curves of every method on small tasks, each with several seeds, in one run that is put back in between.

python -m benchmarks.methods --runs runs.jsonl --json out.json

The bundled model learns one-digit additions. Services start once; `run.reset` then puts weights, optimizer and data
back to before the first step, so all runs begin equal, and runs with the same seed see the same tasks. Each finished
run is a line of --runs: the same command continues an interrupted benchmark there. A method learns if the held-out
score rises by 0.1 or more, averaged over the seeds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import forge_rl as rl
from benchmarks.methods.catalogue import Method, catalogue
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.errors import check_flags
from forge_rl.rollout.state import ScheduleConfig

LEAST_GAIN = 0.1
"""Gain from which on a method learns."""


@dataclass(frozen=True)
class Correct:
    """Scores correct answers 1, with the parts "correct" and "stops"; an answer stops if no limit cut it."""

    async def __call__(self, task: rl.Task, episode: rl.Episode) -> rl.Score:
        score = await rl.ReasoningGymReward()(task, episode.text)
        stops = float(not episode.turns[-1].truncated)
        return rl.Score(total=score.total, parts={"correct": score.total, "stops": stops}, answer=score.answer)


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Train the bundled model with every method, and report the held-out scores."""

    only: tuple[str, ...] = ()
    """Names of methods; by default all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of task order and sampling, one run of each method with each."""
    runs: Path | None = None
    """File of finished runs; those that it has are not run again."""
    steps: int = 6
    """Batches a run."""
    groups: int = 4
    """Tasks a batch."""
    group_size: int = 8
    """Answers to each task."""
    minibatches: int = 2
    """Updates a batch, so that ratios are not all 1."""
    lr: float = 3e-5
    """Learning rate of AdamW; it divides by the gradient's size, so losses of any scale can share it."""
    warmup_updates: int = 2
    """Updates until the learning rate is reached."""
    frozen_layers: int = 15
    """The embedding and this many of the first of 30 layers are not trained, which makes a step a third faster."""
    temperature: float = 0.7
    """Sampling temperature, of evaluations too: the rewards of sampled answers are what the methods maximise."""
    max_tokens: int = 12
    """Maximum tokens of an answer."""
    tasks: int = 64
    """Held-out tasks, answered before and after."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--",
            minimum={"groups": 1, "group_size": 2, "minibatches": 1, "max_tokens": 1, "tasks": 1}
            | dict.fromkeys(("warmup_updates", "frozen_layers"), 0),
        )
        if not self.seeds or self.steps < 1:
            raise BenchmarkError(
                "no run was asked for", hint="pass --seeds at least one number, and --steps at least 1"
            )
        if unknown := set(self.only) - set(catalogue(rl.RoleBaselines())):
            names = ", ".join(catalogue(rl.RoleBaselines()))
            raise BenchmarkError(f"--only names {min(unknown)!r}, which is not a method", hint=f"choose from {names}")


@dataclass(frozen=True, kw_only=True)
class Settings(rl.RunConfig):
    """Settings of the run."""

    critic: rl.CriticConfig = field(default_factory=rl.CriticConfig)


@dataclass(frozen=True)
class Curve:
    """What a run of a method measured."""

    method: str
    seed: int
    before: float
    after: float
    rewards: list[float]
    """Mean reward of each batch."""
    entropies: list[float]
    """Mean entropy of each batch's trained tokens, in nats; NaN is None."""
    gap: float
    """Largest mean gap between the engine's and the trainer's logprobs."""
    seconds: float

    @property
    def gain(self) -> float:
        """Rise of the held-out score."""
        return self.after - self.before


def measure(config: Config, report: Report) -> None:
    """Run each method with each seed, except for finished runs, and report all."""
    methods = catalogue(rl.RoleBaselines())
    selected = {name: methods[name] for name in config.only or methods}
    done = Finished(config)
    left = [(name, seed) for seed in config.seeds for name in selected if (name, seed) not in done.curves]
    if left:
        asyncio.run(_run_all(config, left, done))
    write_results(report, selected, config, done)


def write_results(report: Report, selected: Mapping[str, Method], config: Config, done: Finished) -> None:
    """Write a row for each method, and the results over all."""
    for name, method in selected.items():
        curves = [done.curves[name, seed] for seed in config.seeds]
        gain = statistics.fmean(curve.gain for curve in curves)
        report.rows.append(
            {
                "method": name,
                "kind": method.kind,
                "loss": method.loss,
                "advantages": "own" if method.valued else method.advantages,
                "note": method.note,
                "before": curves[0].before,
                "after": statistics.fmean(curve.after for curve in curves),
                "gain": gain,
                "gain_worst_seed": min(curve.gain for curve in curves),
                "reward_last": statistics.fmean(curve.rewards[-1] for curve in curves),
                "entropy_last": statistics.fmean(curve.entropies[-1] for curve in curves),
                "gap": max(curve.gap for curve in curves),
                "seconds": statistics.fmean(curve.seconds for curve in curves),
                "runs": [asdict(curve) for curve in curves],
            }
        )
    gains = [float(str(row["gain"])) for row in report.rows]
    report.results |= {
        "methods": float(len(selected)),
        "methods_that_learn": float(sum(gain >= LEAST_GAIN for gain in gains)),
        "gain_worst": min(gains),
        "gain_median": statistics.median(gains),
        "minutes": done.seconds / 60,
    }


class Finished:
    """The file of finished runs, if there is one, and what this process adds.

    Raises:
        BenchmarkError: it is of other settings, or cannot be read or written.
    """

    def __init__(self, config: Config) -> None:
        self._path = config.runs
        self.curves: dict[tuple[str, int], Curve] = {}
        self.seconds = 0.0
        """Seconds of all runs and starts."""
        ignored_fields = ("json", "only", "seeds", "runs")
        self._settings = {name: value for name, value in asdict(config).items() if name not in ignored_fields}
        if self._path is not None and self._path.exists():
            for number, line in enumerate(self._path.read_text().splitlines(), 1):
                self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        try:
            row = json.loads(line)
            settings, seconds = row.pop("settings"), row.pop("start_s", 0.0)
            # Runs with other settings would be averaged as if they were comparable.
            if settings != self._settings:
                raise BenchmarkError(
                    f"{self._path} has runs with {settings}, not {self._settings}", hint="pass another --runs"
                )
            curve = Curve(**row)
        except (ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"line {number} of {self._path} is not a run", hint="delete it") from error
        self.curves[curve.method, curve.seed] = curve
        self.seconds += curve.seconds + seconds

    def add(self, curve: Curve, start_s: float) -> None:
        """Add a run; `start_s` is the time before the first run of this process, else 0."""
        self.curves[curve.method, curve.seed] = curve
        self.seconds += curve.seconds + start_s
        if self._path is not None:
            row = asdict(curve) | {"settings": self._settings, "start_s": start_s}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


async def _run_all(config: Config, left: list[tuple[str, int]], done: Finished) -> None:
    """Start the services, and run each method with each seed."""
    began = time.monotonic()
    training = dict[str, Any](
        minibatches=config.minibatches,
        optimizer=rl.OptimizerConfig(lr=config.lr, warmup_updates=config.warmup_updates),
        frozen=("model.embed_tokens.*", *(f"model.layers.{layer}.*" for layer in range(config.frozen_layers))),
    )
    with tempfile.TemporaryDirectory(prefix="forge_rl-methods-") as folder:
        settings = Settings(
            steps=config.steps,
            groups_per_batch=config.groups,
            group_size=config.group_size,
            checkpoint_every=0,
            schedule=ScheduleConfig(kind="synchronous"),
            evaluation=rl.EvalConfig(every=config.steps, tasks=config.tasks, temperature=config.temperature),
            trainer=rl.TrainerConfig(**training),
            critic=rl.CriticConfig(**training),
            generator=rl.GeneratorConfig(
                max_model_len=256, kv_cache_gib=0.5, temperature=config.temperature, max_tokens=config.max_tokens
            ),
            out=Path(folder) / "run",
            display="none",
        )
        baselines = rl.RoleBaselines()
        methods = catalogue(baselines)
        starting = rl.start(
            settings,
            loss=rl.build_loss(["clipped:kl_coef=0.01"]),  # keeps a reference for the methods that need one
            sources=rl.DataConfig().build((rl.ONE_DIGIT_ADDITION,), seed=0),
            reward=Correct(),
            critic=settings.critic,
            recipe="methods",
        )
        async with starting as run:
            run.keep("baselines", baselines)
            before = await run.evaluate(wait=True)
            assert before is not None
            start_s = time.monotonic() - began
            print(f"{len(left)} runs; started in {start_s:.0f} s, held-out score {before:.3f}", flush=True)
            for number, (name, seed) in enumerate(left, 1):
                curve = await _run(run, name, methods[name], seed, before)
                done.add(curve, start_s if number == 1 else 0.0)
                scores, rewards = (
                    f"{before:.2f} -> {curve.after:.2f}",
                    " ".join(f"{reward:.2f}" for reward in curve.rewards),
                )
                print(
                    f"{number}/{len(left)} {name} seed {seed}: {scores} in {curve.seconds:.0f} s, rewards {rewards}",
                    flush=True,
                )


async def _run(run: rl.Run[Any], name: str, method: Method, seed: int, before: float) -> Curve:
    """Train with a method from the start, and evaluate."""
    began = time.monotonic()
    await run.reset(seed=seed)
    run.loss = rl.build_loss([method.loss])
    entropy = None if method.entropy_target is None else rl.AdaptiveEntropy(target=method.entropy_target)
    rewards, entropies, gap = list[float](), list[float](), 0.0
    while run.step < run.config.steps:
        with run.phase("rollout"):
            batch = await run.rollouts.next_batch()
        with run.phase("train"):
            advantages = (
                rl.batch_advantages(batch, estimator=method.advantages)
                if method.valued is None
                else await method.valued(run, batch)
            )
            loss = run.loss if entropy is None else entropy.loss(run.loss)
            packed = await asyncio.to_thread(rl.pack, batch, advantages, run.trainer.layout)
            stats = await run.trainer.step(packed, loss, temperature=run.generator.sampling.temperature)
            if entropy is not None:
                entropy.update(stats.get("entropy"))
        with run.phase("publish"):
            version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
            await run.generator.load(run.weights, version)
        run.log(stats, batch, packed)
        rewards.append(float(batch.rewards.mean()))
        entropies.append(stats.get("entropy", entropies[-1] if entropies else 0.0))
        gap = max(gap, stats.get("logprob_gap", 0.0))
    after = await run.evaluate(wait=True)
    assert after is not None
    return Curve(
        method=name,
        seed=seed,
        before=before,
        after=after,
        rewards=rewards,
        entropies=entropies,
        gap=gap,
        seconds=time.monotonic() - began,
    )


if __name__ == "__main__":
    run_benchmark("methods", Config, measure)
