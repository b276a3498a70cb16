"""Files of tasks: what a path, a pattern or a folder means, and which kind each file is of."""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path

from forge_rl.data.sources import columnar, delimited, jsonl
from forge_rl.data.sources.tables import Table
from forge_rl.errors import TaskError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
"""Ends of the names of files that are read; JSON lines may be compressed besides."""
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
"""Files of `datasets` that describe the others in a folder."""


def is_path(name: str) -> bool:
    """Tell a path of files from the name of a data set: it exists, or looks like nothing else."""
    return (
        name.startswith(("/", "./", "../", "~"))
        or any(letter in name for letter in "*?[")
        or _suffix(Path(name)) in SUFFIXES
        or ("/" in name and Path(name).expanduser().exists())
    )


def find_files(name: str, *, split: str = "") -> list[Path]:
    """List the files that a path means: itself, what a pattern matches, or those in a folder, sorted.

    Args:
        split: of a folder that `DatasetDict.save_to_disk` wrote.

    Raises:
        TaskError: there is none, or none of a kind that can be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path, split)
    if path.exists():
        found = [path]
    else:
        found = [Path(one) for one in sorted(glob.glob(str(path), recursive=True)) if Path(one).is_file()]
        if not found and glob.has_magic(name):
            raise TaskError(f"no file matches {name!r}", hint=f"the current folder is {Path.cwd()}")
        if not found:
            raise TaskError(f"no such file: {name}", hint=_near(path))
    if unknown := [one for one in found if _suffix(one) not in SUFFIXES]:
        raise TaskError(
            f"{unknown[0]} is of no kind that can be read", hint=f"give it one of the suffixes {', '.join(SUFFIXES)}"
        )
    return found


def open_tables(paths: Sequence[Path]) -> list[Table]:
    """Open files, each by the kind that its suffix says.

    Raises:
        TaskError: one cannot be read.
    """
    return [_open(path) for path in paths]


def _open(path: Path) -> Table:
    try:
        if not path.is_file():
            raise TaskError(f"{path} is no file", hint="name a file, a folder or a pattern such as data/*.jsonl")
        if path.stat().st_size == 0:
            raise TaskError(f"{path} is empty", hint="leave it out")
        suffix = _suffix(path)
        if suffix in (".csv", ".tsv"):
            return delimited.Delimited(path, "\t" if suffix == ".tsv" else ",")
        if suffix == ".parquet":
            return columnar.Parquet(path)
        if suffix in (".arrow", ".feather"):
            return columnar.Arrow(path)
        if path.suffix in COMPRESSIONS:
            return jsonl.Compressed(path, COMPRESSIONS[path.suffix])
        return jsonl.open_json(path) if suffix == ".json" else jsonl.JSONLines(path)
    except OSError as error:
        raise TaskError(
            f"{path} cannot be read: {error.strerror or error}", hint="check the file and who may read it"
        ) from error


def _suffix(path: Path) -> str:
    """End of a name that says the kind, without that of a compression of JSON lines."""
    inner = Path(path.stem).suffix.lower()
    return inner if path.suffix in COMPRESSIONS and inner in (".jsonl", ".ndjson") else path.suffix.lower()


def _in_folder(folder: Path, split: str) -> list[Path]:
    """List the files of a folder, which must be of one kind."""
    if (described := folder / "dataset_dict.json").is_file():
        splits = _read_names(described, "splits")
        if split not in splits:
            seen = f"has no split {split!r}" if split else "has several splits"
            raise TaskError(f"{folder} {seen}", hint=f"add :split=NAME, one of {', '.join(splits)}")
        return _in_folder(folder / split, "")
    if (state := folder / "state.json").is_file():
        return [folder / Path(name).name for name in _read_names(state, "_data_files")]
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and _suffix(path) in SUFFIXES and path.name not in _NOT_ROWS and path.name[0] != "."
    )
    kinds = sorted({_suffix(path) for path in found})
    if not found:
        raise TaskError(f"the folder {folder} holds no file of tasks", hint=f"put files there: {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise TaskError(
            f"the folder {folder} holds files of several kinds: {', '.join(kinds)}",
            hint=f"name those that are meant, such as {folder}/*{kinds[0]}",
        )
    return found


def _read_names(path: Path, key: str) -> list[str]:
    """Read a list of names, or of files, from what `datasets` wrote beside its files."""
    try:
        listed = json.loads(path.read_bytes())[key]
        return [str(each["filename"] if isinstance(each, dict) else each) for each in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{path} cannot be read: {error}", hint="write the folder anew with save_to_disk") from error


def _near(path: Path) -> str:
    """Say what there is where a file was looked for."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}; the current one is {Path.cwd()}"
    names = [one for one in os.listdir(folder) if _suffix(Path(one)) in SUFFIXES]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or sorted(names)[:5]
    return f"{folder.resolve()} has {', '.join(close)}" if close else f"{folder.resolve()} has no file of tasks"
