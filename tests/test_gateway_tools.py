"""Tools, as the `openai` package uses them at the gateway: calls are found in completions by vLLM's parsers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from forge_rl.errors import ConfigError
from forge_rl.tokens.tool_parsers import LateError, ToolParser, _forgiving, call_within
from forge_rl.types import Turn
from tests.fake_backend import (
    FakeBackend,
    client_of,
    letters_of,
    serving,
    tokenizer,
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
async def test_an_agent_calls_tools_and_goes_on_with_their_outputs(chunk_tokens: int):
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


@pytest.mark.parametrize("stream", [False, True])
async def test_only_one_tool_is_called_at_a_time_if_asked(stream: bool):
    async with client_of(FakeBackend([letters_of(f"{CALL}\n{CALL}")])) as (client, _):
        params: Any = {"model": "fake", "messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
        if stream:
            chunks = [c async for c in await client.chat.completions.create(stream=True, **params)]
            assert {call.index for c in chunks for call in c.choices[0].delta.tool_calls or ()} == {0}
        else:
            answer = await client.chat.completions.create(**params)
            assert len(answer.choices[0].message.tool_calls or ()) == 1


@pytest.mark.parametrize("text", ["<tool_call>\nnonsense\n</tool_call>", "No call <tool", CALL])
async def test_what_is_no_call_is_text(text: str):
    choice: Any = "none" if text == CALL else "auto"
    async with client_of(FakeBackend([text])) as (client, _):
        answer = await client.chat.completions.create(model="fake", messages=HI, tools=TOOLS, tool_choice=choice)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "stop"


async def test_an_unknown_parser_is_refused_with_the_known_ones():
    for flag in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=rf"'nonsense'\n  hint: set --{flag.replace('_', '-')} to .*qwen3"):
            async with serving(FakeBackend(), **{flag: "nonsense"}):
                pass


def test_text_at_which_a_parsers_pattern_never_ends_is_text(monkeypatch: pytest.MonkeyPatch):
    class Slow:
        def parse(self, model_output: str, *_: object, **__: object) -> object:
            try:
                return None, "", re.findall(r"(?:a+)+$", model_output)
            except Exception:  # as some of them do
                return None, "", ["a call"]

    monkeypatch.setattr("forge_rl.tokens.tool_parsers._MOST_S", 0.02)
    hostile, warned = "a" * 64 + "b", list[str]()
    parser = _forgiving(Slow, warned.append)()
    before = signal.getsignal(signal.SIGVTALRM)
    assert parser.parse(hostile) == (None, hostile, [])
    assert len(warned) == 1
    assert parser.parse("aa")[2] == ["aa"]
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_time_limits_are_per_thread_and_interrupt_until_obeyed():
    def swallows() -> None:
        with contextlib.suppress(LateError):
            re.match(r"(?:a+)+$", "a" * 64 + "b")
        re.match(r"(?:a+)+$", "a" * 64 + "b")

    with ThreadPoolExecutor(1) as other:
        call_within(0.02, lambda: other.submit(re.match, r"(?:a+)+$", "a" * 22 + "b").result())
    with pytest.raises(LateError):
        call_within(0.02, swallows)


def test_a_signal_as_the_call_ends_leaves_no_timer() -> None:
    lines, first = inspect.getsourcelines(call_within)
    clean_up = first + next(place for place, line in enumerate(lines) if "runs = False" in line)

    def interrupts(frame: FrameType, event: str, _: object) -> Any:
        if (event, frame.f_code, frame.f_lineno) == ("line", call_within.__code__, clean_up):
            signal.raise_signal(signal.SIGVTALRM)
        return interrupts

    before = signal.getsignal(signal.SIGVTALRM)
    sys.settrace(interrupts)
    try:
        with pytest.raises(LateError):
            call_within(1e-6, lambda: sum(range(10_000)))
    finally:
        sys.settrace(None)
        timer = signal.getitimer(signal.ITIMER_VIRTUAL)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    assert (timer, signal.getsignal(signal.SIGVTALRM)) == ((0, 0), before)


async def test_a_long_call_is_read_in_time():
    code = "if (a < b && c[0] > '{x}') { print(f\"<b>{x}</b>\"); }\n" * 360  # 20,000 characters
    text = f"<tool_call>\n<function=write>\n<parameter=text>\n{code}\n</parameter>\n</function>\n</tool_call>"
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "write", "parameters": parameters}}
    turn = Turn(prompt_ids=[1], token_ids=[2], logprobs=[0.0], versions=[0], text=text)
    _, (call,) = await ToolParser("qwen3_coder", tokenizer()).parse(turn, [tool])
    assert json.loads(call.arguments) == {"text": code}


def test_a_call_that_is_drafted_in_a_thought_is_no_call():
    drafted, made = (
        f'<tool_call>\n{{"name": "delete", "arguments": {{"file": "{file}"}}}}\n</tool_call>' for file in ("all", "a")
    )
    tool = {"type": "function", "function": {"name": "delete", "parameters": {"type": "object"}}}
    parser = ToolParser("hermes", tokenizer())
    for text, count in ((f"<think>Or {drafted}?</think>No.", 0), (f"<think>Or {drafted}?</think>{made}", 1)):
        turn = Turn(prompt_ids=[1], token_ids=[2], logprobs=[0.0], versions=[0], text=text)
        content, calls = asyncio.run(parser.parse(turn, [tool]))
        assert [json.loads(call.arguments) for call in calls] == [{"file": "a"}] * count
        assert content == ("" if count else "No.")


async def test_a_call_with_lone_surrogates_has_text_that_a_prompt_can_hold():
    text = '<tool_call>\n{"name": "a\\ud800", "arguments": {"b": "\\udfff"}}\n</tool_call>'
    turn = Turn(prompt_ids=[1], token_ids=[2], logprobs=[0.0], versions=[0], text=text)
    _, (call,) = await ToolParser("hermes", tokenizer()).parse(turn, TOOLS)
    assert (call.name, json.loads(call.arguments)) == ("a?", {"b": "?"})
