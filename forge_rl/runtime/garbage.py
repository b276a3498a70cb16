"""Fewer searches for garbage, in a process that holds thousands of episodes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NEW_OBJECTS = 100_000


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """While the body runs, look for garbage in cycles once in 100,000 new objects instead of 700.

    What thousands of episodes hold lives longer than that: Python would look at all of it again and again, for as long
    as all else takes. What is in no cycle is freed at once in any case.
    """
    _, *older = before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *older)
    try:
        yield
    finally:
        gc.set_threshold(*before)
