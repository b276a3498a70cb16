"""The response to one request: decodes its choices, records them and writes them, whichever API it came by."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

from forge_rl.errors import ServiceError
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.chat import extend_digest
from forge_rl.gateway.choices import Choice, ChoiceDelta
from forge_rl.gateway.http import ResponseWriter
from forge_rl.gateway.json_text import LazyList, encode, encode_beside
from forge_rl.gateway.sessions import Session
from forge_rl.runtime.tasks import task_group
from forge_rl.services.completion import GATHER_S

_LONG_TOKENS = 2048
"""Responses with so many tokens, each with its likeliest alternatives, are written beside the event loop."""


class ApiResponse(ABC):
    """Decodes the choices of a request and writes them; a subclass knows the API's format.

    Args:
        choices: completions to decode.
        streamed: write each delta as it comes.
    """

    def __init__(self, choices: tuple[Choice, ...], *, streamed: bool) -> None:
        self.choices = choices
        self.streamed = streamed
        self._listed: type[list[object]] = list
        """Makes lists of what is shown of each token."""

    @abstractmethod
    def body(self) -> dict[str, object]:
        """Return the response that is not streamed."""

    @abstractmethod
    def stream_start(self) -> bytes:
        """Return the events before the first delta."""

    @abstractmethod
    def stream_delta(self, choice: Choice, added: ChoiceDelta) -> bytes:
        """Return the events for what a chunk adds to a choice, and for the choice's end once it has a `finish`."""

    @abstractmethod
    def stream_end(self) -> bytes:
        """Return the events after all choices."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each prompt counted once."""
        return sum({id(choice.prompt): len(choice.prompt.token_ids) for choice in self.choices}.values())

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.completion_tokens for choice in self.choices)

    async def run(self, backend: Backend, session: Session | None, writer: ResponseWriter) -> None:
        """Decode the choices side by side, record and write them.

        A choice goes on when its last chunk is written, so that a slow client holds up its own only.

        Raises:
            ForgeError: the backend failed; the other choices end too, and nothing is recorded.
            ClientGone: the client does not read.
        """
        left = len(self.choices)
        opening = self.stream_start() if self.streamed else b""

        async def decode(choice: Choice) -> None:
            nonlocal left, opening
            key = session.key if session is not None else None
            gather_s = 0.0 if self.streamed else GATHER_S
            stream = backend.stream(choice.prompt.token_ids, choice.sampling, session=key, gather_s=gather_s)
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    added = choice.add(chunk, streamed=self.streamed)
                    data = self.stream_delta(choice, added) if self.streamed else b""
                    if choice.finish:
                        left -= 1
                        if left == 0:  # before the client can ask for what follows
                            self._record(session)
                    data, opening = opening + data, b""
                    if data:
                        await writer.write_events(data)
                    if choice.finish:
                        return
            raise ServiceError("a completion has no end", service="generator", call="stream")

        async with task_group() as group:
            for choice in self.choices:
                group.create_task(decode(choice))
        if self.streamed:
            await writer.write_events(self.stream_end(), last=True)
        else:
            shown = sum(len(choice.tokens) * (1 + choice.sampling.top_logprobs) for choice in self.choices)
            if self.completion_tokens + shown < _LONG_TOKENS:
                await writer.write_json(encode(self.body()))
            else:
                self._listed = LazyList
                await writer.write_json(await encode_beside(self.body))

    def _record(self, session: Session | None) -> None:
        if session is None or session.closed:
            return
        for choice in self.choices:
            prompt = choice.prompt
            session.record(
                choice.turn,
                digest=extend_digest(prompt.digest, choice.message) if prompt.digest else None,
                text=prompt.text + choice.full_text if prompt.text is not None else None,
            )
