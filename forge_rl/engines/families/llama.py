"""Llama: grouped-query attention and a SwiGLU network in each layer."""

from __future__ import annotations

from typing import Any

from forge_rl.engines.families.family import Architecture, ConfigFile, Family
from forge_rl.weights.names import Names

LAYER = {
    "attention.qkv_linear.wq.weight": "self_attn.q_proj.weight",
    "attention.qkv_linear.wk.weight": "self_attn.k_proj.weight",
    "attention.qkv_linear.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}


def layer(architecture: Architecture, index: int, max_positions: int, **options: bool) -> Any:
    """Make the `Config` of a layer; see `gqa_layer` for the options."""
    from forge_rl.engines.titan.model import gqa_layer

    return gqa_layer(architecture, index, max_positions, **options)


def set_sharding(config: Any, **options: bool) -> None:
    """Set torchtitan's sharding of Qwen3, whose layers these are."""
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    set_qwen3_sharding_config(config, **options)


LLAMA = Family(
    model_type="llama", read=ConfigFile.architecture, names=Names(layer=LAYER), layer=layer, set_sharding=set_sharding
)
