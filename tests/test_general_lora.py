"""Adapters of models without a native family: gradients of peft, files that peft reads, layouts, refusals."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.granitemoehybrid import modeling_granitemoehybrid

from apps import gateway, tinker
from benchmarks import models
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.families import general
from forge_rl.engines.families.general import file_names
from forge_rl.engines.lora_config import LoRAConfig, adapter_parameters
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.factor_pairs import factor_pairs
from forge_rl.engines.titan.shards import ADAPTERS
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ConfigError
from forge_rl.models.adapters import Adapter
from forge_rl.services.generator_config import GeneratorConfig
from tests import test_adapter_engine as of_native
from tests.fakes import make_model, packed, random_batch, train_batch
from tests.lora_engines import check_rounding, in_peft, saved
from tests.test_general_models import EP, MIXTURES, TP, check_layouts, on_transformers, zoo_folder
from tests.test_row_states import install
from tests.test_run import run_here
from tests.zoo.folders import write
from tests.zoo.general import GENERAL
from tests.zoo.packed import engine_of, reference_of, rows_of, run_rows
from tests.zoo.trained import dtype_of, stored

pytestmark = pytest.mark.usefixtures("process_group")

LORA = LoRAConfig(rank=3, alpha=5.0, publish="merged")
OFTEN = (
    "ibm-granite/granite-4.0-h-1b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "google/gemma-3-1b-it",
    "microsoft/Phi-3-mini-4k-instruct",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
)
"""Checkpoints whose adapted modules differ most: states, experts, two RoPEs, fused matrices, other names in files."""

CASES = [
    *(pytest.param(name, LORA, marks=() if name in OFTEN else pytest.mark.nightly) for name in GENERAL),
    *(
        pytest.param(
            name,
            replace(LORA, rank=6, targets=("all-linear", "experts")),
            marks=() if name in (MIXTURES[0], MIXTURES[2]) else pytest.mark.nightly,
        )
        for name in MIXTURES
    ),
    pytest.param("mistralai/Mixtral-8x7B-Instruct-v0.1", replace(LORA, targets=("lm_head", "q_proj"))),
]


def adapters_of(engine: TitanEngine) -> dict[str, torch.nn.Parameter]:
    """Return an engine's adapters by the names that peft gives them in memory."""
    ends = {"": "", "gate_up_": ".base_layer", "up_": ".base_layer", "down_": ""}
    return {
        f"base_model.model.{pair.path}{ends[pair.prefix]}.{kind}.default.weight": parameter
        for pair in factor_pairs(engine.model)
        for kind, parameter in zip(ADAPTERS, pair.parameters, strict=True)
    }


