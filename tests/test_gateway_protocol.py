"""What agents use beyond plain chat: Responses, forced JSON and tools, sampling settings, echo, thoughts."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from forge_rl.run.live.policy_gateway import PolicyGateway
from forge_rl.services import policy_backend as policy_backend
from forge_rl.services.completion import GATHER_S
from tests.fake_backend import FakeBackend, agent_of, client_of, ids_of, letters_of, logprob_of, tokenizer

HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: list[Any] = [{"type": "function", **FUNCTION, "strict": False}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


async def test_a_response_is_answered_with_what_was_decoded():
    backend = FakeBackend(["Hello there."])
    async with client_of(backend) as (client, _):
        answer = await client.responses.create(
            model="fake", instructions="Be brief.", input="Hi", max_output_tokens=50, temperature=0.5, store=False
        )
    assert (answer.output_text, answer.status, answer.model) == ("Hello there.", "completed", "fake")
    shown = [{"role": "system", "content": "Be brief."}, *HI]
    asked = backend.asked[0]
    assert asked.prompt_ids == tokenizer().render(shown)
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.gather_s) == (50, 0.5, GATHER_S)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(asked.prompt_ids),
        len(ids_of("Hello there.")),
    )


async def test_a_stream_of_a_response_adds_up_to_it():
    text = "Grüße, 日本 🙂."
    async with client_of(FakeBackend([letters_of(text)])) as (client, _):
        events = [event async for event in await client.responses.create(model="fake", input="Hi", stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert events[-1].response.output_text == text  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_with_calls_is_continued_from_the_engines_tokens(stream: bool):
    odd = letters_of(f"Let me see. {CALL}\n{CALL}")
    async with agent_of(FakeBackend([odd, odd, "It is 2."])) as agent:
        history: list[Any] = list(HI)
        for _ in range(2):
            asked: Any = {"model": "fake", "input": history, "tools": FLAT_TOOLS}
            if stream:
                events = [event async for event in await agent.client.responses.create(stream=True, **asked)]
                answer: Any = events[-1].response  # type: ignore[union-attr]
            else:
                answer = await agent.client.responses.create(**asked)
            assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
            for item in answer.output:
                history.append(item.model_dump(exclude_none=True))
            for item in answer.output[1:]:
                assert (item.name, json.loads(item.arguments)) == ("add", {"x": 1})
                history.append({"type": "function_call_output", "call_id": item.call_id, "output": "2"})
        answer = await agent.client.responses.create(model="fake", input=history, tools=FLAT_TOOLS)
        assert answer.output_text == "It is 2."
        turns = agent.session.close()
    assert [tuple(turn.token_ids) for turn in turns] == [odd, odd, ids_of("It is 2.")]
    for before, after in pairwise(turns):
        context = tuple(before.context)
        assert tuple(after.prompt_ids[: len(context)]) == context
        shown = tokenizer().decode(after.prompt_ids[len(context) :], skip_special=False)
        both = "<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        assert shown == f"\n<|im_start|>user\n{both}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"max_output_tokens": 5000}, "input"),
        ({"input": "la " * 5000}, "input"),
        ({"input": [{"role": "king", "content": "?"}]}, "input.0"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"extra_body": {"best": 1}}, "best"),
    ],
)
async def test_wrong_parameters_of_a_response_are_named(params: dict[str, Any], param: str | None):
    backend = FakeBackend()
    async with client_of(backend) as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**{"model": "fake", "input": "Hi", **params})
        assert param is None or caught.value.param == param
    assert not backend.asked


class Point(BaseModel):
    x: int


async def test_a_form_that_is_asked_for_reaches_the_engine_whichever_the_api():
    backend = FakeBackend(['{"x": 3}'])
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": SCHEMA, "strict": True}}
    async with client_of(backend) as (client, gateway):
        root = gateway.base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=root, api_key="any", max_retries=0) as other:
            await client.chat.completions.create(model="fake", messages=HI, response_format=form)
            parsed = await client.chat.completions.parse(model="fake", messages=HI, response_format=Point)
            response = await client.responses.parse(model="fake", input="Hi", text_format=Point)
            await client.completions.create(
                model="fake", prompt="Hi", extra_body={"structured_outputs": {"regex": "a+"}}
            )
            await other.messages.create(
                model="fake",
                messages=HI,
                max_tokens=9,
                extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            )
            await client.chat.completions.create(model="fake", messages=HI, response_format={"type": "json_object"})
    assert parsed.choices[0].message.parsed == response.output_parsed == Point(x=3)
    forms: list[Any] = [asked.sampling.extra["structured_outputs"] for asked in backend.asked]
    assert [[*each] for each in forms] == [["json"]] * 3 + [["regex"], ["json"], ["json_object"]]
    assert all(each["json"]["properties"]["x"]["type"] == "integer" for each in (*forms[:3], forms[4]))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_form_that_no_engine_can_decode_is_refused_also_in_a_stream(stream: bool):
    backend = FakeBackend()
    async with client_of(backend) as (client, _):
        with pytest.raises(openai.BadRequestError, match="whitespace_pattern"):
            await client.chat.completions.create(
                model="fake",
                messages=HI,
                stream=stream,
                extra_body={"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
            )
    assert not backend.asked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_tools_are_forced_by_what_the_engine_may_decode(choice: Any, stream: bool):
    backend = FakeBackend([CALL])
    async with agent_of(backend, agent_sampling="untrained") as agent:
        message = await agent.ask(HI, stream=stream, tools=TOOLS, tool_choice=choice)
    form: Any = backend.asked[0].sampling.extra["structured_outputs"]
    assert json.dumps(SCHEMA["properties"]) in form["structural_tag"], "arguments are held to their schema"
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"x": 1})


async def test_anthropics_forced_tools_are_too():
    backend = FakeBackend([CALL])
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    async with (
        client_of(backend) as (_, gateway),
        AsyncAnthropic(base_url=gateway.base_url.removesuffix("/v1"), api_key="any", max_retries=0) as client,
    ):
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            asked: Any = {"model": "fake", "messages": HI, "max_tokens": 99, "tools": tools, "tool_choice": choice}
            answer: Any = await client.messages.create(**asked)
            assert (answer.content[-1].name, answer.content[-1].input) == ("add", {"x": 1})
            assert answer.stop_reason == "tool_use"
    assert all("structured_outputs" in asked.sampling.extra for asked in backend.asked)


async def test_sampling_settings_reach_the_engine():
    backend = FakeBackend(["Yes."])
    given: Any = {"top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {"5": -100}}
    more = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5, "stop_token_ids": [9], "min_tokens": 2}
    async with client_of(backend) as (client, _):
        await client.chat.completions.create(model="fake", messages=HI, **given, extra_body=more)
        await client.completions.create(model="fake", prompt="Hi", **given, extra_body=more)
        await client.chat.completions.create(
            model="fake", messages=HI, top_p=1, frequency_penalty=0, logit_bias={}, extra_body={"top_k": -1}
        )
    expected = {**given, **more, "logit_bias": {5: -100}}
    assert [asked.sampling.extra for asked in backend.asked] == [expected, expected, {}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once", [29114]])
async def test_a_prompt_is_echoed(prompt: Any, stream: bool):
    shown = prompt if isinstance(prompt, str) else tokenizer().decode(prompt)
    async with client_of(FakeBackend([" upon a time"])) as (client, _):
        asked: Any = {"model": "fake", "prompt": prompt, "echo": True}
        if stream:
            chunks = [chunk async for chunk in await client.completions.create(stream=True, **asked)]
            text = "".join(chunk.choices[0].text for chunk in chunks)
        else:
            text = (await client.completions.create(**asked)).choices[0].text
        assert text == f"{shown} upon a time"
        with pytest.raises(openai.BadRequestError, match="prompt logprobs are not supported in a stream"):
            await client.completions.create(logprobs=1, stream=True, **asked)


async def test_logprobs_of_a_prompt_follow_those_of_its_tokens_and_are_bounded(monkeypatch: pytest.MonkeyPatch):
    backend = FakeBackend([[8]], of_prompt=((), ((29114, -1.5, 2), (7, -0.5, 1))))

    async with client_of(backend) as (client, _):
        asked: Any = {"model": "fake", "prompt": [29114, 29114], "echo": True, "logprobs": 1, "max_tokens": 0}
        choice = (await client.completions.create(**asked)).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, -1.5]
        assert choice.logprobs.top_logprobs is not None
        assert choice.logprobs.top_logprobs[0] is None
        assert sorted(choice.logprobs.top_logprobs[1].values()) == [-1.5, -0.5]
        assert choice.text == tokenizer().decode([29114, 29114])
        assert backend.asked[-1].sampling.extra == {"prompt_logprobs": 1}
        one = (await client.completions.create(**{**asked, "max_tokens": 1})).choices[0].logprobs
        assert one is not None
        assert one.token_logprobs == [None, -1.5, pytest.approx(logprob_of(8))]
        with pytest.raises(openai.BadRequestError, match="max_tokens 0 requires echo"):
            await client.completions.create(**{**asked, "echo": False})
        monkeypatch.setattr(policy_backend, "PROMPT_LOGITS_BYTES", 4 * tokenizer().vocab_size)
        with pytest.raises(openai.BadRequestError, match="the prompt has 2 tokens; at most 1"):
            await client.completions.create(**asked)


async def test_a_token_is_not_likeliest_because_the_likeliest_has_the_same_text():
    halves = [token for token in range(tokenizer().vocab_size) if tokenizer().decode([token]) == "\ufffd"][:2]
    backend = FakeBackend([[8]], of_prompt=((), ((halves[1], -1.5, 2), (halves[0], -0.5, 1))))

    async with client_of(backend) as (client, _):
        asked: Any = {"model": "fake", "prompt": [29114, halves[1]], "echo": True, "logprobs": 1, "max_tokens": 0}
        found = (await client.completions.create(**asked)).choices[0].logprobs
        assert found is not None
        assert found.token_logprobs == [None, -1.5]
        assert found.top_logprobs is not None
        assert found.top_logprobs[1] == {"\ufffd": -0.5}


async def test_a_run_serves_whoever_has_attached_by_one_key_until_it_ends():
    policy = PolicyGateway(FakeBackend(["Four."]), tokenizer(), warn=print)
    await policy.close()  # a run that nobody asked
    found, again = await asyncio.gather(policy.open(), policy.open())
    assert found == again
    assert (found["model"], found["max_model_len"]) == ("fake", 4096)
    assert (Path(str(found["folder"])) / "tokenizer.json").is_file()
    url, key = str(found["url"]), str(found["key"])
    assert url.startswith("http://127.0.0.1:")
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        assert (await client.completions.create(model="fake", prompt="2 + 2")).choices[0].text == "Four."
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="other").completions.create(model="fake", prompt="2 + 2")
        await policy.close()
        with pytest.raises(openai.APIConnectionError):
            await client.completions.create(model="fake", prompt="2 + 2")


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_are_told_from_the_answer_and_stay_in_the_tokens(stream: bool):
    odd = letters_of("<think>Hm, 2 and 2.</think>It is 4.")
    async with agent_of(FakeBackend([odd, "Yes."]), reasoning_parser="olmo3") as agent:
        asked: Any = {"model": "fake", "messages": HI}
        if stream:
            deltas = [
                chunk.choices[0].delta.model_dump()
                async for chunk in await agent.client.chat.completions.create(stream=True, **asked)
            ]
            thoughts = "".join(delta.get("reasoning") or "" for delta in deltas)
            text = "".join(delta["content"] or "" for delta in deltas)
        else:
            message = (await agent.client.chat.completions.create(**asked)).choices[0].message
            thoughts, text = message.model_dump()["reasoning"], message.content or ""
        assert (thoughts.strip(), text.strip()) == ("Hm, 2 and 2.", "It is 4.")
        await agent.ask([*HI, {"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}])
        first, second = agent.session.close()
    assert tuple(first.token_ids) == odd
    assert tuple(second.prompt_ids[: len(first.context)]) == tuple(first.context)


async def test_logprobs_of_a_response_are_the_engines():
    async with client_of(FakeBackend(["Yes"])) as (client, _):
        answer = await client.responses.create(
            model="fake", input="Hi", top_logprobs=2, include=["message.output_text.logprobs"]
        )
    part: Any = answer.output[0].content[0]  # type: ignore[union-attr, index]
    assert part.logprobs[0].logprob == pytest.approx(logprob_of(ids_of("Yes")[0]))
    assert len(part.logprobs[0].top_logprobs) == 2


async def test_a_template_is_told_what_it_may_be():
    backend = FakeBackend(["Yes."])
    async with client_of(backend) as (client, _):
        extra = {"chat_template_kwargs": {"enable_thinking": False, "depth": 3, "effort": "low"}}
        await client.chat.completions.create(model="fake", messages=HI, reasoning_effort="low", extra_body=extra)
    assert backend.asked[0].prompt_ids == tokenizer().render(HI)
