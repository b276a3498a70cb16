"""Qwen2, Qwen3 and Qwen3-MoE: Llama with biases on q, k and v; with normalised q and k; with experts as well."""

from functools import partial

from forge_rl.engines.families import llama
from forge_rl.engines.families.family import Architecture, ConfigFile, Experts, Family
from forge_rl.weights.names import Names

_BIAS = {f"attention.qkv_linear.w{projection}.bias": f"self_attn.{projection}_proj.bias" for projection in "qkv"}
_NORMS = {f"attention.{projection}_norm.weight": f"self_attn.{projection}_norm.weight" for projection in "qk"}
STACKS = {
    "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.{}.gate_proj.weight",
    "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.{}.up_proj.weight",
    "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.{}.down_proj.weight",
}
_EXPERTS = STACKS | {"moe.router.gate.weight": "mlp.gate.weight"}


def _read_experts(config: ConfigFile) -> Architecture:
    """Read the experts, and which layers have them."""
    config.need("num_experts_per_tok", "moe_intermediate_size")
    step, dense_layers = config.whole("decoder_sparse_step", 1), config.layer_set("mlp_only_layers")
    # transformers writes the new name of this attribute and reads both.
    count = config.whole("num_experts" if "num_experts" in config.values else "num_local_experts")
    experts = Experts(
        layers=tuple(layer for layer in range(config.layers) if layer not in dense_layers and (layer + 1) % step == 0),
        count=count,
        top_k=config.whole("num_experts_per_tok"),
        hidden_dim=config.whole("moe_intermediate_size"),
        normalized=bool(config.values.get("norm_topk_prob")),
    )
    return config.architecture(experts=experts)


QWEN2 = Family(
    model_type="qwen2",
    read=ConfigFile.architecture,
    names=Names(layer=llama.LAYER | _BIAS),
    layer=partial(llama.layer, qkv_bias=True),
    set_sharding=llama.set_sharding,
)
QWEN3 = Family(
    model_type="qwen3",
    read=ConfigFile.architecture,
    names=Names(layer=llama.LAYER | _NORMS),
    layer=partial(llama.layer, qk_norm=True),
    set_sharding=llama.set_sharding,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    read=_read_experts,
    names=Names(layer=llama.LAYER | _NORMS | _EXPERTS),
    layer=QWEN3.layer,
    set_sharding=llama.set_sharding,
)
