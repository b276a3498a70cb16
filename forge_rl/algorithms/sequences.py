"""Log ratios, and sums, means and maxima over sequences, from which losses build `Loss.statistics`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from forge_rl.algorithms.kl import MAX_LOG_RATIO
from forge_rl.algorithms.protocol import LossInputs

if TYPE_CHECKING:
    import torch


def log_ratios(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return logprobs - other_logprobs, [N]; 0 if that is NaN, and +-20 if infinite; for `Loss.statistics`."""
    return (logprobs - other_logprobs).nan_to_num(nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO)


def sequence_sums(values: torch.Tensor, tokens: LossInputs) -> torch.Tensor:
    """Sum values, [N], over the sequence of each token, [N]; for `Loss.statistics`.

    A sequence is an episode: all of its trained tokens, over all turns and segments.
    """
    _, index = tokens.episodes.unique(return_inverse=True)
    # N slots are enough: there are at most as many episodes as tokens.
    total: torch.Tensor = values.new_zeros(len(values)).index_add(0, index, values)[index]
    return total


def sequence_means(values: torch.Tensor, tokens: LossInputs) -> torch.Tensor:
    """Average values, [N], over the sequence of each token, [N]; see `sequence_sums`."""
    return sequence_sums(values, tokens) / tokens.lengths


def sequence_maxima(values: torch.Tensor, tokens: LossInputs) -> torch.Tensor:
    """Return the maximum of values, [N], over the sequence of each token, [N]; see `sequence_sums`."""
    _, index = tokens.episodes.unique(return_inverse=True)
    empty = values.new_full((len(values),), -math.inf)
    largest: torch.Tensor = empty.scatter_reduce(0, index, values, "amax")[index]
    return largest
