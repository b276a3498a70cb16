"""Manifest of a weight version. It is committed last, so a reader sees a whole version or none.

A version is stored in buckets: runs of bytes that hold whole tensors one after the other, independent of the layouts
of writers and readers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forge_rl.errors import AttestationError, WeightsError
from forge_rl.weights.slices import TensorSlice, tiling_error

if TYPE_CHECKING:
    import torch  # takes seconds, and processes that only pass manifests on do not need it

BUCKET_BYTES = 64 << 20
"""Maximum size of a bucket; a larger tensor gets a bucket of its own."""

_MOST_SHARED = 1.5
"""A version is rewritten whole once its buckets, including stale tensors, exceed its own size by this factor."""

ALIGN = 64
"""Tensors begin at multiples of this many bytes of their bucket."""

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes per element of the usual dtypes, known without torch."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor that the trainer holds, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    changed: bool = True
    """False for a tensor that is unchanged since the latest version, and therefore not written again."""
    dtype: str = ""
    """Dtype in which it is always published; empty for the version's dtype."""
    fingerprint: int | None = None
    """Fingerprint of its values, if known: if the previous version's tensor has a different one, it is written
    again."""
    adapter_scale: float | None = None
    """Factor on the product of `factor_names`' tensors, the adapter that readers add to it; None without one."""


