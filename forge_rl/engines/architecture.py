"""Reads a model's architecture from its config.json, before anything starts and without torchtitan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from forge_rl.engines.families import FAMILIES
from forge_rl.engines.families.family import Architecture, ConfigFile
from forge_rl.errors import ModelError
from forge_rl.models.hf_folder import has_own_head, tensor_files

__all__ = ["Architecture", "predicting_layers", "read_architecture", "stored_bytes"]

_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def stored_bytes(folder: Path) -> int:
    """Return the size of a model's weights on disk, which most models store in bfloat16."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def predicting_layers(folder: Path, architecture: Architecture) -> int:
    """Count the multi-token-prediction layers that a model's files hold, stored after its last layer.

    Raises:
        ModelError: the folder holds no weights, or they cannot be read.
    """
    layers = {int(match[1]) for match in map(_OF_LAYER.match, tensor_files(folder)) if match}
    return len([layer for layer in layers if layer >= architecture.layers])


def read_architecture(folder: Path) -> Architecture:
    """Read config.json, and whether the files agree with it that the embedding is also the output projection.

    Raises:
        ModelError: the file is missing or broken, or describes an unsupported model.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}", hint="give a Hugging Face model folder") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not a JSON object", hint="give a Hugging Face model folder")
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(map(repr, sorted(FAMILIES)))
        raise ModelError(f"{path} has model_type {model_type!r:.80}", hint=f"use one of the supported types: {known}")
    architecture = family.read(ConfigFile(path=path, values=values, family=family))
    stored = stored_bytes(folder)
    # Lower bounds: 4 bits per weight if quantised, 8 if not.
    if architecture.weights > stored * (2 if values.get("quantization_config") else 1) > 0:
        raise ModelError(
            f"{path} describes a model of {architecture.weights} weights, and its files have {stored} bytes",
            hint="download or export the model again",
        )
    if architecture.tied and stored and has_own_head(folder):
        architecture = replace(architecture, tied=False, untied_by_files=True)
    return architecture
