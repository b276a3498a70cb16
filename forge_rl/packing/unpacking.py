"""Regroups what a trainer computed for packed rows by episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.packing.rows import Packed, Row
from forge_rl.packing.trees import first_holders
from forge_rl.types import Batch, Episode


def unpack(packed: Packed, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
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
    ordered = flat[torch.from_numpy(order).to(flat.device)]
    return {episode: ordered[place] for episode, place in places.items()}


def trained_order(packed: Packed) -> tuple[npt.NDArray[np.int64], dict[int, slice]]:
    """Return how to bring the trained tokens of all rows, [N] row after row, into the order of the episodes.

    Returns:
        [N], the index of each token in that order, turn after turn; and where each episode's tokens are in it, by its
        index in batch.episodes.
    """
    runs, total = [np.zeros((5, 0), np.int64)], 0
    for row in packed.rows:  # tokens of a turn lie in long runs, which are sorted instead of them
        mask = row.mask.cpu().numpy()
        keys = [each.cpu().numpy()[mask] for each in (row.positions, row.turns, row.episodes)]
        count = len(keys[0])
        breaks = np.logical_or.reduce([np.diff(key) != step for key, step in zip(keys, (1, 0, 0), strict=True)])
        starts = np.concatenate([np.zeros(min(count, 1), np.int64), breaks.nonzero()[0] + 1])
        runs.append(np.stack([*(key[starts] for key in keys), starts + total, np.diff(starts, append=count)]))
        total += count
    found = np.concatenate(runs, axis=1)
    found = found[:, np.lexsort(found[:3])]
    episodes, starts, lengths = found[2:]
    ends = np.cumsum(lengths)
    order = np.repeat(starts - ends + lengths, lengths) + np.arange(total)
    own, firsts = np.unique(episodes, return_index=True)
    bounds = [*(ends - lengths)[firsts].tolist(), total]
    return order, {episode: slice(*bounds[at : at + 2]) for at, episode in enumerate(own.tolist())}


def rounded_scores(row: Row, scores: torch.Tensor) -> npt.NDArray[np.uint16]:
    """Shorten what a trainer found of a row, to send it: only trained targets, rounded to 8 significant bits.

    Args:
        scores: [L, 2], logprobs of the targets and entropies of their distributions, in host memory.

    Returns:
        [2, n], the bits of bfloat16: logprobs minus the engine's, and entropies; see `read_scores`.
    """
    mask = row.mask.numpy()
    kept = np.ascontiguousarray(scores.float().numpy()[mask].T)
    kept[0] -= row.behaviour.numpy()[mask]
    return torch.from_numpy(kept).bfloat16().view(torch.uint16).numpy()


def read_scores(found: Sequence[npt.NDArray[np.uint16]]) -> npt.NDArray[np.float32]:
    """Return the numbers of `rounded_scores`, [2, N], of row after row."""
    bits = np.zeros((2, sum(each.shape[1] for each in found), 2), np.uint16)  # the high half of each number comes last
    np.concatenate([np.zeros((2, 0), np.uint16), *found], axis=1, out=bits[:, :, 1])
    return bits.view(np.float32)[:, :, 0]


def trained_tokens(batch: Batch) -> list[npt.NDArray[np.bool_]]:
    """Return which tokens of each episode are trained there, [T] bool for each: those with a finite logprob, unless an
    earlier episode of its group has them in common with it, see `Turn.branch`."""
    return [
        np.concatenate(
            [np.zeros(0, np.bool_), *(np.isfinite(t.logprobs) & (h[0] == n) for t, h in zip(e.turns, own, strict=True))]
        )
        for group in batch.groups
        for n, (e, own) in enumerate(zip(group.episodes, first_holders(group.episodes), strict=True))
    ]


def values_of_episodes(batch: Batch, packed: Packed, values: Sequence[torch.Tensor]) -> list[npt.NDArray[np.float32]]:
    """Arrange a critic's values by episode, with one for each token that the model generated, as `gae` needs them.

    A token that is not trained, as the engine returned no finite logprob for it, has the value of the token before it
    or, at the start, of the first one that is trained: it adds no error of its own to an advantage.

    Args:
        packed: the whole batch, with no group left out.
        values: [L] for each row of `packed`.

    Returns:
        [T] float32 for each episode; 0 if none of its tokens is trained.
    """
    found = unpack(packed, values)
    result = list[npt.NDArray[np.float32]]()
    for index, trained in enumerate(trained_tokens(batch)):
        own = np.zeros(len(trained), np.float32)
        if index in found:
            known = trained.nonzero()[0]
            own = found[index].float().numpy()[np.maximum(np.searchsorted(known, np.arange(len(own)), "right") - 1, 0)]
        result.append(own)
    size = len(batch.groups[0].episodes) if batch.groups else 1
    for p, group in enumerate(batch.groups):
        for number, holders in enumerate(first_holders(group.episodes)):
            for turn, (first, same) in enumerate(holders):
                if first != number:
                    here = _tokens_of(group.episodes[number], turn)
                    there = _tokens_of(group.episodes[first], same)
                    result[p * size + number][here] = result[p * size + first][there]
    return result


def _tokens_of(episode: Episode, turn: int) -> slice:
    """Return where the tokens of a turn are among those that the episode generated."""
    start = sum(len(each.token_ids) for each in episode.turns[:turn])
    return slice(start, start + len(episode.turns[turn].token_ids))
