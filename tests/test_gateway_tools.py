"""Tools, as the `openai` package uses them at the gateway: calls are found in completions by vLLM's parsers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from typing import Any

import pytest

from forge_rl.errors import ConfigError
from forge_rl.gateway.time_limit import LateError, time_limit
from forge_rl.gateway.tools import _forgiving
from tests.fake_backend import (
    FakeBackend,
    client_of,
    letters_of,
    serving,
)

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "日"}}\n</tool_call>'


@pytest.mark.parametrize("chunk_tokens", [1, 3])
def test_an_agent_calls_tools_and_goes_on_with_their_outputs(chunk_tokens: int):
    async def check() -> None:
        backend = FakeBackend(
            [letters_of(f"Let me see. {CALL}\n{CALL}"), "It is 2.", letters_of(f"{CALL}"), "Done."],
            chunk_tokens=chunk_tokens,
        )
        async with client_of(backend) as (client, _):
            messages = list(HI)
            answer = await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
            assert answer.choices[0].finish_reason == "tool_calls"
            message = answer.choices[0].message
            assert (message.content or "").strip() == "Let me see."
            assert message.tool_calls is not None
            assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
                ("add", {"a": 1, "b": "日"})
            ] * 2
            assert len({call.id for call in message.tool_calls}) == 2
            messages.append(message)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
            answer = await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
            assert answer.choices[0].message.content == "It is 2."
            prompt = backend.asked[1].prompt
            assert '"name": "add", "description": "Adds."' in prompt, "a template without tools is given them as text"
            assert prompt.count('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "日"}}\n</tool_call>') == 2
            assert prompt.endswith(
                "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n2\n</tool_response>"
                "<|im_end|>\n<|im_start|>assistant\n"
            )

            stream = await client.chat.completions.create(model="fake", messages=HI, tools=TOOLS, stream=True)
            names, arguments, finish = "", "", ""
            async for chunk in stream:
                for call in chunk.choices[0].delta.tool_calls or ():
                    assert call.function is not None
                    names += call.function.name or ""
                    arguments += call.function.arguments or ""
                assert not chunk.choices[0].delta.content
                finish = chunk.choices[0].finish_reason or finish
            assert (names, json.loads(arguments), finish) == ("add", {"a": 1, "b": "日"}, "tool_calls")

    asyncio.run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_only_one_tool_is_called_at_a_time_if_asked(stream: bool):
    async def check() -> None:
        async with client_of(FakeBackend([letters_of(f"{CALL}\n{CALL}")])) as (client, _):
            params: Any = {"model": "fake", "messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
            if stream:
                chunks = [c async for c in await client.chat.completions.create(stream=True, **params)]
                assert {call.index for c in chunks for call in c.choices[0].delta.tool_calls or ()} == {0}
            else:
                answer = await client.chat.completions.create(**params)
                assert len(answer.choices[0].message.tool_calls or ()) == 1

    asyncio.run(check())


@pytest.mark.parametrize("text", ["<tool_call>\nnonsense\n</tool_call>", "No call <tool", CALL])
def test_what_is_no_call_is_text(text: str):
    async def check() -> None:
        choice: Any = "none" if text == CALL else "auto"
        async with client_of(FakeBackend([text])) as (client, _):
            answer = await client.chat.completions.create(model="fake", messages=HI, tools=TOOLS, tool_choice=choice)
            assert answer.choices[0].message.content == text
            assert answer.choices[0].finish_reason == "stop"

    asyncio.run(check())


def test_an_unknown_parser_is_refused_with_the_known_ones():
    async def check() -> None:
        for flag in ("tool_parser", "reasoning_parser"):
            with pytest.raises(ConfigError, match=rf"'nonsense'\n  hint: set --{flag.replace('_', '-')} to .*qwen3"):
                async with serving(FakeBackend(), **{flag: "nonsense"}):
                    pass

    asyncio.run(check())


def test_text_at_which_a_parsers_pattern_never_ends_is_text():
    class Slow:
        pieces = 0

        def parse(self, model_output: str, *_: object, **__: object) -> object:
            try:
                return None, "", re.findall(r"(?:a+)+$", model_output)
            except Exception:  # as some of them do
                return None, "", ["a call"]

        def parse_delta(self, delta_text: str, *_: object, **__: object) -> object:
            self.pieces += 1
            return re.findall(r"(?:a+)+$", delta_text)

    hostile = "a" * 64 + "b"
    parser = _forgiving(Slow)()
    before: object = signal.getsignal(signal.SIGALRM)
    ran = bool(signal.getitimer(signal.ITIMER_REAL)[0])
    assert parser.parse(hostile) == (None, hostile, [])
    assert parser.parse("aa")[2] == ["aa"]
    assert parser.parse_delta("aa") == ["aa"]
    assert parser.parse_delta(hostile).content == hostile
    assert parser.parse_delta("aa").content == "aa", "the rest of such a stream is text"
    assert parser.pieces == 2
    assert signal.getsignal(signal.SIGALRM) == before
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == ran, "as pytest's own"


def test_time_for_which_others_had_the_processor_does_not_count_and_a_timer_that_ran_goes_on():
    late: list[float] = []
    before = signal.signal(signal.SIGALRM, lambda *_: late.append(0))
    others = signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with time_limit(0.02):
            time.sleep(0.2)
        assert not late
        signal.pause()
        assert late == [0]
        with pytest.raises(LateError), time_limit(0.02):
            re.match(r"(?:a+)+$", "a" * 64 + "b")
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)
