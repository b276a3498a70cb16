"""State of one request on its way through vLLM's server: its session, completions and failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from forge_rl.gateway.chat import Prompt
from forge_rl.gateway.completion import Completion
from forge_rl.gateway.sessions import Session


@dataclass(kw_only=True, eq=False)
class Call:
    """State of one client request."""

    session: Session | None
    """The request's session; None outside of sessions."""
    model: str = ""
    """The model's name as the client wrote it."""
    body_bytes: int = 0
    streamed: bool = False
    wanted: int = 1
    """Number of completions requested."""
    counted: bool = False
    """True if the request only counts tokens and decodes no completion."""
    converted: Any = None
    """vLLM's chat request for Anthropic's API; the raw input for Responses; None otherwise."""
    completions: list[Completion] = field(default_factory=list)
    """Completions started so far."""
    prompts: list[Prompt] = field(default_factory=list)
    started: bool = False
    """True once an engine has answered."""
    failure: BaseException | None = None
    """First error of the engines; kept here because vLLM's server turns it into text for the client."""
    streams: list[AsyncGenerator[Any, None]] = field(default_factory=list)
    """Decoding generators handed to vLLM's server."""
    open: int = 0
    """Number of completions on an engine."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def version(self) -> int:
        """Weight version of the last token; -1 before the first."""
        return self.completions[-1].version if self.completions else -1

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, each prompt counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of all completions so far."""
        return sum(completion.tokens for completion in self.completions)

    @property
    def whole(self) -> bool:
        """True once all requested completions have finished."""
        return len(self.completions) == self.wanted and all(each.finish for each in self.completions)

    @contextlib.contextmanager
    def on_engine(self) -> Iterator[None]:
        """Count a completion as on an engine inside the context."""
        self.open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()

    def fail(self, error: BaseException) -> None:
        """Record an error, unless one is already recorded."""
        if self.failure is None:
            self.failure = error

    async def end(self) -> None:
        """Abort all completions still on an engine, and wait until they are off."""
        for stream in self.streams:
            with contextlib.suppress(RuntimeError):  # its task was cancelled, which closes it
                await stream.aclose()
        if self.open:
            await self._idle.wait()


CALL: ContextVar[Call] = ContextVar("call")
"""The current request; a context variable because vLLM's server cannot carry our state."""
