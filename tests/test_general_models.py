"""Models without a native family: packed rows as transformers computes them, the same layouts and files."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks import layouts, models
from benchmarks.ranks import run_ranks
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.value_loss import ValueLoss
from forge_rl.engines.architecture import check_weights, read_architecture
from forge_rl.engines.families import FAMILIES
from forge_rl.engines.families.general import COMPARED
from forge_rl.engines.families.tensor_plan import TENSOR_COMPARED, expert_routers
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import Modelling, TrainSettings
from forge_rl.engines.titan.general_routing import general_routers
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.errors import ModelError
from forge_rl.metrics import reduce
from forge_rl.models.resolve import resolve_model
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from tests.fakes import hf_weights, make_model, packed, random_batch, train_batch
from tests.plain_trainer import share_angles
from tests.test_layouts import UPDATES, relays
from tests.zoo.folders import write, write_for_ranks
from tests.zoo.general import GENERAL, LONG_TURNS, UNSERVED
from tests.zoo.packed import compare, engine_of, rows_of
from tests.zoo.trained import ALL, dtype_of, modelling_of, stored, write_model

pytestmark = pytest.mark.usefixtures("process_group")

TP, EP = {"tensor_parallel_degree": 2}, {"expert_parallel_degree": 2}
MIXTURES = (
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-35B-A3B, its text model",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-4.7-Flash",
    "MiniMaxAI/MiniMax-M2",
    "baidu/ERNIE-4.5-21B-A3B-PT",
    "LiquidAI/LFM2-8B-A1B",
    "arcee-ai/Trinity-Nano-Preview",
    "ibm-granite/granite-4.0-h-tiny",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Qwen/Qwen3-30B-A3B, on transformers' code",
)
"""Those with experts that can be on several ranks."""
HYBRID = "ibm-granite/granite-4.0-h-1b"
PREDICTING = "Qwen/Qwen3-Next-80B-A3B-Instruct"
"""One whose files have layers for multi-token prediction that no module of transformers' code is for."""
DTYPES_IN_CI = (HYBRID, PREDICTING, "zai-org/GLM-4.5-Air", "mistralai/Mixtral-8x7B-Instruct-v0.1", "Qwen/Qwen3-0.6B")
"""Those whose saved dtypes each CI run compares: with experts, biases that choose them, and a copied head."""
SHARED = [name for name, checkpoint in GENERAL.items() if checkpoint.family in TENSOR_COMPARED]
"""Those whose matrices tensor-parallel ranks share."""


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, {}) for name in GENERAL),
        ("zai-org/GLM-4.5-Air", {"use_qk_norm": True}),  # as GLM-4.5 and later ones have it
        ("unsloth/gpt-oss-20b-BF16", {}),  # attention sinks
    ],
)
def test_packed_rows_of_published_folders_equal_transformers(name: str, values: dict, tmp_path: Path):
    folder = write(name, tmp_path / "hf", **values)
    modelling = "transformers" if ALL[name].family in FAMILIES else "auto"
    architecture = read_architecture(folder, modelling)
    assert architecture.family.general
    assert not check_weights(folder, architecture)
    engine = engine_of(folder, modelling)
    for share_prefixes in (True, False):
        rows = rows_of(share_prefixes=share_prefixes, turns=LONG_TURNS.get(name, 3))
        deviation = compare(engine, folder, rows)
        assert deviation.spread > 0.2, "the model must tell tokens apart for this to be a test"
        assert max(deviation.forward, deviation.gradient) < 1e-9, (share_prefixes, deviation)


