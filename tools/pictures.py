"""Draw the pictures of the README and the site.

    python -m tools.pictures processes timeline experts
    python -m tools.pictures demo --run runs/grpo-1a2b3c4d   # of a `make demo`
    python -m tools.pictures methods   # from docs/figures/methods.json

`timeline` runs the real scheduler and rollouts on a virtual clock, with the staged engines of benchmarks.schedules.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib as mpl
import tyro

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch

from benchmarks.staged_services import (
    HEAVY_TAILED,
    Printed,
    StagedEnvironment,
    StagedGenerator,
    StagedSource,
    StagedTokenizer,
)
from benchmarks.virtual_time import run
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.engines.expert_plan import plan_experts
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.services.completion import ResumableCompletion

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
Picture = Literal["processes", "timeline", "experts", "demo", "methods"]
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
_TRAINING = "#d9d9d9"
_ENGINES, _BUDGET, _GROUPS, _EPISODES, _BATCHES = 4, 4, 16, 4, 3
_TRAIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Draw the pictures of the README and the site."""

    pictures: Annotated[tuple[Picture, ...], tyro.conf.Positional] = ("processes", "timeline", "experts")
    """Pictures to draw."""
    run: Path | None = None
    """Run folder for `demo`."""
    report: Path = FOLDER.parent / "figures" / "methods.json"
    """Report of benchmarks.methods for `methods`: a picture of all its methods, and one of each."""


def processes(axes: Axes) -> None:
    """Draw the controller, its services, and what travels between them."""
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 52)
    axes.axis("off")

    def box(x: float, y: float, wide: float, high: float, title: str, text: str, colour: str) -> None:
        axes.add_patch(
            FancyBboxPatch(
                (x, y), wide, high, boxstyle="round,pad=0.3", facecolor=colour, edgecolor="#444444", alpha=0.9
            )
        )
        axes.text(x + wide / 2, y + high - 3, title, ha="center", va="center", weight="bold", fontsize=10)
        axes.text(x + wide / 2, y + (high - 5) / 2, text, ha="center", va="center", fontsize=8)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str, position: tuple[float, float]) -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#444444"})
        axes.text(*position, text, ha="center", va="center", fontsize=8, color="#444444")

    box(
        30, 37, 40, 13, "Controller", "the recipe: roll out, train, publish\nscheduler, mixture, checkpoints", "#fdf2d0"
    )
    box(1, 17, 20, 12, "Trainer", "torchtitan: FSDP2,\nTP, CP, EP", "#dbe7f5")
    box(27, 17, 20, 12, "Generator", "vLLM engines", "#dbe7f5")
    box(53, 17, 20, 12, "Reward", "functions, verifiers,\njudges, models", "#e2f0d9")
    box(79, 17, 20, 12, "Environment", "tools, worlds,\nadapters", "#e2f0d9")
    box(5, 1, 38, 10, "Weight store", "versions in shared memory, RDMA between hosts", "#eee3f3")
    box(53, 1, 46, 10, "Gateway", "OpenAI and Anthropic API for agents; records exact tokens", "#f7dede")
    for x in (11, 37, 63, 89):
        arrow((50 + (x - 50) * 0.35, 36.5), (x, 29.6), "", (0, 0))
    arrow((12, 16.6), (16, 11.6), "publish", (8.5, 14))
    arrow((33, 11.6), (36, 16.6), "load, attest", (41.5, 13.5))
    arrow((56, 11.6), (45, 16.6), "", (0, 0))


class _Watched(StagedGenerator):
    """Staged engines that record when they decode each episode."""

    def __init__(self) -> None:
        super().__init__(engines=_ENGINES, budget=_BUDGET)
        self.spans: list[tuple[float, float, int]] = []
        """Start and end in seconds, and the episode's decoding milliseconds, which identify it."""

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(super().decode(completion, engine=engine))
        key, open_at = int(completion.prompt_ids[0]), None
        while not waiting.done():
            now_s = loop.time()
            if self._paused and open_at is not None:
                self.spans.append((open_at, now_s, key))
                open_at = None
            elif not self._paused and open_at is None:
                open_at = now_s
            await asyncio.wait([waiting], timeout=1.0)
        if open_at is not None:
            self.spans.append((open_at, loop.time(), key))
        await waiting


