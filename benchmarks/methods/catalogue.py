"""The methods that are compared: a loss, advantages, and what else a step needs, a line or a few for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import forge_rl as rl
from forge_rl.algorithms.loss_flag import METHODS
from forge_rl.types import Advantages

Kind = Literal["loss", "advantages", "correction", "regularisation"]
Valued: TypeAlias = Callable[["rl.Run[Any]", rl.Batch], Awaitable[Advantages]]
"""Computes advantages with what a run has, such as its critic."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: what differs from the clipped surrogate with a group's normalised rewards."""

    kind: Kind
    """What is compared, in all else the same."""
    loss: str = "clipped"
    """As --loss."""
    advantages: rl.Estimator = "grpo"
    """As --advantages; unused if there is `valued`."""
    valued: Valued | None = None
    entropy_target: float | None = None
    """Target of `AdaptiveEntropy`, in nats."""
    note: str = ""
    """What a reader of the table needs to know."""


async def _by_critic(run: rl.Run[Any], batch: rl.Batch) -> Advantages:
    """Value tokens by the critic, and train it on the returns, as `recipes/ppo.py`."""
    values = await run.critic.episode_values(batch)
    episode_advantages, returns = rl.gae(values, rl.token_rewards(batch.episodes))
    columns = {"returns": rl.by_group(batch, returns), "old_values": rl.by_group(batch, values)}
    advantages = rl.by_group(batch, episode_advantages)
    layout = run.critic.layout
    packed = await asyncio.to_thread(rl.pack, batch, advantages, layout, drop_uniform=False, columns=columns)
    await run.critic.step(packed, rl.ValueLoss(clip=0.5))
    return advantages


async def _by_greedy_answers(run: rl.Run[Any], batch: rl.Batch) -> Advantages:
    """Compare with the reward of the greedy answer to each task."""
    return rl.remax_advantages(batch.rewards, await run.rollouts.greedy_rewards(batch))


async def _by_parts(run: rl.Run[Any], batch: rl.Batch) -> Advantages:
    return rl.gdpo_advantages(batch, {"correct": 1.0, "stops": 0.5})


async def _by_best_of_4(run: rl.Run[Any], batch: rl.Batch) -> Advantages:
    return rl.pass_at_k_advantages(batch.rewards, 4)


def catalogue(baselines: rl.RoleBaselines) -> Mapping[str, Method]:
    """Return the methods by name.

    Args:
        baselines: the running means of RAE, which the run keeps.
    """

    async def by_running_mean(run: rl.Run[Any], batch: rl.Batch) -> Advantages:
        return baselines.advantages(batch)

    losses = [name for name, make in METHODS.items() if isinstance(make(), rl.PolicyLoss)]
    estimators: tuple[rl.Estimator, ...] = ("dr_grpo", "rloo", "opo", "max_rl", "batch_std")
    estimators += ("reinforce_pp", "reinforce_pp_baseline")
    return {
        **{name: Method(kind="loss", loss=name) for name in losses},
        "reinforce": Method(kind="loss", loss="reinforce", advantages="reinforce"),
        "ppo_critic": Method(kind="loss", loss="ppo", valued=_by_critic, note="GAE by a critic"),
        **{name: Method(kind="advantages", advantages=name) for name in estimators},
        "gdpo": Method(kind="advantages", valued=_by_parts, note="parts: correct, and half for stopping"),
        "pass_at_k": Method(kind="advantages", valued=_by_best_of_4, note="k = 4"),
        "remax": Method(kind="advantages", valued=_by_greedy_answers, note="a greedy answer to each task"),
        "rae": Method(kind="advantages", valued=by_running_mean, note="one role"),
        **{
            name: Method(kind="correction", loss=f"clipped:correction={name}")
            for name in ("decoupled", "tis", "icepop", "mis")
        },
        "off_policy_mask": Method(kind="correction", loss="clipped:off_policy_bound=0.5"),
        "kl_k2": Method(kind="regularisation", loss="clipped:kl_coef=0.01"),
        "kl_k3": Method(kind="regularisation", loss="clipped:kl_coef=0.01,kl_kind=k3"),
        "entropy": Method(kind="regularisation", loss="clipped:entropy_coef=0.003"),
        "adaptive_entropy": Method(kind="regularisation", entropy_target=0.3, note="target 0.3 nats"),
    }
