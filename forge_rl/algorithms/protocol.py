"""Interface of losses: their inputs from a packed row and its minibatch, and their results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from forge_rl.algorithms.aggregation import Aggregation, Counts

if TYPE_CHECKING:
    import torch

Need: TypeAlias = Literal["reference", "proximal", "entropy_gradient", "squares", "observations", "values"]
"""An input that costs something, and is only computed for a loss that asks for it.

reference: logprobs of a frozen reference. proximal: logprobs before the batch's first update, one more forward pass per
batch. entropy_gradient: `LossInputs.entropy` has a gradient. squares: `LossInputs.squares`. observations: observation
tokens are scored, too. values: the trainer has a value model in place of a policy.
"""
FlagNames: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Names of a loss in `--loss`, each with the defaults in which it differs from the class."""
Scope: TypeAlias = Literal["", "episode", "group", "minibatch"]
"""Tokens over which a loss needs statistics; "" for none."""
_SCOPES: tuple[Scope, ...] = ("", "episode", "group", "minibatch")
Sum: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
"""A sum over trained tokens; a sum and the count to divide it by; or, for an effective sample size, the sum of weights,
of their squares, and their count; scalars without gradient."""
_NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


def widest(*scopes: Scope) -> Scope:
    """Return the scope that contains the others: `widest("episode", "minibatch")` is "minibatch"."""
    return max(scopes, key=_SCOPES.index)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """One packed row as a loss sees it.

    All tensors are [L] and aligned: entry t of each belongs to the same token, the target of position t. Values where
    mask is False are arbitrary, even NaN. float32 tensors are float64 if the trainer computes in float64.
    """

    logprobs: torch.Tensor
    """float32, the policy's logprobs, with gradient."""
    behaviour: torch.Tensor
    """float32, the engine's logprobs when it sampled the tokens."""
    advantages: torch.Tensor
    """float32, advantages of the tokens."""
    weights: torch.Tensor
    """float32, weight of each token's loss in the sum; see `Aggregation.weights`."""
    mask: torch.Tensor
    """bool, True where the token is trained."""
    versions: torch.Tensor
    """int32, version of the weights that produced the token."""
    episodes: torch.Tensor
    """int32, index into batch.episodes of the token's episode."""
    turns: torch.Tensor
    """int32, index of the token's turn within its episode."""
    segments: torch.Tensor
    """int32, index of the token's segment within its episode. The tokens of a segment all lie in the same row."""
    lengths: torch.Tensor
    """int32, number of trained tokens of the token's episode, over all rows."""
    counts: Counts
    """Counts of the minibatch, over all rows and ranks."""
    group_size: int = 1
    """Episodes per group: the token's group is episodes // group_size."""
    sources: tuple[str, ...] = ()
    """Source of each of the batch's groups."""
    entropy: torch.Tensor | None = None
    """float32, entropy of the policy's distribution of the token, in nats; with gradient for "entropy_gradient"."""
    squares: torch.Tensor | None = None
    """float32, sum of the squared probabilities of that distribution, without gradient; None unless needed."""
    reference: torch.Tensor | None = None
    """float32, the frozen reference's logprobs; None unless needed."""
    proximal: torch.Tensor | None = None
    """float32, logprobs of the policy before the batch's first update; None unless needed."""
    values: torch.Tensor | None = None
    """float32 with gradient, a value model's output where the token is predicted, so V of the state before it;
    `logprobs` and `entropy` are then 0. None of a policy."""
    observed: torch.Tensor | None = None
    """bool, True where the token is an observation: the environment's, between two turns of an episode. There
    `logprobs` and `entropy` are valid, too, and `episodes` is set; None unless needed."""
    top_logprobs: torch.Tensor | None = None
    """[L, k] float32 with gradient, the policy's logprobs of the tokens in the column "top_ids"; None without it."""
    version: float | None = None
    """Version of the policy: that published last, plus the share of the batch's updates that are done; None if it was
    not published before the batch."""
    columns: Mapping[str, torch.Tensor] = field(default_factory=lambda: _NOTHING)
    """Values that the recipe gave `pack` for each token, by name: [L], or [L, k]."""
    statistics: Mapping[str, torch.Tensor] = field(default_factory=lambda: _NOTHING)
    """Results of `Loss.statistics` by name: [L] each, or a scalar."""

    @property
    def groups(self) -> torch.Tensor:
        """int, [L], index of each token's group in the batch."""
        return self.episodes // self.group_size

    def per_token(self) -> dict[str, Any]:
        """Return the tensors that have an entry for each token, by field name."""
        return {name: value for name, value in vars(self).items() if hasattr(value, "ndim")}

    def at(self, selection: torch.Tensor | slice) -> LossInputs:
        """Return these tokens only, without gradient; `selection` is a mask or indices, or a slice, without a copy."""
        columns = {name: value[selection] for name, value in self.columns.items()}
        tensors: dict[str, Any] = {name: value.detach()[selection] for name, value in self.per_token().items()}
        return replace(self, **tensors, columns=columns)

    def check(self) -> None:
        """Assert that all tensors are aligned."""
        for name, tensor in (self.per_token() | dict(self.columns)).items():
            assert tensor.shape[:1] == self.mask.shape, f"{name} has shape {list(tensor.shape)}"


