"""The gateway's backend: the protocol of whatever decodes, and a Generator as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

from forge_rl.types import Chunk, Sampling, TokenIds

if TYPE_CHECKING:
    from forge_rl.services.generator import Generator


class Backend(Protocol):
    """Decodes the gateway's requests."""

    @property
    def model(self) -> str:
        """Name of the model in requests and in /v1/models."""

    @property
    def max_model_tokens(self) -> int:
        """Most tokens of a prompt and its completion together."""

    def stream(
        self, prompt_ids: TokenIds, sampling: Sampling, *, session: str | None, gather_s: float = 0.0
    ) -> AsyncGenerator[Chunk, None]:
        """Decode one completion; the last chunk, and no other, has a `finish`. Closing the generator ends the request.

        Args:
            prompt_ids: the whole prompt.
            sampling: settings of the completion.
            session: key of the session that the request belongs to; None outside of one.
            gather_s: seconds for which tokens may be gathered into one chunk.

        Raises:
            ForgeError: the request failed; errors.to_api_error makes it the client's error.
        """


class GeneratorBackend:
    """Decodes on a Generator: when an engine dies, another one resumes the completion."""

    def __init__(self, generator: Generator, model: str) -> None:
        self._generator = generator
        self.model = model

    @property
    def max_model_tokens(self) -> int:
        return self._generator.config.max_model_tokens

    def stream(
        self, prompt_ids: TokenIds, sampling: Sampling, *, session: str | None, gather_s: float = 0.0
    ) -> AsyncGenerator[Chunk, None]:
        """Decode as Backend.stream and Generator.stream say."""
        return self._generator.stream(prompt_ids, sampling, gather_s=gather_s)
