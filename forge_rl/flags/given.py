"""Which flags a user has set, for settings whose default depends on other flags."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

_GIVEN: ContextVar[frozenset[str] | None] = ContextVar("flags that the user has set", default=None)


def is_given(flag: str) -> bool:
    """Return True if the command line or config file that is being parsed sets a flag, such as trainer.optimizer.lr,
    even to its default."""
    return flag in (_GIVEN.get() or ())


def given_flags() -> tuple[str, ...] | None:
    """Return the flags that the command line or config file that is being parsed sets; None outside of parsing."""
    return None if (flags := _GIVEN.get()) is None else tuple(sorted(flags))


@contextlib.contextmanager
def giving(flags: Collection[str]) -> Iterator[None]:
    """Make `is_given` report these flags while the body builds a config."""
    token = _GIVEN.set(frozenset(flags))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def flags_in(table: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Yield the flags that a config file's table sets."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flags_in(value, f"{group}{key}.")
        else:
            yield f"{group}{key}"
