"""Corrects the mismatch between the engine that sampled tokens and the policy before a batch's first update."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, get_args

from forge_rl.algorithms.kl import MAX_LOG_RATIO
from forge_rl.algorithms.protocol import LossInputs, Scope, Sum
from forge_rl.algorithms.sequences import log_ratios, sequence_maxima, sequence_means, sequence_sums
from forge_rl.errors import ConfigError, check_flags

if TYPE_CHECKING:
    import torch

Proximal = Literal["behaviour", "recompute", "loglinear"]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["none", "truncate", "mask"]
_CRITERION = re.compile(r"(token|seq_sum|seq_mean|seq_max)_(k[123]):(?:([^_]+)_)?([^_]+)")


class RejectionCriterion(NamedTuple):
    """One criterion of `Correction.reject`."""

    level: str
    """token, seq_sum, seq_mean or seq_max."""
    kind: str
    """k1, k2 or k3."""
    low: float
    """Minimum of the estimate."""
    high: float
    """Maximum of the estimate."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """How a policy loss treats that the engine's policy is not the trainer's: by weights, and by rejection.

        ClippedSurrogate(correction=Correction.presets["tis"])
        Correction(proximal="recompute", mode="truncate", high=2.0, reject="seq_mean_k1:0.99_1.01+token_k3:0.1")

    The engine's policy differs by its version and by its numerics. With a proximal policy, that before the batch's
    first update, a loss's own ratio is to this policy, and the surrogate of each token is multiplied by a weight for
    the step from the engine to it: decoupled PPO, as in AReaL (arXiv 2505.24298). Levels, modes and criteria are those
    of verl's rollout correction; a sequence is an episode. Neither weights nor rejection change the mean's divisor, or
    a KL penalty or entropy bonus.
    """

    presets: ClassVar[Mapping[str, Correction]] = {}
    """Corrections by name, for `--loss NAME:correction=PRESET`."""

    proximal: Proximal = "behaviour"
    """Policy that the loss's ratio is to. behaviour: the engine's. recompute: the policy before the batch's first
    update, for one more forward pass over the batch. loglinear: without this pass, its logprobs are interpolated
    between the engine's and the current ones by the versions of the three policies, as by AReaL's prox_logp_method of
    that name; see `loglinear`."""
    mode: Mode = "none"
    """Weight of a token's surrogate, the ratio of the proximal policy to the engine's. none: 1. truncate: the ratio, at
    least `low` and at most `high`. mask: the ratio, or 0 if it is out of these bounds."""
    level: Level = "token"
    """Ratio for the weight. token: the token's. sequence: the product over the sequence. geometric: its geometric
    mean."""
    low: float = 0.0
    """Minimum of the weight."""
    high: float = math.inf
    """Maximum of the weight."""
    reject: str = ""
    """Criteria that a token must meet, else it has no surrogate: LEVEL_KIND:BOUND, joined by +, as
    seq_mean_k1:0.999_1.001+token_k3:0.1. KIND is an estimate of the divergence of the engine's policy from the proximal
    one, or without it from the current one: with d the trainer's logprob less the engine's, k1 is -d, k2 d^2 / 2 and k3
    exp(d) - 1 - d. LEVEL is token, seq_sum, seq_mean or seq_max; a sequence is rejected as a whole. For k1, BOUND is
    LOW_HIGH, bounds of exp(k1), or HIGH alone for 1/HIGH_HIGH; for k2 and k3, it is a maximum."""

    def __post_init__(self) -> None:
        check_flags(self, "correction.", minimum={"low": 0}, maximum={"low": self.high}, above={"high": 0})
        for name, choices in (("proximal", Proximal), ("mode", Mode), ("level", Level)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise ConfigError(
                    f"correction.{name} is {value!r}", hint=f"set correction.{name} to {', '.join(get_args(choices))}"
                )
        if self.mode != "none" and self.proximal == "behaviour":
            raise ConfigError(
                f"correction.mode {self.mode} has no effect while correction.proximal is behaviour",
                hint="set correction.proximal to recompute or loglinear, or leave correction.mode out",
            )
        if self.mode == "none" and (self.level, self.low, self.high) != ("token", 0, math.inf):
            raise ConfigError(
                "correction.level, low and high have no effect while correction.mode is none",
                hint="set correction.mode to truncate or mask",
            )
        _ = self.criteria

    @property
    def criteria(self) -> Sequence[RejectionCriterion]:
        """Criteria that `reject` names.

        Raises:
            ConfigError: it is malformed.
        """
        return [_criterion(text) for text in self.reject.split("+")] if self.reject else []

    @property
    def acts(self) -> bool:
        """Whether the factor of a token may differ from 1."""
        return self.mode != "none" or bool(self.criteria)

    @property
    def scope(self) -> Scope:
        by_sequence = self.level != "token" or any(criterion.level != "token" for criterion in self.criteria)
        return "episode" if by_sequence else ""

    def old_logprobs(self, tokens: LossInputs) -> torch.Tensor:
        """Return the logprobs of the policy that ratios are to, [L], without gradient.

        Raises:
            ConfigError: they are interpolated, and the version of the current policy is unknown.
        """
        # No proximal policy: ratios are to the engine's, and there is nothing to weight.
        if self.proximal == "behaviour":
            return tokens.behaviour
        if self.proximal == "recompute":
            assert tokens.proximal is not None, "needs has proximal"
            return tokens.proximal
        if tokens.version is None:
            raise ConfigError(
                "correction.proximal is loglinear, and the trainer's weights were not published before this batch",
                hint="publish after each batch, or set correction.proximal to recompute",
            )
        return loglinear(tokens.logprobs.detach(), tokens.behaviour, tokens.versions, tokens.version)

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        """Compute the weights and rejections that depend on whole sequences; see `Loss.statistics`."""
        statistics = {}
        if self.level != "token":
            reduce_sequence = sequence_sums if self.level == "sequence" else sequence_means
            statistics["correction_weight"] = reduce_sequence(
                log_ratios(self.old_logprobs(tokens), tokens.behaviour), tokens
            )
        criteria = [criterion for criterion in self.criteria if criterion.level != "token"]
        if criteria:
            statistics["correction_rejected"] = self._rejected(criteria, tokens)
        return statistics

    def weights(
        self, inputs: LossInputs, old: torch.Tensor, behaviour: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Sum]]:
        """Return the factor of each token's surrogate, and sums for metrics.

        Args:
            inputs: the row; its mask may have fewer tokens than are trained.
            old: [L], the logprobs of `old_logprobs`; 0 where the mask is False.
            behaviour: [L], the engine's; 0 where the mask is False.

        Returns:
            [L], 0 where rejected. The sums are "correction/weight" and "correction/ess" (effective sample size over all
            tokens), with weights "correction/out_of_bounds" (tokens), and with criteria "correction/rejected" (tokens).
            There are none without both.
        """
        mask, sums = inputs.mask, dict[str, Sum]()
        factor = old.new_ones(old.shape)
        if self.mode != "none":
            # log of the ratio of the proximal policy to the engine's, by token or as a number for the sequence.
            log_weight = old - behaviour if self.level == "token" else inputs.statistics["correction_weight"]
            weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            bounded = weight.clamp(self.low, self.high)
            out_of_bounds = weight != bounded
            # Truncated at the bounds, or, with mask, 0 beyond them.
            factor = bounded if self.mode == "truncate" else bounded.where(~out_of_bounds, 0.0)
            sums["correction/out_of_bounds"] = (mask & out_of_bounds).sum()
        # Criteria over whole sequences were decided in `statistics`, which sees all of their rows.
        criteria = [criterion for criterion in self.criteria if criterion.level == "token"]
        if self.criteria:
            is_rejected = self._rejected(criteria, inputs) if criteria else mask.new_zeros(mask.shape)
            if len(criteria) < len(self.criteria):
                is_rejected = is_rejected | inputs.statistics["correction_rejected"]
            factor = factor.where(~is_rejected, 0.0)
            sums["correction/rejected"] = (mask & is_rejected).sum()
        if sums:
            token_weights = factor.where(mask, 0.0)
            sums |= {
                "correction/weight": token_weights.sum(),
                "correction/ess": (token_weights.sum(), token_weights.square().sum(), mask.sum()),
            }
        return factor, sums

    def _rejected(self, criteria: Sequence[RejectionCriterion], tokens: LossInputs) -> torch.Tensor:
        """Return which tokens do not meet one of the criteria, [L] bool."""
        trainer_logprobs = tokens.logprobs.detach() if self.proximal == "behaviour" else self.old_logprobs(tokens)
        difference = log_ratios(trainer_logprobs, tokens.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # difference = log(trainer / engine) at tokens that the engine sampled; k1 to k3 estimate KL(engine || trainer).
        kinds = {"k1": -difference, "k2": difference.square() / 2, "k3": difference.expm1() - difference}
        reducers = {"token": _same, "seq_sum": sequence_sums, "seq_mean": sequence_means, "seq_max": sequence_maxima}
        is_rejected = tokens.mask.new_zeros(tokens.mask.shape)
        for criterion in criteria:
            estimate = reducers[criterion.level](kinds[criterion.kind], tokens)
            is_rejected = is_rejected | (estimate < criterion.low) | (estimate > criterion.high)
        return is_rejected


def _criterion(text: str) -> RejectionCriterion:
    """Read one criterion of `Correction.reject`."""
    match = _CRITERION.fullmatch(text.strip())
    try:
        bounds = [float(bound) for bound in (match[3], match[4]) if bound is not None] if match else []
    except ValueError:
        bounds = []
    is_k1 = match is not None and match[2] == "k1"
    is_valid = bool(bounds) and 0 < bounds[0] <= bounds[-1] and len(bounds) <= 1 + is_k1
    if match is None or not is_valid or (is_k1 and (match[1] == "seq_max" or bounds[-1] < 1 > len(bounds) - 1)):
        raise ConfigError(
            f"correction.reject has {text!r}",
            hint="write LEVEL_KIND:BOUND, as seq_mean_k1:0.999_1.001, token_k3:0.1 or seq_max_k2:2, joined by +",
        )
    if not is_k1:
        return RejectionCriterion(match[1], match[2], -math.inf, bounds[0])
    # Bounds of k1 are given for exp(k1); one alone is symmetric about 1.
    low = bounds[0] if len(bounds) == 2 else 1 / bounds[0]
    return RejectionCriterion(match[1], match[2], math.log(low), math.log(bounds[-1]))


def loglinear(logprobs: torch.Tensor, behaviour: torch.Tensor, versions: torch.Tensor, version: float) -> torch.Tensor:
    """Approximate the logprobs of the policy before the batch's first update without a forward pass, [L].

    They are behaviour + a * (logprobs - behaviour), with a = (proximal - sampled) / (current - sampled), where
    proximal, sampled and current are versions: AReaL's loglinear (its documentation, "Proximal Log-Probability
    Approximation"). The fraction of the current version is the share of the batch's updates that are done, so that the
    first update has a = 1, which is exact. AReaL counts the current policy as one version after the proximal one in all
    updates.

    Args:
        logprobs: [L], the current policy's.
        behaviour: [L], the engine's.
        versions: [L], that sampled the tokens.
        version: the current policy's; the proximal policy's is its whole part.
    """
    # The whole part is the version before the batch's first update; the fraction, the share of its updates that are
    # done.
    proximal = math.floor(version)
    lag = (version - versions).clamp(min=0).to(logprobs.dtype)
    # Tokens of the current version itself: both ends are the same policy.
    share = ((proximal - versions).to(logprobs.dtype) / lag).where(lag > 0, 1.0).clamp(0.0, 1.0)
    interpolated: torch.Tensor = behaviour + share * (logprobs - behaviour)
    return interpolated


def _same(values: torch.Tensor, tokens: LossInputs) -> torch.Tensor:
    return values


Correction.presets = MappingProxyType(
    {
        "none": Correction(),
        "decoupled": Correction(proximal="recompute", mode="mask", high=5.0),
        "loglinear": Correction(proximal="loglinear", mode="mask", high=5.0),
        "tis": Correction(proximal="recompute", mode="truncate", high=2.0),
        "icepop": Correction(proximal="recompute", mode="mask", low=0.5, high=5.0),
        "mis": Correction(proximal="recompute", mode="mask", level="sequence", high=3.0),
        "sequence_tis": Correction(proximal="recompute", mode="truncate", level="sequence", high=2.0),
        "sequence_masked_tis": Correction(
            proximal="recompute", mode="truncate", level="sequence", high=2.0, reject="seq_sum_k1:0.5_2.0"
        ),
        "geometric": Correction(proximal="recompute", reject="seq_mean_k1:0.999_1.001"),
        "geometric_tis": Correction(proximal="recompute", mode="truncate", high=2.0, reject="seq_mean_k1:0.999_1.001"),
    }
)
