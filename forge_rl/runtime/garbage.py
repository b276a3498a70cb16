"""Rarer garbage collection in a process that holds thousands of episodes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NEW_OBJECTS = 100_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect cyclic garbage once in 100,000 new objects, instead of 700, while the body runs.

    Objects of thousands of episodes live longer than that: Python would look at all of them again and again, which
    takes as long as all else. Objects in no cycle are freed at once in any case.
    """
    _, *older = before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *older)
    try:
        yield
    finally:
        gc.set_threshold(*before)
