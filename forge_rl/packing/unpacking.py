"""Regroups a trainer's results for packed rows by episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.packing.rows import PackedBatch, Row
from forge_rl.packing.trees import first_holders
from forge_rl.types import Batch, Episode


def unpack(packed: PackedBatch, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Regroup per-position results by episode.

        logprobs = unpack(packed, await run.trainer.logprobs(packed))

    Args:
        values: [L] for each row of `packed`.

    Returns:
        For each episode with trained tokens, by its index in batch.episodes, the values of those tokens, turn after
        turn; see `trained_tokens`. Episodes that were left out are absent.
    """
    assert len(values) == len(packed.rows), f"{len(values)} tensors for {len(packed.rows)} rows"
    if not packed.rows:
        return {}
    order, places = trained_order(packed)
    flat = torch.cat([value[row.mask.to(value.device)] for row, value in zip(packed.rows, values, strict=True)])
    sorted_values = flat[torch.from_numpy(order).to(flat.device)]
    return {episode: sorted_values[place] for episode, place in places.items()}


def trained_order(packed: PackedBatch) -> tuple[npt.NDArray[np.int64], dict[int, slice]]:
    """Return the order that sorts the trained tokens of all rows, [N] row after row, by episode and turn.

    Returns:
        [N], the index of each token in that order; and the slice of each episode's tokens in it, by the episode's index
        in batch.episodes.
    """
    runs, total = [np.zeros((5, 0), np.int64)], 0
    for row in packed.rows:  # tokens of a turn lie in long runs: sorting the runs is cheaper than sorting tokens
        mask = row.mask.cpu().numpy()
        keys = [tensor.cpu().numpy()[mask] for tensor in (row.positions, row.turns, row.episodes)]
        count = len(keys[0])
        # A run ends where the position does not go up by 1, or the turn or episode changes.
        breaks = np.logical_or.reduce([np.diff(key) != step for key, step in zip(keys, (1, 0, 0), strict=True)])
        starts = np.concatenate([np.zeros(min(count, 1), np.int64), breaks.nonzero()[0] + 1])
        runs.append(np.stack([*(key[starts] for key in keys), starts + total, np.diff(starts, append=count)]))
        total += count
    sorted_runs = np.concatenate(runs, axis=1)
    sorted_runs = sorted_runs[:, np.lexsort(sorted_runs[:3])]
    episodes, starts, lengths = sorted_runs[2:]
    ends = np.cumsum(lengths)
    # Run by run, the tokens' old places: start, start + 1, ...
    order = np.repeat(starts - ends + lengths, lengths) + np.arange(total)
    episode_indices, firsts = np.unique(episodes, return_index=True)
    bounds = [*(ends - lengths)[firsts].tolist(), total]
    return order, {episode: slice(*bounds[i : i + 2]) for i, episode in enumerate(episode_indices.tolist())}


def rounded_scores(row: Row, scores: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Shorten a trainer's scores of a row for sending: only trained targets, rounded to 8 significant bits.

    Args:
        scores: [L, 2], logprobs of the targets and entropies of their distributions, in host memory.

    Returns:
        [2, n], the bits of bfloat16: logprobs minus the engine's, and entropies; see `read_scores`.
    """
    mask = row.mask.numpy()
    trained_scores = np.ascontiguousarray(scores.float().numpy()[mask].T)
    # The difference is small, so its rounding is, too; the controller knows the engine's logprobs.
    trained_scores[0] -= row.behaviour.numpy()[mask]
    return torch.from_numpy(trained_scores).bfloat16().view(torch.uint16).numpy()


def read_scores(rounded: Sequence[npt.NDArray[np.uint16]]) -> npt.NDArray[np.float32]:
    """Return the numbers of `rounded_scores` of all rows, [2, N], row after row."""
    # The high half of each float32, which is the bfloat16, comes last.
    bits = np.zeros((2, sum(array.shape[1] for array in rounded), 2), np.uint16)
    np.concatenate([np.zeros((2, 0), np.uint16), *rounded], axis=1, out=bits[:, :, 1])
    return bits.view(np.float32)[:, :, 0]


def trained_tokens(batch: Batch) -> list[npt.NDArray[np.bool_]]:
    """Return which tokens of each episode it trains, [T] bool for each: those with a finite logprob, except in turns
    that an earlier episode of the group shares and trains, see `Turn.branch`."""
    return [
        np.concatenate(
            [
                np.zeros(0, np.bool_),
                *(np.isfinite(t.logprobs) & (h[0] == n) for t, h in zip(e.turns, holders, strict=True)),
            ]
        )
        for group in batch.groups
        for n, (e, holders) in enumerate(zip(group.episodes, first_holders(group.episodes), strict=True))
    ]


def values_of_episodes(
    batch: Batch, packed: PackedBatch, values: Sequence[torch.Tensor]
) -> list[npt.NDArray[np.float32]]:
    """Arrange a critic's values by episode, with one for each token that the model generated, as `gae` needs them.

    A token that is not trained, as the engine returned no finite logprob for it, has the value of the token before it
    or, at the start, of the first one that is trained: it adds no error of its own to an advantage.

    Args:
        packed: the whole batch, with no group left out.
        values: [L] for each row of `packed`.

    Returns:
        [T] float32 for each episode; 0 if none of its tokens is trained.
    """
    trained_values = unpack(packed, values)
    episode_values = list[npt.NDArray[np.float32]]()
    for index, trained in enumerate(trained_tokens(batch)):
        token_values = np.zeros(len(trained), np.float32)
        if index in trained_values:
            trained_positions = trained.nonzero()[0]
            # For each token the nearest trained one at or before it, or the first of all.
            sources = np.maximum(np.searchsorted(trained_positions, np.arange(len(token_values)), "right") - 1, 0)
            token_values = trained_values[index].float().numpy()[sources]
        episode_values.append(token_values)
    # Turns in common were computed once, in the episode that trains them; the others get a copy.
    size = len(batch.groups[0].episodes) if batch.groups else 1
    for p, group in enumerate(batch.groups):
        for number, holders in enumerate(first_holders(group.episodes)):
            for turn, (first, first_turn) in enumerate(holders):
                if first != number:
                    span = _tokens_of(group.episodes[number], turn)
                    first_span = _tokens_of(group.episodes[first], first_turn)
                    episode_values[p * size + number][span] = episode_values[p * size + first][first_span]
    return episode_values


def _tokens_of(episode: Episode, turn: int) -> slice:
    """Return the slice of a turn's tokens among the tokens that the episode generated."""
    start = sum(len(preceding_turn.token_ids) for preceding_turn in episode.turns[:turn])
    return slice(start, start + len(episode.turns[turn].token_ids))
