"""What the gateway asks for answers, and how a Generator gives them also when engines die."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

from forge_rl.types import Chunk, Sampling

if TYPE_CHECKING:
    from forge_rl.services.generator import Generator


class Backend(Protocol):
    """Decodes answers."""

    @property
    def model(self) -> str:
        """Name of the model, as requests and /v1/models have it."""

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt and answer together."""

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str | None
    ) -> AsyncGenerator[Chunk, None]:
        """Decode one answer; its last chunk, and no other, says why it ends. Closing the generator ends the request.

        Args:
            prompt_ids: everything that the model is shown.
            sampling: how the answer is drawn.
            session: key of the session that asks, None outside of one.

        Raises:
            ForgeError: there is no answer; see errors.of_forge for what clients are told.
        """


class GeneratorBackend:
    """Answers of a Generator: an engine that dies is replaced by another in the middle of an answer."""

    def __init__(self, generator: Generator, model: str) -> None:
        self._generator = generator
        self.model = model

    @property
    def max_model_tokens(self) -> int:
        return self._generator.config.max_model_tokens

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str | None
    ) -> AsyncGenerator[Chunk, None]:
        """See Backend.stream and Generator.answer."""
        return self._generator.answer(prompt_ids, sampling)
