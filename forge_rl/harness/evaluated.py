"""Keeps an evaluation's episodes whole, in a folder that `forge-rl show` and the page open as a run's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forge_rl.errors import CheckpointError
from forge_rl.metrics.episode_files import RecordedEpisode, write_episodes
from forge_rl.metrics.recorder import FOLDER, recorded_files
from forge_rl.metrics.vocabulary import write_vocabulary
from forge_rl.run.records.json_files import write_json
from forge_rl.run.records.recording import evaluated_episodes
from forge_rl.run.records.run_dir import as_json, versions
from forge_rl.system.folders import make_private, write_whole
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode

_LEAST_TASKS = 8
"""Tasks whose episodes are written first."""


class EpisodeKeeper:
    """Writes the episodes of an evaluation while it runs, so that one that is killed loses its last ones only.

        keeper = EpisodeKeeper(out / "smollm2-135m", config, model)
        evaluation = Evaluation(sets, episodes=1, sampling=sampling, version=0, on_task=keeper.add)
        ...
        await keeper.close()

    A file, whose step is the number of files before it, holds all of them. It is written after eight tasks, and again
    whenever a quarter more have ended: about a fifth of them are lost at most, and all writes together take about five
    times as long as the last one.

    Args:
        folder: created with the first episodes, if it does not exist. The files of earlier evaluations in it stay.
        config: settings of the evaluation.
        model: folder of the model, for the texts of its tokens.
    """

    def __init__(self, folder: Path, config: object, model: Path) -> None:
        self.episodes: dict[str, list[Sequence[Episode]]] = {}
        """Episodes of each task that has ended, by set."""
        self._folder, self._config, self._model = folder, config, model
        self._step: int | None = None
        self._num_ended = self._num_written = 0
        self._writing: asyncio.Task[None] | None = None

    def add(self, name: str, episodes: Sequence[Episode]) -> None:
        """Add the episodes of a task of a set, and begin to write all episodes if there are enough new ones."""
        self.episodes.setdefault(name, []).append(episodes)
        self._num_ended += 1
        is_idle = self._writing is None or self._writing.done()
        if is_idle and self._num_ended >= self._num_written + max(_LEAST_TASKS, self._num_written // 4):
            self._num_written = self._num_ended
            self._writing = asyncio.create_task(self._try_to_write())

    async def close(self) -> None:
        """Write all episodes.

        Raises:
            CheckpointError: they cannot be written.
        """
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self._write()

    async def _try_to_write(self) -> None:
        # There may be room again at the end, when `close` raises the error otherwise.
        with contextlib.suppress(CheckpointError):
            await self._write()

    async def _write(self) -> None:
        # Copied, as tasks end while the thread writes.
        records = list(evaluated_episodes(0, {name: list(tasks) for name, tasks in self.episodes.items()}))
        if records:
            await asyncio.to_thread(self._write_records, records)

    def _write_records(self, records: Sequence[RecordedEpisode]) -> None:
        inside = self._folder / FOLDER
        try:
            if self._step is None:
                make_private(inside, CheckpointError, hint="free space there, or choose another --out")
                settings = as_json(self._config)
                assert isinstance(settings, dict)
                write_json(self._folder / "config.json", settings | {"model": str(self._model)})
                write_json(self._folder / "versions.json", versions())
                write_vocabulary(inside, Tokenizer(self._model).pieces())
                self._step = len(recorded_files(self._folder))
            path = inside / f"{self._step:06d}-evaluated.parquet"
            write_episodes(path, [replace(record, step=self._step) for record in records])
        except OSError as error:
            raise CheckpointError(
                f"the episodes in {inside} cannot be written: {error.strerror or error}", hint="set another --out"
            ) from error


def keep_scores(folder: Path, scores: Mapping[str, Mapping[str, float]]) -> None:
    """Write the scores of all sets as the metrics of the folder's only step.

    Raises:
        CheckpointError: they cannot be written.
    """
    row: dict[str, object] = {"step": 0}
    row |= {
        f"eval/{name}/{metric}": value for name, set_scores in scores.items() for metric, value in set_scores.items()
    }
    try:
        write_whole(folder / "metrics.jsonl", json.dumps(row) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{folder / 'metrics.jsonl'} cannot be written: {error.strerror or error}", hint="set another --out"
        ) from error
