"""Names of weights: torchtitan's to Hugging Face's.

Both families keep separate q, k, v projections in Hugging Face's rotate-half order (engines/titan builds them so),
and torchtitan stacks a layer's experts, which Hugging Face keeps apart. So every published tensor is a block of one
torchtitan weight as it lies there: a shard of one is a shard of the other, and no copy or permutation is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from forge_rl.errors import ModelError
from forge_rl.weights.slices import TensorSlice

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "moe.router.gate": "mlp.gate",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_STACK = {"w1_EFD": "gate_proj", "w3_EFD": "up_proj", "w2_EDF": "down_proj"}
"""[experts, out, in] in torchtitan; [out, in] for each expert in Hugging Face."""
_TITAN = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_TITAN_STACK = re.compile(r"layers\.(\d+)\.moe\.routed_experts\.inner_experts\.(w\d_E[DF]{2})")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of one published tensor that a block of a torchtitan weight holds."""

    name: str
    """Name in Hugging Face."""
    shape: tuple[int, ...]
    """Shape of the whole published tensor."""
    tensor_slice: TensorSlice
    """Place of the part in the published tensor."""
    index: int | None = None
    """Number of the expert within the block; None where the block is the part."""

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """A view of this part of the block."""
        return block if self.index is None else block[self.index]


def parts(name: str, shape: Sequence[int], tensor_slice: TensorSlice | None = None) -> Iterator[Part]:
    """List the published tensors that a block of a torchtitan weight holds, and the slice of each.

    Args:
        name: torchtitan's name of the weight.
        shape: shape of the whole weight.
        tensor_slice: the block; by default the whole weight.

    Raises:
        ModelError: the name is not one of the Llama or Qwen3 family.
    """
    tensor_slice = tensor_slice or TensorSlice.whole(shape)
    if not _TITAN_STACK.fullmatch(name):
        yield Part(name=to_hf(name), shape=tuple(shape), tensor_slice=tensor_slice)
        return
    inner = TensorSlice(start=tensor_slice.start[1:], size=tensor_slice.size[1:])
    for index in range(tensor_slice.size[0]):
        yield Part(
            name=to_hf(name, tensor_slice.start[0] + index), shape=tuple(shape[1:]), tensor_slice=inner, index=index
        )


def to_hf(name: str, expert: int | None = None) -> str:
    """Hugging Face's name of a torchtitan weight of the Llama or Qwen3 family.

    Args:
        name: torchtitan's.
        expert: which one of a stack; None for any other weight.

    Raises:
        ModelError: the name is not one of theirs.
    """
    if expert is None and name in _TOP:
        return _TOP[name]
    if expert is None and (match := _TITAN.fullmatch(name)) and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    if expert is not None and (match := _TITAN_STACK.fullmatch(name)) and match[2] in _STACK:
        return f"model.layers.{match[1]}.mlp.experts.{expert}.{_STACK[match[2]]}.weight"
    raise ModelError(
        f"the torchtitan weight {name!r} has no Hugging Face name", hint="only the Llama and Qwen3 families are known"
    )
