"""Masks of packed rows as attention takes them, and the few compiled graphs that serve rows of every length."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.common.attention import create_attention_mask

from forge_rl.data.packing import Row, attends
from forge_rl.engines.titan.attention import TreeMask, tree_masks

Mask = tuple[TreeMask, ...] | BlockMask
"""Mask by which an attention layer sees a row: the mask of each tree on CPU, else blocks."""

_LENGTHS = (
    # of flex_attention: tokens, also of what its arguments are views of, and blocks of tokens
    *(rf"L\['(query|key|value)'\]{dim}" for dim in (":2", r"\._base:0", r"\._base:1")),
    r"L\['block_mask'\]\.seq_lengths",
    *(rf"L\['block_mask'\]\.(full_)?(kv|q)_{part}" for part in ("num_blocks:2", "indices:2", "indices:3")),
    # of create_block_mask
    r"L\['(Q|KV)_LEN'\]",
    # what `block_mask` closes over, of both
    r".*mask_mod.*\.(trees|branches|positions|start)",
)
"""Sources of Dynamo's that vary with a row's length, each with the dim that does where it is not the only one."""


def compile_once(most: int = 16) -> None:
    """Have one compiled graph of each kind serve rows of all lengths, and make torch.compile fail past a few.

    By default Dynamo compiles the first length by itself, and again for those that differ; after 8 graphs of a function
    it would run it uncompiled, without a word: FlexAttention then holds all scores of a row. Here a model takes one
    graph for its mask and two for its attention, with and without gradients, and as many again with a sliding window.
    Rows of a single block, 128 tokens, would take graphs of their own: `Layout.least_tokens` avoids them.

    Args:
        most: graphs of a function in this process.
    """
    from torch._dynamo import config

    config.recompile_limit = most
    config.fail_on_recompile_limit_hit = True
    torch.compiler.config.dynamic_sources = ",".join(_LENGTHS)


def attention_mask(row: Row, queries: slice | None = None, *, window: int | None = None) -> Mask | dict[str, Mask]:
    """Return a packed row's mask as the model takes it; with a window two, from which each layer takes its own.

    Args:
        queries: mask these tokens only, whose keys are those of the whole row.
        window: tokens that a sliding window shows, see `Architecture.window`.
    """
    queries = queries or slice(0, len(row))
    make = tree_masks if row.trees.device.type == "cpu" else block_mask
    if window is None:
        return make(row, queries, None)
    # The keys are torchtitan's.
    return {"basic_mask": make(row, queries, None), "sliding_window_mask": make(row, queries, window)}


@torch.no_grad()  # else it would be compiled for each mode
def block_mask(row: Row, queries: slice, window: int | None = None) -> BlockMask:
    """Return the mask of FlexAttention, in blocks; arguments as those of `attention_mask`."""

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q = q + queries.start
        seen = attends(row.trees, row.branches, q, k)
        return seen if window is None else seen & (row.positions[q] - row.positions[k] < window)

    size = queries.stop - queries.start
    return create_attention_mask(mask_mod, 1, None, size, len(row), device=str(row.trees.device))
