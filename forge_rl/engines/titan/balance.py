"""Splits a row's tokens between context-parallel ranks so that attention costs each of them about the same work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor.experimental._attention import _PTRRLoadBalancer

from forge_rl.engines.devices import device_type
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.protocol import LoadBalancer
from forge_rl.packing.rows import Row

_BLOCK = {"cuda": 128, "cpu": 1024}
"""Maximum tokens of a block that "ptrr" assigns, by device type: a block of FlexAttention's, and as many as the CPU's
attention needs to be as fast as over one range."""
_LEAST_BLOCKS = 4
"""Minimum blocks per rank that "ptrr" assigns."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Assignment of a row's tokens to the ranks that split it."""

    tokens: torch.Tensor
    """[ranks, L / ranks] int64, positions in the row of each rank's tokens, in the rank's order."""
    heaviest: int
    """Attention work of the rank with the most, see `attention_work`."""
    plain: int
    """`heaviest`, if each rank had a contiguous part of the row."""
    mean: float
    """Mean attention work of a rank."""

    @property
    def order(self) -> torch.Tensor | None:
        """Positions of all ranks' tokens, rank after rank, [L] int64; None if they are in the row's order."""
        order = self.tokens.flatten()
        return None if bool((order.diff() == 1).all()) else order


def attention_work(row: Row, architecture: Architecture) -> torch.Tensor:
    """Return the number of keys that each token of a row attends to, summed over layers, `[L]` int64."""
    # A token sees everything up to itself, except keys whose `until` has passed: those are in other branches.
    end_counts = torch.zeros(len(row) + 1, dtype=torch.int64)
    end_counts.index_add_(0, row.until.long(), torch.ones(len(row), dtype=torch.int64))
    attended_keys = torch.arange(1, len(row) + 1) - end_counts[:-1].cumsum(0)
    if architecture.window is None:
        return architecture.layers * attended_keys
    num_window_layers = len(architecture.window_layers)
    # In padding no token is far away.
    window_keys = torch.where(row.trees < 0, attended_keys, attended_keys.clamp(max=architecture.window))
    return (architecture.layers - num_window_layers) * attended_keys + num_window_layers * window_keys


def split_row(row: Row, ranks: int, balancer: LoadBalancer, architecture: Architecture) -> Split:
    """Split a row between ranks, which all get the same number of tokens; deterministic.

        split = split_row(row, 4, "auto", architecture)
        local_ids = row.token_ids[split.tokens[rank]]

    Args:
        ranks: must divide the row's length.
        balancer: see `TrainSettings.context_parallel_load_balancer`.
    """
    assert len(row) % ranks == 0, f"a row of {len(row)} tokens is not padded for {ranks} ranks"
    work = attention_work(row, architecture)
    mean = float(work.sum()) / ranks
    splits = {name: (tokens, int(work[tokens].sum(1).max())) for name, tokens in _splits(work, ranks)}
    # Reordering copies keys and values, which is not worth saving less than a percent. On a tie, "none" wins, as it
    # comes first.
    choice = min(splits, key=lambda name: round(splits[name][1] / mean, 2)) if balancer == "auto" else balancer
    tokens, heaviest = splits[choice]
    return Split(tokens=tokens, heaviest=heaviest, plain=splits["none"][1], mean=mean)


def _splits(work: torch.Tensor, ranks: int) -> Iterator[tuple[LoadBalancer, torch.Tensor]]:
    """Yield each balancer's name, and how it assigns tokens to ranks, [ranks, L / ranks]."""
    share = len(work) // ranks
    yield "none", torch.arange(len(work)).view(ranks, share)
    heads = torch.arange(ranks)
    yield "headtail", _tokens(torch.stack([heads, 2 * ranks - 1 - heads], dim=1), share)
    parts = max(min(_LEAST_BLOCKS, share), -(-share // _BLOCK[device_type()]))
    size = share // parts
    # Tokens that fill no block are few, and left out of the balance.
    block_work = work[: ranks * parts * size].view(-1, size).sum(1)
    yield "ptrr", _tokens(_PTRRLoadBalancer.ptrr_scheduling(block_work, ranks), share)


def _tokens(blocks: torch.Tensor, share: int) -> torch.Tensor:
    """Return the tokens of each rank, [ranks, share], from the indices of its equal blocks, [ranks, parts].

    The blocks are as long as possible; each rank also gets its part of the tokens that are left at the row's end.
    """
    ranks, parts = blocks.shape
    size = share // parts
    block_tokens = blocks[..., None] * size + torch.arange(size)
    rest = torch.arange(ranks * parts * size, ranks * share).view(ranks, -1)
    return torch.cat([block_tokens.flatten(1), rest], dim=1)
