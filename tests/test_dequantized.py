"""Quantised weights: read as whoever defined their format does, and engines get none."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from apps.merge import Config as MergeConfig
from apps.merge import merge
from forge_rl.engines.architecture import check_weights, read_architecture, stored_bytes
from forge_rl.errors import ModelError
from forge_rl.models.adapters import write_adapter
from forge_rl.models.dequantized import dequantized
from tests.fakes import full_disk, make_model


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
    unconverted_modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": unconverted_modules}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def of_transformers(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").float()


def test_the_trainer_reads_the_copy_as_transformers_does(tmp_path: Path, process_group: None):
    from tests.test_titan_model import titan_logits

    make_quantized(tmp_path)
    assert read_architecture(tmp_path).quantized
    with pytest.raises(ModelError, match="holds quantised weights, which cannot be trained"):
        titan_logits(tmp_path, torch.arange(40))
    copy, token_ids = dequantized(tmp_path, tmp_path / "cache"), torch.arange(40)
    with torch.no_grad():
        expected = of_transformers(copy)(token_ids[None]).logits[0]
    assert expected.std() > 0.2
    assert (titan_logits(copy, token_ids) - expected).abs().max() < 1e-4


def test_an_adapter_of_a_copy_that_is_gone_is_merged_with_a_new_one(tmp_path: Path):
    make_quantized(tmp_path / "mxfp4")
    (tmp_path / "mxfp4" / "tokenizer.json").write_text("{}")
    copy = dequantized(tmp_path / "mxfp4", tmp_path / "cache")
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    rows, columns = weights[name].shape
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator)
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", {name: (a, b)}, base=copy, alpha=4.0, rslora=False, dropout=0.0)
    shutil.rmtree(tmp_path / "cache")
    config = MergeConfig(
        adapter=tmp_path / "adapter", out=tmp_path / "out", base=str(tmp_path / "mxfp4"), cache=tmp_path / "cache"
    )
    assert merge(config) == copy
    merged = load_file(tmp_path / "out" / "model.safetensors")
    expected = weights | {name: (weights[name].double() + 2 * (b.double() @ a.double())).bfloat16()}
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[key].float(), expected[key].float(), rtol=8e-3, atol=1e-2) for key in merged)
    assert all(merged[key].equal(weights[key]) for key in merged if key != name)


@pytest.mark.parametrize("files", [1, 3])
def test_a_dequantised_folder_is_the_same_model_in_bfloat16(files: int, tmp_path: Path):
    make_quantized(tmp_path / "mxfp4", files)
    copy = dequantized(tmp_path / "mxfp4", tmp_path / "cache")
    assert len(list(copy.glob("*.safetensors"))) == files
    tensors = {name: values for path in copy.glob("*.safetensors") for name, values in load_file(path).items()}
    assert {values.dtype for values in tensors.values()} == {torch.bfloat16}
    assert json.loads((copy / "config.json").read_text())["dtype"] == "bfloat16"
    architecture = read_architecture(copy)
    assert not architecture.quantized
    expected = {name: values.bfloat16() for name, values in of_transformers(tmp_path / "mxfp4").state_dict().items()}
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    assert of_transformers(copy).state_dict().keys() == expected.keys(), "the copy opens"


def test_a_folder_is_dequantised_once_and_again_when_it_has_changed(tmp_path: Path):
    make_quantized(tmp_path / "mxfp4")
    copy = dequantized(tmp_path / "mxfp4", tmp_path / "cache")
    modified_ns = (copy / "model.safetensors").stat().st_mtime_ns
    assert dequantized(tmp_path / "mxfp4", tmp_path / "cache") == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == modified_ns
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
    with pytest.raises(
        ModelError, match=r"'model.layers.1.mlp.experts.down_proj' cannot be dequantised: the scales do not match"
    ):
        dequantized(tmp_path, tmp_path / "cache")


CODES = [-1.0, -0.6961928, -0.5250730, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]
CODES += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
"""NF4's values (QLoRA, arXiv:2305.14314, appendix E), rounded."""


