"""Pure tensor functions: advantages, losses, logprobs and KL estimators."""

from forge_rl.algorithms.advantages import batch_advantages, group_advantages
from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.kl import kl_estimate, kl_penalty
from forge_rl.algorithms.logprobs import logprob_gap, token_logprobs, widened
from forge_rl.algorithms.losses import ClippedSurrogate, Loss, LossInputs

__all__ = [
    "Aggregation",
    "ClippedSurrogate",
    "Loss",
    "LossInputs",
    "batch_advantages",
    "group_advantages",
    "kl_estimate",
    "kl_penalty",
    "logprob_gap",
    "token_logprobs",
    "widened",
]
