"""The gateway as the `openai` package uses it, on a backend whose completions are scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from forge_rl.errors import ConfigError, PoisonError, ServiceError
from forge_rl.services.completion import GATHER_S
from tests.fake_backend import (
    VERSION,
    FakeBackend,
    client_of,
    ids_of,
    letters_of,
    logprob_of,
    serving,
    tokenizer,
    until,
)

HI: list[Any] = [{"role": "user", "content": "Hi"}]


async def test_a_chat_is_answered_with_what_was_decoded():
    backend = FakeBackend(["Hello there."])
    async with client_of(backend) as (client, _):
        answer = await client.chat.completions.create(model="fake", messages=HI)
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.model == "fake"
    assert answer.system_fingerprint == f"weights-{VERSION}"
    asked = backend.asked[0]
    assert asked.prompt_ids == tokenizer().render(HI)
    assert asked.session is None
    assert asked.sampling.temperature == 1
    assert asked.sampling.max_tokens == 4096 - len(asked.prompt_ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(asked.prompt_ids)
    assert answer.usage.completion_tokens == len(ids_of("Hello there."))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("chunk_tokens", [1, 2, 100])
async def test_a_stream_adds_up_to_the_answer(chunk_tokens: int):
    text = "Grüße, 日本 🙂 and on."
    backend = FakeBackend([letters_of(text)], chunk_tokens=chunk_tokens)
    async with client_of(backend) as (client, _):
        stream = await client.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(deltas) == text
    assert not any("�" in delta for delta in deltas), "a character that is split over tokens comes whole"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(letters_of(text))
    assert len({chunk.id for chunk in chunks}) == 1
    if chunk_tokens == 1:
        assert len(chunks) > 10


async def test_engines_gather_tokens_for_clients_that_do_not_stream():
    backend = FakeBackend()
    async with client_of(backend) as (client, _):
        await client.chat.completions.create(model="fake", messages=HI)
        async for _ in await client.chat.completions.create(model="fake", messages=HI, stream=True):
            pass
    assert [asked.gather_s for asked in backend.asked] == [GATHER_S, 0.0]


async def test_several_completions_have_their_places_and_seeds():
    backend = FakeBackend(["One.", "Two, longer.", "Three."])
    async with client_of(backend) as (client, _):
        answer = await client.chat.completions.create(model="fake", messages=HI, n=3, seed=7)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.message.content for choice in answer.choices] == ["One.", "Two, longer.", "Three."]
        seeds = [request.sampling.seed for request in backend.asked]
        assert seeds[0] == 7
        assert len({*seeds, 8, 9}) == 5, "requests of the next seeds draw other numbers"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(backend.asked[0].prompt_ids)
        backend.asked.clear()
        texts = ["", "", ""]
        ends: list[Any] = [None, None, None]
        async for chunk in await client.chat.completions.create(model="fake", messages=HI, n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert texts == ["One.", "Two, longer.", "Three."]
        assert ends == ["stop"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_answer_and_is_not_shown(stream: bool):
    backend = FakeBackend([letters_of("Yes. Observ, yes. Observation: 4 and more")])
    async with client_of(backend) as (client, _):
        shown, finish = await read(client, stream, stop=["Observation:", "never"])
    assert shown == "Yes. Observ, yes. "
    assert finish == "stop"
    assert backend.asked[0].sampling.stop == ("Observation:", "never")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_a_token_limit_ends_the_answer(stream: bool, limit: str):
    async with client_of(FakeBackend([letters_of("Hello")])) as (client, _):
        assert await read(client, stream, **{limit: 3}) == ("Hel", "length")


async def drain(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def read(client: AsyncOpenAI, stream: bool, **params: Any) -> tuple[str, str]:
    """Content and finish reason of one chat completion."""
    if not stream:
        whole = await client.chat.completions.create(model="fake", messages=HI, **params)
        return whole.choices[0].message.content or "", whole.choices[0].finish_reason
    text, finish = "", ""
    async for chunk in await client.chat.completions.create(model="fake", messages=HI, stream=True, **params):
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
    return text, finish


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_tell_of_each_token_its_bytes_and_the_likeliest(stream: bool):
    text = "A 日."
    ids = letters_of(text)
    backend = FakeBackend([ids])
    async with client_of(backend) as (client, _):
        params: Any = {"model": "fake", "messages": HI, "logprobs": True, "top_logprobs": 2}
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **params)]
            entries = [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content or ()]
        else:
            answer = await client.chat.completions.create(**params)
            assert answer.choices[0].logprobs is not None
            entries = answer.choices[0].logprobs.content or []
    assert [one.logprob for one in entries] == pytest.approx([logprob_of(token) for token in ids])
    assert b"".join(bytes(one.bytes or ()) for one in entries[:-1]).decode() == text
    assert entries[-1].token == "<|im_end|>"
    assert [(pair.token, pair.logprob) for pair in entries[0].top_logprobs] == [
        ("A", logprob_of(ids[0])),
        ("B", logprob_of(ids[0]) - 1),
    ]


async def test_logprobs_of_a_greedy_answer_are_those_of_the_likeliest_tokens():
    ids = ids_of("Yes")
    async with client_of(FakeBackend([ids])) as (client, _):
        answer = await client.chat.completions.create(model="fake", messages=HI, temperature=0, logprobs=True)
        assert answer.choices[0].logprobs is not None
        entries = answer.choices[0].logprobs.content or []
        assert [one.logprob for one in entries] == pytest.approx([logprob_of(token) for token in ids])
        assert [one.top_logprobs for one in entries] == [[]] * len(ids)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Once", ["Once"]),
        (["Once", "Twice"], ["Once", "Twice"]),
        ([57, 58], [[57, 58]]),
        ([[57, 58], [59]], [[57, 58], [59]]),
    ],
)
async def test_completions_go_on_from_texts_and_from_tokens(prompt: Any, prompts: list[Any]):
    backend = FakeBackend([" upon a time"])
    async with client_of(backend) as (client, _):
        answer = await client.completions.create(model="fake", prompt=prompt, n=2, max_tokens=50, logprobs=1)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
    assert {choice.text for choice in answer.choices} == {" upon a time"}
    asked = [list(asked.prompt_ids) for asked in backend.asked]
    expected = [list(tokenizer().encode(one)) if isinstance(one, str) else one for one in prompts]
    assert asked == [ids for ids in expected for _ in range(2)]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens[:-1]) == " upon a time"
    assert logprobs.token_logprobs == pytest.approx([logprob_of(token) for token in ids_of(" upon a time")])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, expected))


async def test_completions_stream_and_are_short_by_default():
    backend = FakeBackend([letters_of("abcdefghijklmnopqrstuvwxyz")])
    async with client_of(backend) as (client, _):
        stream = await client.completions.create(model="fake", prompt="Letters:", stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcdefghijklmnop"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_models_are_listed_with_their_aliases():
    backend = FakeBackend(["Yes."])
    async with client_of(backend, aliases=("gpt-4o-mini",)) as (client, _):
        assert [model.id async for model in client.models.list()] == ["fake", "gpt-4o-mini"]
        assert (await client.models.retrieve("fake")).id == "fake"
        answer = await client.chat.completions.create(model="gpt-4o-mini", messages=HI)
        assert answer.model == "gpt-4o-mini"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-5")


@pytest.mark.parametrize(
    ("params", "error", "param", "code"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "?"}]}, openai.BadRequestError, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages.0.content", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            openai.BadRequestError,
            "messages.0.content.0",
            None,
        ),
        ({"n": 0}, openai.BadRequestError, "n", "invalid_value"),
        ({"n": 129}, openai.BadRequestError, "n", "invalid_value"),
        ({"n": "two"}, openai.BadRequestError, "n", "invalid_value"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"presence_penalty": -3}, openai.BadRequestError, "presence_penalty", "invalid_value"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", None),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format", None),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities", "unsupported_parameter"),
        (
            {"extra_body": {"chat_template_kwargs": {"x": "<|im_end|>"}}},
            openai.BadRequestError,
            "chat_template_kwargs",
            None,
        ),
        (
            {"extra_body": {"chat_template_kwargs": {"tokenize": True}}},
            openai.BadRequestError,
            "chat_template_kwargs",
            None,
        ),
        ({"extra_body": {"chat_template": "{{ 7 }}"}}, openai.BadRequestError, "chat_template", "unknown_parameter"),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "use_beam_search", "unknown_parameter"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs", None),
        ({"stop": [""]}, openai.BadRequestError, "stop", None),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options", None),
        ({"extra_body": {"best": 1}}, openai.BadRequestError, "best", "unknown_parameter"),
        ({"max_tokens": 5000}, openai.BadRequestError, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "la " * 5000}]}, openai.BadRequestError, "messages", None),
    ],
)
async def test_wrong_parameters_raise_what_the_client_has_for_them(
    params: dict[str, Any], error: type[openai.APIStatusError], param: str | None, code: str | None
):
    backend = FakeBackend()
    async with client_of(backend) as (client, _):
        for stream in (False, True):
            extra = {"stream": True} if stream and "stream_options" not in params else {}
            with pytest.raises(error) as caught:
                await client.chat.completions.create(**{"model": "fake", "messages": HI, **params, **extra})
            assert caught.value.param == param
            assert code is None or caught.value.code == code
            assert caught.value.type == "invalid_request_error"
    assert not backend.asked


async def test_what_changes_nothing_may_be_asked_for():
    async with client_of(FakeBackend(["Yes."])) as (client, _):
        answer = await client.chat.completions.create(
            model="fake",
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            top_p=1,
            frequency_penalty=0,
            presence_penalty=0,
            response_format={"type": "text"},
            user="me",
            metadata={"a": "b"},
            store=False,
            parallel_tool_calls=True,
        )
        assert answer.choices[0].message.content == "Yes."


@pytest.mark.parametrize(
    ("failure", "error", "text"),
    [
        (ServiceError("it died", service="generator", hint="see /secret/log"), openai.InternalServerError, "it died"),
        (ConfigError("too long"), openai.BadRequestError, "too long"),
        (
            PoisonError("it ended 5 engines", service="generator", hint="see /secret/log"),
            openai.BadRequestError,  # which no client tries again
            "this request cannot be answered: it ended 5 engines",
        ),
        (RuntimeError("/secret: a bug"), openai.InternalServerError, "the gateway failed"),
    ],
)
async def test_a_failing_backend_is_told_before_and_in_the_middle_of_a_stream(
    failure: Exception, error: type[openai.APIStatusError], text: str
):
    backend = FakeBackend(fail=failure)
    async with client_of(backend) as (client, gateway):
        for stream in (False, True):
            with pytest.raises(error, match=text) as caught:
                await client.chat.completions.create(model="fake", messages=HI, stream=stream)
            assert "/secret" not in str(caught.value)
        backend.fail_after = 2
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        assert len([await anext(stream) for _ in range(2)]) == 2
        with pytest.raises(openai.APIError, match=text):
            await drain(stream)
        backend.fail = None
        assert await read(client, True) == ("Hello there.", "stop")
        await until(lambda: "completions in flight 0" in repr(gateway))


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, None),
        ("POST", "/v1/chat/completions", b"[" * 30_000, 400, None),
        ("POST", "/v1/chat/completions", b'{"model": "fake", "messages": 3}', 400, "messages"),
        ("POST", "/v1/chat/completions", b'{"model": "fake"}', 400, "messages"),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "?"}]}', 400, "model"),
        ("POST", "/v1/chat/completions", b"[]", 400, None),
        ("POST", "/v1/completions", b'{"model": "fake", "prompt": []}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"model": "fake", "prompt": [99999999]}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"model": "fake", "prompt": [-1]}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"model": "fake", "prompt": ["a", 1]}', 400, "prompt"),
        ("POST", "/v1/completions", b'{"model": "fake", "prompt": "a", "tools": []}', 400, "tools"),
        ("POST", "/v1/embeddings", b"{}", 404, None),
        ("GET", "/v1/chat/completions", b"", 405, None),
        ("DELETE", "/v1/models", b"", 405, None),
        ("GET", "/", b"", 404, None),
    ],
)
async def test_wrong_requests_get_errors_of_openai_shape(
    method: str, path: str, body: bytes, status: int, param: str | None
):
    async with serving(FakeBackend()) as gateway, httpx.AsyncClient() as client:
        url = gateway.base_url.removesuffix("/v1") + path
        response = await client.request(method, url, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param:
        assert error["param"].split(".")[0] == param


async def test_health_and_counts_need_no_key():
    async with client_of(FakeBackend(["Yes."]), key="k", api_key="k") as (client, gateway):
        await client.chat.completions.create(model="fake", messages=HI)
        root = gateway.base_url.removesuffix("/v1")
        async with httpx.AsyncClient() as plain:
            health = await plain.get(f"{root}/health")
            counts = (await plain.get(f"{root}/metrics")).text
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        assert 'forge_rl_gateway_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in counts
        assert f'forge_rl_gateway_tokens_total{{kind="completion"}} {len(ids_of("Yes."))}.0' in counts
        assert "forge_rl_gateway_completions_in_flight 0.0" in counts
