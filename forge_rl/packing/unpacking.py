"""Regroups what a trainer computed for packed rows by episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.packing.rows import Packed
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
    keys = np.concatenate(
        [torch.stack([r.positions, r.turns, r.episodes])[:, r.mask].cpu().numpy() for r in packed.rows], axis=1
    )
    flat = torch.cat([value[row.mask.to(value.device)] for row, value in zip(packed.rows, values, strict=True)])
    ordered = flat[torch.from_numpy(np.lexsort(keys)).to(flat.device)]
    episodes, counts = np.unique(keys[2], return_counts=True)
    return dict(zip(episodes.tolist(), ordered.split(counts.tolist()), strict=True))


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
