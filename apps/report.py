"""Write a run's page: one HTML file with curves, episodes, tokens, groups and times, which needs no network.

forge-rl report runs/grpo-1a2b3c4d
forge-rl report runs/grpo-1a2b3c4d --compare runs/grpo-5e6f7a8b -o both.html
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from forge_rl.errors import ForgeError, check_flags
from forge_rl.look.page.report_file import write_page
from forge_rl.look.page.run_data import RunData
from forge_rl.run.launch import launch
from forge_rl.system.terminal import visible

from .compare import compared


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
        check_flags(self, "--", minimum={"episodes": 0, "most_mib": 0})


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
    num_whole, num_listed = write_page(
        out, runs, comparison_of(folders), episodes=config.episodes, most_bytes=config.most_mib * 2**20
    )
    size = out.stat().st_size / 2**20
    counts = f"{num_listed} episodes, {num_whole} of them whole"
    return f"wrote {visible(str(out))}: {size:.1f} MiB, {counts}; open it in a browser"


def comparison_of(folders: Sequence[Path]) -> dict[str, Any] | None:
    """Return how the second of two runs differs from the first; None for one run."""
    if len(folders) < 2:
        return None
    try:
        return compared(*folders)
    except ForgeError as error:  # a damaged file
        return {"lines": [error.message], "differences": [], "scores": [], "step": 0}


if __name__ == "__main__":
    launch(Config, main)