class Loss:
    """Sums a loss over one row's tokens. Must be picklable: the trainer ranks receive it.

    class Reinforce(rl.Loss):
        def __call__(self, inputs):
            loss = -inputs.weights * inputs.logprobs * inputs.advantages
            return torch.where(inputs.mask, loss, 0.0).sum(), {}
    """

    flag_names: ClassVar[FlagNames] = {}
    """Names by which `--loss` knows this class itself, each with the defaults in which it differs from the class's; a
    subclass is not known by them."""
    aggregation: Aggregation = Aggregation()
    """Mean that reduces token losses to one number."""

    @property
    def needs(self) -> Collection[Need]:
        """Inputs to compute for this loss; by default none of them."""
        return ()

    @property
    def columns(self) -> Mapping[str, int]:
        """Columns that the recipe must give `pack` for this loss, with the k of [L, k], or 0 for [L]."""
        return {}

    @property
    def scope(self) -> Scope:
        """Tokens over which `statistics` is computed.

        This takes a first forward pass over the minibatch for "minibatch", and for "episode" or "group" only if one of
        them lies in several rows.
        """
        return ""

    @property
    def equal_metric(self) -> str:
        """Name of the metric that always equals this loss, and so is reported as `loss` alone; "" if there is none."""
        return ""

    @property
    def keeps_uniform(self) -> bool:
        """True unless the loss can spare groups whose advantages are all 0: these tokens have no gradient, and
        `statistics` of other tokens does not depend on them.

        That saves time and changes no number, as they count in the mean. By default, nothing is spared; a loss that
        returns False is checked on a small row before a run starts.
        """
        return True

    def divisor(self, counts: Counts) -> float:
        """Return the divisor of the sum over a minibatch."""
        return self.aggregation.divisor(counts)

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        """Compute the quantities that the loss of a token needs from other tokens, without gradient.

        Args:
            tokens: the trained tokens of at least each episode, group or minibatch concerned, in the order of the
                batch, [N]; the mask is True for all of them. The same on all ranks.

        Returns:
            For each name [N], or a scalar; `LossInputs.statistics` has the row's own part.
        """
        return {}

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        """Sum the weighted loss over the tokens where mask is True.

        Returns:
            The sum, a scalar with gradient, and unweighted sums for metrics, detached scalars. The caller divides the
            former by `divisor` of all rows and ranks, so that neither the split into microbatches nor the number of
            ranks changes the gradient, and the latter by the number of trained tokens, or a count of their own. A
            metric whose name ends in "/max" is a maximum instead, merged as such.
        """
        raise NotImplementedError
