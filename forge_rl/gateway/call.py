"""One request on its way through vLLM's server: whose it is, what it decodes, and what went wrong."""

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
    """One request of a client."""

    session: Session | None
    """Session that it belongs to; None outside of one."""
    model: str = ""
    """The model's name as the client wrote it."""
    body_bytes: int = 0
    streamed: bool = False
    wanted: int = 1
    """Completions that it asks for."""
    counted: bool = False
    """True if only its tokens are counted, so that no completion needs room."""
    converted: Any = None
    """The request as the model is given it: vLLM's chat request, of Anthropic's; the input itself, of a response."""
    completions: list[Completion] = field(default_factory=list)
    """Those that were begun."""
    prompts: list[Prompt] = field(default_factory=list)
    started: bool = False
    """True once an engine has answered."""
    failure: BaseException | None = None
    """First error of the engines. vLLM's server turns it into text for the client."""
    streams: list[AsyncGenerator[Any, None]] = field(default_factory=list)
    """Decoders that were handed to vLLM's server."""
    open: int = 0
    """Completions that are on an engine."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def version(self) -> int:
        """Version of the weights behind the last token; -1 while there is none."""
        return self.completions[-1].version if self.completions else -1

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each prompt counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions so far."""
        return sum(completion.tokens for completion in self.completions)

    @property
    def whole(self) -> bool:
        """True once all completions that it asks for have ended."""
        return len(self.completions) == self.wanted and all(each.finish for each in self.completions)

    @contextlib.contextmanager
    def on_engine(self) -> Iterator[None]:
        """Note that a completion is on an engine while the body runs."""
        self.open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.open -= 1
            if not self.open:
                self._idle.set()

    def fail(self, error: BaseException) -> None:
        """Note an error, unless another one came first."""
        if self.failure is None:
            self.failure = error

    async def end(self) -> None:
        """Take all that is still decoded from the engines; returns once it is."""
        for stream in self.streams:
            with contextlib.suppress(RuntimeError):  # one whose task was cancelled ends by itself
                await stream.aclose()
        if self.open:
            await self._idle.wait()


CALL: ContextVar[Call] = ContextVar("call")
"""The request that is served: vLLM's server has no place for what is ours."""
