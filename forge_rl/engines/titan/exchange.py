"""Exchange of shards between a trainer's hosts, so that each host writes whole tensors into its own memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

import torch
import torch.distributed as dist

from forge_rl.weights.manifest import Bucket, Manifest, TensorEntry
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard, to_write

_ROUND_BYTES = 1 << 30
"""Bytes of the buckets whose shards are exchanged together, over all ranks; bounds the memory of an exchange."""
_ALIGN = 8
"""Alignment of a shard in a message."""

_Leaving: TypeAlias = dict[int, list[tuple[int, TensorEntry, LocalShard]]]
"""Shards to send to each rank, each with the index of its tensor in the draft, and its entry."""


def shards_of_own_host(
    drafted: Manifest, shards: Iterable[LocalShard], hosts: Sequence[str], device: torch.device
) -> list[LocalShard]:
    """Send shards to the hosts that their tensors' buckets were reserved on. Every rank calls this.

    Args:
        drafted: manifest with the host of each bucket that the version writes.
        shards: this rank's shards.
        hosts: host of each rank.
        device: device of the process group's tensors.

    Returns:
        Shards of the buckets on this rank's host: its own unchanged, and received ones in their published dtype. Over
            all ranks, every shard is there exactly once, as before.
    """
    rank = dist.get_rank()
    host_of = {bucket.key: bucket.host for bucket in drafted.written}
    index_of = {entry.name: index for index, entry in enumerate(drafted.tensors)}
    host_shards: list[LocalShard] = []
    leaving: dict[str, list[tuple[int, TensorEntry, LocalShard]]] = defaultdict(list)
    for entry, shard in to_write(drafted, shards):
        if host_of[entry.bucket] == hosts[rank]:
            host_shards.append(shard)
        else:
            # Kept by bucket, so that each round sends the buckets of its own.
            leaving[entry.bucket].append((index_of[entry.name], entry, shard))
    # All ranks take part in every round, also those with nothing to send.
    for buckets in _rounds(drafted.written):
        rank_shards: _Leaving = defaultdict(list)
        for bucket in buckets:
            if bucket.key in leaving:
                rank_shards[_counterpart(rank, hosts, bucket.host)] += leaving.pop(bucket.key)
        host_shards += _exchange(drafted, rank_shards, device)
    return host_shards


def _rounds(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Split buckets into runs of at most _ROUND_BYTES, or of one bucket; the same on all ranks."""
    run: list[Bucket] = []
    for bucket in buckets:
        if run and sum(b.bytes for b in run) + bucket.bytes > _ROUND_BYTES:
            yield run
            run = []
        run.append(bucket)
    if run:
        yield run


def _counterpart(rank: int, hosts: Sequence[str], host: str) -> int:
    """Return this rank's counterpart on another host."""
    # Ranks of one host send to different ranks of another, which spreads the load.
    local_rank = hosts[:rank].count(hosts[rank])
    peers = [peer for peer, peer_host in enumerate(hosts) if peer_host == host]
    return peers[local_rank % len(peers)]


def _exchange(drafted: Manifest, leaving: _Leaving, device: torch.device) -> list[LocalShard]:
    """Send shards to other ranks, and return those received, as views of one message."""
    world = dist.get_world_size()
    headers, messages = list[list[int]](), list[torch.Tensor]()
    # A header names each shard's tensor, start and size, from which the receiver knows how to cut the message.
    for rank in range(world):
        shards = leaving.get(rank, [])
        headers.append([n for index, _, s in shards for n in (index, *s.tensor_slice.start, *s.tensor_slice.size)])
        parts = [_bytes_of(shard.values.detach().to(device, entry.torch_dtype)) for _, entry, shard in shards]
        messages.append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device))
    # Sizes first, so that every rank can allocate what it receives.
    counts = torch.tensor([[len(h), len(m)] for h, m in zip(headers, messages, strict=True)], device=device)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)
    numbers = torch.tensor(list(chain(*headers)), dtype=torch.int64, device=device)
    header = _all_to_all(numbers, counts[:, 0], received_counts[:, 0])
    message = _all_to_all(torch.cat(messages), counts[:, 1], received_counts[:, 1])
    return list(_read(drafted, header.tolist(), message))


def _all_to_all(values: torch.Tensor, counts: torch.Tensor, received_counts: torch.Tensor) -> torch.Tensor:
    """Send each rank its run of `values`; returns what the ranks sent, in their order."""
    received = values.new_empty(int(received_counts.sum()))
    dist.all_to_all_single(received, values, received_counts.tolist(), counts.tolist())
    return received


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, padded to the alignment."""
    flat = values.contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % _ALIGN))


def _read(drafted: Manifest, header: list[int], message: torch.Tensor) -> Iterator[LocalShard]:
    position = offset = 0
    while position < len(header):
        entry = drafted.tensors[header[position]]
        dims = len(entry.shape)
        start, size = header[position + 1 : position + 1 + dims], header[position + 1 + dims : position + 1 + 2 * dims]
        tensor_slice = TensorSlice(start=tuple(start), size=tuple(size))
        length = replace(entry, shape=tensor_slice.size).bytes
        values = message[offset : offset + length].view(entry.torch_dtype).view(tensor_slice.size)
        yield LocalShard(name=entry.name, tensor_slice=tensor_slice, values=values)
        # A header entry is the tensor's index, then a start and a size for each dim.
        position, offset = position + 1 + 2 * dims, offset + length + -length % _ALIGN
