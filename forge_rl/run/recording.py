"""Makes the records of a run's episodes, with what the trainer found of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.metrics.episode_files import RecordedEpisode
from forge_rl.packing.rows import Packed
from forge_rl.packing.unpacking import trained_tokens, unpack
from forge_rl.types import Batch, Episode


def trained_episodes(
    step: int, batch: Batch, packed: Packed | None, scored: Sequence[npt.NDArray[np.float32]] | None
) -> Iterator[RecordedEpisode]:
    """Make the records of a batch.

    Args:
        packed: the packed batch; None leaves advantages unknown.
        scored: for each row of `packed`, `[L, 2]`, the trainer's logprobs of the targets and the entropies of their
            distributions; None leaves gaps and entropies unknown.
    """
    found: Mapping[int, torch.Tensor] = {}
    if packed is not None:
        found = unpack(
            packed,
            [
                torch.stack([row.advantages, logprobs - row.behaviour, entropies], dim=1)
                for row, (logprobs, entropies) in zip(packed.rows, _scores(packed, scored), strict=True)
            ],
        )
    size = len(batch.groups[0].episodes) if batch.groups else 1
    for place, (episode, mask) in enumerate(zip(batch.episodes, trained_tokens(batch), strict=True)):
        advantages: npt.NDArray[np.float32] | None = None
        gaps: npt.NDArray[np.float32] | None = None
        entropies: npt.NDArray[np.float32] | None = None
        trained: npt.NDArray[np.bool_] | None = None
        if packed is not None:
            advantages, gaps = np.zeros(len(mask), np.float32), np.full(len(mask), np.nan, np.float32)
            entropies = gaps.copy()
            if place in found:
                trained = mask
                advantages[trained], gaps[trained], entropies[trained] = found[place].numpy().T
        yield RecordedEpisode(
            step=step,
            kind="trained",
            group=place // size,
            index=place % size,
            version=batch.version,
            episode=episode,
            advantages=advantages,
            trainer_gaps=None if scored is None else gaps,
            entropies=None if scored is None else entropies,
            trained=trained,
        )


def _scores(packed: Packed, scored: Sequence[npt.NDArray[np.float32]] | None) -> Iterator[torch.Tensor]:
    """Yield the logprobs and entropies of each row, [2, L]; the engines' logprobs and no entropies if unknown."""
    if scored is not None:
        yield from (torch.from_numpy(each).T for each in scored)
    else:
        yield from (torch.stack([row.behaviour, torch.full_like(row.behaviour, np.nan)]) for row in packed.rows)


def evaluated_episodes(step: int, results: Mapping[str, Sequence[Sequence[Episode]]]) -> Iterator[RecordedEpisode]:
    """Make the records of an evaluation, from each set's results by task."""
    for name, tasks in results.items():
        for group, episodes in enumerate(tasks):
            for index, episode in enumerate(episodes):
                yield RecordedEpisode(step=step, kind="evaluated", set=name, group=group, index=index, episode=episode)
