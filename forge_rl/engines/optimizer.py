"""Settings of AdamW and its learning rate, kept apart from the engine so that flags need no torchtitan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from forge_rl.errors import check_flags
from forge_rl.flags.categories import Tunable

OptimizerState = Literal["float32", "bfloat16", "int8"]
OPTIMIZER_STATES: tuple[OptimizerState, ...] = get_args(OptimizerState)
"""From the largest to the smallest."""
SCALED_TOGETHER = 256
"""Elements of a moment in int8 that share a float32 scale. Dettmers et al. share one among 2,048; fewer keep an outlier
from more elements, for 1/64 byte."""
LEAST_INT8 = 4096
"""Weights with fewer elements, such as norms and biases, keep float32 moments where others have int8."""


def moments_bytes(state: OptimizerState) -> float:
    """Bytes of both moments of one weight of a large tensor."""
    return {"float32": 8.0, "bfloat16": 4.0, "int8": 2 + 8 / SCALED_TOGETHER}[state]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning rate schedule and gradient clipping."""

    lr: Tunable[float] = 3e-5
    """Peak learning rate. If left out, models larger than SmolLM2-135M get less: 1e-6 from 4 billion weights on, and in
    supervised training by the root of their weights."""
    weight_decay: Tunable[float] = 0.0
    """Decoupled weight decay of AdamW, of matrices: weights of layers and experts, embeddings and the output head.
    Norms, biases and other vectors do not decay."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly to its peak; a step takes one or more updates."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up; linear and cosine reach 0 at the end of the run."""
    max_grad_norm: Tunable[float] = 1.0
    """Maximum global norm of the gradient; larger gradients are scaled down to it."""

    def check(self, flags: str) -> None:
        """Check the settings' limits.

        Args:
            flags: prefix of their flags, such as "--trainer.optimizer.".

        Raises:
            ConfigError: one is beyond its limit.
        """
        check_flags(
            self,
            flags,
            minimum={"weight_decay": 0, "beta1": 0, "beta2": 0, "warmup_updates": 0},
            above={"lr": 0, "max_grad_norm": 0},
            below={"beta1": 1, "beta2": 1},
        )

    def lr_at(self, update: int, total_updates: int) -> float:
        """Return the learning rate of an update, counted from 0, in a run of total_updates."""
        # The first update already has a learning rate above 0.
        if update < self.warmup_updates:
            return self.lr * (update + 1) / self.warmup_updates
        if self.decay == "constant":
            return self.lr
        # Share of the decay that is left; a run that goes on past its end stays at 0.
        left = max(0.0, 1 - (update - self.warmup_updates) / max(1, total_updates - self.warmup_updates))
        return self.lr * (left if self.decay == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))
