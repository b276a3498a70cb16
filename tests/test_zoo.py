"""Folders as published checkpoints have them: read as transformers does, or refused by name."""

import contextlib
import json
import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.models import NATIVE
from forge_rl.engines.architecture import Architecture, check_weights, read_architecture
from forge_rl.errors import ModelError
from forge_rl.models.dequantized import dequantized
from forge_rl.models.hf_folder import complete_folder
from forge_rl.models.resolve import base_of, resolve_model
from forge_rl.run.plan.memory import show_plan
from forge_rl.run.records.started_from import read_records, record_model, where_moved
from forge_rl.tokens.tokenizer import Tokenizer
from recipes.grpo import Config
from tests.plain_trainer import in_float64, logits_of
from tests.test_titan_model import engine_of, titan_logits
from tests.zoo import packed
from tests.zoo.checkpoints import CHECKPOINTS, FAMILIES, REFUSED
from tests.zoo.folders import SIZES, transformers_config, write
from tests.zoo.general import UNSERVED
from tests.zoo.services import Gaps, whole_ways
from tests.zoo.trained import ALL, stored, write_model

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_published_folder_is_read_as_transformers_does(name: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    checkpoint = CHECKPOINTS[name]
    folder = resolve_model(str(write(name, tmp_path / "hf")), tmp_path)
    if checkpoint.quantized:
        folder = dequantized(folder, tmp_path / "cache")
    architecture = read_architecture(folder)
    assert not check_weights(folder, architecture)
    titan = engine_of(folder, 150).model
    token_ids = torch.randint(0, architecture.vocab, (150,), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(
        folder, config=transformers_config(folder), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = logits_of(in_float64(reference, titan), token_ids)
    assert expected.std() > 0.2, "the model must tell tokens apart for this to be a test"
    assert (titan_logits(folder, token_ids, titan) - expected).abs().max() < 1e-9
    tokens = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    if checkpoint.template == "none":
        with pytest.raises(ModelError, match="has no chat template"):
            Tokenizer(folder)
        return
    tokenizer = Tokenizer(folder)
    assert set(tokenizer.stop_ids) == set(tokens)
    ids = tokenizer.render([{"role": "user", "content": "2+3? é"}])
    assert tokens[0] in ids
    assert tokenizer.decode(ids, skip_special=False).startswith("<|start|>user\n2+3? é" + checkpoint.stops[0])
    assert tokenizer.vocab_size == architecture.vocab
    assert tokenizer.decode([architecture.vocab - 1, ids[0]]) is not None


@pytest.mark.parametrize("name", NATIVE)
def test_packed_rows_of_native_families_equal_transformers(name: str, tmp_path: Path):
    folder = write_model(name, tmp_path / "zoo")
    engine = packed.engine_of(folder, "native")
    for share_prefixes in (True, False):
        deviation = packed.compare(engine, folder, packed.rows_of(share_prefixes=share_prefixes))
        assert deviation.spread > 0.2, "the model must tell tokens apart for this to be a test"
        assert max(deviation.forward, deviation.gradient) < 1e-9


def test_a_gradient_that_is_no_number_deviates(tmp_path: Path):
    folder = write_model("Qwen/Qwen3-0.6B", tmp_path / "zoo")
    engine = packed.engine_of(folder, "native")
    next(engine.model.parameters()).register_hook(lambda gradient: gradient * math.nan)
    deviation = packed.compare(engine, folder, packed.rows_of(share_prefixes=True))
    assert deviation.forward < 1e-9
    assert deviation.gradient == math.inf


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_folder_that_is_not_supported_is_refused_by_name(name: str, tmp_path: Path):
    config, message = REFUSED[name]
    family = FAMILIES.get(config["model_type"], FAMILIES["llama"])
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "vocab_size": 300, **family, **config}))
    with pytest.raises(ModelError, match=message) as caught:
        read_architecture(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "message", "unused"),
    [
        (
            {"model.layers.0.mlp.up_proj.weight": None},
            "lacks weights .* such as 'model.layers.0.mlp.up_proj.weight'",
            0,
        ),
        ({"lm_head.weight": None, "score.weight": torch.ones(1, 64)}, "lacks weights .* 'lm_head.weight'", 0),
        ({"model.layers.1.self_attn.q_norm.weight": torch.ones(32)}, r"holds 1 weights .*q_norm\.weight", 0),
        ({"model.layers.1.self_attn.o_proj.bias": torch.ones(64)}, r"a 'llama' of its config.json does not have", 0),
        ({"v_head.summary.weight": torch.ones(1, 64), "visual.merger.weight": torch.ones(4)}, "", 2),
    ],
)
def test_weights_that_config_json_does_not_describe_are_refused_or_told(
    change: dict, message: str, unused: int, tmp_path: Path
):
    folder = write("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", tmp_path / "hf")
    state = {key: value for key, value in (stored(folder) | change).items() if value is not None}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message) if message else contextlib.nullcontext():
        assert len(check_weights(folder, read_architecture(folder))) == unused
    if message:
        with pytest.raises(ModelError, match=message):
            show_plan(Config(model=str(folder)))
    if "lm_head.weight" not in state:
        check_weights(folder, read_architecture(folder), values=True)


