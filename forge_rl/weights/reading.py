"""Reads only the slices of a version that a reader's layout needs, directly to their destination."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from forge_rl.errors import WeightsError
from forge_rl.weights.fingerprints import Move, combine, move
from forge_rl.weights.manifest import Manifest, ShardReport
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import TensorBucket, Transport


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """Report of one reader: the slices of a version that it read."""

    version: int
    bytes: int
    """Bytes read from shared memory, in the published dtype."""
    slices: dict[str, TensorSlice]
    """Slices read, by Hugging Face name."""
    fingerprints: dict[str, int]
    """Fingerprints of the bytes read, by name; `combine_reports` sums them over readers."""


async def read_slices(
    transport: Transport, manifest: Manifest, wants: Mapping[str, TensorSlice], into: Callable[[str], torch.Tensor]
) -> ReadReport:
    """Copy slices of a version to their destinations, fetching only the buckets that hold them.

    Args:
        transport: transport of this host.
        manifest: the version; the caller holds a lease on it.
        wants: slices to read, by Hugging Face name.
        into: destination for a name: of the slice's size and the published dtype, contiguous in its last dim.
            It may be a slice of a larger parameter, such as q's rows of a fused qkv projection.

    Raises:
        WeightsError: the version lacks a tensor, a slice is out of bounds, a destination does not fit, or a bucket was
            freed meanwhile; some slices may have been written by then.
    """
    shapes = {entry.name: entry.shape for entry in manifest.tensors}
    if lacking := wants.keys() - shapes.keys():
        raise WeightsError(f"version {manifest.version} lacks {sorted(lacking)[:3]}", hint="load the same model")
    for name, tensor_slice in wants.items():
        if (
            len(tensor_slice.size) != len(shapes[name])
            or tensor_slice.intersect(TensorSlice.whole(shapes[name])) != tensor_slice
        ):
            raise WeightsError(f"{tensor_slice} lies outside of {name!r}, whose shape is {shapes[name]}")
    fingerprints: dict[str, int] = {}
    read = 0
    async with contextlib.aclosing(transport.fetch(manifest, wants.keys())) as buckets:
        async for bucket in buckets:
            with bucket.open() as tensors:
                moves = _moves(bucket, tensors, wants, into)
                sums = await asyncio.to_thread(move, list(moves.values()))
                fingerprints |= zip(moves, sums, strict=True)
                read += sum(each.source.nbytes for each in moves.values())
                del moves  # holds views of the bucket, which may be gone once the block ends
    if missed := wants.keys() - fingerprints.keys():
        raise WeightsError(f"the buckets of version {manifest.version} did not hold {sorted(missed)[:3]}")
    return ReadReport(version=manifest.version, bytes=read, slices=dict(wants), fingerprints=fingerprints)


def combine_reports(reports: Sequence[ReadReport]) -> dict[str, int]:
    """Combine several readers' fingerprints of slices into whole tensors'; see `combine_shards`.

    Raises:
        WeightsError: the readers read different versions, or as for `combine_shards`.
    """
    if len(versions := {report.version for report in reports}) > 1:
        raise WeightsError(f"readers of one engine took versions {sorted(versions)}", hint="load one version again")
    shards = (
        ShardReport(name=name, tensor_slice=tensor_slice, fingerprint=report.fingerprints[name])
        for report in reports
        for name, tensor_slice in report.slices.items()
    )
    return combine_shards(shards, version=max(versions, default=0))


def combine_shards(shards: Iterable[ShardReport], *, version: int) -> dict[str, int]:
    """Combine fingerprints of slices into whole tensors'.

    A slice that several readers hold counts once. If part of a tensor is missing, its fingerprint differs from the
    manifest's.

    Raises:
        WeightsError: readers hold different values of one slice, or two slices overlap.
    """
    taken: dict[str, dict[TensorSlice, int]] = {}
    for shard in shards:
        others = taken.setdefault(shard.name, {})
        if (found := others.get(shard.tensor_slice)) is None:
            if overlapping := [other for other in others if other.intersect(shard.tensor_slice).numel]:
                raise WeightsError(
                    f"two readers hold parts of {shard.name!r} that overlap: {shard.tensor_slice} and {overlapping[0]}"
                )
            others[shard.tensor_slice] = shard.fingerprint
        elif found != shard.fingerprint:
            raise WeightsError(f"two readers of version {version} hold {shard.name!r} with different values")
    return {name: combine(found.values()) for name, found in taken.items()}


def _moves(
    bucket: TensorBucket,
    tensors: Mapping[str, torch.Tensor],
    wants: Mapping[str, TensorSlice],
    into: Callable[[str], torch.Tensor],
) -> dict[str, Move]:
    moves = {}
    for entry in bucket.entries:
        if entry.name not in wants:
            continue
        tensor_slice, target = wants[entry.name], into(entry.name).detach()
        if tuple(target.shape) != tensor_slice.size or target.dtype != entry.torch_dtype:
            raise WeightsError(
                f"the place for {entry.name!r} is {tuple(target.shape)} of {target.dtype}, "
                f"what is read is {tensor_slice.size} of {entry.torch_dtype}",
                hint="publish in the engine's dtype, and load the same model",
            )
        moves[entry.name] = Move(target, tensor_slice.of(tensors[entry.name]), entry.shape, tensor_slice)
    return moves
