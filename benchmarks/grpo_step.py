"""Times a GRPO step against TRL's GRPOTrainer, with the same model, tasks and settings in the same run.

python -m benchmarks.grpo_step --json out.json

A step is 8 tasks times 8 episodes of at most 16 new tokens, SmolLM2-135M, on CPU: with trainer and engine in float32,
then in bfloat16 with float32 weights in the trainer. Our side is the recipe with its default schedule; its step is
rollout, train and publish. TRL has its own environment under .bench/. Both start, then take steps in
turn on the same tasks, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.memory import sampled_peak, tree_sampler
from benchmarks.peer_environments import ROOT, TRL, set_up
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, run_benchmark
from forge_rl.data.sources import ReasoningGymSource
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.flags.texts import parse
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.types import Task

MODEL = "smollm2-135m"
TASKS = "basic_arithmetic:min_terms=2,max_terms=2,min_digits=1,max_digits=1,operators=[+],allow_parentheses=false"
"""One-digit addition."""
SEED = 0
HELD_OUT_SHARE = 0.1
LR = 1e-5
_RUN_DEADLINE_S = 7200.0
_MEMORY_EVERY_S = 0.5
"""Time between two looks at a side's memory, each a few milliseconds of one core."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure a GRPO step of forge_rl and of TRL in the same run."""

    steps: int = 5
    """Measured steps per side and dtype."""
    warm_up: int = 2
    """Warm-up steps per side and dtype, not counted."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Dtypes to measure, one after the other."""
    trl_completions_per_forward: int = 4
    """Completions per forward and backward microbatch of TRL. 4 took TRL the least CPU time of 2, 4, 8 and 16 on two
    EPYC cores; try others elsewhere, so that the peer is at its best."""
    smoke: bool = False
    """Two groups of four episodes, one measured step: checks that everything runs; measures nothing."""

    def __post_init__(self) -> None:
        if not self.smoke:
            check_repeats(self.steps, "--steps")
        if self.warm_up < 1:
            raise BenchmarkError(f"--warm-up is {self.warm_up}", hint="set --warm-up to 1 or more")
        if self.trl_completions_per_forward < 1 or self.size.episodes % self.trl_completions_per_forward:
            raise BenchmarkError(
                f"{self.size.episodes} completions do not split by {self.trl_completions_per_forward}",
                hint="set --trl-completions-per-forward to a divisor",
            )

    @property
    def size(self) -> Size:
        """Shape of a step."""
        if self.smoke:
            return Size(groups=2, group_size=4, max_tokens=16, warm_up=1, measured=1)
        return Size(groups=8, group_size=8, max_tokens=16, warm_up=self.warm_up, measured=self.steps)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Amount of work for both sides."""

    groups: int
    group_size: int
    max_tokens: int
    warm_up: int
    measured: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.measured

    @property
    def episodes(self) -> int:
        """Number of episodes per step."""
        return self.groups * self.group_size


def measure(config: Config, report: Report) -> None:
    """Run both sides in each dtype and compare them."""
    _check_cpu()
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    print("setting up", flush=True)
    model = resolve_model(MODEL, default_cache())
    python = set_up(TRL)
    for dtype in config.dtypes:
        with tempfile.TemporaryDirectory(prefix="grpo_step-") as scratch:
            ours, theirs = _take_turns(config, report, dtype, Path(scratch), model, python)
        suffix = _suffix(dtype)
        for phase in ("rollout", "train", "publish", "step"):
            report.measure(f"seconds_{phase}{suffix}", [row[f"seconds_{phase}"] for row in ours])
        report.measure(f"seconds_trl{suffix}", [row["seconds"] for row in theirs])
        report.measure(f"seconds_trl_generate{suffix}", [row["seconds_generate"] for row in theirs])
        report.measure(f"seconds_trl_train{suffix}", [row["seconds_train"] for row in theirs])
        report.measure(f"tokens_per_answer{suffix}", [row["response_tokens"] / config.size.episodes for row in ours])
        report.measure(
            f"tokens_per_answer_trl{suffix}", [row["response_tokens"] / config.size.episodes for row in theirs]
        )
        seconds = report.results
        seconds[f"speedup_over_trl{suffix}"] = seconds[f"seconds_trl{suffix}"] / seconds[f"seconds_step{suffix}"]


def _take_turns(
    config: Config, report: Report, dtype: str, folder: Path, model: Path, python: Path
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Start both sides and let them take alternate steps.

    Returns:
        The measured steps of forge_rl and of TRL; the report receives all steps.

    Raises:
        BenchmarkError: a side failed, or did other work than requested.
    """
    size, tasks = config.size, draw_tasks(config.size)
    settings = folder / "trl_settings.json"
    settings.write_text(json.dumps(trl_settings(size, folder, model, tasks, dtype, config.trl_completions_per_forward)))
    peer = [str(python), str(ROOT / "benchmarks" / "peers" / "trl_grpo.py"), str(settings)]
    print(f"{dtype}: {size.steps} steps of {size.episodes} episodes, of each side in turn", flush=True)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    with (
        _process(peer, "TRL", _RUN_DEADLINE_S, quiet=folder / "trl.log") as peer_process,
        _process(recipe_command(size, folder / "run", dtype), "our side", _RUN_DEADLINE_S) as own_process,
        sampled_peak(tree_sampler(peer_process.pid), _MEMORY_EVERY_S) as their_peak,
        sampled_peak(tree_sampler(own_process.pid), _MEMORY_EVERY_S) as our_peak,
    ):
        if _next_row(own_process) is not None and (started := _next_row(peer_process)) is not None:
            report.versions["trl_environment"] = started["versions"]
            for step in range(1, size.steps + 1):
                if (own_turn := _take_turn(own_process)) is None or (row := _take_turn(peer_process)) is None:
                    break  # a side has exited; waiting for it raises the cause
                ours.append(own_turn)
                theirs.append(row | {"warm_up": step <= size.warm_up})
                print(
                    f"  step {step}/{size.steps}  {own_turn['seconds']:.1f} s, TRL {row['seconds']:.1f} s", flush=True
                )
    suffix = _suffix(dtype)
    report.results |= {f"peak_gib{suffix}": our_peak[0] / 2**30, f"peak_gib_trl{suffix}": their_peak[0] / 2**30}
    if len(theirs) != size.steps:
        raise BenchmarkError(f"the two sides took {len(theirs)} steps, not {size.steps}")
    logged = _logged_steps(size, folder / "run", [task.id for task in tasks])
    ours = [row | {"seconds_step": turn["seconds"]} for row, turn in zip(logged, ours, strict=True)]
    for side, rows in (("forge_rl", ours), ("trl", theirs)):
        report.rows += [{"side": side, "dtype": dtype, **row} for row in rows]
    return [row for row in ours if not row["warm_up"]], [row for row in theirs if not row["warm_up"]]


