"""Settings, passes and results of several adapters trained over one base. Does not import torchtitan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.errors import ConfigError, ForgeError

if TYPE_CHECKING:
    import torch

    from forge_rl.algorithms.protocol import Loss
    from forge_rl.metrics import Value
    from forge_rl.packing.rows import Minibatch

_LARGEST, _LEAST_EPS = 1e6, 1e-30
"""Bounds of numbers that float32 must represent: beyond them, a step would fail halfway, or divide 0 by 0."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """One adapter of several over a base: `AdapterSettings(lora=LoRAConfig(rank=8), seed=1)`."""

    lora: LoRAConfig
    """Its rank, at most the trainer's --lora.rank, its scale, and its targets among the trainer's --lora.targets."""
    seed: int = 0
    """Seed of its first values and of dropout."""


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """Settings of one step of AdamW, which may change from step to step.

    AdamStep(lr=1e-4, eps=1e-12, max_grad_norm=1.0)
    """

    lr: float
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Number added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = math.inf
    """Maximum global norm of the gradient; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        for name, value, is_valid in (
            ("lr", self.lr, 0 <= self.lr <= _LARGEST),
            ("beta1", self.beta1, 0 <= self.beta1 < 1),
            ("beta2", self.beta2, 0 <= self.beta2 < 1),
            ("eps", self.eps, _LEAST_EPS <= self.eps <= _LARGEST),
            ("weight_decay", self.weight_decay, 0 <= self.weight_decay <= _LARGEST),
            ("max_grad_norm", self.max_grad_norm, self.max_grad_norm > 0),
        ):
            # inf switches clipping off; every other number must be finite.
            if not is_valid or (not math.isfinite(value) and name != "max_grad_norm"):
                raise ConfigError(f"{name} of an optimizer step is {value}", hint="set a number within its range")


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterPass:
    """Pass of one adapter, which may share rows with other adapters' passes.

    AdapterPass(name="math", minibatch=minibatch, loss=loss)
    """

    name: str
    """The adapter's."""
    minibatch: Minibatch
    loss: Loss
    backward: bool = True
    """Add the pass's gradient to those that the next step will use."""


@dataclass(kw_only=True)
class PassResult:
    """Results of a pass over the rows of one share, for one adapter."""

    metrics: dict[str, Value] = field(default_factory=dict)
    """Mergeable metrics; `loss` is the sum over all rows divided by the loss's divisor."""
    logprobs: list[torch.Tensor] = field(default_factory=list)
    """[L] for each row, the logprobs of its targets before the pass, 0 where the mask is False; in host memory."""


class AdapterEngine(Protocol):
    """One rank's share of several adapters over a base: `adapters.run("math", minibatch, loss)`.

    Every rank makes the same calls in the same order. A failed call leaves weights, gradients, moments and counts of
    all adapters as they were.
    """

    def open(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter with initial values from its seed, the same as if it were trained alone.

        Raises:
            ConfigError: the name is taken, or the rank or a target is not within the trainer's.
        """

    def drop(self, name: str) -> None:
        """Forget an adapter."""

    def rest(self) -> None:
        """Restore the engine's own adapter, its gradients and its count of updates."""

    def updates(self, name: str) -> int:
        """Return the number of an adapter's optimizer steps."""

    def run(self, name: str, minibatch: Minibatch, loss: Loss, *, backward: bool = True) -> PassResult:
        """Run a pass over this share's rows; with `backward`, add its gradient to those that `step` will use.

        Raises:
            LossError: the loss failed, or its gradient is not finite.
        """

    def run_many(self, passes: Sequence[AdapterPass]) -> list[PassResult | ForgeError]:
        """Run passes of several adapters; rows are computed together where they fit into one.

        Each pass has the result of `run`, up to rounding. A failure or non-finite value in one pass changes no other.

        Returns:
            For each pass its result, or the error that `run` would have raised.

        Raises:
            ConfigError: the trainer has several ranks or a model with experts, or an adapter has two passes.
        """

    def step(self, name: str, adam: AdamStep) -> dict[str, Value]:
        """Take an optimizer step with the gradients of the passes since the last one, and clear them.

        Raises:
            ConfigError: there are none.
            LossError: they add up to a number that is not finite, and are dropped.
        """

    def save(self, name: str, folder: Path) -> None:
        """Write an adapter into an existing folder in PEFT's format, with its moments and counts, without gradients."""

    def load(self, name: str, folder: Path, *, optimizer: bool) -> int:
        """Load an adapter's weights from a folder that `save` or peft wrote, and drop its gradients.

        Args:
            optimizer: load its moments and count of updates too, else start with none.

        Returns:
            The number of updates.

        Raises:
            CheckpointError, ModelError: a file is missing or malformed, or of another rank or other modules.
            ConfigError: the adapter was saved with another scale.
        """
