"""Makes the records of a run's episodes, including the trainer's advantages, gaps and entropies for their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from forge_rl.metrics.episode_files import RecordedEpisode
from forge_rl.packing.rows import PackedBatch
from forge_rl.packing.unpacking import read_scores, trained_order, trained_tokens
from forge_rl.types import Batch, Episode


def trained_episodes(
    step: int, batch: Batch, packed: PackedBatch | None, scored: Sequence[npt.NDArray[np.uint16]] | None
) -> Iterator[RecordedEpisode]:
    """Make the records of a batch.

    Args:
        packed: the packed batch; None leaves advantages unknown.
        scored: `rounded_scores` of each row of `packed`; None leaves gaps and entropies unknown.
    """
    places: Mapping[int, slice] = {}
    ordered = list[npt.NDArray[np.float32]]()
    if packed is not None:
        order, places = trained_order(packed)
        # An empty first part, as a batch without rows would leave nothing to concatenate.
        advantages = [np.zeros(0, np.float32), *(row.advantages.numpy()[row.mask.numpy()] for row in packed.rows)]
        columns = [np.concatenate(advantages), *(() if scored is None else read_scores(scored))]
        # Columns of all trained tokens, sorted by episode: each episode is then one slice of them.
        ordered = [column[order] for column in columns]
    size = len(batch.groups[0].episodes) if batch.groups else 1
    for place, (episode, mask) in enumerate(zip(batch.episodes, trained_tokens(batch), strict=True)):
        episode_columns = (column[places.get(place, slice(0))] for column in ordered)
        # Advantages, gaps and entropies, in the order of the columns; those that are unknown stay None.
        token_values: list[npt.NDArray[np.float32] | None] = [None, None, None]
        for index, (values, fill) in enumerate(zip(episode_columns, (0.0, np.nan, np.nan), strict=False)):
            token_values[index] = _spread(values, mask, fill)
        episode_advantages, gaps, entropies = token_values
        # Given answers have no version and are packed with advantages of 0, which would be recorded as a finding.
        is_given = all((turn.versions < 0).all() for turn in episode.turns)
        if is_given and episode_advantages is not None and not episode_advantages.any():
            episode_advantages = None
        yield RecordedEpisode(
            step=step,
            kind="trained",
            group=place // size,
            index=place % size,
            version=batch.version,
            episode=episode,
            advantages=episode_advantages,
            trainer_gaps=gaps,
            entropies=entropies,
            trained=mask if place in places else None,
        )


def _spread(values: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_], fill: float) -> npt.NDArray[np.float32]:
    """Return the values of the tokens in the mask, [T]; `fill` elsewhere, and everywhere if there are none."""
    if len(values) == len(mask):
        return values
    spread = np.full(len(mask), fill, np.float32)
    if len(values):
        spread[mask] = values
    return spread


def evaluated_episodes(step: int, results: Mapping[str, Sequence[Sequence[Episode]]]) -> Iterator[RecordedEpisode]:
    """Make the records of an evaluation, from each set's results by task."""
    for name, tasks in results.items():
        for group, episodes in enumerate(tasks):
            for index, episode in enumerate(episodes):
                yield RecordedEpisode(step=step, kind="evaluated", set=name, group=group, index=index, episode=episode)
