"""Sessions: who has the key, until when, and how completions are sampled."""

from __future__ import annotations

import asyncio
import math
from typing import Any

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
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def test_a_closed_session_refuses_its_key_and_ends_its_requests():
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


async def test_only_open_sessions_keys_are_taken():
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


async def test_completions_are_sampled_as_the_session_says():
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


OWN: Any = {"temperature": 0.3, "top_p": 0.9, "response_format": {"type": "json_object"}}


async def test_what_an_agent_sets_is_replaced_by_the_runs_said_once_and_counted():
    backend, warned = FakeBackend([letters_of("Hello."), "Yes."]), list[str]()
    async with agent_of(backend, warn=warned.append) as agent:
        for params in (OWN, {"temperature": 0}, {"temperature": 0.8}, {"tools": [TOOL], "tool_choice": "required"}):
            await agent.ask([HI], **params)
        turns = agent.session.close()
        counts = agent.gateway._metrics.text().decode()
    assert {(asked.sampling.temperature, *asked.sampling.extra) for asked in backend.asked} == {(0.8,)}
    assert all(math.isfinite(logprob) for turn in turns for logprob in turn.logprobs)
    assert [line.split()[3] for line in warned] == ["temperature,", "top_p,", "structured_outputs,", "tool_choice,"]
    assert 'settings_replaced_total{name="temperature"} 2.0' in counts
    assert 'settings_replaced_total{name="tool_choice"} 1.0' in counts


@pytest.mark.parametrize("mode", ["untrained", "trained"])
async def test_what_an_agent_sets_is_honoured_by_a_flag_and_then_trained_or_not(mode: str):
    backend = FakeBackend([letters_of("Hello."), "Yes."])
    async with agent_of(backend, agent_sampling=mode) as agent:
        first = await agent.ask([HI], **OWN)
        await agent.ask([HI, first, HI])
        honoured, own = agent.session.close()
    asked = backend.asked[0].sampling
    assert (asked.temperature, asked.extra["top_p"]) == (0.3, 0.9)
    assert asked.extra["structured_outputs"] == {"json_object": True}
    assert (backend.asked[1].sampling.temperature, backend.asked[1].sampling.extra) == (0.8, {})
    # Packing masks tokens without a finite logprob.
    assert all(math.isfinite(logprob) == (mode == "trained") for logprob in honoured.logprobs)
    assert own.logprobs == pytest.approx([logprob_of(token) for token in own.token_ids])
    assert tuple(own.prompt_ids[: len(honoured.context)]) == tuple(honoured.context)


async def test_a_session_that_is_evaluated_is_greedy_whatever_the_agent_asks_for():
    backend = FakeBackend()
    async with agent_of(backend, sampling=Sampling(max_tokens=5, temperature=0)) as agent:
        await agent.ask([HI])
        await agent.ask([HI], temperature=0.7)
    assert [asked.sampling.temperature for asked in backend.asked] == [0, 0]


async def test_seeds_differ_between_completions_and_not_between_runs():
    runs = []
    for order in ((0, 1, 0), (1, 0, 0)):
        backend = FakeBackend()
        async with agent_of(backend) as agent:
            for place in order:
                await agent.ask([{"role": "user", "content": f"Question {place}"}])
        runs.append({(asked.prompt_ids, asked.sampling.seed) for asked in backend.asked})
    assert runs[0] == runs[1]
    assert len({seed for _, seed in runs[0]}) == 3
