"""The rules of versions: immutable, committed whole, leased while read, retired by age. Pure; the store runs it.

A run that goes back to an earlier version, because its trainer continues from a checkpoint, forgets what came after and
begins a new epoch, in which the same numbers come again. What is still read of an older epoch stays until it is
released.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Manifest


class VersionIndex:
    """Index of the versions that exist, and of the buckets that they keep.

    `commit`, `abort`, `rollback` and `release` return the keys of the buckets that nothing needs any more. Those of a
    version that is given up while it is written are not among them: they are its writer's to free.

    Args:
        keep_versions: number of newest versions that retention keeps, the one that is being written included.
        keep_bytes: the most bytes that kept versions may take; the newest is kept whatever its size.
    """

    def __init__(self, *, keep_versions: int, keep_bytes: int) -> None:
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._versions: dict[int, Manifest] = {}
        self._writing: dict[int, Manifest | None] = {}
        """Versions that are being written, each with the one before, whose buckets it may share."""
        self._needed: dict[str, int] = {}
        """Size by key of the buckets that versions keep, or those that are being written."""
        self._leases: Counter[tuple[int, int]] = Counter()
        """Number of leases by version and epoch."""
        self._forgotten: dict[tuple[int, int], Manifest] = {}
        """Versions of earlier epochs that are still being read."""
        self._changed = asyncio.Condition()
        self._failure = ""
        self.epoch = 0
        """Number of rollbacks so far."""

    @property
    def latest(self) -> int | None:
        """The newest committed version, or None before the first."""
        return max(self._versions, default=None)

    def begin(self, version: int) -> tuple[Manifest | None, tuple[str, ...]]:
        """Reserve a version for writing; what retention will give up for it is given up now, so that its room is there.

        Returns:
            The version before, which stays until this one is committed or aborted, and keys of buckets to be freed.

        Raises:
            WeightsError: it exists, is being written, or is not newer than the latest.
        """
        if version in self._writing:
            raise WeightsError(f"version {version} is already being written")
        if self.latest is not None and version <= self.latest:
            raise WeightsError(f"version {version} is not newer than the latest, {self.latest}: versions are immutable")
        base = None if self.latest is None else self._versions[self.latest]
        self._writing[version] = base
        self._failure = ""
        return base, self._retire(coming=base.bytes if base else 0)

    async def commit(self, manifest: Manifest) -> tuple[str, ...]:
        """Make a written version visible and move `latest`.

        Raises:
            WeightsError: the version was not begun, was aborted, or another one was committed meanwhile, which is newer
                or which its unchanged tensors do not come from.
        """
        version = manifest.version
        if manifest.epoch != self.epoch or version not in self._writing:
            raise WeightsError(f"version {version} was not begun, or was aborted")
        if self.latest is not None and version <= self.latest:
            raise WeightsError(f"version {version} comes too late: {self.latest} was committed meanwhile")
        base = self._writing[version]
        if manifest.written != manifest.buckets and (base is None or base.version != self.latest):
            raise WeightsError(
                f"version {version} shares tensors with {base and base.version}, and {self.latest} was committed "
                "meanwhile",
                hint="publish one version after the other",
            )
        del self._writing[version]
        self._versions[version] = manifest
        return await self._tell_waiters()

    async def abort(self, version: int, reason: str, *, epoch: int = 0) -> tuple[str, ...]:
        """Give up a version that is being written; it stays invisible, and those who wait for it fail at once.

        Nothing happens for one that is not being written, or no more because the run went back since.
        """
        if epoch != self.epoch or version not in self._writing:
            return ()
        del self._writing[version]
        self._failure = f"version {version} was aborted: {reason}"
        return await self._tell_waiters()

    def rollback(self, version: int) -> tuple[str, ...]:
        """Forget all versions above this one, which will be written anew; what is being written is given up.

        Those who wait for a forgotten version wait for the new one. Those who read one go on.
        """
        self.epoch += 1
        self._writing.clear()
        self._failure = ""
        for newer in [held for held in self._versions if held > version]:
            manifest = self._versions.pop(newer)
            if self._leases[newer, manifest.epoch]:
                self._forgotten[newer, manifest.epoch] = manifest
        return self._retire()

    def needs(self, key: str) -> bool:
        """True if a version that is kept, read, or written upon has this bucket."""
        return key in self._needed

    async def wait_for(self, version: int) -> int:
        """Wait as `WeightStore.wait_for` does."""
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
        manifest = self._versions[wanted]
        self._leases[wanted, manifest.epoch] += 1
        return manifest

    def release(self, version: int, *, epoch: int = 0) -> tuple[str, ...]:
        """End a lease on a version of an epoch."""
        leased = version, epoch
        assert self._leases[leased], f"version {version} is not leased"
        self._leases[leased] -= 1
        if not self._leases[leased]:
            del self._leases[leased]
            self._forgotten.pop(leased, None)
        return self._retire()

    async def _tell_waiters(self) -> tuple[str, ...]:
        """Retire, then wake all who wait; returns what _retire does."""
        unneeded = self._retire()
        async with self._changed:
            self._changed.notify_all()
        return unneeded

    def _retire(self, coming: int = 0) -> tuple[str, ...]:
        """Drop versions past the bounds; `coming` bytes of one more, if not 0, are about to be written."""
        kept, seen = (1, {"": coming}) if coming else (0, {})
        for version in sorted(self._versions, reverse=True):
            if self._leases[version, self._versions[version].epoch]:
                continue
            kept += 1
            seen |= _buckets([self._versions[version]])
            if version != self.latest and (kept > self._keep_versions or sum(seen.values()) > self._keep_bytes):
                del self._versions[version]
        bases = (base for base in self._writing.values() if base is not None)
        before = self._needed
        self._needed = _buckets([*self._versions.values(), *self._forgotten.values(), *bases])
        return tuple(key for key in before if key not in self._needed)


def _buckets(manifests: Iterable[Manifest]) -> dict[str, int]:
    """Bytes by key of all their buckets."""
    return {bucket.key: bucket.bytes for manifest in manifests for bucket in manifest.buckets}
