"""Policy losses: their common part, the clipped surrogate, and functions that several methods share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.correction import Correction
from forge_rl.algorithms.kl import MAX_LOG_RATIO, kl_penalty
from forge_rl.algorithms.protocol import FlagNames, Loss, LossInputs, Need, Scope, Sum, widest
from forge_rl.algorithms.sequences import log_ratios, sequence_means
from forge_rl.errors import ConfigError, check_flags

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """Common part of policy losses: importance ratios, their correction, a KL penalty and an entropy bonus.

    A method is a subclass with one function, `token_losses`; `policy_losses` has several. The loss of a token is
    token_losses(...) + kl_coef * penalty - entropy_coef * entropy. Log ratios are clamped to +-20, so that no ratio
    overflows. A trained token with a logprob that is not finite has no loss, but counts in the mean.
    """

    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference; 0 needs no reference."""
    kl_kind: Literal["k2", "k3"] = "k2"
    """Form of the KL penalty: k2, or k3 times the importance ratio."""
    correction: Correction = field(default_factory=Correction)
    """Treatment of the mismatch between the engine and the trainer: the policy that ratios are to, weights of tokens,
    and rejection."""
    off_policy_bound: float = math.inf
    """Drop tokens with a negative advantage if the mean of behaviour - logprobs over their sequence (see
    `sequence_means`) is above this, as DeepSeek-V3.2 (arXiv 2512.02556, section 3.1) does; inf drops none."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus: the mean entropy of the tokens' distributions, averaged as the loss is, is
    subtracted from it. `AdaptiveEntropy` sets it from the entropy."""
    top_entropy_quantile: float = 1.0
    """Share of the minibatch's trained tokens, those with the highest entropy, that have a policy gradient; 0.2 in
    "Beyond the 80/20 Rule" (arXiv 2506.01939). As there and in TRL, the loss is still averaged over all tokens."""
    measures_uniform: bool = False
    """Compute groups of equal rewards even if they have no gradient, so that metrics are about all tokens."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __post_init__(self) -> None:
        check_flags(
            self,
            self.flag,
            minimum={"kl_coef": 0, "entropy_coef": 0},
            maximum={"top_entropy_quantile": 1},
            above={"off_policy_bound": 0, "top_entropy_quantile": 0},
            below={"kl_coef": math.inf, "entropy_coef": math.inf},
        )
        if self.kl_kind not in ("k2", "k3"):
            raise ConfigError(f"kl_kind is {self.kl_kind!r}", hint="set kl_kind to k2 or k3")
        if self.kl_kind != "k2" and not self.kl_coef:
            raise ConfigError(
                f"kl_kind {self.kl_kind} has no effect while kl_coef is 0",
                hint="set kl_coef above 0, or leave kl_kind out",
            )

    @property
    def flag(self) -> str:
        """Prefix of an option's name in errors; `build_loss` marks the option in the user's text instead."""
        return f"{type(self).__name__}("

    @property
    def needs(self) -> Collection[Need]:
        # Each of these costs a forward pass, or memory for a gradient, so it is asked for only where it counts.
        needs: dict[Need, bool] = {
            "reference": self.kl_coef > 0,
            "proximal": self.correction.proximal == "recompute",
            "entropy_gradient": self.entropy_coef > 0,
        }
        return [need for need, is_needed in needs.items() if is_needed]

    @property
    def keeps_uniform(self) -> bool:
        """True unless a token with an advantage of 0 has no part in the loss, nor in statistics of all tokens."""
        has_gradient = self.kl_coef > 0 or self.entropy_coef > 0
        return has_gradient or self.measures_uniform or self.scope == "minibatch"

    @property
    def scope(self) -> Scope:
        return widest(
            self.correction.scope,
            "episode" if self.off_policy_bound < math.inf else "",
            "minibatch" if self.top_entropy_quantile < 1 else "",
        )

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        statistics = dict(self.correction.statistics(tokens))
        if self.off_policy_bound < math.inf:
            statistics["off_policy"] = sequence_means(log_ratios(tokens.behaviour, tokens.logprobs), tokens)
        if self.top_entropy_quantile < 1:
            assert tokens.entropy is not None
            # [N] bool: the top share by entropy, over the whole minibatch.
            statistics["high_entropy"] = tokens.entropy >= quantile(tokens.entropy, 1 - self.top_entropy_quantile)
        return statistics

    def old_logprobs(self, tokens: LossInputs) -> torch.Tensor:
        """Return the logprobs that ratios are to; see `Correction.old_logprobs`."""
        return self.correction.old_logprobs(tokens)

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token.

        Args:
            logprobs: [L], the policy's, with gradient; 0 where a token is not trained, as in the others.
            old: [L], of the policy that ratios are to: the engine's, or the proximal one if there is a correction.
            advantages: [L].
            inputs: the row itself, for its mask and for the episode, segment and turn of each token.

        Returns:
            The losses, [L], which must be 0 where the advantage is 0, and sums for metrics.
        """
        raise NotImplementedError

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Sum]]:
        """Sum the loss; see Loss.__call__. The sums are "surrogate" (the loss without its KL penalty), "ratio", the
        method's own, the ones of `Correction.weights`, with an off_policy_bound "off_policy_masked" (tokens dropped for
        it), and "not_finite" (tokens left out as their logprobs are not finite).

        Raises:
            ConfigError: kl_coef is above 0 without a reference.
        """
        if self.kl_coef > 0 and inputs.reference is None:
            raise ConfigError(
                f"kl_coef is {self.kl_coef} and the trainer has no reference",
                hint="give the trainer a frozen reference, or set kl_coef=0",
            )
        inputs.check()
        is_finite = (inputs.logprobs.detach() - inputs.behaviour).abs() < math.inf  # in fewer operations than isfinite
        for other_logprobs in (inputs.reference, inputs.proximal):
            is_finite = is_finite if other_logprobs is None else is_finite & (other_logprobs.abs() < math.inf)
        mask, dtype = inputs.mask & is_finite, inputs.logprobs.dtype
        zero = inputs.logprobs.new_zeros(())  # a number would take a GPU an operation each time
        sums: dict[str, Sum] = {"not_finite": (inputs.mask ^ mask).sum(dtype=dtype)}
        # From here on, a token with a logprob that is not finite is one that is not trained.
        inputs = replace(inputs, mask=mask)

        def masked(values: torch.Tensor) -> torch.Tensor:
            # Apply where before exp: a masked inf or NaN must reach neither the sum nor, as 0 * inf, the gradient.
            return values.where(mask, zero)

        logprobs, behaviour, advantages = map(masked, (inputs.logprobs, inputs.behaviour, inputs.advantages))
        weights, old = masked(inputs.weights), masked(self.old_logprobs(inputs))
        factor, correction_sums = self.correction.weights(inputs, old, behaviour)
        losses, method_sums = self.token_losses(logprobs, old, advantages, inputs)
        if self.off_policy_bound < math.inf:
            is_dropped = mask & (advantages < 0) & (inputs.statistics["off_policy"] > self.off_policy_bound)
            losses = losses.where(~is_dropped, 0.0)
            sums["off_policy_masked"] = is_dropped.sum()
        if self.top_entropy_quantile < 1:
            losses = losses.where(inputs.statistics["high_entropy"], 0.0)
        # Correction and rejection act on the surrogate alone, not on the entropy bonus and KL penalty below.
        loss = ((weights * factor if self.correction.acts else weights) * losses).sum()
        ratio = masked(importance_ratio(logprobs.detach(), old))
        sums |= {"surrogate": losses.sum(), "ratio": ratio.sum(), **correction_sums, **method_sums}
        if self.entropy_coef > 0:
            assert inputs.entropy is not None, "needs has entropy_gradient"
            loss = loss - self.entropy_coef * (weights * masked(inputs.entropy)).sum()
        if self.kl_coef > 0 and inputs.reference is not None:
            # The ratio is to the engine, which sampled the tokens, whatever policy the surrogate's ratio is to.
            penalty = kl_penalty(logprobs, masked(inputs.reference), logprobs - behaviour, self.kl_kind)
            loss = loss + self.kl_coef * (weights * penalty).sum()
        return loss, {
            name: value if isinstance(value, tuple) else value.detach().to(logprobs.dtype)
            for name, value in sums.items()
        }


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(PolicyLoss):
    """Token-level clipped surrogate, with an optional KL penalty to a frozen reference.

        stats = await run.trainer.step(packed, ClippedSurrogate(clip_high=0.2, kl_coef=0.01))

    The loss of a token is -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * penalty, where
    r = exp(logprobs - behaviour) is relative to the engine's own logprobs: PPO (arXiv 1707.06347) equation 7, with the
    group's advantages of GRPO (arXiv 2402.03300) equation 3, and clip-higher of DAPO (arXiv 2503.14476) equation 10.
    For negative A, the first term is at most -dual_clip * A (arXiv 1912.09729, "dual-clip PPO").
    """

    flag_names: ClassVar[FlagNames] = {
        "clipped": {},
        "dapo": {"clip_high": 0.28},
        "grpo": {"clip_high": 0.2, "aggregation": Aggregation(kind="sequence_mean")},
        "high_entropy": {"top_entropy_quantile": 0.2},
        "ppo": {"clip_high": 0.2},
    }
    clip_low: float = 0.2
    """Ratios below 1 - clip_low have no gradient if the advantage is negative."""
    clip_high: float = 0.28
    """Ratios above 1 + clip_high have no gradient if the advantage is positive."""
    dual_clip: float = 3.0
    """Ratios above this have no gradient if the advantage is negative, where the loss would grow without bound; inf
    turns this off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(
            self,
            self.flag,
            minimum={"clip_low": 0, "clip_high": 0},
            maximum={"clip_low": 1},
            above={"dual_clip": 1},
            below={"clip_high": math.inf},
        )

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`. The sums are "clipped" (tokens whose gradient
        was clipped away), of which "clipped_high" by the upper bound, "clipped_low" by the lower one, and
        "dual_clipped" by the dual clip."""
        import torch

        ratio = importance_ratio(logprobs, old)
        is_high, is_low = clipped_sides(ratio, advantages, self.clip_low, self.clip_high)
        # Without this bound, -r * A has none for negative A: the ratio may grow as far as it likes.
        is_dual_clipped = (advantages < 0) & (ratio > self.dual_clip)
        is_clipped = is_high | is_low | is_dual_clipped
        bound = torch.where(
            is_dual_clipped, self.dual_clip, ratio.detach().clamp(1 - self.clip_low, 1 + self.clip_high)
        )
        # `bound` has no gradient, so a clipped token has none, while its loss keeps PPO's value.
        losses = -torch.where(is_clipped, bound, ratio) * advantages
        # One reduction for four counts, as each kernel takes a GPU the same time to start.
        counts = torch.stack([is_clipped, is_high, is_low, is_dual_clipped]).sum(dim=1, dtype=logprobs.dtype)
        return losses, dict(zip(("clipped", "clipped_high", "clipped_low", "dual_clipped"), counts, strict=True))


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -min(r * A, clip(r, 1 - low, 1 + high) * A), [L], and where its gradient is clipped away, [L] bool."""
    losses = -(ratio * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages)
    is_high, is_low = clipped_sides(ratio, advantages, low, high)
    return losses, is_high | is_low


def clipped_sides(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the gradient is clipped away by the upper bound, and by the lower one, [L] bool each."""
    return (advantages > 0) & (ratio > 1 + high), (advantages < 0) & (ratio < 1 - low)


def importance_ratio(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp(logprobs - other_logprobs) without overflow."""
    return (logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def quantile(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return the value below which a share of the values, [N], lies, interpolated as NumPy and TRL do; any N."""
    # [N]. `torch.quantile` refuses more than 16 million values.
    sorted_values = values.nan_to_num(nan=0.0).sort().values
    place = share * (len(sorted_values) - 1)
    low = int(place)
    return sorted_values[low].lerp(sorted_values[min(low + 1, len(sorted_values) - 1)], place - low)
