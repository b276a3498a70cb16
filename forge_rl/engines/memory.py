"""Memory that engines take, part by part; what counts it needs torchtitan, what reads it does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """Bytes of one trainer rank at its peak: in the backward pass of a full row, after the first update."""

    weights: int
    """This rank's shards, float32 or wider."""
    gradients: int
    """As many as of weights."""
    optimizer: int
    """Both moments of AdamW."""
    reference: int
    """Frozen copy for a KL penalty."""
    gathered: int
    """Weights that FSDP gathers or casts for the layers at work."""
    activations: int
    """Bytes that a row's forward pass keeps, and that one layer's two passes add to them."""
    head: int
    """Bytes that the output projection and its chunk of logits add to those, if they are more."""
    masks: int
    """Masks of a block of queries, on a CPU."""
    heap: int
    """Freed bytes between larger pieces that a CPU's heap cannot use again; see `factory.train_environment`."""

    @property
    def state(self) -> int:
        """Bytes that last from step to step."""
        return self.weights + self.optimizer + self.reference

    @property
    def total(self) -> int:
        return sum(vars(self).values())
