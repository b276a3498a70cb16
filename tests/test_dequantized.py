"""MXFP4 weights: dequantised as transformers reads them, and engines get none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_rl.engines.architecture import read_architecture
from forge_rl.errors import ModelError
from forge_rl.models.dequantized import dequantized
from tests.fakes import make_model


def make_quantized(folder: Path, files: int = 1) -> None:
    """A random gpt-oss whose experts are in MXFP4, as those that are published."""
    make_model(folder, "gpt_oss", hidden_size=64, intermediate_size=32)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith("_proj")]:
        experts, inputs, outputs = state.pop(name).shape
        for kind, values, rest in (("blocks", (0, 256), (16,)), ("scales", (122, 126), ())):
            size = (experts, outputs, inputs // 32, *rest)
            state[f"{name}_{kind}"] = torch.randint(*values, size, dtype=torch.uint8, generator=generator)
    names = sorted(state)
    parts = [names[first::files] for first in range(files)]
    (folder / "model.safetensors").unlink()
    for number, part in enumerate(parts):
        file = "model.safetensors" if files == 1 else f"model-{number}.safetensors"
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
    if files > 1:
        index = {name: f"model-{number}.safetensors" for number, part in enumerate(parts) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    path = folder / "config.json"
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def of_transformers(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").float()


def test_the_trainer_reads_the_copy_as_transformers_does(tmp_path: Path, process_group: None):
    from tests.test_titan_model import titan_logits

    make_quantized(tmp_path)
    assert read_architecture(tmp_path).quantized
    copy, token_ids = dequantized(tmp_path, tmp_path / "cache"), torch.arange(40)
    with torch.no_grad():
        expected = of_transformers(copy)(token_ids[None]).logits[0]
    assert expected.std() > 0.2
    assert (titan_logits(copy, token_ids) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("files", [1, 3])
def test_a_dequantised_folder_is_the_same_model_in_bfloat16(files: int, tmp_path: Path):
    make_quantized(tmp_path / "mxfp4", files)
    copy = dequantized(tmp_path / "mxfp4", tmp_path / "cache")
    assert len(list(copy.glob("*.safetensors"))) == files
    written = {name: values for path in copy.glob("*.safetensors") for name, values in load_file(path).items()}
    assert {values.dtype for values in written.values()} == {torch.bfloat16}
    assert json.loads((copy / "config.json").read_text())["dtype"] == "bfloat16"
    architecture = read_architecture(copy)
    assert not architecture.quantized
    expected = {name: values.bfloat16() for name, values in of_transformers(tmp_path / "mxfp4").state_dict().items()}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in written)
    assert of_transformers(copy).state_dict().keys() == expected.keys(), "the copy opens"


def test_a_folder_is_dequantised_once_and_again_when_it_has_changed(tmp_path: Path):
    make_quantized(tmp_path / "mxfp4")
    copy = dequantized(tmp_path / "mxfp4", tmp_path / "cache")
    made = (copy / "model.safetensors").stat().st_mtime_ns
    assert dequantized(tmp_path / "mxfp4", tmp_path / "cache") == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == made
    (tmp_path / "mxfp4" / "generation_config.json").write_text("{}")
    assert dequantized(tmp_path / "mxfp4", tmp_path / "cache") != copy
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


def test_what_is_not_mxfp4_or_does_not_fit_is_refused(tmp_path: Path):
    make_quantized(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="asks for quant_method 'fp8'"):
        read_architecture(tmp_path)
    path.write_text(json.dumps(config | {"num_local_experts": 400}))
    with pytest.raises(ModelError, match=r"describes a model of .* weights, and its files have"):
        read_architecture(tmp_path)
    path.write_text(json.dumps(config))
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(state | {name: state[name][..., :0]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"the scales of 'model.layers.1.mlp.experts.down_proj' do not match"):
        dequantized(tmp_path, tmp_path / "cache")