def _suffix(dtype: str) -> str:
    """Return the end of a result's name: none in float32."""
    return "" if dtype == "float32" else f"_{dtype}"


def recipe_command(size: Size, out: Path, dtype: str) -> list[str]:
    """Return the command that runs our side, which takes a step for each line on stdin."""
    flags: Mapping[str, object] = {
        "model": MODEL,
        "tasks": TASKS,
        "steps": size.steps,
        "groups-per-batch": size.groups,
        "group-size": size.group_size,
        "seed": SEED,
        "evaluation.tasks": 0,
        "data.held-out-share": HELD_OUT_SHARE,
        "evaluation.every": 0,
        "checkpoint-every": 0,
        "trainer.dtype": dtype,
        "trainer.optimizer.lr": LR,
        "generator.dtype": dtype,
        "generator.max-tokens": size.max_tokens,
        "generator.temperature": 1.0,
        "display": "none",
        "out": out,
    }
    arguments = [part for flag in flags for part in (f"--{flag}", str(flags[flag]))]
    return [sys.executable, "-m", "benchmarks.peers.forge_grpo", *arguments]


def draw_tasks(size: Size) -> list[Task]:
    """Draw the tasks that both sides train on: the source's first, one per group."""
    spec = parse(TASKS, "--tasks")
    source = ReasoningGymSource(spec.name, spec.params, SEED, HELD_OUT_SHARE)
    return [source.draw() for _ in range(size.steps * size.groups)]


def trl_settings(
    size: Size, folder: Path, model: Path, tasks: Sequence[Task], dtype: str, completions_per_forward: int
) -> dict[str, object]:
    """Return the recipe's defaults as settings for TRL."""
    from forge_rl.algorithms.losses import ClippedSurrogate

    optimizer, loss = OptimizerConfig(lr=LR), ClippedSurrogate()
    return {
        "model": str(model),
        "output": str(folder / "trl"),
        "tasks": [{"messages": [dict(m) for m in task.messages], "gold": gold_answer(task)} for task in tasks],
        "steps": size.steps,
        "groups_per_batch": size.groups,
        "group_size": size.group_size,
        "max_tokens": size.max_tokens,
        "completions_per_forward": completions_per_forward,
        "dtype": dtype,
        "lr": optimizer.lr,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "scale_rewards": "group",
        "temperature": 1.0,
        "seed": SEED,
    }


