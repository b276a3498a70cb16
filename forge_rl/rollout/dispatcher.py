"""Turns on the engines that the scheduler grants, and on others where an engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ContextError, ReplicaError
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import InflightEpisode
from forge_rl.services.completion import OpenStream, ResumableCompletion
from forge_rl.types import Chunk, Sampling, Turn


class Decoder(Protocol):
    """The part of the Generator that rollouts use."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def max_model_tokens(self) -> int: ...

    @property
    def version(self) -> int | None: ...

    @property
    def listeners(self) -> list[Callable[[], None]]: ...

    def engines(self) -> dict[int, int]: ...

    def stream_once(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
    ) -> AsyncGenerator[Chunk, None]: ...


class Dispatcher:
    """Opens streams on the engines that the scheduler grants."""

    def __init__(self, scheduler: Scheduler, generator: Decoder, tokenizer: Tokenizer) -> None:
        self._scheduler = scheduler
        self._generator = generator
        self._tokenizer = tokenizer
        self._grants: dict[InflightEpisode, asyncio.Future[None]] = {}

    def update_engines(self) -> None:
        """Tell the scheduler which engines serve."""
        engines = self._generator.engines()
        if engines != self._scheduler.capacity.engines:
            self._scheduler.capacity.set_engines(engines)

    def grant(self) -> None:
        """Wake the episodes that have an engine now."""
        for episode in self._scheduler.pop_grants():
            granted = self._grants.pop(episode)
            if not granted.done():
                granted.set_result(None)

    @contextlib.asynccontextmanager
    async def open_stream(
        self, episode: InflightEpisode, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        """Wait for the episode's engine and open its stream; an episode has one at a time."""
        granted = self._grants[episode] = asyncio.get_running_loop().create_future()
        self._scheduler.request_decode(episode)
        self.grant()
        interrupted = False
        try:
            await granted
            stream = self._generator.stream_once(prompt_ids, sampling, engine=episode.engine)
            async with contextlib.aclosing(stream) as chunks:
                yield chunks
        except ReplicaError:
            interrupted = True
            raise
        finally:
            self._grants.pop(episode, None)
            self._scheduler.finish_turn(episode, interrupted=interrupted)
            self.grant()

    def client(self, episode: InflightEpisode, sampling: Sampling) -> PolicyClient:
        """Return an episode's client of the policy."""
        return PolicyClient(
            functools.partial(self.open_stream, episode),
            episode,
            sampling,
            self._tokenizer,
            self._generator.max_model_tokens,
            self._scheduler.stopwatch(episode),
        )


@dataclass(frozen=True)
class PolicyClient:
    """An episode's client of the policy, for one completion at a time.

    turn = await client(prompt_ids)
    """

    open_stream: OpenStream
    episode: InflightEpisode
    sampling: Sampling
    """Sampling settings of the episode's turns."""
    tokenizer: Tokenizer
    max_model_tokens: int
    """Most tokens of a prompt and its completion together."""
    used_s: Callable[[], float]
    """Seconds that the episode has had so far: neither waiting for an engine nor paused."""

    async def __call__(self, prompt_ids: Sequence[int]) -> Turn:
        """Decode one whole completion, as far as the context has room; raises as ResumableCompletion.stream.

        Raises:
            ContextError: the context has no room for a token.
        """
        room = self.max_model_tokens - len(prompt_ids)
        if room < 1:
            raise ContextError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for an answer in {self.max_model_tokens}",
                hint="raise --generator.max-model-tokens, or choose tasks with shorter prompts",
            )
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
        return await ResumableCompletion(prompt_ids, sampling, self.tokenizer).run(self.open_stream)

    def stream(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Decode one completion, chunk by chunk; see ResumableCompletion.stream."""
        return ResumableCompletion(prompt_ids, sampling, self.tokenizer).stream(self.open_stream)
