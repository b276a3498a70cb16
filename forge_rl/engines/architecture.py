"""Reads the architecture of a model from its config.json, before anything starts: needs no torchtitan."""

from __future__ import annotations

import json
from pathlib import Path

from forge_rl.engines.families import FAMILIES
from forge_rl.engines.families.config import Architecture, ConfigFile
from forge_rl.errors import ModelError

__all__ = ["Architecture", "read_architecture", "stored_bytes"]


def stored_bytes(folder: Path) -> int:
    """Return the bytes of a model's weights on disk, which for most models are in bfloat16."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def read_architecture(folder: Path) -> Architecture:
    """Read config.json.

    Raises:
        ModelError: the file is missing or broken, or asks for what is not supported here.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="give a Hugging Face model folder") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object", hint="give a Hugging Face model folder")
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(map(repr, sorted(FAMILIES)))
        raise ModelError(f"{path} is of model_type {model_type!r:.80}", hint=f"use a model of one of these: {known}")
    architecture = family.read(ConfigFile(path=path, values=values, family=family))
    stored = stored_bytes(folder)
    # The least that a file needs: 4 bits a weight where it is quantised, 8 where it is not.
    if architecture.weights > stored * (2 if values.get("quantization_config") else 1) > 0:
        raise ModelError(
            f"{path} describes a model of {architecture.weights} weights, and its files have {stored} bytes",
            hint="download or export the model again",
        )
    return architecture
