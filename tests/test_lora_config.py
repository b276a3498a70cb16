"""Settings of LoRA: modules without adapters, the learning rate, planned memory and counts of parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.factory import plan_training
from forge_rl.engines.lora_config import LoRAConfig, adapter_parameters
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.adapter_engine import TitanAdapters
from forge_rl.errors import ConfigError
from forge_rl.flags.command_line import parse
from forge_rl.run.lora_settings import check_served_versions, lora_lines
from forge_rl.services.generator_config import GeneratorConfig
from recipes import grpo
from tests.fakes import make_model
from tests.lora_engines import FAMILIES, SPARSE, WHOLE, engine_of, named_factors

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "tied",
            {"lora": LoRAConfig(rank=4, targets=("lm_head",))},
            "lm_head: the head of this 'llama' is the embedding",
        ),
        (
            "llama",
            {"lora": LoRAConfig(rank=4, targets=("embed_tokens",))},
            "embeddings and value heads have no adapters",
        ),
        ("llama", {"lora": LoRAConfig(rank=4, targets=("experts",))}, "a 'llama' has no experts"),
        ("qwen3_moe", {"lora": LoRAConfig(rank=4, targets=("experts",), dropout=0.1)}, "experts have no dropout"),
        (
            "qwen3_moe",
            {"lora": WHOLE, "tensor_parallel_degree": 2},
            "need whole experts, and tensor-parallel ranks split",
        ),
        ("llama", {"lora": LoRAConfig(rank=4, targets=("query",))}, "no such linear layer"),
        ("llama", {"lora": LoRAConfig(rank=4, targets=("all-linear", "q_proj"))}, "q_proj: all-linear includes it"),
        ("qwen3_moe", {"lora": LoRAConfig(rank=4, targets=("q_proj", "gate_proj"))}, "only attention has adapters"),
        ("gpt_oss", {"lora": LoRAConfig(rank=4, targets=("router",))}, "routers have no adapters"),
        ("llama", {"lora": LoRAConfig(rank=4), "pipeline_parallel_degree": 2}, "pipeline stages do not have"),
        ("llama", {"lora": LoRAConfig(rank=4), "frozen": ("model.norm.*",)}, "has no effect"),
        ("llama", {"lora": LoRAConfig(rank=4, dropout=0.1), "tensor_parallel_degree": 2}, "whole rows"),
    ],
)
def test_what_has_no_adapter_is_refused_by_name(family: str, settings: dict, message: str, tmp_path: Path):
    make_model(tmp_path, **({"tie_word_embeddings": True} if family == "tied" else {"family": family}))
    with pytest.raises(ConfigError, match=message) as error:
        check_model(TrainSettings(**settings), 2, read_architecture(tmp_path))
    assert "--" in str(error.value)


def test_adapters_have_ten_times_the_learning_rate_unless_set(tmp_path: Path):
    assert grpo.Config(lora=LoRAConfig(rank=4)).trainer.optimizer.lr == pytest.approx(3e-4)
    config = parse(grpo.Config, "grpo", ["--lora.rank", "16", "--lora.targets", "q_proj", "v_proj"])
    assert (config.trainer.lora.rank, config.trainer.lora.targets) == (16, ("q_proj", "v_proj"))
    assert replace(config, seed=3).trainer.lora_seed == 3
    assert replace(config, seed=3).trainer.optimizer.lr == pytest.approx(3e-4)
    named = parse(grpo.Config, "grpo", ["--lora.rank", "16", "--trainer.optimizer.lr", "1e-4"])
    assert named.trainer.optimizer.lr == 1e-4
    file = tmp_path / "run.toml"
    file.write_text("[lora]\nrank = 16\n[trainer.optimizer]\nlr = 3e-5\n")
    for words in (["--lora.rank", "16", "--trainer.optimizer.lr", "3e-5"], ["--config", str(file)]):
        config_as_given = parse(grpo.Config, "grpo", words)
        assert config_as_given.trainer.optimizer.lr == 3e-5, "as given, though it is the default"
        assert replace(config_as_given, seed=3).trainer.optimizer.lr == 3e-5
    assert grpo.Config().trainer.optimizer.lr == 3e-5
    with pytest.raises(ConfigError, match="value model"):
        lora_lines(config, values=True)


def test_a_plan_of_adapters_has_no_reference_and_few_moments(tmp_path: Path):
    make_tiny = make_model(tmp_path, hidden_size=64, intermediate_size=256)
    count = sum(parameter.numel() for parameter in make_tiny.parameters())
    full_settings = TrainSettings(dtype="float32", seq_len=64)
    adapted = replace(full_settings, lora=LoRAConfig(rank=2))
    before, after = (
        plan_training(tmp_path, settings, ranks=1, reference=True) for settings in (full_settings, adapted)
    )
    adapters = after.gradients // 4
    assert 0 < adapters < count / 5
    assert after.weights == 4 * (count + adapters)
    assert (after.reference, after.optimizer) == (0, 8 * adapters)
    assert after.state < before.state / 3


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, LoRAConfig(rank=3)) for family in FAMILIES), *((family, WHOLE) for family in SPARSE)],
)
def test_parameters_of_adapters_are_counted_before_there_are_any(family: str, lora: LoRAConfig, tmp_path: Path):
    make_model(tmp_path, family, **FAMILIES[family])
    factors = named_factors(engine_of(tmp_path, lora)).values()
    assert adapter_parameters(read_architecture(tmp_path), lora) == sum(factor.numel() for factor in factors) > 0


@pytest.mark.parametrize(("family", "target"), [("qwen3_moe", "experts"), ("qwen3", "lm_head")])
def test_experts_and_heads_are_refused_where_several_share_a_base_or_engines_serve_them(
    family: str, target: str, tmp_path: Path
):
    folder = tmp_path / "hf"
    make_model(folder, family)
    lora = LoRAConfig(rank=4, targets=("q_proj", target))
    generator = GeneratorConfig(adapters="served", max_model_len=128, kv_cache_gib=0.1)
    config = grpo.Config(model=str(folder), out=tmp_path / "run", generator=generator, lora=lora)
    with pytest.raises(ConfigError, match=f"engines cannot serve an adapter of {target}"):
        check_served_versions(config, folder, read_architecture(folder))
    with pytest.raises(ConfigError, match=f"{target}: several adapters over one base"):
        TitanAdapters(engine_of(folder, lora), folder)
