"""Seeds of all random draws, each derived from the run's seed, its purpose and its place in the run."""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

Purpose: TypeAlias = Literal[
    "episode",
    "evaluation",
    "turn",
    "agent turn",
    "branch",
    "choice",
    "engine",
    "minibatches",
    "token choice",
    "rounding",
    "adapter",
    "dropout",
    "sample",
]
"""Purposes of seeds, with the inputs of each:

- episode: the run's seed; the group's place and task, the sibling's index, and the number of attempts before.
- evaluation: the run's seed; the task, the sibling's index, and the number of attempts before, but not the step, so
  that evaluations differ by the weights alone.
- turn: the attempt's or branch's seed; the number of turns before.
- agent turn: the attempt's seed; the prompt, and how often it was asked before, as agents ask concurrently.
- branch: the seed of the attempt that it leaves; its node in the tree of episodes.
- choice: a client's seed; which of the completions of its request.
- engine: the run's seed; the engine, for its requests without a seed.
- minibatches: the run's seed; the version of the weights, and the epoch.
- token choice: the version of the weights, and the number of tokens, which are the same on all ranks.
- rounding: the optimizer's step, and the parameter's index, which are the same on all ranks.
- adapter: the run's seed; the module's name, for an adapter's first values, or the name of one of several adapters.
- dropout: the run's seed; the number of earlier minibatches, the row's tokens, and the module's name.
- sample: the server's seed; the places of a client's sampler and request in its session, for those without a seed.

The order of tasks keeps the derivations of its sources, as saved positions in it refer to them."""


def derive_seed(seed: int, purpose: Purpose, *place: int | str | tuple[int, ...]) -> int:
    """Return a seed of 63 bits for one draw: the same for the same arguments, and independent for all others.

        attempt = derive_seed(run_seed, "evaluation", task.source, task.id, sibling, attempts_before)
        turn = derive_seed(attempt, "turn", turns_before)

    Never add to a seed instead: with seed + engine, the second engine of seed 0 would be the first of seed 1. All bits
    are well mixed, also the lower 32, the only ones that torch uses on CPU.
    """
    digest = hashlib.blake2b(repr((seed, purpose, place)).encode(), digest_size=8).digest()
    # 63 bits, so that it fits a signed integer of 64.
    return int.from_bytes(digest, "little") >> 1
