"""Attention of transformers' models over packed rows: a mask and an attention function for its two interfaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.nn.attention.flex_attention import AuxRequest
from torchtitan.models.common.attention import FlexAttention, create_attention_mask
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from forge_rl.engines.titan.cpu_attention import TreeMask, attend_trees, tree_masks
from forge_rl.engines.titan.general_state import ROW, RowContext
from forge_rl.errors import ModelError
from forge_rl.packing.rows import Row, attends

IMPLEMENTATION = "forge_rl_rows"
"""Name of both functions in transformers' registries, and so `attn_implementation` of a model that uses them."""
_WITHOUT_EFFECT = {
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "deterministic",
    "dropout",
    "is_causal",
    "max_length_k",
    "max_length_q",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "sliding_window",
    "target_dtype",
    "use_cache",
}
"""Options of attention functions that the mask covers already, or that change no result."""

MaskRule: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""transformers' mask function: whether the query at one index sees the key at another, (batch, head, query, key)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMask:
    """Mask of one kind of layer over a packed row.

    A query sees the keys of its own prefix (`packing.rows.attends`) for which transformers' mask function holds at the
    two tokens' positions in their episode, instead of at their indices in the row. So each kind of layer, full, sliding
    or chunked, masks an episode in a row as it masks the episode alone, and episodes may share prefixes.
    """

    row: Row
    rule: MaskRule
    window: int | None
    """Sliding window in tokens, including the query's own; None for none."""
    is_causal: bool
    """True if the rule is plain causal masking, or the sliding window."""

    @cached_property
    def trees(self) -> tuple[TreeMask, ...]:
        """Masks of the trees, for the fused kernel on CPU."""
        return tree_masks(self.row, slice(0, len(self.row)), self.window)

    @cached_property
    def visible(self) -> torch.Tensor:
        """[L, L] bool, True where the query (first dim) sees the key."""
        index = torch.arange(len(self.row), device=self.row.trees.device)
        return self._holds(index[:, None], index[None, :])

    @cached_property
    def blocks(self) -> Any:
        """FlexAttention's block mask, on CUDA."""

        def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return self._holds(q, k)

        size = len(self.row)
        return create_attention_mask(mask_mod, 1, None, size, size, device=str(self.row.trees.device))

    def _holds(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        row = self.row
        is_visible: torch.Tensor = attends(row.until, q, k)
        if self.is_causal:
            return (
                is_visible if self.window is None else is_visible & (row.positions[q] - row.positions[k] < self.window)
            )
        rule_holds: torch.Tensor = self.rule(0, 0, row.positions[q], row.positions[k])
        is_visible = is_visible & rule_holds
        return is_visible | ((q == k) & (row.trees[q] < 0))  # padding sees itself, so that no softmax is empty


def register() -> None:
    """Register both functions with transformers, under IMPLEMENTATION."""
    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_row)


def mask_row(*, mask_function: MaskRule, config: Any, local_size: int | None = None, **_: Any) -> RowMask:
    """Make the mask of one kind of layer over the row of the forward pass that is under way.

    Called by transformers' `create_causal_mask` and its siblings, once for each kind of layer.

    Args:
        mask_function: the kind's rule over indices.
        config: the model's, which has the row.
        local_size: length of the window or chunk, if there is one.
    """
    context: RowContext = getattr(config, ROW)
    row = context.row
    # transformers passes windows and chunks alike; only a window fits `TreeMask`.
    is_window = local_size is not None and _is_window(mask_function, local_size, row.trees.device)
    return RowMask(
        row=row,
        rule=mask_function,
        window=local_size if is_window else None,
        is_causal=is_window or mask_function is causal_mask_function,
    )


def _is_window(rule: MaskRule, size: int, device: torch.device) -> bool:
    """Tell a sliding window from a chunk: a query sees the `size` keys up to its own, wherever it is."""
    # Queries on both sides of a chunk's border, where the two kinds differ.
    query = torch.tensor([[0], [size - 1], [size], [2 * size]], device=device)
    key = torch.arange(2 * size + 1, device=device)[None]
    return bool((rule(0, 0, query, key) == ((key <= query) & (query - key < size))).all())


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RowMask,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over a packed row, as transformers' attention functions do; returns [1, L, heads, width] and None.

    Args:
        query: [1, heads, L, head_dim].
        key: [1, key heads, L, head_dim].
        value: [1, key heads, L, width].
        scaling: factor on the scores; None means 1 / sqrt(head_dim).
        softcap: bound that tanh puts on the scores.
        s_aux: [heads], attention sinks.
        options: other options, which must have no effect.

    Raises:
        ModelError: the model asks for something that this function does not do.
    """
    # An unknown option might change results, so it is refused rather than ignored.
    unknown_options = [name for name, option in options.items() if option is not None and name not in _WITHOUT_EFFECT]
    if unknown_options or not isinstance(attention_mask, RowMask):
        kind = f"with {', '.join(sorted(unknown_options))}" if unknown_options else "without transformers' masks"
        raise ModelError(
            f"{type(module).__name__} needs attention {kind}, which packed rows do not support",
            hint="use a model of another architecture",
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cuda":
        out, sums = _attend_blocks(query, key, value, attention_mask, scaling, softcap)
    elif softcap is None and attention_mask.is_causal:
        out, sums = attend_trees(query, key, value, attention_mask.trees, scaling)
    else:
        out, sums = _attend_dense(query, key, value, attention_mask, scaling, softcap)
    if s_aux is not None:
        # A sink is one more score without a value. With s the logsumexp of the others, the softmax shrinks by
        # e^s / (e^s + e^sink) = sigmoid(s - sink).
        out = out * (sums - s_aux.to(sums.dtype)[:, None]).sigmoid()[..., None].to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


def _attend_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: RowMask, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with all scores of a row at once, [heads, L, L]; returns the result and the scores' logsumexp."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    # At least in float32, like the fused kernels' softmax.
    scores = (q @ k.transpose(2, 3) * scale).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask.visible.to(scores.device), float("-inf"))
    return scores.softmax(dim=-1).to(v.dtype) @ v, scores.logsumexp(dim=-1)


def _attend_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: RowMask, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with FlexAttention; returns the result and the scores' logsumexp."""

    bound = softcap or 1.0

    def bounded(score: torch.Tensor, b: Any, h: Any, q_index: Any, k_index: Any) -> torch.Tensor:
        return bound * torch.tanh(score / bound)

    out, aux = FlexAttention._compiled_flex_attn(
        q,
        k,
        v,
        score_mod=None if softcap is None else bounded,
        block_mask=mask.blocks,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse
