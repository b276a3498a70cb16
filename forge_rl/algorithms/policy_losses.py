"""Policy losses other than the clipped surrogate: each is the function of a token's loss, and its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.kl import MAX_LOG_RATIO
from forge_rl.algorithms.losses import PolicyLoss, clipped_surrogate, importance_ratio
from forge_rl.algorithms.protocol import FlagNames, LossInputs, Scope, widest
from forge_rl.algorithms.sequences import log_ratios, sequence_means, sequence_sums
from forge_rl.errors import ConfigError, check_flags

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Cispo(PolicyLoss):
    """CISPO: REINFORCE with a truncated importance weight, so that no token loses its gradient.

        loss: rl.Cispo = field(default_factory=rl.Cispo)  # in a recipe's Config

    The loss of a token is -min(r, ratio_max) * A * logprob, where the weight has no gradient: MiniMax-M1 (arXiv
    2506.13585) equation 4, without a lower bound, as there. The sum "clipped" counts tokens whose weight was truncated.
    """

    flag_names: ClassVar[FlagNames] = {"cispo": {}}
    ratio_max: float = 5.0
    """Maximum of the importance weight: 1 + epsilon_high in the paper; 4 to 8 in ScaleRL (arXiv 2510.13786)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, self.flag, above={"ratio_max": 0})

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        ratio = importance_ratio(logprobs.detach(), old)
        truncated = (advantages != 0) & (ratio > self.ratio_max)
        # The ratio is detached: the gradient is the weight's times A, by the logprob alone.
        return -ratio.clamp(max=self.ratio_max) * advantages * logprobs, {"clipped": truncated.sum()}


@dataclass(frozen=True, kw_only=True)
class Dppo(PolicyLoss):
    """DPPO: a trust region by the change of a token's probability instead of the ratio.

        loss: rl.Dppo = field(default_factory=rl.Dppo)  # in a recipe's Config

    With p and q the probabilities of the token under the policy and under the old one, a token has no gradient if the
    update would move it further away (A > 0 and p > q, or A < 0 and p < q) and its binary divergence is above
    `threshold`: |p - q| (tv), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (kl). Other tokens have the loss
    -min(r, ratio_max) * A * logprob, where the weight has no gradient (arXiv 2602.04879). A ratio's clip is tight for
    rare tokens and loose for common ones; this is neither. The sum "clipped" counts tokens without gradient.
    """

    flag_names: ClassVar[FlagNames] = {
        "dppo": {},
        "dppo_kl": {"divergence": "kl", "threshold": 0.05},
    }
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence between the two policies, as far as this token tells: total variation, or KL."""
    threshold: float = 0.15
    """Divergence above which a token has no gradient; 0.05 suits kl."""
    ratio_max: float = 20.0
    """Maximum of the importance weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, self.flag, above={"threshold": 0, "ratio_max": 0}, below={"threshold": math.inf})
        if self.divergence not in ("tv", "kl"):
            raise ConfigError(f"divergence is {self.divergence!r}", hint="set divergence to tv or kl")

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        detached = logprobs.detach()
        p, q = detached.exp(), old.exp()
        if self.divergence == "tv":
            divergence = (p - q).abs()
        else:  # 1e-8 as in verl: the other tokens' probability may round to 0
            other_p, other_q = (1 - p).clamp(min=0) + 1e-8, (1 - q).clamp(min=0) + 1e-8
            # KL of two coins: this token, or any other.
            divergence = q * (old - detached) + (1 - q) * (other_q / other_p).log()
        # A token that moves back towards the old policy keeps its gradient, however far away it is.
        is_diverging = ((advantages > 0) & (p > q)) | ((advantages < 0) & (p < q))
        is_clipped = is_diverging & (divergence > self.threshold)
        losses = -importance_ratio(detached, old).clamp(max=self.ratio_max) * advantages * logprobs
        return losses.where(~is_clipped, 0.0), {"clipped": is_clipped.sum()}


