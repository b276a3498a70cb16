"""Breakdown of a trainer rank's memory. Computing it needs torchtitan; reading it does not."""

from __future__ import annotations

from dataclasses import dataclass

from forge_rl.engines.platform import gpu_bytes
from forge_rl.engines.protocol import TrainSettings
from forge_rl.system.memory import host_bytes

_GRADIENTS_SHARE = 4
"""Whole gradients may take 1/4 of a GPU's memory, or of each rank's share of the host's."""


@dataclass(frozen=True, kw_only=True)
class TrainMemory:
    """Bytes of one trainer rank at its peak: in the backward pass of a full row, after the first update."""

    weights: int
    """This rank's shards, float32 or wider."""
    gradients: int
    """Same size as the weights, or whole matrices where ranks reduce them once per update, see `adds_up_once`."""
    optimizer: int
    """Both moments of AdamW, in the dtype of `TrainSettings.optimizer_state`."""
    moments: int
    """Both moments as a checkpoint holds them, float32 or wider; not part of a step."""
    reference: int
    """Frozen copy for a KL penalty, in the dtype of forward and backward."""
    gathered: int
    """Weights that FSDP gathers or casts for the active layers."""
    activations: int
    """Activations that a row's forward pass keeps, and the temporary memory of one layer's forward and backward."""
    hot_experts: int = 0
    """Additional memory of an expert-parallel rank whose experts are chosen more often than others'."""
    head: int
    """Excess over the activations of the output projection with its chunk of logits, if any."""
    masks: int
    """Attention masks of a block of queries, on CPU."""
    heap: int
    """Fragmentation of the heap on CPU: freed bytes that it cannot reuse; see `cpu.HEAP_ENVIRONMENT`.

    A fit to rows of 512 to 40,960 tokens of models like SmolLM2-135M of 10 to 30 layers: 50 MiB, half of the
    gradients that are in the heap, the kept inputs of layers that are, and 3.5 times a row's hidden states.
    """

    offloaded: int
    """Inputs of layers that are in host memory until the backward pass; not part of the device's memory."""
    largest: int
    """This rank's shard of the largest weight, held twice while a checkpoint is written."""

    @property
    def state(self) -> int:
        """Bytes held from step to step."""
        return self.weights + self.optimizer + self.reference

    @property
    def copy(self) -> int:
        """Bytes of host memory while a checkpoint is written: a copy of the state, and another of the tensor being
        written."""
        return self.weights + self.moments + self.largest

    @property
    def total(self) -> int:
        """Bytes at the peak of a step."""
        # All fields but those that are in host memory, or only there while a checkpoint is written.
        return int(sum(vars(self).values())) - self.largest - self.moments - self.offloaded


def adds_up_once(weights: int, settings: TrainSettings, *, ranks: int) -> bool:
    """Return whether ranks reduce gradients once per update, after its last row, rather than after each row.

    Until then each rank holds float32 gradients of whole matrices, for which it needs the memory.

    Args:
        weights: number of weights in the model.
        ranks: number of ranks, which share the host's memory on CPU.
    """
    memory = gpu_bytes() or host_bytes() // ranks
    gradient_bytes = 4 * weights // (settings.tensor_parallel_degree * settings.pipeline_parallel_degree)
    return not settings.enable_cpu_offload and gradient_bytes * _GRADIENTS_SHARE <= memory
