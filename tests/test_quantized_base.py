"""QLoRA: adapters over a base in FP8 or NF4, against peft over the values that the formats stand for."""

from __future__ import annotations

import gc
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from apps.gateway import adapter_folder
from apps.merge import Config as MergeConfig
from apps.merge import merge
from benchmarks import layouts
from forge_rl.algorithms.logprobs import DEFAULT_SCORING
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.factory import plan_training
from forge_rl.engines.lora_config import LoRAConfig, base_bytes, check_shared_base
from forge_rl.engines.protocol import TrainSettings
from forge_rl.engines.titan.adapter_export import quantization_of
from forge_rl.engines.titan.lora import without_adapters
from forge_rl.engines.titan.plan import LiveBytes
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ConfigError, ModelError
from forge_rl.metrics import reduce
from forge_rl.models.adapter_products import merged_weight
from forge_rl.models.base_formats import BASE_FORMATS, NF4, BaseFormat, dequantize, quantize
from forge_rl.models.resolve import resolve_model
from forge_rl.weights.fingerprints import fingerprint
from forge_rl.weights.manifest import draft, factor_names
from tests.fakes import make_model, packed, random_batch, train_batch
from tests.lora_engines import LOSS, engine_of, gradient_deviation, saved, trained_engine
from tests.test_layouts import UPDATES
from tests.test_lora_layouts import alone
from tests.zoo.folders import write
from tests.zoo.general import GENERAL
from tests.zoo.packed import engine_of as zoo_engine
from tests.zoo.packed import reference_of, rows_of, run_rows

pytestmark = pytest.mark.usefixtures("process_group")

FP8_GRID = [
    sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8)
    for mantissa, exponent, sign in itertools.product((0, 2, 4, 6, 1, 3, 5, 7), range(16), (1, -1))
    if (exponent, mantissa) != (15, 7)
]
"""Every value of float8_e4m3fn, by the definition of its bits; even ones first, to which ties are rounded."""


def reference_values(weight: torch.Tensor, base_format: BaseFormat) -> torch.Tensor:
    """Values of a matrix in a format, in float32, each found by its distance to all values of the format."""
    width = 64 if base_format == "nf4" else weight.shape[1]
    grid = torch.tensor(NF4 if base_format == "nf4" else FP8_GRID, dtype=torch.float64)
    blocks = []
    for block in weight.float().split(width, dim=1):
        scale = block.abs().amax(dim=1, keepdim=True) / float(grid.max())
        scale = scale.where(scale > 0, torch.ones(()))
        nearest = ((block / scale).double()[..., None] - grid).abs().argmin(dim=-1)
        blocks.append(grid[nearest].float() * scale)
    return torch.cat(blocks, dim=1)


def is_held_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def round_base(model: torch.nn.Module, base_format: BaseFormat) -> None:
    """Give the linear layers of transformers' model the values of a format."""
    for name, parameter in model.named_parameters():
        if is_held_quantized(name):
            parameter.data = reference_values(parameter.data, base_format).to(parameter.dtype)


def lora_of(base_format: BaseFormat, **settings: Any) -> LoRAConfig:
    return LoRAConfig(**({"rank": 3, "alpha": 5.0, "base_format": base_format} | settings))