def test_an_index_that_names_what_its_file_lacks_is_refused(tmp_path: Path):
    folder = write("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", tmp_path / "hf")
    names = dict.fromkeys((*stored(folder), "model.layers.9.extra.weight"), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"model\.safetensors lacks 'model.layers.9.extra.weight', which the folder's"):
        check_weights(folder, read_architecture(folder))


def test_a_tokenizer_of_bytes_that_names_llamas_class_is_read_as_it_is(tmp_path: Path):
    folder = write("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", tmp_path / "hf")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    # As it is published.
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizerFast"}))
    with pytest.raises(ModelError, match="as a LlamaTokenizer, which turns"):
        Tokenizer(folder)
    resolved = resolve_model(str(folder), tmp_path / "cache")
    assert resolve_model(str(folder), tmp_path / "cache") == resolved
    assert "2 and 3" in Tokenizer(resolved).decode(Tokenizer(resolved).render([{"role": "user", "content": "2 and 3"}]))
    assert json.loads((resolved / "tokenizer_config.json").read_text()) == settings
    assert (resolved / "tokenizer.json").samefile(folder / "tokenizer.json")
    check_weights(resolved, read_architecture(resolved))
    record_model(tmp_path, "--model", str(folder), resolved)
    assert not where_moved("--model", read_records(tmp_path)["--model"])
    (tmp_path / "copy").mkdir()
    complete_folder(folder, tmp_path / "copy", dtype="float32", weight_map={}, total_bytes=0)
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text()) == settings


SEEN_IN_SHAPES = {"head_dim", "num_key_value_heads", "num_nextn_predict_layers", "q_lora_rank"}
"""Keys whose absence shows in the names and shapes of the weights."""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_absent_key_of_config_json_means_what_it_means_to_transformers(family: str, tmp_path: Path):
    from transformers import AutoConfig

    def read(config: dict[str, Any]) -> Architecture | None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with contextlib.suppress(ModelError):
            return read_architecture(tmp_path)
        return None

    complete = {**SIZES, "vocab_size": 300, **FAMILIES[family], "model_type": family}
    assert read(complete) is not None
    for key in complete.keys() - SEEN_IN_SHAPES - {"model_type", "rope_scaling"}:
        absent = {name: value for name, value in complete.items() if name != key}
        if (architecture := read(absent)) is None:
            continue
        defaults = AutoConfig.from_pretrained(tmp_path)
        default = defaults.rope_parameters["rope_theta"] if key == "rope_theta" else getattr(defaults, key, None)
        assert read({**absent, key: default}) in (None, architecture), f"{key} is {default} by default"


PUBLISHED_FILES = {
    "config.json": True,
    "generation_config.json": True,
    "model-00001-of-00002.safetensors": True,
    "model.safetensors.index.json": True,
    "tokenizer.json": True,
    "chat_template.jinja": True,
    "additional_chat_templates/tool_use.jinja": True,
    "original/model.safetensors": False,  # gpt-oss: all weights once more
    "original/params.json": False,
    "original/tokenizer.model": False,
    "original/consolidated.00.pth": False,  # Llama 3
    "metal/model.bin": False,
    "consolidated.safetensors": False,  # Mistral
    "onnx/config.json": False,
    "runs/events.out.tfevents": False,
    "modeling_deepseek.py": False,
    "pytorch_model-00001-of-00002.bin": False,
}
"""Files of published folders, and whether they are needed."""


