"""Losses made of others: a sum of named components, and a loss for each source; and components of such sums."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.protocol import Loss, LossInputs, Need, Scope, Sum, widest
from forge_rl.errors import ConfigError
from forge_rl.flags.texts import suggest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _NamedLosses(Loss):
    """Several losses by name, with all of their needs."""

    losses: Mapping[str, Loss]

    def __post_init__(self) -> None:
        if not self.losses:
            raise ConfigError("a sum of no losses", hint="give at least one")
        for name, loss in self.losses.items():
            if not isinstance(loss, Loss):
                raise ConfigError(f"{name!r} is a {type(loss).__name__}, not a loss", hint="give a subclass of rl.Loss")

    @property
    def needs(self) -> Collection[Need]:
        return frozenset(need for loss in self.losses.values() for need in loss.needs)

    @property
    def columns(self) -> Mapping[str, int]:
        return {name: k for loss in self.losses.values() for name, k in loss.columns.items()}

    @property
    def scope(self) -> Scope:
        return widest(*(loss.scope for loss in self.losses.values()))

    @property
    def keeps_uniform(self) -> bool:
        return any(loss.keeps_uniform for loss in self.losses.values())

    def divisor(self, counts: Counts) -> float:
        return 1.0  # each loss has been divided by its own divisor

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        return {
            f"{name}/{key}": value
            for name, loss in self.losses.items()
            if loss.scope
            for key, value in loss.statistics(tokens).items()
        }

    def _call(self, name: str, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, Sum]]:
        """Call one loss; returns this row's part of its mean over the minibatch, and its sums for metrics."""
        loss, start = self.losses[name], f"{name}/"
        statistics = {
            key.removeprefix(start): value for key, value in inputs.statistics.items() if key.startswith(start)
        }
        # Each loss keeps its own mean, whatever that of the sum would be.
        weights = loss.aggregation.weights(inputs.lengths.to(inputs.logprobs.dtype))
        total, sums = loss(replace(inputs, weights=weights, statistics=statistics))
        return total / loss.divisor(inputs.counts), {f"{start}{key}": value for key, value in sums.items()}


@dataclass(frozen=True)
class LossSum(_NamedLosses):
    """A weighted sum of named losses, each with its own mean, so that none dilutes another.

        LossSum({"policy": Cispo(), "entropy": Entropy()}, {"entropy": -0.01})

    A component's metrics are named after it, as in "policy/clipped".
    """

    coefficients: Mapping[str, float] = field(default_factory=dict)
    """Factor of each component; 1 where absent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, coefficient in self.coefficients.items():
            if name not in self.losses or not math.isfinite(coefficient):
                raise ConfigError(
                    f"the coefficient {name!r} is {coefficient}",
                    hint=f"give a finite number to one of {', '.join(self.losses)}",
                )

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        total, sums = inputs.logprobs.new_zeros(()), dict[str, Sum]()
        for name in self.losses:
            mean, loss_sums = self._call(name, inputs)
            total = total + self.coefficients.get(name, 1.0) * mean
            sums |= loss_sums
        return total, sums


@dataclass(frozen=True)
class LossBySource(_NamedLosses):
    """A loss for each source of the mixture, and one, "", for all other sources.

        LossBySource({"math": ClippedSurrogate(), "": Cispo()})

    A source's tokens count in the mean of their loss as they would if all sources had it: with the same loss for each,
    this is that loss. Statistics are computed over the source's tokens alone.
    """

    def check_sources(self, sources: Collection[str]) -> None:
        """Check that each of a mixture's sources has a loss, and each loss a source.

        Raises:
            ConfigError: it has not.
        """
        for name in (name for name in self.losses if name and name not in sources):
            raise ConfigError(f"--loss {name}=...: no source is called {name}", hint=suggest(name, sources, "sources"))
        for name in (name for name in sources if not {name, ""} & self.losses.keys()):
            raise ConfigError(
                f"the source {name} has no loss", hint=f"add --loss {name}=..., or one without a source for all others"
            )

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        # A product with the logprobs, so that the sum has a gradient even if no loss has a token in this row.
        total, sums = 0.0 * inputs.logprobs.where(inputs.mask, 0.0).sum(), dict[str, Sum]()
        for name in self.losses:
            source_mask = self._of(name, inputs)
            # A loss need not cope with a row without tokens.
            if not source_mask.any():
                continue
            observed = None if inputs.observed is None else inputs.observed & source_mask
            mean, loss_sums = self._call(name, replace(inputs, mask=inputs.mask & source_mask, observed=observed))
            total = total + mean
            count = (inputs.mask & source_mask).sum()
            for key, value in loss_sums.items():
                # The trainer divides plain sums by all tokens; a source's are divided by its own.
                is_sum = not isinstance(value, tuple) and not key.endswith("/max")
                sums[key.removeprefix("/")] = cast("Sum", (value, count) if is_sum else value)
        return total, sums

    def statistics(self, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
        statistics: dict[str, torch.Tensor] = {}
        for name, loss in self.losses.items():
            mask = self._of(name, tokens)
            if not loss.scope or not mask.any():
                continue
            for key, value in loss.statistics(tokens.at(mask)).items():
                # [N] again, with 0 for tokens of other sources.
                spread = (
                    value.new_zeros(len(mask), *value.shape[1:]).masked_scatter(mask, value) if value.ndim else value
                )
                statistics[f"{name}/{key}"] = spread
        return statistics

    def _of(self, name: str, inputs: LossInputs) -> torch.Tensor:
        """Return which tokens belong to sources of the loss called `name`, [L] bool."""
        import torch

        is_covered = [source == name or (name == "" and source not in self.losses) for source in inputs.sources]
        # The last entry is for tokens of no episode, whose group is -1.
        lookup = torch.tensor([*is_covered, False], device=inputs.mask.device)
        return lookup[inputs.groups.long().clamp(min=-1)]


@dataclass(frozen=True, kw_only=True)
class Entropy(Loss):
    """The mean entropy of the policy's distributions, as a component with a negative coefficient: an entropy bonus."""

    @property
    def needs(self) -> Collection[Need]:
        return ["entropy_gradient"]

    @property
    def keeps_uniform(self) -> bool:
        return True

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        assert inputs.entropy is not None
        return (inputs.weights * inputs.entropy).where(inputs.mask, 0.0).sum(), {}


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """The negative logprob of tokens, regardless of advantages: supervised learning.

    On observations it is ECHO (arXiv 2605.24517): the policy also learns to predict what its environment answers. Their
    mean is over all observation tokens of the minibatch.
    """

    on: Literal["trained", "observations"] = "trained"
    """Tokens to learn: those that the policy is trained on, or what the environment answered between turns."""

    @property
    def needs(self) -> Collection[Need]:
        return ["observations"] if self.on == "observations" else []

    @property
    def equal_metric(self) -> str:
        is_mean = self.on == "trained" and self.aggregation.kind == "token_mean"
        return "cross_entropy" if is_mean else ""

    @property
    def keeps_uniform(self) -> bool:
        return True

    def divisor(self, counts: Counts) -> float:
        return max(1, counts.observations) if self.on == "observations" else super().divisor(counts)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
        if self.on == "observations":
            return -inputs.logprobs.where(cast("torch.Tensor", inputs.observed), 0.0).sum(), {}
        losses = -inputs.logprobs.where(inputs.mask, 0.0)
        return (inputs.weights.where(inputs.mask, 0.0) * losses).sum(), {"cross_entropy": losses.detach().sum()}
