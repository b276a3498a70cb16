"""Compaction: a shorter conversation in place of one that has grown long, so that an episode can go on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forge_rl.errors import check_flags
from forge_rl.types import Message

Compact: TypeAlias = Callable[[Sequence[Message]], Sequence[Message] | Awaitable[Sequence[Message] | None] | None]
"""Returns a conversation that takes the place of what the model was shown and has written so far, or None to leave that
as it is. It may be async, such as one that has another model write a summary."""


@dataclass(frozen=True, kw_only=True)
class DropOldOutputs:
    """Leaves out the outputs of old tool calls once a conversation is long; implements Compact.

        ToolEnv([search], compact=DropOldOutputs(above_chars=8000, keep=2))

    The calls stay, so that the model sees what it has asked. The episode goes on in a new segment; both are trained.
    """

    above_chars: int = 8000
    """Characters of all messages above which a conversation is compacted: about four make a token in English."""
    keep: int = 1
    """Number of the last outputs that stay."""
    left_out: str = "[left out]"
    """Text in place of an output."""

    def __post_init__(self) -> None:
        check_flags(self, "DropOldOutputs: ", least={"above_chars": 1, "keep": 0})

    def __call__(self, messages: Sequence[Message]) -> Sequence[Message] | None:
        """Return the shorter conversation, or None where it is short enough or nothing is left to leave out."""
        if sum(len(str(message.get("content") or "")) for message in messages) <= self.above_chars:
            return None
        outputs = [place for place, message in enumerate(messages) if message["role"] == "tool"]
        old = {
            place
            for place in outputs[: len(outputs) - self.keep]
            if len(str(messages[place]["content"])) > len(self.left_out)
        }
        if not old:
            return None
        return [
            {**message, "content": self.left_out} if place in old else message for place, message in enumerate(messages)
        ]
