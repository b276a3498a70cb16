"""Segments: files in shared memory, one per bucket, which trainers write and engines map.

A segment begins with a one-page header: a magic string, a random token, and its size in bytes. Readers check these to
refuse foreign, stale or incomplete segments. Mappings are kept from one version to the next: freed segments are reused,
and mapping fresh pages costs more than copying.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import SegmentRef, TensorEntry

if TYPE_CHECKING:
    import torch  # takes seconds, and a volume that maps no segments does not need it

PAGE = mmap.PAGESIZE
_HEADER = struct.Struct("<8s16sQ")
_MAGIC = b"forge_rl"
_REGISTER_READ_ONLY = 8
"""cudaHostRegisterReadOnly: CUDA must not ask for writable pages."""
_MADE_ANEW = "publish the version again, or start the run again"


def create(path: Path, size: int) -> SegmentRef:
    """Create a segment of `size` bytes whose memory is allocated and zeroed.

    Raises:
        OSError: out of memory, or the file exists.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Allocate here: a sparse file would be made at once, and a write to it killed by SIGBUS when tmpfs is full.
        os.posix_fallocate(fd, 0, PAGE + size)
        return _stamp(fd, str(path), size)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def create_anonymous(size: int) -> tuple[SegmentRef, int]:
    """Create an anonymous segment; closing the returned file descriptor frees it.

    Raises:
        OSError: out of memory.
    """
    fd = os.memfd_create("forge_rl-weights")
    try:
        os.posix_fallocate(fd, 0, PAGE + size)
    except OSError:
        os.close(fd)
        raise
    return _stamp(fd, f"/proc/{os.getpid()}/fd/{fd}", size), fd


