"""Checkpoints of a run: written atomically, verified when read, with old ones removed.

A checkpoint is `checkpoints/step-000012/` with `model/` (Hugging Face safetensors, tokenizer), `training/` (weights and
optimizer state in float32), `controller.json`, and `manifest.json`: size in bytes and XXH3 of each file. It is written
to a temporary folder and renamed, so a folder of that name was complete once; the manifest shows whether it still is.
`checkpoints/best` links to the checkpoint with the best score, if known.

Manifest and controller's state name the format of a checkpoint, a number that increases when its files change.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from forge_rl.errors import CheckpointError
from forge_rl.models.resolve import checkpoints_in
from forge_rl.run.records.json_files import read_object, write_json
from forge_rl.system.folders import is_there, reading
from forge_rl.system.tasks import ended

MANIFEST = "manifest.json"
FORMAT = 2
"""Format of the checkpoints that are written. Format 1 named none."""
_LATEST = "last_checkpoint.json"
"""File of the run folder that names the newest checkpoint ever written: without it, a run whose checkpoints have gone
would silently start at step 0."""
_REPLACED = ".replaced"
_ASIDE = re.compile(r"step-\d{6,}\.damaged-\d+")
# Errors that mean absence. Any other, such as a file server that is away, says nothing about the file.
_ABSENT = (FileNotFoundError, NotADirectoryError)
_READ_BYTES = 8 << 20
_HASHING_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    folder: Path

    @property
    def model(self) -> Path:
        """Hugging Face folder, for transformers and vLLM."""
        return self.folder / "model"

    @property
    def training(self) -> Path:
        """Weights and optimizer state to resume from."""
        return self.folder / "training"

    @property
    def critic(self) -> Path:
        """Weights and optimizer state of the critic, if the run has one; its own `model` folder is next to them."""
        return self.folder / "critic" / "training"

    def damage(self) -> str:
        """Read all files and describe the first damage in one line; "" if they are as written.

        Detects damage by disks or copying, not tampering, as an attacker can replace the manifest.

        Raises:
            CheckpointError: a file cannot be read, which says nothing about its content; or the format is a newer one.
        """
        hint = f"repeat the command once it can be read; if its disk is broken, move {self.folder} away"
        with reading(self.folder, hint):
            files = _files(self.folder)
            # The file may hold anything after damage: whatever it lacks is damage too, and no error of this program.
            try:
                manifest = json.loads((self.folder / MANIFEST).read_text())
                _check_format(self.folder, manifest)
                expected = {str(name): (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
            except (*_ABSENT, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                return f"{MANIFEST} cannot be read: {next(iter(str(error).splitlines()), type(error).__name__)}"
            for name, (size, _) in expected.items():
                if name not in files:
                    return f"{name} is missing"
                if (bytes_now := files[name].lstat().st_size) != size:
                    return f"{name} has {bytes_now} bytes, but was written with {size}"
            # Names and sizes agree, which was found out without reading the files.
            digests = _digests({name: files[name] for name in expected})
            changed = (name for name, (_, digest) in expected.items() if digests[name] != digest)
            return next((f"{name} has changed since it was written" for name in changed), "")

    @property
    def hint(self) -> str:
        """What to do if this checkpoint cannot be used."""
        return f"delete {self.folder} to resume from the previous checkpoint"

    def controller_state(self) -> dict[str, Any]:
        """Read the controller's saved state, converted to the current format.

        Raises:
            CheckpointError: the file is missing or invalid, or of a newer format.
        """
        state = read_object(self.folder / "controller.json", error=CheckpointError, hint=self.hint)
        # One converter for each older format, applied in turn.
        for number in range(_check_format(self.folder, state), FORMAT):
            state = _CONVERTERS[number](state)
        return state


class Checkpoints:
    """All checkpoints of a run, in a folder created with the first one; keeps the newest `keep` and the best one.

    Args:
        keeps_best: mark the checkpoint with the best score, and keep it.

    checkpoints = Checkpoints(Path("run/checkpoints"), keep=2)
    async with checkpoints.writing(12, {"step": 12}, bytes_needed=1 << 30) as folder:
        await trainer.save(folder, model=model)
        await trainer.finish_save()
    checkpoints.latest().model  # a Hugging Face folder
    """

    def __init__(self, folder: Path, *, keep: int, keeps_best: bool = True) -> None:
        self.folder = folder
        self.keep = keep
        self._keeps_best = keeps_best
        self._best = folder / "best"
        self.unremoved = ""
        """Why the last write could not remove an old checkpoint; "" if it did."""
        with reading(folder):
            self._put_back()
            self._link_again()

    def all(self) -> list[Checkpoint]:
        """List all completely written checkpoints, oldest first.

        Raises:
            CheckpointError: the folder exists and cannot be read; the methods that follow raise it too.
        """
        with reading(self.folder):
            return [Checkpoint(step=step, folder=path) for step, path in checkpoints_in(self.folder).items()]

    def of_step(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step, whether it exists or not."""
        return Checkpoint(step=step, folder=self.folder / f"step-{step:06d}")

    def latest(self) -> Checkpoint | None:
        """Return the newest completely written checkpoint; None if there is none."""
        return next(reversed(self.all()), None)

    def check_new(self) -> None:
        """Check that no checkpoint was ever written here, before a run starts at step 0.

        Raises:
            CheckpointError: there was one, and none is left to resume from.
        """
        # The marker lies outside of the folder, so that it outlives the folder's loss.
        marker = self.folder.with_name(_LATEST)
        with reading(self.folder):
            names = os.listdir(self.folder) if is_there(self.folder) else []
            damaged_names = sorted(name for name in names if _ASIDE.fullmatch(name))
            if not damaged_names and not is_there(marker):
                return
        evidence = f"damaged ones are kept as {', '.join(damaged_names)}" if damaged_names else f"{marker} names one"
        raise CheckpointError(
            f"{self.folder} had checkpoints, and none is left to resume from ({evidence}): the run would start over",
            hint=f"put them back, or choose another --out; to start again here, delete {self.folder} and {marker}, and "
            "live.json, which has the live changes of that run",
        )

    def set_damaged_aside(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; None if there is none.

        Renames newer, damaged ones, and calls `tell` with a line about each.

        Raises:
            CheckpointError: a checkpoint cannot be read, or a damaged one cannot be renamed.
        """
        for checkpoint in reversed(self.all()):
            damage = checkpoint.damage()
            if not damage:
                return checkpoint
            folder = checkpoint.folder
            # Kept and not deleted: the name tells `check_new` that there were checkpoints, and the user may repair it.
            places = (folder.with_name(f"{folder.name}.damaged-{number}") for number in itertools.count())
            try:
                new_folder = next(place for place in places if not is_there(place))
                folder.rename(new_folder)
            except OSError as error:
                raise CheckpointError(
                    f"{folder} is damaged ({damage}) and cannot be renamed: {error.strerror or error}",
                    hint="move it away to resume from the previous checkpoint",
                ) from error
            tell(f"{folder} is damaged, so another checkpoint is used: {damage}; it is kept as {new_folder.name}")
        return None

    def best(self) -> Checkpoint | None:
        """Return the checkpoint marked as best; None if there is none."""
        with reading(self._best):
            best_name = self._best.readlink().name if self._best.is_symlink() else ""
        return next((checkpoint for checkpoint in self.all() if checkpoint.folder.name == best_name), None)

    def mark_best(self, scores: Mapping[int, float]) -> None:
        """Mark the checkpoint with the highest score by step, the earliest on a tie, by atomically replacing a link.

        Raises:
            CheckpointError: the folder is not writable.
        """
        if not self._keeps_best:
            return
        scored = [checkpoint for checkpoint in self.all() if checkpoint.step in scores]
        best = max(scored, key=lambda checkpoint: (scores[checkpoint.step], -checkpoint.step), default=None)
        try:
            if best is None:
                self._best.unlink(missing_ok=True)
            else:
                self._link(best)
        except OSError as error:
            raise CheckpointError(
                f"{self._best} cannot be written: {error.strerror or error}",
                hint="free space, choose another --out, or move it away if it is not a link",
            ) from error

    def _link(self, best: Checkpoint) -> None:
        # A link cannot be changed in place: a rename over it leaves readers the old one or the new one.
        partial = self._best.with_name(".best.partial")
        partial.unlink(missing_ok=True)
        partial.symlink_to(best.folder.name)
        partial.replace(self._best)
        _sync(self.folder)

    @contextlib.asynccontextmanager
    async def writing(
        self, step: int, controller_state: dict[str, object], *, bytes_needed: int, unscored: int | None = None
    ) -> AsyncIterator[Path]:
        """Write a checkpoint: the body fills the yielded folder's empty `model` and `training`.

        Args:
            controller_state: saved as JSON in `controller.json`.
            bytes_needed: approximate bytes that the body writes; free space is checked before anything is written.
            unscored: step whose score is not known yet; its checkpoint is kept for now, as it may be the best.

        Raises:
            CheckpointError: there is not enough space, or the folder is not writable.
        """
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f".step-{step:06d}.partial"
        try:
            await _in_thread(lambda: self._begin(partial, bytes_needed))
            yield partial
            await _in_thread(lambda: self._commit(partial, final, controller_state, unscored))
        except (OSError, CheckpointError) as error:
            # Free its space for other files, such as the log on a full disk.
            await _in_thread(lambda: shutil.rmtree(partial, ignore_errors=True))
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder}: {error.strerror or error}",
                hint="free space, or choose another --out; earlier checkpoints are unaffected",
            ) from error

    def _begin(self, partial: Path, bytes_needed: int) -> None:
        """Remove leftovers of interrupted writes, and create the folders to fill."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Before leftovers go: a step that was being replaced may exist only under its temporary name.
        self._put_back()
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # the next write tries again
        free = shutil.disk_usage(self.folder).free
        if free < bytes_needed:
            raise CheckpointError(
                f"a checkpoint needs {bytes_needed / 1e9:.2f} GB but {self.folder} has {free / 1e9:.2f} GB free",
                hint="free space, choose another --out, or lower --keep-checkpoints",
            )
        for part in ("model", "training"):
            (partial / part).mkdir(parents=True)

    def _commit(self, partial: Path, final: Path, controller_state: dict[str, object], unscored: int | None) -> None:
        """Flush everything to disk, rename the folder, and remove old checkpoints."""
        try:
            state = json.dumps({"format": FORMAT, **controller_state}, indent=1)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the state of the run is not JSON: {error}",
                hint="sources and kept objects must give numbers and texts",
            ) from error
        (partial / "controller.json").write_text(f"{state}\n")
        # The manifest is made last: it lists every other file as it will stay.
        files = _files(partial)
        digests = _digests(files)
        listed = {name: [path.stat().st_size, digests[name]] for name, path in files.items()}
        manifest = {"format": FORMAT, "forge_rl": _version(), "files": listed}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in (partial, *partial.rglob("*")):  # so that the rename never outruns the data
            _sync(path)
        if is_there(final):  # rename cannot replace a folder that is not empty
            final.rename(final.with_name(f".{final.name}{_REPLACED}"))
        try:
            partial.rename(final)
        except OSError:
            self._put_back()
            raise
        # The rename is on disk only once the folder's entries are.
        _sync(self.folder)
        # The checkpoint is complete: what fails from here on costs disk space or a warning, and not the checkpoint.
        self.unremoved = ""
        try:
            write_json(self.folder.with_name(_LATEST), {"checkpoint": final.name})
            self._remove_old(unscored)
        except (OSError, CheckpointError) as error:
            self.unremoved = str(error)

    def _remove_old(self, unscored: int | None) -> None:
        best = self.best()
        protected_steps = {unscored if self._keeps_best else None, best.step if best else None}
        for checkpoint in self.all()[: -self.keep]:
            # Renamed first: a process killed halfway through the removal would leave one that seems damaged.
            if checkpoint.step not in protected_steps:
                checkpoint.folder.rename(self.folder / f".{checkpoint.folder.name}.removed")
        for folder in self.folder.glob(".step-*"):
            shutil.rmtree(folder)

    def _put_back(self) -> None:
        """Restore the names of checkpoints whose replacement was interrupted by an error or a killed process."""
        for path in self.folder.glob(f".step-*{_REPLACED}"):
            name = path.name.removeprefix(".").removesuffix(_REPLACED)
            if not is_there(self.folder / name):
                path.rename(self.folder / name)

    def _link_again(self) -> None:
        """Make `best` a link where it is a copy of a checkpoint, as in a run folder copied by cp -rL or scp -r."""
        if self._best.is_symlink() or not is_there(self._best / MANIFEST):
            return
        manifest = (self._best / MANIFEST).read_bytes()
        for checkpoint in self.all():
            if is_there(checkpoint.folder / MANIFEST) and (checkpoint.folder / MANIFEST).read_bytes() == manifest:
                # To a name that the next write removes, as it does what is left of a killed process.
                self._best.rename(self.folder / f".{checkpoint.folder.name}.copied")
                self._link(checkpoint)
                return


