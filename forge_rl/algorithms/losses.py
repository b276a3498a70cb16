"""Losses over trained tokens: sums, which the caller divides by the token count of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from forge_rl.algorithms.kl import MAX_LOG_RATIO, kl_estimate, kl_penalty
from forge_rl.errors import ConfigError


class Loss(Protocol):
    """Sums a loss over one row's tokens. Must pickle: it is sent to the trainer's ranks.

    class Reinforce:
        needs_reference = False

        def __call__(self, logprobs, behaviour, advantages, mask, reference=None):
            loss = -torch.where(mask, logprobs * advantages, 0.0).sum()
            return loss, {"tokens": mask.sum().float()}
    """

    @property
    def needs_reference(self) -> bool:
        """True if the trainer must hold a frozen reference; groups with equal rewards then have a gradient too."""
        ...

    def __call__(
        self,
        logprobs: torch.Tensor,
        behaviour: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        reference: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Sum the loss over the tokens where mask is True.

        All tensors are [N] or [R, L] and aligned: entry t of each is about the same token, the target of position t.

        Args:
            logprobs: float32, the policy's, with gradient.
            behaviour: float32, the engine's when it sampled the token.
            advantages: float32, of the token's episode.
            mask: bool, True where the token is trained. Values elsewhere are arbitrary, even NaN.
            reference: float32, the frozen reference's, or None when there is no reference.

        Returns:
            The summed loss, a float32 scalar with gradient, and sums for metrics, detached float32 scalars. The caller
            divides both by the trained tokens of the whole batch, over all rows and ranks, so that neither the split
            into microbatches nor the number of ranks changes the gradient.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate:
    """Token-level clipped surrogate, with an optional KL penalty to a frozen reference.

        stats = await run.trainer.step(packed, ClippedSurrogate(clip_high=0.2, kl_coef=0.01))

    The loss of a token is -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * penalty, where
    r = exp(logprobs - behaviour) is taken over the engine's own logprobs: PPO (arXiv 1707.06347) equation 7, with the
    group's advantages of GRPO (arXiv 2402.03300) equation 3, and clip-higher and token-level normalisation of DAPO
    (arXiv 2503.14476) equations 10 and 12. The logarithm of r is clamped to +-20, so that no ratio overflows.
    """

    clip_low: float = 0.2
    """A ratio below 1 - clip_low earns no more gradient when the advantage is negative."""
    clip_high: float = 0.28
    """A ratio above 1 + clip_high earns no more gradient when the advantage is positive."""
    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference; 0 needs no reference."""
    kl_kind: Literal["k2", "k3"] = "k2"
    """Form of the KL penalty: k2, or k3 times the importance ratio."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ConfigError(f"clip_low is {self.clip_low}", hint="set --loss.clip-low between 0 and 1")
        for name, value in (("clip_high", self.clip_high), ("kl_coef", self.kl_coef)):
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value}", hint=f"set --loss.{name.replace('_', '-')} to 0 or more")
        if self.kl_kind not in ("k2", "k3"):
            raise ConfigError(f"kl_kind is {self.kl_kind!r}", hint="set --loss.kl-kind to k2 or k3")
        if self.kl_kind != "k2" and not self.kl_coef:
            raise ConfigError(
                f"kl_kind {self.kl_kind} has no effect while kl_coef is 0",
                hint="set --loss.kl-coef above 0, or leave --loss.kl-kind out",
            )

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    def __call__(
        self,
        logprobs: torch.Tensor,
        behaviour: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        reference: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See Loss.__call__. The sums are "tokens", "surrogate" (the loss without its KL penalty), "ratio", "clipped"
        (tokens whose gradient the clip removed) and, when there is a reference, "kl" (k3's estimate).

        Raises:
            ConfigError: kl_coef is above 0 and there is no reference.
        """
        if self.needs_reference and reference is None:
            raise ConfigError(
                f"kl_coef is {self.kl_coef} and there is no reference",
                hint="give the trainer a frozen reference, or set --loss.kl-coef 0",
            )
        for other in (behaviour, advantages, mask, logprobs if reference is None else reference):
            assert other.shape == logprobs.shape, f"shapes differ: {list(other.shape)}, {list(logprobs.shape)}"
        # where comes before exp: a masked inf or NaN must reach neither the sum nor, as 0 * inf, the gradient.
        logprobs, behaviour, advantages = (torch.where(mask, x, 0.0) for x in (logprobs, behaviour, advantages))
        ratio = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
        loss = surrogate.sum()
        lost = ((advantages > 0) & (ratio > 1 + self.clip_high)) | ((advantages < 0) & (ratio < 1 - self.clip_low))
        sums = {
            "tokens": mask.sum(),
            "surrogate": loss,
            "ratio": torch.where(mask, ratio, 0.0).sum(),
            "clipped": lost.sum(),
        }
        if reference is not None:
            reference = torch.where(mask, reference, 0.0)
            sums["kl"] = kl_estimate(logprobs.detach(), reference, "k3").sum()
            if self.needs_reference:
                loss = loss + self.kl_coef * kl_penalty(logprobs, reference, ratio, self.kl_kind).sum()
        return loss, {name: value.detach().to(torch.float32) for name, value in sums.items()}
