"""Configs and weights of model folders that are read or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.loading import load_weights
from forge_rl.engines.titan.model import build_model
from forge_rl.errors import ModelError
from tests.fakes import make_model
from tests.test_titan_model import YARN, engine_of, titan_logits

pytestmark = pytest.mark.usefixtures("process_group")


def test_weights_spread_over_several_files_are_found(tmp_path: Path):
    reference = make_model(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    token_ids = torch.arange(20)
    assert torch.equal(titan_logits(tmp_path / "many", token_ids), titan_logits(tmp_path / "one", token_ids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": None}, "model_type None"),
        ({"attention_bias": True}, "asks for attention_bias"),
        ({"mlp_bias": True}, "asks for mlp_bias"),
        ({"use_sliding_window": True}, "asks for use_sliding_window"),
        ({"hidden_act": "gelu"}, "asks for hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "asks for rope_type 'longrope'"),
        ({"rope_parameters": YARN | {"mscale": 0.7}}, "asks for YaRN with mscale"),
        ({"quantization_config": {"quant_method": "hqq"}}, "asks for quant_method 'hqq'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "asks for quant_method 'mxfp4'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "asks for 3 bits"),
        ({"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "asks for AWQ's 'gemv' packing"),
        ({"attention_bias": True, "mlp_bias": True}, "asks for attention_bias, mlp_bias"),
        ({"dtype": "float7"}, "float7"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, not a whole number from 1 to 10000"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(change: dict, message: str, tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message) as caught:
        engine_of(tmp_path)
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt_oss", {"attention_bias": False}, "asks for attention_bias false"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "asks for swiglu_alpha 1.5"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0, not a number above 0"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, r"layer_types is \['full_attention'\], not"),
        ("gpt_oss", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types is"),
        ("gpt_oss", {"sliding_window": -1}, "sliding_window is -1"),
        ("gpt_oss", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "asks for YaRN with attention_factor"),
        ("gpt_oss", {"rope_parameters": YARN | {"factor": None}}, "factor is None, not a number above 0"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', and the trainer supports 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": None}, "scoring_func is None, and the trainer supports 'sigmoid'"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "asks for fewer key heads than heads"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "asks for moe_layer_freq 2"),
        ("deepseek_v3", {"n_group": 3}, "asks for 8 experts in 3 groups, 3 of 2 groups"),
        ("deepseek_v3", {"topk_group": 1}, "asks for 8 experts in 4 groups, 3 of 1 groups"),
        ("deepseek_v3", {"first_k_dense_replace": 9}, "first_k_dense_replace is 9, not a number of layers"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0}}, "asks for YaRN whose mscale"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "asks for fp8 without weight_block_size"),
        ("deepseek_v3", {"attention_bias": True}, "asks for attention_bias"),
    ],
)
def test_what_a_family_does_not_support_is_refused(family: str, change: dict, message: str, tmp_path: Path):
    make_model(tmp_path, family)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message) as caught:
        read_architecture(tmp_path)
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_native_modelling_refuses_another_family_with_those_that_it_has(tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mistral"}))
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path, "native")
    assert all(repr(family) in caught.value.message for family in FAMILIES)


@pytest.mark.parametrize("old", [{"type": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}])
def test_the_older_name_of_rope_scaling_is_read_too(old: dict, tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_scaling": old, "rope_theta": 10000.0}))
    with pytest.raises(ModelError, match="asks for rope_type"):
        engine_of(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "", "3", '{"model_type": "llama"}'])
def test_a_broken_config_is_an_error_with_its_path(text: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=str(tmp_path / "config.json")):
        read_architecture(tmp_path)


def test_a_missing_config_is_an_error_with_its_path(tmp_path: Path):
    with pytest.raises(ModelError, match=str(tmp_path / "config.json")):
        read_architecture(tmp_path)


def drop_a_weight(state: dict[str, torch.Tensor]) -> None:
    del state["model.layers.1.mlp.up_proj.weight"]


def cut_a_weight(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = state["model.norm.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_weight, "lacks the weight 'model.layers.1.mlp.up_proj.weight'"),
        (cut_a_weight, r"'model.norm.weight' in .* has shape \(23,\), config.json says \(24,\)"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(damage: Callable, message: str, tmp_path: Path):
    make_model(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    damage(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        engine_of(tmp_path)


def test_all_weights_are_checked_before_any_is_read(tmp_path: Path):
    make_model(tmp_path)
    model = build_model(read_architecture(tmp_path), TrainSettings(dtype="float32", seq_len=16))
    with torch.no_grad():
        model.init_states()
        for parameter in model.parameters():
            parameter.fill_(7)
    state = load_file(tmp_path / "model.safetensors")
    cut_a_weight(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"config\.json says"):
        load_weights(model, tmp_path, tied=model.enable_weight_tying)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_a_weight_of_a_dtype_that_torch_cannot_read_is_refused_by_name(dtype: str, tmp_path: Path):
    make_model(tmp_path)
    state, path = load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors"
    shape = state["model.layers.0.mlp.up_proj.weight"].shape
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    size = shape.numel() * int(dtype[1]) // 8
    contents = b""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if name == "model.layers.0.mlp.up_proj.weight":
            entry["dtype"], values = dtype, bytes(size)
        else:
            values = state[name].numpy().tobytes()
        entry["data_offsets"] = [len(contents), len(contents) + len(values)]
        contents += values
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + contents)
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.up_proj.weight' in .*model.safetensors cannot be read"):
        engine_of(tmp_path)


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path):
    make_model(tmp_path / "one").save_pretrained(tmp_path, max_shard_size="8KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], index["weight_map"]["model.norm.weight"])
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-.*safetensors cannot be read: .*does not contain"):
        engine_of(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    make_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no safetensors file"):
        engine_of(tmp_path)


def test_a_broken_weights_file_is_refused(tmp_path: Path):
    make_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        engine_of(tmp_path)


def test_a_missing_part_of_the_weights_is_refused(tmp_path: Path):
    make_model(tmp_path / "one").save_pretrained(tmp_path, max_shard_size="8KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-.*cannot be read"):
        engine_of(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_broken_index_of_the_weights_is_refused(text: str, tmp_path: Path):
    make_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"model.safetensors.index.json cannot be read"):
        engine_of(tmp_path)