@dataclass(frozen=True, kw_only=True)
class SegmentRef:
    """Location of a bucket in shared memory, for any process of this user on the host."""

    path: str
    bytes: int
    """Size of the bucket; the file also has a one-page header."""
    token: str
    """Random token, also in the header; changes when the segment is freed and reused."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A run of bytes of one version."""

    key: str
    """VERSION/NUMBER, with the version that wrote it; after a rollback VERSION/EPOCH.NUMBER."""
    bytes: int
    host: str = ""
    """Host on which it is written."""
    segment: SegmentRef | None = None
    """Segment on that host; None if the transport keeps buckets elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One rank's part of a tensor, for transports that store each rank's bytes separately."""

    tensor_slice: TensorSlice
    part: str
    """Key of the bytes that the rank stored."""
    offset: int
    """Offset of its first byte there; the slice is contiguous."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One published tensor, under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name in torch, such as "bfloat16"."""
    bucket: str
    """Key of the bucket that holds it; an older version's if the tensor is unchanged since."""
    offset: int
    """Offset of its first byte in the bucket."""
    fingerprint: int = 0
    """Fingerprint of the published bytes; see fingerprints.py."""
    pieces: tuple[Piece, ...] = ()
    adapter_scale: float | None = None
    """Factor on the product of the adapter that readers add to it; None without an adapter."""
    merged: int | None = None
    """Fingerprint of the sum with the adapter's product, computed by the trainer; None without an adapter."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * (_ITEM_BYTES.get(self.dtype) or self.torch_dtype.itemsize)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def of(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return a view of this tensor in its bucket, `[bytes] uint8`."""
        return bucket[self.offset : self.offset + self.bytes].view(self.torch_dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """Slice of a tensor that a trainer rank wrote or a reader read, and its fingerprint."""

    name: str
    tensor_slice: TensorSlice
    fingerprint: int
    """Fingerprint of the elements in the slice."""
    piece: Piece | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole version, or before its commit a draft without fingerprints.

    async with store.lease() as manifest:
        print(manifest.version, len(manifest.tensors), manifest.bytes)
    """

    version: int
    """Number of this version; counts publishes, not optimizer steps."""
    tensors: tuple[TensorEntry, ...]
    buckets: tuple[Bucket, ...]
    """Buckets that hold its tensors, including buckets shared with earlier versions."""
    epoch: int = 0
    """Number of rollbacks before it was written; distinguishes it from a forgotten version with the same number."""

    @property
    def bytes(self) -> int:
        """Size of all its tensors."""
        return sum(entry.bytes for entry in self.tensors)

    @property
    def written_bytes(self) -> int:
        """Size of the tensors that this version wrote itself."""
        return sum(entry.bytes for entry in self.tensors if is_of(entry.bucket, self.version))

    @property
    def whole_bytes(self) -> int:
        """Size of the model's weights, without the factors of adapters."""
        return sum(entry.bytes for entry in self.tensors if not entry.name.endswith(factor_names("")))

    @property
    def base(self) -> dict[str, int]:
        """Fingerprints of the model's weights without adapters, by name."""
        factors = factor_names("")
        return {entry.name: entry.fingerprint for entry in self.tensors if not entry.name.endswith(factors)}

    @property
    def adapter_scales(self) -> frozenset[float]:
        """Scales of its adapters; empty without adapters."""
        return frozenset(entry.adapter_scale for entry in self.tensors if entry.adapter_scale is not None)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(bucket.key for bucket in self.buckets)

    @property
    def written(self) -> tuple[Bucket, ...]:
        """Buckets written by this version itself."""
        return tuple(bucket for bucket in self.buckets if is_of(bucket.key, self.version))

    @property
    def entries(self) -> dict[str, tuple[TensorEntry, ...]]:
        """This version's tensors by bucket."""
        entries_by_bucket: dict[str, list[TensorEntry]] = {key: [] for key in self.keys}
        for entry in self.tensors:
            entries_by_bucket[entry.bucket].append(entry)
        return {key: tuple(entries) for key, entries in entries_by_bucket.items()}

    def attest(self, fingerprints: Mapping[str, int], reader: str, *, merged: bool = False) -> None:
        """Compare a reader's tensors with the published ones.

        Args:
            fingerprints: fingerprints of the reader's tensors, by name.
            reader: name of the reader for the error.
            merged: the reader has added adapters to the tensors that have one.

        Raises:
            AttestationError: they differ; names the tensors.
        """
        # A reader that adds adapters holds base + scale * B @ A, whose fingerprint the trainer took of its own sum;
        # every other tensor it holds as published.
        expected = {
            entry.name: entry.merged if merged and entry.adapter_scale is not None else entry.fingerprint
            for entry in self.tensors
        }
        differing = [name for name, fingerprint in expected.items() if fingerprints.get(name) != fingerprint]
        if differing:
            names = ", ".join(differing[:5]) + (", …" if len(differing) > 5 else "")
            raise AttestationError(
                f"{reader} holds other weights than version {self.version}: {len(differing)} of "
                f"{len(self.tensors)} tensors differ: {names}",
                hint="do not trust samples from it; report this with the run folder's logs",
            )


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """An engine's report of a load: the version that it holds, with fingerprints as proof."""

    version: int
    fingerprints: dict[str, int]
    """Fingerprints of the tensors that the engine read, by Hugging Face name."""
    in_place: int
    """Number of fingerprints taken of live parameters. The others are of the loader's input, for layers that vLLM
    repacks."""
    bytes_read: tuple[int, ...] = ()
    """Bytes that each worker of the engine read: its own slices, in the published dtype."""
    quantized_bytes: int = 0
    """Bytes of weights that the engine computes with in 8 bits, summed over its workers."""
    served_versions: int = 0
    """Number of versions that the engine can sample with, as adapters over one base; 0 if it merges them."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each stage: waiting for buckets, pausing and resuming, loading, fingerprints, finishing."""


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names of the tensors that hold A, [rank, inputs], and B, [outputs, rank], of a weight's adapter."""
    stem = weight.removesuffix(".weight")
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def is_of(key: str, version: int) -> bool:
    """True if this version wrote the bucket."""
    return key.startswith(f"{version}/")


def written_by(key: str) -> str:
    """Version that wrote the bucket, with its epoch after a rollback."""
    return key.rpartition("." if "." in key else "/")[0]


def _dealt(sizes: Mapping[str, int], hosts: Sequence[str]) -> list[Bucket]:
    """Assign each bucket to the host with the fewest bytes so far."""
    bytes_by_host = dict.fromkeys(hosts, 0)
    buckets = []
    for key, size in sizes.items():
        host = min(bytes_by_host, key=bytes_by_host.__getitem__)
        bytes_by_host[host] += size
        buckets.append(Bucket(key=key, bytes=size, host=host))
    return buckets


def draft(
    specs: Sequence[TensorSpec],
    *,
    version: int,
    dtype: torch.dtype,
    base: Manifest | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    epoch: int = 0,
    hosts: Sequence[str] = ("",),
) -> Manifest:
    """Lay out a version: the tensors to write, and their places in buckets.

    Changing and unchanged tensors go to separate buckets, so that older buckets keep few stale tensors.

    Args:
        specs: every tensor of the model, always in the same order.
        version: version to write.
        dtype: dtype of published tensors whose specs name none.
        base: the previous version, whose buckets keep the unchanged tensors.
        bucket_bytes: maximum size of a bucket.
        epoch: the store's current epoch.
        hosts: hosts of the trainer's ranks; each gets an equal share of the bytes to write, in whole buckets.

    Raises:
        WeightsError: the list of tensors is empty, or two have the same name.
    """
    if not specs:
        raise WeightsError(f"version {version} holds no tensors")
    if len({spec.name for spec in specs}) != len(specs):
        raise WeightsError(f"version {version} holds two tensors of one name")
    default = str(dtype).removeprefix("torch.")
    old_entries = {entry.name: entry for entry in base.tensors} if base is not None else {}
    old_buckets = {bucket.key: bucket for bucket in base.buckets} if base is not None else {}
    entry_by_name: dict[str, TensorEntry] = {}
    sizes: dict[str, int] = {}  # of the buckets to write
    # Two passes, so that no bucket mixes tensors that change with tensors that do not: a bucket stays as long as one of
    # its tensors is needed, and mixed ones would keep every old version's changed tensors in memory.
    for changed in (True, False):
        key = ""
        for spec in (spec for spec in specs if spec.changed is changed):
            old_entry, name = old_entries.get(spec.name), spec.dtype or default
            # A subscriber's store may have missed an earlier update: unchanged since the last one is not unchanged
            # since `base`, and only the fingerprint tells.
            is_same = old_entry is not None and spec.fingerprint in (None, old_entry.fingerprint)
            if (
                not changed
                and is_same
                and old_entry is not None
                and (old_entry.shape, old_entry.dtype) == (spec.shape, name)
            ):
                # The bytes are the old ones, but factors may have changed, so the fingerprint with the adapter added is
                # taken again.
                entry_by_name[spec.name] = replace(old_entry, adapter_scale=spec.adapter_scale, merged=None)
                continue
            entry = TensorEntry(
                name=spec.name,
                shape=spec.shape,
                dtype=name,
                bucket=key,
                offset=sizes.get(key, 0),
                adapter_scale=spec.adapter_scale,
            )
            # A tensor is never split over buckets; one above the limit fills a bucket alone.
            if not key or (sizes[key] and sizes[key] + entry.bytes > bucket_bytes):
                key = f"{version}/{epoch}.{len(sizes)}" if epoch else f"{version}/{len(sizes)}"
                sizes[key] = 0
                entry = replace(entry, bucket=key, offset=0)
            entry_by_name[spec.name] = entry
            sizes[key] += _aligned(entry_by_name[spec.name])
    entries = tuple(entry_by_name[spec.name] for spec in specs)
    shared_keys = dict.fromkeys(entry.bucket for entry in entries if not is_of(entry.bucket, version))
    buckets = _dealt(sizes, hosts) + [old_buckets[key] for key in shared_keys]
    # Stale tensors in shared buckets take memory as long as any neighbour is needed. Past the limit, writing everything
    # once costs less than holding them.
    if shared_keys and sum(bucket.bytes for bucket in buckets) > _MOST_SHARED * sum(map(_aligned, entries)):
        return draft(specs, version=version, dtype=dtype, bucket_bytes=bucket_bytes, epoch=epoch, hosts=hosts)
    return Manifest(version=version, tensors=entries, buckets=tuple(buckets), epoch=epoch)


def _aligned(entry: TensorEntry) -> int:
    """Bytes that a tensor takes in a bucket, with padding."""
    return -(-entry.bytes // ALIGN) * ALIGN


def complete(drafted: Manifest, ranks: Sequence[Sequence[ShardReport]], merged: Iterable[ShardReport] = ()) -> Manifest:
    """Make the manifest of a version from its draft and the reports of all ranks.

    Args:
        drafted: what the ranks were to write.
        ranks: slices that each rank wrote.
        merged: slices of the weights that have an adapter, with its product added.

    Raises:
        WeightsError: together the ranks did not write exactly the drafted tensors, or did not add up an adapter.
    """
    from forge_rl.weights.fingerprints import combine

    merged_by_name: dict[str, list[ShardReport]] = {}
    for report in merged:
        merged_by_name.setdefault(report.name, []).append(report)

    by_name: dict[str, list[ShardReport]] = {}
    for report in (report for rank in ranks for report in rank):
        by_name.setdefault(report.name, []).append(report)
    entries = []
    for entry in drafted.tensors:
        # Shared with an older version, which attested it when it was written.
        if not is_of(entry.bucket, drafted.version):
            entries.append(entry)
            continue
        reports = by_name.pop(entry.name, [])
        if problem := tiling_error(entry.shape, [report.tensor_slice for report in reports]):
            raise WeightsError(
                f"the ranks' shards of {entry.name!r} for version {drafted.version} do not fit: {problem}"
            )
        entries.append(
            replace(
                entry,
                fingerprint=combine(report.fingerprint for report in reports),
                pieces=tuple(report.piece for report in reports if report.piece is not None),
            )
        )
    # Adapters: the trainer's fingerprint of each weight with the product added, also for weights of older versions.
    for number, entry in enumerate(entries):
        if entry.adapter_scale is None:
            continue
        reports = merged_by_name.get(entry.name, [])
        if problem := tiling_error(entry.shape, [report.tensor_slice for report in reports]):
            raise WeightsError(f"the ranks did not add the adapter of {entry.name!r} to all of it: {problem}")
        entries[number] = replace(entry, merged=combine(report.fingerprint for report in reports))
    # Reports that are left over name tensors that the draft lacks.
    if by_name:
        raise WeightsError(f"version {drafted.version} was not to hold {sorted(by_name)[:3]}, which a rank wrote")
    return replace(drafted, tensors=tuple(entries))


def combine_shards(shards: Iterable[ShardReport], *, version: int) -> dict[str, int]:
    """Combine fingerprints of readers' slices to fingerprints of whole tensors; a slice that several readers hold
    counts once.

    Raises:
        WeightsError: readers hold different values of one slice, or two slices overlap.
    """
    from forge_rl.weights.fingerprints import combine

    fingerprints: dict[str, dict[TensorSlice, int]] = {}
    for shard in shards:
        by_slice = fingerprints.setdefault(shard.name, {})
        # Data-parallel workers hold equal slices, which count once. Partly overlapping ones would be counted twice in
        # the sum and could never match.
        if (fingerprint := by_slice.get(shard.tensor_slice)) is None:
            if overlapping := [other for other in by_slice if other.intersect(shard.tensor_slice).numel]:
                raise WeightsError(
                    f"two readers hold parts of {shard.name!r} that overlap: {shard.tensor_slice} and {overlapping[0]}"
                )
            by_slice[shard.tensor_slice] = shard.fingerprint
        elif fingerprint != shard.fingerprint:
            raise WeightsError(f"two readers of version {version} hold {shard.name!r} with different values")
    return {name: combine(slices.values()) for name, slices in fingerprints.items()}