@dataclass(frozen=True, kw_only=True)
class Sapo(PolicyLoss):
    """SAPO: a soft gate in place of the clip; a token's gradient fades as its ratio leaves 1.

        loss: rl.Sapo = field(default_factory=rl.Sapo)  # in a recipe's Config

    The loss of a token is -sigmoid(tau * (r - 1)) * 4 / tau * A, with one tau for positive and one for other
    advantages (arXiv 2511.20347); its gradient at r = 1 is -A, as without a gate. The paper averages over tokens and
    then over sequences: aggregation.kind=sequence_mean.
    """

    flag_names: ClassVar[FlagNames] = {"sapo": {"aggregation": Aggregation(kind="sequence_mean")}}
    tau_positive: float = 1.0
    """Steepness of the gate for positive advantages."""
    tau_negative: float = 1.05
    """Steepness of the gate for other advantages; above tau_positive, gradients of bad answers fade sooner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {"tau_positive": math.inf, "tau_negative": math.inf}
        check_flags(self, self.flag, above=dict.fromkeys(limits, 0), below=limits)

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        # [L], one of the two by the sign of A; 0 counts as negative.
        tau = (advantages > 0).to(advantages.dtype) * (self.tau_positive - self.tau_negative) + self.tau_negative
        # sigmoid'(0) = 1/4, so the factor 4 / tau makes the slope at r = 1 the advantage itself.
        return -(tau * (importance_ratio(logprobs, old) - 1)).sigmoid() * 4 / tau * advantages, {}


def _sequence_mean() -> Aggregation:
    return Aggregation(kind="sequence_mean")


@dataclass(frozen=True, kw_only=True)
class Gspo(PolicyLoss):
    """GSPO: the clipped surrogate with one ratio per sequence, the geometric mean of its tokens' ratios.

        loss: rl.Gspo = field(default_factory=rl.Gspo)  # in a recipe's Config

    With s = exp(mean of logprob - old over a sequence, see `sequence_sums`), the loss of a token is
    -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A), where the gradient by a token's logprob is its own alone:
    GSPO-token (arXiv 2507.18071) equation 13, which is GSPO (equation 5) if a sequence's tokens have one advantage. The
    sum "clipped" counts tokens without gradient.
    """

    flag_names: ClassVar[FlagNames] = {
        "gspo": {},
        "luspo": {"aggregation": Aggregation(kind="constant", tokens=1)},
    }
    clip_low: float = 3e-4
    """Sequence ratios below 1 - clip_low have no gradient if the advantage is negative."""
    clip_high: float = 4e-4
    """Sequence ratios above 1 + clip_high have no gradient if the advantage is positive."""
    aggregation: Aggregation = field(default_factory=_sequence_mean)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(
            self,
            self.flag,
            minimum={"clip_low": 0, "clip_high": 0},
            maximum={"clip_low": 1},
            below={"clip_high": math.inf},
        )

    @property
    def scope(self) -> Scope:
        return widest(super().scope, "episode")

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        log_ratio = log_ratios(tokens.logprobs, self.old_logprobs(tokens))
        # [N], log of the geometric mean of the ratios in each token's sequence.
        return {**super().statistics(tokens), "log_ratio": sequence_means(log_ratio, tokens)}

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        # [L], each token has the mean of its sequence, as a number; the gradient is added below.
        mean = inputs.statistics["log_ratio"].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = mean.exp() * (logprobs - logprobs.detach()).exp()
        losses, is_clipped = clipped_surrogate(ratio, advantages, self.clip_low, self.clip_high)
        return losses, {"clipped": is_clipped.sum()}


@dataclass(frozen=True, kw_only=True)
class Gmpo(PolicyLoss):
    """GMPO: the geometric mean of a sequence's clipped token ratios, which outliers move less than the mean.

        loss: rl.Gmpo = field(default_factory=rl.Gmpo)  # in a recipe's Config

    The loss of every token of a sequence (see `sequence_sums`) is -A * exp(mean of c), where c is logprob - old,
    at most clip if A is positive and at least -clip if A is negative, and a token's logprob has the gradient of its own
    c alone: GMPO (arXiv 2507.20673) equation 4 if a sequence's tokens have one advantage. The sum "clipped" counts
    tokens without gradient.
    """

    flag_names: ClassVar[FlagNames] = {"gmpo": {}}
    clip: float = 0.4
    """Bound of a token's log ratio."""
    aggregation: Aggregation = field(default_factory=_sequence_mean)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, self.flag, above={"clip": 0}, below={"clip": math.inf})

    @property
    def scope(self) -> Scope:
        return widest(super().scope, "episode")

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        log_ratio, _ = self._clipped(tokens.logprobs, self.old_logprobs(tokens), tokens.advantages)
        return {**super().statistics(tokens), "log_ratio": sequence_means(log_ratio, tokens)}

    def _clipped(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the clipped log ratios, and where they have no gradient."""
        log_ratio = log_ratios(logprobs, old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        is_clipped = ((advantages > 0) & (log_ratio > self.clip)) | ((advantages < 0) & (log_ratio < -self.clip))
        return log_ratio.where(~is_clipped, self.clip * advantages.sign()), is_clipped

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        log_ratio, is_clipped = self._clipped(logprobs, old, advantages)
        # Value 1, gradient of this token's clipped log ratio.
        straight_through = 1 + log_ratio - log_ratio.detach()
        return -advantages * inputs.statistics["log_ratio"].exp() * straight_through, {"clipped": is_clipped.sum()}


@dataclass(frozen=True, kw_only=True)
class Topr(PolicyLoss):
    """TOPR: good answers are imitated as they are, bad ones only as far as the policy still gives them.

        loss: rl.Topr = field(default_factory=rl.Topr)  # in a recipe's Config

    The loss of a token is -w * A * logprob, where w has no gradient: 1 if A is positive, and otherwise the probability
    ratio of the whole sequence (see `sequence_sums`), at most 1: TOPR (arXiv 2503.14286). A bad answer that the policy
    has become unlikely to give has no influence, so tokens may be very stale. The sum "weight" adds up w.
    """

    flag_names: ClassVar[FlagNames] = {"topr": {}}

    @property
    def scope(self) -> Scope:
        return widest(super().scope, "episode")

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        log_ratio = log_ratios(tokens.logprobs, self.old_logprobs(tokens))
        return {**super().statistics(tokens), "log_ratio": sequence_sums(log_ratio, tokens)}

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        # [L], the sequence's probability ratio, at most 1, for negative advantages; 1 for others.
        weight = inputs.statistics["log_ratio"].clamp(max=0.0).exp().where(advantages < 0, 1.0)
        return -weight * advantages * logprobs, {"weight": weight.where(inputs.mask, 0.0).sum()}


@dataclass(frozen=True, kw_only=True)
class Vespo(PolicyLoss):
    """VESPO: the ratio of the whole sequence, softly reshaped, as the weight of its tokens.

        loss: rl.Vespo = field(default_factory=rl.Vespo)  # in a recipe's Config

    The loss of a token is -w * A * logprob, where w = W^k * exp(lambda * (1 - W)) has no gradient, W is the probability
    ratio of the whole sequence (see `sequence_sums`), not normalised by its length, and k and lambda depend on the sign
    of A: VESPO (arXiv 2602.10693, appendix I). w is 1 on-policy, is largest at W = k / lambda, and fades on both sides.
    As in the authors' code and in TRL, the log ratios of tokens are clamped to +-20, and log W to [log 1e-8, 20]. The
    sum "weight" adds up w.
    """

    flag_names: ClassVar[FlagNames] = {"vespo": {}}
    k_positive: float = 2.0
    """Exponent for advantages of at least 0: the higher, the less do sequences count that became unlikely."""
    lambda_positive: float = 3.0
    """Decay for advantages of at least 0: the higher, the less do sequences count that became likelier."""
    k_negative: float = 3.0
    """Exponent for negative advantages."""
    lambda_negative: float = 2.0
    """Decay for negative advantages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
        check_flags(self, self.flag, minimum=dict.fromkeys(names, 0), below=dict.fromkeys(names, math.inf))

    @property
    def scope(self) -> Scope:
        return widest(super().scope, "episode")

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        log_ratio = log_ratios(tokens.logprobs, self.old_logprobs(tokens)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return {**super().statistics(tokens), "log_ratio": sequence_sums(log_ratio, tokens)}

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        log_ratio = inputs.statistics["log_ratio"].clamp(math.log(1e-8), MAX_LOG_RATIO)
        # log w = k log W + lambda (1 - W), where expm1 of log W is W - 1.
        positive = (self.k_positive * log_ratio - self.lambda_positive * log_ratio.expm1()).exp()
        negative = (self.k_negative * log_ratio - self.lambda_negative * log_ratio.expm1()).exp()
        weight = negative.where(advantages < 0, positive)
        return -weight * advantages * logprobs, {"weight": weight.where(inputs.mask, 0.0).sum()}


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyLoss):
    """REINFORCE: the loss of a token is -A * logprob, without a ratio to any other policy.

        loss: rl.Reinforce = field(default_factory=rl.Reinforce)  # in a recipe's Config

    The gradient is right only for tokens of the policy itself. This is also the loss of GPG (arXiv 2504.02546,
    equation 4).
    """

    flag_names: ClassVar[FlagNames] = {"reinforce": {}}

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        return -advantages * logprobs, {}
