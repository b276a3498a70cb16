"""Reads requests: long ones in a thread, one at a time; those that cannot fit the model's context are refused."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forge_rl.gateway.errors import ApiError
from forge_rl.tokens.tokenizer import Tokenizer

_LONG_BYTES = 32 << 10
"""Length from which bodies are read in the thread, so that they do not block the event loop."""
_MOST_WAITING_BYTES = 256 << 20
"""Maximum total bytes of bodies that wait for the thread."""
_MOST_VALUES = 1 << 17
"""Maximum values in a request's JSON; twice the model's context if that is more."""
_MOST_CONTAINERS = 3 << 12
"""Maximum objects and arrays in it, which take more time and memory."""
_BYTES_PER_TOKEN = 4
"""Usual bytes per token; a text of at least as many bytes as the context of such tokens is tokenized to check it."""
_SLICE_CHARACTERS = 1 << 16

T = TypeVar("T")


class Reader:
    """Runs the work that grows with a request's length.

    Args:
        tokenizer: the model's tokenizer.
        max_model_len: length of the model's context.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._limit = max_model_len
        self._longest_token = max(map(len, tokenizer.hf.get_vocab()))
        self._most_values = max(_MOST_VALUES, 2 * max_model_len)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gateway-requests")
        """One thread, so that clients' requests cannot take the event loop's core."""
        self._threads: set[int] = set()
        self._waiting_bytes = 0

    def close(self) -> None:
        """Stop reading requests."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def read(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """Parse a request's body with `read`, in the thread if it is long.

        Raises:
            ApiError: the body has too many values, or too many bodies wait. Exceptions of `read` propagate.
        """

        def read_long() -> T:
            if holds_more(body, self._most_values, _MOST_CONTAINERS):
                problem = (
                    f"the body holds more than {self._most_values} values, or {_MOST_CONTAINERS} objects and arrays"
                )
                raise ApiError(413, problem, code="request_too_large")
            return read(body)

        return await self.run(len(body), read_long) if len(body) >= _LONG_BYTES else read(body)

    async def run(self, body_bytes: int, work: Callable[[], T]) -> T:
        """Run work of a request, in the thread if its body is long; called from the thread, it runs directly.

        Raises:
            ApiError: too many requests wait. Exceptions of `work` propagate.
        """
        # Work that the thread itself starts would wait forever for its only thread.
        if body_bytes < _LONG_BYTES or threading.get_ident() in self._threads:
            return work()
        if self._waiting_bytes + body_bytes > _MOST_WAITING_BYTES:
            raise ApiError(503, "too many long requests wait; try again", code="busy", headers={"retry-after": "1"})
        self._waiting_bytes += body_bytes
        # Work reads REQUEST; unlike asyncio.to_thread, an executor does not pass context variables on.
        context = contextvars.copy_context()

        def noted() -> T:
            self._threads.add(threading.get_ident())
            return context.run(work)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, noted)
        finally:
            self._waiting_bytes -= body_bytes

    def check_room(self, text: str | int, param: str) -> None:
        """Raise ApiError if a text, or a number of tokens, cannot fit the model's context."""
        min_tokens = text if isinstance(text, int) else self._least_tokens(text)
        if min_tokens > self._limit:
            raise too_long(
                f"This model's maximum context length is {self._limit} tokens. However, your {param} resulted in at "
                f"least {min_tokens} tokens. Please reduce the length of the {param}.",
                param,
            )

    def check_completion(
        self, prompt_tokens: int, max_tokens: int | None, param: str, *, may_truncate: bool = False
    ) -> None:
        """Raise ApiError if a prompt leaves too little room for its completion.

        Args:
            prompt_tokens: length of the prompt.
            max_tokens: maximum tokens of the completion; None means the rest of the context.
            param: the prompt's parameter.
            may_truncate: allow the context to truncate the completion.
        """
        room = self._limit - prompt_tokens
        tokens = max(max_tokens if max_tokens is not None else room, 1)
        if room < 1 or (tokens > room and not may_truncate):
            raise too_long(
                f"This model's maximum context length is {self._limit} tokens. However, you requested "
                f"{prompt_tokens + tokens} tokens ({prompt_tokens} in the {param}, {tokens} in the completion). "
                f"Please reduce the length of the {param} or completion.",
                param,
            )

    def _least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens in a text.

        A text that may exceed the context is tokenized in slices until it does, with a margin of a quarter for tokens
        that slice borders add; tokenizing all of it would take seconds.
        """
        min_tokens = len(text) // self._longest_token
        if (
            # The first bound proves that the text is too long; below the second, it usually fits, and tokenizing it is
            # cheap.
            min_tokens > self._limit
            or (len(text) if text.isascii() else 4 * len(text)) < _BYTES_PER_TOKEN * self._limit
        ):
            return min_tokens
        num_tokens = 0
        for begin in range(0, len(text), _SLICE_CHARACTERS):
            num_tokens += len(self._tokenizer.encode(text[begin : begin + _SLICE_CHARACTERS]))
            if num_tokens > 1.25 * self._limit:
                return num_tokens * 4 // 5
        return min_tokens


def holds_more(text: bytes, values: int, containers: int) -> bool:
    """Return whether JSON exceeds a number of values, or of objects and arrays, without the memory of parsing it."""
    if _within(text, values, containers):
        return False
    # Commas and brackets in strings do not count. A value has at most two strings: its key and itself.
    most_quotes = 4 * (values + containers)
    # Every second piece lies outside of strings.
    pieces = text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"', most_quotes + 1)
    return len(pieces) > most_quotes + 1 or not _within(b"".join(pieces[::2]), values, containers)


def _within(text: bytes, values: int, containers: int) -> bool:
    return text.count(b",") < values and text.count(b"[") + text.count(b"{") <= containers


def too_long(message: str, param: str) -> ApiError:
    """Return the error for a prompt that does not fit the model's context."""
    return ApiError(400, message, param=param, code="context_length_exceeded")
