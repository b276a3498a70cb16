"""Finds the token with which a chat template ends turns."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge_rl.errors import ModelError
from forge_rl.types import Message


@dataclass(frozen=True, kw_only=True)
class TurnEnds:
    """Tokens with which a chat template ends the assistant's turns, found by rendering two turns."""

    last: int | None
    """Token after an answer that nothing follows."""
    inner: int | None
    """Token after an answer that a question follows. gpt-oss's, <|end|>, also ends thoughts, so it stops no engine."""

    @property
    def trained(self) -> int | None:
        """Token that a model learns to end its turns with; None if the template writes none."""
        return self.inner if self.last is None else self.last


def find_turn_ends(
    render: Callable[[Sequence[Message]], str], encode: Callable[[str], Sequence[int]], controls: frozenset[int]
) -> TurnEnds:
    """Render an answer, alone and before another question, and return the control tokens after it.

    Args:
        render: returns the text that the chat template writes for messages.
        encode: returns the token ids of raw text.
        controls: ids of the control tokens.
    """
    answer, question = (f"{name}-{secrets.token_hex(8)}" for name in ("ANSWER", "QUESTION"))
    first_message: Message = {"role": "user", "content": "?"}
    answer_message: Message = {"role": "assistant", "content": answer}
    second_message: Message = {"role": "user", "content": question}

    def token_after(*messages: Message) -> int | None:
        try:
            text = render(messages)
        except ModelError:
            return None
        # Random texts cannot occur in the template, so what is between them is the template's own.
        after = text.partition(answer)[2].partition(question)[0]
        # The first control token ends the turn; what follows it, such as a line break, separates turns.
        return next((token for token in encode(after) if token in controls), None)

    return TurnEnds(
        last=token_after(first_message, answer_message),
        inner=token_after(first_message, answer_message, second_message),
    )
