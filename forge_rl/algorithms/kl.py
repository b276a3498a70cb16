"""KL divergence of the policy from a frozen reference: estimators, and penalties with the right gradient."""

from __future__ import annotations

from typing import Literal

import torch

from forge_rl.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to +-20 before exp: 5e8 is already absurd, and an overflow to inf turns gradients into NaN."""


def kl_estimate(
    logprobs: torch.Tensor, reference: torch.Tensor, kind: Literal["k1", "k2", "k3"] = "k3"
) -> torch.Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled: a value to report.

    With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1 (Schulman, "Approximating KL divergence",
    2020). k1 and k3 are unbiased, k2 and k3 are never negative. None is a loss as it stands: see kl_penalty.

    The policy's and the frozen reference's logprobs are float32 of any shape, as are the estimates.

    Raises:
        ConfigError: the kind is unknown.
    """
    difference = logprobs - reference
    match kind:
        case "k1":
            return difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            difference = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.expm1(-difference) + difference
    raise ConfigError(f"there is no KL estimator {kind!r}", hint='use "k1", "k2" or "k3"')


def kl_penalty(
    logprobs: torch.Tensor, reference: torch.Tensor, behaviour_ratio: torch.Tensor, kind: Literal["k2", "k3"]
) -> torch.Tensor:
    """Return a loss at each token, of the same shape, whose expected gradient is that of KL(policy || reference) there.

    "k2" is k2 alone. Its gradient (logprobs - reference) * grad logprobs is the KL's when the tokens come from the
    policy itself; under a lag it is slightly biased, but its variance stays small.

    "k3" is behaviour_ratio * k3, DeepSeek-V3.2 (arXiv 2512.02556) equation 7, right for tokens of any behaviour policy.
    The ratio must carry its gradient even where its value is 1, because the expectation depends on the policy through
    the ratio too. k3 without the ratio follows another divergence's gradient, and k1 has gradient 0 in expectation, so
    neither is offered: Tang and Munos, "On a few pitfalls in KL divergence gradient estimation for RL"
    (arXiv 2506.09477). The KL is that of the next token given its context; what the token does to later contexts is
    left out, as in every token-level penalty.

    Args:
        logprobs, reference: as for kl_estimate; logprobs with gradient.
        behaviour_ratio: exp(logprobs - behaviour), with gradient, same shape, float32.

    Raises:
        ConfigError: the kind is unknown.
    """
    if kind == "k2":
        return kl_estimate(logprobs, reference, "k2")
    if kind == "k3":
        return behaviour_ratio * kl_estimate(logprobs, reference, "k3")
    raise ConfigError(f"there is no KL penalty {kind!r}", hint='use "k2" or "k3"')
