"""Deals a batch's groups to minibatches so that each update sees every source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def deal(sources: Sequence[str], trained: Sequence[bool], minibatches: int, *, seed: int) -> list[list[int]]:
    """Deal groups to minibatches at random, each source as evenly as possible; deterministic for a seed.

        deal(["a", "a", "b", "b"], [True] * 4, 2, seed=3)  # such as [[0, 3], [1, 2]]

    Per source, the number of groups differs by at most one between minibatches, and so does the number of trained
    groups, which are dealt first, as other groups contribute nothing to an update.

    Args:
        sources: source of each group.
        trained: False for groups that are left out of training.
        seed: not negative.

    Returns:
        Indexes of each minibatch's groups, ascending.
    """
    if minibatches == 1:
        return [list(range(len(sources)))]
    random = np.random.default_rng(seed)
    order = random.permutation(len(sources)).tolist()
    # Source after source, in random order; within one, in the random order of its groups.
    source_order = {name: place for place, name in enumerate(dict.fromkeys(sources[index] for index in order))}
    # Breaks ties, so that no minibatch always gets the odd group.
    lead = random.permutation(minibatches).tolist()
    parts: list[list[int]] = [[] for _ in range(minibatches)]
    source_counts = [Counter[str]() for _ in range(minibatches)]
    for index in sorted(order, key=lambda index: (not trained[index], source_order[sources[index]])):
        name = sources[index]
        # Fewest groups of the source first, then fewest groups at all.
        part = min(range(minibatches), key=lambda part: (source_counts[part][name], len(parts[part]), lead[part]))
        parts[part].append(index)
        source_counts[part][name] += 1
    return [sorted(part) for part in parts]
