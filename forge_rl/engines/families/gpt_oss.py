"""gpt-oss: attention sinks, sliding windows in some layers, biases, experts with clamped SwiGLU, MXFP4 files."""

from __future__ import annotations

from typing import Any

from forge_rl.engines.families.family import Architecture, ConfigFile, Experts, Family
from forge_rl.weights.names import Names

_EXPERTS = "moe.routed_experts.inner_experts"
_PROJECTIONS = {"qkv_linear.wq": "q", "qkv_linear.wk": "k", "qkv_linear.wv": "v", "wo": "o"}
LAYER = {
    **{
        f"attention.{module}.{kind}": f"self_attn.{projection}_proj.{kind}"
        for module, projection in _PROJECTIONS.items()
        for kind in ("weight", "bias")
    },
    "attention.sinks": "self_attn.sinks",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "moe.router.gate.weight": "mlp.router.weight",
    "moe.router.gate.bias": "mlp.router.bias",
    f"{_EXPERTS}.mlp1_weight_EGD": "mlp.experts.gate_up_proj",
    f"{_EXPERTS}.mlp1_bias_EG": "mlp.experts.gate_up_proj_bias",
    f"{_EXPERTS}.mlp2_weight_EDF": "mlp.experts.down_proj",
    f"{_EXPERTS}.mlp2_bias_ED": "mlp.experts.down_proj_bias",
}
_TRANSPOSED = frozenset({f"{_EXPERTS}.mlp1_weight_EGD", f"{_EXPERTS}.mlp2_weight_EDF"})


def read(config: ConfigFile) -> Architecture:
    """Read the experts of every layer, and which layers have a sliding window."""
    values = config.values
    config.need("num_local_experts", "num_experts_per_tok", "intermediate_size", "sliding_window")
    if not values.get("rope_scaling"):
        config.need("rope_parameters")
    if "rope_theta" not in (values.get("rope_parameters") or {}):
        config.need("rope_theta")
    kinds = values.get("layer_types")
    # transformers' default: windows in every other layer, beginning with the first.
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config.layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != config.layers
        or not set(map(str, kinds)) <= {"full_attention", "sliding_attention"}
    ):
        raise config.wrong("layer_types", "not sliding_attention or full_attention for each layer")
    return config.architecture(
        experts=Experts(
            layers=tuple(range(config.layers)),
            count=config.whole("num_local_experts"),
            top_k=config.whole("num_experts_per_tok"),
            hidden_dim=config.whole("intermediate_size"),
            normalized=True,
            limit=config.number("swiglu_limit", 7.0),
        ),
        window=config.whole("sliding_window"),
        window_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"),
        rope_types=("default", "yarn"),
        unsupported={
            # Supported here, unlike in other families: both come with every gpt-oss.
            "attention_bias": False,
            "sliding_window": False,
            "attention_bias false": not values.get("attention_bias", True),
            f"swiglu_alpha {values.get('swiglu_alpha')!r}": values.get("swiglu_alpha", 1.702) != 1.702,
        },
    )


def layer(architecture: Architecture, index: int, max_positions: int) -> Any:
    """Make the `Config` of torchtitan's gpt-oss layer."""
    from torchtitan.models.common import Linear
    from torchtitan.models.common.attention import QKVLinear
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.models.gpt_oss.model import Attention, GptOssTransformerBlock

    from forge_rl.engines.titan.linear import RowwiseLinear
    from forge_rl.engines.titan.model import LOADED, inner_attention, norm
    from forge_rl.engines.titan.moe import ClampedExperts, moe_config
    from forge_rl.engines.titan.rope import half_rope

    def linear(kind: Any, inputs: int, outputs: int) -> Any:
        return kind.Config(in_features=inputs, out_features=outputs, bias=True, param_init=LOADED)

    a, experts = architecture, architecture.experts
    assert experts is not None, "read() gives them"
    qkv = QKVLinear.Config(
        head_dim=a.head_dim,
        wq=linear(Linear, a.dim, a.heads * a.head_dim),
        wkv=linear(Linear, a.dim, a.kv_heads * a.head_dim),
    )
    attention = Attention.Config(
        n_heads=a.heads,
        n_kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        dim=a.dim,
        qkv_linear=qkv,
        wo=linear(RowwiseLinear, a.heads * a.head_dim, a.dim),
        sliding_window_size=a.window if index in a.window_layers else None,
        inner_attention=inner_attention(),
        rope=half_rope(a, max_positions),
        param_init={"sinks": skip_param_init},
    )
    return GptOssTransformerBlock.Config(
        attention=attention,
        attention_norm=norm(a, a.dim),
        ffn_norm=norm(a, a.dim),
        moe=moe_config(experts, a.dim, kind=ClampedExperts, bias=True, swiglu_limit=experts.limit),
    )


def set_sharding(config: Any, **options: bool) -> None:
    """Set torchtitan's sharding of gpt-oss."""
    from torchtitan.models.gpt_oss.sharding import set_gpt_oss_sharding_config

    set_gpt_oss_sharding_config(config, **options)


GPT_OSS = Family(
    model_type="gpt_oss",
    read=read,
    names=Names(layer=LAYER, transposed=_TRANSPOSED),
    layer=layer,
    set_sharding=set_sharding,
)
