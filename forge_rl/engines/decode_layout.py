"""Checks a decode engine's layout over devices, before anything starts and without vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_rl.engines.devices import device_type, gpus
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError, ModelError
from forge_rl.models.adapter_limits import has_experts

_WITHOUT_LORA = ("stablelm",)
"""Model types for which vLLM has no adapters; it has them for all other trainable types."""
_WORD_ITEMS = 4
"""Elements in 8 bytes of bfloat16: to be fingerprinted, a worker's part of a row must be a multiple of this."""


def check_decode_layout(folder: Path, settings: DecodeSettings, *, engines: int = 1) -> None:
    """Check that the model can be split as the settings say, and that each engine has GPUs of its own.

    Engines do not share a GPU: while it starts, vLLM would count the other engine's memory as its own, and one engine
    that decodes more requests at a time is faster than two.

    Args:
        folder: Hugging Face model folder.
        engines: number of engines.

    Raises:
        ConfigError: the model's heads, widths or experts cannot be split this way, there are too few GPUs, or vLLM has
            no kernels of the wanted kind for this device or model.
        ModelError: config.json cannot be read.
    """
    _check_kernels(settings)
    check_adapters(folder, settings)
    if device_type() == "cuda" and engines * settings.devices > gpus():
        raise ConfigError(
            f"{engines} x an engine of {settings.tensor_parallel_size} x {settings.data_parallel_size} devices needs "
            f"{engines * settings.devices} GPUs, and there are {gpus()}",
            hint="lower --generator.replicas, --generator.tensor-parallel-size or --generator.data-parallel-size; "
            "--generator.max-num-seqs has one engine decode more at a time",
        )
    # FP8 on GPUs works for any model, and needs no look at config.json.
    rounds_weights = settings.quantization == "int8" or (settings.quantization == "fp8" and device_type() == "cpu")
    if settings.devices == 1 and not (settings.enable_expert_parallel or settings.routed_experts or rounds_weights):
        return
    try:
        config = _read_config(folder)
        experts = _experts(config)
        heads, key_heads, widths = _dimensions(config, settings)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error!r}", hint="give a model folder") from error
    if settings.routed_experts and not experts:
        raise ConfigError("the model has no experts to be returned", hint="leave out --generator.routed-experts")
    if settings.quantization == "int8" and not experts:
        raise ConfigError(
            "--generator.quantization int8 is of experts, and the model has none",
            hint="set --generator.quantization fp8, or none",
        )
    if rounds_weights and experts and device_type() == "cpu":
        raise ConfigError(
            f"--generator.quantization {settings.quantization} of experts needs GPUs, and engines would run on CPU",
            hint="leave out --generator.quantization",
        )
    if settings.enable_expert_parallel:
        _check_experts(experts, settings)

    def works(size: int) -> bool:
        # vLLM copies key heads to several workers if there are fewer of them than workers.
        shares_heads = heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)
        # A worker's part of a row must consist of whole words to be fingerprinted.
        return shares_heads and all(size == 1 or width % (_WORD_ITEMS * size) == 0 for width in widths)

    if not works(settings.tensor_parallel_size):
        sizes = ", ".join(str(size) for size in range(1, heads + 1) if works(size))
        raise ConfigError(
            f"{settings.tensor_parallel_size} devices cannot share the model's {heads} heads, {key_heads} key heads "
            f"and layers of width {' and '.join(map(str, widths))} evenly",
            hint=f"set --generator.tensor-parallel-size to one of {sizes}",
        )


def check_adapters(folder: Path, settings: DecodeSettings) -> None:
    """Check that vLLM can apply adapters to the model on this device, if the settings have room for any.

    Args:
        folder: Hugging Face model folder.

    Raises:
        ConfigError: it cannot.
        ModelError: the folder cannot be read.
    """
    if not settings.max_loras:
        return
    hint = "merged adapters work: leave out --generator.max-loras and --generator.adapters, or run forge_rl merge"
    # If adapters are enabled, vLLM computes experts with Triton, even though none of them has an adapter.
    if device_type() == "cpu" and has_experts(folder):
        raise ConfigError(f"on CPU, vLLM serves no adapters of a model with experts, as {folder} is", hint=hint)
    try:
        kind = _read_config(folder).get("model_type")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {error!r}", hint="give a model folder") from error
    if kind in _WITHOUT_LORA:
        raise ConfigError(f"vLLM serves no adapters of a {kind!r}, as {folder} is", hint=hint)


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Return config.json, or its section for the language model."""
    config = json.loads((folder / "config.json").read_text())
    # Models that also take images keep the language model's dimensions there.
    text_config: Mapping[str, Any] = config.get("text_config") or config
    return text_config


def _check_kernels(settings: DecodeSettings) -> None:
    """Refuse settings for which vLLM has no kernels with any model: on CPU none is batch-invariant, and quantised
    kernels compute in bfloat16."""
    flag = "--generator.batch-invariant"
    if settings.batch_invariant and device_type() != "cuda":
        raise ConfigError(f"{flag} needs GPUs, and engines would run on CPU", hint=f"leave out {flag}")
    if settings.quantization != "none" and settings.dtype == "float32":
        raise ConfigError(
            f"--generator.quantization {settings.quantization} computes in bfloat16, not in float32",
            hint="set --generator.dtype bfloat16",
        )


def _experts(config: Mapping[str, int]) -> int:
    """Return the number of experts per layer; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _dimensions(config: Mapping[str, int], settings: DecodeSettings) -> tuple[int, int, list[int]]:
    """Return heads, key heads, and the widths that tensor parallelism splits."""
    heads = int(config["num_attention_heads"])
    key_heads = int(config.get("num_key_value_heads") or heads)
    widths = [heads * int(config.get("head_dim") or config["hidden_size"] // heads)]
    # In a mixture's sparse layers, experts are split instead of a dense network, or not at all if each worker has whole
    # ones.
    if not _experts(config):
        widths.append(int(config["intermediate_size"]))
        return heads, key_heads, widths
    if not settings.enable_expert_parallel:
        widths.append(int(config.get("moe_intermediate_size") or config["intermediate_size"]))
    # The first layers, those listed, or all but every nth may be dense.
    if config.get("first_k_dense_replace") or config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) > 1:
        widths.append(int(config["intermediate_size"]))
    return heads, key_heads, widths


def _check_experts(experts: int, settings: DecodeSettings) -> None:
    if not experts:
        raise ConfigError("the model has no experts to be shared", hint="leave out --generator.enable-expert-parallel")
    if settings.devices == 1:
        raise ConfigError(
            "an engine on a single device cannot be expert-parallel",
            hint="raise --generator.tensor-parallel-size or --generator.data-parallel-size, or leave out "
            "--generator.enable-expert-parallel",
        )
    if settings.devices > experts:
        raise ConfigError(
            f"{settings.devices} devices cannot share {experts} experts",
            hint="lower --generator.tensor-parallel-size or --generator.data-parallel-size",
        )
