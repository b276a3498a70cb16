"""Checks that an engine's context fits a model's positions and the engine's memory, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from forge_rl.engines.architecture import read_served
from forge_rl.engines.devices import device_type
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.platform import gpu_bytes, resolve_dtype
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.errors import ConfigError

S = TypeVar("S", bound=DecodeSettings)


def check_context(architecture: Architecture, settings: DecodeSettings) -> None:
    """Refuse a context that exceeds the model's positions, or whose keys and values do not fit in memory.

    vLLM would refuse it too, half a minute into its start. Its other memory is not counted here.

    Raises:
        ConfigError: the context is too long.
    """
    tokens, max_positions = settings.max_model_len, positions(architecture)
    if tokens > max_positions:
        raise ConfigError(
            f"--generator.max-model-len is {tokens}, and the model has {max_positions} positions",
            hint=f"set --generator.max-model-len to {max_positions} or less",
        )
    needed_bytes, free_bytes = sequence_bytes(architecture, settings), _cache_bytes(architecture, settings)
    if needed_bytes > free_bytes:
        flag = "--generator.gpu-memory-utilization" if device_type() == "cuda" else "--generator.kv-cache-gib"
        raise ConfigError(
            f"keys and values of one sequence of {tokens} tokens need {needed_bytes / 2**30:.3g} GiB, and a device of "
            f"the engine has {max(0, free_bytes) / 2**30:.3g} GiB for them",
            hint=f"raise {flag}, or lower --generator.max-model-len",
        )


def with_longest_context(settings: S, folder: Path, *, min_tokens: int, max_tokens: int | None = None) -> S:
    """Return engine settings with the longest context that the model and the memory allow, unless the settings set one.

    Args:
        folder: folder of the model.
        min_tokens: number of tokens that the context must exceed; where none fits, the settings stay as they are.
        max_tokens: upper bound; by default the model's positions.
    """
    if settings.max_model_len != DecodeSettings.max_model_len:
        return settings
    architecture = read_served(folder)
    tokens = min(max_tokens or positions(architecture), positions(architecture))
    while tokens > min_tokens:
        candidate = replace(settings, max_model_len=tokens)
        try:  # halving ends at more than half of the longest that fits
            check_context(architecture, candidate)
        except ConfigError:
            tokens //= 2
        else:
            return candidate
    return settings


def sequence_bytes(architecture: Architecture, settings: DecodeSettings, tokens: int = 0) -> int:
    """Return the minimum KV cache, in bytes per device, of one sequence of `tokens` tokens (max_model_len if 0)."""
    a, tokens = architecture, tokens or settings.max_model_len
    num_window_layers = len(a.window_layers) if a.window else 0
    attended_tokens = (a.layers - num_window_layers) * tokens + num_window_layers * min(tokens, a.window or tokens)
    # Latent attention caches one compressed vector for all heads, on each device.
    if a.latent:
        values = a.latent.kv_rank + a.latent.rope_dim
    else:
        # Keys and values. With fewer key heads than devices, each device has a copy of one.
        values = 2 * a.head_dim * max(1, a.kv_heads // settings.tensor_parallel_size)
    return attended_tokens * values * resolve_dtype(settings.dtype).itemsize


def positions(architecture: Architecture) -> int:
    """Return the maximum number of positions that vLLM accepts for a sequence."""
    rope = architecture.rope
    # vLLM scales the context of YaRN by its factor, also where config.json has the original length.
    if rope["rope_type"] != "yarn":
        return architecture.max_positions
    return max(architecture.max_positions, int(float(rope["original_max_position_embeddings"]) * float(rope["factor"])))


def _cache_bytes(architecture: Architecture, settings: DecodeSettings) -> int:
    """Return the maximum KV cache of one device of an engine, in bytes."""
    if device_type() == "cpu":
        return int(settings.kv_cache_gib * 2**30 / settings.devices)
    weights = architecture.weights * resolve_dtype(settings.dtype).itemsize // settings.tensor_parallel_size
    return int(settings.gpu_share * gpu_bytes()) - weights
