"""Generalized advantage estimation: advantages and value targets of tokens, from a critic's values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forge_rl.algorithms.returns import TokenValues, discounted, flat, split, whitened
from forge_rl.errors import ConfigError, check_flags


@dataclass(frozen=True, kw_only=True)
class GaeConfig:
    """Discounts of generalized advantage estimation.

    GaeConfig(lambda_policy=0.95, lambda_critic=0.95)  # PPO
    GaeConfig(length_adaptive_alpha=0.05)  # VAPO
    """

    gamma: float = 1.0
    """Discount of a reward per token of delay."""
    lambda_policy: float = 0.95
    """Decay of temporal differences in advantages: 0 trusts the values, 1 the rewards."""
    lambda_critic: float = 1.0
    """The same for value targets; with 1 they are returns, which no error of the values can bias (decoupled GAE,
    VC-PPO, arXiv 2503.01491, and VAPO, arXiv 2504.05118, section 4.1)."""
    length_adaptive_alpha: float = 0.0
    """If above 0, lambda_policy is 1 - 1 / (alpha * l) for an episode of l tokens, and 0 where that is negative
    (length-adaptive GAE, VAPO, arXiv 2504.05118, section 4.2, with 0.05)."""
    whiten: bool = True
    """Whether advantages are whitened over all tokens of the batch. Value targets never are."""

    def __post_init__(self) -> None:
        shares = ("gamma", "lambda_policy", "lambda_critic")
        check_flags(self, "--gae.", minimum=dict.fromkeys((*shares, "length_adaptive_alpha"), 0))
        check_flags(self, "--gae.", maximum=dict.fromkeys(shares, 1))
        if self.length_adaptive_alpha and self.lambda_policy != type(self).lambda_policy:
            raise ConfigError(
                f"--gae.lambda-policy {self.lambda_policy:g} has no effect, as --gae.length-adaptive-alpha "
                f"{self.length_adaptive_alpha:g} replaces it",
                hint="leave out one of them",
            )


def gae(
    values: TokenValues, rewards: TokenValues, config: GaeConfig | None = None
) -> tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]]]:
    """Estimate advantages and value targets of all tokens of a batch.

        advantages, targets = gae(values, token_rewards(batch.episodes), config.gae)
        packed = pack(batch, by_group(batch, advantages), run.trainer.layout)

    With V the value before a token is sampled, r its reward, and delta[t] = r[t] + gamma V[t + 1] - V[t], the
    advantage is the sum over i of (gamma lambda)^i delta[t + i] (arXiv 1506.02438, equation 16), and a value's target
    is V plus the advantage under `lambda_critic`. Token t + 1 is the next that the model generated: values, discounts
    and temporal differences skip observations, as in verl. Values after an episode's last token are 0, also if it was
    truncated.

    Whitening subtracts the mean over the batch's tokens and divides by sqrt(variance + 1e-8), as in verl. Episodes
    without a score, which batches of a run do not have, must be left out, or their rewards count as 0.

    Args:
        values: of each episode, [T].
        rewards: of each episode, [T].

    Returns:
        Advantages and targets of each episode, [T] float32.

    Raises:
        ConfigError: values and rewards differ in number or shape, or are not finite.
    """
    config = config or GaeConfig()
    lengths = np.array([len(episode_values) for episode_values in values], np.int64)
    value, reward = flat(values, lengths, "values"), flat(rewards, lengths, "rewards")
    # All episodes lie one after the other; the value after each one's last token is 0.
    next_value = np.append(value[1:], 0.0)[: len(value)]
    next_value[np.cumsum(lengths[lengths > 0]) - 1] = 0.0
    delta = reward + config.gamma * next_value - value
    decay = np.full(len(lengths), config.lambda_policy)
    if config.length_adaptive_alpha:
        # At least 1, so that the shortest episodes get a decay of 0 and not a negative one.
        decay = 1 - 1 / np.maximum(config.length_adaptive_alpha * lengths, 1)
    advantages = discounted(delta, lengths, config.gamma * decay)
    targets = value + discounted(delta, lengths, config.gamma * config.lambda_critic)
    if config.whiten:
        advantages = whitened(advantages)
    return split(advantages.astype(np.float32), lengths), split(targets.astype(np.float32), lengths)