def gold_answer(task: Task) -> str:
    """Return the correct answer of a reasoning-gym task, an integer as text."""
    entry = task.truth["entry"]
    assert isinstance(entry, dict), f"task {task.id} has no entry"
    return str(int(entry["answer"]))


def _logged_steps(size: Size, out: Path, tasks: Sequence[str]) -> list[dict[str, float]]:
    """Read our side's run folder: seconds, tokens and reward per step, and the number of tasks shared with TRL."""
    rows, samples = _read_lines(out / "metrics.jsonl"), _read_lines(out / "episodes.jsonl")
    if len(rows) != size.steps:
        raise BenchmarkError(f"our side logged {len(rows)} steps, not {size.steps}")
    measurements = []
    for index, row in enumerate(rows):
        try:
            measurement = {f"seconds_{phase}": row[f"seconds/{phase}"] for phase in ("rollout", "train", "publish")}
            measurement["response_tokens"] = row["tokens/completion_mean"] * size.episodes
            measurement["reward"] = row["reward/mean"]
            measurement["trained_tokens"] = row["tokens/train"]
        except KeyError as error:
            raise BenchmarkError(f"step {index + 1} of our side logged no {error}") from error
        step_tasks = {str(sample["task"]) for sample in samples if sample["step"] == index + 1}
        shared = len(step_tasks & set(tasks[index * size.groups : (index + 1) * size.groups]))
        measurements.append({"step": index + 1, "warm_up": index < size.warm_up, "tasks_shared": shared} | measurement)
    return measurements


def _next_row(child: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Return the next JSON object of a side; None once it has exited."""
    assert child.stdout is not None
    row = next((line for line in child.stdout if line.startswith("{")), None)
    return None if row is None else json.loads(row)


def _take_turn(child: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Let a side take a step; return its row, or None once it has exited."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write("\n")
        child.stdin.flush()
    return _next_row(child)


def _check_cpu() -> None:
    from forge_rl.engines.devices import device_type

    if device_type() != "cpu":
        raise BenchmarkError(
            "this benchmark compares both sides on CPU, and here is a GPU that ours would take",
            hint="hide it: CUDA_VISIBLE_DEVICES= python -m benchmarks.grpo_step",
        )


def _read_lines(path: Path) -> list[dict[str, float]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"our side left no readable {path.name}: {error}") from error


@contextlib.contextmanager
def _process(
    command: Sequence[str], name: str, deadline_s: float, *, quiet: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command; closes its stdin at the end of the block and waits for it to exit.

    Args:
        command: command to run at the root of the repository.
        name: name of the side, for errors.
        deadline_s: seconds after which the command is killed.
        quiet: file for stderr, whose end is shown if the command fails; if None, stderr goes to the terminal.

    Raises:
        BenchmarkError: the command cannot be started, fails, or exceeds the deadline.
    """
    with contextlib.ExitStack() as stack:
        log: IO[str] | None = stack.enter_context(quiet.open("w")) if quiet else None
        try:
            child = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        except OSError as error:
            raise BenchmarkError(f"{name} cannot be started: {error}") from error
        late = threading.Event()

        def expire() -> None:
            late.set()
            child.terminate()

        # A timer instead of a timeout on each read: a side that hangs in the middle of a step is ended as well.
        timer = threading.Timer(deadline_s, expire)
        timer.start()
        try:
            yield child
            # Closes stdin, which ends a side that waits for its next turn, and reads the rest of its output.
            child.communicate()
        finally:
            timer.cancel()
            _end(child)
    if late.is_set():
        raise BenchmarkError(f"{name} was not done within {deadline_s:.0f} s, and was ended")
    if child.returncode != 0:
        last = "\n".join(quiet.read_text().splitlines()[-20:]) + "\n" if quiet else ""
        cause = (
            f"was killed by signal {-child.returncode}"
            if child.returncode < 0
            else f"ended with status {child.returncode}"
        )
        raise BenchmarkError(f"{last}{name} {cause}", hint="the benchmark needs both sides")


def _end(child: subprocess.Popen[str]) -> None:
    """Stop a child that is still running, gently first, as the recipe stops its own processes."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


if __name__ == "__main__":
    run_benchmark("grpo_step", Config, measure)
