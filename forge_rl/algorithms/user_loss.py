"""Calls losses that users may have written: reports the failing line, and tries a loss on a small row."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.components import LossBySource
from forge_rl.algorithms.protocol import Loss, LossInputs, Sum
from forge_rl.errors import ForgeError, LossError
from forge_rl.flags.user_code import line_of

_TRIED = 8
"""Tokens in the row that a loss is tried on."""
_OF_DEVICE = re.compile(r"(?:CUDA (?:driver )?|cuDNN |NCCL )error")
"""Prefix of PyTorch's RuntimeError messages for failures of the device or its libraries."""


def call_loss(loss: Loss, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, Sum]]:
    """Call the loss and validate its result; see `Loss.__call__`.

    If the loss needs statistics and the inputs have none, they are computed from this row.

    Raises:
        LossError: it raised, or its result is not a loss.
        torch.OutOfMemoryError, torch.AcceleratorError: the device is out of memory, or failed, whichever kernel caused
        it.
        RuntimeError: a device library reports a failure.
    """
    if loss.scope and not inputs.statistics:
        tokens = inputs.mask.nonzero()[:, 0]
        statistics = call_statistics(loss, inputs.at(tokens))
        inputs = replace(inputs, statistics=spread(statistics, tokens, len(inputs.mask)))
    return _check(_call(lambda: loss(inputs)))


def call_statistics(loss: Loss, tokens: LossInputs) -> Mapping[str, torch.Tensor]:
    """Call `Loss.statistics` and validate its result, without gradient; errors as in call_loss."""
    with torch.no_grad():
        statistics = _call(lambda: loss.statistics(tokens))
    count = len(tokens.mask)
    # A scalar is one number for the whole minibatch.
    bad_names = [name for name, value in statistics.items() if value.shape[:1] != (count,) and value.ndim]
    if bad_names:
        raise LossError(
            f"the loss's statistic {bad_names[0]!r} has shape {list(statistics[bad_names[0]].shape)}",
            hint=f"return one value, or one for each of the {count} tokens",
        )
    return statistics


