"""Reads long requests beside the event loop, one after the other, and refuses what cannot fit the model."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.json_text import holds_more

_LONG_BYTES = 32 << 10
"""Bodies from this length are read beside the event loop: they would hold up everything else in it."""
_MOST_WAITING_BYTES = 256 << 20
"""Bodies that may wait for their turn to be read, together."""
_MOST_VALUES = 1 << 17
"""Values in the JSON of a request, where the model's context is not half as long."""
_MOST_CONTAINERS = 3 << 12
"""Objects and arrays in it, which take more time and memory."""
_BYTES_PER_TOKEN = 4
"""Length of usual text, from which on it is counted whether it fits the context."""
_SLICE_CHARACTERS = 1 << 16

T = TypeVar("T")


class Reader:
    """Does the work that grows with a request's length.

    Args:
        tokenizer: the model's tokenizer.
        max_model_tokens: the model's context.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._limit = max_model_tokens
        self._longest_token = max(map(len, tokenizer.hf.get_vocab()))
        self._most_values = max(_MOST_VALUES, 2 * max_model_tokens)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gateway-requests")
        """One thread, so that the loop keeps its core, whatever clients send and do not wait for."""
        self._threads: set[int] = set()
        self._waiting_bytes = 0

    def close(self) -> None:
        """Read no more requests."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def read(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """Read the body of a request, beside the event loop if it is long.

        Raises:
            ApiError: it holds too much, or too many wait to be read. What `read` raises comes through.
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
        """Do work of a request with a body of that length, beside the event loop if it is long and not there already.

        Raises:
            ApiError: too many wait to be read. What `work` raises comes through.
        """
        if body_bytes < _LONG_BYTES or threading.get_ident() in self._threads:
            return work()
        if self._waiting_bytes + body_bytes > _MOST_WAITING_BYTES:
            raise ApiError(503, "too many long requests wait; try again", code="busy", headers={"retry-after": "1"})
        self._waiting_bytes += body_bytes
        context = contextvars.copy_context()

        def noted() -> T:
            self._threads.add(threading.get_ident())
            return context.run(work)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, noted)
        finally:
            self._waiting_bytes -= body_bytes

    def check_room(self, text: str | int, param: str) -> None:
        """Raise ApiError if a text, or so many tokens, cannot fit the model's context."""
        least = text if isinstance(text, int) else self._least_tokens(text)
        if least > self._limit:
            raise too_long(
                f"This model's maximum context length is {self._limit} tokens. However, your {param} resulted in at "
                f"least {least} tokens. Please reduce the length of the {param}.",
                param,
            )

    def check_completion(self, prompt_tokens: int, asked: int | None, param: str, *, cut: bool = False) -> None:
        """Raise ApiError if a prompt leaves no room for a completion of so many tokens.

        Args:
            prompt_tokens: length of the prompt.
            asked: most tokens of the completion; None takes what is left.
            param: name of the prompt.
            cut: a completion may be cut to what is left.
        """
        room = self._limit - prompt_tokens
        tokens = max(asked if asked is not None else room, 1)
        if room < 1 or (tokens > room and not cut):
            raise too_long(
                f"This model's maximum context length is {self._limit} tokens. However, you requested "
                f"{prompt_tokens + tokens} tokens ({prompt_tokens} in the {param}, {tokens} in the completion). "
                f"Please reduce the length of the {param} or completion.",
                param,
            )

    def _least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without making many more than the context holds.

        A text that may be longer than the context is tokenised by slices until it is; a quarter is left for what their
        borders add. To tokenise all of it would take seconds.
        """
        least = len(text) // self._longest_token
        if least > self._limit or (len(text) if text.isascii() else 4 * len(text)) < _BYTES_PER_TOKEN * self._limit:
            return least
        found = 0
        for begin in range(0, len(text), _SLICE_CHARACTERS):
            found += len(self._tokenizer.encode(text[begin : begin + _SLICE_CHARACTERS]))
            if found > 1.25 * self._limit:
                return found * 4 // 5
        return least


def too_long(message: str, param: str) -> ApiError:
    """Make the error of a prompt that does not fit the model's context."""
    return ApiError(400, message, param=param, code="context_length_exceeded")
