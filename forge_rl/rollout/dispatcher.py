"""Turns on the engines that the schedule grants, and on others where an engine dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ReplicaError
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import InflightEpisode
from forge_rl.services.completion import ResumableCompletion
from forge_rl.types import Chunk, Sampling, Turn


class Decoder(Protocol):
    """What rollouts need of the Generator."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def version(self) -> int | None: ...

    @property
    def listeners(self) -> list[Callable[[], None]]: ...

    def engines(self) -> dict[int, int]: ...

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
    ) -> AsyncGenerator[Chunk, None]: ...


class Dispatcher:
    """Hands engines to those whose turn it is.

    Args:
        schedule: says whose turn it is, and where.
        generator: decodes.
        tokenizer: of the policy.
    """

    def __init__(self, schedule: Scheduler, generator: Decoder, tokenizer: Tokenizer) -> None:
        self._schedule = schedule
        self._generator = generator
        self._tokenizer = tokenizer
        self._granted: dict[InflightEpisode, asyncio.Future[None]] = {}

    def see_engines(self) -> None:
        """Tell the schedule which engines serve."""
        engines = self._generator.engines()
        if engines != self._schedule.engines:
            self._schedule.set_engines(engines)

    def grant(self) -> None:
        """Let those decode whose turn it is."""
        for plan in self._schedule.grants():
            granted = self._granted.pop(plan)
            if not granted.done():
                granted.set_result(None)

    async def stream(self, plan: InflightEpisode, answer: ResumableCompletion) -> AsyncGenerator[Chunk, None]:
        """Decode an answer of an episode, which has one at a time. If its engine dies, another one goes on.

        Raises:
            ReplicaError: several engines, one after another, died without a token.
        """
        while True:
            granted = self._granted[plan] = asyncio.get_running_loop().create_future()
            self._schedule.wants(plan)
            self.grant()
            lost = False
            try:
                await granted
                shown = self._generator.stream(answer.shown, answer.rest, engine=plan.engine)
                async with contextlib.aclosing(shown) as chunks:
                    async for chunk in chunks:
                        yield answer.add(chunk)
                        if answer.finish:
                            return
            except ReplicaError as error:
                lost = True
                answer.move(error)
            finally:
                self._granted.pop(plan, None)
                self._schedule.leaves(plan, interrupted=lost)
                self.grant()

    def client(self, plan: InflightEpisode, sampling: Sampling) -> PolicyClient:
        """An episode's way to the engines."""
        return PolicyClient(self, plan, sampling, self._tokenizer)

    async def turn(self, plan: InflightEpisode, prompt_ids: Sequence[int], sampling: Sampling) -> Turn:
        """Decode a whole answer; see `stream`."""
        answer = ResumableCompletion(prompt_ids, sampling, self._tokenizer)
        async with contextlib.aclosing(self.stream(plan, answer)) as chunks:
            async for _ in chunks:
                pass
        return answer.turn()


@dataclass(frozen=True)
class PolicyClient:
    """An episode's way to the engines, for one answer at a time."""

    slots: Dispatcher
    plan: InflightEpisode
    sampling: Sampling
    """How its answers are drawn."""
    tokenizer: Tokenizer

    async def __call__(self, prompt_ids: Sequence[int]) -> Turn:
        """Decode a whole answer; see Dispatcher.stream."""
        return await self.slots.turn(self.plan, prompt_ids, self.sampling)

    def stream(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Decode an answer; see Dispatcher.stream."""
        return self.slots.stream(self.plan, ResumableCompletion(prompt_ids, sampling, self.tokenizer))