def spread(statistics: Mapping[str, torch.Tensor], tokens: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
    """Put the statistics of a row's trained tokens at their positions, 0 elsewhere; scalars stay.

    Args:
        tokens: [n], positions of the tokens.
        length: L of the row.
    """
    return {
        name: value.new_zeros(length, *value.shape[1:]).index_put((tokens,), value) if value.ndim else value
        for name, value in statistics.items()
    }


_T = TypeVar("_T")


def _call(function: Callable[[], _T]) -> _T:
    try:
        return function()
    except (ForgeError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        # A broken device is not the loss's fault, and may be repaired by a restart.
        if isinstance(error, RuntimeError) and _OF_DEVICE.match(str(error)):
            raise
        message = next(iter(str(error).strip().splitlines()), "")[:300]
        raise LossError(
            f"the loss raised {type(error).__name__}: {message} ({line_of(error)})",
            hint="fix it; the whole trace is in events.jsonl and in the trainer's log",
            trace="".join(traceback.format_exception(error)),
        ) from error


def _check(result: object) -> tuple[torch.Tensor, Mapping[str, Sum]]:
    """Validate the result of a loss."""
    match result:
        case (torch.Tensor() as total, Mapping() as sums) if total.ndim == 0:
            tensors = {name: _scalars(value) for name, value in sums.items()}
            bad_sums = [(name, tensor) for name, parts in tensors.items() for tensor in parts if tensor.numel() != 1]
            if not bad_sums:
                return total, {
                    name: cast("Sum", tuple(parts)) if parts[1:] else parts[0] for name, parts in tensors.items()
                }
            description = f"a sum {bad_sums[0][0]!r} of {bad_sums[0][1].numel()} values"
        case (torch.Tensor() as total, Mapping()):
            description = f"a tensor of shape {list(total.shape)}"
        case _:
            description = f"{type(result).__name__}"
    raise LossError(
        f"the loss returned {description}", hint="return the sum, a scalar tensor, and a dict of sums for metrics"
    )


def _scalars(value: Any) -> list[torch.Tensor]:
    parts = value if isinstance(value, tuple) and len(value) in (2, 3) else (value,)
    return [torch.as_tensor(part).detach() for part in parts]


def try_loss(loss: Loss, sources: Collection[str] = ()) -> None:
    """Try a loss on a small row in host memory, so that a broken one is refused before anything starts.

    Args:
        sources: names of the mixture's sources, if known.

    Raises:
        ConfigError: a source has no loss, or a loss no source.
        LossError: it cannot be sent to the trainer ranks, raised, returned something other than a loss, or has no
            finite gradient.
    """
    # One function despite its length: most of it is the inputs of the small row, an entry for each field.
    import cloudpickle  # type: ignore[import-untyped]

    if not isinstance(loss, Loss):
        raise LossError(f"the loss is a {type(loss).__name__}, not a Loss", hint="make its class a subclass of rl.Loss")
    if isinstance(loss, LossBySource) and sources:
        loss.check_sources(sources)
    try:
        # What is tried below is the copy, as the ranks will call it.
        loss = cloudpickle.loads(cloudpickle.dumps(loss))
    except Exception as error:
        raise LossError(
            f"the loss cannot be sent to the trainer's ranks: {type(error).__name__}: {error}",
            hint="keep no open files, locks or generators in it",
        ) from error
    index = torch.arange(_TRIED, dtype=torch.int32)
    logprobs = (-0.5 - 0.1 * index).requires_grad_()
    other_logprobs = logprobs.detach() - 0.05
    mask = index % 4 != 3  # like the second episode's prompt
    lengths = torch.where(mask, 3, 1)
    unit = torch.ones(_TRIED)
    outputs = (0.1 * index).requires_grad_() if "values" in loss.needs else logprobs
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour=torch.where(mask, other_logprobs, 0.0),
        advantages=torch.where(mask, (index < 4).float() - 0.5, 0.0),
        weights=loss.aggregation.weights(lengths),
        mask=mask,
        versions=torch.where(mask, 0, -1).int(),
        episodes=torch.where(mask, index // 4, -1).int(),
        turns=torch.where(mask, 0, -1).int(),
        segments=torch.where(mask, 0, -1).int(),
        lengths=lengths,
        counts=Counts(tokens=6, sequences=2, observations=2),
        group_size=2,
        sources=("tried",),
        version=0.5,
        entropy=unit.clone().requires_grad_() if "entropy_gradient" in loss.needs else unit,
        squares=0.5 * unit if "squares" in loss.needs else None,
        reference=other_logprobs if "reference" in loss.needs else None,
        proximal=other_logprobs if "proximal" in loss.needs else None,
        values=outputs if "values" in loss.needs else None,
        observed=~mask if "observations" in loss.needs else None,
        top_logprobs=(logprobs - 1).unsqueeze(1).expand(-1, loss.columns["top_ids"])
        if "top_ids" in loss.columns
        else None,
        columns={name: torch.zeros((_TRIED, k) if k else _TRIED) for name, k in loss.columns.items()},
    )
    total, _ = call_loss(loss, inputs)
    if total.requires_grad:
        total.backward()
    if outputs.grad is None or not bool(torch.isfinite(outputs.grad).all()):
        problem = "no gradient" if outputs.grad is None else "a gradient that is not finite"
        raise LossError(
            f"the loss of a small row is {float(total.detach()):.4g}, and has {problem}",
            hint=f"compute it from inputs.{'values' if outputs is not logprobs else 'logprobs'}, without detach, and "
            "only where the mask is True",
        )
    # A loss that lets groups be spared promises that they have no gradient.
    if not loss.keeps_uniform:
        uniform_total, _ = call_loss(loss, replace(inputs, advantages=torch.zeros_like(inputs.advantages)))
        if uniform_total.requires_grad and torch.autograd.grad(uniform_total, outputs)[0].any():
            raise LossError(
                "the loss of tokens with an advantage of 0 has a gradient, though its keeps_uniform is False",
                hint="let keeps_uniform return True, so that groups of equal rewards are trained on",
            )
