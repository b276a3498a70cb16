"""Decodes turns on the engines that the scheduler grants, and retries on others if an engine dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from forge_rl.errors import ContextError, ReplicaError
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import InflightEpisode
from forge_rl.services.completion import Observer, ResumableCompletion
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling, Turn


class Decoder(Protocol):
    """The part of the Generator that rollouts use."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def version(self) -> int | None: ...

    @property
    def listeners(self) -> list[Callable[[], None]]: ...

    def engines(self) -> dict[int, int]: ...

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None: ...


class Dispatcher:
    """Decodes on the engines that the scheduler grants."""

    def __init__(self, scheduler: Scheduler, generator: Decoder, tokenizer: Tokenizer) -> None:
        self.scheduler = scheduler
        self.generator = generator
        self.tokenizer = tokenizer
        self._grants: dict[InflightEpisode, asyncio.Future[None]] = {}
        self.update_engines()

    def update_engines(self) -> None:
        """Pass the serving engines to the scheduler; on change only, as there may be a thousand."""
        self.scheduler.capacity.set_engines(self.generator.engines())

    def grant(self) -> None:
        """Wake the episodes that were just granted an engine."""
        for episode in self.scheduler.pop_grants():
            granted = self._grants.pop(episode, None)  # none yet if `decode` has just requested it
            if granted is not None and not granted.done():
                granted.set_result(None)

    async def decode(self, episode: InflightEpisode, completion: ResumableCompletion) -> None:
        """Wait for an engine and decode on it; an episode has one engine at a time."""
        self.scheduler.request_decode(episode)
        self.grant()
        interrupted = False
        try:
            if episode.state != "decoding":
                granted = self._grants[episode] = asyncio.get_running_loop().create_future()
                await granted
            await self.generator.decode(completion, engine=episode.engine)
        except ReplicaError:
            interrupted = True
            raise
        finally:
            self._grants.pop(episode, None)
            self.scheduler.finish_turn(episode, interrupted=interrupted)
            self.grant()

    def client(self, episode: InflightEpisode, sampling: Sampling) -> PolicyClient:
        """Return an episode's policy client."""
        return PolicyClient(self, episode, sampling, self.scheduler.own_s(episode))


@dataclass(frozen=True)
class PolicyClient:
    """An episode's policy client, for one completion at a time.

    turn = await client(prompt_ids)
    """

    dispatcher: Dispatcher
    episode: InflightEpisode
    sampling: Sampling
    """Sampling settings of the episode's turns."""
    since_s: float
    """The episode's own time when this client was made."""

    def used_s(self) -> float:
        """Return the episode's seconds so far, without waiting for an engine or pauses."""
        return self.dispatcher.scheduler.own_s(self.episode) - self.since_s

    def __call__(self, prompt_ids: TokenIds) -> Coroutine[Any, Any, Turn]:
        """Decode one whole completion, limited by the room in the context; raises like ResumableCompletion.run.

        Raises:
            ContextError: the context has no room for a single token.
        """
        longest = self.dispatcher.generator.max_model_len
        room = longest - len(prompt_ids)
        if room < 1:
            raise ContextError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for an answer in {longest}",
                hint="raise --generator.max-model-len, or choose tasks with shorter prompts",
            )
        sampling = self.sampling if room >= self.sampling.max_tokens else replace(self.sampling, max_tokens=room)
        return ResumableCompletion(prompt_ids, sampling, self.dispatcher.tokenizer).run(self._decode)

    async def decode(
        self, prompt_ids: TokenIds, sampling: Sampling, observe: Observer, *, gather_s: float, lock: asyncio.Lock
    ) -> None:
        """Decode one completion while holding the lock; see ResumableCompletion.run."""

        async def decode(completion: ResumableCompletion) -> None:
            async with lock:
                await self._decode(completion)

        completion = ResumableCompletion(prompt_ids, sampling, self.dispatcher.tokenizer)
        await completion.run(decode, observe=observe, gather_s=gather_s)

    def _decode(self, completion: ResumableCompletion) -> Coroutine[Any, Any, None]:
        return self.dispatcher.decode(self.episode, completion)
