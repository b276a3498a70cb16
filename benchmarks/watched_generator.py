"""A generator for benchmarks that records each engine's requests, their tokens and times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.report import BenchmarkError
from forge_rl.services.completion import ResumableCompletion
from forge_rl.services.generator import Generator
from forge_rl.system.listeners import Listeners
from forge_rl.token_arrays import Chunk
from forge_rl.types import Sampling

_PATIENCE_S = 180.0
"""Timeout for a measured event, in seconds."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A request to an engine, and its tokens so far."""

    engine: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    least_version: int
    """Version that the engines served when the request was made."""
    token_ids: list[int] = field(default_factory=list)
    first_at: float | None = None
    """Time of the first token, on the monotonic clock."""
    ended: bool = False
    """True if the completion finished."""

    def goes_on_for(self, lost_request: Request) -> bool:
        """Return True if it requests exactly the tokens that another request lacks."""
        return (
            self.prompt_ids == lost_request.prompt_ids + tuple(lost_request.token_ids)
            and self.sampling.max_tokens == lost_request.sampling.max_tokens - len(lost_request.token_ids)
            and self.sampling.seed == lost_request.sampling.seed
        )


class Watched:
    """Records the requests that rollouts make to a generator.

    Args:
        generator: decodes the requests.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.running: list[Request] = []
        """Requests in flight."""
        self.asked: list[Request] = []
        """All requests since the last signal."""
        self._stirred = asyncio.Event()

    @property
    def sampling(self) -> Sampling:
        return self._generator.sampling

    @property
    def max_model_len(self) -> int:
        return self._generator.max_model_len

    @property
    def version(self) -> int | None:
        return self._generator.version

    @property
    def listeners(self) -> Listeners[[]]:
        return self._generator.listeners

    def engines(self) -> dict[int, int]:
        return self._generator.engines()

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None:
        assert engine is not None, "rollouts name the engine"
        version = self.version
        assert version is not None, "the first version was loaded"
        request = Request(
            engine=engine,
            prompt_ids=tuple(completion.shown.tolist()),
            sampling=completion.rest,
            least_version=version,
        )
        add = completion.add

        def watch(chunk: Chunk) -> bool:
            if len(chunk.versions) and chunk.versions.min() < request.least_version:
                raise BenchmarkError(f"engine {engine} serves version {chunk.versions.min()} after {version}")
            request.token_ids += chunk.token_ids.tolist()
            request.ended = bool(chunk.finish)
            request.first_at = request.first_at or time.monotonic()
            self.tell()
            return add(chunk)

        # Every token of a request passes through `add`, from whichever engine it comes.
        completion.add = watch  # type: ignore[method-assign]
        self.running.append(request)
        self.asked.append(request)
        try:
            await self._generator.decode(completion, engine=engine)
        finally:
            completion.add = add  # type: ignore[method-assign]
            self.running.remove(request)
            self.tell()

    def tell(self) -> None:
        """Wake the waiters in `until`."""
        self._stirred.set()

    async def until(self, holds: Callable[[], bool], event: str, *, patience_s: float = _PATIENCE_S) -> None:
        """Wait until a condition holds.

        Raises:
            BenchmarkError: it did not hold in time.
        """
        try:
            async with asyncio.timeout(patience_s):
                while not holds():
                    self._stirred.clear()
                    await self._stirred.wait()
        except TimeoutError:
            raise BenchmarkError(f"after {patience_s:g} s, {event} had not happened") from None