def test_values_of_nf4_are_quantiles_of_the_normal_distribution():
    """Appendix E of the paper: with as many negative values as positive ones and 0, and the largest at 1."""
    offset = 0.9677083
    positive = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([positive, negative, torch.zeros(1)]).sort().values
    torch.testing.assert_close(torch.tensor(NF4, dtype=torch.float64), values / values.max(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("base_format", BASE_FORMATS)
@pytest.mark.parametrize("inputs", [24, 128, 150])
def test_values_are_the_nearest_of_the_format_and_slices_of_rows_have_the_same(base_format: BaseFormat, inputs: int):
    weight = torch.randn(70, inputs, generator=torch.Generator().manual_seed(inputs))
    weight *= torch.logspace(-6, 3, 70)[:, None]
    weight[3] = 0
    weight[4] = 1e-42
    for dtype in (torch.float32, torch.bfloat16):
        values = weight.to(dtype)
        codes, scales = quantize(values, base_format)
        actual = dequantize(codes, scales, inputs, base_format, dtype)
        is_no_tie = torch.arange(70) != 4
        assert actual[is_no_tie].equal(reference_values(values, base_format).to(dtype)[is_no_tie])
        assert bool(actual.isfinite().all())
        assert dequantize(codes[9:30], scales[9:30], inputs, base_format, dtype).equal(actual[9:30])
        assert all(map(torch.equal, quantize(values[9:30], base_format), (codes[9:30], scales[9:30])))


@pytest.mark.parametrize(
    ("family", "base_format"), [("llama", "nf4"), ("llama", "fp8"), ("qwen2", "nf4"), ("qwen3", "fp8")]
)
def test_gradients_are_those_of_peft_over_the_same_values(family: str, base_format: BaseFormat, tmp_path: Path):
    lora = lora_of(base_format, targets=("q_proj", "o_proj", "down_proj") if family == "qwen3" else ("all-linear",))
    deviation, largest = gradient_deviation(tmp_path, family, lora, lambda model: round_base(model, base_format))
    assert largest > 1e-3
    assert deviation < 1e-9


@pytest.mark.parametrize(
    "name",
    [
        *("microsoft/Phi-3-mini-4k-instruct", "google/gemma-3-1b-it", "zai-org/GLM-4-9B-0414"),
        *("Qwen/Qwen3.5-4B, its text model", "ibm-granite/granite-4.0-h-1b", "LiquidAI/LFM2-1.2B"),
    ],
)
@pytest.mark.parametrize("base_format", BASE_FORMATS)
def test_models_on_transformers_code_compute_with_the_values_of_the_format(
    name: str, base_format: BaseFormat, tmp_path: Path
):
    assert name in GENERAL
    folder = tmp_path / "hf"
    write(name, folder)
    lora = lora_of(base_format)
    engine, reference = zoo_engine(folder, "transformers", lora=lora), reference_of(folder)
    frozen = [parameter for parameter in engine.model.parameters() if not parameter.requires_grad]
    assert sum(parameter.nbytes for parameter in frozen) == base_bytes(engine.architecture, lora, itemsize=8)
    quantization = quantization_of(engine.model)
    assert quantization is not None
    before, spread = run_rows(engine, reference, rows_of(share_prefixes=True))
    parameters = dict(reference.named_parameters())
    for weight in quantization.weights:
        parameters[weight].data = reference_values(parameters[weight].data, base_format).double()
    after, _ = run_rows(engine, reference, rows_of(share_prefixes=True))
    assert after < 1e-9
    assert before > 1e-3 * spread, "the format rounds"


@pytest.mark.parametrize("base_format", BASE_FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_versions_references_and_merged_folders_have_the_values_that_are_trained_on(
    base_format: BaseFormat, dtype: str, tmp_path: Path
):
    lora, pass_dtype = lora_of(base_format), getattr(torch, dtype)
    make_model(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    path = tmp_path / "hf" / "model.safetensors"
    save_file({name: values.to(pass_dtype) for name, values in load_file(path).items()}, path)
    engine = engine_of(tmp_path / "hf", lora, dtype=dtype, travels=True)
    for seed in range(2):
        train_batch(engine, packed(random_batch(seed, vocab=43)), LOSS, total_updates=5)
    base = {
        name: reference_values(values, base_format).to(pass_dtype) if is_held_quantized(name) else values
        for name, values in load_file(path).items()
    }
    published = {shard.name: shard.values for shard in engine.local_shards()}
    assert all(published[name].equal(values) for name, values in base.items())
    manifest = draft(engine.specs(), version=1, dtype=pass_dtype)
    merged = {
        name: merged_weight(published[name], *(published[factor] for factor in factor_names(name)), lora.scale)
        for name in base
        if is_held_quantized(name)
    }
    reports = {report.name: report.fingerprint for report in engine.merged_reports(manifest)}
    assert reports == {name: fingerprint(values, values.shape) for name, values in merged.items()}
    step = saved(engine, tmp_path / "hf", tmp_path / "step")
    merge(MergeConfig(adapter=step / "model", out=tmp_path / "merged"))
    folder = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(folder[name].equal(merged.get(name, published[name])) for name in folder)
    model_folder = resolve_model(str(step / "model"), tmp_path / "cache")
    assert all(values.equal(folder[name]) for name, values in load_file(model_folder / "model.safetensors").items())
    with pytest.raises(ModelError, match=f"trained on a base in {base_format}, and engines hold other values"):
        adapter_folder(step / "model", tmp_path / "hf")
    rows = packed(random_batch(0, vocab=43)).rows
    save_file(base, path)
    rounded_base = engine_of(tmp_path / "hf", replace(lora, base_format="full"), dtype=dtype)
    with without_adapters(engine.model):
        references = engine.scorer.logprobs(engine.model, rows, 1.0)
    for reference, expected in zip(references, rounded_base.logprobs(rows, temperature=1.0), strict=True):
        torch.testing.assert_close(reference, expected)


SIZES: dict[str, object] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}


@pytest.mark.parametrize("recomputed", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantized_base_takes_its_bytes_and_no_pass_keeps_other_copies(recomputed: str, dtype: str, tmp_path: Path):
    weights = [parameter.numel() for parameter in make_model(tmp_path, **SIZES).parameters()]
    packed_batch, itemsize = packed(random_batch(0, vocab=43)), getattr(torch, dtype).itemsize
    state_bytes, live_bytes = {}, {}
    formats: tuple[Any, ...] = ("full", *BASE_FORMATS)
    for base_format in formats:
        lora = lora_of(base_format)
        settings = TrainSettings(dtype=dtype, seq_len=64, lora=lora, activation_checkpointing=recomputed)  # type: ignore[arg-type]
        engine = TitanEngine(tmp_path, settings)
        frozen = [parameter for parameter in engine.model.parameters() if not parameter.requires_grad]
        state_bytes[base_format] = sum(parameter.nbytes for parameter in frozen)
        vectors = [parameter.nbytes for parameter in frozen if parameter.ndim == 1]
        assert state_bytes[base_format] - sum(vectors) == base_bytes(engine.architecture, lora, itemsize)
        adapters = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
        assert engine.parameters == sum(weights) + adapters
        assert (
            plan_training(tmp_path, settings, ranks=1, reference=True).weights
            == state_bytes[base_format] + 4 * adapters
        )
        train_batch(engine, packed_batch, LOSS, total_updates=5)  # which makes the optimizer's state
        gc.collect()
        with LiveBytes() as live:
            scores = engine.scorer.score(engine.model, engine.scorer.on_device(packed_batch.rows[0]), DEFAULT_SCORING)
            live_bytes[base_format] = live.live
            scores.logprobs.sum().backward()
    linear = 3 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512)
    assert state_bytes["full"] - state_bytes["nf4"] == linear * itemsize - linear * 9 // 16
    assert state_bytes["fp8"] < state_bytes["full"] - linear * (itemsize - 1.05)
    # Between the passes there is what the dense base has, less inputs that only gradients of weights would need.
    assert max(live_bytes["nf4"], live_bytes["fp8"]) <= live_bytes["full"]


@pytest.mark.parametrize("base_format", BASE_FORMATS)
def test_updates_say_what_the_base_takes_and_a_state_goes_on(base_format: BaseFormat, tmp_path: Path):
    lora = lora_of(base_format)
    engine = trained_engine(tmp_path / "hf", lora)
    folder = saved(engine, tmp_path / "hf", tmp_path / "step")
    other = engine_of(tmp_path / "hf", lora)
    assert other.load_training_state(folder / "training") == 2
    packed_batch = packed(random_batch(2, vocab=43))
    for resumed in (engine, other):
        metrics = reduce(train_batch(resumed, packed_batch, LOSS, total_updates=5))
        held_bytes = sum(p.nbytes for p in resumed.model.parameters() if not p.requires_grad)
        assert metrics["lora/base_bytes"] == held_bytes
        dense = engine_of(tmp_path / "hf", replace(lora, base_format="full")).model
        full_bytes = sum(p.nbytes for p in dense.parameters() if not p.requires_grad)
        assert metrics["lora/base_share"] == pytest.approx(held_bytes / full_bytes)
    ends = [{shard.name: shard.values.clone() for shard in part.local_shards()} for part in (engine, other)]
    assert all(values.equal(ends[1][name]) for name, values in ends[0].items())


def test_layouts_of_two_ranks_train_over_a_quantized_base_as_one_process(tmp_path: Path):
    layouts.make_models(tmp_path, ("llama",))
    two_rank_cases = [case for case in layouts.cases(("llama",)) if case.ranks == 2 and not {"TP", "PP"} & {case.name}]
    assert {case.name for case in two_rank_cases} == {"FSDP", "CP", "DDP"}
    cases = [
        replace(case, degrees=(*case.degrees, ("lora", lora_of(base_format, publish="merged")), ("lora_seed", 5)))  # type: ignore[arg-type]
        for base_format, case in itertools.product(BASE_FORMATS, two_rank_cases)
    ]
    single_cases = [alone(case) for case in cases]
    unique = list(dict.fromkeys(single_cases))
    expected = dict(zip(unique, layouts.train(tmp_path, unique, UPDATES), strict=True))
    for case, single, trained in zip(cases, single_cases, layouts.train(tmp_path, cases, UPDATES), strict=True):
        deviation = layouts.compare(trained, expected[single])
        assert max(deviation.worst, deviation.of_way) < 1e-10, case.name
        assert any(not start.equal(trained.weights[name]) for name, start in trained.start.items())


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path):
    make_model(tmp_path / "dense")
    make_model(tmp_path / "experts", "qwen3_moe")
    settings = TrainSettings(lora=lora_of("nf4"))
    with pytest.raises(ConfigError, match=r"--lora.base-format nf4: a 'qwen3_moe' has experts"):
        check_model(settings, 1, read_architecture(tmp_path / "experts"))
    for name in ("google/gemma-4-26B-A4B-it, its text model", "ibm-granite/granite-4.0-h-tiny"):
        with pytest.raises(ConfigError, match=r"--lora.base-format nf4: a '\w+' has experts"):
            check_model(settings, 1, read_architecture(write(name, tmp_path / name)))
    check_model(settings, 1, read_architecture(write("ibm-granite/granite-4.0-h-1b", tmp_path / "no experts")))
    with pytest.raises(ConfigError, match="tensor-parallel ranks would split the rows"):
        check_model(replace(settings, tensor_parallel_degree=2), 2, read_architecture(tmp_path / "dense"))
    with pytest.raises(ConfigError, match="several adapters by name act on the model's own weights"):
        check_shared_base(lora_of("fp8"))
    path = tmp_path / "dense" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, path)
    for base_format in BASE_FORMATS:
        with pytest.raises(
            ModelError, match=r"model.layers.1.mlp.up_proj.weight' in .* has values that are not finite"
        ):
            engine_of(tmp_path / "dense", lora_of(base_format))


@pytest.mark.parametrize("record", [7, {"base_format": "nf5", "weights": []}, {"base_format": "nf4", "weights": [1]}])
def test_a_malformed_record_of_the_base_is_refused(record: object, tmp_path: Path):
    engine = trained_engine(tmp_path / "hf", lora_of("nf4"))
    folder = saved(engine, tmp_path / "hf", tmp_path / "step") / "model"
    values = json.loads((folder / "base_model.json").read_text())
    (folder / "base_model.json").write_text(json.dumps(values | {"quantization": record}))
    with pytest.raises(ModelError, match="of how the base was held"):
        merge(MergeConfig(adapter=folder, out=tmp_path / "merged"))