def gptq(q: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight as GPTQ's first format stores it, packed by vLLM's functions."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import pack_cols, pack_rows

    packed = {"qweight": pack_rows(q, 4, *q.shape), "qzeros": pack_cols((zeros - 1) & 15, 4, *zeros.shape)}
    return packed | {"scales": scales.half(), "g_idx": groups.int()}


def awq(q: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> dict[str, torch.Tensor]:
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack

    packed = {"qweight": awq_pack(q, 4, *q.shape), "qzeros": awq_pack(zeros, 4, *zeros.shape)}
    return packed | {"scales": scales.half()}


def groups_of_16(weight: torch.Tensor, pack: Callable[..., dict[str, torch.Tensor]], *, shuffled: bool) -> Stored:
    """A weight [N, K] in 4 bits with zeros for each 16 inputs, and its values by the formula in float64."""
    groups = torch.arange(weight.shape[1]) // 16
    if shuffled:
        groups = groups[torch.randperm(len(groups))]
    q = torch.randint(0, 16, weight.T.shape, dtype=torch.int32)
    zeros = torch.randint(0, 16, (int(groups.max()) + 1, len(weight)), dtype=torch.int32)
    scales = (torch.rand(zeros.shape) * 0.05 + 0.01).half()
    expected = torch.stack([(q[k] - zeros[g]).double() * scales[g].double() for k, g in enumerate(groups)], 1)
    return pack(q, zeros, scales, groups), expected


def nf4(weight: torch.Tensor, *, nested: bool) -> Stored:
    """A weight in blocks of 64 values, as bitsandbytes stores it, and its values by the formula in float64."""
    codes = torch.randint(0, 16, (weight.numel(),))
    table, blocks = torch.tensor(CODES), -(-weight.numel() // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    absmax, quant_state = torch.rand(blocks) * 0.3, {}
    if nested:
        of_absmax, outer, offset = torch.rand(256) - 0.5, torch.rand(-(-blocks // 8)), 0.25
        absmax_codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        quant_state = {
            "weight.absmax": absmax_codes,
            "weight.nested_absmax": outer,
            "weight.nested_quant_map": of_absmax,
        }
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": offset}
        absmax = torch.stack([of_absmax[c.item()] * outer[i // 8] + offset for i, c in enumerate(absmax_codes)])
    expected = [CODES[code] * float(absmax[i // 64]) for i, code in enumerate(codes.tolist())]
    packed = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None]
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors = {"weight": packed, "weight.absmax": absmax, "weight.quant_map": table}
    tensors |= quant_state | {"weight.quant_state.bitsandbytes__nf4": text}
    return tensors, torch.tensor(expected, dtype=torch.float64).view(weight.shape)


def int8(weight: torch.Tensor) -> Stored:
    values, largest = torch.randint(-127, 128, weight.shape, dtype=torch.int8), torch.rand(len(weight))
    return {"weight": values, "SCB": largest}, values.double() * largest.double()[:, None] / 127


def fp8(weight: torch.Tensor) -> Stored:
    """A weight in blocks of 16 by 32, at least one of which is cut off."""
    values, size = weight.to(torch.float8_e4m3fn), [-(-n // b) for n, b in zip(weight.shape, (16, 32), strict=True)]
    scales, expected = torch.rand(size) + 0.5, values.double()
    for row, column in itertools.product(*map(range, size)):
        expected[row * 16 : row * 16 + 16, column * 32 : column * 32 + 32] *= scales[row, column].double()
    return {"weight": values, "weight_scale_inv": scales}, expected


Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of one quantised weight, by the end of their names, and its values in float64."""
METHODS: dict[str, tuple[dict[str, object], Callable[[torch.Tensor], Stored]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, partial(groups_of_16, pack=gptq, shuffled=True)),
    "awq": ({"quant_method": "awq", "bits": 4}, partial(groups_of_16, pack=awq, shuffled=False)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, partial(nf4, nested=False)),
    "nf4, double": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, partial(nf4, nested=True)),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8),
}


@pytest.mark.parametrize("method", METHODS)
def test_each_format_is_read_by_its_formula_and_trained_in_bfloat16(method: str, tmp_path: Path, process_group: None):
    from tests.test_titan_model import titan_logits

    config, quantise = METHODS[method]
    folder = tmp_path / "quantised"
    make_model(folder, "llama", hidden_size=32, head_dim=8, intermediate_size=48)
    state, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in state if name.endswith("_proj.weight")]:
        parts, expected[name] = quantise(state.pop(name))
        state |= {f"{name.removesuffix('weight')}{suffix}": values for suffix, values in parts.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    assert read_architecture(folder).quantized
    copy = dequantized(folder, tmp_path / "cache")
    tensors = load_file(copy / "model.safetensors")
    assert tensors.keys() == {name for name in state if "_proj." not in name} | expected.keys()
    for name, values in expected.items():
        assert values.std() > 0
        assert (tensors[name].double() - values).abs().max() <= values.abs().max() * 2**-8, name
    assert stored_bytes(copy) >= 2 * read_architecture(copy).weights
    token_ids = torch.arange(40)
    with torch.no_grad():
        of_engine = of_transformers(copy)(token_ids[None]).logits[0]
    assert (titan_logits(copy, token_ids) - of_engine).abs().max() < 1e-4 * of_engine.abs().max()
    broken = next(name for name in state if name.endswith(("scales", "absmax", "SCB", "scale_inv")))
    save_file(state | {broken: state[broken][:-1].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot be dequantised"):
        dequantized(folder, tmp_path / "cache")


def test_codes_without_scales_are_never_taken_for_weights(tmp_path: Path):
    folder, name = tmp_path / "quantised", "model.layers.1.self_attn.q_proj.weight"
    make_model(folder, "llama", hidden_size=32, head_dim=8, intermediate_size=48)
    state = load_file(folder / "model.safetensors")
    state[name] = state[name].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    # As folders whose quantisation is in hf_quant_config.json alone.
    with pytest.raises(ModelError, match=f"holds '{name}' as F8_E4M3, and config.json has no quantization_config"):
        check_weights(folder, read_architecture(folder))
    path = folder / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=f"'{name}' is torch.float8_e4m3fn without the scales of 'fp8'"):
        dequantized(folder, tmp_path / "cache")


def test_files_in_mistrals_format_are_neither_counted_nor_converted(tmp_path: Path):
    make_quantized(tmp_path / "mxfp4")
    size = stored_bytes(tmp_path / "mxfp4")
    save_file({"norm.weight": torch.ones(64)}, tmp_path / "mxfp4" / "consolidated.safetensors")
    assert stored_bytes(tmp_path / "mxfp4") == size
    assert [path.name for path in dequantized(tmp_path / "mxfp4", tmp_path / "cache").glob("*.safetensors")] == [
        "model.safetensors"
    ]


def test_a_disk_that_fills_up_meanwhile_is_not_blamed_on_the_model(tmp_path: Path):
    make_quantized(tmp_path / "mxfp4")
    with full_disk(4096), pytest.raises(ModelError, match=r"cannot write .* in bfloat16 to") as refused:
        dequantized(tmp_path / "mxfp4", tmp_path / "cache")
    assert "free space there" in refused.value.hint
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_copy_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_quantized(tmp_path)
    copy = dequantized(tmp_path, tmp_path / "cache")
    needed = sum(values.nbytes for values in load_file(copy / "model.safetensors").values())
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        with contextlib.nullcontext() if fits else pytest.raises(ModelError, match=r"the model takes .* in bfloat16"):
            dequantized(tmp_path, tmp_path / f"cache-{fits}")