async def _simulate(kind: Literal["synchronous", "pipelined"]) -> tuple[_Watched, dict[int, int], list[float]]:
    """Return the engines, each episode's batch by its milliseconds, and the start of each training phase."""
    loop = asyncio.get_running_loop()
    generator, trained = _Watched(), 0
    tokenizer: Any = StagedTokenizer()
    environment = StagedEnvironment(kinds=HEAVY_TAILED, turn_s=1e9, tool_s=1.0, seed=3)
    mixture = Mixture({k.name: StagedSource(k) for k in HEAVY_TAILED}, {k.name: k.share for k in HEAVY_TAILED})
    scheduler = Scheduler(
        ScheduleConfig(kind=kind, max_lag=2, max_episodes=1 << 30),
        groups=_GROUPS,
        episodes=_EPISODES,
        tasks=ResumableTaskStream(mixture),
        clock=loop.time,
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, generator, tokenizer),
        EpisodeRunner(tokenizer, environment, None, clock=loop.time),  # type: ignore[arg-type]  # the environments score
        devices=DeviceHandover(generator, clock=loop.time),
        version=lambda: trained,
        seed=0,
        listener=Printed(),
    )
    batch_of: dict[int, int] = {}
    began: list[float] = []
    for number in range(_BATCHES):
        batch = await rollouts.next_batch()
        batch_of |= {int(episode.turns[0].prompt_ids[0]): number for episode in batch.episodes}
        began.append(loop.time())
        await asyncio.sleep(_TRAIN_S)
        trained += 1
        generator.load(trained)
    await rollouts.close()
    return generator, batch_of, began


def timeline(above: Axes, below: Axes) -> None:
    """Draw the use of each decode slot in the first batches, synchronous and pipelined."""
    ends = []
    for axes, kind in ((above, "synchronous"), (below, "pipelined")):
        generator, batch_of, began = run(_simulate(kind))  # type: ignore[arg-type]
        free: list[float] = [0.0] * (_ENGINES * _BUDGET)
        slot_of: dict[int, int] = {}
        for start, end, key in sorted(generator.spans):
            if start >= began[-1]:
                continue
            slot = slot_of.get(key, -1)
            if slot < 0 or free[slot] > start:
                slot = min(range(len(free)), key=lambda index: (free[index] > start, index))
            slot_of[key], free[slot] = slot, end
            batch = batch_of.get(key, _BATCHES)
            axes.broken_barh([(start / 60, (end - start) / 60)], (slot, 0.85), color=_COLOURS[batch % len(_COLOURS)])
        for train_start in began:
            axes.axvspan(train_start / 60, (train_start + _TRAIN_S) / 60, color=_TRAINING, zorder=0)
        axes.set_title(
            f"{kind}: {_BATCHES} batches in {(began[-1] + _TRAIN_S) / 60:.0f} minutes", fontsize=10, loc="left"
        )
        axes.set_ylabel("decode slot")
        axes.set_yticks([])
        ends.append((began[-1] + _TRAIN_S) / 60)
    below.set_xlabel("minutes")
    above.set_xlim(0, max(ends))
    patches = [Patch(color=_COLOURS[n], label=f"batch {n + 1}") for n in range(_BATCHES)]
    patches += [Patch(color=_COLOURS[_BATCHES], label="later batches"), Patch(color=_TRAINING, label="training")]
    above.legend(handles=patches, fontsize=7, ncol=6, loc="lower right", bbox_to_anchor=(1.0, 1.12), frameon=False)


