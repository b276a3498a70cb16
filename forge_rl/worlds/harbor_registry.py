"""Data sets of Harbor's registry by name: their tasks are fetched by git, each at its recorded commit, and kept.

The registry is a JSON list of data sets with `name`, `version` and `tasks`; a task has `name`, `git_url`,
`git_commit_id` and `path`, its folder in the repository (https://harborframework.com/docs/datasets).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from forge_rl.errors import ConfigError
from forge_rl.flags.texts import suggest
from forge_rl.sandbox import RepositoryStore, SandboxError
from forge_rl.system.folders import make_private

REGISTRY = "https://raw.githubusercontent.com/laude-institute/harbor/main/registry.json"
_REGISTRY_BYTES, _REGISTRY_S = 64 << 20, 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_VERSION_PARTS = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class RegistryTask:
    """The location of a task, according to the registry."""

    name: str
    repository: str
    commit: str
    """Full hash."""
    path: str
    """Folder in the repository."""


def is_registry_name(text: str) -> bool:
    """Return whether the argument of `harbor:` names a data set instead of a folder: NAME or NAME@VERSION."""
    return re.fullmatch(r"[\w.-]+(@[\w.-]+)?", text) is not None and not Path(text).exists()


def dataset_folder(name: str, *, cache: Path, registry: str = REGISTRY) -> Path:
    """Return the folder with the tasks of a data set, which the first use fetches.

    An existing folder is complete, and needs no network. Its name has a digest of the registry's entry, so that a
    changed entry gets another folder. A data set without a version stays the one that was first fetched until the file
    NAME-*.json in the cache is deleted.

    Args:
        name: NAME, for the newest version, or NAME@VERSION.
        cache: folder for data sets and their repositories.
        registry: URL, or a file, of the registry.

    Raises:
        ConfigError: there is no such data set, it is malformed, or it cannot be fetched.
    """
    cache = cache.expanduser().absolute()
    make_private(cache, ConfigError, deep=False)
    # Registries may give one name to different data sets.
    record = cache / f"{name}-{hashlib.sha256(registry.encode()).hexdigest()[:8]}.json"
    entry = json.loads(record.read_text()) if record.is_file() else find_dataset(name, _registry(registry))
    tasks = _tasks(name, entry)
    digest = hashlib.sha256(repr(tasks).encode()).hexdigest()[:16]
    folder = cache / f"{name}-{digest}"
    if not folder.is_dir():
        _fetch(tasks, folder)
    _write(record, json.dumps(entry))
    return folder


def find_dataset(name: str, datasets: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a data set by NAME, for its newest version, or NAME@VERSION.

    Raises:
        ConfigError: there is none; lists similar names.
    """
    dataset, _, version = name.partition("@")
    named = [entry for entry in datasets if entry.get("name") == dataset]
    if not named:
        names = {str(entry.get("name")) for entry in datasets}
        raise ConfigError(
            f"Harbor's registry has no data set {dataset!r}",
            hint=f"{suggest(dataset, names, 'data sets')}; or a folder",
        )
    versions = {str(entry.get("version", "")): entry for entry in named}
    if version and version not in versions:
        raise ConfigError(
            f"the data set {dataset} has no version {version!r}", hint=f"versions: {', '.join(sorted(versions))}"
        )
    return versions[version or max(versions, key=_version_key)]


def _version_key(version: str) -> tuple[bool, list[int], str]:
    """Order versions: "head" last, numbers by value."""
    return version == "head", [int(part) for part in _VERSION_PARTS.findall(version)], version


def _registry(location: str) -> list[Mapping[str, Any]]:
    hint = "try again with a network, name a copy as registry=FILE, or the tasks' folder as harbor:FOLDER"
    try:
        if location.startswith("https://"):
            with urllib.request.urlopen(location, timeout=_REGISTRY_S) as response:
                content = response.read(_REGISTRY_BYTES + 1)
        else:
            with Path(location).expanduser().open("rb") as file:
                content = file.read(_REGISTRY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Harbor's registry {location} cannot be read: {error}", hint=hint) from None
    try:
        datasets = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"Harbor's registry {location} is not JSON: {error}", hint=hint) from None
    if not isinstance(datasets, list) or not all(isinstance(entry, dict) for entry in datasets):
        raise ConfigError(f"Harbor's registry {location} is not a list of data sets", hint=hint)
    return datasets


