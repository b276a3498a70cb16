"""Keeps an evaluation's episodes whole, in a folder that `forge-rl show` and the page open as a run's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from forge_rl.errors import CheckpointError
from forge_rl.metrics.episode_files import write_episodes
from forge_rl.metrics.recorder import FOLDER, recorded_files
from forge_rl.metrics.vocabulary import write_vocabulary
from forge_rl.run.records.json_files import write_json
from forge_rl.run.records.recording import evaluated_episodes
from forge_rl.run.records.run_dir import as_json, versions
from forge_rl.system.folders import make_private, write_whole
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode


def keep_episodes(
    folder: Path, config: object, model: Path, results: Mapping[str, Sequence[Sequence[Episode]]]
) -> Path | None:
    """Write the episodes of an evaluation; the files of earlier calls stay.

    Args:
        folder: created, if it does not exist.
        config: settings of the evaluation.
        model: folder of the model, for the texts of its tokens.
        results: episodes of each task, by set.

    Returns:
        The file, whose step is the number of files before it; None without episodes.

    Raises:
        CheckpointError: it cannot be written.
    """
    records = list(evaluated_episodes(0, results))
    if not records:
        return None
    inside = folder / FOLDER
    make_private(inside, CheckpointError, hint="free space there, or choose another --out")
    step = len(recorded_files(folder))
    # A resumed evaluation adds a file of its own, so that what earlier calls wrote stays as it is.
    path = inside / f"{step:06d}-evaluated.parquet"
    try:
        settings = as_json(config)
        assert isinstance(settings, dict)
        write_json(folder / "config.json", settings | {"model": str(model)})
        write_json(folder / "versions.json", versions())
        write_vocabulary(inside, Tokenizer(model).pieces())
        write_episodes(path, [replace(record, step=step) for record in records])
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}", hint="set another --out"
        ) from error
    return path


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