def _check_format(folder: Path, header: Mapping[str, Any]) -> int:
    """Return the format that a file of a checkpoint states.

    Raises:
        CheckpointError: it is newer than this version of forge_rl.
    """
    number = header.get("format", 1)
    if isinstance(number, int) and 1 <= number <= FORMAT:
        return number
    writer = f", written by forge_rl {header['forge_rl']!s:.40}" if "forge_rl" in header else ""
    raise CheckpointError(
        f"{folder} has the format {number!r:.40}{writer}; forge_rl {_version()} reads formats 1 to {FORMAT}",
        hint="resume with the version of forge_rl that wrote it, or choose another --out",
    )


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("forge_rl")
    return "of unknown version"


def _stating_batches(state: dict[str, Any]) -> dict[str, Any]:
    """Convert a controller's state of format 1, in which only the rollouts state the number of batches."""
    rollouts = state.get("rollouts")
    return {**state, "format": 2, "batches": rollouts.get("batches") if isinstance(rollouts, dict) else None}


_CONVERTERS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _stating_batches}
"""Converters of a controller's state, each from the format that is its key to the next one."""


def _files(folder: Path) -> dict[str, Path]:
    """Map the name of each file of a checkpoint to its path, ignoring links.

    Raises:
        OSError: a folder or a file's status cannot be read; Path.rglob may take that for an absence.
    """

    # os.walk skips what it cannot list unless it is given a function that raises.
    def refuse(error: OSError) -> None:
        if not isinstance(error, _ABSENT):
            raise error

    walked = ((Path(place, name) for name in names) for place, _, names in os.walk(folder, onerror=refuse))
    paths = [path for path in sorted(itertools.chain.from_iterable(walked)) if stat.S_ISREG(path.lstat().st_mode)]
    return {path.relative_to(folder).as_posix(): path for path in paths if path != folder / MANIFEST}


def _digests(files: dict[str, Path]) -> dict[str, str]:
    """Map each file to the XXH3 of its bytes, as 32 hexadecimal digits."""

    def digest(path: Path) -> str:
        hasher = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_READ_BYTES):
                hasher.update(chunk)
        return hasher.hexdigest()

    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return dict(zip(files, threads.map(digest, files.values()), strict=True))


async def _in_thread(work: Callable[[], None]) -> None:
    """Run disk work in a thread, to its end even if cancelled: the next write may touch the same folders."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await ended(running)
        raise


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