def experts(left: Axes, right: Axes) -> None:
    """Draw which rows of which experts each rank computes, plain and as planned."""
    load = np.array([300, 300, 10, 10, 10, 10, 10, 10])
    ranks = 4
    planned = plan_experts(load, ranks=ranks).rows
    plain = np.zeros_like(planned)
    plain[np.arange(8) // 2, np.arange(8)] = load
    colours = mpl.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for axes, rows, title in ((left, plain, "plain"), (right, planned, "least loaded")):
        below = np.zeros(ranks)
        for expert in range(len(load)):
            label = f"expert {expert}"
            axes.bar(range(ranks), rows[:, expert], bottom=below, color=colours[2 * expert], label=label, width=0.7)
            below += rows[:, expert]
        axes.axhline(load.sum() / ranks, color="#444444", linestyle=":", linewidth=1)
        axes.set_title(title)
        axes.set_xticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    left.set_ylabel("rows (dotted: the mean)")
    right.legend(fontsize=7, loc="upper right")


def demo(axes: Axes, folder: Path) -> None:
    """Draw the reward of each batch and the held-out scores of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    if not rewards:
        raise SystemExit(f"error: {folder} has no rewards")
    summary = json.loads((folder / "summary.json").read_text())
    axes.plot(*zip(*rewards, strict=True), marker="o", color=_COLOURS[0], label="mean reward of the training batch")
    scores = [(0, summary["score_before"]), (summary["steps"], summary["score_after"])]
    axes.plot(*zip(*scores, strict=True), "D", color=_COLOURS[1], label="score on 64 held-out questions")
    axes.set_xlabel("step")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)


def method(axes: Axes, row: dict[str, Any]) -> None:
    """Draw each seed's reward of each batch, and its held-out score before and after."""
    for colour, curve in zip(_COLOURS, row["runs"], strict=False):
        steps = range(1, len(curve["rewards"]) + 1)
        axes.plot(steps, curve["rewards"], color=colour, linewidth=1.2)
        axes.plot([0, len(steps)], [curve["before"], curve["after"]], "D", color=colour, markersize=4)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.set_title(f"{row['method']}  {row['gain']:+.2f}", fontsize=8, loc="left")
    axes.tick_params(labelsize=7)


def methods(report: Path, folder: Path) -> None:
    """Draw a picture of each method in a report, and one of all."""
    rows = json.loads(report.read_text())["rows"]
    (folder / "methods").mkdir(exist_ok=True)
    for row in rows:
        figure, axes = plt.subplots(figsize=(4.5, 2.4), layout="constrained")
        method(axes, row)
        axes.set_xlabel("step", fontsize=8)
        axes.legend(
            handles=[
                Line2D([], [], color="#444444", label="reward of the batch"),
                Line2D([], [], color="#444444", marker="D", linestyle="", label="held-out score"),
            ],
            fontsize=7,
            loc="lower right",
        )
        _write(figure, folder / "methods" / f"{row['method']}.svg")
    columns = 6
    high = math.ceil(len(rows) / columns)
    size = (1.9 * columns, 1.35 * high + 0.2)
    figure, grid = plt.subplots(
        high, columns, figsize=size, sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for index, axes in enumerate(grid.flat):
        method(axes, rows[index]) if index < len(rows) else axes.set_axis_off()
    _write(figure, folder / "methods.svg")


def _write(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)
    print(f"wrote {path.name}")


def main(config: Config, folder: Path = FOLDER) -> None:
    """Draw and write the pictures."""
    mpl.rcParams["svg.hashsalt"] = "forge_rl"  # the same picture, the same bytes
    random.seed(0)
    for name in config.pictures:
        if name == "methods":
            with mpl.rc_context({"svg.fonttype": "none"}):  # text as text: half the size, in 40 files
                methods(config.report, folder)
            continue
        if name == "experts":
            figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
            experts(*axes)
        elif name == "timeline":
            figure, axes = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
            timeline(*axes)
        else:
            figure, axes = plt.subplots(figsize=(9, 4.7) if name == "processes" else (7, 3), layout="constrained")
            if name == "processes":
                processes(axes)
            elif config.run is None:
                raise SystemExit("error: demo needs --run FOLDER, the folder of a finished run")
            else:
                demo(axes, config.run)
        _write(figure, folder / f"{name}.svg")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