def test_only_the_files_that_are_needed_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    fetched: list[str] = []
    revisions: list[str | None] = []
    model = write("Qwen/Qwen3-0.6B", tmp_path / "hf")

    def snapshot(name: str, *, revision: str | None = None, **patterns: list[str]) -> str:
        revisions.append(revision)
        fetched.extend(filter_repo_objects(PUBLISHED_FILES, **patterns))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    resolve_model("org/name", tmp_path)
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/name", "revision": "v1.2"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    complete_files = list(fetched)
    base_of(tmp_path / "adapter", "", tmp_path)
    base_of(tmp_path / "adapter", "org/name", tmp_path)
    assert revisions == [None, "v1.2", None], "an adapter names the revision of its base"
    fetched[:] = complete_files
    assert fetched == [name for name, needed in PUBLISHED_FILES.items() if needed]


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        ("model.safetensors", "pytorch_model.bin", "pytorch_model.bin is a pickle"),
        ("tokenizer.json", "tiktoken.model", "tiktoken.model needs Python code of the model, which is never run"),
        ("tokenizer.json", "qwen.tiktoken", "qwen.tiktoken needs Python code"),
    ],
)
def test_a_folder_of_another_kind_is_refused_with_what_makes_it_one(
    removed: str, added: str, message: str, tmp_path: Path
):
    folder = write("Qwen/Qwen3-0.6B", tmp_path / "hf")
    (folder / removed).unlink()
    (folder / added).write_text("")
    with pytest.raises(ModelError, match="is not a complete model: it lacks") as caught:
        resolve_model(str(folder), tmp_path)
    assert message in caught.value.hint


def test_a_token_without_an_embedding_is_refused_by_name(tmp_path: Path):
    folder = write("NousResearch/Hermes-3-Llama-3.1-8B", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    with pytest.raises(ModelError, match=r"'<\|im_end\|>' is token 257 .* has embeddings of 257 tokens"):
        Tokenizer(folder).render([{"role": "user", "content": "?"}])


OFTEN = (
    "ByteDance-Seed/Seed-OSS-36B-Base",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8",
    "meta-llama/Llama-3.2-1B-Instruct",
    "openai/gpt-oss-20b",
    "deepseek-ai/DeepSeek-V3",
    "mistralai/Ministral-3-3B-Instruct-2512, its text model",
    "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "google/gemma-2-2b-it",
    "google/gemma-3-1b-it",
    "google/gemma-4-E2B-it, its text model",
    "microsoft/Phi-3-mini-4k-instruct",
    "allenai/Olmo-3-7B-Instruct",
    "HuggingFaceTB/SmolLM3-3B",
    "ibm-granite/granite-4.0-h-1b",
    "LiquidAI/LFM2-1.2B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "zai-org/GLM-4.5-Air",
    "MiniMaxAI/MiniMax-M2",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
)
"""Checkpoints that differ most, one of each kind of layer and file."""
OTHERS = [name for name, checkpoint in ALL.items() if name not in OFTEN and checkpoint.template != "none"]
"""All others that a run takes, which needs a chat template."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "names",
    [pytest.param(OFTEN, id="often"), pytest.param(OTHERS, id="others", marks=pytest.mark.nightly)],
)
async def test_published_folders_go_the_whole_way(names: Sequence[str], tmp_path: Path):
    """Loaded, served, trained, published, attested, saved, and loaded again by transformers and vLLM."""
    results = await whole_ways(names, tmp_path)
    problems = [f"{name}: {problem}" for name, result in results.items() if (problem := problem_of(name, result))]
    assert not problems, "\n".join(problems)


def problem_of(name: str, result: Gaps | str | Exception) -> str:
    """Return what is wrong with the result of a checkpoint's whole way; empty if nothing is."""
    if isinstance(result, Exception):
        return "".join(traceback.format_exception(result))
    if isinstance(result, str):
        passes = name in UNSERVED and UNSERVED[name] in result
    else:
        passes = name not in UNSERVED and result.passes
    return "" if passes else str(result)
