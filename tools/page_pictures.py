"""Take the documentation's pictures of runs' pages, in headless Chromium.

python -m tools.page_pictures FOLDER/runs   # of the runs that python -m tools.record_runs FOLDER has made
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from apps import report
from forge_rl.look.page.run_data import RunData
from tools.browser import Browser

FOLDER = Path(__file__).parent.parent / "docs" / "pictures" / "page"
WIDE, HIGH, PHONE = (1440, 900), (1440, 1130), (390, 844)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Take the pictures of runs' pages."""

    runs: tyro.conf.Positional[Path]
    """Folder of the runs."""


@dataclass(frozen=True)
class Picture:
    """A place on a page."""

    run: str
    """Name of the run."""
    place: str
    """What follows # in the address; {name} stands for the episode."""
    size: tuple[int, int] = WIDE
    """Width and height in pixels."""
    dark: bool = False
    score: Callable[[dict[str, Any]], float] = lambda episode: 0.0
    """Which episode is shown: the one of the highest value, and of these the latest."""
    target: str = ""
    """Selector of an element that is scrolled to, and that the mouse moves to."""


def _called(episode: dict[str, Any]) -> float:
    """Prefer episodes of several calls, of which one failed and the last answer is right."""
    calls = [call for turn in episode["turns"] for call in turn["calls"]]
    return len(calls) + 2.0 * any(call["error"] for call in calls) + (episode["reward"] or 0.0)


def _learned(episode: dict[str, Any]) -> float:
    """Prefer right answers that the trainer saw."""
    return (episode["reward"] or 0.0) + 2.0 * (episode["turns"][0]["gaps"] is not None)


def _played(episode: dict[str, Any]) -> float:
    """Prefer episodes of many turns, and of these those that were won."""
    return len(episode["turns"]) + (episode["reward"] or 0.0)


_TOKENS = ".stream:last-child .token:nth-child(4)"
PICTURES = {
    "curves": Picture("sums", "curves/0/"),
    "episodes": Picture("mixed", "episodes/0/?order=worst&kind=trained"),
    "conversation": Picture("mixed", "episode/0/{name}", score=_called, target=".conversation > :last-child"),
    "tokens": Picture("agent", "episode/0/{name}?view=tokens&colour=logprob", HIGH, score=_learned, target=_TOKENS),
    "groups": Picture("mixed", "groups/0/"),
    "timeline": Picture("mixed", "timeline/0/"),
    "data": Picture("mixed", "tasks/0/", dark=True),
    "faults": Picture("failed", "faults/0/"),
    "compare": Picture("sums", "compare/0/"),
    "phone-curves": Picture("sums", "curves/0/", PHONE, dark=True),
    "phone-conversation": Picture("guess", "episode/0/{name}", PHONE, score=_played),
    "phone-tokens": Picture(
        "agent", "episode/0/{name}?view=tokens&colour=advantage", PHONE, score=_learned, target=".token:nth-child(4)"
    ),
}


def main(config: Config, folder: Path = FOLDER) -> None:
    """Write all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as pages, Browser() as browser:
        for name, picture in PICTURES.items():
            run = config.runs / picture.run
            page = Path(pages, f"{name}.html")
            other = config.runs / "wrong" if "compare" in picture.place else None
            report.write(report.Config(run=run, compare=other, out=page, episodes=2000))
            place = picture.place.format(name=best(run, picture.score)) if "{name}" in picture.place else picture.place
            width, height = picture.size
            tab = browser.open(f"{page.as_uri()}#{place}", width=width, height=height, dark=picture.dark)
            tab.wait_for("document.documentElement?.dataset.opened")
            if picture.target:
                tab.value(f"document.querySelector('{picture.target}').scrollIntoView({{block: 'nearest'}})")
                tab.move_to(f"document.querySelector('{picture.target}')")
            time.sleep(0.5)  # charts are drawn when they come on the screen
            tab.picture(folder / f"{name}.webp", kind="webp")
            assert not tab.problems, tab.problems
            tab.close()
            print(f"{name}.webp: {(folder / f'{name}.webp').stat().st_size / 1e3:.0f} kB", flush=True)


def best(run: Path, value: Callable[[dict[str, Any]], float]) -> str:
    """Return the name of a trained episode of the highest value."""
    data = RunData(run)
    names = [name for name in data.sample() if "-trained-" in name]
    return max(names, key=lambda name: (value(data.episode(name)), int(name.split("-")[0]), name))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
