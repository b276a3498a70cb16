"""Compare two runs: what differs between their settings and code, where they part, and how they score.

forge-rl compare runs/grpo-1a2b3c4d runs/grpo-5e6f7a8b
"""

from __future__ import annotations

import asyncio
import functools
import itertools
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
from forge_rl.flags.categories import Category
from forge_rl.flags.fields import flags_of
from forge_rl.flags.retired import current_path, retired_default
from forge_rl.look.past_runs import as_float, flag_of, metrics_of, read_bounded, setting_text, settings_of
from forge_rl.metrics.display.format import number, sparkline
from forge_rl.metrics.episode_reader import EpisodeFile
from forge_rl.metrics.recorder import recorded_files
from forge_rl.run.launch import launch
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
    comparison = compared(config.first, config.second)
    console.print(Text(comparison["lines"][0], "bold"), soft_wrap=True)
    for line in comparison["lines"][1:]:
        console.print(Text(line), soft_wrap=True)
    if comparison["differences"]:
        console.print(_table(("difference", "A", "B"), comparison["differences"]))
    console.print(_table(("metric", "A", "last", "B", "last"), _curves(*map(_by_step, (config.first, config.second)))))
    if comparison["scores"]:
        console.print(f"\nevaluation of step {comparison['step']}: means with 95% intervals")
        console.print(_table(("set and source", "A", "B", "B - A, on the same tasks"), comparison["scores"]))


