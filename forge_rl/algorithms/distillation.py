"""Distillation from a teacher: its logprobs as advantages, and divergences over its most likely tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from forge_rl.algorithms.advantages import batch_advantages
from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.kl import MAX_LOG_RATIO
from forge_rl.algorithms.losses import importance_ratio
from forge_rl.algorithms.protocol import FlagNames, Loss, LossInputs, Need
from forge_rl.errors import ConfigError, check_flags
from forge_rl.token_arrays import MOST_TOP
from forge_rl.types import Batch

if TYPE_CHECKING:
    import torch

_LEAST_LOGPROB = -50.0
"""Logprob of a token that has none: a divergence from a distribution without the token would be infinite."""
_TAIL_EPS = 16
"""Least probability of a tail, in units of the dtype's rounding: the error of 1 minus a sum of probabilities close to
1."""


def teacher_advantages(
    batch: Batch,
    teacher: Sequence[Sequence[npt.NDArray[np.float32]]],
    *,
    coef: float = 1.0,
    reward_coef: float = 0.0,
) -> list[list[npt.NDArray[np.float32]]]:
    """Return coef * (teacher's logprob - policy's logprob) for each token, [P][G] arrays [T]: on-policy distillation.

    With tokens from the policy, the policy gradient with these advantages is the gradient of -KL(policy || teacher) at
    each token, given its context; its effect on later contexts is ignored, as in "On-Policy Distillation" (Lu et al.,
    Thinking Machines, 2025), a discount of 0. Differences are clamped to +-20. They are 0 for tokens without a finite
    logprob of the teacher or of the policy.

    Args:
        teacher: logprob of each token that the episode generated, turn after turn, at the temperature of the rollout;
            [P][G] arrays [T].
        coef: factor of the differences.
        reward_coef: factor of the rewards' group-relative advantages, see `batch_advantages`, which are added.
    """
    rewards = batch_advantages(batch) if reward_coef else None
    advantages = []
    for p, (group, group_teacher) in enumerate(zip(batch.groups, teacher, strict=True)):
        rows = []
        for g, (episode, teacher_logprobs) in enumerate(zip(group.episodes, group_teacher, strict=True)):
            # [T], in the order of the turns, as are the teacher's.
            policy_logprobs = np.concatenate([turn.logprobs for turn in episode.turns] or [np.zeros(0, np.float32)])
            mask = np.isfinite(teacher_logprobs) & np.isfinite(policy_logprobs)
            difference = np.where(mask, teacher_logprobs, 0) - np.where(mask, policy_logprobs, 0)
            total = coef * difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            if rewards is not None:
                total = total + reward_coef * np.asarray(rewards[p][g])
            rows.append(total.astype(np.float32))
        advantages.append(rows)
    return advantages


@dataclass(frozen=True, kw_only=True)
class Distillation(Loss):
    """Divergence between policy and teacher at each token, over the teacher's k most likely tokens and one bucket for
    all others.

        loss = Distillation(k=20, beta=0.5)
        columns = {"top_ids": ..., "top_teacher": ...}  # for `pack`: [T, k] int32, and float32 logprobs

    With P the teacher's distribution, Q the policy's and M = beta P + (1 - beta) Q, the loss of a token is the
    generalised Jensen-Shannon divergence beta KL(P || M) + (1 - beta) KL(Q || M): GKD (arXiv 2306.13649) section 2. At
    its ends, where that is 0, it is KL(P || Q) for beta 0, and KL(Q || P) for beta 1. With k the size of the vocabulary
    this is exact; else it is a lower bound, as merging tokens into a bucket lowers a divergence.

    Tokens whose teacher's logprobs are NaN have no loss, and are counted as "unscored". A teacher's logprob below -50,
    such as for a token that it excludes, counts as -50. The sums are "divergence", "tail" (the policy's probability
    of the tail) and "unscored", and "ratio_capped" with a ratio_max.

    Raises:
        ConfigError: when called, the batch was packed without those columns.
    """

    flag_names: ClassVar[FlagNames] = {"distill": {}}
    k: int = 20
    """Number of the teacher's most likely tokens; SDPO (arXiv 2601.20802) has 100."""
    beta: float = 1.0
    """0: forward KL, which covers everything the teacher does. 1: reverse KL, which keeps to its likeliest tokens.
    Between them, the divergence above; SDPO has 0.5."""
    clip: float = math.inf
    """Maximum of the term of a single entry of the vocabulary, which has no gradient above it, so that few tokens of
    style do not outweigh all others; OPSD (arXiv 2601.18734, version 3) has 0.05. The sum of clipped terms may be
    negative."""
    ratio_max: float = 0.0
    """Weight each token by the ratio of the policy to the engine that sampled it, at most this, for several updates on
    the same tokens; SDPO has 2. 0 gives all tokens the weight 1."""
    aggregation: Aggregation = field(default_factory=Aggregation)

    def __post_init__(self) -> None:
        check_flags(
            self,
            "Distillation(",
            minimum={"k": 1, "beta": 0, "ratio_max": 0},
            maximum={"k": MOST_TOP, "beta": 1},
            above={"clip": 0},
        )

    @property
    def needs(self) -> Collection[Need]:
        return ()

    @property
    def columns(self) -> Mapping[str, int]:
        return {"top_ids": self.k, "top_teacher": self.k}

    @property
    def keeps_uniform(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        import torch

        if inputs.top_logprobs is None or "top_teacher" not in inputs.columns:
            raise ConfigError(
                "the batch has no scores of a teacher", hint="give pack the columns top_ids and top_teacher"
            )
        inputs.check()
        top_teacher = inputs.columns["top_teacher"].to(inputs.logprobs.dtype)
        # [L], as the teacher's logprobs are [L, k].
        is_missing = top_teacher.isnan().any(dim=1)
        mask = inputs.mask & ~is_missing
        # Apply where before exp: a masked inf or NaN must reach neither the sum nor, as 0 * inf, the gradient.
        # Masked tokens get some valid distribution: k entries of 1 / (2k), and a tail of one half.
        filler = torch.full_like(top_teacher, -math.log(2 * self.k))
        teacher = with_tail(top_teacher.clamp(min=_LEAST_LOGPROB).where(mask[:, None], filler))
        top_policy = inputs.top_logprobs.where(inputs.top_logprobs.isfinite(), _LEAST_LOGPROB)
        policy = with_tail(top_policy.where(mask[:, None], filler))
        terms = divergence_terms(teacher, policy, self.beta)
        divergence = terms.clamp(max=self.clip).sum(dim=1).where(mask, 0.0)
        weights = inputs.weights.where(mask, 0.0)
        sums = {
            "divergence": divergence.sum(),
            "tail": policy[:, -1].exp().where(mask, 0.0).sum(),
            "unscored": (inputs.mask & is_missing).sum(),
        }
        if self.ratio_max:
            ratio = importance_ratio(inputs.logprobs.detach().where(mask, 0.0), inputs.behaviour.where(mask, 0.0))
            weights = weights * ratio.clamp(max=self.ratio_max)
            sums["ratio_capped"] = (mask & (ratio > self.ratio_max)).sum()
        return (weights * divergence).sum(), {name: value.detach() for name, value in sums.items()}


def with_tail(top: torch.Tensor) -> torch.Tensor:
    """Append to the logprobs of k tokens the logprob of all others: [L, k] -> [L, k + 1].

    The tail is 1 - sum(exp(top)), computed by expm1, but at least 16 roundings of the dtype, as that is how far the sum
    may be off. The bounded tail keeps the gradient of the sum, without which a policy could not leave the top k.
    """
    import torch

    # 1 - exp(x) loses all digits for x near 0, where the top k have nearly all of the probability.
    tail = -torch.expm1(top.logsumexp(dim=1, keepdim=True))
    bounded_tail = tail.detach().clamp(min=_TAIL_EPS * torch.finfo(top.dtype).eps)
    # The value of `bounded_tail` with the gradient of `tail`.
    return torch.cat([top, (tail + (bounded_tail - tail.detach())).log()], dim=1)


def divergence_terms(teacher: torch.Tensor, policy: torch.Tensor, beta: float) -> torch.Tensor:
    """Return each entry's term of the divergence of `Distillation`, [L, n], from the logprobs of n entries, [L, n]."""
    import torch

    if beta in (0, 1):
        # KL(P || Q) for beta 0, KL(Q || P) for beta 1.
        first, second = (teacher, policy) if beta == 0 else (policy, teacher)
        return first.exp() * (first - second)
    # log M, with M = beta P + (1 - beta) Q.
    mixed = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * teacher.exp() * (teacher - mixed) + (1 - beta) * policy.exp() * (policy - mixed)
