"""One request from its choices to its response, whichever API it came by."""

from __future__ import annotations

from abc import ABC, abstractmethod

from forge_rl.gateway.backend import Backend
from forge_rl.gateway.chat import extend_digest
from forge_rl.gateway.choices import Choice, Piece, decode
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.wire import Writer


class Job(ABC):
    """One request.

    Args:
        choices: to be decoded.
        streamed: write each piece as it comes.
    """

    def __init__(self, choices: tuple[Choice, ...], *, streamed: bool) -> None:
        self.choices = choices
        self.streamed = streamed

    @abstractmethod
    def body(self) -> dict[str, object]:
        """The response that is not streamed."""

    @abstractmethod
    def opening(self) -> bytes:
        """Events before the first piece."""

    @abstractmethod
    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Events for a piece of a choice."""

    @abstractmethod
    def closing(self, choice: Choice) -> bytes:
        """Events for the end of a choice."""

    @abstractmethod
    def ending(self) -> bytes:
        """Events after all choices."""

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once."""
        return sum(
            len(prompt.token_ids) for prompt in {id(choice.prompt): choice.prompt for choice in self.choices}.values()
        )

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)

    async def run(self, backend: Backend, session: Session | None, writer: Writer) -> None:
        """Decode, record, respond.

        Raises:
            ForgeError: the backend's; nothing is recorded then.
            ClientGone: the client takes nothing.
        """
        key = session.key if session is not None else None
        if not self.streamed:
            await decode(backend, self.choices, session=key)
            self._record(session)
            await writer.whole(self.body())
            return
        left = len(self.choices)
        opening = self.opening()

        async def show(choice: Choice, piece: Piece) -> None:
            nonlocal left, opening
            data = self.piece(choice, piece)
            if choice.finish:
                data += self.closing(choice)
                left -= 1
                if left == 0:  # before the client can ask for what follows
                    self._record(session)
            begin, opening = opening, b""
            if begin or data:
                await writer.event(begin + data)

        await decode(backend, self.choices, session=key, show=show)
        await writer.event(self.ending())
        await writer.end()

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
