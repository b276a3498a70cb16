"""Writes a run's page to a file that needs no server, with as many whole episodes as fit its bounds."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.look.page.document import closing, data_block, encoded, opening
from forge_rl.look.page.run_data import RunData


def write_page(
    out: Path,
    runs: Sequence[RunData],
    comparison: Mapping[str, Any] | None = None,
    *,
    episodes: int,
    most_bytes: float,
) -> tuple[int, int]:
    """Write the page of one or two runs, atomically.

    Args:
        comparison: how the second run differs from the first.
        episodes: maximum number of episodes to hold whole.
        most_bytes: their maximum size.

    Returns:
        The number of episodes that the page holds whole, and the number that it lists.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = out.with_name(f".{out.name}.partial")
    try:
        # Private like the run folder, whose texts it holds.
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            counts = _write(file, runs, comparison, episodes, most_bytes)
        partial.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):  # below a file that should be a folder, this fails too
            partial.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {error.strerror}", hint="choose another file with -o") from error
    return counts


def _write(
    file: IO[str], runs: Sequence[RunData], comparison: Mapping[str, Any] | None, episodes: int, room: float
) -> tuple[int, int]:
    data = [run.data() for run in runs]
    blocks, whole_counts = list[tuple[str, str]](), [0] * len(runs)
    for run_index, name, text in itertools.islice(_episodes(runs), episodes):
        # One that does not fit is left out, and smaller ones may still follow.
        if len(text) <= room:
            room -= len(text)
            whole_counts[run_index] += 1
            blocks.append((f"episode/{run_index}/{name}", text))
    listed = 0
    for run_data, count in zip(data, whole_counts, strict=True):
        total = sum(size for _, _, size in run_data["episodes"]["files"])
        listed += total
        run_data["whole"] = {"kept": count, "total": total}
    file.write(opening())
    file.write(data_block("data", encoded({"runs": data, "comparison": comparison})))
    for name, text in blocks:
        file.write(data_block(name, text))
    file.write(closing())
    return sum(whole_counts), listed


def _episodes(runs: Sequence[RunData]) -> Iterator[tuple[int, str, str]]:
    """Yield the run, name and JSON of episodes, the most telling first, of all runs in turn."""
    for names in itertools.zip_longest(*(run.sample() for run in runs)):
        for run_index, name in enumerate(names):
            if name is not None:
                try:
                    text = encoded(runs[run_index].episode(name))
                except ForgeError:
                    continue  # a damaged file, which the page names
                yield run_index, name, text
