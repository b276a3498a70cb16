"""Compare two runs: what differs between their settings and code, where they part, and how they score.

forge-rl compare runs/grpo-1a2b3c4d runs/grpo-5e6f7a8b
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_rl.algorithms.evaluation import Estimate, compare_paired, mean_over_tasks
from forge_rl.errors import ConfigError
from forge_rl.metrics.display.format import number, sparkline
from forge_rl.metrics.episode_files import EpisodeFile
from forge_rl.metrics.recorder import recorded_files
from forge_rl.run.launch import launch
from forge_rl.run.past_runs import as_float, flag_of, metrics_of, read_bounded, setting_text, settings_of
from forge_rl.run.run_dir import defines_run
from forge_rl.system.terminal import clipped

_CURVES = (
    *("reward/mean", "completed/reward_mean", "held_out", "loss", "entropy", "grad_norm", "logprob_gap"),
    *("kl_behaviour/k3", "tokens/completion_mean", "episodes/truncated", "groups/uniform", "lag/mean"),
)
"""Metrics whose curves are shown, if a run has them."""
_SAME = ("reward/mean", "loss", "tokens/completion_mean")
"""Metrics that are equal in equal runs, unlike times."""
_PROMPTS = 4
"""Tasks whose prompts are compared."""
_CLEAR_STEPS = 3
"""Consecutive steps whose rewards must differ by more than chance for runs to have parted."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Compare two runs."""

    first: tyro.conf.Positional[Path]
    """Run folder, A."""
    second: tyro.conf.Positional[Path]
    """Run folder, B."""

    def __post_init__(self) -> None:
        for folder in (self.first, self.second):
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{folder} is not a run folder", hint="list runs with: forge-rl runs")


async def main(config: Config) -> None:
    """Compare the runs."""
    await asyncio.to_thread(show, config, Console(highlight=False))


def show(config: Config, console: Console) -> None:
    """Read the folders and print."""
    found = compared(config.first, config.second)
    console.print(Text(found["lines"][0], "bold"), soft_wrap=True)
    for line in found["lines"][1:]:
        console.print(Text(line), soft_wrap=True)
    if found["differences"]:
        console.print(_table(("difference", "A", "B"), found["differences"]))
    console.print(_table(("metric", "A", "last", "B", "last"), _curves(*map(_by_step, (config.first, config.second)))))
    if found["scores"]:
        console.print(f"\nevaluation of step {found['step']}: means with 95% intervals")
        console.print(_table(("set and source", "A", "B", "B - A, on the same tasks"), found["scores"]))


def compared(first: Path, second: Path) -> dict[str, Any]:
    """Compare two runs: `lines` of text, of which the first names the cause; `differences`, rows of a name and two
    values; and `scores` of an evaluation `step`, rows of a set, two scores and their difference."""
    differ = differences(first, second)
    lines = [_first_line(differ)]
    if prompts := _other_prompts(first, second):
        lines = (
            [f"{lines[0]}; {prompts}"] if any(each.defines for each in differ) else [f"A and B have {prompts}", *lines]
        )
    parting = _parting(_by_step(first), _by_step(second), _rewards(first), _rewards(second))
    step, scores = _scores(first, second)
    return {
        "lines": [*lines, *parting],
        "differences": [
            tuple(clipped(cell, lines=1, width=400) for cell in (e.name, e.first, e.second)) for e in differ
        ],
        "scores": scores,
        "step": step,
    }


@dataclass(frozen=True)
class Difference:
    """A setting, a file of code or a package that differs."""

    name: str
    first: str
    second: str
    defines: bool
    """Whether it affects what the run computes."""


def differences(first: Path, second: Path) -> list[Difference]:
    """List what differs between two runs: settings that define them, code, packages, and other settings."""
    found = []
    for file, is_setting in (("config.json", True), ("versions.json", False)):
        before, after = (settings_of(read_bounded(folder / file)) for folder in (first, second))
        for name in sorted(before.keys() | after.keys()):
            values = [setting_text(side.get(name, "none")) for side in (before, after)]
            if values[0] != values[1]:
                flag = flag_of(name) if is_setting else name.replace("code.", "code of ", 1)
                defines = defines_run(name) if is_setting else name.startswith("code.")
                found.append(Difference(flag, values[0], values[1], defines))
    return sorted(found, key=lambda each: not each.defines)


def _first_line(differ: Sequence[Difference]) -> str:
    if not differ:
        return "settings, code and versions are the same"
    named = [
        clipped(f"{each.name} {each.first} -> {each.second}", lines=1, width=120) for each in differ if each.defines
    ]
    rest = len(differ) - len(named)
    others = f"{rest} other difference{'s' * (rest != 1)}"
    if not named:
        return f"settings and code that define a run are the same; {others}"
    more = f", and {len(named) - 3} more" * (len(named) > 3)
    return f"A and B differ in {', '.join(named[:3])}{more}" + f"; {others}" * (rest > 0)