def adapted_engine(name: str, folder: Path, *, lora: LoRAConfig = LORA, **settings: Any) -> TitanEngine:
    """Return an engine of a checkpoint of the zoo, with random adapters."""
    write(name, folder)
    engine = engine_of(folder, "transformers", lora=lora, **settings)
    with torch.no_grad():
        for number, parameter in enumerate(adapters_of(engine).values()):
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))
    return engine


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_gradients_of_adapters_on_packed_rows_are_those_of_peft(name: str, lora: LoRAConfig, tmp_path: Path):
    folder = tmp_path / "hf"
    engine = adapted_engine(name, folder, lora=lora)
    factors = adapters_of(engine)
    pairs = list(factor_pairs(engine.model))
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(pair.path for pair in pairs if not pair.prefix),
        target_parameters=sorted(pair.name for pair in pairs if pair.prefix),
        rank_pattern={pair.name: pair.parameters[0].shape[1] for pair in pairs if pair.prefix},
    )
    reference = peft.get_peft_model(reference_of(folder), config)
    trained = {name: parameter for name, parameter in reference.named_parameters() if parameter.requires_grad}
    assert trained.keys() == factors.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            assert parameter.shape == in_peft(name, factors[name]).shape
            parameter.data = in_peft(name, factors[name]).detach().clone()
    forward, spread = run_rows(engine, reference, rows_of(share_prefixes=True))
    assert spread > 0.2, "the model must tell tokens apart for this to be a test"
    assert forward < 1e-9
    for name, parameter in trained.items():
        expected, gradient = parameter.grad, factors[name].grad
        assert expected is not None
        assert gradient is not None, name
        assert expected.abs().max() > 0, name
        assert (in_peft(name, gradient) - expected).abs().max() / expected.abs().max() < 1e-9, name
    assert [name for name, p in engine.model.named_parameters() if p.grad is not None and "lora_" not in name] == []
    assert adapter_parameters(engine.architecture, lora) == sum(factor.numel() for factor in factors.values()) > 0


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_peft_reads_what_is_saved_and_merges_what_is_published(name: str, lora: LoRAConfig, tmp_path: Path):
    source = tmp_path / "hf"
    engine = adapted_engine(name, source, lora=lora)
    train_batch(engine, packed(random_batch(1, vocab=250), seq_len=128))
    folder = saved(engine, source, tmp_path / "step")
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
    merged = peft.PeftModel.from_pretrained(base, folder / "model").merge_and_unload()
    expected = {
        part.name: part.of(weight.detach())
        for name, weight in merged.named_parameters()
        for part in file_names(source).parts(name, weight.shape)
    }
    (tmp_path / "merged").mkdir()
    Adapter.read(folder / "model").merge(source, tmp_path / "merged")
    first, files = stored(source), stored(tmp_path / "merged")
    published = {shard.name: shard.values for shard in engine.local_shards()}
    changed = {name for name in files if not torch.equal(files[name], first[name])}
    assert changed == {spec.name for spec in engine.specs() if spec.changed}
    for name in changed:
        torch.testing.assert_close(published[name], expected[name].double(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(files[name], published[name].to(files[name].dtype), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", ["mistralai/Mixtral-8x7B-Instruct-v0.1", "microsoft/Phi-3-mini-4k-instruct"])
def test_passes_on_transformers_code_see_adapters_as_versions_have_them(name: str, tmp_path: Path):
    lora = replace(LORA, rank=6, targets=("all-linear", *["experts"] * (name in MIXTURES), "lm_head"))
    engine = adapted_engine(name, tmp_path / "hf", lora=lora, dtype="float32")
    check_rounding(engine, adapters_of(engine).values(), lora, vocab=250)


@pytest.mark.long
def test_layouts_on_transformers_code_train_adapters_as_one_process(tmp_path: Path):
    flags = (("lora", LORA), ("lora_seed", 5))
    names = ("microsoft/Phi-3-mini-4k-instruct", "mistralai/Mixtral-8x7B-Instruct-v0.1", "google/gemma-2-2b-it")
    phi, mixtral, gemma = (zoo_folder(name, tmp_path) for name in names)
    cases = [
        on_transformers(family, 2, {**layout, **dict(flags)})
        for family, layout in (
            (phi, {}),
            (phi, TP),
            (gemma, TP | {"activation_checkpointing": "full"}),
            (mixtral, TP),
            (mixtral, EP),
        )
    ]
    check_layouts(tmp_path, cases, dict(flags))
    experts = {"lora": replace(LORA, rank=4, targets=("all-linear", "experts")), "lora_seed": 5}
    check_layouts(tmp_path, [on_transformers(mixtral, 2, layout | experts) for layout in ({}, TP, EP)], experts)


HYBRIDS = (
    "ibm-granite/granite-4.0-h-1b",
    "Qwen/Qwen3.5-4B, its text model",
    "LiquidAI/LFM2-1.2B",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
)
"""Checkpoints with layers of each kind that has a state: Mamba 2, the delta rule, short convolutions."""


@pytest.mark.parametrize("name", ["olmo2", *HYBRIDS])
def test_rows_of_several_adapters_are_computed_together_and_stay_apart(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "hf"
    if name in HYBRIDS:
        write(name, folder)
    else:
        make_model(folder, name)
    of_native.test_rows_of_several_adapters_are_computed_together_and_equal_each_alone(folder)
    of_native.test_nan_and_errors_in_a_shared_row_touch_no_other_adapter(folder, monkeypatch)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("google/gemma-2-2b-it", "its softcapped or chunked attention computes all scores"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "its experts multiply tokens of all rows together"),
    ],
)
def test_rows_of_several_adapters_are_not_mixed_where_they_would_meet(name: str, problem: str, tmp_path: Path):
    adapters = of_native.adapters_of(write(name, tmp_path / "hf"))
    with pytest.raises(ConfigError, match=problem):
        adapters.run_many([])


def test_rows_of_several_adapters_are_not_mixed_in_layers_that_do_not_keep_them_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    adapters = of_native.adapters_of(write(HYBRIDS[0], tmp_path / "hf"))
    assert adapters.run_many([]) == []
    with monkeypatch.context() as patch:
        patch.setattr(general, "ROW_MIXERS", frozenset())
        with pytest.raises(ConfigError, match="its layers with a state see one episode at a time"):
            adapters.run_many([])
    path = "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined"

    def with_segments(*tensors: torch.Tensor, seq_idx: torch.Tensor | None = None) -> None:
        raise NotImplementedError

    install(monkeypatch, modeling_granitemoehybrid, "mamba2_chunk_scan", path, with_segments)
    with pytest.raises(ConfigError, match="that compute a row as one sequence"):
        adapters.run_many([])


def test_a_checkpoint_of_adapters_goes_on_from_them(tmp_path: Path):
    source, step = tmp_path / "hf", tmp_path / "step"
    engine = adapted_engine("ibm-granite/granite-4.0-h-1b", source, activation_checkpointing="full")
    batches = [packed(random_batch(seed, vocab=250), seq_len=128) for seed in (1, 2)]
    train_batch(engine, batches[0])
    saved(engine, source, step)
    other = engine_of(source, lora=LORA)
    other.load_training_state(step / "training")
    for resumed in (engine, other):
        train_batch(resumed, batches[1])
    ends = [{shard.name: shard.values.clone() for shard in trained.local_shards()} for trained in (engine, other)]
    assert all(torch.equal(values, ends[1][name]) for name, values in ends[0].items())


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("zai-org/GLM-4.5-Air", {"targets": ("gate_proj",)}, "gate_proj: routers, what shares a name"),
        ("zai-org/GLM-4.5-Air", {"targets": ("experts",), "dropout": 0.1}, "experts have no dropout"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct, its text model", {"targets": ("experts",)}, "no experts that can"),
        ("ibm-granite/granite-4.0-h-1b", {"targets": ("in_proj", "conv1d")}, "conv1d: routers, .* convolutions"),
        ("ibm-granite/granite-4.0-h-1b", {"targets": ("out_proj",)}, "out_proj: .* Mamba's output have no adapters"),
        ("ibm-granite/granite-4.0-h-1b", {"targets": ("query",)}, "has no such linear layer"),
    ],
)
def test_what_has_no_adapter_is_refused_by_name(name: str, settings: dict[str, Any], message: str, tmp_path: Path):
    architecture = read_architecture(write(name, tmp_path / "hf"))
    check_model(TrainSettings(lora=LORA), 1, architecture)
    with pytest.raises(ConfigError, match=message):
        check_model(TrainSettings(lora=replace(LORA, **settings)), 1, architecture)


def test_dropout_next_to_states_repeats_when_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write("ibm-granite/granite-4.0-h-1b", tmp_path / "hf")
    settings, ends = TrainSettings(lora=replace(LORA, dropout=0.5)), []
    check_model(settings, 1, read_architecture(folder))
    for recomputed in ("none", "full"):
        engine = engine_of(folder, lora=settings.lora, activation_checkpointing=recomputed)
        batch = packed(random_batch(0, vocab=43), seq_len=128)
        for _ in range(2):
            train_batch(engine, batch)
        ends.append(torch.cat(engine.logprobs(batch.rows, temperature=1.0)))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-12)
    monkeypatch.setattr(general, "ROW_MIXERS", frozenset())
    with pytest.raises(ConfigError, match="layers with a state in a 'granitemoehybrid' see one episode at a time"):
        check_model(settings, 1, read_architecture(folder))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("ibm-granite/granite-4.0-h-1b", "merged"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "merged"),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "merged"),
        ("microsoft/Phi-3-mini-4k-instruct", "served"),
        ("google/gemma-3-1b-it", "served"),
    ],
)
def test_a_whole_run_trains_publishes_and_saves_adapters(name: str, adapters: str, tmp_path: Path):
    """Versions are attested; the frozen reference is the base without adapters."""
    source = write(name, tmp_path / "zoo" / "model")
    flags = ("--lora.rank", "4", "--generator.adapters", adapters, "--loss", "clipped:kl_coef=0.1")
    lines, failure = models.run_steps(name, tmp_path / "zoo", 900, flags)
    assert not failure
    gaps = [line["logprob_gap/max"] for line in lines if "logprob_gap/max" in line]
    assert gaps
    if dtype_of(tmp_path / "zoo" / "model") == "float32":
        assert max(gaps) < 1e-2
    assert min(line["weights/written_share"] for line in lines if "weights/written_share" in line) < 0.5
    adapter = Adapter.read(tmp_path / "zoo" / "run" / "checkpoints" / "step-000002" / "model")
    wide, merged = shutil.copytree(source, tmp_path / "wide"), tmp_path / "merged"
    for path in wide.glob("*.safetensors"):  # in files of bfloat16, sums would be rounded
        save_file({name: values.float() for name, values in load_file(path).items()}, path, metadata={"format": "pt"})
    merged.mkdir()
    adapter.merge(wide, merged)
    base, ours = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (wide, merged))
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        first = base(token_ids).logits
        adapted = peft.PeftModel.from_pretrained(base, adapter.folder).eval()(token_ids).logits
        effect, gap = (adapted - first).abs().max(), (adapted - ours(token_ids).logits).abs().max()
    assert gap < 1e-2 * effect
    assert all(bool(b.any()) for _, b in adapter.factors().values()), "all adapters were trained"


