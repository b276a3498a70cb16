"""Attention over a packed row on CUDA: FlashAttention where the row is sequences, FlexAttention where it is trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.common.attention import FlexAttention

from forge_rl.packing.rows import Row

_MAX_HEAD_DIM = 256
"""Largest head dimension that FlashAttention supports."""


@dataclass(frozen=True)
class Sequences:
    """Causal sequences, one after the other, that fill a row."""

    ends: torch.Tensor
    """[sequences + 1] int32: 0, and the end of each."""
    longest: int
    """Tokens of the longest."""


def sequences(row: Row) -> Sequences | None:
    """Return the sequences of a row in host memory; None if some share a prefix.

    Padding counts as a sequence. The lengths are found in host memory, so no device sync is needed.
    """
    until = row.until
    # In plain sequences, `until` changes exactly where one ends and the next starts. A shared prefix is visible to all
    # of its branches, so its `until` lies beyond the place where the first branch starts.
    starts = 1 + (until[1:] != until[:-1]).nonzero()[:, 0]
    if not torch.equal(until[starts - 1].long(), starts):
        return None
    ends = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), len(until))])
    return Sequences(ends.int(), int(ends.diff().max()))


def takes_sequences(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether FlashAttention supports a dtype and head dimension."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0


class RowAttention(FlexAttention):
    """torchtitan's FlexAttention, or torch's FlashAttention of sequences, as the row's mask says.

    FlashAttention has no gradient by the scores' logsumexp, which attention sinks need, and no mask but causal ones.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """q, k, v and the result are [1, L, heads, head_dim]; `attention_masks` is a `Sequences`, or a block mask."""
        if isinstance(attention_masks, Sequences):
            assert not options, f"FlashAttention takes no {', '.join(options)}"
            ends, longest = attention_masks.ends, attention_masks.longest
            attended = varlen_attn(
                *(q_BLNH[0], k_BLNH[0], v_BLNH[0], ends, ends, longest, longest),
                scale=scale,
                window_size=(-1, 0),  # causal
                enable_gqa=enable_gqa,
            )
            assert isinstance(attended, torch.Tensor), "no logsumexp was asked for"
            return attended[None]
        out: torch.Tensor = super().forward(
            *(q_BLNH, k_BLNH, v_BLNH),
            attention_masks=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
            **options,
        )
        return out
