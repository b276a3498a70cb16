"""Files of adapters: checkpoints, folders that peft reads or wrote, and malformed ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from apps.merge import Config as MergeConfig
from apps.merge import merge
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.titan.index import INDEX
from forge_rl.errors import CheckpointError, ModelError
from forge_rl.models import expert_stacks
from forge_rl.models.adapters import Adapter
from forge_rl.models.resolve import resolve_model
from tests.fakes import make_model, packed, random_batch, train_batch
from tests.lora_engines import LOSS, SPARSE, WHOLE, engine_of, named_factors, saved, trained_engine, with_peft

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, LoRAConfig(rank=3, alpha=5.0)) for family in ("llama", "qwen3", *SPARSE)),
        *((family, WHOLE) for family in SPARSE),
        ("qwen3_moe", replace(WHOLE, targets=("experts",), rslora=True)),
    ],
)
def test_peft_reads_what_is_saved_and_merges_what_is_published(family: str, lora: LoRAConfig, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    source = tmp_path / "hf"
    engine = trained_engine(source, lora, family, dtype="float32")
    folder = saved(engine, source, tmp_path / "step")
    assert not list((folder / "training").glob("*.safetensors"))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    base = AutoModelForCausalLM.from_pretrained(source, **options)
    adapted = peft.PeftModel.from_pretrained(base, folder / "model").eval()
    (tmp_path / "merged").mkdir()
    Adapter.read(folder / "model").merge(source, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", **options)
    token_ids = torch.arange(12)[None] % 43
    with torch.no_grad():
        logits = adapted(token_ids).logits
        merged = adapted.merge_and_unload().eval()
        torch.testing.assert_close(ours(token_ids).logits, merged(token_ids).logits)
        torch.testing.assert_close(logits, merged(token_ids).logits, rtol=1e-4, atol=1e-4)
    files, start = (load_file(place / "model.safetensors") for place in (tmp_path / "merged", source))
    published = {shard.name: shard.values for shard in engine.local_shards()}
    changed = {name for name, values in start.items() if not values.equal(files[name])}
    expected = {spec.name for spec in engine.specs() if spec.changed}
    assert changed <= expected
    assert all(".experts.7." in name for name in expected - changed), "no token used that one"
    assert any(".experts." in name for name in changed) == ("experts" in lora.targets)
    assert ("lm_head.weight" in changed) == ("lm_head" in lora.targets)
    for name, values in files.items():
        torch.testing.assert_close(published[name], values)


@pytest.mark.parametrize(("family", "lora"), [("llama", LoRAConfig(rank=4, dropout=0.3)), ("qwen3_moe", WHOLE)])
def test_a_checkpoint_holds_adapters_alone_and_goes_on_from_them(family: str, lora: LoRAConfig, tmp_path: Path):
    engine = trained_engine(tmp_path / "hf", lora, family)
    folder = saved(engine, tmp_path / "hf", tmp_path / "step")
    state_keys = json.loads((folder / "training" / INDEX).read_text()).keys()
    counts = {"updates", "planned", "version", "steps"}
    assert {key.rpartition(".")[2][-6:] for key in state_keys - counts} == {"lora_A", "lora_B"}
    other = engine_of(tmp_path / "hf", lora)
    assert other.load_training_state(folder / "training") == 2
    laid = packed(random_batch(2, vocab=43))
    for trainer in (engine, other):
        train_batch(trainer, laid, LOSS, total_updates=5)
    ends = [{shard.name: shard.values.clone() for shard in trainer.local_shards()} for trainer in (engine, other)]
    assert all(torch.equal(values, ends[1][name]) for name, values in ends[0].items())
    other.reset(OptimizerConfig(lr=1e-2))
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(shard.values, weights[shard.name].double()) for shard in other.local_shards())
    with pytest.raises(CheckpointError, match="trained adapters, and this one does not"):
        engine_of(tmp_path / "hf", LoRAConfig()).load_training_state(folder / "training")
    with pytest.raises(CheckpointError, match="on other modules"):
        engine_of(tmp_path / "hf", LoRAConfig(rank=4, targets=("q_proj",))).load_training_state(folder / "training")


def test_an_adapter_is_a_model_as_long_as_its_base_is_unchanged(tmp_path: Path):
    source = tmp_path / "hf"
    engine = trained_engine(source, LoRAConfig(rank=3), dtype="float32")
    (source / "tokenizer.json").write_text("{}")
    step = saved(engine, source, tmp_path / "step")
    published = {shard.name: shard.values.clone() for shard in engine.local_shards()}
    resolved = resolve_model(str(step), tmp_path / "cache")
    out = tmp_path / "merged"
    assert merge(MergeConfig(adapter=step, out=out, cache=tmp_path / "cache")) == source
    for folder in (resolved, out):
        weights = load_file(folder / "model.safetensors")
        assert weights.keys() >= published.keys()
        for name, values in published.items():
            torch.testing.assert_close(weights[name], values)
    assert resolve_model(str(step), tmp_path / "cache") == resolved
    with pytest.raises(ModelError, match="exists"):
        merge(MergeConfig(adapter=step, out=out, cache=tmp_path / "cache"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000007").symlink_to(step)
    of_run = tmp_path / "of_run"
    assert merge(MergeConfig(adapter=tmp_path / "run", out=of_run, cache=tmp_path / "cache")) == source
    assert (of_run / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    with pytest.raises(ModelError, match="holds no adapter"):
        merge(MergeConfig(adapter=source, out=tmp_path / "other", cache=tmp_path / "cache"))
    tensors = load_file(source / "model.safetensors")
    save_file({name: values + 1 for name, values in tensors.items()}, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"is not the model that .* adapts: model.safetensors changed"):
        resolve_model(str(step), tmp_path / "cache")
    config = json.loads((step / "model" / "adapter_config.json").read_text())
    (step / "model" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora"):
        Adapter.read(step / "model")


@pytest.mark.parametrize("family", SPARSE)
def test_an_adapter_of_experts_that_peft_wrote_is_merged_as_peft_does(family: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    source, adapter = tmp_path / "hf", tmp_path / "adapter"
    make_model(source, family)
    engine = engine_of(source, WHOLE)
    for number, factor in enumerate(named_factors(engine).values()):
        torch.nn.init.normal_(factor, 0, 0.2, generator=torch.Generator().manual_seed(number))
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    adapted = with_peft(base, engine, WHOLE)
    adapted.save_pretrained(adapter)
    (tmp_path / "merged").mkdir()
    Adapter.read(adapter).merge(source, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(adapter / "adapter_model.safetensors")
    copy = "base_model.model.lm_head.base_layer.weight"
    save_file(tensors | {copy: tensors[copy] + 1}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"another lm_head\.weight than the base"):
        Adapter.read(adapter).merge(source, tmp_path / "other")
    expected = dict(adapted.merge_and_unload().named_parameters())
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_parameters": ["mlp.gate.weight"]}, "another rank or alpha"),
        ({"target_parameters": "experts.down_proj"}, "another rank or alpha"),
        ({"rank_pattern": {"experts.down_proj": 3}}, "another rank or alpha"),
        (
            {"target_parameters": ["experts.down_proj"], "rank_pattern": {"experts.down_proj": 3}},
            r"has two adapters of .*experts\.down_proj",
        ),
        ({"rank_pattern": {"experts.down_proj": 3, "experts.gate_up_proj": 2}}, "another rank or alpha"),
        ({"rank_pattern": {"experts.down_proj": 0, "experts.gate_up_proj": 0}}, "has r 6"),
        ({"rank_pattern": {"experts.down_proj": 5, "experts.gate_up_proj": 5}}, "not of rank 5"),
        ({"rank_pattern": {"experts.down_proj": 1, "experts.gate_up_proj": 1}}, "is of 12 experts .* lacks"),
        ({"target_parameters": None, "rank_pattern": {}}, "adapts 4 weights that .* lacks"),
    ],
)
def test_a_malformed_adapter_of_experts_is_refused(settings: dict[str, object], message: str, tmp_path: Path):
    source = tmp_path / "hf"
    folder = saved(trained_engine(source, WHOLE, "qwen3_moe"), source, tmp_path / "step") / "model"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"experts.down_proj": 3, "experts.gate_up_proj": 3}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    (tmp_path / "merged").mkdir()
    with pytest.raises(ModelError, match=message):
        Adapter.read(folder).merge(source, tmp_path / "merged")


def test_an_adapter_of_no_experts_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"factors of experts of shapes \(0, 8\) and \(4, 0\)"):
        expert_stacks.unflattened((torch.zeros(0, 8), torch.zeros(4, 0)), 2, tmp_path)
