"""forge_rl's side of a comparison: losses of rows packed from a batch, and advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.conformance.batches import GROUP_SIZE, Batch
from forge_rl.algorithms.advantages import Estimator, batch_advantages, gdpo_advantages
from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.baselines import remax_advantages
from forge_rl.algorithms.distillation import teacher_advantages
from forge_rl.algorithms.gae import GaeConfig, gae
from forge_rl.algorithms.pass_at_k import pass_at_k_advantages
from forge_rl.algorithms.policy_losses import Reinforce
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.algorithms.returns import reinforce_pp_advantages, token_rewards
from forge_rl.algorithms.user_loss import call_loss, call_statistics, spread
from forge_rl.types import Batch as Episodes
from forge_rl.types import Episode, Group, Score, Task, Turn

Result = dict[str, npt.NDArray[Any]]
"""Either "loss", a scalar, and "gradient" by the logprobs, or by a critic's values, [N, T], or by the logits of both
policies' distributions, [N, T, VOCABULARY]; or "advantages" and perhaps "returns", value targets, [N, T]. 0 where not
mask."""
Ours = Callable[[Batch], Result]
"""forge_rl's side of a comparison."""
_LEAVES = ("logprobs", "entropy", "values", "student")
"""What a loss may have a gradient by."""
_ROWS = 3
"""Rows into which a batch is packed, which are not the shares of the peers' ranks."""


def loss_of(loss: Loss, *, group_size: int = GROUP_SIZE, support: Literal["student", "teacher"] = "teacher") -> Ours:
    """Compute a loss as the trainer does: a sum for each packed row, divided by one number for the whole minibatch.

    Args:
        loss: the loss.
        group_size: episodes per group.
        support: policy whose most likely tokens a loss of distributions is about.
    """

    def compute(batch: Batch) -> Result:
        leaves = {name: torch.from_numpy(batch[name]).clone().requires_grad_() for name in _LEAVES}
        given = leaves | _distributions(loss, leaves["student"], torch.from_numpy(batch["teacher"]), support)
        logprobs = leaves["logprobs"]
        whole = _inputs(batch, group_size, loss, torch.arange(len(logprobs)), given)
        trained = whole.mask.nonzero()[:, 0]
        # The trainer gathers the tokens that statistics are about from all rows, whatever the rows are.
        found = call_statistics(loss, whole.at(trained)) if loss.scope else {}
        placed = spread(found, trained, len(whole.mask))
        order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(len(logprobs)))
        total = logprobs.new_zeros(())
        for episodes in order.tensor_split(_ROWS):
            row = _inputs(batch, group_size, loss, episodes, given)
            own = {
                name: each.reshape(logprobs.shape)[episodes].flatten() if each.ndim else each
                for name, each in placed.items()
            }
            total = total + call_loss(loss, replace(row, statistics=own))[0] / loss.divisor(row.counts)
        of = "values" if "values" in loss.needs else "student" if "top_ids" in loss.columns else "logprobs"
        gradients = torch.autograd.grad(total, [leaves[of], leaves["entropy"]], materialize_grads=True)
        result = {"loss": total.detach().numpy(), "gradient": gradients[0].numpy()}
        return result | ({"entropy_gradient": gradients[1].numpy()} if "entropy_gradient" in loss.needs else {})

    return compute


def _distributions(loss: Loss, student: torch.Tensor, teacher: torch.Tensor, support: str) -> dict[str, torch.Tensor]:
    """Return the logprobs of a policy's most likely tokens, [N, T, k], if the loss needs them."""
    if "top_ids" not in loss.columns:
        return {}
    policy, other = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = (policy if support == "student" else other).topk(loss.columns["top_ids"]).indices
    return {"top_logprobs": policy.gather(-1, ids), "top_teacher": other.gather(-1, ids), "top_ids": ids.double()}


def _inputs(
    batch: Batch, group_size: int, loss: Loss, episodes: torch.Tensor, given: Mapping[str, torch.Tensor]
) -> LossInputs:
    """Lay episodes one behind the other in a row; values that are not trained become NaN, and must have no effect."""
    mask = torch.from_numpy(batch["mask"])[episodes]

    def column(name: str) -> torch.Tensor:
        values = (given[name] if name in given else torch.from_numpy(batch[name]))[episodes]
        return values.where(mask if values.ndim == 2 else mask[..., None], torch.nan).flatten(0, 1)

    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1).double().expand(mask.shape).flatten()
    zeros = torch.zeros(mask.numel(), dtype=torch.int32)
    names = ("logprobs", "entropy", "behaviour", "advantages", "reference", "proximal")
    by_name: dict[str, Any] = {name: column(name) for name in names}
    by_name |= {"values": column("values")} if "values" in loss.needs else {}
    by_name |= {"top_logprobs": column("top_logprobs")} if "top_ids" in loss.columns else {}
    return LossInputs(
        **by_name,
        lengths=lengths,
        counts=Counts(tokens=int(batch["mask"].sum()), sequences=len(batch["mask"])),
        group_size=group_size,
        columns={name: column(name) for name in loss.columns},
        weights=loss.aggregation.weights(lengths),
        mask=mask.flatten(),
        versions=zeros,
        episodes=episodes.to(torch.int32)[:, None].expand(mask.shape).flatten(),
        turns=zeros,
        segments=zeros,
    )


