"""Times a GRPO step, against TRL's GRPOTrainer on the same model, tasks and settings in the same run.

python -m benchmarks.grpo_step --json out.json

A step is 8 tasks times 8 episodes of at most 16 new tokens, SmolLM2-135M, float32 in trainer and engine, on CPU. Our
side is the recipe as a user runs it; its step is rollout, train and publish. Then TRL, in an environment of its own
that is set up under .bench/, takes its steps on the very tasks that ours were taken on. The two never run at once.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, run_benchmark
from forge_rl.data.bundled import default_cache
from forge_rl.data.models import resolve_model
from forge_rl.data.sources import ReasoningGymSource, parse_source
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.types import Task

ROOT = Path(__file__).resolve().parents[1]
TRL_FOLDER = ROOT / ".bench" / "trl"
TRL_PACKAGES = ("torch==2.13.0+cpu", "trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Asked only where torch's CPU build is not found otherwise."""

MODEL = "smollm2-135m"
TASKS = "basic_arithmetic:min_terms=2,max_terms=2,min_digits=1,max_digits=1,operators=[+],allow_parentheses=false"
"""One-digit addition."""
SEED = 0
HELD_OUT_SHARE = 0.1
LR = 1e-5
_SETUP_DEADLINE_S = 1800.0
_RUN_DEADLINE_S = 7200.0
_MOST_REDRAWS = 8
"""Most times that a batch that teaches nothing is drawn again."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure a GRPO step, and TRL's in the same run."""

    steps: int = 5
    """Measured steps of each side."""
    warm_up: int = 2
    """Steps of each side that come first and do not count."""
    trl_completions_per_forward: int = 4
    """Number of completions by which TRL splits its batch for forward and backward. 4 took TRL the least CPU time of 2,
    4, 8 and 16 on two EPYC cores; try others elsewhere, so that the peer is at its best."""
    smoke: bool = False
    """Two groups of four episodes, one measured step: shows that everything runs, and measures nothing."""

    def __post_init__(self) -> None:
        if self.steps < LEAST_REPEATS and not self.smoke:
            raise BenchmarkError(
                f"--steps is {self.steps}, too few for a median", hint=f"set --steps to {LEAST_REPEATS} or more"
            )
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
            return Size(groups=2, group_size=4, max_new_tokens=16, warm_up=1, measured=1)
        return Size(groups=8, group_size=8, max_new_tokens=16, warm_up=self.warm_up, measured=self.steps)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Work that both sides do."""

    groups: int
    group_size: int
    max_new_tokens: int
    warm_up: int
    measured: int

    @property
    def steps(self) -> int:
        return self.warm_up + self.measured

    @property
    def episodes(self) -> int:
        """Count for one step."""
        return self.groups * self.group_size


def measure(config: Config, report: Report) -> None:
    """Run both sides and compare them."""
    _check_cpu()
    size = config.size
    if config.smoke:
        report.benchmark += " (smoke: no measurement)"
    print("setting up", flush=True)
    model = resolve_model(MODEL, default_cache())
    python = set_up_trl(TRL_FOLDER)

    with tempfile.TemporaryDirectory(prefix="grpo_step-") as scratch:
        folder = Path(scratch)
        print(f"forge_rl: {size.steps} steps of {size.episodes} episodes", flush=True)
        ours, tasks = run_ours(size, folder / "run")
        report.rows += [{"side": "forge_rl", **row} for row in ours]
        print(f"TRL: {size.steps} steps of {size.episodes} episodes", flush=True)
        theirs, report.versions["trl_environment"] = run_trl(
            size, python, folder, model, tasks, completions_per_forward=config.trl_completions_per_forward
        )
        report.rows += [{"side": "trl", **row} for row in theirs]

    measured = [row for row in ours if not row["warm_up"]]
    peer = [row for row in theirs if not row["warm_up"]]
    for phase in ("rollout", "train", "publish", "step"):
        report.measure(f"seconds_{phase}", [row[f"seconds_{phase}"] for row in measured])
    report.measure("seconds_trl", [row["seconds"] for row in peer])
    report.measure("seconds_trl_generate", [row["seconds_generate"] for row in peer])
    report.measure("seconds_trl_train", [row["seconds_train"] for row in peer])
    report.measure("tokens_per_answer", [row["response_tokens"] / size.episodes for row in measured])
    report.measure("tokens_per_answer_trl", [row["response_tokens"] / size.episodes for row in peer])
    report.results["speedup_over_trl"] = report.results["seconds_trl"] / report.results["seconds_step"]


def recipe_command(size: Size, out: Path) -> list[str]:
    """The command that runs our side."""
    flags: Mapping[str, object] = {
        "model": MODEL,
        "tasks": TASKS,
        "steps": size.steps,
        "groups-per-batch": size.groups,
        "group-size": size.group_size,
        "seed": SEED,
        "held-out-tasks": 0,
        "data.held-out-share": HELD_OUT_SHARE,
        "eval-every": 0,
        "checkpoint-every": 0,
        "trainer.dtype": "float32",
        "trainer.optimizer.lr": LR,
        "generator.dtype": "float32",
        "generator.max-new-tokens": size.max_new_tokens,
        "generator.temperature": 1.0,
        "display": "plain",
        "out": out,
    }
    return [sys.executable, "-m", "recipes.grpo", *(part for flag in flags for part in (f"--{flag}", str(flags[flag])))]


def run_ours(size: Size, out: Path) -> tuple[list[dict[str, float]], list[Task]]:
    """Run the recipe.

    Returns:
        For each step its measurements, and for each group of all steps, in order, its task.

    Raises:
        BenchmarkError: the recipe failed, or did other work than it was asked for.
    """
    with _process(recipe_command(size, out), "our side", _RUN_DEADLINE_S):
        pass
    rows = _read_lines(out / "metrics.jsonl")
    if len(rows) != size.steps:
        raise BenchmarkError(f"our side logged {len(rows)} steps, not {size.steps}")
    measurements = []
    for index, row in enumerate(rows):
        try:
            found = {f"seconds_{phase}": row[f"seconds/{phase}"] for phase in ("rollout", "train", "publish", "step")}
            found["response_tokens"] = row["tokens/completion_mean"] * size.episodes
            found["reward"] = row["reward/mean"]
            found["trained_tokens"] = row["tokens/train"]
        except KeyError as error:
            raise BenchmarkError(f"step {index + 1} of our side logged no {error}") from error
        measurements.append({"step": index + 1, "warm_up": index < size.warm_up} | found)
    return measurements, _tasks_trained_on(size, _read_lines(out / "episodes.jsonl"))


def run_trl(
    size: Size, python: Path, folder: Path, model: Path, tasks: Sequence[Task], *, completions_per_forward: int
) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Run TRL in its own environment.

    Returns:
        For each step its measurements, and the versions of its packages.

    Raises:
        BenchmarkError: TRL failed, or did other work than it was asked for.
    """
    from forge_rl.algorithms.losses import ClippedSurrogate

    # The recipe's defaults, in TRL's words.
    optimizer, loss = OptimizerConfig(lr=LR), ClippedSurrogate()
    settings = {
        "model": str(model),
        "output": str(folder / "trl"),
        "tasks": [{"messages": [dict(m) for m in task.messages], "gold": gold_answer(task)} for task in tasks],
        "steps": size.steps,
        "groups_per_batch": size.groups,
        "group_size": size.group_size,
        "max_new_tokens": size.max_new_tokens,
        "completions_per_forward": completions_per_forward,
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
    path = folder / "trl_settings.json"
    path.write_text(json.dumps(settings))
    rows: list[dict[str, float]] = []
    versions: dict[str, str] = {}
    command = [str(python), str(ROOT / "benchmarks" / "peers" / "trl_grpo.py"), str(path)]
    with _process(command, "TRL", _RUN_DEADLINE_S, quiet=folder / "trl.log") as lines:
        for line in lines:
            row = json.loads(line)
            if "versions" in row:
                versions = row["versions"]
                continue
            rows.append(row | {"warm_up": row["step"] <= size.warm_up})
            print(f"  step {row['step']}/{size.steps}  {row['seconds']:.1f} s  reward {row['reward']:.2f}", flush=True)
    if len(rows) != size.steps:
        raise BenchmarkError(f"TRL took {len(rows)} steps, not {size.steps}")
    return rows, versions


def set_up_trl(folder: Path) -> Path:
    """Make TRL's environment, unless it is there with these very packages.

    Returns:
        Its Python.

    Raises:
        BenchmarkError: it cannot be made.
    """
    python, record = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps(TRL_PACKAGES)
    with contextlib.suppress(OSError):
        if record.read_text() == wanted and python.exists():
            return python
    print(f"installing TRL into .bench/{folder.name} (once; minutes)", flush=True)
    hint = "look at the lines above; the benchmark has no number without its peer"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TRL_PACKAGES]
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=_SETUP_DEADLINE_S)
        # pip finds torch's CPU build in PIP_FIND_LINKS, if that is set; elsewhere only torch's own index has it.
        first = subprocess.run(pip, check=False, timeout=_SETUP_DEADLINE_S, capture_output=True, text=True)
        if first.returncode != 0:
            print(first.stderr, file=sys.stderr, end="")
            print(f"trying again with {TORCH_INDEX}", flush=True)
            subprocess.run([*pip, "--extra-index-url", TORCH_INDEX], check=True, timeout=_SETUP_DEADLINE_S)
        record.write_text(wanted)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"TRL was not installed within {_SETUP_DEADLINE_S:.0f} s", hint=hint) from error
    except subprocess.CalledProcessError as error:
        raise BenchmarkError(f"TRL cannot be installed: exit status {error.returncode}", hint=hint) from error
    except OSError as error:
        raise BenchmarkError(f"TRL cannot be installed: {error}", hint=hint) from error
    return python


