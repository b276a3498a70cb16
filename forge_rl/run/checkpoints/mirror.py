"""Copies of a run's checkpoints at an fsspec address, from which a run resumes whose folder is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from forge_rl.errors import CheckpointError
from forge_rl.metrics.logger import RunLog
from forge_rl.models.cache import Progress
from forge_rl.models.resolve import checkpoints_in
from forge_rl.run.checkpoints.files import MANIFEST, Checkpoint, Checkpoints
from forge_rl.run.records.started_from import MODELS
from forge_rl.system.folders import is_there, reading
from forge_rl.system.remote_folders import RemoteFolder
from forge_rl.system.terminal import clipped

SETTINGS = ("config.json", "versions.json")
"""Files of the run folder that are copied too, so that a run with other settings is refused."""
_BEST = "best"
_WRITER = "writer"
"""File at the address that names the process that copies there."""
_MOST_WRITER_BYTES = 1000
_STEP = re.compile(r"step-\d{6,12}")
_MOST_JSON_BYTES = 64 << 20
_MOST_FILES = 100_000


class CheckpointMirror:
    """Copies checkpoints to an address and back. Whoever can write there decides on the weights.

    A checkpoint's manifest is written last and removed first: without it, the copy does not count. The address belongs
    to the process that was the first to copy there since it started; others are refused, such as a controller that was
    cut off and believed lost, or another run that was given the same address.

        mirror = CheckpointMirror("s3://bucket/run")
        mirror.restore(folder, check_settings=check, tell=print, progress=show)  # before the run
        mirror.copy(checkpoints)  # after each save: new ones go there, and removed ones are removed

    Args:
        address: a folder in any of fsspec's file systems, which only this run writes to.

    Raises:
        CheckpointError: the address is of an unknown file system.
    """

    def __init__(self, address: str) -> None:
        self._files = RemoteFolder(address, flag="--checkpoint-mirror", error=CheckpointError)
        self._name = f"{secrets.token_hex(8)} process {os.getpid()} on {socket.gethostname()}".encode()
        self._writer: bytes | None = None
        """The process that copied there last when this one started, or this one; None before that is known."""

    def copy(self, checkpoints: Checkpoints) -> int:
        """Copy new checkpoints to the address, newest first, and remove old copies; returns the bytes written.

        As many of the newest copies stay as the run keeps checkpoints, and so does the best one. They stay even if the
        run's folder has lost these checkpoints, since it is repaired from the copies.

        Raises:
            OSError: a file cannot be written or read.
            CheckpointError: a checkpoint that was written again is damaged, or another process copies to the address.
        """
        local, names = {checkpoint.folder.name: checkpoint for checkpoint in checkpoints.all()}, self._folders()
        # An empty folder may have lost its checkpoints: nothing is removed on its account.
        if not local:
            return 0
        self._claim()
        # Before the checkpoints, none of which is restored without them.
        run = checkpoints.folder.parent
        for name in (*SETTINGS, *([MODELS] if is_there(run / MODELS) else [])):
            self._files.write(name, (run / name).read_bytes())
        complete = self._complete(names)
        copied_bytes = 0
        # Newest first: if the run ends during the copy, its latest steps are the ones that are safe.
        for name in sorted(local, key=_number, reverse=True):
            if name not in complete or self._is_stale(local[name]):
                copied_bytes += self._put(local[name])
        protected_names = set(sorted(complete | local.keys(), key=_number)[-checkpoints.keep :])
        if (best := checkpoints.best()) is not None:
            self._files.write(_BEST, best.folder.name.encode())
        else:
            protected_names.add(self._best())
        # The manifest goes first, so that a removal cut short leaves no copy that seems whole.
        for name in names - local.keys() - (protected_names & complete):  # also what a killed run left half written
            self._files.remove(f"{name}/{MANIFEST}")
            self._files.remove_folder(name)
        return copied_bytes

    def _claim(self) -> None:
        """Name this process as the one that copies to the address.

        Raises:
            CheckpointError: another one has begun to since this one started.
        """
        writer = self._last_writer()
        if self._writer not in (None, writer):
            raise CheckpointError(
                f"another run copies there, {clipped(writer.decode(errors='replace'), lines=1, width=200)}; give each "
                "run an address of its own"
            )
        if writer != self._name:
            self._files.write(_WRITER, self._name)
            self._writer = self._name

    def _last_writer(self) -> bytes:
        """Return the name of the process that copied there last; empty if there is none."""
        return self._files.read(_WRITER, _MOST_WRITER_BYTES) if self._files.exists(_WRITER) else b""

    def _is_stale(self, checkpoint: Checkpoint) -> bool:
        """Return whether the copy is from an earlier write of the same step; if so, remove its manifest.

        Raises:
            CheckpointError: the checkpoint is damaged, and may not replace the copy.
        """
        place, manifest = f"{checkpoint.folder.name}/{MANIFEST}", (checkpoint.folder / MANIFEST).read_bytes()
        if self._files.read(place, len(manifest)) == manifest:
            return False
        # A damaged checkpoint differs from its copy as well, and must not replace it: the copy is what repairs it.
        if damage := checkpoint.damage():
            raise CheckpointError(f"{checkpoint.folder} is damaged: {damage}")
        self._files.remove(place)
        return True

    def restore(
        self,
        folder: Path,
        *,
        check_settings: Callable[[Path], Sequence[str]],
        tell: Callable[[str], None],
        progress: Progress,
    ) -> None:
        """Copy the newest undamaged checkpoint and the best into a run's folder, unless it has a newer one; with them
        comes the record of the models that the run began with.

        Args:
            folder: the run's, locked.
            check_settings: called with a folder that holds the copied settings, if there are copies; raises an error if
                they belong to another run, and returns lines about permitted changes.
            tell: called with a line about each checkpoint that cannot be used.

        Raises:
            CheckpointError: the address cannot be read, or the disk lacks space.
            ForgeError: raised by `check_settings`.
        """
        checkpoints, staged = folder / "checkpoints", folder / ".restored"
        with reading(checkpoints):
            local = {path.name for path in checkpoints_in(checkpoints).values()}
        newest_step = max(map(_number, local), default=-1)

        # Files arrive in a folder next to the checkpoints and are verified there: a rename then shows them whole.
        def bring(name: str) -> bool:
            if damage := self._fetch(name, staged / "checkpoints" / name, progress):
                tell(f"the copy of {name} at --checkpoint-mirror cannot be used: {clipped(damage, lines=1, width=300)}")
                return False
            checkpoints.mkdir(exist_ok=True)
            (staged / "checkpoints" / name).rename(checkpoints / name)
            tell(f"{name} was copied from --checkpoint-mirror")
            return True

        try:
            shutil.rmtree(staged, ignore_errors=True)
            # A listing first: its errors say more of wrong credentials than those of a single file.
            copies = sorted(self._complete(self._folders()), key=_number, reverse=True)
            self._writer = self._last_writer()
            if not copies:
                return
            # `check_settings` refuses edited code only where there are checkpoints: let the folder seem to have one.
            (staged / "checkpoints" / copies[0]).mkdir(parents=True)
            for name in (*SETTINGS, *([MODELS] if self._files.exists(MODELS) else [])):
                self._get(PurePosixPath(name), staged / name, _MOST_JSON_BYTES)
            # Before it is known whether any is newer: the run's own would replace the copies of another run.
            lines = check_settings(staged)
            newer = [name for name in copies if _number(name) > newest_step]
            for line in lines if newer else ():
                tell(line)
            # Before any checkpoint: where there is one, the folder's record is taken for the run's.
            if newer and is_there(staged / MODELS):
                (staged / MODELS).replace(folder / MODELS)
            # The newest that is intact; older ones are only fetched if it is not.
            restored_name = next((name for name in newer if bring(name)), "")
            if restored_name and (best := self._best()) in {*copies} - {restored_name, *local}:
                bring(best)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"--checkpoint-mirror cannot be read: {clipped(str(error), lines=1, width=300)}",
                hint="check the address and its credentials, or leave the flag out",
            ) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _best(self) -> str:
        """Return the name of the best checkpoint, as a file at the address states it, or ""."""
        return self._files.read(_BEST, 100).decode(errors="replace") if self._files.exists(_BEST) else ""

    def _folders(self) -> set[str]:
        """Return the names of all checkpoints at the address, including incomplete ones."""
        return {name for name in self._files.names() if _STEP.fullmatch(name)}

    def _complete(self, names: set[str]) -> set[str]:
        return {name for name in names if self._files.exists(f"{name}/{MANIFEST}")}

    def _put(self, checkpoint: Checkpoint) -> int:
        name, copied_bytes = checkpoint.folder.name, 0
        manifest = (checkpoint.folder / MANIFEST).read_bytes()
        for inner, size in _listed(manifest):
            self._files.put(checkpoint.folder / inner, f"{name}/{inner}")
            copied_bytes += size
        self._files.write(f"{name}/{MANIFEST}", manifest)
        return copied_bytes

    def _fetch(self, name: str, folder: Path, progress: Progress) -> str:
        """Copy a checkpoint into a new folder; returns its damage, or "".

        Raises:
            CheckpointError: the disk lacks space.
        """
        folder.mkdir(exist_ok=True)
        try:
            self._get(PurePosixPath(name, MANIFEST), folder / MANIFEST, _MOST_JSON_BYTES)
            files = list(_listed((folder / MANIFEST).read_bytes()))
        except (ValueError, FileNotFoundError) as error:
            return str(error)
        total, copied_bytes = sum(size for _, size in files), 0
        if (free := shutil.disk_usage(folder).free) < total:
            raise CheckpointError(
                f"{name} of --checkpoint-mirror has {total / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in {folder}",
                hint="free space, or choose another --out",
            )
        for inner, size in files:
            progress(f"copying {name}", copied_bytes / max(1, total))
            (folder / inner).parent.mkdir(parents=True, exist_ok=True)
            try:
                # At most the size that the manifest states, so that a replaced file cannot fill the disk.
                self._get(PurePosixPath(name) / inner, folder / inner, size)
            except FileNotFoundError:
                return f"{inner} is missing"
            except ValueError as error:
                return str(error)
            copied_bytes += size
        return Checkpoint(step=_number(name), folder=folder).damage()

    def _get(self, inner: PurePosixPath, target: Path, max_bytes: int) -> None:
        """Copy a file of at most `max_bytes`.

        Raises:
            ValueError: it is larger.
        """
        if (size := self._files.size(str(inner))) > max_bytes:
            raise ValueError(f"{inner} has {size} bytes, more than the {max_bytes} expected")
        self._files.get(str(inner), target)


class MirrorTask:
    """Copies a run's checkpoints in a thread during the run. A failure is a warning; the next checkpoint retries it."""

    def __init__(self, mirror: CheckpointMirror, checkpoints: Checkpoints, log: RunLog) -> None:
        self._mirror, self._checkpoints, self._log = mirror, checkpoints, log
        self._again = False
        self._task: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Start to copy new checkpoints; if a copy is in progress, another one follows it."""
        self._again = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._copy())

    async def close(self) -> None:
        """Wait until the last checkpoint is copied."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _copy(self) -> None:
        while self._again:
            self._again = False
            try:
                copied_bytes = await asyncio.to_thread(self._mirror.copy, self._checkpoints)
            except Exception as error:
                # The run removed an old checkpoint while it was being copied: the next pass no longer lists it.
                if self._again and isinstance(error, FileNotFoundError):
                    continue
                cause = clipped(f"{type(error).__name__}: {error}", lines=1, width=300)
                self._log.warn(f"the checkpoint is not copied to --checkpoint-mirror: {cause}")
            else:
                self._log.event(f"checkpoints are copied to --checkpoint-mirror ({copied_bytes / 1e6:.0f} MB)")


def _number(name: str) -> int:
    return int(name.removeprefix("step-"))


def _listed(manifest: bytes) -> Iterator[tuple[PurePosixPath, int]]:
    """Yield the files of a manifest, which is not trusted, with their sizes.

    Raises:
        ValueError: it is not a manifest, or names a file outside its folder.
    """
    # Whoever writes at the address may name any path: one that leaves the folder could overwrite the user's files.
    try:
        entries: dict[str, Any] = json.loads(manifest)["files"]
        files = [(PurePosixPath(name), int(size)) for name, (size, _) in entries.items()]
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is malformed") from error
    for path, size in files:
        if path.is_absolute() or not path.parts or ".." in path.parts or size < 0 or "\0" in str(path):
            raise ValueError(f"{MANIFEST} names a file that is none of a checkpoint's")
    if len(files) > _MOST_FILES:
        raise ValueError(f"{MANIFEST} names {len(files)} files")
    yield from files
