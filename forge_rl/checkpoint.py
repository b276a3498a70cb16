"""Checkpoints of a run: written whole or not at all, the newest found again, old ones removed.

A checkpoint is `checkpoints/step-000012/` with `model/` (Hugging Face safetensors, tokenizer), `training/` (weights and
optimizer state in float32) and `controller.json`. It is written beside and renamed, so a folder of that name is whole.
`checkpoints/best` is a link to the one with the best score, where that is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from forge_rl.errors import CheckpointError

_NAME = re.compile(r"step-\d{6,}")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoint that is whole."""

    step: int
    folder: Path

    @property
    def model(self) -> Path:
        """Hugging Face folder, for transformers and vLLM."""
        return self.folder / "model"

    @property
    def training(self) -> Path:
        """Weights and optimizer state to continue from."""
        return self.folder / "training"

    def controller_state(self) -> dict[str, object]:
        """Read what the controller saved.

        Raises:
            CheckpointError: the file is missing or broken.
        """
        path = self.folder / "controller.json"
        try:
            state = json.loads(path.read_text())
            if not isinstance(state, dict):
                raise ValueError("it holds no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}",
                hint=f"delete {self.folder} to continue from the checkpoint before it",
            ) from error
        return state


class Checkpoints:
    """All checkpoints of a run, in a folder made when the first is written; the newest `keep` and the best stay.

    checkpoints = Checkpoints(Path("run/checkpoints"), keep=2)
    async with checkpoints.writing(12, {"step": 12}, bytes_needed=1 << 30) as folder:
        await trainer.save(folder, model=model)
    checkpoints.latest().model  # a Hugging Face folder
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._best = folder / "best"

    def all(self) -> list[Checkpoint]:
        """List the whole ones, oldest first."""
        paths = [path for path in self._folder.glob("step-*") if _NAME.fullmatch(path.name)]
        found = [Checkpoint(step=int(path.name.removeprefix("step-")), folder=path) for path in paths]
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    def latest(self) -> Checkpoint | None:
        """Return the newest whole one; None if there is none."""
        return next(reversed(self.all()), None)

    def best(self) -> Checkpoint | None:
        """Return the one that was marked as the best; None if there is none."""
        marked = self._best.readlink().name if self._best.is_symlink() else ""
        return next((checkpoint for checkpoint in self.all() if checkpoint.folder.name == marked), None)

    def mark_best(self, step: int | None) -> None:
        """Mark the checkpoint of this step, or none, as the best: a link that is changed whole or not at all.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        try:
            if step is None:
                self._best.unlink(missing_ok=True)
                return
            partial = self._best.with_name(".best.partial")
            partial.unlink(missing_ok=True)
            partial.symlink_to(f"step-{step:06d}")
            partial.replace(self._best)
            _sync(self._folder)
        except OSError as error:
            raise CheckpointError(
                f"{self._best} cannot be written: {error.strerror or error}", hint="free space, or choose another --out"
            ) from error

    @contextlib.asynccontextmanager
    async def writing(
        self, step: int, controller_state: dict[str, object], *, bytes_needed: int, spare: int | None = None
    ) -> AsyncIterator[Path]:
        """Write a checkpoint: the body fills the yielded folder's empty `model` and `training`.

        Args:
            controller_state: JSON, written beside.
            bytes_needed: roughly the bytes that the body writes; checked before anything is written.
            spare: step of an older checkpoint that stays for now, as its score is not known yet.

        Raises:
            CheckpointError: no space, or the folder cannot be written.
        """
        final = self._folder / f"step-{step:06d}"
        partial = self._folder / f".step-{step:06d}.partial"
        try:
            await _in_thread(lambda: self._begin(partial, bytes_needed))
            yield partial
            await _in_thread(lambda: self._commit(partial, final, controller_state, spare))
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self._folder}: {error.strerror or error}",
                hint="free space, or choose another --out; earlier checkpoints are as they were",
            ) from error

    def _begin(self, partial: Path, bytes_needed: int) -> None:
        """Remove what interrupted writes left, and make the folders to fill."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".step-*"):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(self._folder).free
        if free < bytes_needed:
            raise CheckpointError(
                f"a checkpoint takes {bytes_needed / 1e9:.2f} GB and {self._folder} has {free / 1e9:.2f} GB free",
                hint="free space, choose another --out, or lower --keep-checkpoints",
            )
        for part in ("model", "training"):
            (partial / part).mkdir(parents=True)

    def _commit(self, partial: Path, final: Path, controller_state: dict[str, object], spare: int | None) -> None:
        """Bring all to the disk, give it its name, and remove old checkpoints."""
        (partial / "controller.json").write_text(json.dumps(controller_state, indent=1) + "\n")
        for path in (partial, *partial.rglob("*")):  # so that the rename never outruns the data
            _sync(path)
        if final.exists():
            # Rename does not replace a full folder; between the two renames the older checkpoint still stands.
            final.rename(final.with_name(f".{final.name}.replaced"))
        partial.rename(final)
        _sync(self._folder)
        best = self.best()
        spared = {spare, best.step if best else None}
        old = [checkpoint.folder for checkpoint in self.all()[: -self._keep] if checkpoint.step not in spared]
        for folder in (*old, *self._folder.glob(".step-*")):
            shutil.rmtree(folder)


async def _in_thread(work: Callable[[], None]) -> None:
    """Run disk work in a thread, to its end also when cancelled: the next write may touch the same folders."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
