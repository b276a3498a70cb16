"""The page of a long run: how long it takes to write it and to open it in a browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.report import LEAST_REPEATS, Report
from forge_rl.look.page.report_file import write_page
from forge_rl.look.page.run_data import RunData
from forge_rl.metrics.episode_files import RecordedEpisode, write_episodes
from forge_rl.metrics.recorder import FOLDER
from forge_rl.metrics.vocabulary import write_vocabulary
from forge_rl.types import Episode, Score, Task, Turn
from tools.browser import Browser, find_chromium

_STEPS = 100
_GROUP_SIZE = 8
PAGE_EPISODES = _STEPS
"""The run has a multiple of so many episodes, the same number in each step."""
_WHOLE_EPISODES, _WHOLE_BYTES = 600, 24 << 20
"""Defaults of `forge-rl report`."""
_TOKENS = 40
_DRAWN_S = 0.2
"""Seconds in which a page that was opened draws; the browser's work before the next measurement."""


def measure_page(report: Report, folder: Path, episodes: int) -> None:
    """Measure `report_s`, the time to write a run's page, and the time to open it, from the start of the navigation
    until the first view is drawn: `page_open_s` with curves, `page_list_s` with the list of episodes."""
    if not find_chromium():
        print("page_open_s is not measured: there is no Chromium (apt-get install chromium)")
        return
    run = _long_run(folder / "run", episodes)
    page = folder / "page.html"
    began = time.perf_counter()
    write_page(page, [RunData(run)], episodes=_WHOLE_EPISODES, most_bytes=_WHOLE_BYTES)
    report.results["report_s"] = time.perf_counter() - began
    report.results["page_bytes"] = float(page.stat().st_size)
    opened: dict[str, list[float]] = {"curves": [], "episodes": []}
    with Browser() as browser:
        for repeat in range(1 + LEAST_REPEATS):
            for view, times in opened.items():
                tab = browser.open(f"{page.as_uri()}#{view}/0/")
                tab.wait_for("document.documentElement?.dataset.opened")
                if repeat:  # the first one reads the file from the disk
                    times.append(float(tab.value("document.documentElement.dataset.opened")) / 1e3)
                time.sleep(_DRAWN_S)
                tab.close()
    report.measure("page_open_s", opened["curves"])
    report.measure("page_list_s", opened["episodes"])


def _long_run(folder: Path, episodes: int) -> Path:
    """Write the folder of a run with so many episodes."""
    (folder / FOLDER).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": "model", "steps": _STEPS}))
    (folder / "versions.json").write_text("{}")
    drawn = np.random.default_rng(0)
    names = ["loss", "reward/mean", "entropy", "grad_norm", *(f"metric/{number}" for number in range(80))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, _STEPS + 1):
            values = zip(names, drawn.random(len(names)).tolist(), strict=True)
            file.write(json.dumps({"step": step, **dict(values)}) + "\n")
            records = _records(step, episodes // _STEPS, drawn)
            write_episodes(folder / FOLDER / f"{step:06d}-trained.parquet", records)
    write_vocabulary(folder / FOLDER, [f" word{token}".encode() for token in range(1000)])
    return folder


def _records(step: int, count: int, drawn: np.random.Generator) -> Iterator[RecordedEpisode]:
    for position in range(count):
        number = step * count + position // _GROUP_SIZE
        task = Task(
            id=f"tasks/{number}", source=f"source-{number % 4}", messages=({"role": "user", "content": "Why?"},)
        )
        ids = drawn.integers(0, 1000, _TOKENS)
        turn = Turn(
            prompt_ids=ids[:10],
            token_ids=ids,
            logprobs=-drawn.exponential(0.6, _TOKENS).astype(np.float32),
            versions=np.full(_TOKENS, step, np.int32),
            text=" ".join(f"word{token}" for token in ids),
            messages=task.messages,
        )
        score = Score(total=float(drawn.random()), answer=str(position))
        episode = Episode(task=task, turns=(turn,), score=score, seconds=float(drawn.exponential(3.0)))
        group, index = divmod(position, _GROUP_SIZE)
        advantages = np.full(_TOKENS, drawn.normal(), np.float32)
        yield RecordedEpisode(
            step=step, kind="trained", group=group, index=index, version=step, episode=episode, advantages=advantages
        )