def compared(first: Path, second: Path) -> dict[str, Any]:
    """Compare two runs: `lines` of text, of which the first names the cause; `differences`, rows of a name and two
    values; and `scores` of an evaluation `step`, rows of a set, two scores and their difference."""
    diffs = differences(first, second)
    lines = [_first_line(diffs)]
    # Another chat template changes every prompt although all settings may be equal, and is then named first.
    if prompts := _other_prompts(first, second):
        lines = (
            [f"{lines[0]}; {prompts}"] if any(diff.defines for diff in diffs) else [f"A and B have {prompts}", *lines]
        )
    divergence = _parting(_by_step(first), _by_step(second), _rewards(first), _rewards(second))
    step, scores = _scores(first, second)
    return {
        "lines": [*lines, *divergence],
        "differences": [
            tuple(clipped(cell, lines=1, width=400) for cell in (e.name, e.first, e.second)) for e in diffs
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
    diffs = []
    categories = _categories()
    for file, is_setting in (("config.json", True), ("versions.json", False)):
        first_values, second_values = (settings_of(read_bounded(folder / file)) for folder in (first, second))
        # Settings of older runs are compared under the flags' current names.
        if is_setting:
            first_values, second_values = (
                {current_path(name): value for name, value in side.items()} for side in (first_values, second_values)
            )
        for name in sorted(first_values.keys() | second_values.keys()):
            values = [setting_text(side.get(name, "none")) for side in (first_values, second_values)]
            if values[0] != values[1]:
                flag = flag_of(name) if is_setting else name.replace("code.", "code of ", 1)
                defines = _defines_run(name, categories) if is_setting else name.startswith("code.")
                diffs.append(Difference(flag, values[0], values[1], defines))
    return sorted(diffs, key=lambda diff: not diff.defines)


@functools.cache
def _categories() -> dict[str, Category]:
    """Return the category of each flag that recipes have, by its path; a folder does not say which recipe ran."""
    # The configs load Monarch, which looking at a page or at one run does not need.
    from forge_rl.gateway.gateway_config import GatewayConfig
    from forge_rl.run.example_config import ExampleConfig
    from forge_rl.run.task_config import TaskConfig
    from forge_rl.services.teachers_config import TeachersConfig
    from forge_rl.services.trainer_config import CriticConfig

    groups = {"critic": CriticConfig, "teachers": TeachersConfig, "gateway": GatewayConfig}
    flags = itertools.chain(
        *map(flags_of, (TaskConfig, ExampleConfig)),
        *(flags_of(config, path=(group,)) for group, config in groups.items()),
    )
    return {flag.dotted: flag.category for flag in flags}


def _defines_run(name: str, categories: Mapping[str, Category]) -> bool:
    """Return whether a setting, such as "trainer.optimizer.lr", determines what a run computes."""
    if retired_default(name) is not None:
        return False
    # Flags that are not known, such as a user's recipe's, are taken to define the run.
    return categories.get(name, Category.DEFINING) in (Category.DEFINING, Category.TUNABLE)


def _first_line(diffs: Sequence[Difference]) -> str:
    if not diffs:
        return "settings, code and versions are the same"
    defining = [
        clipped(f"{diff.name} {diff.first} -> {diff.second}", lines=1, width=120) for diff in diffs if diff.defines
    ]
    num_others = len(diffs) - len(defining)
    others_text = f"{num_others} other difference{'s' * (num_others != 1)}"
    if not defining:
        return f"settings and code that define a run are the same; {others_text}"
    more = f", and {len(defining) - 3} more" * (len(defining) > 3)
    return f"A and B differ in {', '.join(defining[:3])}{more}" + f"; {others_text}" * (num_others > 0)


def _other_prompts(first: Path, second: Path) -> str:
    """Describe the prompts of a task that both runs have, if its messages are equal but not its tokens; "" for none."""
    for kind in ("evaluated", "trained"):
        paths_by_step = [
            {step: path for step, file_kind, path in recorded_files(folder) if file_kind == kind}
            for folder in (first, second)
        ]
        # One common step is enough, as a template affects all prompts.
        for step in sorted(paths_by_step[0].keys() & paths_by_step[1].keys())[:1]:
            recordings = [EpisodeFile(paths[step]) for paths in paths_by_step]
            rows = [{(row["source"], row["task"]): row["row"] for row in file.listing()} for file in recordings]
            for key in sorted(rows[0].keys() & rows[1].keys())[:_PROMPTS]:
                a, b = (file[row_numbers[key]].episode for file, row_numbers in zip(recordings, rows, strict=True))
                if not (a.turns and b.turns) or (a.task.messages, a.task.tools) != (b.task.messages, b.task.tools):
                    continue
                first_turns = [episode.turns[0] for episode in (a, b)]
                is_same = first_turns[0].messages == first_turns[1].messages
                if is_same and first_turns[0].prompt_ids.tolist() != first_turns[1].prompt_ids.tolist():
                    counts = " and ".join(str(len(turn.prompt_ids)) for turn in first_turns)
                    task = clipped(" ".join(key), lines=1, width=60)
                    counts_text = f"({task}: {counts} tokens)"
                    return f"different prompts for the same messages {counts_text}: another chat template or tokenizer"
    return ""


def _by_step(folder: Path) -> dict[int, dict[str, Any]]:
    metrics: dict[int, dict[str, Any]] = {}
    for row in metrics_of(folder):
        metrics.setdefault(row["step"], {}).update(row)
    return metrics


def _rewards(folder: Path) -> dict[int, Estimate]:
    """Return the mean reward of each recorded step over its groups."""
    mean_rewards = {}
    for step, kind, path in recorded_files(folder):
        if kind == "trained":
            groups: dict[int, list[float]] = {}
            for row in EpisodeFile(path).listing():
                if row["reward"] is not None:
                    groups.setdefault(row["group"], []).append(row["reward"])
            # Episodes of a group share their task, so only groups are independent values.
            mean_rewards[step] = mean_over_tasks(
                [sum(group_rewards) / len(group_rewards) for group_rewards in groups.values()]
            )
    return mean_rewards


def _parting(
    first: Mapping[int, Mapping[str, Any]],
    second: Mapping[int, Mapping[str, Any]],
    first_rewards: Mapping[int, Estimate],
    second_rewards: Mapping[int, Estimate],
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
    common = sorted(first_rewards.keys() & second_rewards.keys())
    signs = []
    for step in common:
        a, b = first_rewards[step], second_rewards[step]
        # Newcombe's interval of a difference (1998), from those of both.
        towards = (a.high - a.value, b.value - b.low) if b.value > a.value else (a.value - a.low, b.high - b.value)
        is_clear = abs(b.value - a.value) > math.hypot(*towards)
        # 1 or -1 for a clear difference and its direction, 0 for none.
        signs.append(math.copysign(is_clear, b.value - a.value))
    # Several steps in a row, on one side: among many steps, single ones differ by chance.
    for index, step in enumerate(common[: 1 - _CLEAR_STEPS]):
        if signs[index] and len({*signs[index : index + _CLEAR_STEPS]}) == 1:
            intervals = f"{_interval(first_rewards[step])} and {_interval(second_rewards[step])}"
            yield f"rewards are apart from step {step} on: {intervals}"
            return
    if first_rewards and second_rewards:
        yield f"rewards are in no {_CLEAR_STEPS} steps in a row apart by more than chance"


def _curves(*runs: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name in _CURVES:
        values = [
            [value for step in sorted(run) if (value := as_float(run[step].get(name))) is not None] for run in runs
        ]
        if any(values):
            yield (
                name,
                *(cell for curve in values for cell in (sparkline(curve, 24), number(curve[-1]) if curve else "")),
            )


def _scores(first: Path, second: Path) -> tuple[int, list[tuple[str, ...]]]:
    """Compare the last evaluation that both runs have, by set and source."""
    files = [
        {step: path for step, kind, path in recorded_files(folder) if kind == "evaluated"} for folder in (first, second)
    ]
    if not (common := files[0].keys() & files[1].keys()):
        return 0, []
    step = max(common)
    runs = []
    for paths in files:
        tasks: dict[tuple[str, str], dict[str, list[float]]] = {}
        for row in EpisodeFile(paths[step]).listing():
            if row["reward"] is not None:
                of_source = tasks.setdefault((row["set"], row["source"]), {})
                of_source.setdefault(row["task"], []).append(row["reward"])
        runs.append(
            {key: {task: sum(r) / len(r) for task, r in task_rewards.items()} for key, task_rewards in tasks.items()}
        )
    scores = []
    for key in sorted(runs[0].keys() | runs[1].keys()):
        a, b = runs[0].get(key, {}), runs[1].get(key, {})
        difference = ""
        # Paired by task, which leaves out the variance between tasks.
        if common_tasks := sorted(a.keys() & b.keys()):
            comparison = compare_paired([a[task] for task in common_tasks], [b[task] for task in common_tasks])
            interval = f"[{comparison.low:+.3f}, {comparison.high:+.3f}]"
            difference = f"{comparison.difference:+.3f}  {interval}  of {comparison.tasks} tasks"
        scores.append((" ".join(key), *(_interval(mean_over_tasks([*means.values()])) for means in (a, b)), difference))
    return step, scores


def _interval(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return ""
    # A single value outside 0 to 1 has no interval.
    bounds = f"  [{estimate.low:.3f}, {estimate.high:.3f}]" if math.isfinite(estimate.low) else ""
    return f"{estimate.value:.3f}{bounds}"


def _table(columns: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> Table:
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(Text(clipped(cell, lines=1, width=60)) for cell in row))
    return table


if __name__ == "__main__":
    launch(Config, main, shows_only=True)
