"""Names of weights: torchtitan's and Hugging Face's are one to one."""

import pytest

from forge_rl.errors import ModelError
from forge_rl.weights.names import from_hf, to_hf

TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
LAYER = {
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
PAIRS = TOP | {
    f"layers.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
    for layer in (0, 7, 31, 127)
    for ours, theirs in LAYER.items()
}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.items())
def test_names_map_both_ways(ours: str, theirs: str):
    assert to_hf(ours) == theirs
    assert from_hf(theirs) == ours


def test_no_two_names_meet():
    assert len({to_hf(ours) for ours in PAIRS}) == len(PAIRS)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layers.0.attention.wo.bias",
        "layers.x.attention.wo.weight",
        "layers.0.moe.router.gate.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "tok_embeddings.weight.extra",
    ],
)
def test_an_unknown_torchtitan_name_is_refused(name: str):
    with pytest.raises(ModelError, match="no Hugging Face name") as caught:
        to_hf(name)
    assert repr(name) in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "layers.0.attention.wo.weight",
        "transformer.h.0.attn.c_attn.weight",
    ],
)
def test_an_unknown_hugging_face_name_is_refused(name: str):
    with pytest.raises(ModelError, match="neither the Llama nor the Qwen3") as caught:
        from_hf(name)
    assert repr(name) in caught.value.message