def reverse_kl() -> Ours:
    """Compute the policy gradient with a teacher's and the policy's logprobs of sampled tokens as advantages."""

    def compute(batch: Batch) -> Result:
        logits = torch.from_numpy(batch["student"]).clone().requires_grad_()
        ids = torch.from_numpy(batch["tokens"])[..., None]
        policy = logits.log_softmax(-1).gather(-1, ids)[..., 0]
        teacher = torch.from_numpy(batch["teacher"]).log_softmax(-1).gather(-1, ids)[..., 0].numpy()
        sampled = policy.detach().numpy()
        given = [own[mask] for own, mask in zip(teacher, batch["mask"], strict=True)]
        groups = [given[first : first + GROUP_SIZE] for first in range(0, len(given), GROUP_SIZE)]
        found = teacher_advantages(_episodes(batch, sampled), groups)
        advantages = _tokens(batch, [own for group in found for own in group])
        result = loss_of(Reinforce())({**batch, "logprobs": sampled, "advantages": advantages})
        (gradient,) = torch.autograd.grad(policy, logits, torch.from_numpy(result["gradient"]))
        return {**result, "gradient": gradient.numpy()}

    return compute


def estimate(estimator: Estimator) -> Ours:
    """Compute the advantages of an estimator."""
    return _advantages(lambda batch: batch_advantages(_episodes(batch), estimator=estimator))


def gdpo(weights: tuple[float, float]) -> Ours:
    """Compute GDPO's advantages with these weights of the two parts of a reward."""
    by_name = {str(at): weight for at, weight in enumerate(weights)}
    return _advantages(lambda batch: gdpo_advantages(_episodes(batch), by_name))


def discounted_reinforce_pp(gamma: float) -> Ours:
    """Compute REINFORCE++'s advantages with a discount and penalties."""

    def compute(batch: Batch) -> Result:
        penalties = [row[mask] for row, mask in zip(batch["penalties"], batch["mask"], strict=True)]
        groups = reinforce_pp_advantages(_episodes(batch), gamma=gamma, penalties=penalties)
        return {"advantages": _tokens(batch, [own for group in groups for own in group])}

    return compute


def gae_of(config: GaeConfig) -> Ours:
    """Compute generalized advantages and value targets of tokens with penalties."""

    def compute(batch: Batch) -> Result:
        columns = [[row[mask] for row, mask in zip(batch[name], batch["mask"], strict=True)] for name in _OF_TOKENS]
        values, penalties = columns
        rewards = token_rewards(_episodes(batch).episodes)
        less = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        advantages, targets = gae(values, less, config)
        return {"advantages": _tokens(batch, advantages), "returns": _tokens(batch, targets)}

    return compute


_OF_TOKENS = ("values", "penalties")


def remax() -> Ours:
    """Compute ReMax's advantages."""
    return _advantages(lambda batch: remax_advantages(_grouped(batch, "rewards"), _grouped(batch, "greedy")[:, 0]))


def pass_at_k() -> Ours:
    """Compute the lead of the best of each group over its second best."""
    return _advantages(
        lambda batch: pass_at_k_advantages(_grouped(batch, "rewards"), GROUP_SIZE, baseline="leave_one_out")
    )


def _grouped(batch: Batch, name: str) -> torch.Tensor:
    return torch.from_numpy(batch[name].reshape(-1, GROUP_SIZE))


def _tokens(batch: Batch, of_episodes: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Place numbers of trained tokens in [N, T]."""
    placed = np.zeros(batch["mask"].shape)
    placed[batch["mask"]] = np.concatenate(of_episodes)
    return placed


def _advantages(compute: Callable[[Batch], Any]) -> Ours:
    def spread(batch: Batch) -> Result:
        found = np.asarray(compute(batch), np.float64).reshape(-1, 1)
        return {"advantages": found * batch["mask"]}

    return spread


def _episodes(batch: Batch, logprobs: npt.NDArray[Any] | None = None) -> Episodes:
    """Make episodes of one turn with as many tokens as are trained, and these logprobs, [N, T]."""
    task = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))

    def episode(at: int) -> Episode:
        length = int(batch["mask"][at].sum())
        ones = (1,) * length
        own = np.full(length, -1.0) if logprobs is None else logprobs[at][batch["mask"][at]]
        turn = Turn(prompt_ids=(1,), token_ids=ones, logprobs=own, versions=ones, text="")
        parts = {str(part): float(value) for part, value in enumerate(batch["parts"][at]) if np.isfinite(value)}
        reward = float(batch["rewards"][at])
        score = None if np.isnan(reward) else Score(total=reward, parts=parts)
        return Episode(task=task, turns=(turn,), score=score)

    groups = range(0, len(batch["mask"]), GROUP_SIZE)
    return Episodes(
        groups=tuple(
            Group(task=task, episodes=tuple(map(episode, range(first, first + GROUP_SIZE)))) for first in groups
        ),
        version=0,
    )