def _tasks(name: str, entry: Mapping[str, Any]) -> list[RegistryTask]:
    """Read the tasks of a data set."""
    tasks = []
    try:
        for row in entry["tasks"]:
            task = RegistryTask(
                name=str(row.get("name") or PurePosixPath(row["path"]).name),
                repository=str(row["git_url"]),
                commit=str(row["git_commit_id"]),
                path=str(row["path"]),
            )
            _check(task)
            tasks.append(task)
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"Harbor's registry has an unreadable entry for {name}: {error!r:.200}",
            hint="a task there has git_url, git_commit_id and path",
        ) from None
    # A task's name is its folder in the data set.
    if len({task.name for task in tasks}) < len(tasks) or not tasks:
        raise ConfigError(f"{name} has {'two tasks of one name' if tasks else 'no tasks'}", hint="name another version")
    return tasks


def _check(task: RegistryTask) -> None:
    """Refuse a task whose commit could change, or whose path leads elsewhere."""
    path = PurePosixPath(task.path)
    if not _COMMIT.fullmatch(task.commit):
        raise ConfigError(
            f"the task {task.name!r:.80} is at {task.commit!r:.80}, which is not a commit's full hash",
            hint="fix the registry: a branch's content may change",
        )
    if path.is_absolute() or ".." in path.parts or "/" in task.name or task.name in ("", ".", ".."):
        raise ConfigError(
            f"the task {task.name!r:.80} has the path {task.path!r:.200}, which is not inside its repository",
            hint="fix the registry",
        )


def _fetch(tasks: Sequence[RegistryTask], folder: Path) -> None:
    """Copy each task out of its repository's commit into a folder, which appears when it is complete."""
    store = RepositoryStore(folder.parent / "repositories")
    # One checkout for all tasks of a commit.
    commits: dict[tuple[str, str], list[RegistryTask]] = {}
    for task in tasks:
        commits.setdefault((task.repository, task.commit), []).append(task)

    async def copy(target: Path) -> None:
        for (repository, commit), of_commit in commits.items():
            async with store.checkout(repository, commit) as checkout:
                for task in of_commit:
                    await asyncio.to_thread(_copy, checkout.folder, task, target)

    # In the same folder, so that the rename below is a single step.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as partial:
        target = Path(partial) / "tasks"
        target.mkdir()
        try:
            with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
                thread.submit(lambda: asyncio.run(copy(target))).result()
        except SandboxError as error:
            raise ConfigError(f"the tasks cannot be fetched: {error.message}", hint=error.hint) from None
        try:
            target.rename(folder)
        except OSError:
            if not folder.is_dir():  # not made by another process meanwhile
                raise


def _copy(checkout: Path, task: RegistryTask, target: Path) -> None:
    # Resolved: a link in the repository may lead out of the checkout, even if the path has no `..`.
    source = (checkout / task.path).resolve()
    if not source.is_relative_to(checkout.resolve()) or not (source / "task.toml").is_file():
        raise ConfigError(
            f"{task.repository} at {task.commit} has no task {task.path!r:.200}", hint="name another version"
        )
    # A link out of the folder would lead whatever reads the task to other files of this machine.
    for path in source.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(source):
            raise ConfigError(
                f"{task.name}: {path.relative_to(source)} is a link out of the task's folder", hint="it may do harm"
            )
    shutil.copytree(source, target / task.name, symlinks=True)
    for path in (target / task.name, *(target / task.name).rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | 0o200)  # checkouts are read-only


def _write(path: Path, text: str) -> None:
    handle, partial = tempfile.mkstemp(prefix=".partial-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(partial).replace(path)
