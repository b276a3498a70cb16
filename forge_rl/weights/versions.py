"""The rules of versions: immutable, committed whole, leased while read, retired by age. Pure; the store runs it."""

from __future__ import annotations

import asyncio
from collections import Counter

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Manifest


class VersionIndex:
    """Which versions exist.

    Args:
        keep_versions: how many of the newest versions retention keeps.
        keep_bytes: the most bytes that kept versions may take; the newest is kept whatever its size.
    """

    def __init__(self, *, keep_versions: int, keep_bytes: int) -> None:
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._versions: dict[int, Manifest] = {}
        self._writing: set[int] = set()
        self._leases: Counter[int] = Counter()
        self._changed = asyncio.Condition()
        self._failure = ""

    @property
    def latest(self) -> int | None:
        """The newest committed version, or None before the first."""
        return max(self._versions, default=None)

    @property
    def bytes(self) -> int:
        """Bytes of all versions that are held."""
        return sum(manifest.bytes for manifest in self._versions.values())

    def begin(self, version: int) -> None:
        """Reserve a version for writing.

        Raises:
            WeightsError: it exists, is being written, or is not newer than the latest.
        """
        if version in self._writing:
            raise WeightsError(f"version {version} is already being written")
        if self.latest is not None and version <= self.latest:
            raise WeightsError(f"version {version} is not newer than the latest, {self.latest}: versions are immutable")
        self._writing.add(version)
        self._failure = ""

    async def commit(self, manifest: Manifest) -> tuple[Manifest, ...]:
        """Make a written version visible and move `latest`.

        Returns:
            The versions that retention gives up; their buckets are to be freed.

        Raises:
            WeightsError: the version was not begun, or was aborted.
        """
        if manifest.version not in self._writing:
            raise WeightsError(f"version {manifest.version} was not begun, or was aborted")
        self._writing.remove(manifest.version)
        async with self._changed:
            self._versions[manifest.version] = manifest
            self._changed.notify_all()
        return self._retire()

    async def abort(self, version: int, reason: str) -> None:
        """Give up a version that is being written; it stays invisible, and those who wait for it fail at once."""
        self._writing.discard(version)
        async with self._changed:
            self._failure = f"version {version} was aborted: {reason}"
            self._changed.notify_all()

    async def wait_for(self, version: int) -> int:
        """Wait until this version or a newer one is committed.

        Returns:
            The latest version then.

        Raises:
            WeightsError: the publisher gave up.
        """
        async with self._changed:
            while self.latest is None or self.latest < version:
                if self._failure:
                    raise WeightsError(f"version {version} will not come: {self._failure}")
                await self._changed.wait()
            return self.latest

    def lease(self, version: int | None = None) -> Manifest:
        """The manifest of a version (the latest by default), which retention keeps until it is released.

        Raises:
            WeightsError: there is no such version.
        """
        wanted = self.latest if version is None else version
        if wanted is None or wanted not in self._versions:
            held = ", ".join(map(str, sorted(self._versions))) or "none"
            raise WeightsError(f"there is no version {wanted} of the weights; held: {held}")
        self._leases[wanted] += 1
        return self._versions[wanted]

    def release(self, version: int) -> tuple[Manifest, ...]:
        """End a lease.

        Returns:
            The versions that retention gives up now.
        """
        self._leases[version] -= 1
        if self._leases[version] <= 0:
            del self._leases[version]
        return self._retire()

    def _retire(self) -> tuple[Manifest, ...]:
        retired = []
        kept = kept_bytes = 0
        for version in sorted(self._versions, reverse=True):
            manifest = self._versions[version]
            if self._leases[version]:
                continue
            kept += 1
            kept_bytes += manifest.bytes
            if version != self.latest and (kept > self._keep_versions or kept_bytes > self._keep_bytes):
                retired.append(self._versions.pop(version))
        return tuple(retired)
