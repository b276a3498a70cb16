"""Policy losses that choose tokens by the whole minibatch: M2PO, Clip-Cov and KL-Cov."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge_rl.algorithms.kl import MAX_LOG_RATIO
from forge_rl.algorithms.losses import ClippedSurrogate, PolicyLoss, clipped_surrogate, importance_ratio
from forge_rl.algorithms.protocol import FlagNames, LossInputs, Scope
from forge_rl.algorithms.sequences import log_ratios
from forge_rl.errors import check_flags
from forge_rl.system.seeds import derive_seed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class M2po(PolicyLoss):
    """M2PO: drops the few tokens that make the second moment of the log ratio too large, and clips none.

        loss: rl.M2po = field(default_factory=rl.M2po)  # in a recipe's Config

    The loss of a token is -r * A, and 0 if it is dropped. Of the minibatch's tokens that the update would move further
    away (A > 0 and r > 1, or A < 0 and r < 1), those with the largest log(r)^2 are dropped until the mean of the others
    is at most `m2_bound`: M2PO (arXiv 2510.01161) algorithm 1 and equation 5. AReaL bounds the mean over all tokens
    instead, and the authors' code turns the bound into a clip of r. The sum "clipped" counts dropped tokens.
    """

    flag_names: ClassVar[FlagNames] = {"m2po": {}}
    m2_bound: float = 0.04
    """Maximum of the mean of log(r)^2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, self.flag, above={"m2_bound": 0})

    @property
    def scope(self) -> Scope:
        return "minibatch"

    @property
    def keeps_uniform(self) -> bool:
        # A token with an advantage of 0 is never one that moves away: only the statistics of options need it.
        has_gradient = self.kl_coef > 0 or self.entropy_coef > 0
        return has_gradient or self.measures_uniform or self.top_entropy_quantile < 1

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        log_ratio = log_ratios(tokens.logprobs, self.old_logprobs(tokens)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # Equal signs: the update would move these tokens further away.
        candidates = (log_ratio * tokens.advantages > 0).nonzero()[:, 0]
        squares, order = log_ratio[candidates].double().square().sort(stable=True)
        # In ascending order, means[i] is that of the i + 1 smallest, and grows with i: what is above the bound is a
        # tail.
        means = squares.cumsum(0) / (squares.new_ones(len(squares)).cumsum(0))
        dropped_indices = candidates[order[means > self.m2_bound]]
        return {**super().statistics(tokens), "dropped": _only(dropped_indices, tokens)}

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        is_dropped = inputs.mask & inputs.statistics["dropped"]
        losses = -importance_ratio(logprobs, old) * advantages
        return losses.where(~is_dropped, 0.0), {"clipped": is_dropped.sum()}


@dataclass(frozen=True, kw_only=True)
class ClipCov(ClippedSurrogate):
    """Clip-Cov: the clipped surrogate, in which a few tokens that lower the entropy most have no gradient.

        loss: rl.ClipCov = field(default_factory=rl.ClipCov)  # in a recipe's Config

    A token's covariance is (A - mean of A) * (logprob - mean of logprobs), with means over the minibatch's trained
    tokens. Of those that are not clipped and whose covariance is between `cov_low` and `cov_high`, as many as the share
    `cov_ratio` of all tokens, at least one, are chosen at random and have a loss of 0: arXiv 2505.22617, equations 10
    to 12, and verl's clip_cov. The choice depends on the batch alone, not on its layout over rows and ranks. The sum
    "cov_clipped" counts the tokens chosen, which "clipped" includes.
    """

    flag_names: ClassVar[FlagNames] = {"clip_cov": {}}
    cov_ratio: float = 2e-4
    """Share of the tokens to choose."""
    cov_low: float = 1.0
    """Covariance above which a token may be chosen."""
    cov_high: float = 5.0
    """Covariance below which a token may be chosen."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high have no gradient if the advantage is positive."""
    dual_clip: float = math.inf
    """As in `ClippedSurrogate`; off by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, self.flag, above={"cov_ratio": 0, "cov_high": self.cov_low}, maximum={"cov_ratio": 1})

    @property
    def scope(self) -> Scope:
        return "minibatch"

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        import torch

        ratio = log_ratios(tokens.logprobs, self.old_logprobs(tokens)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        # Clipped tokens have no gradient already, and would be wasted choices.
        _, is_clipped = clipped_surrogate(ratio, tokens.advantages, self.clip_low, self.clip_high)
        covariance = _covariance(tokens)
        candidates = ((covariance > self.cov_low) & (covariance < self.cov_high) & ~is_clipped).nonzero()[:, 0]
        # Seeded by what every rank knows, in whatever layout: another batch or minibatch has another choice.
        seed = derive_seed(int(tokens.versions.max()), "token choice", len(tokens.mask))
        generator = torch.Generator().manual_seed(seed)
        choice = torch.randperm(len(candidates), generator=generator)[: _at_least_one(self.cov_ratio, tokens)]
        return {**super().statistics(tokens), "chosen": _only(candidates[choice.to(candidates.device)], tokens)}

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        losses, sums = super().token_losses(logprobs, old, advantages, inputs)
        is_chosen = inputs.mask & inputs.statistics["chosen"]
        return losses.where(~is_chosen, 0.0), {
            **sums,
            "clipped": sums["clipped"] + is_chosen.sum(),
            "cov_clipped": is_chosen.sum(),
        }


@dataclass(frozen=True, kw_only=True)
class KlCov(PolicyLoss):
    """KL-Cov: importance weights without a clip, and a penalty on the few tokens that lower the entropy most.

        loss: rl.KlCov = field(default_factory=rl.KlCov)  # in a recipe's Config

    The loss of a token is -r * A, plus `penalty` * |log r| for the share `cov_ratio` of the minibatch's tokens, at
    least one, that have the largest positive covariance of advantage and logprob, as `ClipCov` defines it: arXiv
    2505.22617, equations 13 and 14, and verl's kl_cov. Unlike in verl, tokens with an advantage of 0 have no penalty.
    The sum "penalised" counts the tokens chosen.
    """

    flag_names: ClassVar[FlagNames] = {"kl_cov": {}}
    cov_ratio: float = 2e-4
    """Share of the tokens to choose; 2e-3 for a model of 7B parameters and 2e-4 for 32B in the paper."""
    penalty: float = 1.0
    """Weight of the penalty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(
            self,
            self.flag,
            above={"cov_ratio": 0},
            maximum={"cov_ratio": 1},
            minimum={"penalty": 0},
            below={"penalty": math.inf},
        )

    @property
    def scope(self) -> Scope:
        return "minibatch"

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        covariance = _covariance(tokens).where(tokens.advantages != 0, 0.0)
        order = covariance.sort(descending=True, stable=True).indices[: _at_least_one(self.cov_ratio, tokens)]
        # With few positive covariances, the share may reach into others, which are not penalised.
        return {**super().statistics(tokens), "chosen": _only(order, tokens) & (covariance > 0)}

    def token_losses(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, inputs: LossInputs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of each token; see `PolicyLoss.token_losses`."""
        is_chosen = inputs.mask & inputs.statistics["chosen"]
        penalty = self.penalty * (logprobs - old).abs().where(is_chosen, 0.0)
        return -importance_ratio(logprobs, old) * advantages + penalty, {"penalised": is_chosen.sum()}


def _covariance(tokens: LossInputs) -> torch.Tensor:
    """Return the product of each token's deviations from the mean advantage and the mean logprob, [N] float64."""
    # `log_ratios` to 0 is the logprob itself, with NaN and infinities made finite.
    advantages, logprobs = tokens.advantages.double(), log_ratios(tokens.logprobs, 0 * tokens.logprobs).double()
    covariance: torch.Tensor = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
    return covariance


def _at_least_one(share: float, tokens: LossInputs) -> int:
    return max(1, int(share * len(tokens.mask)))


def _only(indices: torch.Tensor, tokens: LossInputs) -> torch.Tensor:
    """Return a mask that is True at these indices, [N] bool."""
    mask: torch.Tensor = tokens.mask.new_zeros(len(tokens.mask)).index_fill(0, indices, True)
    return mask
