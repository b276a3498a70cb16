"""forge_rl's side of a comparison: losses of rows packed from a batch, and advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.conformance.batches import GROUP_SIZE, Batch
from benchmarks.conformance.packed import minibatch_loss, packed_batch
from forge_rl.algorithms.advantages import Estimator, batch_advantages, gdpo_advantages
from forge_rl.algorithms.baselines import remax_advantages
from forge_rl.algorithms.distillation import teacher_advantages
from forge_rl.algorithms.gae import GaeConfig, gae
from forge_rl.algorithms.pass_at_k import pass_at_k_advantages
from forge_rl.algorithms.policy_losses import Reinforce
from forge_rl.algorithms.protocol import Loss
from forge_rl.algorithms.returns import reinforce_pp_advantages, token_rewards
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


@dataclass(frozen=True, kw_only=True)
class LossOf:
    """Computes a loss as the trainer does: of packed rows, whose groups of equal rewards it spares if it can."""

    loss: Loss
    group_size: int
    """Episodes per group."""
    support: Literal["student", "teacher"]
    """Policy whose most likely tokens a loss of distributions is about."""

    def __call__(self, batch: Batch) -> Result:
        ((_, result),) = self.minibatches(batch, 1)
        return result

    def minibatches(self, batch: Batch, count: int) -> list[tuple[npt.NDArray[np.int64], Result]]:
        """Compute the loss of each of several minibatches; returns the indexes of its episodes, and the result."""
        loss = self.loss
        leaves = {name: torch.from_numpy(batch[name]).clone().requires_grad_() for name in _LEAVES}
        compared = {name: torch.from_numpy(batch[name]) for name in ("reference", "proximal")}
        tops = _distributions(loss, leaves["student"], torch.from_numpy(batch["teacher"]), self.support)
        columns = {name: tops[name].detach().numpy() if name in tops else batch[name] for name in loss.columns}
        inputs = leaves | compared | {name: tops[name] for name in ("top_logprobs",) if name in tops}
        packed = packed_batch(batch, loss, columns, group_size=self.group_size, minibatches=count)
        # The gradient is taken by what the loss depends on: a critic's values, distributions, or logprobs.
        leaf = "values" if "values" in loss.needs else "student" if tops else "logprobs"
        results = []
        for minibatch in packed.minibatches:
            groups = {int(e) // self.group_size for row in minibatch.rows for e in row.episodes[row.mask]}
            episodes = np.array([n for n in range(len(batch["mask"])) if n // self.group_size in groups])
            total = minibatch_loss(minibatch, loss, inputs)
            gradients = torch.autograd.grad(
                total, [leaves[leaf], leaves["entropy"]], materialize_grads=True, retain_graph=True
            )
            result = {"loss": total.detach().numpy(), "gradient": gradients[0].numpy()}
            result |= {"entropy_gradient": gradients[1].numpy()} if "entropy_gradient" in loss.needs else {}
            results.append((episodes, result))
        return results


def loss_of(loss: Loss, *, group_size: int = GROUP_SIZE, support: Literal["student", "teacher"] = "teacher") -> LossOf:
    """Return our side of a comparison of losses; see `LossOf`."""
    return LossOf(loss=loss, group_size=group_size, support=support)


def minibatch_deviation(ours: LossOf, batch: Batch, deviation: Callable[..., float]) -> float:
    """Return the largest deviation of two minibatches from batches of their groups alone."""
    worst = 0.0
    for episodes, result in ours.minibatches(batch, 2):
        alone = ours({name: values[episodes] for name, values in batch.items()})
        rest = np.delete(np.arange(len(batch["mask"])), episodes)
        for name, values in result.items():
            part = values[episodes] if values.ndim else values
            assert not values.ndim or not values[rest].any(), "no other episode has a gradient"
            worst = max(worst, deviation(part, alone[name]))
    return worst


def _distributions(loss: Loss, student: torch.Tensor, teacher: torch.Tensor, support: str) -> dict[str, torch.Tensor]:
    """Return the logprobs of a policy's most likely tokens, [N, T, k], if the loss needs them."""
    if "top_ids" not in loss.columns:
        return {}
    policy, other = student.log_softmax(-1), teacher.log_softmax(-1)
    ids = (policy if support == "student" else other).topk(loss.columns["top_ids"]).indices
    return {"top_logprobs": policy.gather(-1, ids), "top_teacher": other.gather(-1, ids), "top_ids": ids}