def gold_answer(task: Task) -> str:
    """The right answer of a task of reasoning-gym, an integer as text."""
    entry = task.truth["entry"]
    assert isinstance(entry, dict), f"task {task.id} has no entry"
    return str(int(entry["answer"]))


def _tasks_trained_on(size: Size, samples: Sequence[Mapping[str, object]]) -> list[Task]:
    """The task of each group of each step, from the samples of episodes that the run wrote."""
    spec = parse_source(TASKS)
    source = ReasoningGymSource(spec.name, spec.params, SEED, HELD_OUT_SHARE)
    known = {task.id: task for task in (source.draw() for _ in range(size.steps * size.groups * _MOST_REDRAWS))}
    found: list[Task] = []
    for step in range(1, size.steps + 1):
        written = [sample for sample in samples if sample["step"] == step]
        # Samples are spread evenly over the episodes, and episodes lie group by group.
        groups = {
            place * size.episodes // len(written) // size.group_size: sample for place, sample in enumerate(written)
        }
        ids = [str(groups[group]["task"]) for group in sorted(groups)]
        if len(ids) != size.groups or not known.keys() >= set(ids):
            raise BenchmarkError(f"the tasks of step {step} of our side cannot be told from its episodes.jsonl")
        found += [known[id] for id in ids]
    return found


