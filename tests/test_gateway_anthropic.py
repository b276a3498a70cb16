"""The gateway as the `anthropic` package uses it, on a backend whose completions are scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forge_rl.errors import ServiceError
from tests.fake_backend import FakeBackend, ids_of, letters_of, serving, tokenizer

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic  # a second of imports, which only the worker that runs this file spends

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "日"}}\n</tool_call>'
ASK: Any = {"model": "fake", "max_tokens": 200}


@asynccontextmanager
async def client_of(backend: FakeBackend, *, key: str = "any", **config: Any) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    async with (
        serving(backend, **config) as gateway,
        AsyncAnthropic(base_url=gateway.base_url.removesuffix("/v1"), api_key=key, max_retries=0) as client,
    ):
        yield client


async def test_a_message_is_answered():
    backend = FakeBackend(["Hello there."])
    hinted: Any = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    async with client_of(backend) as client:
        answer = await client.messages.create(
            messages=[
                {"role": "user", "content": [hinted]},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "Go on"},
            ],
            system="Be brief.",
            extra_body={"temperature": 0.5},
            metadata={"user_id": "me"},
            **ASK,
        )
    assert [(block.type, getattr(block, "text", "")) for block in answer.content] == [("text", "Hello there.")]
    assert (answer.role, answer.type, answer.model) == ("assistant", "message", "fake")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    shown = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on"},
    ]
    assert backend.asked[0].prompt_ids == tokenizer().render(shown)
    assert backend.asked[0].sampling.temperature == 0.5
    assert backend.asked[0].sampling.max_tokens == 200
    assert answer.usage.input_tokens == len(backend.asked[0].prompt_ids)
    assert answer.usage.output_tokens == len(ids_of("Hello there."))


async def test_a_stream_adds_up_to_the_message():
    text = "Grüße, 日本 🙂."
    async with client_of(FakeBackend([letters_of(text)])) as client:
        async with client.messages.stream(messages=HI, **ASK) as stream:
            pieces = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
        raw = [event.type async for event in await client.messages.create(messages=HI, stream=True, **ASK)]
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(letters_of(text))
    assert raw[:2] == ["message_start", "content_block_start"]
    assert raw[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences_and_limits_are_told_apart(stream: bool):
    async with client_of(FakeBackend([letters_of("Yes. STOP it")])) as client:
        for params, expected, text in (
            ({"stop_sequences": ["HALT", "STOP"]}, ("stop_sequence", "STOP"), "Yes. "),
            ({"max_tokens": 3}, ("max_tokens", None), "Yes"),
        ):
            asked: Any = {"messages": HI, **ASK, **params}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            assert (answer.stop_reason, answer.stop_sequence) == expected
            assert answer.content[0].text == text


@pytest.mark.parametrize("chunk_tokens", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_calls_tools_and_goes_on_with_their_outputs(stream: bool, chunk_tokens: int):
    backend = FakeBackend([letters_of(f"Let me see. {CALL}\n{CALL}"), "It is 2."], chunk_tokens=chunk_tokens)
    async with client_of(backend) as client:
        asked: Any = {"messages": HI, "tools": TOOLS, **ASK}
        if stream:
            async with client.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await client.messages.create(**asked)
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
        calls = answer.content[1:]
        assert [(call.name, call.input) for call in calls] == [("add", {"a": 1, "b": "日"})] * 2
        outputs = [{"type": "tool_result", "tool_use_id": call.id, "content": "2"} for call in calls]
        messages = [
            *HI,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [*outputs, {"type": "text", "text": "Well?"}]},
        ]
        answer = await client.messages.create(messages=messages, tools=TOOLS, **ASK)
        assert answer.content[0].text == "It is 2."
    assert json.dumps("Adds.") in backend.asked[1].prompt
    assert backend.asked[1].prompt.endswith(
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_tokens_are_counted_as_they_are_used():
    async with client_of(FakeBackend()) as client:
        counted = await client.messages.count_tokens(model="fake", messages=HI)
        answer = await client.messages.create(messages=HI, **ASK)
        assert counted.input_tokens == answer.usage.input_tokens


async def test_models_are_listed():
    async with client_of(FakeBackend()) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).display_name == "fake"


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"model": "claude"}, "NotFoundError", "does not exist"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"max_tokens": 10_000}, "BadRequestError", "maximum context length"),
        ({"extra_body": {"temperature": 1.5}}, "BadRequestError", "temperature"),
        ({"extra_body": {"top_k": -5}}, "BadRequestError", "top_k"),
        ({"extra_body": {"top_p": 1.5}}, "BadRequestError", "top_p"),
        ({"extra_body": {"best": 5}}, "BadRequestError", "unknown parameter"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "BadRequestError", "name is required"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "BadRequestError", "'x'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "BadRequestError", "thinking"),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "BadRequestError", "cannot be prefilled"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "BadRequestError",
            "'image_url' is not supported",
        ),
    ],
)
async def test_wrong_parameters_raise_what_the_client_has_for_them(params: dict[str, Any], error: str, text: str):
    import anthropic

    backend = FakeBackend()
    async with client_of(backend) as client:
        with pytest.raises(getattr(anthropic, error), match=text) as caught:
            await client.messages.create(**{**ASK, "messages": HI, **params})
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"] == "error"
    assert not backend.asked


async def test_a_wrong_key_is_told():
    import anthropic

    async with client_of(FakeBackend(), key="wrong", api_key="right") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(messages=HI, **ASK)
        right = await client.with_options(api_key="right").messages.create(messages=HI, **ASK)
        assert right.stop_reason == "end_turn"


async def test_a_failing_backend_is_told_before_and_in_the_middle_of_a_stream():
    import anthropic

    backend = FakeBackend(fail=ServiceError("it died", service="generator"))
    async with client_of(backend) as client:
        with pytest.raises(anthropic.APIStatusError, match="it died") as caught:
            await client.messages.create(messages=HI, **ASK)
        assert caught.value.status_code == 503
        backend.fail_after = 2
        stream = await client.messages.create(messages=HI, stream=True, **ASK)
        with pytest.raises(anthropic.APIStatusError, match="it died"):
            await drain(stream)


async def drain(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def test_a_body_that_is_no_json_gets_anthropics_shape():
    async with serving(FakeBackend()) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.base_url}/messages"
        for content, kind, status in ((b"{", "application/json", 400), (b"{}", "text/plain", 415)):
            response = await client.post(url, content=content, headers={"content-type": kind})
            assert response.status_code == status
            body = response.json()
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
