"""Losses of pairs, a preferred and another answer: DPO and IPO for a policy, Bradley-Terry for a reward model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.protocol import Loss, LossInputs, Need, Scope, Sum
from forge_rl.errors import ConfigError, check_flags

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(Loss):
    """Common part of losses of pairs: each group is the preferred episode and the other one.

    A method is a subclass with two functions: `terms`, which sum up to the score of an episode, and `pair_losses` of
    two scores. The loss is the mean over the minibatch's pairs, wherever their tokens lie. Advantages do not matter.
    The metrics rewards/chosen, /rejected and /margin are mean scores and their difference; rewards/accuracy is the
    share of pairs whose preferred episode has the higher score.
    """

    def terms(self, inputs: LossInputs) -> torch.Tensor:
        """Return each token's part of its episode's score, [L] with gradient; anything where mask is False."""
        raise NotImplementedError

    def pair_losses(self, chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair from the scores of its episodes, [pairs] each, with gradient."""
        raise NotImplementedError

    @property
    def scope(self) -> Scope:
        return "group"

    @property
    def keeps_uniform(self) -> bool:
        return True

    def divisor(self, counts: Counts) -> float:
        return counts.sequences / 2

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        """Compute, for each token, the loss and scores of its pair, and the derivative by its own episode's score."""
        import torch

        if tokens.group_size != 2:
            raise ConfigError(
                f"the batch has groups of {tokens.group_size}, not pairs", hint="give start() preference_episodes"
            )
        pairs, pair = tokens.groups.unique(return_inverse=True)
        side = tokens.episodes.long() % 2
        # [N], index of the token's episode among all of the minibatch: chosen, rejected, chosen, ...
        place = 2 * pair + side
        scores = torch.zeros(2 * len(pairs), dtype=torch.float64, device=place.device)
        scores.index_add_(0, place, self.terms(tokens).double())
        # The scores have no graph of the model here, so the derivative of the loss by each score is computed now;
        # `__call__` multiplies it with the gradient of each token's term.
        with torch.enable_grad():
            chosen_scores, rejected_scores = (
                column.clone().requires_grad_() for column in scores.view(-1, 2).unbind(1)
            )
            losses = self.pair_losses(chosen_scores, rejected_scores)
            slopes = torch.stack(torch.autograd.grad(losses.sum(), [chosen_scores, rejected_scores]), 1)
        # One over the tokens of a pair, so that sums over tokens count each pair once.
        share = pair.bincount().double().reciprocal()
        statistics = {
            "loss": losses.detach()[pair],
            "slope": slopes.flatten()[place],
            "chosen": chosen_scores.detach()[pair],
            "rejected": rejected_scores.detach()[pair],
            "share": share[pair],
        }
        return {name: value.to(tokens.weights.dtype) for name, value in statistics.items()}

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        terms, statistics = self.terms(inputs).where(inputs.mask, 0.0), inputs.statistics
        # The value of the losses, each pair's spread over its tokens, with the gradient by each token.
        total = (statistics["loss"] * statistics["share"] + statistics["slope"] * (terms - terms.detach())).sum()
        share, margin = statistics["share"], statistics["chosen"] - statistics["rejected"]
        metrics = {
            "chosen": statistics["chosen"],
            "rejected": statistics["rejected"],
            "margin": margin,
            "accuracy": (margin > 0).to(margin.dtype),
        }
        return total, {f"rewards/{name}": ((value * share).sum(), share.sum()) for name, value in metrics.items()}


@dataclass(frozen=True, kw_only=True)
class Dpo(PreferenceLoss):
    """DPO: a policy learns to prefer one answer to another more than a frozen reference does.

        loss = rl.Dpo(beta=0.1)  # with rl.preference_episodes

    With m = beta * ((logp_c - ref_c) - (logp_r - ref_r)), of logprobs summed over the tokens of the chosen and the
    rejected episode, the loss of a pair is -log sigmoid(m): DPO (arXiv 2305.18290) equation 7. Label smoothing e makes
    it -(1 - e) log sigmoid(m) - e log sigmoid(-m), conservative DPO. Kind ipo is ((m / beta) - 1 / (2 beta))^2, IPO
    (arXiv 2310.12036) equation 17, with means over the tokens of an episode in place of sums, as in TRL.

    Tokens without a finite logprob count as equal to the reference.
    """

    beta: float = 0.1
    """Strength with which the policy is held to the reference."""
    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    """Loss of a pair's margin: DPO's or IPO's."""
    label_smoothing: float = 0.0
    """Probability that a preference is wrong; for kind sigmoid."""

    def __post_init__(self) -> None:
        check_flags(self, "--loss.", above={"beta": 0}, minimum={"label_smoothing": 0}, below={"label_smoothing": 0.5})
        if self.kind not in ("sigmoid", "ipo") or (self.kind == "ipo" and self.label_smoothing):
            raise ConfigError(
                f"--loss.kind is {self.kind!r}, with a --loss.label-smoothing of {self.label_smoothing:g}",
                hint="set --loss.kind to sigmoid, or to ipo without --loss.label-smoothing",
            )

    @property
    def needs(self) -> Collection[Need]:
        return frozenset[Need](("reference",))

    def terms(self, inputs: LossInputs) -> torch.Tensor:
        """Return beta times each token's log ratio to the reference; for ipo, divided by the episode's tokens."""
        assert inputs.reference is not None
        mask = inputs.mask & inputs.logprobs.isfinite() & inputs.reference.isfinite()
        ratios = self.beta * (inputs.logprobs.where(mask, 0.0) - inputs.reference.where(mask, 0.0))
        return ratios / inputs.lengths if self.kind == "ipo" else ratios

    def pair_losses(self, chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair; see `PreferenceLoss.pair_losses`."""
        import torch.nn.functional as F

        margin = chosen_scores - rejected_scores
        if self.kind == "ipo":
            return (margin / self.beta - 1 / (2 * self.beta)).square()
        return -(1 - self.label_smoothing) * F.logsigmoid(margin) - self.label_smoothing * F.logsigmoid(-margin)


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(PreferenceLoss):
    """Bradley-Terry: a value model learns to score a preferred answer above another one.

        loss = rl.BradleyTerry()  # with rl.comparison_episodes

    With r the value of an episode, the loss of a pair is -log sigmoid(r_c - r_r) + center * (r_c + r_r)^2: InstructGPT
    (arXiv 2203.02155) equation 1, and the regularisation of arXiv 2312.09244, which keeps scores near 0. An episode
    with several trained tokens has their mean as its value.
    """

    center: float = 0.0
    """Weight of the squared sum of a pair's scores; 0.01 in the paper and in TRL's examples."""

    def __post_init__(self) -> None:
        check_flags(self, "--loss.", minimum={"center": 0})

    @property
    def needs(self) -> Collection[Need]:
        return frozenset[Need](("values",))

    def terms(self, inputs: LossInputs) -> torch.Tensor:
        """Return each token's part of the mean value of its episode."""
        assert inputs.values is not None
        return inputs.values.where(inputs.mask, 0.0) / inputs.lengths

    def pair_losses(self, chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair; see `PreferenceLoss.pair_losses`."""
        import torch.nn.functional as F

        return -F.logsigmoid(chosen_scores - rejected_scores) + self.center * (chosen_scores + rejected_scores).square()
