"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all layers."""

from forge_rl.engines.families import qwen3
from forge_rl.engines.families.family import Architecture, ConfigFile, Experts, Family
from forge_rl.weights.names import Names

STACKS = {
    "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.{}.gate_proj.weight",
    "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.{}.up_proj.weight",
    "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.{}.down_proj.weight",
}
LAYER = qwen3.LAYER | STACKS | {"moe.router.gate.weight": "mlp.gate.weight"}


def read(config: ConfigFile) -> Architecture:
    """Read the experts, and which layers have them."""
    config.need("num_experts_per_tok", "moe_intermediate_size")
    step, dense = config.whole("decoder_sparse_step", 1), config.layer_set("mlp_only_layers")
    # transformers writes the new name of this attribute and reads both.
    count = config.whole("num_experts" if "num_experts" in config.values else "num_local_experts")
    experts = Experts(
        layers=tuple(layer for layer in range(config.layers) if layer not in dense and (layer + 1) % step == 0),
        count=count,
        top_k=config.whole("num_experts_per_tok"),
        hidden_dim=config.whole("moe_intermediate_size"),
        normalized=bool(config.values.get("norm_topk_prob")),
    )
    return config.architecture(experts=experts)


QWEN3_MOE = Family(model_type="qwen3_moe", read=read, names=Names(layer=LAYER), titan=qwen3.titan)
