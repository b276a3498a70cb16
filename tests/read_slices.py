"""Reads slices of a version into tensors, as an engine's loader does."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Manifest, ShardReport, combine_shards
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import Transport


async def read_slices(
    transport: Transport, manifest: Manifest, wants: Mapping[str, TensorSlice], places: Mapping[str, torch.Tensor]
) -> list[ShardReport]:
    """Copy slices to their places; reports what was read."""
    reports = []
    async with contextlib.aclosing(transport.fetch(manifest)) as buckets:
        async for bucket in buckets:
            with bucket.open() as tensors:
                for entry in (bucket_entry for bucket_entry in bucket.entries if bucket_entry.name in wants):
                    part = wants[entry.name]
                    (fingerprint,) = move([Move(places[entry.name], part.of(tensors[entry.name]), entry.shape, part)])
                    reports.append(ShardReport(name=entry.name, tensor_slice=part, fingerprint=fingerprint))
    return reports


async def read_version(transport: Transport, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Read all tensors of a version, whose fingerprints must be those of the manifest."""
    tensors = {entry.name: torch.empty(entry.shape, dtype=entry.torch_dtype) for entry in manifest.tensors}
    slices = {entry.name: TensorSlice.whole(entry.shape) for entry in manifest.tensors}
    reports = await read_slices(transport, manifest, slices, tensors)
    manifest.attest(combine_shards(reports, version=manifest.version), "the test")
    return tensors
