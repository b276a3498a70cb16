"""Adapters of others: what they cannot mean is refused by name, and what they hold is checked before it is added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_rl.engines.adapter_settings import AdapterSettings
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.titan.adapter_files import AdapterState, write_state
from forge_rl.errors import CheckpointError, ModelError
from forge_rl.models.adapters import BASE, CONFIG, WEIGHTS, Adapter, merged_copy, name_base, write_adapter
from forge_rl.models.hf_folder import tokenizer_files
from tests.fakes import full_disk

NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder of a model with one weight, which also holds another adapter's settings, as some on the hub do."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / CONFIG).write_text(json.dumps({"peft_type": "IA3"}))
    (folder / BASE).write_text("{}")
    save_file({NAME: torch.ones(4, 6)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """A folder of an adapter of rank 2."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    factors = {NAME: (torch.ones(2, 6), torch.ones(4, 2))}
    write_adapter(folder, factors, base=base, alpha=1.0, rslora=False, dropout=0.0)
    return folder


def changed(folder: Path, change: dict[str, Any]) -> Path:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


def merged(adapter: Path, base: Path, tmp_path: Path) -> torch.Tensor:
    (tmp_path / "merged").mkdir()
    Adapter.read(adapter).merge(base, tmp_path / "merged")
    return load_file(tmp_path / "merged" / "model.safetensors")[NAME]


def test_what_is_written_is_read_also_if_the_base_has_such_files_itself(adapter: Path, base: Path, tmp_path: Path):
    assert Adapter.read(adapter).digests
    assert torch.equal(merged(adapter, base, tmp_path), torch.full((4, 6), 2.0))
    assert not (tmp_path / "merged" / CONFIG).exists(), "transformers would look for the weights of an adapter"


def test_the_tokenizer_of_an_adapter_replaces_the_bases(adapter: Path, base: Path, tmp_path: Path):
    for name, content in {"tokenizer.json": "base", "tokenizer.model": "base", "chat_template.jinja": "base"}.items():
        (base / name).write_text(content)
    cache = tmp_path / "cache"
    assert (merged_copy(adapter, base, cache) / "chat_template.jinja").read_text() == "base", "the adapter has none"
    (adapter / "chat_template.jinja").write_text("own")
    folder = merged_copy(adapter, base, cache)
    assert [(folder / name).read_text() for name in ("tokenizer.model", "chat_template.jinja")] == ["base", "own"]
    for name in ("tokenizer.json", "additional_chat_templates/tools.jinja"):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text("own")
    folder = merged_copy(adapter, base, cache)
    assert not (folder / "tokenizer.model").exists(), "a part of another tokenizer"
    assert {path.read_text() for path in tokenizer_files(folder)} == {"own"}
    assert len(tokenizer_files(folder)) == 3


def test_copies_of_read_only_files_can_be_written(adapter: Path, base: Path, tmp_path: Path):
    (base / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "additional_chat_templates/tools.jinja"):
        (base / name).write_text("{}")
    files = [path for path in base.rglob("*") if path.is_file()]
    for path in files:
        path.chmod(0o444)
    (tmp_path / "written").mkdir()
    factors = {NAME: (torch.ones(2, 6), torch.ones(4, 2))}
    write_adapter(tmp_path / "written", factors, base=base, alpha=1.0, rslora=False, dropout=0.0)
    merged(adapter, base, tmp_path)
    for folder in (tmp_path / "written", tmp_path / "merged"):
        assert all(path.stat().st_mode & 0o200 for path in folder.rglob("*"))
        assert len(tokenizer_files(folder)) == len(tokenizer_files(base)) == 2


@pytest.mark.parametrize("size", [0, 500])
def test_a_full_disk_is_an_error_of_the_checkpoint(size: int, base: Path, tmp_path: Path):
    tensors = {f"{NAME}/lora_A": torch.ones(2, 6), f"{NAME}/lora_B": torch.ones(4, 2)}
    moments = {name: torch.ones(400) for name in tensors}
    state = AdapterState(scale=1.0, updates=1, planned=1, tensors={"values": tensors, "exp_avg": moments})
    with full_disk(size), pytest.raises(CheckpointError, match="the adapter cannot be written to"):
        write_state(tmp_path, state, AdapterSettings(lora=LoRAConfig(rank=2)), base=base)


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"use_of_later": True},
        {"arrow_config": {"top_k": 3}},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": ["pissa"]},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only"},
        {"fan_in_fan_out": True},
        {"r": 10**400},
        {"r": True},
        {"lora_alpha": 10**400},
        {"lora_alpha": float("nan")},
        {"lora_alpha": True},
    ],
)
def test_settings_that_make_more_of_it_than_a_product_are_refused_by_name(change: dict[str, Any], adapter: Path):
    with pytest.raises(ModelError, match=f"{next(iter(change))}|IA3|another rank") as refused:
        Adapter.read(changed(adapter, change))
    assert refused.value.hint


@pytest.mark.parametrize("how", [True, "gaussian", None])
def test_a_first_value_that_leaves_the_base_as_it_is_does_not_matter(how: object, adapter: Path):
    assert Adapter.read(changed(adapter, {"init_lora_weights": how})).rank == 2


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.full((2, 6), torch.nan), torch.ones(4, 2), "not finite"),
        (torch.ones(2), torch.ones(4, 2), "has shape"),
        (torch.tensor(1.0), torch.tensor(1.0), "has shape"),
        (torch.ones(2, 6), torch.ones(4, 2, 2), "has shape"),
        (torch.ones(3, 6), torch.ones(4, 3), "has shape"),
    ],
)
def test_factors_that_do_not_fit_are_refused(
    a: torch.Tensor, b: torch.Tensor, message: str, adapter: Path, base: Path, tmp_path: Path
):
    module = f"base_model.model.{NAME.removesuffix('.weight')}"
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, adapter / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        merged(adapter, base, tmp_path)


def test_nothing_is_added_to_quantised_weights(adapter: Path, base: Path, tmp_path: Path):
    (base / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="quantised weights"):
        merged(adapter, base, tmp_path)


def test_an_adapter_that_another_host_wrote_names_the_model_of_this_one(adapter: Path, tmp_path: Path):
    before = Adapter.read(adapter)
    name_base(adapter, tmp_path / "here")
    after = Adapter.read(adapter)
    assert after.base == str(tmp_path / "here")
    assert json.loads((adapter / BASE).read_text())["folder"] == after.base
    assert (after.digests, after.scale) == (before.digests, before.scale)
