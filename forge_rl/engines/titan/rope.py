"""Rotary position embeddings: torchtitan's two orders, in fewer passes over memory, and Llama 3's scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE

from forge_rl.algorithms.logprobs import widened
from forge_rl.engines.families.family import Architecture
from forge_rl.engines.titan.block_kernels import has_kernels, norm_rope
from forge_rl.engines.titan.shards import local


def half_rope(architecture: Architecture, max_positions: int, *, scales_scores: bool = False) -> Any:
    """Make the `Config` of RoPE in rotate-half order, scaled as the architecture says.

    Args:
        scales_scores: YaRN's factor on attention scores is applied to q and k here, not by the layer.
    """
    rope: Mapping[str, Any] = architecture.rope
    amplitude = 1.0
    if scales_scores and rope["rope_type"] == "yarn" and rope["factor"] > 1:
        amplitude = 0.1 * math.log(rope["factor"]) + 1  # YaRN, arXiv:2309.00071, equation 22
    fields = rope_fields(architecture, max_positions)
    return HalfRoPE.Config(dim=architecture.head_dim, amplitude=amplitude, **fields)


def rope_fields(architecture: Architecture, max_positions: int) -> dict[str, Any]:
    """Return the fields of a RoPE `Config` other than its dimension, by name."""
    rope: Mapping[str, Any] = architecture.rope
    fields: dict[str, Any] = {"max_seq_len": max_positions, "theta": float(rope["rope_theta"])}
    if rope["rope_type"] == "llama3":
        fields |= {
            "scaling": "llama",
            "scaling_factor": float(rope["factor"]),
            "low_freq_factor": float(rope["low_freq_factor"]),
            "high_freq_factor": float(rope["high_freq_factor"]),
            "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        }
    elif rope["rope_type"] == "linear":  # Llama 3's for wavelengths that are all long
        fields |= {
            "scaling": "llama",
            "scaling_factor": float(rope["factor"]),
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            # With a context of 0, every wavelength counts as long, so all frequencies are divided by the factor.
            "original_max_position_embeddings": 0,
        }
    elif rope["rope_type"] == "yarn":
        fields |= {
            "scaling": "yarn",
            "rope_factor": float(rope["factor"]),
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "original_seq_len": int(rope["original_max_position_embeddings"]),
            "truncate": bool(rope.get("truncate", True)),
        }
    return fields


class PairRoPE(ComplexRoPE):
    """torchtitan's RoPE over adjacent pairs, without rounding float64."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions."""

        def turned(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(widened(x).reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * rope_cache).flatten(3).type_as(x)

        return turned(query), turned(key)


class HalfRoPE(CosSinRoPE):
    """torchtitan's rotate-half RoPE, with Llama 3's frequency scaling and a factor on q and k, which it lacks."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        amplitude: float = 1.0
        """Factor on rotated q and k."""

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        if config.scaling != "llama":
            cache: torch.Tensor = super()._precompute_cache()
            return cache if config.amplitude == 1 else cache * config.amplitude
        frequencies = self._scale(1.0 / config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim))
        angles = torch.outer(torch.arange(config.max_seq_len).float(), frequencies)
        # Both elements of a pair, dim / 2 apart, turn by the same angle.
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys by their positions, in fewer passes over memory than torchtitan."""
        cache = local(rope_cache)

        def turned(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, DTensor):
                return rotate(x, cache)
            # Heads are rotated independently, so each rank rotates its own.
            return DTensor.from_local(rotate(x.to_local(), cache), x.device_mesh, x.placements, run_check=False)

        return turned(query), turned(key)

    def _reshape_cache(self, query: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return the cosines and sines of each position, [1, L, 1, 2 head_dim]."""
        if positions is not None and has_kernels(query, "rope") and not isinstance(positions, DTensor):
            return _angles(self, positions)
        cache: torch.Tensor = super()._reshape_cache(query, positions)
        return cache

    def _scale(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Scale as Llama 3.1: stretch long wavelengths, keep short ones, interpolate in between."""
        factor, low, high = self.config.scaling_factor, self.config.low_freq_factor, self.config.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        # 1 for wavelengths below context / high, which stay; 0 above context / low, which are stretched by the factor.
        smooth = (self.config.original_max_position_embeddings / wavelengths - low) / (high - low)
        smooth = smooth.clamp(0, 1)
        scaled: torch.Tensor = (1 - smooth) * frequencies / factor + smooth * frequencies
        return scaled


def _angles(rope: Any, positions: torch.Tensor) -> torch.Tensor:
    """Return the cosines and sines of positions, which layers with the same RoPE share: they are kept with the
    positions."""
    row_angles: list[tuple[Any, torch.Tensor]] = positions.__dict__.setdefault("angles", [])
    for config, shared_angles in row_angles:
        if config == rope.config:
            return shared_angles
    angles: torch.Tensor = rope.cache[positions][:, :, None]  # whose kernel refuses positions past the cache
    row_angles.append((rope.config, angles))
    return angles


def rotate(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Apply rotate-half RoPE, in float32 or wider.

    Args:
        x: [1, L, heads, head_dim].
        cache: [1, L, 1, 2 head_dim], cosines then sines, each repeated for both halves.
    """
    if has_kernels(x, "rope"):
        return norm_rope(x, None, cache, 0.0)
    turned: torch.Tensor = _Rotation.apply(x, cache)
    return turned


class _Rotation(torch.autograd.Function):
    """Rotation; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cache)
        return _turned(x, cache, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (cache,) = ctx.saved_tensors
        return _turned(grad, cache, -1), None


def _turned(x: torch.Tensor, cache: torch.Tensor, direction: int) -> torch.Tensor:
    dim, half = x.shape[-1], x.shape[-1] // 2
    x_wide, cos, sin = widened(x), cache[..., :dim], cache[..., dim : dim + half]
    turned = x_wide * cos
    # In place on halves: no rotated copy of x, as torch.cat would make.
    turned[..., :half].addcmul_(x_wide[..., half:], sin, value=-direction)
    turned[..., half:].addcmul_(x_wide[..., :half], sin, value=direction)
    return turned.type_as(x)
