"""Calls losses that users may have written: reports the failing line, and tries a loss on a small row."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping

import torch

from forge_rl.algorithms.losses import Loss, LossInputs
from forge_rl.errors import ForgeError, LossError
from forge_rl.flags.user_code import line_of

_TRIED = 8
"""Tokens in the row that a loss is tried on."""
_OF_DEVICE = re.compile(r"(?:CUDA (?:driver )?|cuDNN |NCCL )error")
"""Prefix of PyTorch's RuntimeError messages for failures of the device or its libraries."""


def call_loss(loss: Loss, inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Call the loss and validate its result; see `Loss.__call__`.

    Raises:
        LossError: it raised, or its result is not a loss.
        torch.OutOfMemoryError, torch.AcceleratorError: the device is out of memory, or failed, whichever kernel caused
        it.
        RuntimeError: a device library reports a failure.
    """
    try:
        found = loss(inputs)
    except (ForgeError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _OF_DEVICE.match(str(error)):
            raise
        said = next(iter(str(error).strip().splitlines()), "")[:300]
        raise LossError(
            f"the loss raised {type(error).__name__}: {said} ({line_of(error)})",
            hint="fix it; the whole trace is in events.jsonl and in the trainer's log",
            trace="".join(traceback.format_exception(error)),
        ) from error
    match found:
        case (torch.Tensor() as total, Mapping() as sums) if total.ndim == 0:
            wrong = [name for name, value in sums.items() if torch.as_tensor(value).numel() != 1]
            if not wrong:
                return total, {name: torch.as_tensor(value).detach() for name, value in sums.items()}
            seen = f"a sum {wrong[0]!r} of {torch.as_tensor(sums[wrong[0]]).numel()} values"
        case (torch.Tensor() as total, Mapping()):
            seen = f"a tensor of shape {list(total.shape)}"
        case _:
            seen = f"{type(found).__name__}"
    raise LossError(f"the loss returned {seen}", hint="return the sum, a scalar tensor, and a dict of sums for metrics")


def try_loss(loss: Loss) -> None:
    """Try a loss on a small row in host memory, so that a broken one is refused before anything starts.

    Raises:
        LossError: it cannot be sent to the trainer ranks, raised, returned something other than a loss, or has no
            finite gradient.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        loss = cloudpickle.loads(cloudpickle.dumps(loss))
    except Exception as error:
        raise LossError(
            f"the loss cannot be sent to the trainer's ranks: {type(error).__name__}: {error}",
            hint="keep no open files, locks or generators in it",
        ) from error
    index = torch.arange(_TRIED, dtype=torch.int32)
    logprobs = (-0.5 - 0.1 * index).requires_grad_()
    others = logprobs.detach() - 0.05
    mask = index % 4 != 3  # like the second episode's prompt
    lengths = torch.where(mask, 3, 1)
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour=torch.where(mask, others, 0.0),
        advantages=torch.where(mask, (index < 4).float() - 0.5, 0.0),
        weights=loss.aggregation.weights(lengths),
        mask=mask,
        versions=torch.where(mask, 0, -1).int(),
        episodes=torch.where(mask, index // 4, -1).int(),
        turns=torch.where(mask, 0, -1).int(),
        segments=torch.where(mask, 0, -1).int(),
        reference=others if loss.needs_reference else None,
        proximal=others if loss.needs_proximal else None,
    )
    total, _ = call_loss(loss, inputs)
    if total.requires_grad:
        total.backward()
    if logprobs.grad is None or not bool(torch.isfinite(logprobs.grad).all()):
        seen = "no gradient" if logprobs.grad is None else "a gradient that is not finite"
        raise LossError(
            f"the loss of a small row is {float(total.detach()):.4g}, and has {seen}",
            hint="compute it from inputs.logprobs, without detach, and only where the mask is True",
        )