def renew(ref: SegmentRef) -> SegmentRef:
    """Give a freed segment a new token, so that readers of its old contents are refused."""
    fd = os.open(ref.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _stamp(fd, ref.path, ref.bytes)
    finally:
        os.close(fd)


def is_whole(ref: SegmentRef) -> bool:
    """True if the segment's file exists and matches the reference."""
    try:
        fd = os.open(ref.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, _HEADER.size, 0) == _HEADER.pack(_MAGIC, bytes.fromhex(ref.token), ref.bytes) and (
            size == PAGE + ref.bytes
        )
    finally:
        os.close(fd)


def readable(ref: SegmentRef) -> torch.Tensor:
    """Map a segment's bytes read-only, `[bytes] uint8`.

    Raises:
        WeightsError: the segment is gone, not private to this user, or does not match the reference.
    """
    return _MAPPINGS.get(ref, writable=False)


def writable(ref: SegmentRef) -> torch.Tensor:
    """Map a segment's bytes for writing, `[bytes] uint8`.

    Raises:
        WeightsError: as for `readable`.
    """
    return _MAPPINGS.get(ref, writable=True)


def check(ref: SegmentRef) -> None:
    """Check after reading that the segment was not reused meanwhile, and drop an anonymous one's mapping.

    Raises:
        WeightsError: it was freed, and perhaps rewritten, meanwhile: the data read must not be used.
    """
    _MAPPINGS.get(ref, writable=False)
    if _is_anonymous(ref.path):
        release(ref)


def release(ref: SegmentRef) -> None:
    """Forget this process's mappings of a segment; tensors that use them keep them alive."""
    _MAPPINGS.release(ref.path)


@dataclass(frozen=True, kw_only=True)
class SegmentBucket:
    """A bucket in this host's shared memory: a `TensorBucket` whose tensors are views of its mapping."""

    segment: SegmentRef
    entries: tuple[TensorEntry, ...]

    @contextlib.contextmanager
    def open(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield views of the tensors while the block runs; see `TensorBucket.open`."""
        memory = readable(self.segment)
        tensors = {entry.name: entry.of(memory) for entry in self.entries}
        del memory
        try:
            yield tensors
        finally:
            tensors.clear()  # so that a dict the caller keeps holds no memory
        check(self.segment)


@dataclass(kw_only=True)
class _Mapping:
    inode: int
    header: memoryview
    payload: torch.Tensor
    fd: int
    registered: bool
    """True if CUDA copies directly to and from these pages."""


class _Mappings:
    """This process's mappings, by path and access."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mappings: dict[tuple[str, bool], _Mapping] = {}

    def get(self, ref: SegmentRef, *, writable: bool) -> torch.Tensor:
        with self._lock:
            key = (ref.path, writable)
            try:
                # The mapping holds its file open, so its inode number cannot be given to another file: an equal number
                # is the same file, however often the segment was reused.
                inode = os.stat(ref.path).st_ino
                mapping = self._mappings.get(key)
                if mapping is None or mapping.inode != inode:
                    if mapping is not None:
                        _unmap(self._mappings.pop(key))
                    self._drop_unlinked()
                    mapping = self._mappings[key] = _map(ref, writable=writable)
            except OSError as error:
                self._forget(ref.path)
                raise WeightsError(
                    f"the segment {ref.path} cannot be opened ({error.strerror}): it was freed, or its store has ended",
                    hint=_MADE_ANEW,
                ) from error
            # Read from the mapping at every call, not remembered: the owner stamps a new token when it frees the
            # segment.
            magic, token, size = _HEADER.unpack(mapping.header)
            if magic != _MAGIC:
                raise WeightsError(f"{ref.path} is not a segment of weights", hint=_MADE_ANEW)
            if token.hex() != ref.token or size != ref.bytes:
                raise WeightsError(
                    f"the segment {ref.path} was freed and holds another version by now",
                    hint="hold a lease while reading",
                )
            return mapping.payload

    def release(self, path: str) -> None:
        with self._lock:
            self._forget(path)

    def _forget(self, path: str) -> None:
        for key in [key for key in self._mappings if key[0] == path]:
            _unmap(self._mappings.pop(key))

    def _drop_unlinked(self) -> None:
        # A removed file keeps its memory while it is mapped, and nobody tells this process of the removal.
        for path, _ in list(self._mappings):
            mapping = self._mappings.get((path, True)) or self._mappings.get((path, False))
            if mapping is not None and os.fstat(mapping.fd).st_nlink == 0 and not _is_anonymous(path):
                self._forget(path)


_MAPPINGS = _Mappings()


def _map(ref: SegmentRef, *, writable: bool) -> _Mapping:
    import torch

    flags = os.O_CLOEXEC | (os.O_RDWR if writable else os.O_RDONLY)
    if not _is_anonymous(ref.path):
        flags |= os.O_NOFOLLOW
    fd = os.open(ref.path, flags)
    try:
        status = os.fstat(fd)
        # Checked on the open file rather than on the path, which could be replaced in between.
        if status.st_uid != os.geteuid() or (status.st_nlink and stat.S_IMODE(status.st_mode) & 0o077):
            raise WeightsError(
                f"the segment {ref.path} is not this user's alone: owner {status.st_uid}, "
                f"mode {stat.S_IMODE(status.st_mode):o}",
                hint="find out who made it; its weights are not used",
            )
        # Touching pages beyond the end of a shorter file would kill this process by SIGBUS.
        if status.st_size != PAGE + ref.bytes:
            raise WeightsError(
                f"the segment {ref.path} has {status.st_size - PAGE} bytes, its manifest says {ref.bytes}",
                hint=_MADE_ANEW,
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Populated at once: faulting in the pages one by one costs more than the copy into them.
        memory = mmap.mmap(fd, PAGE + ref.bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
    except BaseException:
        os.close(fd)
        raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors; the pages are
        payload = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE, count=ref.bytes)
    return _Mapping(
        inode=status.st_ino,
        header=memoryview(memory)[: _HEADER.size],
        payload=payload,
        fd=fd,
        # An anonymous segment is read once: pinning its pages would take longer than copying them.
        registered=(writable or not _is_anonymous(ref.path)) and _register(payload, writable=writable),
    )


def _register(payload: torch.Tensor, *, writable: bool) -> bool:
    """Pin pages for CUDA if this process uses it: copies to and from the GPU are then several times faster.

    Not every driver can pin read-only pages; copies are then as slow as from unpinned memory.
    """
    import torch

    if not torch.cuda.is_initialized():
        return False
    begin = payload.data_ptr() - PAGE
    flags = 0 if writable else _REGISTER_READ_ONLY
    if int(torch.cuda.cudart().cudaHostRegister(begin, PAGE + payload.nbytes, flags)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # the next use of CUDA would report this error, which only costs speed
        torch.zeros(1, device="cuda")
    return False


def _unmap(mapping: _Mapping) -> None:
    """Drop a mapping; its pages are freed with the last tensor on them."""
    if mapping.registered:
        import torch

        torch.cuda.cudart().cudaHostUnregister(mapping.payload.data_ptr() - PAGE)
    os.close(mapping.fd)


def _is_anonymous(path: str) -> bool:
    return path.startswith("/proc/")


def _stamp(fd: int, path: str, size: int) -> SegmentRef:
    token = secrets.token_bytes(16)
    os.pwrite(fd, _HEADER.pack(_MAGIC, token, size), 0)
    return SegmentRef(path=path, bytes=size, token=token.hex())
