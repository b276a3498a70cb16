"""Tree attention on CPU: the fused kernel over blocks of queries, without a mask of a whole row or a saved mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torchtitan.models.common.attention import FlexAttention

from forge_rl.packing.rows import Row

MASK_BYTES = 32 << 20
"""Maximum bytes of a mask, which the kernel takes in the queries' dtype; bounds the queries of a block."""
_BRANCHED_QUERIES = 256
"""Maximum queries of a block where segments branch, so that it sees few keys of other segments."""
_FEW_KEYS = 0.75
"""A block that sees a smaller share of the keys up to its end copies the visible ones."""
_LEAST_BLOCK = 512
"""Minimum tokens of a block on the diagonal of a causal mask that is computed in blocks."""
_GROUP_BYTES = 8 << 20
"""Maximum bytes of keys, repeated for each query head, that are computed for all heads at once."""
_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


Keys: TypeAlias = slice | torch.Tensor
"""Positions of the keys that a block of queries may see: a range, or their indices, [n] int64."""


@dataclass(frozen=True)
class TreeMask:
    """Mask of one tree: queries see the keys of their prefix, at most the last `window`."""

    first: int
    """Index of the tree's first key in the row."""
    until: torch.Tensor
    """[m] int32, end of the positions that see each key, counted from `first`; see `Row.until`."""
    queries: int
    """Number of queries, which are the last of the m positions."""
    branched: bool
    """False if the tree is a single sequence: a query then sees all earlier keys, or those in its window."""
    positions: torch.Tensor
    """[m] int64, position of each key in its own segment; see `Row.positions`."""
    window: int | None = None
    """Sliding window in tokens, including the query's own."""
    kept_bytes: int = MASK_BYTES
    """Maximum bytes of biases that are kept for the next layers."""
    _kept: dict[torch.dtype, list[tuple[slice, Keys, torch.Tensor]]] = field(default_factory=dict)

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Keys, torch.Tensor | None]]:
        """Yield blocks of queries, the keys that they may see, and the bias on their scores, [n, m] of `dtype`.

        A bias of None stands for a causal mask, with the queries as the last of the keys' tokens.
        """
        keys = len(self.until)
        if not self.branched and (self.window is None or keys <= self.window):
            yield slice(0, self.queries), slice(0, keys), None
            return
        if dtype in self._kept:
            yield from self._kept[dtype]
            return
        cached_blocks: list[tuple[slice, Keys, torch.Tensor]] | None = []
        free_bytes = self.kept_bytes
        # Blocks are yielded as they are made, and kept until it turns out that all of them together are too large.
        for block in self._blocks(dtype):
            yield block
            free_bytes -= block[2].nbytes
            if cached_blocks is not None and free_bytes >= 0:
                cached_blocks.append(block)
            else:
                cached_blocks = None
        if cached_blocks is not None:  # small enough to be shared by all layers
            self._kept[dtype] = cached_blocks

    def _blocks(self, dtype: torch.dtype) -> Iterator[tuple[slice, Keys, torch.Tensor]]:
        keys, offset = len(self.until), len(self.until) - self.queries
        # As many queries as keep one block's bias within MASK_BYTES.
        rows = max(1, MASK_BYTES // (keys * dtype.itemsize))
        if self.branched:
            rows = min(rows, _BRANCHED_QUERIES)
        for first in range(0, self.queries, rows):
            end = min(first + rows, self.queries)
            visible_keys = self._seen(offset + first, offset + end)
            yield slice(first, end), visible_keys, self._bias(offset + first, offset + end, visible_keys, dtype)

    def _seen(self, first: int, end: int) -> Keys:
        """Return the keys that any query in [first, end) sees; all up to the end, if it sees most of them."""
        if not self.branched:
            return slice(0, end)
        visible_keys = (self.until[:end] > first).nonzero()[:, 0]
        # Indexing copies the keys, which pays off only if enough of them are left out.
        return visible_keys if len(visible_keys) < _FEW_KEYS * end else slice(0, end)

    def _bias(self, first: int, end: int, visible_keys: Keys, dtype: torch.dtype) -> torch.Tensor:
        """Return 0 where a query in [first, end) sees a key, else -inf, `[1, 1, end - first, keys]`."""
        index = torch.arange(end, device=self.until.device)
        query, key = index[first:, None], index[visible_keys]
        # Two kinds of keys are hidden: later tokens, and tokens of other branches, whose visibility ends at `until`.
        hidden = (key > query) | (query >= self.until[visible_keys])
        if self.window is not None:
            hidden |= self.positions[first:end, None] - self.positions[visible_keys] >= self.window
        bias = torch.zeros(1, 1, end - first, len(key), dtype=dtype, device=index.device)
        return bias.masked_fill_(hidden, float("-inf"))


def tree_masks(
    row: Row, queries: slice, window: int | None = None, kept_bytes: int = MASK_BYTES
) -> tuple[TreeMask, ...]:
    """Return the masks of the trees that contain any of the queries, in order; see `TreeMask`."""
    first, end = queries.start, queries.stop
    ends = torch.unique_consecutive(row.trees, return_counts=True)[1].cumsum(0).tolist()
    spans = ((key, max(key, first), min(stop, end)) for key, stop in zip([0, *ends], ends, strict=False))
    return tuple(
        TreeMask(
            first=key,
            until=row.until[key:stop] - key,
            queries=stop - query,
            branched=bool((row.until[key:stop] < stop).any()),
            positions=row.positions[key:stop],
            window=window,
            kept_bytes=kept_bytes,
        )
        for key, query, stop in spans
        if query < stop
    )


class TreeAttention(FlexAttention):
    """Attention tree by tree with the CPU's fused kernel, as FlexAttention has no backward on CPU.

    A subclass of FlexAttention so that torchtitan's context parallelism gathers a row's keys before it.
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
        attention_masks: tuple[TreeMask, ...],
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """q, k, v and the result are [1, L, heads, head_dim]; there may be fewer queries than keys.

        `out_transform` maps the attention output and the scores' logsumexp, [1, L, heads], to the result, as in
        torchtitan's FlexAttention.
        """
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))  # torchtitan's shardings use these names
        out, sums = (x.transpose(1, 2) for x in attend_trees(q, k, v, attention_masks, scale))
        return out if out_transform is None else out_transform(out, sums)


def attend_trees(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: Sequence[TreeMask], scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of packed queries, `[1, heads, L, width]`, and the logsumexp of the scores, `[1, heads, L]`
    float32; both have gradients.

    The backward pass saves q, k, v, the result, and one float per head and query.

    Args:
        q: [1, heads, L, head_dim].
        k: keys of the whole row, [1, key heads, M, head_dim]; key heads must divide heads.
        v: values of the whole row, [1, key heads, M, width].
        masks: masks of the trees that contain the queries.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
    """
    head_dim, width = q.shape[-1], v.shape[-1]
    if width != head_dim:  # the kernel requires equal widths
        q, k, v = (nn.functional.pad(x, (0, max(head_dim, width) - x.shape[-1])) for x in (q, k, v))
    out, sums = _TreeAttentionFunction.apply(q, k, v, tuple(masks), scale or head_dim**-0.5)
    return out[..., :width], sums


class _AttentionPiece(NamedTuple):
    """Queries of a row, and keys that they see; computed by one call of the kernel for each group of heads."""

    queries: slice
    keys: Keys
    group: int
    """Number of key heads in a group."""
    bias: torch.Tensor | None = None
    """Bias on the scores, `[1, 1, queries, keys]`."""
    diagonals: int = 0
    """Above 0: queries and keys are the same tokens in this many parts of equal length, each with a causal mask."""
    merges: bool = False
    """Whether an earlier piece has the same queries, with other keys."""


def _pieces(masks: Sequence[TreeMask], q: torch.Tensor, k: torch.Tensor) -> Iterator[_AttentionPiece]:
    """Yield the pieces of a row.

    Copies and gradients of many keys would take much memory for all heads at once: a group is then a single key head.
    """
    first_query = 0
    for mask in masks:
        repeated = len(mask.until) * q.shape[1] * q.shape[3] * q.dtype.itemsize
        group = 1 if repeated > _GROUP_BYTES else k.shape[1]
        for queries, keys, bias in mask.blocks(q.dtype):
            row_queries = slice(first_query + queries.start, first_query + queries.stop)
            if bias is None:
                heads = group * q.shape[1] // k.shape[1]
                yield from _causal_pieces(row_queries, slice(mask.first, mask.first + len(mask.until)), heads, group)
            elif isinstance(keys, slice):
                yield _AttentionPiece(row_queries, slice(mask.first + keys.start, mask.first + keys.stop), group, bias)
            else:
                yield _AttentionPiece(row_queries, mask.first + keys, group, bias)
        first_query += mask.queries


def _causal_pieces(queries: slice, keys: slice, heads: int, group: int) -> Iterator[_AttentionPiece]:
    """Yield the pieces of a causal mask whose queries are the last of the keys' tokens: blocks on the diagonal, and for
    each block all keys before it.

    The kernel divides whole heads among threads in its backward pass. So there are as many blocks, of equal work, as
    keep all threads busy: one if the heads already do.
    """
    length, key_offset = queries.stop - queries.start, keys.stop - queries.stop
    blocks = max(1, min(_parts(heads), length // _LEAST_BLOCK))
    size, rest = divmod(length, blocks)
    # The remainder comes first, as one shorter block; all other blocks have equal length and run in one call.
    for first, block_length, count in ((queries.start, rest, 1), (queries.start + rest, size, blocks)):
        if not block_length:
            continue
        end = first + block_length * count
        yield _AttentionPiece(slice(first, end), slice(key_offset + first, key_offset + end), group, diagonals=count)
        for start in range(first, end, block_length):
            if key_offset + start > keys.start:
                yield _AttentionPiece(
                    slice(start, start + block_length), slice(keys.start, key_offset + start), group, merges=True
                )


def _parts(heads: int) -> int:
    """Return how many parts to split queries into, so that parts times heads divide evenly among threads."""
    threads = torch.get_num_threads()
    return threads // math.gcd(threads, heads)


def _groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: _AttentionPiece
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
    """Yield groups of query heads, their key heads, and the keys and values, repeated for each query head."""
    repeats = q.shape[1] // k.shape[1]
    for first in range(0, k.shape[1], piece.group):
        group = slice(first, first + piece.group)
        heads = slice(first * repeats, group.stop * repeats)
        keys, values = (x[:, group, piece.keys] for x in (k, v))
        # The query heads of a single key head can share a view of it; several heads need copies.
        if piece.group == 1:
            yield heads, group, keys.expand(-1, repeats, -1, -1), values.expand(-1, repeats, -1, -1)
        else:
            keys, values = (x.repeat_interleave(repeats, dim=1) for x in (keys, values))
            yield heads, group, keys, values


def _folded(x: torch.Tensor, parts: int) -> torch.Tensor:
    """View `[1, heads, parts * n, ...]` as `[parts, heads, n, ...]`."""
    folded: torch.Tensor = x[0].unflatten(1, (parts, -1)).transpose(0, 1)
    return folded


class _TreeAttentionFunction(torch.autograd.Function):
    """The kernel's forward and backward, piece by piece; SDPA would save each layer's mask between them, and returns no
    logsumexp."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: tuple[TreeMask, ...], scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for piece in _pieces(masks, q, k):
            parts = max(1, piece.diagonals)
            for heads, _, *keys_values in _groups(q, k, v, piece):
                queries, keys, values = (_folded(x, parts) for x in (q[:, heads, piece.queries], *keys_values))
                causal = piece.diagonals > 0
                piece_out, piece_sums = _attend(queries, keys, values, 0.0, causal, attn_mask=piece.bias, scale=scale)
                out_view, sums_view = (_folded(x[:, heads, piece.queries], parts) for x in (out, sums))
                if piece.merges:
                    # Attention over disjoint sets of keys merges by logsumexp: with s = log(e^s_1 + e^s_2),
                    # out = e^(s_1 - s) out_1 + e^(s_2 - s) out_2.
                    merged_sums = torch.logaddexp(sums_view, piece_sums)
                    out_view.mul_((sums_view - merged_sums).exp_()[..., None]).addcmul_(
                        piece_out, (piece_sums - merged_sums).exp_()[..., None]
                    )
                    piece_sums = merged_sums
                else:
                    out_view.copy_(piece_out)
                sums_view.copy_(piece_sums)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.masks, ctx.scale = masks, scale
        # Only attention sinks have a gradient for the logsumexp; None spares the others the extra column in `backward`.
        ctx.set_materialize_grads(False)
        return out, sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_sums: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, v, out, sums = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        if grad_sums is not None:
            # With P the softmax, the gradient of the scores is P (grad V' - rowsum(grad out) + grad_sums). The kernel
            # computes the first two terms. A column of ones in V with gradient grad_sums adds the third to the first;
            # its output is passed as 0, which leaves the second unchanged.
            grad = torch.cat([grad, grad_sums[..., None].to(grad.dtype)], dim=-1)
            q, k, out = (nn.functional.pad(x, (0, 1)) for x in (q, k, out))
            v = nn.functional.pad(v, (0, 1), value=1.0)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece in _pieces(ctx.masks, q, k):
            keys, causal = piece.keys, piece.diagonals > 0
            for heads, group, *keys_values in _groups(q, k, v, piece):
                query_tensors = [x[:, heads, piece.queries] for x in (grad, q, out, sums)]
                # The backward kernel hands whole heads to threads. Splitting the queries into parts acts like more
                # heads.
                parts = piece.diagonals or _parts(query_tensors[0].shape[1])
                if query_tensors[0].shape[2] % parts:
                    parts = 1
                piece_grad_out, queries, piece_out, piece_sums = (_folded(x, parts) for x in query_tensors)
                folded_keys_values = [_folded(x, parts) if causal else x.expand(parts, -1, -1, -1) for x in keys_values]
                bias = None if piece.bias is None else _folded(piece.bias, parts)
                piece_grad_q, *piece_grads_kv = _attend_backward(
                    *(piece_grad_out, queries, *folded_keys_values, piece_out, piece_sums, 0.0, causal),
                    attn_mask=bias,
                    scale=ctx.scale,
                )
                grad_q_view = _folded(grad_q[:, heads, piece.queries], parts)
                grad_q_view.add_(piece_grad_q) if piece.merges else grad_q_view.copy_(piece_grad_q)
                for grad_kv, piece_grad_kv in zip((grad_k, grad_v), piece_grads_kv, strict=True):
                    # [parts, key heads, query heads per key head, keys, width]: key heads sum over their query heads,
                    # and over parts if these see the same keys.
                    head_grads = piece_grad_kv.unflatten(1, (piece.group, -1))
                    if causal:
                        _folded(grad_kv[:, group, keys], parts).add_(head_grads.sum(2))
                    else:
                        grad_kv[:, group, keys] += head_grads.sum((0, 2))
        if grad_sums is not None:
            grad_q, grad_k, grad_v = (x[..., :-1] for x in (grad_q, grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None
