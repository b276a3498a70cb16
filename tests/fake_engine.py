"""Actors in place of the generator's: one without an engine, and one that tells what its engine has streamed so far."""

from __future__ import annotations

import asyncio
import contextlib
import os

from monarch.actor import concurrent_endpoint

from forge_rl.runtime.service import ServiceActor
from forge_rl.services.generator import GeneratorActor
from forge_rl.types import Chunk, Sampling, Turn


class FakeEngineActor(ServiceActor):
    """Answers with its name, and notes what it is told; one that is held does not stop before it is released."""

    def __init__(self, name: str, held: bool) -> None:
        self._name = name
        self._told: list[str] = []
        self._gate = asyncio.Event()
        if not held:
            self._gate.set()

    @concurrent_endpoint
    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Turn:
        return Turn(prompt_ids=prompt_ids, token_ids=(), logprobs=(), versions=(), text=self._name)

    @concurrent_endpoint
    async def pause(self) -> None:
        self._told.append("pause")
        await self._gate.wait()

    @concurrent_endpoint
    async def resume(self) -> None:
        self._told.append("resume")

    @concurrent_endpoint
    async def told(self) -> list[str]:
        return self._told

    @concurrent_endpoint
    async def release(self) -> None:
        self._gate.set()

    @concurrent_endpoint
    async def exit(self) -> None:
        os._exit(3)


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
        async for chunk in self._engine.stream(prompt_ids, sampling):
            chunks.append(chunk)
        return chunks

    @concurrent_endpoint
    async def counts(self) -> dict[int, int]:
        """Tokens of each answer so far, by seed."""
        return {seed: sum(len(c.token_ids) for c in chunks) for seed, chunks in self._chunks.items()}

    @concurrent_endpoint
    async def left_after_closing(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> int:
        """Requests that vLLM still has once a stream was closed after its first chunk."""
        async with contextlib.aclosing(self._engine.stream(prompt_ids, sampling)) as chunks:
            await anext(chunks)
        return self._engine._llm.output_processor.get_num_unfinished_requests()
