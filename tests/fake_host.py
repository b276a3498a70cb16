"""A host's segments in files of a test, without the store's actors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forge_rl.weights.manifest import Manifest
from forge_rl.weights.segment import create, release
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport
from forge_rl.weights.volume import Volume

HOST = "local"


def transport() -> SharedMemoryTransport:
    """Writes and reads what `reserve` made room for; there is nobody that it could ask for more."""
    return SharedMemoryTransport(HOST, {})


def reserve(drafted: Manifest, folder: Path) -> Manifest:
    """Make the segments of a draft."""
    return replace(
        drafted,
        buckets=tuple(
            replace(bucket, host=HOST, segment=create(folder / bucket.key.replace("/", "-"), bucket.bytes))
            if bucket.segment is None
            else bucket
            for bucket in drafted.buckets
        ),
    )


def bytes_of(volume: Volume) -> int:
    """Size of all segments, used and freed."""
    return sum(ref.bytes for ref in (*volume._used.values(), *volume._freed, *volume._spare))


def forget(manifest: Manifest) -> None:
    """Drop this process's mappings of a version."""
    for bucket in manifest.buckets:
        assert bucket.segment is not None
        release(bucket.segment)
