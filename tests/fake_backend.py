"""A gateway on a backend without engines: its completions are scripted, and its requests are recorded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn.server
from openai import AsyncOpenAI

from forge_rl.gateway import Gateway, GatewayConfig, Session
from forge_rl.gateway.adapters import ServedAdapters
from forge_rl.gateway.constraints import ConstraintChecker
from forge_rl.services.completion import Observer
from forge_rl.token_arrays import Chunk
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling
from tests.tiny import bundled_tokenizer as tokenizer


class _Impatient:
    """asyncio for uvicorn, which checks ten times a second whether to stop: hundreds of tests would wait for that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


uvicorn.server.asyncio = _Impatient()  # type: ignore[assignment]

EOS = 2
VERSION = 3
TRAINING = Sampling(max_tokens=500, temperature=0.8, seed=11)

Script = Callable[[tuple[int, ...], Sampling], Sequence[int]]


@cache
def constraints() -> ConstraintChecker:
    """What tries constraints, with one process for all tests; it takes seconds to start."""
    return ConstraintChecker(tokenizer())


def ids_of(text: str, *, end: bool = True) -> tuple[int, ...]:
    """Return the usual tokens of a text."""
    return tokenizer().encode(text) + ((EOS,) if end else ())


def letters_of(text: str, *, end: bool = True) -> tuple[int, ...]:
    """Return tokens that no tokenizer would give a text: each letter on its own."""
    return tuple(token for letter in text for token in tokenizer().encode(letter)) + ((EOS,) if end else ())


def logprob_of(token: int) -> float:
    return -(token % 7 + 1) / 10


@dataclass
class Asked:
    """One request to the backend."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    session: str | None
    gather_s: float

    @property
    def prompt(self) -> str:
        return tokenizer().decode(self.prompt_ids, skip_special=False)


@dataclass
class FakeBackend:
    """Decodes texts, token ids, or the result of a function of the request; the last one again and again."""

    answers: Sequence[str | Sequence[int] | Script] = ("Hello there.",)
    model: str = "fake"
    max_model_len: int = 4096
    chunk_tokens: int = 1
    fail: Exception | None = None
    fail_after: int = 0
    """Number of tokens before it fails."""
    of_prompt: tuple[tuple[tuple[int, float, int], ...], ...] = ()
    """Logprobs of the prompt, for requests that ask for them."""
    gate: asyncio.Event | None = None
    """Event to wait for after the first token."""
    asked: list[Asked] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    chunks: int = 0
    aborted: int = 0

    async def decode(
        self, prompt_ids: Sequence[int], sampling: Sampling, observe: Observer, *, session: str | None, gather_s: float
    ) -> None:
        number = len(self.asked)
        self.asked.append(Asked(tuple(map(int, prompt_ids)), sampling, session, gather_s))
        answer = self.answers[min(number, len(self.answers) - 1)]
        ids = ids_of(answer) if isinstance(answer, str) else answer
        if callable(ids):
            ids = ids(tuple(map(int, prompt_ids)), sampling)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        finished = False
        try:
            for begin in range(0, len(ids), self.chunk_tokens):
                if self.fail is not None and begin >= self.fail_after:
                    raise self.fail
                if begin > 0 and self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                chunk = self._chunk(ids, begin, sampling)
                self.chunks += 1
                finished = bool(chunk.finish)
                if observe(chunk) or finished:
                    return
        finally:
            self.open -= 1
            self.aborted += not finished

    def _chunk(self, ids: Sequence[int], begin: int, sampling: Sampling) -> Chunk:
        """Cut a chunk as the engine does: it ends with the token that completes a stop text, or at the limit."""
        some, finish = tuple(ids[begin : begin + self.chunk_tokens]), ""
        for place in range(1, len(some) + 1):
            upto = tuple(ids[: begin + place])
            if upto[-1] == EOS or any(stop in tokenizer().decode(upto) for stop in sampling.stop):
                finish = "stop"
            elif len(upto) >= sampling.max_tokens:
                finish = "length"
            if finish:
                some = some[:place]
                break
        top: tuple[Any, ...] = ()
        if sampling.top_logprobs:
            top = tuple(
                tuple((token + rank, logprob_of(token) - rank) for rank in range(sampling.top_logprobs))
                for token in some
            )
        greedy = sampling.temperature == 0
        return Chunk(
            token_ids=some,
            logprobs=tuple(math.nan if greedy else logprob_of(token) for token in some),
            versions=(VERSION,) * len(some),
            text="",
            finish=finish,  # type: ignore[arg-type]
            top=top,
            prompt=self.of_prompt if begin == 0 and "prompt_logprobs" in sampling.extra else (),
        )


@asynccontextmanager
async def serving(
    backend: FakeBackend,
    *,
    model: Path | None = None,
    open_to_all: bool = True,
    api_key: str = "",
    warn: Callable[[str], None] = lambda text: None,
    adapters: ServedAdapters | None = None,
    **config: Any,
) -> AsyncIterator[Gateway]:
    """Serve a gateway on a free port of this machine."""
    tokens = tokenizer() if model is None else Tokenizer(model)
    settings = GatewayConfig(**config)
    options = {"api_key": api_key, "open_to_all": open_to_all, "constraints": constraints(), "warn": warn}
    options["adapters"] = adapters
    async with Gateway(settings, backend, tokens, **options) as gateway:
        yield gateway


@asynccontextmanager
async def client_of(
    backend: FakeBackend, *, key: str = "any", **config: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Gateway]]:
    async with (
        serving(backend, **config) as gateway,
        AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as client,
    ):
        yield client, gateway


class Agent:
    """An agent that only knows OpenAI's API."""

    def __init__(self, client: AsyncOpenAI, session: Session, gateway: Gateway) -> None:
        self.client = client
        self.session = session
        self.gateway = gateway

    async def ask(self, messages: Iterable[Any], *, stream: bool = False, **options: Any) -> dict[str, Any]:
        """Return the assistant's message as it came."""
        parameters: Any = {"model": "fake", "messages": list(messages), **options}
        if not stream:
            answer = await self.client.chat.completions.create(**parameters)
            return answer.choices[0].message.model_dump(exclude_unset=True)
        content, calls = "", {}
        async for chunk in await self.client.chat.completions.create(stream=True, **parameters):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            for part in delta.tool_calls or ():
                call = calls.setdefault(part.index, {"type": "function", "function": {"name": "", "arguments": ""}})
                call["id"] = part.id or call["id"]
                assert part.function is not None
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
        return {"role": "assistant", "content": content, **({"tool_calls": list(calls.values())} if calls else {})}


@asynccontextmanager
async def agent_of(
    backend: FakeBackend, *, sampling: Sampling = TRAINING, model: Path | None = None, **settings: Any
) -> AsyncIterator[Agent]:
    async with serving(backend, open_to_all=False, model=model, **settings) as gateway:
        session = gateway.open("task-1", sampling=sampling)
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
            yield Agent(client, session, gateway)


async def until(true: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Wait until another task has made a condition true."""
    async with asyncio.timeout(deadline_s):
        while not true():  # noqa: ASYNC110  no event tells
            await asyncio.sleep(0.005)
