"""Calls a solution's functions, in its session. It shares that session with the model's code, and is not trusted.

`plain` comes before this in the same module.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_rl.worlds.inside.plain import decode, encode


class Reply:
    """Text whose `repr` is the text itself, because a cell returns its value's `repr`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def call(target: str, packed_arguments: str) -> Reply:
    """Call a function of the solution with plain arguments; `Class().method` calls a method of a new object."""
    # The model's code ran as cells of this module.
    space: dict[str, Any] = sys.modules["__main__"].__dict__
    owner, _, method = target.partition("().")
    if owner not in space:
        raise NameError(f"{owner} is not defined")
    function = getattr(space[owner](), method) if method else space[owner]
    arguments, keywords = decode(packed_arguments)
    return Reply(encode(function(*arguments, **keywords)))
