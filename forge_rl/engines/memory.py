"""Memory that engines take, part by part; what counts it needs torchtitan, what reads it does not."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.engines.platform import gpu_bytes, host_bytes
from forge_rl.engines.protocol import TrainSettings

_GRADIENTS_SHARE = 4
"""Whole gradients may take one part in so many of a device's memory, or those of all ranks where they share one."""


@dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """Bytes of one trainer rank at its peak: in the backward pass of a full row, after the first update."""

    weights: int
    """This rank's shards, float32 or wider."""
    gradients: int
    """As the weights; whole matrices' where ranks add them up once an update, see `adds_up_once`."""
    optimizer: int
    """Both moments of AdamW."""
    reference: int
    """Frozen copy for a KL penalty, in the format of forward and backward."""
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

    largest: int
    """This rank's shard of the largest weight, which is in memory twice while a checkpoint is written."""

    @property
    def state(self) -> int:
        """Bytes that last from step to step."""
        return self.weights + self.optimizer + self.reference

    @property
    def copy(self) -> int:
        """Bytes of host memory while a checkpoint is written: the copy of what is saved, and the tensor that is being
        written once more."""
        return self.weights + self.optimizer + self.largest

    @property
    def total(self) -> int:
        """Bytes of all that is there at the peak of a step."""
        return sum(vars(self).values()) - self.largest


def adds_up_once(weights: int, settings: TrainSettings, *, ranks: int) -> bool:
    """Tell whether ranks add up their gradients once an update, after its last row, and not after each row.

    Until then each holds the gradients of its whole matrices, in float32, for which there must be room.

    Args:
        weights: number of the model's weights.
    """
    memory = gpu_bytes() or host_bytes() // ranks
    whole = 4 * weights // settings.tensor_parallel
    return not settings.cpu_offload and whole * _GRADIENTS_SHARE <= memory
