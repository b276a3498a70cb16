"""Sessions: who has the key, until when, and how completions are sampled."""

from __future__ import annotations

import asyncio
import math

import httpx
import openai
import pytest

from forge_rl.types import Sampling
from tests.fake_backend import (
    TRAINING,
    FakeBackend,
    agent_of,
    letters_of,
    logprob_of,
    serving,
    until,
)

HI = {"role": "user", "content": "Hi"}


def test_a_closed_session_refuses_its_key_and_ends_its_requests():
    async def check() -> None:
        backend = FakeBackend(["A long answer."], gate=asyncio.Event())
        async with agent_of(backend) as agent:
            asking = [asyncio.ensure_future(agent.ask([HI], stream=stream)) for stream in (False, True)]
            await until(lambda: backend.open == 2)
            assert agent.session.close() == ()
            for request in asking:
                with pytest.raises(openai.APIError, match="closed"):
                    await request
            await until(lambda: backend.open == 0)
            with pytest.raises(openai.AuthenticationError):
                await agent.ask([HI])
            assert agent.session.close() == ()

    asyncio.run(check())


def test_only_open_sessions_keys_are_taken():
    async def check() -> None:
        async with serving(FakeBackend(), open_to_all=False) as gateway:
            one, other = (gateway.open(sampling=TRAINING) for _ in range(2))
            assert one.key != other.key
            name, _, secret = one.key.partition(".")
            mixed = f"{name}.{other.key.partition('.')[2]}"
            async with httpx.AsyncClient(base_url=gateway.base_url) as client:
                for key in ("any", name, f"{name}.", mixed, secret, f"{one.key}x", "ключ"):
                    headers = [(b"authorization", f"Bearer {key}".encode())]
                    answer = await client.post("/chat/completions", json={"model": "fake"}, headers=headers)
                    assert answer.status_code == 401, key
                right = {"authorization": f"Bearer {one.key}"}
                answer = await client.post("/chat/completions", json={"model": "fake"}, headers=right)
                assert answer.status_code == 400
            assert one.turns == other.turns == ()

    asyncio.run(check())


def test_completions_are_sampled_as_the_session_says():
    async def check() -> None:
        backend = FakeBackend()
        async with agent_of(backend, sampling=Sampling(max_tokens=5, temperature=0.8, stop=("END",))) as agent:
            await agent.ask([HI])
            await agent.ask([HI], temperature=0.8, max_tokens=3, stop="X", seed=5)
            await agent.ask([HI], max_tokens=100_000)
        assert [asked.sampling for asked in backend.asked] == [
            Sampling(max_tokens=5, temperature=0.8, stop=("END",)),
            Sampling(max_tokens=3, temperature=0.8, stop=("X", "END")),
            Sampling(max_tokens=5, temperature=0.8, stop=("END",)),
        ]

    asyncio.run(check())


def test_another_temperature_is_refused_and_greedy_completions_have_no_logprobs():
    async def check() -> None:
        backend = FakeBackend([letters_of("Hello."), "Yes."])
        async with agent_of(backend) as agent:
            for params in ({"temperature": 0.5}, {"temperature": 1}, {"top_p": 0.9}):
                with pytest.raises(openai.BadRequestError, match="logprobs would be"):
                    await agent.ask([HI], **params)
            greedy = await agent.ask([HI], temperature=0)
            await agent.ask([HI, greedy, HI])
            recorded, drawn = agent.session.close()
        assert [asked.sampling.temperature for asked in backend.asked] == [0, 0.8]
        shown = backend.asked[0].prompt_ids + letters_of("Hello.")
        assert tuple(drawn.prompt_ids[: len(shown)]) == shown
        # Packing masks tokens without a finite logprob.
        assert all(math.isnan(logprob) for logprob in recorded.logprobs)
        assert drawn.logprobs == pytest.approx([logprob_of(token) for token in drawn.token_ids])

    asyncio.run(check())


def test_a_session_that_is_evaluated_is_greedy_whatever_the_agent_asks_for():
    async def check() -> None:
        backend = FakeBackend()
        async with agent_of(backend, sampling=Sampling(max_tokens=5, temperature=0)) as agent:
            await agent.ask([HI])
            await agent.ask([HI], temperature=0.7)
        assert [asked.sampling.temperature for asked in backend.asked] == [0, 0]

    asyncio.run(check())


def test_seeds_differ_between_completions_and_not_between_runs():
    async def check() -> None:
        runs = []
        for order in ((0, 1, 0), (1, 0, 0)):
            backend = FakeBackend()
            async with agent_of(backend) as agent:
                for place in order:
                    await agent.ask([{"role": "user", "content": f"Question {place}"}])
            runs.append({(asked.prompt_ids, asked.sampling.seed) for asked in backend.asked})
        assert runs[0] == runs[1]
        assert len({seed for _, seed in runs[0]}) == 3

    asyncio.run(check())
