"""Resolves a path, pattern or folder to files of tasks, and opens each by its kind."""

from __future__ import annotations

import difflib
import glob
import json
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from forge_rl.data.sources.columnar import open_arrow
from forge_rl.data.sources.derived import decompressed
from forge_rl.data.sources.lines import DelimitedLines, JSONLines, open_json
from forge_rl.data.sources.tables import Table
from forge_rl.errors import TaskError
from forge_rl.models.bundled import default_cache

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
"""Supported file suffixes; JSON lines may also be compressed."""
TABLES = "tables"
"""Folder in a cache for copies and indexes of files."""
_SHARD = re.compile(r"(?P<before>.*-)(?P<number>[0-9]{3,8})-of-(?P<all>[0-9]{3,8})(?P<after>[^-]*)")
_MOST_SHARDS = 100_000
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
"""Metadata files that `datasets` writes to a folder."""


def is_path(name: str) -> bool:
    """Return True if a name is a path and not a data set: it exists, or can only be a path."""
    return (
        name.startswith(("/", "./", "../", "~"))
        or any(letter in name for letter in "*?[")
        or _suffix(Path(name)) in SUFFIXES
        or ("/" in name and Path(name).expanduser().exists())
    )


def find_files(name: str, *, split: str = "") -> list[Path]:
    """List the files of a path, sorted: the file itself, the matches of a pattern, or the files in a folder.

    Args:
        split: split to read of a folder that `DatasetDict.save_to_disk` wrote.

    Raises:
        TaskError: no file matches, or one has an unsupported suffix.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path, split)
    if path.exists():
        # An existing file comes first: its name may contain characters of patterns.
        files = [path]
    else:
        files = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
        if not files and glob.has_magic(name):
            raise TaskError(f"no file matches {name!r}", hint=f"the current folder is {Path.cwd()}")
        if not files:
            raise TaskError(f"no such file: {name}", hint=_near(path))
        _check_shards(files, str(path))
    if unknown := [file for file in files if _suffix(file) not in SUFFIXES]:
        raise TaskError(
            f"{unknown[0]} has an unsupported suffix", hint=f"give it one of the suffixes {', '.join(SUFFIXES)}"
        )
    return files


def open_tables(paths: Sequence[Path], cache: Path | None = None) -> list[Table]:
    """Open files by the kind that their suffixes indicate.

    Args:
        cache: folder for copies of compressed files and for indexes of large ones; by default in the user's cache.

    Raises:
        TaskError: a file cannot be read.
    """
    return [_open(path, cache or default_cache() / TABLES) for path in paths]


def _open(path: Path, cache: Path) -> Table:
    try:
        if not path.exists():
            raise TaskError(f"the file {path} is missing", hint="fetch it, or write the folder again")
        if not path.is_file():
            raise TaskError(
                f"{path} is not a regular file", hint="give a file, a folder or a pattern such as data/*.jsonl"
            )
        if path.stat().st_size == 0:
            raise TaskError(f"{path} is empty", hint="leave it out")
        if path.suffix in COMPRESSIONS:
            return JSONLines(path, cache, text=decompressed(path, cache, COMPRESSIONS[path.suffix]))
        match _suffix(path):
            case ".csv":
                return DelimitedLines(path, cache, "")
            case ".tsv":
                return DelimitedLines(path, cache, "\t")
            case ".parquet" | ".feather" | ".arrow":
                return open_arrow(path, cache)
            case ".json":
                return open_json(path, cache)
        return JSONLines(path, cache)
    except OSError as error:
        raise TaskError(
            f"{path} cannot be read: {error.strerror or error}", hint="check the file and its permissions"
        ) from error


def _suffix(path: Path) -> str:
    """Return the suffix that indicates the kind, without the compression suffix of JSON lines."""
    # "x.jsonl.gz" counts as .jsonl, but "x.csv.gz" as .gz, which is not supported.
    inner = Path(path.stem).suffix.lower()
    return inner if path.suffix in COMPRESSIONS and inner in (".jsonl", ".ndjson") else path.suffix.lower()


def _check_shards(files: Sequence[Path], pattern: str = "") -> None:
    """Refuse files named as shards, such as train-00000-of-00003.parquet, of which one is missing.

    Args:
        pattern: only names that match this were asked for.

    Raises:
        TaskError: names the missing shards.
    """
    # A missing shard would silently train on a part of the data set.
    existing = {str(path) for path in files}
    for path in files:
        if (name := _SHARD.fullmatch(path.name)) is None or int(name["all"]) > _MOST_SHARDS:
            continue
        width = len(name["number"])
        names = [f"{name['before']}{n:0{width}}-of-{name['all']}{name['after']}" for n in range(int(name["all"]))]
        paths = [str(path.with_name(file_name)) for file_name in names]
        # With a pattern, shards that it does not match are left out on purpose.
        missing = [shard for shard in paths if shard not in existing and (not pattern or fnmatch(shard, pattern))]
        if missing:
            raise TaskError(
                f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing[:3])}"
                + (", ..." if len(missing) > 3 else ""),
                hint="fetch them, or name the files that are there one by one",
            )


def _in_folder(folder: Path, split: str) -> list[Path]:
    """List the files in a folder, which must all be of one kind."""
    # Folders that `datasets` wrote list their own splits and files; any other folder is searched.
    if (splits_file := folder / "dataset_dict.json").is_file():
        splits = _read_names(splits_file, "splits")
        if split not in splits:
            problem = f"has no split {split!r}" if split else "has several splits"
            raise TaskError(f"{folder} {problem}", hint=f"add :split=NAME, one of {', '.join(splits)}")
        return _in_folder(folder / split, "")
    if (state := folder / "state.json").is_file():
        return [folder / Path(name).name for name in _read_names(state, "_data_files")]
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and _suffix(path) in SUFFIXES and path.name not in _NOT_ROWS and path.name[0] != "."
    )
    kinds = sorted({_suffix(path) for path in files})
    if not files:
        raise TaskError(f"the folder {folder} has no file of tasks", hint=f"put files there: {', '.join(SUFFIXES)}")
    if len(kinds) > 1:
        raise TaskError(
            f"the folder {folder} has files of several kinds: {', '.join(kinds)}",
            hint=f"select one kind with a pattern such as {folder}/*{kinds[0]}",
        )
    _check_shards(files)
    # Of a copy of a data set's repository, in which each configuration has a folder, such as gsm8k's main and socratic.
    by_name: dict[str, list[Path]] = {}
    for path in files:
        if _SHARD.fullmatch(path.name):
            by_name.setdefault(path.name, []).append(path.parent)
    if folders := next((folders for folders in by_name.values() if len(folders) > 1), []):
        names = ", ".join(str(path.relative_to(folder)) for path in folders[:5]) + ", ..." * (len(folders) > 5)
        raise TaskError(
            f"the folder {folder} holds several configurations of a data set, or several data sets: {names}",
            hint=f"name one of these folders, or all files by a pattern such as {folder}/**/*{kinds[0]}",
        )
    return files


def _read_names(path: Path, key: str) -> list[str]:
    """Read a list of split or file names from a metadata file that `datasets` wrote."""
    try:
        entries = json.loads(path.read_bytes())[key]
        return [str(entry["filename"] if isinstance(entry, dict) else entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TaskError(f"{path} cannot be read: {error}", hint="rewrite the folder with save_to_disk") from error


def _near(path: Path) -> str:
    """Describe what exists near a missing file, as a hint."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}; the current folder is {Path.cwd()}"
    names = [name for name in os.listdir(folder) if _suffix(Path(name)) in SUFFIXES]
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or sorted(names)[:5]
    return f"{folder.resolve()} has {', '.join(close)}" if close else f"{folder.resolve()} has no file of tasks"
