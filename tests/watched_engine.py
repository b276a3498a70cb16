"""A generator's actor that tells what its engine has streamed so far."""

from __future__ import annotations

import contextlib

from monarch.actor import concurrent_endpoint

from forge_rl.services.generator_actor import GeneratorActor
from forge_rl.types import Chunk, Sampling


class WatchedActor(GeneratorActor):
    """A real engine whose streams can be looked at while they run."""

    _chunks: dict[int, list[Chunk]]

    @concurrent_endpoint
    async def follow(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> list[Chunk]:
        """All chunks of an answer; until it ends they are counted under its seed."""
        assert sampling.seed is not None
        if not hasattr(self, "_chunks"):
            self._chunks = {}
        chunks = self._chunks[sampling.seed] = []
        async for chunk in self.engine.stream(prompt_ids, sampling):
            chunks.append(chunk)
        return chunks

    @concurrent_endpoint
    async def counts(self) -> dict[int, int]:
        """Tokens of each answer so far, by seed."""
        return {seed: sum(len(c.token_ids) for c in chunks) for seed, chunks in self._chunks.items()}

    @concurrent_endpoint
    async def left_after_closing(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> int:
        """Requests that vLLM still has once a stream was closed after its first chunk."""
        async with contextlib.aclosing(self.engine.stream(prompt_ids, sampling)) as chunks:
            await anext(chunks)
        return self.engine._llm.output_processor.get_num_unfinished_requests()
