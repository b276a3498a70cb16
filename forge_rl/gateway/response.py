"""The response to one request: decodes its choices, records them and writes them, whichever API it came by."""

from __future__ import annotations

from abc import ABC, abstractmethod

from forge_rl.gateway.backend import Backend
from forge_rl.gateway.chat import extend_digest
from forge_rl.gateway.choices import Choice, ChoiceDelta, decode
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.wire import ResponseWriter


class ApiResponse(ABC):
    """Decodes the choices of a request and writes them; a subclass knows the API's format.

    Args:
        choices: completions to decode.
        streamed: write each delta as it comes.
    """

    def __init__(self, choices: tuple[Choice, ...], *, streamed: bool) -> None:
        self.choices = choices
        self.streamed = streamed

    @abstractmethod
    def body(self) -> dict[str, object]:
        """Return the response that is not streamed."""

    @abstractmethod
    def stream_start(self) -> bytes:
        """Return the events before the first delta."""

    @abstractmethod
    def stream_delta(self, choice: Choice, added: ChoiceDelta) -> bytes:
        """Return the events for what a chunk adds to a choice."""

    @abstractmethod
    def stream_finish(self, choice: Choice) -> bytes:
        """Return the events for the end of a choice."""

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
        """Decode, record and write.

        Raises:
            ForgeError: the backend failed; nothing is recorded then.
            ClientGone: the client does not read.
        """
        key = session.key if session is not None else None
        if not self.streamed:
            await decode(backend, self.choices, session=key)
            self._record(session)
            await writer.write_json(self.body())
            return
        left = len(self.choices)
        opening = self.stream_start()

        async def write_delta(choice: Choice, added: ChoiceDelta) -> None:
            nonlocal left, opening
            data = self.stream_delta(choice, added)
            if choice.finish:
                data += self.stream_finish(choice)
                left -= 1
                if left == 0:  # before the client can ask for what follows
                    self._record(session)
            begin, opening = opening, b""
            if begin or data:
                await writer.write_event(begin + data)

        await decode(backend, self.choices, session=key, on_delta=write_delta)
        await writer.write_event(self.stream_end())
        await writer.end_stream()

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
