"""Qwen3: Llama with per-head normalisation of q and k."""

from __future__ import annotations

from typing import Any

from forge_rl.engines.families import llama
from forge_rl.engines.families.family import Architecture, ConfigFile, Family, TitanFamily
from forge_rl.weights.names import Names

LAYER = llama.LAYER | {
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
}


def titan() -> TitanFamily:
    """Build on torchtitan's Qwen3, dense or with experts."""
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    from forge_rl.engines.titan.model import gqa_decoder

    def model_config(architecture: Architecture, max_positions: int) -> Any:
        return gqa_decoder(architecture, max_positions, model=Qwen3Model, block=Qwen3TransformerBlock, qk_norm=True)

    return TitanFamily(model_config=model_config, set_sharding=set_qwen3_sharding_config)


QWEN3 = Family(model_type="qwen3", read=ConfigFile.architecture, names=Names(layer=LAYER), titan=titan)
