"""Architecture of a model as its config.json tells it, read before anything starts: needs no torchtitan."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from forge_rl.errors import ModelError

_AGAIN = "download or export the model again"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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

    @property
    def weights(self) -> int:
        """Number of weights in the matrices."""
        attention = 2 * self.dim * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.dim * self.hidden_dim
        return self.layers * layer + self.vocab * self.dim * (1 if self.tied else 2)


def read_architecture(folder: Path) -> Architecture:
    """Read config.json.

    Raises:
        ModelError: the file is missing or broken, or asks for what is not supported here.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="give a Hugging Face model folder") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object", hint="give a Hugging Face model folder")
    family = config.get("model_type")
    if family not in ("llama", "qwen3"):
        raise ModelError(f"{path} is of model_type {family!r}", hint='use a model of the "llama" or "qwen3" family')
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name) or {}, dict):
            raise ModelError(f"{path}: {name} is {config[name]!r:.80}", hint=_AGAIN)
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
        raise ModelError(f"{path} lacks {', '.join(lacking)}", hint=_AGAIN)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(
            f"{path} is of dtype {config.get('dtype', config.get('torch_dtype'))!r}",
            hint='set its "dtype" to "bfloat16" or "float32"',
        )
    heads = _whole(path, config, "num_attention_heads")
    dim = _whole(path, config, "hidden_size")
    architecture = Architecture(
        family=family,
        dim=dim,
        layers=_whole(path, config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(path, config, "num_key_value_heads", heads),
        head_dim=_whole(path, config, "head_dim", dim // heads),
        hidden_dim=_whole(path, config, "intermediate_size"),
        vocab=_whole(path, config, "vocab_size"),
        norm_eps=_number(path, config, "rms_norm_eps"),
        max_positions=_whole(path, config, "max_position_embeddings"),
        rope=rope,
        tied=bool(config.get("tie_word_embeddings")),
        dtype=dtype,
    )
    for name in ("rope_theta", *(_LLAMA3 if rope["rope_type"] == "llama3" else ())):
        _number(path, rope, name)
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if architecture.weights > stored_bytes > 0:
        raise ModelError(
            f"{path} describes a model of {architecture.weights} weights, and its files have {stored_bytes} bytes",
            hint=_AGAIN,
        )
    return architecture


def _whole(path: Path, config: Mapping[str, object], name: str, default: int = 0) -> int:
    value = config.get(name) or default
    if type(value) is not int or not 0 < value < 2**31:
        raise ModelError(f"{path}: {name} is {value!r:.80}, not a whole number above 0", hint=_AGAIN)
    return value


def _number(path: Path, config: Mapping[str, object], name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{path}: {name} is {value!r:.80}, not a number above 0", hint=_AGAIN)
    return value
