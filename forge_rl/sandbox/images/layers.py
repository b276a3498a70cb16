"""The layers of a store: unpacked once, held by locks that end with their process, and evicted by age."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forge_rl.sandbox.images.image import ImageError
from forge_rl.sandbox.images.peers import LayerPeers
from forge_rl.sandbox.images.sources import BlobPlace, ImageSource, LayerBlob
from forge_rl.sandbox.images.unpack import FILES, LayerLimits
from forge_rl.sandbox.images.unpacker import Unpacker
from forge_rl.system.folders import write_whole

_STATUS = "layer.json"
_EVICTED, _PART = ".evicted-", ".part"
_CHECK_S = 0.05
_RETRIES = 4
"""Tries after the first to unpack a layer whose process is killed: of several images at once, the kernel may kill each
for the memory of another."""
_SLACK = 1 << 20
"""Bytes by which a compressed layer may be larger than an uncompressed one."""
_STALE_S = 7 * 86_400.0
"""Age at which unused files of a fetch or a build are removed in any case."""


@dataclass(frozen=True, kw_only=True)
class LayerProgress:
    """Progress of a layer, for `ImageStore(progress=...)`."""

    digest: str
    done_bytes: int
    size: int
    is_unpacked: bool = False


@dataclass
class LayerWork:
    """Work on a layer in a thread, for all in this process that wait for it."""

    blob: LayerBlob
    progress: Callable[[LayerProgress], None] | None
    is_unwanted: threading.Event = field(default_factory=threading.Event)
    partial_fd: int = -1

    def check_wanted(self) -> None:
        """Raise ImageError if nobody waits any more."""
        if self.is_unwanted.is_set():
            raise ImageError("nobody waits for the layer any more")

    def wait(self, seconds: float) -> None:
        """Wait before another try."""
        self.is_unwanted.wait(seconds)
        self.check_wanted()

    def tell(self, done_bytes: int, *, is_unpacked: bool = False) -> None:
        """Report how far it is."""
        if self.progress is not None:
            name = self.blob.digest or self.blob.diff_id
            self.progress(
                LayerProgress(digest=name, done_bytes=done_bytes, size=self.blob.size, is_unpacked=is_unpacked)
            )


@dataclass
class _LayerHold:
    fd: int
    users: int = 1


class LayerStore:
    """Unpacked layers in a folder that several processes share.

        layers/HEX/files     the lower folder; next to it layer.json and owners.json
        partial/HEX          a layer that is being unpacked
        partial/HEX.part     its bytes that are being fetched, and the lock of both

    Args:
        max_bytes: of all layers; None for no limit.
    """

    def __init__(self, folder: Path, max_bytes: int | None, limits: LayerLimits) -> None:
        self.layers, self.partial = folder / "layers", folder / "partial"
        self.max_bytes, self._limits = max_bytes, limits
        for path in (self.layers, self.partial):
            path.mkdir(exist_ok=True)
        self._guard = threading.Lock()
        self._holds: dict[str, _LayerHold] = {}
        self._spare: Unpacker | None = None

    def prepare(self) -> None:
        """Start a process for a layer that may have to be unpacked; `dismiss` ends it if none had."""
        with self._guard:
            self._spare = self._spare or Unpacker()

    def dismiss(self) -> None:
        """End the process that `prepare` started, if no layer took it."""
        if (spare := self._taken_spare()) is not None:
            spare.close()

    def _taken_spare(self) -> Unpacker | None:
        with self._guard:
            spare, self._spare = self._spare, None
        return spare

    def files(self, diff_id: str) -> Path:
        """Return a layer's lower folder."""
        return self._path(diff_id) / FILES

    def hold(self, diff_id: str) -> bool:
        """Keep a layer from being evicted until `release`; returns False if it is not there."""
        with self._guard:
            if (hold := self._holds.get(diff_id)) is not None:
                hold.users += 1
                return True
            path = self._path(diff_id)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            fcntl.flock(fd, fcntl.LOCK_SH)
            if not _is_same(fd, path):  # evicted meanwhile
                os.close(fd)
                return False
            # The time of last use, by which layers are evicted.
            os.utime(fd)
            self._holds[diff_id] = _LayerHold(fd)
            return True

    def release(self, diff_id: str) -> None:
        """End a `hold`."""
        with self._guard:
            hold = self._holds[diff_id]
            hold.users -= 1
            if not hold.users:
                os.utime(hold.fd)
                os.close(self._holds.pop(diff_id).fd)

    def obtain(self, work: LayerWork, source: ImageSource, peers: LayerPeers | None) -> None:
        """Fetch and unpack a layer unless it is there, and hold it. Other processes wait for the one that does.

        Raises:
            ImageError: it cannot be fetched, is refused, or does not fit.
        """
        diff_id, blob = work.blob.diff_id, work.blob
        if self.hold(diff_id):
            return
        most_bytes = self._limits.bytes if self.max_bytes is None else min(self._limits.bytes, self.max_bytes)
        if blob.size > most_bytes + _SLACK:
            name = blob.digest or diff_id
            raise ImageError(f"the layer {name} has {blob.size} bytes, more than a layer may have here: {most_bytes}")
        try:
            with self._locked(self.partial / f"{_hex(diff_id)}{_PART}", work) as fd:
                # Another process may have unpacked it while the lock was waited for.
                if self.hold(diff_id):
                    return
                work.partial_fd = fd
                unpacker = self._taken_spare() or Unpacker()
                with contextlib.closing(unpacker), contextlib.ExitStack() as stack:
                    # A download that broke off resumes at its source; peers send layers from the start.
                    place = None
                    if peers is not None and not os.fstat(fd).st_size:
                        # What a peer sent is not compressed: the source cannot continue after it.
                        stack.callback(os.ftruncate, fd, 0)
                        place = peers.fetch(blob, work, self._limits.max_bytes(blob.size))
                        if place is None:
                            stack.pop_all()
                    self._unpack(work, place or source.fetch(blob, work), unpacker)
            try:
                self.evict(self.max_bytes)
                size = self.disk_bytes()
            except BaseException:
                self.release(diff_id)
                raise
            if self.max_bytes is not None and size > self.max_bytes:
                self.release(diff_id)
                self.evict(self.max_bytes)
                raise ImageError(
                    f"the layers in use have {size} bytes, more than the store's {self.max_bytes}",
                    hint="give the store more bytes, or use fewer images at a time",
                )
        except OSError as error:
            raise ImageError(f"the layer {diff_id} cannot be kept: {error.strerror}", hint="free space") from error

    def evict(self, max_bytes: int | None) -> int:
        """Delete the layers that were used longest ago, but none in use; return how many bytes are freed.

        Abandoned downloads count, and are deleted, like layers.
        """
        self._sweep()
        if max_bytes is None:
            return 0
        sizes = [*self._sizes(), *self._partial_sizes()]
        total, freed = sum(size for _, size, _ in sizes), 0
        for _, size, path in sorted(sizes):
            if total - freed <= max_bytes:
                break
            is_deleted = self._delete(path) if path.parent == self.layers else self._delete_partial(path)
            freed += size if is_deleted else 0
        return freed

    def disk_bytes(self) -> int:
        """Return how much space all layers take."""
        return sum(size for _, size, _ in self._sizes())

    def status(self, diff_id: str) -> dict[str, object]:
        """Return the notes made when a layer was unpacked; empty without the layer."""
        return _status(self._path(diff_id))

    def _path(self, diff_id: str) -> Path:
        return self.layers / _hex(diff_id)

    def _sizes(self) -> list[tuple[float, int, Path]]:
        """Return the time of last use, the size and the folder of each layer."""
        sizes = []
        for path in self.layers.iterdir():
            with contextlib.suppress(FileNotFoundError):
                size = _status(path).get("disk_bytes", 0)
                sizes.append((path.stat().st_mtime, size if isinstance(size, int) else 0, path))
        return sizes

    def _partial_sizes(self) -> list[tuple[float, int, Path]]:
        sizes = []
        for path in self.partial.glob(f"*{_PART}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                sizes.append((status.st_mtime, status.st_blocks * 512, path))
        return sizes

    def _delete_partial(self, path: Path) -> bool:
        """Delete a layer's partial fetch unless somebody works on it."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(fd, path):
                return False
            path.unlink()
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def _delete(self, path: Path) -> bool:
        """Delete a layer unless it is in use."""
        trash = self.partial / f"{path.name}{_EVICTED}{os.urandom(4).hex()}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(fd, path):
                return False
            # Renamed under the lock, which takes no time: who looks the layer up from here on does not find it.
            path.rename(trash)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)  # before the rest, which takes time: others may wait for the lock
        remove(trash)
        return True

    def _sweep(self) -> None:
        """Remove the leftovers of processes that were killed while they evicted or unpacked."""
        for path in self.partial.iterdir():
            if _EVICTED in path.name:
                remove(path)
            elif not path.suffix:
                self._sweep_unpacked(path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    if path.stat().st_mtime > time.time() - _STALE_S:
                        continue
                    if path.suffix == _PART:
                        self._delete_partial(path)
                    else:
                        remove(path)

    def _sweep_unpacked(self, path: Path) -> None:
        # The lock of a half unpacked folder is the file of its bytes, made here if the process removed it.
        part = path.with_suffix(_PART)
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(fd, part):
                remove(path)
                if not os.fstat(fd).st_size:
                    part.unlink()
        except BlockingIOError:
            return  # somebody works on it
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _locked(self, path: Path, work: LayerWork) -> Iterator[int]:
        """Lock a layer's partial file against other processes; yield its descriptor."""
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while True:
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        work.wait(_CHECK_S)
                if _is_same(fd, path):
                    yield fd
                    return
            finally:
                os.close(fd)

    def _unpack(self, work: LayerWork, place: BlobPlace, unpacker: Unpacker) -> None:
        diff_id = work.blob.diff_id
        folder = self.partial / _hex(diff_id)
        try:
            result = self._run(work, place, folder, unpacker)
            for _ in range(_RETRIES):
                if result is not None:
                    break
                with contextlib.closing(Unpacker()) as unpacker:
                    result = self._run(work, place, folder, unpacker)
            if result is None:
                raise ImageError(
                    f"the process that unpacks the layer {diff_id} is killed again and again", hint="free memory"
                )
            # The last check, of the uncompressed bytes: whatever sent them, they are what the image names.
            if result.get("diff_id") != diff_id:
                raise ImageError(f"the layer {diff_id} has other content, of digest {result.get('diff_id')}")
            write_whole(folder / _STATUS, json.dumps(result))
            with self._guard:
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(fd, fcntl.LOCK_SH)  # before anybody can evict it
                folder.rename(self._path(diff_id))
                self._holds[diff_id] = _LayerHold(fd)
        except BaseException:
            remove(folder)
            raise
        (self.partial / f"{folder.name}{_PART}").unlink(missing_ok=True)
        work.tell(work.blob.size, is_unpacked=True)

    def _run(self, work: LayerWork, place: BlobPlace, folder: Path, unpacker: Unpacker) -> dict[str, object] | None:
        """Unpack into a new folder; return what the process says of the layer, or None if it was killed."""
        remove(folder)  # of a process that was killed
        (folder / FILES).mkdir(parents=True)
        (folder / FILES).chmod(0o755)
        arguments = {
            "start": place.start,
            "size": place.size,
            "folder": str(folder),
            "limits": asdict(self._limits),
        }
        status, output, errors = unpacker.unpack(arguments, [place.fd, work.partial_fd], work.check_wanted)
        if status == -signal.SIGKILL:
            return None
        name = work.blob.digest or work.blob.diff_id
        if status or not output:
            text = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise ImageError(f"the layer {name} could not be unpacked ({status}): {text:.500}")
        result: dict[str, object] = json.loads(output)
        if "refused" in result:
            raise ImageError(f"the layer {name} is refused: {result['refused']}", hint="build the image again")
        if "failed" in result:
            hint = "free space, or evict images with forge-rl images prune" if result["full"] else ""
            raise ImageError(f"the layer {name} could not be unpacked: {result['failed']}", hint=hint)
        return result


def remove(folder: Path) -> None:
    """Delete a folder, also what its owner may not write to; nothing happens if it is not there."""
    if os.geteuid() != 0:
        with contextlib.suppress(FileNotFoundError):
            os.chmod(folder, 0o700)
            for _, names, _, fd in os.fwalk(folder):
                for name in names:
                    if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                        os.chmod(name, 0o700, dir_fd=fd)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _hex(diff_id: str) -> str:
    return diff_id.removeprefix("sha256:")


def _status(path: Path) -> dict[str, object]:
    try:
        status = json.loads((path / _STATUS).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _is_same(fd: int, path: Path) -> bool:
    """Return whether a path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
