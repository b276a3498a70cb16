"""Rules of weight versions: immutable, committed whole, leased while read, retired by age. Pure; the store applies
them.

When the trainer resumes from a checkpoint, the store rolls back: it forgets later versions and begins a new epoch that
reuses their numbers. Versions of older epochs stay until their readers release them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Manifest


class VersionIndex:
    """Index of existing versions and their buckets.

    `commit`, `abort`, `rollback` and `release` return the keys of unneeded buckets. Buckets of a
    version that was abandoned while being written are not among them: its writer frees them.

    Args:
        keep_versions: number of newest versions to keep, including the one being written.
        keep_bytes: maximum bytes of kept versions; the newest is kept regardless of size.
    """

    def __init__(self, *, keep_versions: int, keep_bytes: int) -> None:
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._versions: dict[int, Manifest] = {}
        self._writing: dict[int, Manifest | None] = {}
        """Versions being written, each with its predecessor, whose buckets it may share."""
        self._needed: dict[str, int] = {}
        """Size of each bucket that a kept, leased or base version has, by key."""
        self._leases: dict[str, Manifest] = {}
        """Leased versions of all epochs, by the lease's name."""
        self.epoch = 0
        """Number of rollbacks so far."""

    @property
    def latest(self) -> int | None:
        """Newest committed version; None before the first."""
        return max(self._versions, default=None)

    def restore(self, versions: Iterable[Manifest], leases: Mapping[str, Manifest], *, epoch: int) -> tuple[str, ...]:
        """Restore the versions and leases of an index that was lost; versions beyond the limits are retired."""
        self.epoch = epoch
        self._versions = {manifest.version: manifest for manifest in versions}
        self._leases = dict(leases)
        self._needed = _buckets([*self._versions.values(), *self._leases.values()])
        return self._retire()

    def begin(self, version: int) -> tuple[Manifest | None, tuple[str, ...]]:
        """Reserve a version for writing; retires versions right away to make room.

        Returns:
            The previous version, which is kept until this one ends, and the keys of buckets to free.

        Raises:
            WeightsError: it exists, is being written, or is not newer than the latest.
        """
        if version in self._writing:
            raise WeightsError(f"version {version} is already being written")
        if self.latest is not None and version <= self.latest:
            raise WeightsError(f"version {version} is not newer than the latest, {self.latest}: versions are immutable")
        # The base is pinned while the new version is written: the draft places unchanged tensors in its buckets.
        base = None if self.latest is None else self._versions[self.latest]
        self._writing[version] = base
        # Room is made before the write, not after it: otherwise one version more than `keep_versions` would be in
        # memory at the peak. The base's size stands for the size of the new version, which is not drafted yet.
        return base, self._retire(new_bytes=base.bytes if base else 0)

    def commit(self, manifest: Manifest) -> tuple[str, ...]:
        """Make a written version visible and move `latest`.

        Raises:
            WeightsError: the version was not begun, was aborted, or another one was committed meanwhile that is newer
                or does not hold its unchanged tensors.
        """
        version = manifest.version
        # A publish that began before a rollback may finish after it, under a number that was begun again: the epoch
        # tells them apart.
        if manifest.epoch != self.epoch or version not in self._writing:
            raise WeightsError(f"version {version} was not begun, or was aborted")
        if self.latest is not None and version <= self.latest:
            raise WeightsError(f"version {version} comes too late: {self.latest} was committed meanwhile")
        base = self._writing[version]
        # Its unchanged tensors are those of its base. If another version came in between, they may be stale.
        if manifest.written != manifest.buckets and (base is None or base.version != self.latest):
            raise WeightsError(
                f"version {version} shares tensors with {base and base.version}, and {self.latest} was committed "
                "meanwhile",
                hint="publish one version after the other",
            )
        del self._writing[version]
        self._versions[version] = manifest
        return self._retire()

    def abort(self, version: int, *, epoch: int = 0) -> tuple[str, ...]:
        """Abandon a version that is being written; does nothing if it is not, or was begun before a rollback."""
        if epoch != self.epoch or version not in self._writing:
            return ()
        del self._writing[version]
        return self._retire()

    def rollback(self, version: int) -> tuple[str, ...]:
        """Forget all later versions, which will be written again; abandons any version being written.

        Readers of a forgotten version continue.
        """
        self.epoch += 1
        # Writers free their own segments when their commit is refused; see the class.
        self._writing.clear()
        for newer in [number for number in self._versions if number > version]:
            del self._versions[newer]
        return self._retire()

    @property
    def in_use(self) -> frozenset[str]:
        """Keys of the buckets of the latest version and of leased ones. Others may still be requested, but seldom
        are."""
        latest = [] if self.latest is None else [self._versions[self.latest]]
        return frozenset(_buckets([*latest, *self._leases.values()]))

    def needs(self, key: str) -> bool:
        """True if a kept version, a leased one or the base of a write has this bucket."""
        return key in self._needed

    def lease(self, lease: str, version: int | None = None) -> Manifest:
        """Return a version's manifest, by default the latest one's, and keep the version until this lease is released.

        Raises:
            WeightsError: the version does not exist.
        """
        number = self.latest if version is None else version
        if number is None or number not in self._versions:
            listing = ", ".join(map(str, sorted(self._versions))) or "none"
            raise WeightsError(f"there is no version {number} of the weights; held: {listing}")
        # The lease holds the manifest, not the number: after a rollback, the number may belong to other weights.
        self._leases[lease] = self._versions[number]
        return self._versions[number]

    def release(self, lease: str) -> tuple[str, ...]:
        """End a lease; does nothing if it has already ended or never began."""
        return self._retire() if self._leases.pop(lease, None) else ()

    def _retire(self, new_bytes: int = 0) -> tuple[str, ...]:
        """Drop versions beyond the limits and return the keys of freed buckets; `new_bytes`, if not 0, is the size of a
        version about to be written."""
        # The version being written counts as one, under a key that no bucket has.
        num_versions, bucket_sizes = (1, {"": new_bytes}) if new_bytes else (0, {})
        leased = {(manifest.version, manifest.epoch) for manifest in self._leases.values()}
        for version in sorted(self._versions, reverse=True):
            # A leased version does not take a kept version's place: it stays anyway, and slow readers must not push out
            # versions that others will ask for.
            if (version, self._versions[version].epoch) in leased:
                continue
            num_versions += 1
            # Newest first, so that a bucket shared by several versions is counted once, with the newest.
            bucket_sizes |= _buckets([self._versions[version]])
            if version != self.latest and (
                num_versions > self._keep_versions or sum(bucket_sizes.values()) > self._keep_bytes
            ):
                del self._versions[version]
        # Buckets are freed only when no kept version, lease or base has them: versions share buckets.
        bases = (base for base in self._writing.values() if base is not None)
        old_sizes = self._needed
        self._needed = _buckets([*self._versions.values(), *self._leases.values(), *bases])
        return tuple(key for key in old_sizes if key not in self._needed)


def _buckets(manifests: Iterable[Manifest]) -> dict[str, int]:
    """Return the size of each bucket of these versions, by key."""
    return {bucket.key: bucket.bytes for manifest in manifests for bucket in manifest.buckets}
