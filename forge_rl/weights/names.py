"""Names of weights: torchtitan's to Hugging Face's and back.

Both families keep separate q, k, v projections in Hugging Face's rotate-half order (engines/titan.py builds them so),
so that every weight maps one to one: a shard of one is a shard of the other, and no copy or permutation is needed.
"""

from __future__ import annotations

import re

from forge_rl.errors import ModelError

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
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_LAYER_BACK = {theirs: ours for ours, theirs in _LAYER.items()}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_TITAN = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_HF = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def to_hf(name: str) -> str:
    """Hugging Face's name of a torchtitan weight of the Llama or Qwen3 family.

    Raises:
        ModelError: the name is not one of theirs.
    """
    if name in _TOP:
        return _TOP[name]
    if (match := _TITAN.fullmatch(name)) and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    raise ModelError(
        f"the torchtitan weight {name!r} has no Hugging Face name", mend="only the Llama and Qwen3 families are known"
    )


def from_hf(name: str) -> str:
    """torchtitan's name of a Hugging Face weight of the Llama or Qwen3 family.

    Raises:
        ModelError: the name is not one of theirs.
    """
    if name in _TOP_BACK:
        return _TOP_BACK[name]
    if (match := _HF.fullmatch(name)) and match[2] in _LAYER_BACK:
        return f"layers.{match[1]}.{_LAYER_BACK[match[2]]}.weight"
    raise ModelError(
        f"the checkpoint holds {name!r}, which neither the Llama nor the Qwen3 family has",
        mend="use a model of the Llama or Qwen3 family without biases or adapters",
    )
