"""Staged services without processes, for benchmarks of their callers: slow engines, and environments with tools."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_rl.envs.protocol import Observation, Step
from forge_rl.rollout.interfaces import NoListener
from forge_rl.services.completion import ResumableCompletion
from forge_rl.system.listeners import Listeners
from forge_rl.token_arrays import Chunk, TokenIds
from forge_rl.types import Message, Sampling, Task

STEP_S = 10.0
"""Seconds of decoding that one staged token represents: simulating real tokens would only take longer."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of episodes, with log-uniformly distributed seconds of decoding."""

    name: str
    share: float
    least_s: float
    most_s: float

    @property
    def mean_s(self) -> float:
        """Mean decoding time in seconds."""
        # Mean of a log-uniform distribution: (b - a) / ln(b / a).
        return (self.most_s - self.least_s) / math.log(self.most_s / self.least_s)


HEAVY_TAILED = (
    Kind(name="short", share=0.4, least_s=3.0, most_s=30.0),
    Kind(name="middle", share=0.5, least_s=30.0, most_s=600.0),
    Kind(name="long", share=0.1, least_s=600.0, most_s=1800.0),
)
"""40% under 30 s, 10% from 10 to 30 minutes."""


class StagedSource:
    """Endless source of tasks."""

    def __init__(self, kind: Kind) -> None:
        self.name = kind.name
        self._drawn = 0

    def draw(self) -> Task:
        self._drawn += 1
        return Task(id=str(self._drawn), source=self.name, messages=({"role": "user", "content": self.name},))

    def held_out(self, tasks: int) -> tuple[Task, ...]:
        return ()

    def state(self) -> dict[str, object]:
        return {"drawn": self._drawn}

    def restore(self, state: Mapping[str, object]) -> None:
        self._drawn = int(str(state["drawn"]))


class NoThoughts:
    """Finds no thoughts in completions."""

    is_harmony = False

    def answer(self, prompt_ids: TokenIds, token_ids: TokenIds, text: str) -> None:
        return None


class StagedTokenizer:
    """Renders prompts of one token: the next turn's decoding time in milliseconds."""

    thoughts = NoThoughts()

    def render(self, messages: Sequence[Message], **_: object) -> tuple[int, ...]:
        return (int(str(messages[-1]["content"])),)

    def extend(self, ids: TokenIds, messages: Sequence[Message], **_: object) -> tuple[int, ...]:
        return self.render(messages)

    def tagged_text(self, ids: TokenIds, text: str) -> str:
        return text


@dataclass(eq=False, slots=True)
class _Request:
    seconds: float
    done: asyncio.Future[None]
    began: float
    done_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    versions: list[tuple[float, int]] = field(default_factory=list)
    """Pairs of a decoding time in seconds and the version used from then on."""


class StagedGenerator:
    """Staged engines that decode every request at the same speed, up to their budget, on the loop's clock.

    Args:
        engines: number of engines.
        budget: maximum concurrent requests per engine.
    """

    sampling = Sampling(max_tokens=1 << 20)
    max_model_len = 1 << 21

    def __init__(self, *, engines: int, budget: int) -> None:
        self.version = 0
        self.decoded_s = 0.0
        """Total decoding seconds of all finished requests."""
        self._budgets = dict.fromkeys(range(engines), budget)
        self._running: set[_Request] = set()
        self._paused = False
        self.listeners = Listeners[[]]()

    def engines(self) -> dict[int, int]:
        return self._budgets

    async def decode(self, completion: ResumableCompletion, *, engine: int | None = None) -> None:
        seconds = int(completion.prompt_ids[0]) / 1000
        loop = asyncio.get_running_loop()
        request = _Request(seconds=seconds, done=loop.create_future(), began=loop.time())
        request.versions.append((0.0, self.version))
        self._running.add(request)
        if not self._paused:
            self._start(request)
        try:
            await request.done
        finally:
            self._running.discard(request)
            if request.timer is not None:
                request.timer.cancel()
        self.decoded_s += seconds
        tokens = max(1, math.ceil(seconds / STEP_S))
        versions, index = [], 0
        for token in range(tokens):
            # Each token has the version that was served when its decoding began.
            while index + 1 < len(request.versions) and request.versions[index + 1][0] <= token * STEP_S:
                index += 1
            versions.append(request.versions[index][1])
        completion.add(
            Chunk(token_ids=(1,) * tokens, logprobs=(-1.0,) * tokens, versions=versions, text="", finish="stop")
        )

    async def pause(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._paused = True
        for request in self._running:
            if request.timer is not None:
                request.timer.cancel()
                request.timer = None
                request.done_s += now_s - request.began

    async def resume(self) -> None:
        self._paused = False
        for request in self._running:
            self._start(request)

    async def sleep(self) -> None:
        await self.pause()

    async def wake(self) -> None:
        await self.resume()

    def load(self, version: int) -> None:
        """Serve new weights; requests in flight continue with them."""
        now_s = asyncio.get_running_loop().time()
        self.version = version
        for request in self._running:
            done = request.done_s + (now_s - request.began if request.timer is not None else 0.0)
            request.versions.append((done, version))

    def _start(self, request: _Request) -> None:
        loop = asyncio.get_running_loop()
        request.began = loop.time()
        request.timer = loop.call_later(request.seconds - request.done_s, _finish, request)


def _finish(request: _Request) -> None:
    if not request.done.done():
        request.done.set_result(None)


class StagedEnvironment:
    """Opens sessions with tool waits between turns.

    Args:
        kinds: kinds of the sources' episodes.
        turn_s: maximum seconds of one turn.
        tool_s: mean seconds of a tool call.
        seed: seed of lengths and tool times.
    """

    thoughts = False

    def __init__(self, *, kinds: Sequence[Kind], turn_s: float, tool_s: float, seed: int) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        self._turn_s = turn_s
        self._tool_s = tool_s
        self._seed = seed
        self._opened = 0

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Episodes wait for nothing that could be fetched."""

    async def open(self, task: Task) -> tuple[Any, Observation]:
        self._opened += 1
        drawn = random.Random(f"{self._seed}/{self._opened}")
        kind = self._kinds[task.source]
        seconds = math.exp(drawn.uniform(math.log(kind.least_s), math.log(kind.most_s)))
        session = StagedSession(seconds, self._turn_s, self._tool_s, drawn)
        return session, Observation(messages=session.next_turn())


class StagedSession:
    """Requests turns until the episode's seconds are decoded."""

    def __init__(self, decode_s: float, turn_s: float, tool_s: float, drawn: random.Random) -> None:
        self._left_s = decode_s
        self._turn_s = turn_s
        self._tool_s = tool_s
        self._drawn = drawn

    def next_turn(self) -> tuple[Message, ...]:
        """Return the messages of the next turn: its decoding time in milliseconds."""
        seconds = min(self._left_s, self._turn_s)
        self._left_s -= seconds
        return ({"role": "tool", "content": str(max(1, round(seconds * 1000)))},)

    async def step(self, answer: str, *, truncated: bool = False, parsed: object = None) -> Step:
        if self._left_s <= 0:
            return Step(done=True, reward=self._drawn.random())
        await asyncio.sleep(self._drawn.expovariate(1 / self._tool_s))
        return Step(messages=self.next_turn(), done=False)

    async def close(self) -> None:
        """Nothing to close."""

    def abandon(self) -> None:
        """Nothing to close."""


class Printed(NoListener):
    """Prints the warnings of rollouts."""

    def warn(self, text: str) -> None:
        print(text)