def _other_prompts(first: Path, second: Path) -> str:
    """Describe the prompts of a task that both runs have, if its messages are equal but not its tokens; "" for none."""
    for kind in ("evaluated", "trained"):
        files = [{step: path for step, of, path in recorded_files(folder) if of == kind} for folder in (first, second)]
        for step in sorted(files[0].keys() & files[1].keys())[:1]:
            read = [EpisodeFile(each[step]) for each in files]
            rows = [{(row["source"], row["task"]): row["row"] for row in file.listing()} for file in read]
            for key in sorted(rows[0].keys() & rows[1].keys())[:_PROMPTS]:
                a, b = (file[of[key]].episode for file, of in zip(read, rows, strict=True))
                if not (a.turns and b.turns) or (a.task.messages, a.task.tools) != (b.task.messages, b.task.tools):
                    continue
                shown = [episode.turns[0] for episode in (a, b)]
                is_same = shown[0].messages == shown[1].messages
                if is_same and shown[0].prompt_ids.tolist() != shown[1].prompt_ids.tolist():
                    counts = " and ".join(str(len(turn.prompt_ids)) for turn in shown)
                    task = clipped(" ".join(key), lines=1, width=60)
                    where = f"({task}: {counts} tokens)"
                    return f"different prompts for the same messages {where}: another chat template or tokenizer"
    return ""


def _by_step(folder: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in metrics_of(folder):
        found.setdefault(row["step"], {}).update(row)
    return found


def _rewards(folder: Path) -> dict[int, Estimate]:
    """Return the mean reward of each recorded step over its groups."""
    found = {}
    for step, kind, path in recorded_files(folder):
        if kind == "trained":
            groups: dict[int, list[float]] = {}
            for row in EpisodeFile(path).listing():
                if row["reward"] is not None:
                    groups.setdefault(row["group"], []).append(row["reward"])
            found[step] = mean_over_tasks([sum(each) / len(each) for each in groups.values()])
    return found


def _parting(
    first: Mapping[int, Mapping[str, Any]],
    second: Mapping[int, Mapping[str, Any]],
    rewards: Mapping[int, Estimate],
    others: Mapping[int, Estimate],
) -> Iterator[str]:
    """Describe the first step at which the runs differ at all, and the first from which their rewards clearly do."""
    for step in sorted(first.keys() & second.keys()):
        pairs = ((name, as_float(first[step].get(name)), as_float(second[step].get(name))) for name in _SAME)
        unequal = [
            f"{name} {number(a)} and {number(b)}"
            for name, a, b in pairs
            if a is not None and b is not None and not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
        ]
        if unequal:
            yield f"first different at step {step}: {', '.join(unequal)}"
            break
    common = sorted(rewards.keys() & others.keys())
    signs = []
    for step in common:
        a, b = rewards[step], others[step]
        # Newcombe's interval of a difference (1998), from those of both.
        towards = (a.high - a.value, b.value - b.low) if b.value > a.value else (a.value - a.low, b.high - b.value)
        is_clear = abs(b.value - a.value) > math.hypot(*towards)
        signs.append(math.copysign(is_clear, b.value - a.value))
    for at, step in enumerate(common[: 1 - _CLEAR_STEPS]):
        if signs[at] and len({*signs[at : at + _CLEAR_STEPS]}) == 1:
            yield f"rewards are apart from step {step} on: {_interval(rewards[step])} and {_interval(others[step])}"
            return
    if rewards and others:
        yield f"rewards are in no {_CLEAR_STEPS} steps in a row apart by more than chance"


def _curves(*runs: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name in _CURVES:
        values = [
            [value for step in sorted(run) if (value := as_float(run[step].get(name))) is not None] for run in runs
        ]
        if any(values):
            yield (name, *(cell for each in values for cell in (sparkline(each, 24), number(each[-1]) if each else "")))


def _scores(first: Path, second: Path) -> tuple[int, list[tuple[str, ...]]]:
    """Compare the last evaluation that both runs have, by set and source."""
    files = [
        {step: path for step, kind, path in recorded_files(each) if kind == "evaluated"} for each in (first, second)
    ]
    if not (common := files[0].keys() & files[1].keys()):
        return 0, []
    step = max(common)
    runs = []
    for each in files:
        tasks: dict[tuple[str, str], dict[str, list[float]]] = {}
        for row in EpisodeFile(each[step]).listing():
            if row["reward"] is not None:
                of_source = tasks.setdefault((row["set"], row["source"]), {})
                of_source.setdefault(row["task"], []).append(row["reward"])
        runs.append({key: {task: sum(r) / len(r) for task, r in found.items()} for key, found in tasks.items()})
    scores = []
    for key in sorted(runs[0].keys() | runs[1].keys()):
        a, b = runs[0].get(key, {}), runs[1].get(key, {})
        difference = ""
        if both := sorted(a.keys() & b.keys()):
            paired = compare_paired([a[task] for task in both], [b[task] for task in both])
            difference = f"{paired.difference:+.3f}  [{paired.low:+.3f}, {paired.high:+.3f}]  of {paired.tasks} tasks"
        scores.append((" ".join(key), *(_interval(mean_over_tasks([*each.values()])) for each in (a, b)), difference))
    return step, scores


def _interval(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return ""
    bounds = f"  [{estimate.low:.3f}, {estimate.high:.3f}]" if math.isfinite(estimate.low) else ""
    return f"{estimate.value:.3f}{bounds}"


def _table(columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> Table:
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(clipped(cell, lines=1, width=60)) for cell in row))
    return table


if __name__ == "__main__":
    launch(Config, main, shows_only=True)
