"""Write a run's page: one HTML file with curves, episodes, tokens, groups and times, which needs no network.

forge-rl report runs/grpo-1a2b3c4d
forge-rl report runs/grpo-1a2b3c4d --compare runs/grpo-5e6f7a8b -o both.html
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import tyro

from apps.compare import compared
from forge_rl.errors import ConfigError, ForgeError, check_flags
from forge_rl.run.launch import launch
from forge_rl.run.page.document import closing, data_block, encoded, opening
from forge_rl.run.page.run_data import RunData
from forge_rl.system.terminal import visible


@dataclass(frozen=True, kw_only=True)
class Config:
    """Write a run's page to one HTML file."""

    run: tyro.conf.Positional[Path]
    """Run folder, of a live or ended run."""
    compare: Path | None = None
    """Another run folder, to show next to it."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """File to write; by default the run's name with .html, here."""
    episodes: int = 600
    """Maximum number of episodes that the file holds whole. All are listed; of each step the worst, the best, a random
    and failed ones are whole first. `forge-rl dashboard` shows any of them."""
    most_mib: float = 24.0
    """Maximum size of the whole episodes in MiB."""

    def __post_init__(self) -> None:
        check_flags(self, "--", least={"episodes": 0, "most_mib": 0})


async def main(config: Config) -> None:
    """Write the page."""
    print(await asyncio.to_thread(write, config))


def write(config: Config) -> str:
    """Write the page, atomically; returns a line about it.

    Raises:
        ConfigError: it is not a run folder, or the file cannot be written.
    """
    folders = [config.run, *([config.compare] if config.compare is not None else [])]
    out = config.out or Path(f"{config.run.resolve().name}.html")
    runs = [RunData(folder) for folder in folders]
    partial = out.with_name(f".{out.name}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            kept, listed = _write(file, config, runs, folders)
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {error.strerror}", hint="choose another file with -o") from error
    size = out.stat().st_size / 2**20
    return f"wrote {visible(str(out))}: {size:.1f} MiB, {listed} episodes, {kept} of them whole; open it in a browser"


def _write(file: IO[str], config: Config, runs: Sequence[RunData], folders: Sequence[Path]) -> tuple[int, int]:
    """Write the document; returns the number of whole and of listed episodes."""
    data = page_data(runs, folders)
    blocks, kept = list[tuple[str, str]](), [0] * len(runs)
    room = config.most_mib * 2**20
    for which, name, text in itertools.islice(_episodes(runs), config.episodes):
        if len(text) <= room:
            room -= len(text)
            kept[which] += 1
            blocks.append((f"episode/{which}/{name}", text))
    listed = 0
    for of_one, count in zip(data["runs"], kept, strict=True):
        total = sum(size for _, _, size in of_one["episodes"]["files"])
        listed += total
        of_one["whole"] = {"kept": count, "total": total}
    file.write(opening())
    file.write(data_block("data", encoded(data)))
    for name, text in blocks:
        file.write(data_block(name, text))
    file.write(closing())
    return sum(kept), listed


def _episodes(runs: Sequence[RunData]) -> Iterator[tuple[int, str, str]]:
    """Yield the run, name and JSON of episodes, those that matter most first, of all runs in turn."""
    for names in itertools.zip_longest(*(run.sample() for run in runs)):
        for which, name in enumerate(names):
            if name is not None:
                try:
                    text = encoded(runs[which].episode(name))
                except ForgeError:
                    continue  # a damaged file, which the page names
                yield which, name, text


def page_data(runs: Sequence[RunData], folders: Sequence[Path]) -> dict[str, Any]:
    """Return what the page shows of one or two runs, without whole episodes."""
    comparison = None
    if len(folders) == 2:
        try:
            comparison = compared(*folders)
        except ForgeError as error:  # a damaged file
            comparison = {"lines": [error.message], "differences": [], "scores": [], "step": 0}
    return {"runs": [run.data() for run in runs], "comparison": comparison}


if __name__ == "__main__":
    launch(Config, main)
