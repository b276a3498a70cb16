"""Architecture of a model as its config.json tells it, read before anything starts: needs no torchtitan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from forge_rl.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Dimensions in a Hugging Face config.json."""

    family: Literal["llama", "qwen3"]
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab: int
    norm_eps: float
    max_positions: int
    rope: Mapping[str, float | str]
    tied: bool
    """True if the input embedding is also the output projection."""
    dtype: torch.dtype
    """Format of the folder's weights, and of checkpoints."""


def read_architecture(folder: Path) -> Architecture:
    """Read config.json.

    Raises:
        ModelError: the file is missing or broken, or asks for what is not supported here.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="give a Hugging Face model folder") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object", hint="give a Hugging Face model folder")
    family = config.get("model_type")
    if family not in ("llama", "qwen3"):
        raise ModelError(f"{path} is of model_type {family!r}", hint='use a model of the "llama" or "qwen3" family')
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    refused = {
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        f"rope_type {rope['rope_type']!r}": rope["rope_type"] not in ("default", "llama3"),
        "quantization_config": bool(config.get("quantization_config")),
    }
    if found := [name for name, present in refused.items() if present]:
        raise ModelError(
            f"{path} asks for {', '.join(found)}, which the trainer does not support",
            hint="use an unquantised model of the plain Llama or Qwen3 architecture",
        )
    needed = "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size rms_norm_eps "
    needed += "max_position_embeddings"
    if lacking := [name for name in needed.split() if name not in config]:
        raise ModelError(f"{path} lacks {', '.join(lacking)}", hint="download or export the model again")
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(
            f"{path} is of dtype {config.get('dtype', config.get('torch_dtype'))!r}",
            hint='set its "dtype" to "bfloat16" or "float32"',
        )
    heads = config["num_attention_heads"]
    return Architecture(
        family=family,
        dim=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        hidden_dim=config["intermediate_size"],
        vocab=config["vocab_size"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        rope=rope,
        tied=bool(config.get("tie_word_embeddings")),
        dtype=dtype,
    )
