"""Aggregation of a loss over tokens: the weight of each token, and one divisor for the whole minibatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of a minibatch over all rows and ranks, including groups that are left out of training."""

    tokens: int
    """Number of trained tokens."""
    sequences: int
    """Number of episodes."""
    observations: int = 0
    """Number of observation tokens between the turns of episodes."""


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Mean that reduces token losses to one number.

        Aggregation(kind="constant", tokens=1024)

    With l the loss of a token, and a sequence all trained tokens of an episode, the loss of a minibatch of N sequences
    is one of

        token_mean     sum of l / number of tokens               DAPO (arXiv 2503.14476) equation 12
        sequence_mean  mean over sequences of the mean of l      GRPO (arXiv 2402.03300) equation 3
        constant       sum of l / (N * tokens)                   Dr. GRPO (arXiv 2503.20783) section 3.2

    Tokens and sequences are counted over the whole minibatch, all rows and ranks, including groups that are dropped
    because their advantages are 0: their loss is 0, but counts in the mean.
    """

    kind: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """token_mean: every token counts equally. sequence_mean: every episode counts equally, regardless of its length.
    constant: the sum over an episode's tokens is divided by a constant, regardless of its length."""
    tokens: int = 0
    """Divisor of kind constant: a number of tokens, such as the maximum of a completion."""

    def __post_init__(self) -> None:
        if self.kind not in ("token_mean", "sequence_mean", "constant"):
            raise ConfigError(
                f"unknown aggregation {self.kind!r}",
                hint="set aggregation.kind to token_mean, sequence_mean or constant",
            )
        if (self.tokens > 0) != (self.kind == "constant") or self.tokens < 0:
            raise ConfigError(
                f"the aggregation {self.kind} has a divisor of {self.tokens} tokens",
                hint="set aggregation.tokens with aggregation.kind=constant, and only with it",
            )

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the weight of each token in the sum from the length of its sequence, above 0.

        Weights are float32, or float64 for float64 lengths.
        """
        import torch

        lengths = lengths.to(torch.promote_types(lengths.dtype, torch.float32))
        return lengths.reciprocal() if self.kind == "sequence_mean" else torch.ones_like(lengths)

    def divisor(self, counts: Counts) -> int:
        """Return the divisor of the weighted sum over a minibatch."""
        return {
            "token_mean": counts.tokens,
            "sequence_mean": counts.sequences,
            "constant": counts.sequences * self.tokens,
        }[self.kind]
