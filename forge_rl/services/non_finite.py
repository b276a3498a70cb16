"""Tokens with non-finite logprobs: masked, counted, and blamed on the request, or on the engine if there are many."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from forge_rl.errors import ConfigError
from forge_rl.token_arrays import Chunk
from forge_rl.types import Sampling

_WINDOW_TOKENS = 512
"""Window in tokens after which an engine's count is reset."""
_MOST_SHARE = 0.05
"""Maximum share of non-finite tokens in a window: one may come from rounding, many mean that the engine computes
garbage."""


class NonFiniteTokens:
    """Masks tokens with non-finite logprobs, and judges each engine by their share.

    chunk, problem = non_finite.mask(chunk, sampling, replica)
    """

    def __init__(self) -> None:
        self._masked = 0
        self._counts: WeakKeyDictionary[Hashable, tuple[int, int]] = WeakKeyDictionary()
        """Tokens in each engine's current window, and how many of them are non-finite."""

    def mask(self, chunk: Chunk, sampling: Sampling, engine: Hashable) -> tuple[Chunk, str]:
        """Set non-finite logprobs of a chunk to NaN, which packing masks.

        Returns:
            The chunk, and the reason to replace the engine, or "" if there is none.

        Raises:
            ConfigError: the request has extra settings, such as penalties, which can make a logprob infinite.
        """
        if sampling.temperature == 0:
            return chunk, ""
        finite = np.isfinite(chunk.logprobs)
        num_non_finite = len(finite) - int(np.count_nonzero(finite))
        # Penalties and biases that a user sets can make a logprob infinite; the engine is not at fault.
        if num_non_finite and sampling.extra:
            raise ConfigError(
                f"logprobs are not finite under the request's {', '.join(sorted(sampling.extra))}",
                hint="leave some token to be drawn, and keep penalties and biases small",
            )
        tokens, num_before = self._counts.get(engine, (0, 0))
        tokens, num_in_window = tokens + len(finite), num_before + num_non_finite
        # The window restarts once full, so that rare rounding never adds up to a replacement.
        self._counts[engine] = (tokens, num_in_window) if tokens < _WINDOW_TOKENS else (0, 0)
        if not num_non_finite:
            return chunk, ""
        self._masked += num_non_finite
        is_garbage = num_in_window > _MOST_SHARE * _WINDOW_TOKENS
        problem = f"{num_in_window} of {tokens} tokens have logprobs that are not finite" if is_garbage else ""
        return replace(chunk, logprobs=np.where(finite, chunk.logprobs, np.float32(math.nan))), problem

    def drain(self) -> int:
        """Return the number of tokens masked since the last call."""
        masked, self._masked = self._masked, 0
        return masked
