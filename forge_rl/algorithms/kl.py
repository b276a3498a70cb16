"""KL divergence of the policy from a frozen reference: estimators, and penalties with correct gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forge_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before exp: exp(20) is already 5e8, and an overflow to inf makes gradients NaN."""
MAX_PENALTY_LOG_RATIO = 3.0
"""Log ratios of a penalty are clamped to 3 before exp: ratios up to 20 are unchanged, and one token on which the
policies disagree cannot outweigh the rest of a batch."""


def kl_estimates(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Estimate KL(policy || other) at each token that the policy sampled, as metrics, by k1, k2 and k3.

    With d = logprobs - other_logprobs, clamped to +-20, k1 = d is unbiased and may be negative, k2 = d^2 / 2 is biased
    and has little variance, and k3 = exp(-d) + d - 1 is unbiased and never negative (Schulman, "Approximating KL
    divergence", 2020). As losses, k1 and k3 have wrong gradients: see kl_penalty.

    Both logprobs are float32 of the same, arbitrary shape, as are the estimates.
    """
    return estimates((logprobs - other_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def estimates(difference: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `kl_estimates` of clamped differences."""
    return {"k1": difference, "k2": difference.square() / 2, "k3": (-difference).expm1() + difference}


def kl_penalty(
    logprobs: torch.Tensor, reference: torch.Tensor, log_ratio: torch.Tensor, kind: Literal["k2", "k3"]
) -> torch.Tensor:
    """Return a loss per token, of the same shape, whose expected gradient is the gradient of KL(policy || reference).

    "k2" is (logprobs - reference)^2 / 2. Its gradient (logprobs - reference) * grad logprobs equals the KL's if the
    tokens come from the policy itself; with lag it is slightly biased, but its variance stays small.

    "k3" is exp(log_ratio) * k3, DeepSeek-V3.2 (arXiv 2512.02556) equation 7, correct for tokens of any behaviour
    policy. The ratio is at most exp(MAX_PENALTY_LOG_RATIO); if the logprobs of policy and reference differ by more than
    MAX_PENALTY_LOG_RATIO, k3 continues along its tangent. The ratio must carry its gradient even where its value is 1,
    because the expectation depends on the policy through the ratio too. k3 without the ratio has another divergence's
    gradient, and k1, logprobs - reference, has gradient 0 in expectation, so neither is offered: Tang and Munos, "On a
    few pitfalls in KL divergence gradient estimation for RL" (arXiv 2506.09477). The KL is of the next token given its
    context; the token's effect on later contexts is ignored, as in every token-level penalty.

    Args:
        logprobs: the policy's, of any shape, float32 with gradient.
        reference: the frozen reference's, same shape.
        log_ratio: logprobs - behaviour, with gradient, same shape, float32.

    Raises:
        ConfigError: the kind is unknown.
    """
    difference = logprobs - reference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        # k3 within the bounds, its tangent beyond.
        bounded = difference.clamp(-MAX_PENALTY_LOG_RATIO, MAX_PENALTY_LOG_RATIO)
        slope = 1 - (-bounded).exp()  # slope of the tangent, which still pulls distant tokens back
        k3 = (-bounded).expm1() + bounded + slope * (difference - bounded)
        return log_ratio.clamp(max=MAX_PENALTY_LOG_RATIO).exp() * k3
    raise ConfigError(f"unknown KL penalty {kind!r}", hint='use "k2" or "k3"')
