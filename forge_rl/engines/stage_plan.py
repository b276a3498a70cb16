"""Splits a model's layers between the stages of a pipeline. Pure arithmetic."""

from __future__ import annotations

from forge_rl.engines.costs import head_weights, layer_weights
from forge_rl.engines.families.family import Architecture


def stage_layers(architecture: Architecture, stages: int) -> list[range]:
    """Return the layers of each stage, in order, such that the slowest stage has the least to compute.

    The last stage also has the output head, which counts as the layers that would have as many weights. Each stage has
    at least one layer.

    Args:
        stages: at most the number of layers.
    """
    a = architecture
    # In units of an average layer.
    head = head_weights(a) * a.layers / layer_weights(a)
    counts = [1] * stages
    for _ in range(a.layers - stages):
        costs = [*map(float, counts[:-1]), counts[-1] + (head if stages > 1 else 0.0)]
        counts[costs.index(min(costs))] += 1
    starts = [sum(counts[:index]) for index in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