def test_adapters_of_a_model_with_experts_are_refused_on_cpu_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """vLLM would compute the experts by Triton, and die in the first rollout."""
    model, out = str(write("mistralai/Mixtral-8x7B-Instruct-v0.1", tmp_path / "hf")), tmp_path / "run"
    message = "on CPU, vLLM serves no adapters of a model with experts"
    engine = GeneratorConfig(max_model_len=128, kv_cache_gib=0.1)
    shared = ("--model", model, "--out", str(out), "--display", "plain")
    shared += ("--generator.max-model-len", "128", "--generator.kv-cache-gib", "0.1", "--lora.rank", "4")
    for flags in (("--generator.adapters", "served"), ("--generator.max-loras", "2")):
        for plan in ((), ("--plan",)):
            assert run_here("recipes.grpo", *shared, *flags, *plan, monkeypatch=monkeypatch) != 0
            printed = capsys.readouterr()
            assert message in " ".join((printed.out + printed.err).split()), (flags, plan)
    for main, config in (
        (gateway.main, gateway.Config(model=model, adapter_folders=(tmp_path,), generator=engine, out=out, port=0)),
        (tinker.main, tinker.Config(model=model, generator=engine, out=out, port=0)),
    ):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(main(config))
    assert not list(out.glob("logs/*")), "no service has started"
