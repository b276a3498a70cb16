"""Listeners are told in order, also after one that raises."""

from __future__ import annotations

import pytest

from forge_rl.system.listeners import Listeners


def test_listeners_are_told_in_order_until_they_are_discarded():
    texts: list[str] = []
    listeners = Listeners[[str]]()

    def second(text: str) -> None:
        texts.append(f"second {text}")
        listeners.discard(second)

    listeners.add(second)
    listeners.add(lambda text: texts.append(f"third {text}"))
    listeners.add(lambda text: texts.append(f"first {text}"), first=True)
    listeners.tell("a")
    listeners.tell("b")
    listeners.discard(second)
    assert texts == ["first a", "second a", "third a", "first b", "third b"]


def test_a_listener_that_raises_keeps_no_other_from_being_told():
    errors: list[object] = []

    def full() -> None:
        raise OSError("no space left")

    listeners, failures = Listeners[[]](), list[Exception]()
    guarded = Listeners[[]](failures.append)
    for told_of_errors in (listeners, guarded):
        told_of_errors.add(full)
        told_of_errors.add(lambda: errors.append(None))
    with pytest.raises(OSError, match="no space left"):
        listeners.tell()
    guarded.tell()
    assert len(errors) == 2
    assert [str(failure) for failure in failures] == ["no space left"]
