"""Names of weights: torchtitan's and Hugging Face's are one to one, and a stack of experts is one for each."""

import pytest
import torch

from forge_rl.engines.families import FAMILIES
from forge_rl.errors import ModelError
from forge_rl.weights.slices import TensorSlice

NAMES = FAMILIES["qwen3_moe"].names
parts, to_hf = NAMES.parts, NAMES.to_hf

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
    "moe.router.gate": "mlp.gate",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
PAIRS = TOP | {
    f"layers.{layer}.{ours}.weight": f"model.layers.{layer}.{theirs}.weight"
    for layer in (0, 7, 31, 127)
    for ours, theirs in LAYER.items()
}
STACK = {"w1_EFD": "gate_proj", "w3_EFD": "up_proj", "w2_EDF": "down_proj"}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.items())
def test_each_name_has_its_counterpart(ours: str, theirs: str):
    assert to_hf(ours) == theirs


@pytest.mark.parametrize(("ours", "theirs"), STACK.items())
def test_each_expert_has_a_name(ours: str, theirs: str):
    stack = f"layers.12.moe.routed_experts.inner_experts.{ours}"
    assert to_hf(stack, 103) == f"model.layers.12.mlp.experts.103.{theirs}.weight"


def test_no_two_names_meet():
    assert len({to_hf(ours) for ours in PAIRS}) == len(PAIRS)


def test_a_weight_is_one_part_and_its_box_stays():
    tensor_slice = TensorSlice(start=(2, 0), size=(3, 8))
    (part,) = parts("layers.0.attention.wo.weight", (8, 8), tensor_slice)
    assert (part.name, part.shape, part.tensor_slice) == (
        "model.layers.0.self_attn.o_proj.weight",
        (8, 8),
        tensor_slice,
    )
    values = torch.randn(3, 8)
    assert part.of(values) is values


def test_a_block_of_a_stack_is_a_view_of_each_expert_in_it():
    tensor_slice = TensorSlice(start=(4, 0, 2), size=(2, 3, 5))  # experts 4 and 5, columns 2 to 6
    values = torch.randn(2, 3, 5)
    expert_parts = list(parts("layers.1.moe.routed_experts.inner_experts.w2_EDF", (8, 3, 9), tensor_slice))
    assert [part.name for part in expert_parts] == [f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (4, 5)]
    for row, part in enumerate(expert_parts):
        assert part.shape == (3, 9)
        assert part.tensor_slice == TensorSlice(start=(0, 2), size=(3, 5))
        assert torch.equal(part.of(values), values[row])
        assert part.of(values).untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def test_a_block_without_experts_has_no_parts():
    empty = TensorSlice(start=(8, 0, 0), size=(0, 3, 9))
    assert not list(parts("layers.1.moe.routed_experts.inner_experts.w1_EFD", (8, 3, 9), empty))


@pytest.fixture(scope="module")
def moe() -> torch.nn.Module:
    """torchtitan's random Qwen3 of two MoE layers with three experts."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear

    import forge_rl.engines.titan  # noqa: F401  sets torchtitan up for CPU

    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=8,
        n_heads=2,
        n_kv_heads=1,
        head_dim=4,
        moe_hidden_dim=6,
        num_experts=3,
        top_k=2,
        fuse_qkv=False,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=4, max_seq_len=8),
    )
    config = qwen3.Qwen3Model.Config(
        vocab_size=10,
        dim=8,
        norm=qwen3._qwen3_norm(8),
        tok_embeddings=Embedding.Config(num_embeddings=10, embedding_dim=8, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=8, out_features=10, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )
    model: torch.nn.Module = config.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def test_names_and_orientation_are_those_of_torchtitans_own_adapter(moe: torch.nn.Module):
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    state = {name: parameter.detach() for name, parameter in moe.named_parameters()}
    ours = {part.name: part.of(values) for name, values in state.items() for part in parts(name, values.shape)}
    theirs = Qwen3StateDictAdapter(moe.config, None).to_hf(state)
    assert ours.keys() == theirs.keys()
    assert "model.layers.1.mlp.experts.2.down_proj.weight" in ours
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "layers.0.attention.wo.bias",
        "layers.x.attention.wo.weight",
        "layers.0.moe.shared_experts.w1.weight",
        "layers.0.moe.routed_experts.inner_experts.w1_EFD",
        "model.layers.0.self_attn.o_proj.weight",
        "tok_embeddings.weight.extra",
    ],
)
def test_an_unknown_torchtitan_name_is_refused(name: str):
    with pytest.raises(ModelError, match="no Hugging Face name") as caught:
        to_hf(name)
    assert repr(name) in caught.value.message


@pytest.mark.parametrize(
    "name", ["layers.0.attention.wo.weight", "layers.0.moe.routed_experts.inner_experts.w4_EFD", "norm.weight"]
)
def test_what_is_no_stack_has_no_experts(name: str):
    with pytest.raises(ModelError, match="no Hugging Face name"):
        to_hf(name, 0)
