"""Backends that decode requests of an API: the protocol, and its implementation on a Generator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forge_rl.services.completion import Observer
from forge_rl.token_arrays import TokenIds
from forge_rl.types import Sampling

if TYPE_CHECKING:
    from forge_rl.services.generator import Generator

PROMPT_LOGITS_BYTES = 1 << 30
"""Maximum bytes of the logits of a scored prompt, which an engine holds all at once in float32."""


def most_scored_tokens(vocab_size: int) -> int:
    """Return the maximum length in tokens of a scored prompt, for a model with `vocab_size` logits."""
    return PROMPT_LOGITS_BYTES // (4 * vocab_size)


class Backend(Protocol):
    """Decodes the gateway's requests."""

    @property
    def model(self) -> str:
        """Name of the model in requests and in /v1/models."""

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its completion together."""

    async def decode(
        self, prompt_ids: TokenIds, sampling: Sampling, observe: Observer, *, session: str | None, gather_s: float
    ) -> None:
        """Decode one completion. Cancelling this aborts the request.

        Args:
            prompt_ids: the whole prompt.
            sampling: settings of the completion.
            observe: called with each chunk as it arrives; only the last one has a `finish`. Returning True stops the
                completion.
            session: key of the request's session; None outside of sessions.
            gather_s: seconds for which tokens may be gathered into one chunk.

        Raises:
            ForgeError: the request failed; `errors.to_api_error` translates it for the client.
        """


class GeneratorBackend:
    """Decodes on a Generator; if an engine dies, another one resumes the completion."""

    def __init__(self, generator: Generator, model: str) -> None:
        self._generator = generator
        self.model = model

    @property
    def max_model_len(self) -> int:
        return self._generator.config.max_model_len

    async def decode(
        self, prompt_ids: TokenIds, sampling: Sampling, observe: Observer, *, session: str | None, gather_s: float
    ) -> None:
        """Decode one completion, see `Backend.decode`."""
        await self._generator.generate(prompt_ids, sampling, observe=observe, gather_s=gather_s)
