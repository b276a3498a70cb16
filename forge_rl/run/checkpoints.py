"""Checkpoints of a run: written atomically, verified when read, with old ones removed.

A checkpoint is `checkpoints/step-000012/` with `model/` (Hugging Face safetensors, tokenizer), `training/` (weights and
optimizer state in float32), `controller.json`, and `manifest.json`: size in bytes and XXH3 of each file. It is written
to a temporary folder and renamed, so a folder of that name was complete once; the manifest shows whether it still is.
`checkpoints/best` links to the checkpoint with the best score, if known.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from forge_rl.errors import CheckpointError
from forge_rl.models.resolve import checkpoints_in
from forge_rl.run.run_dir import read_object
from forge_rl.system.tasks import ended

MANIFEST = "manifest.json"
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
        """
        there = _files(self.folder)
        try:
            written = json.loads((self.folder / MANIFEST).read_text())["files"]
            expected = {str(name): (int(size), str(digest)) for name, (size, digest) in written.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{MANIFEST} cannot be read: {next(iter(str(error).splitlines()), type(error).__name__)}"
        for name, (size, _) in expected.items():
            if name not in there:
                return f"{name} is missing"
            if (found := there[name].lstat().st_size) != size:
                return f"{name} has {found} bytes, but was written with {size}"
        try:
            digests = _digests({name: there[name] for name in expected})
        except OSError as error:
            return f"{error.filename} cannot be read: {error.strerror or error}"
        changed = (name for name, (_, digest) in expected.items() if digests[name] != digest)
        return next((f"{name} has changed since it was written" for name in changed), "")

    @property
    def hint(self) -> str:
        """What to do if this checkpoint cannot be used."""
        return f"delete {self.folder} to resume from the previous checkpoint"

    def controller_state(self) -> dict[str, Any]:
        """Read the controller's saved state.

        Raises:
            CheckpointError: the file is missing or invalid.
        """
        return read_object(self.folder / "controller.json", error=CheckpointError, hint=self.hint)


class Checkpoints:
    """All checkpoints of a run, in a folder created with the first one; keeps the newest `keep` and the best.

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
        self._keep = keep
        self._keeps_best = keeps_best
        self._best = folder / "best"

    def all(self) -> list[Checkpoint]:
        """List all completely written checkpoints, oldest first."""
        return [Checkpoint(step=step, folder=path) for step, path in checkpoints_in(self.folder).items()]

    def latest(self) -> Checkpoint | None:
        """Return the newest completely written checkpoint; None if there is none."""
        return next(reversed(self.all()), None)

    def set_damaged_aside(self, tell: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest undamaged checkpoint; None if there is none.

        Renames newer, damaged ones, and calls `tell` with a line about each.

        Raises:
            CheckpointError: a damaged checkpoint cannot be renamed.
        """
        for checkpoint in reversed(self.all()):
            damage = checkpoint.damage()
            if not damage:
                return checkpoint
            folder = checkpoint.folder
            aside = next(
                path for n in itertools.count() if not (path := folder.with_name(f"{folder.name}.damaged-{n}")).exists()
            )
            try:
                folder.rename(aside)
            except OSError as error:
                raise CheckpointError(
                    f"{folder} is damaged ({damage}) and cannot be renamed: {error.strerror or error}",
                    hint="move it away to resume from the previous checkpoint",
                ) from error
            tell(f"{folder} is damaged, so the previous checkpoint is used: {damage}; it is kept as {aside.name}")
        return None

    def best(self) -> Checkpoint | None:
        """Return the checkpoint marked as best; None if there is none."""
        marked = self._best.readlink().name if self._best.is_symlink() else ""
        return next((checkpoint for checkpoint in self.all() if checkpoint.folder.name == marked), None)

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
                return
            partial = self._best.with_name(".best.partial")
            partial.unlink(missing_ok=True)
            partial.symlink_to(best.folder.name)
            partial.replace(self._best)
            _sync(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{self._best} cannot be written: {error.strerror or error}", hint="free space, or choose another --out"
            ) from error

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
            # Free its space for other files.
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
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover)
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
        (partial / "controller.json").write_text(json.dumps(controller_state, indent=1) + "\n")
        files = _files(partial)
        digests = _digests(files)
        manifest = {"files": {name: [path.stat().st_size, digests[name]] for name, path in files.items()}}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in (partial, *partial.rglob("*")):  # so that the rename never outruns the data
            _sync(path)
        if final.exists():
            # Rename cannot replace a non-empty folder; between the two renames the older checkpoint still exists.
            final.rename(final.with_name(f".{final.name}.replaced"))
        partial.rename(final)
        _sync(self.folder)
        best = self.best()
        spared = {unscored if self._keeps_best else None, best.step if best else None}
        old = [checkpoint.folder for checkpoint in self.all()[: -self._keep] if checkpoint.step not in spared]
        for folder in (*old, *self.folder.glob(".step-*")):
            shutil.rmtree(folder)


def _files(folder: Path) -> dict[str, Path]:
    """Map the name of each file of a checkpoint to its path, ignoring links."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {path.relative_to(folder).as_posix(): path for path in paths if path != folder / MANIFEST}


def _digests(files: dict[str, Path]) -> dict[str, str]:
    """Map each file to the XXH3 of its bytes, as 32 hexadecimal digits."""

    def digest(path: Path) -> str:
        found = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                found.update(piece)
        return found.hexdigest()

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
