"""Plans of models on transformers' code, and the models and layouts that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forge_rl.engines.architecture import read_architecture, read_served
from forge_rl.engines.degrees import check_model
from forge_rl.engines.devices import assumed_gpus
from forge_rl.engines.factory import plan_training
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.engines.protocol import Modelling, TrainSettings
from forge_rl.errors import ConfigError, ForgeError, ModelError
from forge_rl.run.plan.memory import show_plan
from forge_rl.services.generator_config import GeneratorConfig
from recipes.grpo import Config
from tests.fakes import hf_weights, make_model
from tests.test_general_models import HYBRID
from tests.zoo.folders import write
from tests.zoo.packed import engine_of

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    "name",
    [
        "google/gemma-2-2b-it",
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "LiquidAI/LFM2-1.2B",
        "ibm-granite/granite-4.0-h-1b",
        "Qwen/Qwen3.5-4B, its text model",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
    ],
)
def test_a_plan_counts_the_weights_and_grows_with_the_row(name: str, tmp_path: Path):
    folder = write(name, tmp_path / "hf")
    plans = [
        plan_training(folder, TrainSettings(dtype="float32", seq_len=tokens), ranks=1, reference=True)
        for tokens in (64, 128)
    ]
    stored = [load_file(path) for path in folder.glob("*.safetensors")]
    weights = 4 * sum(values.numel() for tensors in stored for values in tensors.values())
    assert [(plan.weights, plan.reference) for plan in plans] == [(weights, weights)] * 2
    assert 0 < plans[0].activations < plans[1].activations
    assert plans[1].head > 0, "in the shorter row, a layer's backward pass may need more than the head"


def test_stacked_experts_are_named_as_the_files_have_them(tmp_path: Path):
    make_model(tmp_path, "mixtral", num_local_experts=3)
    stored, engine = load_file(tmp_path / "model.safetensors"), engine_of(tmp_path)
    assert any("block_sparse_moe.experts.2.w3" in name for name in stored)
    published = hf_weights(engine.model)
    assert {spec.name: spec.shape for spec in engine.specs()} == {name: tuple(stored[name].shape) for name in stored}
    assert all(torch.equal(published[name].float(), values) for name, values in stored.items())


def test_the_plan_of_a_run_counts_a_model_on_transformers_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write(HYBRID, tmp_path / "hf")
    generator = GeneratorConfig(max_model_len=128, kv_cache_gib=0.1)
    config = Config(model=str(folder), out=tmp_path / "run", generator=generator)
    loss = ("clipped:kl_coef=0.1",)
    for lora in (LoRAConfig(), LoRAConfig(rank=4)):
        show_plan(replace(config, lora=lora, loss=loss))
    full_plan, lora_plan = capsys.readouterr().out.split("memory of a run of")[1:]
    assert "frozen reference" in full_plan
    assert "LoRA adapters of rank 4" in lora_plan
    assert "frozen reference" not in lora_plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "nobody", "auto_map": {"AutoConfig": "x.Y"}}, "its own code .auto_map. is never run"),
        ({"model_type": "mamba"}, "does without transformers' attention interface"),
        ({"model_type": "mamba2"}, "cannot build the model .*: Inconsistent"),
        ({"model_type": "rwkv"}, "cannot build|has recurrent layers"),
        ({"model_type": "deepseek_v32"}, "cannot build|has layers of indexed_attention"),
        ({"model_type": "mistral", "vision_config": {}}, "takes images or sound"),
        ({"model_type": "mistral", "quantization_config": {"quant_method": "awq"}}, "cannot read"),
        ({"model_type": "mistral", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"model_type": "mistral", "num_attention_heads": "four"}, "mistral|num_attention_heads"),
        ({"model_type": "bloom"}, "bloom"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "is not a decoder"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(change: dict, message: str, tmp_path: Path):
    make_model(tmp_path, "mistral")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message) as refused:
        read_architecture(tmp_path)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensor_parallel_degree": 3},
            r"degree is 3, which does not divide the heads of .*q_proj \(4\) in a 'mistral'",
        ),
        ({"expert_parallel_degree": 2}, "--trainer.expert-parallel-degree 2: a 'mistral' .* has no experts"),
        (
            {"context_parallel_degree": 2, "pipeline_parallel_degree": 2},
            r"degree 2 --trainer.pipeline-parallel-degree 2: .* 'mistral' .* is laid out by FSDP, HSDP, TP\n",
        ),
        ({"expert_balance": "bias"}, "--trainer.expert-balance is set, which a 'mistral' on transformers' code"),
        (
            {"router_replay": True},
            "--trainer.router-replay is set, and transformers' code of a 'mistral' has no router",
        ),
    ],
)
def test_layouts_that_it_does_not_have_are_refused(settings: dict, message: str, tmp_path: Path):
    make_model(tmp_path, "mistral")
    with pytest.raises(ConfigError, match=message):
        check_model(TrainSettings(**settings), 2, read_architecture(tmp_path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LiquidAI/LFM2-1.2B", "of a 'lfm2', transformers states no tensor parallelism of it"),
        (
            "meta-llama/Llama-4-Scout-17B-16E-Instruct, its text model",
            "'moe_tp_experts', which the trainer cannot do to a Llama4TextExperts",
        ),
    ],
)
def test_a_plan_that_ranks_cannot_follow_is_refused_by_name(name: str, reason: str, tmp_path: Path):
    folder = write(name, tmp_path / "hf")
    with pytest.raises(ConfigError, match=reason) as refused:
        check_model(TrainSettings(tensor_parallel_degree=2), 2, read_architecture(folder))
    assert "leave --trainer.tensor-parallel-degree out" in refused.value.hint


def test_a_plan_of_tensor_parallel_ranks_counts_their_parts(tmp_path: Path):
    folder = write("mistralai/Mistral-7B-Instruct-v0.3", tmp_path / "hf", num_key_value_heads=2)
    plans = [
        plan_training(
            folder,
            TrainSettings(dtype="float32", seq_len=128, tensor_parallel_degree=ranks),
            ranks=ranks,
            reference=False,
        )
        for ranks in (1, 2)
    ]
    assert plans[1].weights == plans[0].weights // 2
    assert plans[0].activations / 2 < plans[1].activations < plans[0].activations
    assert plans[1].head < plans[0].head


def test_what_transformers_code_does_not_run_on_rows_is_named_by_the_plan(tmp_path: Path):
    make_model(tmp_path, "doge", vocab_size=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with pytest.raises(ModelError, match="transformers' code of a 'doge' does not run on packed rows"):
        plan_training(tmp_path, TrainSettings(dtype="float32", seq_len=64), ranks=1, reference=False)


def test_a_llama_with_biases_is_refused_with_the_flag_that_trains_it_and_is_served(tmp_path: Path):
    make_model(tmp_path, "llama", attention_bias=True)
    with pytest.raises(ModelError, match="asks for attention_bias") as refused:
        read_architecture(tmp_path)
    assert "--trainer.modelling transformers" in refused.value.hint
    assert read_served(tmp_path).family.general
    assert read_architecture(tmp_path, "transformers").max_positions == read_served(tmp_path).max_positions


def test_native_modelling_of_another_family_is_refused(tmp_path: Path):
    make_model(tmp_path, "mistral")
    with pytest.raises(ModelError, match="'mistral', and native families are 'deepseek_v3'"):
        read_architecture(tmp_path, "native")


def test_rows_longer_than_the_short_angles_of_longrope_are_refused(tmp_path: Path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "rope_theta": 1e4}
    make_model(tmp_path, "phi3", pad_token_id=0, head_dim=6, original_max_position_embeddings=64, rope_parameters=rope)
    architecture = read_architecture(tmp_path)
    check_model(TrainSettings(seq_len=64), 1, architecture)
    with pytest.raises(ConfigError, match="rows of 128 tokens: an episode longer than 64 makes a 'phi3'"):
        check_model(TrainSettings(seq_len=128), 1, architecture)


@pytest.mark.parametrize(
    ("family", "modelling", "values", "smallest"),
    [
        ("mistral", "transformers", {"head_dim": 8}, 8),
        ("llama", "native", {"head_dim": 14}, 14),
        ("deepseek_v3", "native", {"qk_nope_head_dim": 16, "qk_rope_head_dim": 4, "v_head_dim": 12}, 12),
        ("deepseek_v3", "transformers", {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 20}, 12),
        ("deepseek_v3", "transformers", {"qk_nope_head_dim": 16, "qk_rope_head_dim": 4, "v_head_dim": 15}, 15),
    ],
)
def test_heads_that_have_no_kernel_on_gpus_are_refused_there(
    family: str, modelling: Modelling, values: dict, smallest: int, tmp_path: Path
):
    make_model(tmp_path, family, **values)
    architecture = read_architecture(tmp_path, modelling)
    check_model(TrainSettings(), 1, architecture)
    message = f"a '{family}' with heads of {smallest}: on GPUs, FlexAttention"
    with assumed_gpus(1, 80 << 30), pytest.raises(ModelError, match=message):
        check_model(TrainSettings(), 1, architecture)


@pytest.mark.parametrize(
    ("family", "modelling", "values"),
    [
        ("mistral", "transformers", {"head_dim": 16}),
        ("deepseek_v3", "native", {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16}),
        ("deepseek_v3", "transformers", {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16}),
    ],
)
def test_heads_of_sixteen_are_taken_on_gpus(family: str, modelling: Modelling, values: dict, tmp_path: Path):
    make_model(tmp_path, family, **values)
    with assumed_gpus(1, 80 << 30):
        check_model(TrainSettings(), 1, read_architecture(tmp_path, modelling))


def test_heads_of_layers_without_attention_do_not_count_on_gpus(tmp_path: Path):
    mamba = {"mamba_d_head": 8, "mamba_n_heads": 16}
    folder = write("ibm-granite/granite-4.0-h-1b", tmp_path / "hf", head_dim=32, **mamba)
    with assumed_gpus(1, 80 << 30):
        check_model(TrainSettings(), 1, read_architecture(folder))


def test_an_attention_option_that_rows_do_not_have_is_refused_by_name():
    from forge_rl.engines.titan.general_attention import attend

    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ForgeError, match="Module needs attention with position_bias"):
        attend(torch.nn.Module(), x, x, x, None, position_bias=x)  # type: ignore[arg-type]
