"""forge_rl's side of a comparison: losses of rows packed from a batch, and advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.conformance.batches import GROUP_SIZE, Batch
from forge_rl.algorithms.advantages import Estimator, batch_advantages, gdpo_advantages
from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.user_loss import call_loss
from forge_rl.types import Batch as Episodes
from forge_rl.types import Episode, Group, Score, Task, Turn

Result = dict[str, npt.NDArray[Any]]
"""Either "loss", a scalar, and "gradient", [N, T], by the logprobs; or "advantages", [N, T]. 0 where not mask."""
Ours = Callable[[Batch], Result]
"""forge_rl's side of a comparison."""
_ROWS = 3
"""Rows into which a batch is packed, which are not the shares of the peers' ranks."""


def loss_of(loss: Loss, **columns: str) -> Ours:
    """Compute a loss as the trainer does: a sum for each packed row, divided by one number for the whole minibatch.

    Args:
        loss: the loss.
        columns: a column of the batch for fields of LossInputs of another name, such as behaviour="proximal".
    """

    def compute(batch: Batch) -> Result:
        mask = torch.from_numpy(batch["mask"])
        logprobs = torch.from_numpy(batch["logprobs"]).clone().requires_grad_()
        lengths = mask.sum(dim=1)
        divisor = loss.divisor(Counts(tokens=int(lengths.sum()), sequences=len(mask)))
        order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(len(mask)))
        total = logprobs.new_zeros(())
        for episodes in order.tensor_split(_ROWS):
            total = total + call_loss(loss, _inputs(batch, columns, loss, episodes, logprobs))[0] / divisor
        (gradient,) = torch.autograd.grad(total, logprobs)
        return {"loss": total.detach().numpy(), "gradient": gradient.numpy()}

    return compute


def _inputs(
    batch: Batch, columns: Mapping[str, str], loss: Loss, episodes: torch.Tensor, logprobs: torch.Tensor
) -> LossInputs:
    """Lay episodes one behind the other in a row; values that are not trained become NaN, and must have no effect."""
    mask = torch.from_numpy(batch["mask"])[episodes]

    def column(name: str) -> torch.Tensor:
        values = torch.from_numpy(batch[columns.get(name, name)])[episodes]
        return values.where(mask, torch.nan).flatten()

    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1).double().expand(mask.shape).flatten()
    zeros = torch.zeros(mask.numel(), dtype=torch.int32)
    others: dict[str, Any] = {name: column(name) for name in ("behaviour", "advantages", "reference", "proximal")}
    return LossInputs(
        logprobs=logprobs[episodes].where(mask, torch.nan).flatten(),
        **others,
        lengths=lengths,
        counts=Counts(tokens=int(batch["mask"].sum()), sequences=len(batch["mask"])),
        group_size=GROUP_SIZE,
        weights=loss.aggregation.weights(lengths),
        mask=mask.flatten(),
        versions=zeros,
        episodes=episodes.to(torch.int32)[:, None].expand(mask.shape).flatten(),
        turns=zeros,
        segments=zeros,
    )


def estimate(estimator: Estimator) -> Ours:
    """Compute the advantages of an estimator."""
    return _advantages(lambda batch: batch_advantages(_episodes(batch), estimator=estimator))


def gdpo(weights: tuple[float, float]) -> Ours:
    """Compute GDPO's advantages with these weights of the two parts of a reward."""
    by_name = {str(at): weight for at, weight in enumerate(weights)}
    return _advantages(lambda batch: gdpo_advantages(_episodes(batch), by_name))


def _advantages(compute: Callable[[Batch], Any]) -> Ours:
    def spread(batch: Batch) -> Result:
        found = np.asarray(compute(batch), np.float64).reshape(-1, 1)
        return {"advantages": found * batch["mask"]}

    return spread


def _episodes(batch: Batch) -> Episodes:
    """Make episodes of one turn with as many tokens as are trained."""
    task = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))

    def episode(at: int) -> Episode:
        length = int(batch["mask"][at].sum())
        ones = (1,) * length
        turn = Turn(prompt_ids=(1,), token_ids=ones, logprobs=(-1.0,) * length, versions=ones, text="")
        parts = {str(part): float(value) for part, value in enumerate(batch["parts"][at]) if np.isfinite(value)}
        return Episode(task=task, turns=(turn,), score=Score(total=float(batch["rewards"][at]), parts=parts))

    groups = range(0, len(batch["mask"]), GROUP_SIZE)
    return Episodes(
        groups=tuple(
            Group(task=task, episodes=tuple(map(episode, range(first, first + GROUP_SIZE)))) for first in groups
        ),
        version=0,
    )
