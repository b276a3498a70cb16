"""Regroups what a trainer computed for packed rows by episode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from forge_rl.packing.rows import Packed
from forge_rl.types import Batch


def unpack(packed: Packed, values: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Regroup per-position results by episode.

        logprobs = unpack(packed, await run.trainer.logprobs(packed))

    Args:
        values: [L] for each row of `packed`.

    Returns:
        For each episode with trained tokens, by its index in batch.episodes, the values of those tokens, turn after
        turn. Episodes that were left out are absent.
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
    result = []
    for index, episode in enumerate(batch.episodes):
        trained = np.concatenate([np.zeros(0, np.bool_), *(np.isfinite(turn.logprobs) for turn in episode.turns)])
        own = np.zeros(len(trained), np.float32)
        if index in found:
            there = trained.nonzero()[0]
            own = found[index].float().numpy()[np.maximum(np.searchsorted(there, np.arange(len(own)), "right") - 1, 0)]
        result.append(own)
    return result
