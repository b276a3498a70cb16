"""One version of the weights in anonymous shared memory, to hand from a replica to its engine's processes.

A memfd has no name and dies with its last user, so nothing can leak, also when every process is killed.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Manifest, TensorEntry

_ALIGN = 64


def _offsets(manifest: Manifest) -> tuple[list[int], int]:
    """Byte offset of every tensor, and the size of all; both sides derive the same from the manifest."""
    offsets, at = [], 0
    for entry in manifest.tensors:
        offsets.append(at)
        at += -(-entry.bytes // _ALIGN) * _ALIGN
    return offsets, max(at, 1)


@dataclass(frozen=True, kw_only=True)
class SegmentRef:
    """Where another process of the same user finds a segment."""

    pid: int
    fd: int

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"


class Segment:
    """Room for every tensor of a manifest; a context manager, which frees it."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        offsets, size = _offsets(manifest)
        free = _available_bytes()
        if size > free:
            raise WeightsError(
                f"no room for version {manifest.version} in shared memory: {size} bytes are needed, {free} are free",
                mend="free memory, or use fewer generator replicas",
            )
        self._fd = os.memfd_create("forge_rl-weights")
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            os.close(self._fd)
            raise WeightsError(
                f"no room for version {manifest.version} in shared memory: {size} bytes are needed ({error.strerror})",
                mend="free memory, or use fewer generator replicas",
            ) from error
        self._tensors = dict(_views(self._fd, manifest, offsets, size, writable=True))

    @property
    def ref(self) -> SegmentRef:
        return SegmentRef(pid=os.getpid(), fd=self._fd)

    def tensor(self, name: str) -> torch.Tensor:
        """The named tensor's place; writes go to the shared memory."""
        return self._tensors[name]

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.clear()
        os.close(self._fd)


def _available_bytes() -> int:
    """Memory that can still be taken. A memfd has no limit of its own: past this the kernel kills processes."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None, "/proc/meminfo has MemAvailable since Linux 3.14"
    return int(found[1]) << 10


def read_segment(ref: SegmentRef, manifest: Manifest) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """Map another process's segment and yield each entry with a view of its tensor, without copying.

    Raises:
        WeightsError: the segment is gone or has another size than the manifest says.
    """
    offsets, size = _offsets(manifest)
    try:
        fd = os.open(ref.path, os.O_RDONLY)
    except OSError as error:
        raise WeightsError(
            f"the segment of version {manifest.version} cannot be opened ({error.strerror})",
            mend="the process that read it has ended; see its log",
        ) from error
    try:
        if (found := os.fstat(fd).st_size) != size:
            raise WeightsError(f"the segment of version {manifest.version} has {found} bytes, its manifest says {size}")
        views = _views(fd, manifest, offsets, size, writable=False)
        by_name = {entry.name: entry for entry in manifest.tensors}
        for name, tensor in views:
            yield by_name[name], tensor
    finally:
        os.close(fd)


def _views(
    fd: int, manifest: Manifest, offsets: list[int], size: int, *, writable: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    # A private mapping of a read-only file is writable memory to torch, and never written back.
    access = (
        {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        if writable
        else {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    )
    memory = torch.frombuffer(mmap.mmap(fd, size, **access), dtype=torch.uint8)
    for entry, offset in zip(manifest.tensors, offsets, strict=True):
        dtype: torch.dtype = getattr(torch, entry.dtype)
        yield entry.name, memory[offset : offset + entry.bytes].view(dtype).view(entry.shape)
