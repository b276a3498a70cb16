"""Metrics of an update, kept on the device until it ends and then read in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.user_loss import call_loss
from forge_rl.errors import ForgeError
from forge_rl.metrics import EffectiveShare, ExplainedVariance, Max, Mean, Sum, Tail, Value, merge_all

_KINDS: dict[type[Value], int] = {Sum: 1, Max: 1, Mean: 2, EffectiveShare: 3, ExplainedVariance: 5, Tail: 1}
"""Kinds of values, with the number of scalars that each takes; a tail takes a tensor of counts."""


class Measures:
    """Collects values that may be tensors: reading each of them separately would sync the device every time.

    measures = Measures()
    measures.add("entropy", Mean, entropy.sum(), tokens)
    metrics, (norm,) = measures.read(norm)
    """

    def __init__(self) -> None:
        self._values: list[tuple[str, type[Value]]] = []
        self._numbers: list[torch.Tensor | float] = []

    def add(self, name: str, kind: type[Value], *numbers: torch.Tensor | float) -> None:
        """Add a value of a metric from the numbers that its kind takes; tensors must be scalars, except for a tail."""
        assert len(numbers) == _KINDS[kind], f"{kind.__name__} of {len(numbers)} numbers"
        self._values.append((name, kind))
        self._numbers += numbers

    def read(self, *extra_numbers: torch.Tensor) -> tuple[dict[str, Value], Sequence[float]]:
        """Sync the device; return the merged values and the other scalars.

        Means and maxima over nothing are left out; such a maximum is -inf.
        """
        numbers = [*self._numbers, *extra_numbers]
        tensors = [number.detach().double().reshape(-1) for number in numbers if isinstance(number, torch.Tensor)]
        host_values = iter(torch.cat(tensors).tolist() if tensors else ())
        number_lists = [
            [next(host_values) for _ in range(number.numel())] if isinstance(number, torch.Tensor) else [float(number)]
            for number in numbers
        ]
        remaining = iter(number_lists)
        values = [(name, _value(kind, [next(remaining) for _ in range(_KINDS[kind])])) for name, kind in self._values]
        scalars = [number for (number,) in remaining]
        return merge_all({name: value} for name, value in values if not _is_empty(value)), scalars


def _value(kind: type[Value], numbers: Sequence[Sequence[float]]) -> Value:
    return Tail(tuple(numbers[0])) if kind is Tail else kind(*(number for (number,) in numbers))  # type: ignore[arg-type]


def _is_empty(value: Value) -> bool:
    match value:
        case Mean(count=count) | EffectiveShare(count=count) | ExplainedVariance(count=count):
            return not count
        case Tail(counts):
            return not any(counts)
    return value == Max(-math.inf)


def measured_loss(loss: Loss, inputs: LossInputs, measures: Measures, failed: list[ForgeError]) -> torch.Tensor:
    """Compute a row's loss, and add its metrics to `measures`.

    If it raises and there are other ranks, append the error to `failed` and return NaN: the other ranks wait for this
    rank's gradient, and skip the update because it is not finite.
    """
    outputs = inputs.logprobs if inputs.values is None else inputs.values
    try:
        if failed:
            return outputs.sum() * math.nan
        total, sums = call_loss(loss, inputs)
    except ForgeError as error:
        if dist.get_world_size() == 1:
            raise
        failed.append(error)
        return outputs.sum() * math.nan
    tokens = inputs.mask.sum()
    for name, value in sums.items():
        if name == loss.equal_metric:
            continue
        if isinstance(value, tuple):
            measures.add(f"loss/{name}", Mean if len(value) == 2 else EffectiveShare, *value)
        elif name.endswith("/max"):
            measures.add(f"loss/{name}", Max, value)
        else:
            measures.add(f"loss/{name}", Mean, value, tokens)
    return total
