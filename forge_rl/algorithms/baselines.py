"""Baselines that do not come from the batch: running means of each role's rewards (RAE), and greedy answers (ReMax)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError
from forge_rl.types import Batch, Episode

if TYPE_CHECKING:
    import torch


def remax_advantages(
    rewards: torch.Tensor, baselines: torch.Tensor, *, scored: torch.Tensor | None = None
) -> torch.Tensor:
    """Subtract from each reward the reward of the greedy answer to the same task.

        advantages = remax_advantages(batch.rewards, await run.rollouts.greedy_rewards(batch))

    ReMax (arXiv 2310.10505), as in verl, without the KL penalty.

    Args:
        rewards: [P, G].
        baselines: [P], the reward of each group's greedy episode; NaN if it has none, so that its group gets 0.
        scored: [P, G] bool, False for an episode without a score, which gets 0; by default all are scored.

    Returns:
        Advantages, [P, G] float32.

    Raises:
        ConfigError: the shapes do not fit, or a number is not finite.
    """
    if rewards.ndim != 2 or baselines.shape != rewards.shape[:1]:
        raise ConfigError(
            f"rewards have shape {list(rewards.shape)} and baselines {list(baselines.shape)}",
            hint="give one baseline to each group, [P] for rewards of [P, G]",
        )
    advantages = (rewards.detach().double() - baselines.detach().double()[:, None]).float()
    # The greedy answer failed through no fault of the policy: its group has nothing to be compared with.
    advantages = advantages.where(~baselines.isnan()[:, None], 0.0)
    if scored is not None:
        advantages = advantages.where(scored, 0.0)
    if not bool(advantages.isfinite().all()):
        raise ConfigError("a reward or baseline is not finite", hint="score a bad answer 0.0")
    return advantages


class RoleBaselines:
    """Running means of rewards by source and role, as baselines of self-play (RAE).

        baselines = RoleBaselines(role=lambda episode: str(episode.task.truth["player"]))
        advantages = baselines.advantages(batch)

    Role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119, equation 2 and algorithm 1): for each episode in
    turn, the baseline b of its source (the game) and role becomes decay * b + (1 - decay) * r, and r - b is its
    advantage. In a zero-sum game, the mean over both sides is always 0. As the baseline already has the
    episode's own reward, advantages are smaller by the factor `decay` than those to the baseline before it.

    A recipe makes one object and calls it once per batch; `run.keep("baselines", baselines)` saves its state in
    checkpoints.

    Args:
        decay: weight of the past in the running mean, from 0 to below 1.
        initial: baseline of a role that was not seen before; 0 in the paper.
        role: names an episode's role; by default all episodes of a source have the same.
    """

    def __init__(
        self, *, decay: float = 0.95, initial: float = 0.0, role: Callable[[Episode], str] = lambda episode: ""
    ) -> None:
        if not 0 <= decay < 1 or not math.isfinite(initial):
            raise ConfigError(
                f"decay is {decay} and initial {initial}", hint="give a decay from 0 to below 1, such as 0.95"
            )
        self._decay = decay
        self._initial = initial
        self._role = role
        self._means: dict[tuple[str, str], float] = {}

    def __getitem__(self, key: tuple[str, str]) -> float:
        """Return the baseline of a source and role."""
        return self._means.get(key, self._initial)

    def advantages(self, batch: Batch) -> torch.Tensor:
        """Update the baselines with a batch, episode by episode, and return the advantages, [P, G] float32.

        Episodes without a score have 0, and change no baseline.

        Raises:
            ConfigError: a reward is not finite; the baselines are then unchanged.
        """
        import torch

        # On a copy, so that a reward that is refused leaves the baselines unchanged.
        means, rows = dict(self._means), []
        for group in batch.groups:
            rows.append([0.0] * len(group.episodes))
            for place, episode in enumerate(group.episodes):
                if episode.score is None:
                    continue
                if not math.isfinite(episode.reward):
                    raise ConfigError(
                        f"the reward of {episode.task.id} is {episode.reward}", hint="score a bad answer 0.0"
                    )
                key = episode.task.source, self._role(episode)
                # SPIRAL, algorithm 1: first the baseline, then the advantage to the new one.
                means[key] = self._decay * means.get(key, self._initial) + (1 - self._decay) * episode.reward
                rows[-1][place] = episode.reward - means[key]
        self._means = means
        return torch.tensor(rows, dtype=torch.float32)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the baselines by source and role, as JSON."""
        state: dict[str, dict[str, float]] = {}
        for (source, role), mean in self._means.items():
            state.setdefault(source, {})[role] = mean
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Replace all baselines with a `state_dict`.

        Raises:
            ConfigError: it is not one.
        """
        try:
            means = {(source, role): float(mean) for source, roles in state.items() for role, mean in roles.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the state of role baselines is malformed: {error}", hint="give what state_dict returned"
            ) from error
        if not all(map(math.isfinite, means.values())):
            raise ConfigError(
                "the state of role baselines has numbers that are not finite",
                hint="load the state_dict of an earlier step",
            )
        self._means = means

    def __repr__(self) -> str:
        means = ", ".join(f"{source}/{role}: {mean:.3g}" for (source, role), mean in self._means.items())
        return f"RoleBaselines({means})"
