"""Llama: grouped-query attention and a SwiGLU network in each layer."""

from __future__ import annotations

from typing import Any

from forge_rl.engines.families.family import Architecture, ConfigFile, Family, TitanFamily
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


def titan(*, qkv_bias: bool = False) -> TitanFamily:
    """Build on torchtitan's Llama 3."""
    from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    from forge_rl.engines.titan.model import gqa_decoder

    def model_config(architecture: Architecture, max_positions: int) -> Any:
        return gqa_decoder(
            architecture, max_positions, model=Llama3Model, block=Llama3TransformerBlock, qkv_bias=qkv_bias
        )

    def set_sharding(config: Any, *, enable_sp: bool, enable_ep: bool) -> None:
        set_llama3_sharding_config(config, enable_sp=enable_sp)

    return TitanFamily(model_config=model_config, set_sharding=set_sharding)


LLAMA = Family(model_type="llama", read=ConfigFile.architecture, names=Names(layer=LAYER), titan=titan)
