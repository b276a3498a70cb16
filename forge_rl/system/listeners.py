"""Listeners: callables that an object calls when something happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Listeners(Generic[P]):
    """Callables to call at an event, in the order in which they were added.

        mixture.changed = Listeners[[str]]()
        mixture.changed.add(print)
        mixture.changed.tell("mixture maths 1 -> 2")

    Change the state before `tell`. Then a listener that raises neither leaves it half-changed nor stops the others.

    Args:
        failed: called with each listener's exception; by default the first one is raised once all have been called.
    """

    def __init__(self, failed: Callable[[Exception], object] | None = None) -> None:
        self._failed = failed
        self._listeners: list[Callable[P, object]] = []

    def add(self, listener: Callable[P, object], *, first: bool = False) -> None:
        """Add a listener; `first` puts it before the others."""
        self._listeners.insert(0 if first else len(self._listeners), listener)

    def discard(self, listener: Callable[P, object]) -> None:
        """Remove a listener, if it was added."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def __len__(self) -> int:
        return len(self._listeners)

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all listeners."""
        errors: list[Exception] = []
        for listener in tuple(self._listeners):  # one may add or discard others
            try:
                listener(*args, **kwargs)
            except Exception as error:
                errors.append(error)
                if self._failed is not None:
                    self._failed(error)
        if errors and self._failed is None:
            raise errors[0]