def reverse_kl() -> Ours:
    """Compute the policy gradient with a teacher's and the policy's logprobs of sampled tokens as advantages."""

    def compute(batch: Batch) -> Result:
        logits = torch.from_numpy(batch["student"]).clone().requires_grad_()
        ids = torch.from_numpy(batch["tokens"])[..., None]
        policy = logits.log_softmax(-1).gather(-1, ids)[..., 0]
        teacher = torch.from_numpy(batch["teacher"]).log_softmax(-1).gather(-1, ids)[..., 0].numpy()
        sampled = policy.detach().numpy()
        teacher_logprobs = [row[mask] for row, mask in zip(teacher, batch["mask"], strict=True)]
        groups = [teacher_logprobs[first : first + GROUP_SIZE] for first in range(0, len(teacher_logprobs), GROUP_SIZE)]
        advantage_groups = teacher_advantages(_episodes(batch, sampled), groups)
        advantages = _tokens(batch, [row for group in advantage_groups for row in group])
        result = loss_of(Reinforce())({**batch, "logprobs": sampled, "advantages": advantages})
        (gradient,) = torch.autograd.grad(policy, logits, torch.from_numpy(result["gradient"]))
        return {**result, "gradient": gradient.numpy()}

    return compute


def estimate(estimator: Estimator) -> Ours:
    """Compute the advantages of an estimator."""
    return _advantages(lambda batch: batch_advantages(_episodes(batch), estimator=estimator))


def gdpo(weights: tuple[float, float]) -> Ours:
    """Compute GDPO's advantages with these weights of the two parts of a reward."""
    by_name = {str(part): weight for part, weight in enumerate(weights)}
    return _advantages(lambda batch: gdpo_advantages(_episodes(batch), by_name))


def discounted_reinforce_pp(gamma: float) -> Ours:
    """Compute REINFORCE++'s advantages with a discount and penalties."""

    def compute(batch: Batch) -> Result:
        penalties = [row[mask] for row, mask in zip(batch["penalties"], batch["mask"], strict=True)]
        groups = reinforce_pp_advantages(_episodes(batch), gamma=gamma, penalties=penalties)
        return {"advantages": _tokens(batch, [row for group in groups for row in group])}

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
        row_advantages = np.asarray(compute(batch), np.float64).reshape(-1, 1)
        return {"advantages": row_advantages * batch["mask"]}

    return spread


def _episodes(batch: Batch, logprobs: npt.NDArray[Any] | None = None) -> Episodes:
    """Make episodes of one turn with as many tokens as are trained, and these logprobs, [N, T]."""
    task = Task(id="1", source="random", messages=({"role": "user", "content": "go"},))

    def episode(index: int) -> Episode:
        length = int(batch["mask"][index].sum())
        ones = (1,) * length
        row_logprobs = np.full(length, -1.0) if logprobs is None else logprobs[index][batch["mask"][index]]
        turn = Turn(prompt_ids=(1,), token_ids=ones, logprobs=row_logprobs, versions=ones, text="")
        parts = {str(part): float(value) for part, value in enumerate(batch["parts"][index]) if np.isfinite(value)}
        reward = float(batch["rewards"][index])
        score = None if np.isnan(reward) else Score(total=reward, parts=parts)
        return Episode(task=task, turns=(turn,), score=score)

    groups = range(0, len(batch["mask"]), GROUP_SIZE)
    return Episodes(
        groups=tuple(
            Group(task=task, episodes=tuple(map(episode, range(first, first + GROUP_SIZE)))) for first in groups
        ),
        version=0,
    )
