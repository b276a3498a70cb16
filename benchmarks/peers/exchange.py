"""Files that benchmarks.conformance and its peers exchange: batches and results as arrays, jobs as JSON, no pickle.

A folder has jobs.json, a list of objects with the fields of Job, a file for each batch, and, once a peer has run, a
file for each job's result and versions.json. Peers import this in environments of their own: it needs only NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A call of one of a peer's functions with one batch."""

    function: str
    """The peer's function."""
    settings: Mapping[str, Any]
    """Its settings; each peer's module says which."""
    batch: str
    """Name of the batch."""


def write_jobs(folder: Path, jobs: Sequence[Job], batches: Mapping[str, Arrays]) -> None:
    """Write jobs and the batches that they name."""
    (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
    for name, arrays in batches.items():
        _write(folder / f"batch-{name}.npz", arrays)


def read_jobs(folder: Path) -> list[Job]:
    """Read the jobs of a folder."""
    return [Job(**fields) for fields in json.loads((folder / "jobs.json").read_text())]


def read_batch(folder: Path, name: str) -> dict[str, npt.NDArray[Any]]:
    """Read a batch."""
    return _read(folder / f"batch-{name}.npz")


def write_result(folder: Path, number: int, arrays: Arrays) -> None:
    """Write the result of a job."""
    _write(folder / f"result-{number}.npz", arrays)


def read_result(folder: Path, number: int) -> dict[str, npt.NDArray[Any]]:
    """Read the result of a job."""
    return _read(folder / f"result-{number}.npz")


def write_versions(folder: Path, packages: Sequence[str]) -> None:
    """Write the versions of a peer's packages."""
    (folder / "versions.json").write_text(json.dumps({name: version(name) for name in packages}))


def read_versions(folder: Path) -> dict[str, str]:
    """Read the versions of a peer's packages."""
    versions: dict[str, str] = json.loads((folder / "versions.json").read_text())
    return versions


def _write(path: Path, arrays: Arrays) -> None:
    named: dict[str, Any] = dict(arrays)
    np.savez(path, **named)


def _read(path: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
