"""Compaction: replaces a long conversation by a shorter one, so that the episode can continue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from forge_rl.errors import ConfigError, check_flags
from forge_rl.types import Message

Compact: TypeAlias = Callable[[Sequence[Message]], Sequence[Message] | Awaitable[Sequence[Message] | None] | None]
"""Returns a conversation that replaces everything the model has seen and written so far, or None to keep it. May be
async, for example to have another model write a summary."""

_CHARS_PER_TOKEN = 4


@dataclass(frozen=True, kw_only=True)
class DropOldOutputs:
    """Drops the outputs of old tool calls once a conversation is long; implements Compact.

        ToolEnv([search], compact=DropOldOutputs(above_chars=8000, keep=2))  # for a context of 4096 tokens

    The calls stay, so the model still sees its own requests. The episode continues in a new segment; both segments
    are trained.
    """

    above_chars: int = 2000
    """Compact a conversation with more characters than this; an English token has about four. The default is half of
    the default context."""
    keep: int = 1
    """Number of most recent outputs to keep."""
    left_out: str = "[left out]"
    """Text that replaces an output."""

    def __post_init__(self) -> None:
        check_flags(self, "DropOldOutputs: ", minimum={"above_chars": 1, "keep": 0})

    def __call__(self, messages: Sequence[Message]) -> Sequence[Message] | None:
        """Return the shorter conversation, or None if it is short enough or there is nothing left to drop."""
        if sum(len(str(message.get("content") or "")) for message in messages) <= self.above_chars:
            return None
        outputs = [index for index, message in enumerate(messages) if message["role"] == "tool"]
        old = {
            index
            for index in outputs[: max(0, len(outputs) - self.keep)]
            # A shorter output would only grow.
            if len(str(messages[index]["content"])) > len(self.left_out)
        }
        if not old:
            return None
        return [
            {**message, "content": self.left_out} if index in old else message for index, message in enumerate(messages)
        ]


def check_compaction(environment: object, max_model_len: int) -> None:
    """Check that conversations can become long enough to be compacted, in an environment or its sources' ones.

    Raises:
        ConfigError: no conversation of so many characters fits into the context.
    """
    # BySource has an environment for each source.
    nested = getattr(environment, "environments", None)
    for candidate in (environment, *(nested.values() if isinstance(nested, Mapping) else ())):
        compact = getattr(candidate, "compact", None)
        if isinstance(compact, DropOldOutputs) and compact.above_chars > _CHARS_PER_TOKEN * max_model_len:
            raise ConfigError(
                f"conversations are compacted above {compact.above_chars} characters, and a context of {max_model_len} "
                f"tokens has about {_CHARS_PER_TOKEN * max_model_len}, so none ever is",
                hint="lower above_chars (--env tools:compact_above_chars), or raise --generator.max-model-len",
            )