@pytest.mark.parametrize(
    ("name", "tied", "full_type", "vision"),
    [
        ("Qwen/Qwen3.5-4B, its text model", True, "qwen3_5", {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
        (
            "mistralai/Ministral-3-3B-Instruct-2512, its text model",
            False,
            "mistral3",
            {"model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
        ),
    ],
)
def test_the_text_model_of_a_folder_with_images_trains_as_the_page_says(
    name: str, tied: bool, full_type: str, vision: dict, tmp_path: Path
):
    """The page's own lines take it out of the folder."""
    source, target = write(name, tmp_path / "source", tie_word_embeddings=tied), tmp_path / "target"
    text_config = json.loads((source / "config.json").read_text())
    for path in source.glob("model*"):
        path.unlink()
    config = AutoConfig.for_model(
        full_type,
        text_config=text_config,
        vision_config={"hidden_size": 32, "intermediate_size": 32, "patch_size": 14, "image_size": 28, **vision},
        tie_word_embeddings=tied,
    )
    full_model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in full_model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    full_model.save_pretrained(source)
    with pytest.raises(ModelError, match=f"'{full_type}': the model also takes images") as refused:
        read_architecture(source)
    assert f"its text model, a {GENERAL[name].family!r}" in refused.value.hint
    page = (Path(models.__file__).parents[1] / "docs" / "running" / "models.md").read_text()
    (lines,) = re.findall("```python\n(from transformers.*?)```", page, flags=re.DOTALL)
    exec(lines, {"source": source, "target": target})
    architecture = read_architecture(resolve_model(str(target), tmp_path))
    assert architecture.family.model_type == GENERAL[name].family
    assert not check_weights(target, architecture)
    alone = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    token_ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(alone(token_ids).logits, full_model.eval()(input_ids=token_ids).logits)
    deviation = compare(engine_of(target), target, rows_of(share_prefixes=True))
    assert max(deviation.forward, deviation.gradient) < 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_transformers_code_trains_as_the_native_family_does(family: str, tmp_path: Path):
    """With a penalty for the distance from a frozen reference."""
    make_model(tmp_path, family, tie_word_embeddings=True)
    settings = TrainSettings(dtype="float64", seq_len=128, optimizer=OptimizerConfig(lr=1e-2))
    codes: tuple[Modelling, ...] = ("native", "transformers")
    engines = [TitanEngine(tmp_path, replace(settings, modelling=code), reference=True) for code in codes]
    assert [engine.architecture.family.general for engine in engines] == [False, True]
    share_angles(engines[1].model, engines[0].model)
    share_angles(engines[1]._reference, engines[0].model)
    loss, measured = ClippedSurrogate(kl_coef=0.3), []
    for engine in engines:
        for seed in (1, 2):
            result = reduce(train_batch(engine, packed(random_batch(seed, vocab=43), seq_len=128), loss))
        measured.append({name: result[name] for name in ("grad_norm", "loss", "kl_reference/k2")})
    assert measured[0] == pytest.approx(measured[1], rel=1e-9)
    assert measured[0]["kl_reference/k2"] > 1e-4, "the policy must differ from the reference for this to be a test"
    native, general = (hf_weights(engine.model) for engine in engines)
    assert native.keys() == general.keys()
    for name, values in native.items():
        assert (values - general[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe"])
def test_recomputed_and_offloaded_activations_give_the_same_gradients(family: str, tmp_path: Path):
    special = {"sliding_window": 5, "query_pre_attn_scalar": 16} if family == "gemma3_text" else {}
    make_model(tmp_path, family, **special)
    batch = packed(random_batch(1, vocab=43), seq_len=128)
    modes: list[dict[str, Any]] = [{}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"}]
    modes.append(modes[-1] | {"enable_activation_offload": True})
    results = [train_batch(engine_of(tmp_path, "transformers", **mode), batch) for mode in modes]
    norms = [result["grad_norm"].total for result in results]  # type: ignore[union-attr]
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-12)
    assert results[-1]["activations/offloaded_bytes"].total > 0  # type: ignore[union-attr]


def test_replayed_experts_train_as_the_native_family_does(tmp_path: Path):
    layouts.make_models(tmp_path, ["qwen3_moe"])
    codes = ({"modelling": "native"}, {"modelling": "transformers"})
    cases = [
        layouts.Case(family="qwen3_moe", name=str(code), ranks=1, degrees=tuple((code | replay).items()))
        for code in codes
        for replay in ({}, {"router_replay": True})
    ]
    native, native_replay, general, general_replay = layouts.train(tmp_path, cases, UPDATES)
    tensor = layouts.Case(
        family="qwen3_moe", name="TP", ranks=2, degrees=tuple((codes[1] | TP | {"router_replay": True}).items())
    )
    (tensor_replay,) = layouts.train(tmp_path, [tensor], UPDATES)
    for result, expected in ((general, native), (general_replay, native_replay), (tensor_replay, native_replay)):
        deviation = layouts.compare(result, expected)
        assert max(deviation.loss, deviation.grad_norm, deviation.of_way) < 1e-9, deviation
        names = [name for name in expected.metrics[0] if name.startswith("experts/")]
        assert {name: result.metrics[0].get(name) for name in names} == pytest.approx(
            {name: expected.metrics[0][name] for name in names}
        )
    assert native_replay.metrics[0]["experts/replayed"] > 0.9
    assert abs(native_replay.metrics[0]["grad_norm"] - native.metrics[0]["grad_norm"]) > 1e-3, "other experts"


@pytest.mark.parametrize("name", [*MIXTURES, "meta-llama/Llama-4-Scout-17B-16E-Instruct, its text model"])
def test_routers_of_published_folders_use_the_replayed_experts(name: str, tmp_path: Path):
    folder = write(name, tmp_path / "hf")
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    routers = list(zip(general_routers(causal), expert_routers(causal).values(), strict=True))
    assert routers
    for router, module in routers:
        shape = (1, 9) if name.startswith("arcee") else (9,)
        hidden = torch.randn(*shape, causal.config.hidden_size, generator=torch.Generator().manual_seed(1))
        biases = [torch.zeros(router.experts)] * (len(signature(module.forward).parameters) - 1)
        router.real = torch.ones(1, 9, dtype=torch.bool)
        expected = module(hidden, *biases)
        assert router.counts is not None
        assert router.counts.tolist()[-3:] == [9, 0, 0]
        router.replayed = torch.full((1, 9, router.top_k), -1)
        unknown = module(hidden, *biases)
        chosen_experts = next((values for values in expected if values.dtype == torch.int64), None)
        if chosen_experts is None:  # Llama 4's router returns the scores of all experts, 0 where they are not chosen
            chosen_experts = expected[0].topk(router.top_k).indices
        router.replayed = chosen_experts[None]
        for replayed in (unknown, module(hidden, *biases)):
            assert all(torch.equal(values, other) for values, other in zip(replayed, expected, strict=True))
        assert router.counts.tolist()[-3:] == [9, 9, 0]
        router.replayed = (chosen_experts[None] + 1) % router.experts
        rerouted = module(hidden, *biases)
        assert router.counts.tolist()[-3:] == [9, 9, 9]
        assert router.counts[:-3].tolist() == router.replayed.flatten().bincount(minlength=router.experts).tolist()
        assert any(
            values.dtype.is_floating_point and not torch.equal(values, first)
            for values, first in zip(rerouted, expected, strict=True)
        )


def test_layouts_on_transformers_code_train_as_one_process(tmp_path: Path):
    degrees: dict[str, dict[str, Any]] = {"FSDP": {}, "DDP": {"data_parallel_replicate_degree": 2}, "TP": TP}
    layouts.make_models(tmp_path, ["llama", "qwen3"])
    cases = [on_transformers(family, 2, settings) for family in ("llama", "qwen3") for settings in degrees.values()]
    for name in ("mistralai/Mixtral-8x7B-Instruct-v0.1", "microsoft/Phi-3-mini-4k-instruct"):
        cases.append(on_transformers(zoo_folder(name, tmp_path), 2, TP | {"activation_checkpointing": "full"}))
    mixtral = cases[-2].family
    cases.append(on_transformers(mixtral, 2, EP | {"activation_checkpointing": "selective"}))
    check_layouts(tmp_path, cases)


def test_each_type_that_tensor_parallel_ranks_share_has_a_folder_in_the_zoo():
    assert {GENERAL[name].family for name in SHARED} == TENSOR_COMPARED - {"qwen3"}


@pytest.mark.nightly
def test_tensor_parallel_ranks_of_published_folders_train_as_one_process(tmp_path: Path):
    check_layouts(tmp_path, [on_transformers(zoo_folder(name, tmp_path), 2, TP) for name in SHARED])


@pytest.mark.nightly
def test_expert_parallel_ranks_of_published_folders_train_as_one_process(tmp_path: Path):
    folders = {name: zoo_folder(name, tmp_path) for name in MIXTURES}
    check_layouts(tmp_path, [on_transformers(folder, 2, EP) for folder in folders.values()])
    of_four = [EP, EP | {"data_parallel_replicate_degree": 2, "activation_checkpointing": "full"}]
    glm = folders["zai-org/GLM-4.5-Air"]
    check_layouts(tmp_path, [on_transformers(glm, 4, settings) for settings in of_four])


@pytest.mark.long
def test_tensor_parallel_ranks_of_several_shares_train_as_one_process(tmp_path: Path):
    names = ("google/gemma-2-2b-it", "microsoft/Phi-3-mini-4k-instruct", "Qwen/Qwen3-30B-A3B, on transformers' code")
    folders = [zoo_folder(name, tmp_path) for name in names]
    layouts_of_four = [TP, TP | {"data_parallel_replicate_degree": 2, "activation_checkpointing": "full"}]
    cases = [on_transformers(folder, 4, settings) for folder in folders for settings in layouts_of_four]
    check_layouts(tmp_path, cases)
    pairs = [(cases[0], on_transformers(folders[0], 4, {})), (on_transformers(folders[2], 4, {}), cases[5])]
    by_rank = run_ranks(relays, 4, tmp_path, pairs)
    for index, (first, then) in enumerate(pairs):
        (expected,) = layouts.train(tmp_path, [on_transformers(first.family, 1, {})], UPDATES)
        resumed = layouts.assemble(then, [parts[index] for parts in by_rank])
        for name, values in expected.weights.items():
            assert (resumed[name] - values).norm() < 1e-9 * values.norm(), (first, then, name)


def zoo_folder(name: str, folder: Path) -> str:
    """Write a checkpoint with heads for two ranks to a folder's folder; returns its name."""
    return write_for_ranks(name, folder / re.sub(r"\W+", "-", name)).name


def on_transformers(family: str, ranks: int, settings: Mapping[str, Any]) -> layouts.Case:
    return layouts.Case(
        family=family, name=str(settings), ranks=ranks, degrees=(("modelling", "transformers"), *settings.items())
    )


def check_layouts(folder: Path, cases: list[layouts.Case], settings: Mapping[str, Any] | None = None) -> None:
    """Train in each layout, and in one process of these settings."""
    alone = {family: on_transformers(family, 1, settings or {}) for family in {case.family: None for case in cases}}
    expected = dict(zip(alone, layouts.train(folder, list(alone.values()), UPDATES), strict=True))
    for case, result in zip(cases, layouts.train(folder, cases, UPDATES), strict=True):
        deviation = layouts.compare(result, expected[case.family])
        assert max(deviation.worst, deviation.of_way) < 1e-10, (case, deviation)


@pytest.mark.parametrize("values", [False, True])
def test_a_checkpoint_goes_on_as_training_that_was_not_interrupted(values: bool, tmp_path: Path):
    source, step = write(HYBRID, tmp_path / "hf"), tmp_path / "step"
    settings = TrainSettings(dtype="float64", seq_len=128, optimizer=OptimizerConfig(lr=1e-2))
    engines = [TitanEngine(source, settings, values=values) for _ in range(2)]
    batch = random_batch(1, vocab=250)
    columns = {
        name: [[np.ones(e.response_tokens, np.float32) for e in group.episodes] for group in batch.groups]
        for name in ("returns", "old_values")
    }
    laid = pack(batch, batch.rewards, Layout(seq_len=128), drop_uniform=False, columns=columns)
    loss = ValueLoss() if values else ClippedSurrogate()
    train_batch(engines[0], laid, loss)
    for part in ("training", "model"):
        (step / part).mkdir(parents=True)
    engines[0].save(step, source, version=1).result()
    engines[1].load_training_state(step / "training")
    for engine in engines:
        train_batch(engine, laid, loss)
    ends = [hf_weights(engine.model) for engine in engines]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    reloaded = TitanEngine(step / "model", settings, values=values)
    assert ("score.weight" in hf_weights(reloaded.model)) == values
    train_batch(reloaded, laid, loss)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DTYPES_IN_CI else pytest.mark.nightly)
        for name, checkpoint in ALL.items()
        if checkpoint.dtype == "bfloat16" and not checkpoint.quantized
    ],
)
def test_a_model_trained_in_its_own_dtype_is_saved_with_all_dtypes_as_they_were(name: str, tmp_path: Path):
    source, step = write(name, tmp_path / "hf"), tmp_path / "step"
    if name == PREDICTING:
        add_mtp_tensors(source)
    settings = TrainSettings(
        dtype="bfloat16", seq_len=128, optimizer=OptimizerConfig(lr=1e-2), modelling=modelling_of(name)
    )
    engine = TitanEngine(source, settings)
    train_batch(engine, packed(random_batch(1, vocab=250), seq_len=128))
    for part in ("training", "model"):
        (step / part).mkdir(parents=True)
    engine.save(step, source, version=1).result()
    before, after = ({key: value.dtype for key, value in stored(place).items()} for place in (source, step / "model"))
    if ALL[name].head == "copy":
        del before["lm_head.weight"]
    assert after == before
    first, last = (json.loads((place / "config.json").read_text()) for place in (source, step / "model"))
    kinds = [config.get("dtype") or config.get("torch_dtype") for config in (first, last)]
    assert kinds == ["bfloat16", "bfloat16"]


def add_mtp_tensors(folder: Path) -> None:
    """Add a file with layers for multi-token prediction to a folder, under their names in published ones."""
    layer = {"mtp.fc.weight": torch.ones(4, 8, dtype=torch.bfloat16), "mtp.norm.weight": torch.ones(4)}
    save_file(layer, folder / "mtp.safetensors", metadata={"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(layer, "mtp.safetensors")
    path.write_text(json.dumps(index))


def test_a_trained_value_model_has_its_own_head(tmp_path: Path):
    make_model(tmp_path, "olmo2")
    engine = TitanEngine(tmp_path, TrainSettings(dtype="float64", seq_len=128), values=True)
    rows = packed(random_batch(1, vocab=43), seq_len=128).rows
    assert all(bool((values == 0).all()) for values in engine.values(rows))
    assert "score.weight" in {spec.name for spec in engine.specs()}


def test_types_that_the_zoo_compares_are_named_as_compared():
    assert {checkpoint.family for checkpoint in GENERAL.values()} <= COMPARED


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["causal", "sliding", "chunked"])
def test_block_masks_of_cuda_see_what_dense_ones_see(kind: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.models.common.attention import FlexAttention
    from transformers import masking_utils

    from forge_rl.engines.titan import general_attention
    from forge_rl.engines.titan.general_state import RowContext

    monkeypatch.setattr(FlexAttention, "_compiled_flex_attn", flex_attention)  # uncompiled, it runs on CPU
    monkeypatch.setattr(general_attention, "create_attention_mask", create_block_mask)
    row = rows_of(share_prefixes=True)[0]
    rule = {
        "causal": masking_utils.causal_mask_function,
        "sliding": masking_utils.sliding_window_causal_mask_function(7),
        "chunked": masking_utils.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.int64)),
    }[kind]
    config, size = SimpleNamespace(forge_rl_row=RowContext(row=row)), None if kind == "causal" else 7
    mask = general_attention.mask_row(mask_function=rule, config=config, local_size=size)
    assert (mask.window, mask.is_causal) == {"causal": (None, True), "sliding": (7, True)}.get(kind, (None, False))
    q = torch.randn(1, 4, len(row), 16, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, len(row), 16, dtype=torch.float64)
    dense = general_attention._attend_dense(q, k, v, mask, 0.3, softcap)
    blocks = general_attention._attend_blocks(q, k, v, mask, 0.3, softcap)
    for ours, expected in zip(blocks, dense, strict=True):
        assert (ours - expected).abs().max() < 1e-5
    if softcap is None and mask.is_causal:
        trees = general_attention.attend_trees(q, k, v, mask.trees, 0.3)
        assert (trees[0] - dense[0]).abs().max() < 1e-12


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == HYBRID else pytest.mark.nightly)
        for name in GENERAL
        if name not in UNSERVED
    ],
)
def test_a_whole_run_of_two_steps(name: str, tmp_path: Path):
    write_model(name, tmp_path / "zoo")
    row = models.whole_run(name, tmp_path / "zoo", 900)
    assert row["whole_run"] is True, row
    if dtype_of(tmp_path / "zoo" / "model") == "float32":
        assert row["run_gap"] < 1e-2


@pytest.mark.nightly
def test_a_whole_run_on_tensor_parallel_ranks_that_replay_experts(tmp_path: Path):
    name = "mistralai/Mixtral-8x7B-Instruct-v0.1"
    write(name, tmp_path / "zoo" / "model", num_key_value_heads=2)
    flags = ("--trainer.tensor-parallel-degree", "2", "--trainer.router-replay")
    row = models.whole_run(name, tmp_path / "zoo", 900, flags)
    assert row["whole_run"] is True, row
    assert row["run_gap"] < 1e-2
    lines = [json.loads(line) for line in (tmp_path / "zoo" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["experts/replayed"] for line in lines if "experts/replayed" in line} == {1.0}
