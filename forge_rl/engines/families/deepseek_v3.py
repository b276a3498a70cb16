"""DeepSeek-V3: latent attention, grouped experts chosen by biased scores, and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forge_rl.engines.families import llama, qwen
from forge_rl.engines.families.family import Architecture, ConfigFile, Experts, Family, LatentAttention
from forge_rl.errors import ModelError
from forge_rl.weights.names import Names

_BIAS = "moe.expert_bias_E"
LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wq_b.weight": "self_attn.q_b_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    **{name: hf_name for name, hf_name in llama.LAYER.items() if "qkv_linear" not in name},
    **qwen.STACKS,
    "moe.router.gate.weight": "mlp.gate.weight",
    _BIAS: "mlp.gate.e_score_correction_bias",
    "moe.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "moe.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}


def read(config: ConfigFile) -> Architecture:
    """Read the latent attention, and the experts of all layers after the first, dense ones."""
    values = config.values
    config.need("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts")
    config.need("num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
    config.need("n_shared_experts", "norm_topk_prob", "routed_scaling_factor")
    for name, supported_value in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if values.get(name) != supported_value:
            raise ModelError(
                f"{config.path}: {name} is {values.get(name)!r:.80}, and the trainer supports {supported_value!r}",
                hint=f"use a model with DeepSeek-V3's routing; if this one has it, set {name}, which engines need",
            )
    rope = config.rope
    uses_yarn = rope["rope_type"] == "yarn"
    heads, num_dense_layers = config.whole("num_attention_heads"), values.get("first_k_dense_replace") or 0
    if type(num_dense_layers) is not int or not 0 <= num_dense_layers <= config.layers:
        raise config.wrong("first_k_dense_replace", "not a number of layers")
    width = config.whole("moe_intermediate_size")
    experts = Experts(
        layers=tuple(range(num_dense_layers, config.layers)),
        count=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        hidden_dim=width,
        normalized=bool(values.get("norm_topk_prob")),
        score="sigmoid",
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.whole("n_group"),
        top_groups=config.whole("topk_group"),
        steered=True,
        shared_dim=width * config.whole("n_shared_experts") if values.get("n_shared_experts") else 0,
    )
    latent = LatentAttention(
        q_rank=config.whole("q_lora_rank") if values.get("q_lora_rank") else 0,
        kv_rank=config.whole("kv_lora_rank"),
        nope_dim=config.whole("qk_nope_head_dim"),
        rope_dim=config.whole("qk_rope_head_dim"),
        value_dim=config.whole("v_head_dim"),
        interleaved=bool(values.get("rope_interleave", True)),
    )
    # A group is scored by its two best experts, and the chosen groups must have enough experts.
    groups_fit = experts.groups == 1 or (
        experts.count % experts.groups == 0
        and experts.count // experts.groups > 1
        and experts.top_groups * (experts.count // experts.groups) >= experts.top_k
    )
    return config.architecture(
        experts=experts,
        latent=latent,
        # Of q and k; values have a dimension of their own.
        head_dim=latent.nope_dim + latent.rope_dim,
        rope_types=("default", "yarn"),
        scales=("mscale", "mscale_all_dim"),
        unsupported={
            "fewer key heads than heads": config.whole("num_key_value_heads", heads) != heads,
            f"moe_layer_freq {values.get('moe_layer_freq')!r}": values.get("moe_layer_freq", 1) != 1,
            f"{experts.count} experts in {experts.groups} groups, {experts.top_k} of {experts.top_groups} groups": (
                not groups_fit or experts.top_groups > experts.groups
            ),
            "YaRN whose mscale and mscale_all_dim are not the same number": uses_yarn
            and not (rope.get("mscale") and rope["mscale"] == rope.get("mscale_all_dim")),
        },
    )


def layer(architecture: Architecture, index: int, max_positions: int) -> Any:
    """Make the `Config` of torchtitan's DeepSeek-V3 layer."""
    from torchtitan.models.common import Linear, RMSNorm
    from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3TransformerBlock

    from forge_rl.engines.titan.model import LOADED, inner_attention, network, norm
    from forge_rl.engines.titan.rope import HalfRoPE, PairRoPE, rope_fields

    def linear(inputs: int, outputs: int) -> Any:
        return Linear.Config(in_features=inputs, out_features=outputs, param_init=LOADED)

    a, latent = architecture, architecture.latent
    assert latent is not None, "read() gives it"
    q_dim = a.heads * a.head_dim
    # torchtitan's class wants a norm of q, which it does not use without a low rank.
    q = {"wq": linear(a.dim, q_dim), "q_norm": RMSNorm.Config(normalized_shape=1)}
    if latent.q_rank:
        q = {
            "wq_a": linear(a.dim, latent.q_rank),
            "q_norm": norm(a, latent.q_rank),
            "wq_b": linear(latent.q_rank, q_dim),
        }
    rope = PairRoPE if latent.interleaved else HalfRoPE
    attention = Attention.Config(
        dim=a.dim,
        n_heads=a.heads,
        q_lora_rank=latent.q_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=latent.nope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        # transformers and vLLM scale q and k by mscale; torchtitan computes the same from this and the RoPE factor.
        mscale=float(a.rope.get("mscale_all_dim") or 1.0),
        wkv_a=linear(a.dim, latent.kv_rank + latent.rope_dim),
        kv_norm=norm(a, latent.kv_rank),
        wkv_b=linear(latent.kv_rank, a.heads * (latent.nope_dim + latent.value_dim)),
        wo=linear(a.heads * latent.value_dim, a.dim),
        inner_attention=inner_attention(),
        rope=rope.Config(dim=latent.rope_dim, **rope_fields(a, max_positions)),
        **q,
    )
    return DeepSeekV3TransformerBlock.Config(
        attention=attention, attention_norm=norm(a, a.dim), ffn_norm=norm(a, a.dim), **network(a, index)
    )


def set_sharding(config: Any, **options: bool) -> None:
    """Set torchtitan's sharding of DeepSeek-V3."""
    from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config

    set_deepseek_v3_sharding_config(config, **options)


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    read=read,
    names=Names(layer=LAYER, float32=frozenset({_BIAS})),
    layer=layer,
    set_sharding=set_sharding,
)
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
"""DeepSeek-V3 under another name, with all experts in one group."""
