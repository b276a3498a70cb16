"""Reads a model's architecture from its config.json, before anything starts and without torchtitan."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from forge_rl.engines.families import NATIVE_TYPES
from forge_rl.engines.families.family import Architecture, ConfigFile
from forge_rl.engines.families.general import read_general, weight_shapes
from forge_rl.engines.protocol import Modelling
from forge_rl.errors import ModelError
from forge_rl.models.hf_folder import EMBEDDING, HEAD, has_own_head, open_weights, stored_bytes, tensor_files
from forge_rl.weights.names import VALUE_HEAD, Names

__all__ = ["Architecture", "check_weights", "predicting_layers", "read_architecture", "read_served", "stored_bytes"]

_TRAINED = (".weight", ".bias")
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that are not quantised, as safetensors names them."""
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def predicting_layers(folder: Path, architecture: Architecture) -> int:
    """Count the multi-token-prediction layers in a model's files, stored after its last layer.

    Raises:
        ModelError: the folder holds no weights, or they cannot be read.
    """
    layers = {int(match[1]) for match in map(_OF_LAYER.match, tensor_files(folder)) if match}
    return len([layer for layer in layers if layer >= architecture.layers])


def check_weights(folder: Path, architecture: Architecture, *, values: bool = False) -> list[str]:
    """Check the names of a folder's weights, which may not be the ones that its config.json describes.

    Args:
        values: a value model is trained on, which needs no head.

    Returns:
        Names of weights that are not used, other than multi-token-prediction layers and copies.

    Raises:
        ModelError: the files lack weights or hold quantised ones, or layers hold some that change what the model
            computes.
    """
    files = tensor_files(folder)
    stored_names = files.keys()
    described_names = _weight_names(architecture)
    if architecture.family.general:
        parts_of, shapes = architecture.family.names.parts, dict(weight_shapes(folder))
        if not architecture.tied:  # also where config.json ties the two
            shapes[HEAD] = torch.Size((architecture.vocab, architecture.dim))
        described_names = (part.name for name, shape in shapes.items() for part in parts_of(name, shape))
    names = (name for name in described_names if not (values and name == HEAD))
    needed_names = set(itertools.islice(names, len(stored_names) + 1))  # a crafted config.json can describe billions
    if missing_names := sorted(needed_names - stored_names):
        raise ModelError(
            f"{folder} lacks weights that its config.json describes, such as {missing_names[0]!r}",
            hint="download or export the model again; a reward model or an adapter cannot be trained as a policy",
        )
    extra_names = sorted(
        name for name in stored_names - needed_names - {HEAD, VALUE_HEAD} if not name.endswith(".rotary_emb.inv_freq")
    )
    _check_files({name: files[name] for name in (*needed_names, *extra_names)}, needed_names)
    layer_of = {name: int(match[1]) for name in extra_names if (match := _OF_LAYER.match(name))}
    # Weights of existing layers that the architecture lacks, such as biases: without them another model would be
    # trained.
    unexpected_names = [
        name for name, layer in layer_of.items() if layer < architecture.layers and name.endswith(_TRAINED)
    ]
    if unexpected_names:
        raise ModelError(
            f"{folder} holds {len(unexpected_names)} weights that a {architecture.family.model_type!r} of its "
            f"config.json does not have, such as {unexpected_names[0]!r:.120}",
            hint="use a model of the plain architecture, or correct config.json",
        )
    return [name for name in extra_names if layer_of.get(name, 0) < architecture.layers]


def _check_files(files: Mapping[str, Path], needed_names: Collection[str]) -> None:
    """Check that each file holds its tensors, and no codes in place of weights: without their scales, another model
    would be trained.

    Args:
        files: file of each tensor.
        needed_names: tensors that the model computes with.

    Raises:
        ModelError: names the first tensor that is absent, or weight that is quantised.
    """
    names_by_file: dict[Path, list[str]] = {}
    for name, path in sorted(files.items()):
        names_by_file.setdefault(path, []).append(name)
    for path, names in names_by_file.items():
        with open_weights(path) as file:
            stored_names = set(file.keys())
            for name in names:
                if name not in stored_names:
                    raise ModelError(
                        f"{path} lacks {name!r:.120}, which the folder's index says it has",
                        hint="download or export the model again",
                    )
                if name in needed_names and (dtype := file.get_slice(name).get_dtype()) not in _FLOATS:
                    raise ModelError(
                        f"{path} holds {name!r:.120} as {dtype}, and config.json has no quantization_config that says "
                        "how to read it",
                        hint="give the model's bfloat16 files",
                    )


def _weight_names(architecture: Architecture) -> Iterator[str]:
    """List the names of all weights of a native family's model."""
    a, family = architecture, architecture.family
    assert isinstance(family.names, Names)
    assert family.names.head == HEAD
    yield from (EMBEDDING, "model.norm.weight") if a.tied else (EMBEDDING, "model.norm.weight", HEAD)
    for layer in range(a.layers):
        is_sparse = a.experts is not None and layer in a.experts.layers
        # The family names the weights of all kinds of layers; leave out those that this layer does not have.
        absent_prefixes = ["feed_forward."] if is_sparse else ["moe."]
        if a.experts is not None and not a.experts.shared_dim:
            absent_prefixes.append("moe.shared_experts.")
        if a.latent is not None:
            absent_prefixes += (
                ["attention.wq."] if a.latent.q_rank else ["attention.wq_a.", "attention.q_norm.", "attention.wq_b."]
            )
        for titan_name, hf_name in family.names.layer.items():
            if not titan_name.startswith(tuple(absent_prefixes)):
                experts = range(a.experts.count) if a.experts is not None and "{}" in hf_name else [0]
                yield from (f"model.layers.{layer}.{hf_name.format(expert)}" for expert in experts)


def read_served(folder: Path) -> Architecture:
    """Read config.json of a model that only engines run. If the native family refuses it, read it as transformers does.

    Raises:
        ModelError: as `read_architecture`.
    """
    try:
        return read_architecture(folder)
    except ModelError as error:
        try:
            return read_architecture(folder, "transformers")
        except ModelError:
            raise error from None


def read_architecture(folder: Path, modelling: Modelling = "auto") -> Architecture:
    """Read config.json, and check in the files whether the embedding is also the output projection.

    Args:
        modelling: which code computes the model, see `TrainSettings.modelling`.

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
    family = NATIVE_TYPES.get(model_type) if isinstance(model_type, str) else None
    if family is None and modelling == "native":
        native_types = ", ".join(map(repr, sorted(NATIVE_TYPES)))
        raise ModelError(
            f"{path} has model_type {model_type!r:.80}, and native families are {native_types}",
            hint="set --trainer.modelling to auto or transformers",
        )
    if family is None or modelling == "transformers":
        architecture = read_general(path, values)
    else:
        architecture = family.read(ConfigFile(path=path, values=values, family=family))
    file_bytes = stored_bytes(folder)
    # Lower bounds: 4 bits per weight if quantised, 8 if not.
    if architecture.weights > file_bytes * (2 if values.get("quantization_config") else 1) > 0:
        raise ModelError(
            f"{path} describes a model of {architecture.weights} weights, and its files have {file_bytes} bytes",
            hint="download or export the model again; if its weights are quantised, give its bfloat16 files",
        )
    # transformers and vLLM use a head in the files if it differs, whatever config.json says.
    if architecture.tied and file_bytes and has_own_head(folder):
        architecture = replace(architecture, tied=False, untied_by_files=True)
    return architecture
