"""Aggregation of a loss over tokens: the weight of each token, and the one divisor of the whole minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from forge_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Means by which the losses of tokens become one number.

        Aggregation(kind="constant", tokens=1024)

    With l the loss of a token, and a sequence being all trained tokens of an episode, the loss of a minibatch of N
    sequences is one of

        token_mean     sum of l / number of tokens               DAPO (arXiv 2503.14476) equation 12
        sequence_mean  mean over sequences of the mean of l      GRPO (arXiv 2402.03300) equation 3
        constant       sum of l / (N * tokens)                   Dr. GRPO (arXiv 2503.20783) section 3.2

    Numbers of tokens and sequences are those of the whole minibatch, over all rows and ranks, groups that are left out
    because their advantages are 0 included: their loss is 0, but it counts in the mean.
    """

    kind: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: every token counts the same. sequence_mean: every episode counts the same, however long it is.
    constant: the sum over an episode's tokens is divided by the same number, however long it is."""
    tokens: int = 0
    """Divisor of kind constant: a number of tokens, such as the most that a completion may have."""

    def __post_init__(self) -> None:
        if self.kind not in ("token_mean", "sequence_mean", "constant"):
            raise ConfigError(
                f"there is no aggregation {self.kind!r}",
                hint="set --loss.aggregation.kind to token_mean, sequence_mean or constant",
            )
        if (self.tokens > 0) != (self.kind == "constant") or self.tokens < 0:
            raise ConfigError(
                f"the aggregation {self.kind} has a divisor of {self.tokens} tokens",
                hint="give --loss.aggregation.tokens with --loss.aggregation.kind constant, and only with it",
            )

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the weight of each token in the sum by the length of its sequence, above 0.

        Weights are float32, or float64 where the lengths are.
        """
        lengths = lengths.to(torch.promote_types(lengths.dtype, torch.float32))
        return lengths.reciprocal() if self.kind == "sequence_mean" else torch.ones_like(lengths)

    def divisor(self, *, tokens: int, sequences: int) -> int:
        """Return what the weighted sum over a minibatch of so many tokens and sequences is divided by."""
        return {"token_mean": tokens, "sequence_mean": sequences, "constant": sequences * self.tokens}[self.kind]