def _check_cpu() -> None:
    from forge_rl.engines.platform import device_type

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
) -> Iterator[Iterator[str]]:
    """Run a command; the body gets its lines if it is quiet, and it is over when the block is.

    Args:
        command: what to run, at the root of the repository.
        name: of the side, for errors.
        deadline_s: the command is ended after this long.
        quiet: file for stderr, whose end is shown if the command fails; if None, the command writes to the terminal.

    Raises:
        BenchmarkError: it cannot be started, fails, or passes the deadline.
    """
    with contextlib.ExitStack() as stack:
        log: IO[str] | None = stack.enter_context(quiet.open("w")) if quiet else None
        try:
            child = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE if log else None, stderr=log, text=True, bufsize=1
            )
        except OSError as error:
            raise BenchmarkError(f"{name} cannot be started: {error}") from error
        late = threading.Event()

        def expire() -> None:
            late.set()
            child.terminate()

        timer = threading.Timer(deadline_s, expire)
        timer.start()
        try:
            yield iter(child.stdout or ())
            child.wait()
        finally:
            timer.cancel()
            _end(child)
    if late.is_set():
        raise BenchmarkError(f"{name} was not done within {deadline_s:.0f} s, and was ended")
    if child.returncode != 0:
        last = "\n".join(quiet.read_text().splitlines()[-20:]) + "\n" if quiet else ""
        how = (
            f"was killed by signal {-child.returncode}"
            if child.returncode < 0
            else f"ended with status {child.returncode}"
        )
        raise BenchmarkError(f"{last}{name} {how}", hint="without both sides there is no number")


def _end(child: subprocess.Popen[str]) -> None:
    """End a child that still runs, gently first: the recipe ends its own processes."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


if __name__ == "__main__":
    run_benchmark("grpo_step", Config, measure)
