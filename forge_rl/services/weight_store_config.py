"""Settings of the weight store service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from forge_rl.errors import check_flags
from forge_rl.flags.categories import Category
from forge_rl.runtime.supervision import Restart

KEEP_BYTES = 64 << 30
"""Memory of kept versions beyond which only the newest is kept. That one and the one being written are held in any
case, so that the number of versions is what bounds the memory of a large model."""


@dataclass(frozen=True, kw_only=True)
class WeightStoreConfig:
    """The weight store: how versions travel, and how many are kept."""

    CATEGORY: ClassVar[Category] = Category.OPERATIONAL

    transport: Literal["auto", "shared_memory", "torchstore"] = "auto"
    """How weights travel. auto uses shared memory if it has room, otherwise torchstore if it is installed."""
    shm: Path = Path("/dev/shm")
    """Shared-memory folder for the versions."""
    bucket_mib: int = 64
    """Size of a bucket, which is written and loaded as a unit; a larger tensor gets its own bucket."""
    keep_versions: int = 2
    """Number of newest versions to keep, including the one being written; versions being read are kept as well."""
    probes: int | None = None
    """Number of short texts, at most 8, by which each version is attested: trainer and engines score them, and an
    engine whose logprobs do not follow the trainer's from version to version ends the run. By default 1 in float32, 3
    in bfloat16, and 0 for engines of --generator.urls; 0 compares bytes alone."""
    restart: Restart = field(default_factory=Restart)
    """How the store's processes are restarted if they die; versions survive in shared memory."""
    mirror: str = ""
    """Address to which versions are also written, for engines elsewhere: a folder in any of fsspec's file systems, such
    as s3://bucket/run, which only this run writes to. It gets what changed of each version, and now and then a whole
    one."""
    mirror_full_every: int = 20
    """Number of versions after which one is written to --weights.mirror whole again."""

    def __post_init__(self) -> None:
        minimums = {"keep_versions": 1, "bucket_mib": 1, "mirror_full_every": 1}
        check_flags(self, "--weights.", minimum=minimums)
        if self.probes is not None:
            check_flags(self, "--weights.", minimum={"probes": 0}, maximum={"probes": 8})

    def held_bytes(self, version_bytes: int) -> int:
        """Return the maximum bytes that versions of this size take; one is held while the next is written."""
        return max(2 * version_bytes, min(self.keep_versions * version_bytes, KEEP_BYTES))
