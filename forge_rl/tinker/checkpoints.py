"""Checkpoints on disk: adapters in PEFT's format, by the API's tinker:// paths."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import shutil
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from forge_rl.errors import CheckpointError
from forge_rl.gateway.errors import ApiError
from forge_rl.system.folders import write_whole

CheckpointKind = Literal["weights", "sampler_weights"]
_TYPES = {"weights": "training", "sampler_weights": "sampler"}
_RECORD = "checkpoint.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODEL = re.compile(r"[A-Za-z0-9-]{1,80}:train:[0-9]{1,9}")
_MOST_METADATA = 16384
Record = TypeVar("Record", "AdapterRecord", "AdapterCheckpoint")


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """A training's record on disk, which outlives the training if it leaves a checkpoint."""

    model_id: str
    tenant: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    created: str
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterCheckpoint:
    """A saved adapter."""

    model_id: str
    kind: CheckpointKind
    name: str
    seq: int
    """Sequence number, among its adapter's requests, of the request that saved it."""
    updates: int
    """Number of optimizer steps behind the weights."""
    time: str
    size_bytes: int
    user_metadata: Mapping[str, str] | None = None
    expires_at: str | None = None
    is_unnamed: bool = False
    """True if its client gave it no name, but samples from it at once."""

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def is_expired(self) -> bool:
        """True once its time to live is over."""
        return self.expires_at is not None and datetime.datetime.fromisoformat(self.expires_at) < _now()

    def card(self) -> dict[str, object]:
        """Return its description in the API's listings."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": _TYPES[self.kind],
            "time": self.time,
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """How to save a checkpoint."""

    kind: CheckpointKind
    name: str
    seq: int
    updates: int
    ttl_s: int | None = None
    user_metadata: Mapping[str, str] | None = None
    overwrite: bool = False
    is_unnamed: bool = False


class CheckpointStore:
    """Trainings and their checkpoints in a folder.

        store = CheckpointStore(out, max_checkpoints=1000)
        path = await store.save(record, SaveSettings(kind="weights", name="final", seq=9, updates=4), write)

    Args:
        max_checkpoints: maximum number of checkpoints of a tenant.
    """

    def __init__(self, folder: Path, *, max_checkpoints: int) -> None:
        self._folder = folder / "models"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._max_checkpoints = max_checkpoints

    def folder(self, model_id: str) -> Path:
        """Return a training's folder."""
        assert _MODEL.fullmatch(model_id), "the server made it"
        return self._folder / model_id

    def add(self, record: AdapterRecord) -> None:
        """Record a new training."""
        folder = self.folder(record.model_id)
        folder.mkdir(exist_ok=True)
        write_whole(folder / "model.json", json.dumps(asdict(record)).encode())

    def records(self, tenant: str | None = None) -> list[AdapterRecord]:
        """Return the trainings of a tenant, or of all, oldest first; warns of those whose files cannot be read."""
        records = []
        for path in self._folder.glob("*/model.json"):
            try:
                record = _read(AdapterRecord, path)
            except CheckpointError as error:
                # Its tenant is unknown, and other tenants' trainings must still be listed.
                warnings.warn(f"a training is left out: {error}", stacklevel=2)
                continue
            if tenant in (None, record.tenant):
                records.append(record)
        return sorted(records, key=lambda record: record.created)

    def record(self, model_id: str, tenant: str) -> AdapterRecord:
        """Return a tenant's training.

        Raises:
            ApiError: there is none.
            CheckpointError: it cannot be read.
        """
        path = self._folder / model_id / "model.json"
        # Ids come from clients; the pattern keeps the path inside of the folder.
        if _MODEL.fullmatch(model_id) and path.is_file():
            record = _read(AdapterRecord, path)
            # Another tenant's training is answered like one that does not exist.
            if record.tenant == tenant:
                return record
        raise ApiError(404, f"there is no training {model_id[:100]!r}", code="not_found")

    def holds(self, model_id: str) -> bool:
        """Return whether there is or was a training of this id."""
        return (self.folder(model_id) / "model.json").is_file()

    def checkpoints(self, model_id: str) -> list[AdapterCheckpoint]:
        """Return a training's checkpoints, oldest first, and delete expired ones."""
        checkpoints = []
        for path in self.folder(model_id).glob(f"*/*/{_RECORD}"):
            if not _NAME.fullmatch(path.parent.name):  # being written, or cut off by a kill
                continue
            try:
                # The record is written last in a folder that is renamed when it is whole: where it is, so is all else.
                checkpoint = _read(AdapterCheckpoint, path)
            except FileNotFoundError:  # deleted meanwhile
                continue
            except CheckpointError as error:
                # Its tenant must still get the others, and be able to save more.
                warnings.warn(f"a checkpoint is left out: {error}", stacklevel=2)
                continue
            # No timer deletes them: they go when they are next listed.
            if checkpoint.is_expired:
                shutil.rmtree(path.parent, ignore_errors=True)
            else:
                checkpoints.append(checkpoint)
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.time)

    def all_of(self, tenant: str) -> Iterator[AdapterCheckpoint]:
        """Yield all checkpoints of a tenant."""
        for record in self.records(tenant):
            yield from self.checkpoints(record.model_id)

    def find(self, path: str, tenant: str) -> tuple[AdapterRecord, AdapterCheckpoint, Path]:
        """Return the training, the checkpoint and the folder of a tenant's tinker:// path.

        Raises:
            ApiError: the path names no checkpoint, or an expired one.
            CheckpointError: it cannot be read.
        """
        parts = path.removeprefix("tinker://").split("/") if path.startswith("tinker://") else []
        if len(parts) == 3 and parts[1] in _TYPES and _NAME.fullmatch(parts[2]):
            record = self.record(parts[0], tenant)
            folder = self.folder(parts[0]) / parts[1] / parts[2]
            if (folder / _RECORD).is_file():
                checkpoint = _read(AdapterCheckpoint, folder / _RECORD)
                if not checkpoint.is_expired:
                    return record, checkpoint, folder
        raise ApiError(404, f"there is no checkpoint {path[:200]!r}", param="path", code="not_found")

    def forget_empty(self, model_id: str) -> None:
        """Forget a training that has ended and has no checkpoint."""
        folder = self.folder(model_id)
        if not any(folder.glob(f"*/*/{_RECORD}")):
            shutil.rmtree(folder, ignore_errors=True)

    async def delete(self, path: str, tenant: str) -> None:
        """Delete a checkpoint.

        Raises:
            ApiError: there is none.
        """
        _, _, folder = self.find(path, tenant)
        await asyncio.to_thread(shutil.rmtree, folder)

    async def save(
        self, record: AdapterRecord, settings: SaveSettings, write: Callable[[Path], Awaitable[None]]
    ) -> AdapterCheckpoint:
        """Write a checkpoint completely or not at all; if this request or a later one has written it, return that one.

        Args:
            write: writes the adapter into a folder.

        Raises:
            ApiError: the name is malformed or taken, or the tenant has too many checkpoints.
            CheckpointError: the checkpoint of this name cannot be read.
            OSError: it cannot be written.
        """
        if not _NAME.fullmatch(settings.name):
            raise ApiError(400, f"the name {settings.name[:100]!r} is not letters, digits, . _ and -", param="path")
        if settings.ttl_s is not None and not 60 <= settings.ttl_s <= 10 * 366 * 86400:
            raise ApiError(400, f"ttl_seconds is {settings.ttl_s}", param="ttl_seconds")
        if len(json.dumps(dict(settings.user_metadata or {}))) > _MOST_METADATA:
            raise ApiError(400, f"user_metadata is longer than {_MOST_METADATA} letters", param="user_metadata")
        folder = self.folder(record.model_id) / settings.kind / settings.name
        current = _read(AdapterCheckpoint, folder / _RECORD) if (folder / _RECORD).is_file() else None
        if current is not None and current.seq >= settings.seq:  # the request is computed again after a failure
            return current
        if current is not None and not current.is_expired:
            if not settings.overwrite:
                raise ApiError(400, f"there is a checkpoint {current.path} already", param="path")
        # Counting reads a file for each checkpoint, so that it is left to a thread.
        elif len(await asyncio.to_thread(lambda: list(self.all_of(record.tenant)))) >= self._max_checkpoints:
            raise ApiError(400, f"this key has {self._max_checkpoints} checkpoints, the most it may have: delete some")
        # Names that no checkpoint can have; the rename below makes the checkpoint appear whole.
        partial, earlier = (folder.with_name(f".{folder.name}{suffix}.partial") for suffix in ("", ".earlier"))
        for path in (partial, earlier):
            shutil.rmtree(path, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            await write(partial)
            expires = None if settings.ttl_s is None else _now() + datetime.timedelta(seconds=settings.ttl_s)
            checkpoint = AdapterCheckpoint(
                model_id=record.model_id,
                kind=settings.kind,
                name=settings.name,
                seq=settings.seq,
                updates=settings.updates,
                time=_now().isoformat(),
                size_bytes=sum(path.stat().st_size for path in partial.iterdir()),
                user_metadata=settings.user_metadata,
                expires_at=None if expires is None else expires.isoformat(),
                is_unnamed=settings.is_unnamed,
            )
            (partial / _RECORD).write_text(json.dumps(asdict(checkpoint)))
            # A rename cannot replace a folder that holds files. Nothing is awaited between the two, so that whoever
            # samples from an overwritten checkpoint always finds one.
            if folder.exists():
                folder.rename(earlier)
            partial.rename(folder)
        finally:
            for path in (partial, earlier):
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        return checkpoint


def now() -> str:
    """Return the time in ISO format."""
    return _now().isoformat()


def _read(kind: type[Record], path: Path) -> Record:
    """Read a record.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read.
    """
    try:
        return kind(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", hint="move its folder away") from error


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
