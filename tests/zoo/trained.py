"""Folders of the zoo after two updates, with what the trainer publishes and saves."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from forge_rl import Task
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import Dtype, Modelling, TrainSettings
from forge_rl.engines.titan.train import TitanEngine
from forge_rl.models.dequantized import dequantized
from forge_rl.models.resolve import resolve_model
from forge_rl.tokens.tokenizer import Tokenizer
from tests.fakes import packed, random_batch, train_batch
from tests.zoo.checkpoints import CHECKPOINTS
from tests.zoo.folders import write
from tests.zoo.general import GENERAL

ALL = CHECKPOINTS | GENERAL


def modelling_of(name: str) -> Modelling:
    """Return the code that computes a checkpoint's model."""
    return "transformers" if name in GENERAL else "native"


def round_trips(name: str, folder: Path) -> bool | None:
    """Return whether the tokenizer stops where the folder says, and a rendered chat decodes to its text; None without a
    chat template, which a run refuses."""
    if ALL[name].template == "none":
        return None
    tokenizer = Tokenizer(folder)
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    ids = tokenizer.render([{"role": "user", "content": "2+3? é"}])
    expected = "<|start|>user\n2+3? é" + ALL[name].stops[0]
    return set(tokenizer.stop_ids) == set(stops) and tokenizer.decode(ids, skip_special=False).startswith(expected)


def mean_code(task: Task, text: str) -> float:
    """Reward of whole runs, in which the bytes that a random model writes differ."""
    return sum(map(ord, text)) / (256 * max(1, len(text)))


def write_model(name: str, folder: Path) -> Path:
    """Write a checkpoint into a new folder, and return the model that a run loads: as published, or dequantised."""
    folder.mkdir(parents=True)
    source = resolve_model(str(write(name, folder / "hf")), folder)
    model = dequantized(source, folder / "cache") if ALL[name].quantized else source
    (folder / "model").symlink_to(model)
    return model


def dtype_of(model: Path) -> Dtype:
    """Return the dtype of a model's engines: vLLM's latent attention has no float32 on CPUs with AMX, and its Gated
    DeltaNet has none on any."""
    model_type = json.loads((model / "config.json").read_text())["model_type"]
    return "bfloat16" if model_type in ("deepseek_v3", "glm4_moe_lite", "kimi_k2", "qwen3_next") else "float32"


def prepare(name: str, folder: Path) -> None:
    """Write a folder, train on it twice in this process, save, and check the saved folder."""
    model = write_model(name, folder)
    settings = TrainSettings(
        dtype="float32", seq_len=128, optimizer=OptimizerConfig(lr=1e-2), modelling=modelling_of(name)
    )
    engine = TitanEngine(model, settings)
    for seed in (1, 2):
        train_batch(engine, packed(random_batch(seed, vocab=250)))
    for part in ("training", "model"):
        (folder / "saved" / part).mkdir(parents=True)
    engine.save(folder / "saved", model, version=2).result()
    check_files(name, model, folder / "saved" / "model")


def check_files(name: str, model: Path, saved: Path) -> None:
    """Check that a saved model is what the run started from, but for the values and dtype of its weights."""
    before, after = (stored(folder) for folder in (model, saved))
    copied = {"lm_head.weight"} if ALL[name].head == "copy" else set()
    assert after.keys() == {key for key in before if not key.endswith(".inv_freq")} - copied
    assert all(after[key].shape == before[key].shape for key in after)
    first, last = (json.loads((folder / "config.json").read_text()) for folder in (model, saved))
    untied = {"tie_word_embeddings": False} if ALL[name].head == "own" else {}
    assert last == {key: value for key, value in first.items() if key != "torch_dtype"} | {"dtype": "float32"} | untied
    for path in model.rglob("*"):
        if path.is_file() and "safetensors" not in path.name and path.name != "config.json":
            assert (saved / path.relative_to(model)).read_bytes() == path.read_bytes(), path


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder's files."""
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
