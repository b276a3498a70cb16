"""Helpers that the tests of the version index share."""

from dataclasses import replace

from forge_rl.weights.manifest import Manifest
from forge_rl.weights.versions import VersionIndex
from tests.fakes import manifest_of


def index(*, keep_versions: int = 2, keep_bytes: int = 1 << 40) -> VersionIndex:
    return VersionIndex(keep_versions=keep_versions, keep_bytes=keep_bytes)


def bytes_of(versions: VersionIndex) -> int:
    """Size of all buckets that are held; one that versions share counts once."""
    manifests = (*versions._versions.values(), *versions._leases.values())
    return sum({bucket.key: bucket.bytes for manifest in manifests for bucket in manifest.buckets}.values())


def publish(
    versions: VersionIndex, version: int, size: int = 10, shared: dict[str, int] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys that are given up before it is written, and when it is committed."""
    _, before = versions.begin(version)
    after = versions.commit(manifest_of(version, {f"{version}/0": size, **(shared or {})}))
    return before, after


def of_epoch(epoch: int, version: int, size: int = 10) -> Manifest:
    """A manifest of one tensor in a bucket of its own, after the run went back so often."""
    return replace(manifest_of(version, {f"{version}/{epoch}.0": size}), epoch=epoch)
