"""Attention masks of packed rows, and settings by which a few compiled graphs serve rows of every length."""

from __future__ import annotations

import itertools

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torchtitan.models.common.attention import FlexAttention, create_attention_mask

from forge_rl.engines.titan.cpu_attention import MASK_BYTES, TreeMask, tree_masks
from forge_rl.packing.rows import Row, attends

Mask = tuple[TreeMask, ...] | BlockMask
"""Attention mask of a row: one mask per tree on CPU, a block mask on CUDA."""

_LENGTHS = (
    # flex_attention: tokens, including those of tensors that its arguments are views of, and blocks of tokens
    *(rf"L\['(query|key|value)'\]{dim}" for dim in (":2", r"\._base:0", r"\._base:1")),
    r"L\['block_mask'\]\.seq_lengths",
    *(rf"L\['block_mask'\]\.(full_)?(kv|q)_{part}" for part in ("num_blocks:2", "indices:2", "indices:3")),
    # create_block_mask
    r"L\['(Q|KV)_LEN'\]",
    # both: the closure of `block_mask`, whose first cell is `queries`
    r".*mask_mod.*(\.(until|positions)|__closure__\[0\]\.cell_contents)",
)
"""Dynamo sources that vary with a row's length, with the varying dim where there are several."""


def compile_once(max_graphs: int = 16) -> None:
    """Let one compiled graph of each kind serve rows of all lengths, and make torch.compile fail past `max_graphs`.

    By default Dynamo specialises on the first length and recompiles for others. After 8 graphs of a function it
    silently runs it uncompiled, in which case FlexAttention materialises all scores of a row. Here a model takes one
    graph for its mask and two for its attention, with and without gradients, and as many again with a sliding window.
    Rows of a single block, 128 tokens, would need separate graphs: `Layout.least_tokens` avoids them.

    Args:
        max_graphs: maximum graphs of a function in this process.
    """
    from torch._dynamo import config

    config.recompile_limit = max_graphs
    config.fail_on_recompile_limit_hit = True
    torch.compiler.config.dynamic_sources = ",".join(_LENGTHS)


def compile_attention() -> None:
    """Compile FlexAttention with torch's default options instead of an exhaustive search for the fastest kernel.

    torchtitan's search compiles seven kernels for every pass of every graph: 57 s for one pass in float32 on an H100.
    """
    options = FlexAttention.inductor_configs | {"max_autotune": False, "coordinate_descent_tuning": False}
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=options)


def attention_mask(
    row: Row, queries: torch.Tensor | None = None, *, window: int | None = None
) -> Mask | dict[str, Mask]:
    """Return a packed row's attention mask for the model; with a window, one mask for each kind of layer.

    Args:
        queries: positions of the queries to mask, [n] int64, over the keys of the whole row; by default all.
        window: sliding window in tokens, see `Architecture.window`.
    """
    make = _tree_masks if row.trees.device.type == "cpu" else block_mask
    if window is None:
        return make(row, queries, None)
    # torchtitan defines these keys.
    return {"basic_mask": make(row, queries, None), "sliding_window_mask": make(row, queries, window)}


def _tree_masks(row: Row, queries: torch.Tensor | None, window: int | None) -> tuple[TreeMask, ...]:
    """Return the trees' masks for each run of consecutive queries in turn."""
    if queries is None:
        return tree_masks(row, slice(0, len(row)), window)
    ends = [0, *((queries.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(queries)]
    runs = [slice(int(queries[first]), int(queries[end - 1]) + 1) for first, end in itertools.pairwise(ends)]
    # The runs of a split row share the memory for kept biases that a whole row would have.
    return tuple(mask for run in runs for mask in tree_masks(row, run, window, MASK_BYTES // len(runs)))


@torch.no_grad()  # otherwise it would be compiled for each grad mode
def block_mask(row: Row, queries: torch.Tensor | None, window: int | None = None) -> BlockMask:
    """Return FlexAttention's block mask; takes the arguments of `attention_mask`."""

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        # Under context parallelism this rank's queries are scattered over the row; the keys are always the whole row's.
        q = q if queries is None else queries[q]
        is_visible = attends(row.until, q, k)
        return is_visible if window is None else is_visible & (row.positions[q] - row.positions[k] < window)

    size = len(row) if queries is None else len(queries)
    mask: BlockMask = create_attention_mask(mask_mod, 1, None, size, len(row), device=str(row.trees.device))
    return mask
