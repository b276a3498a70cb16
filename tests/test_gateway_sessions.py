"""Sessions: turns are recorded with the engine's own tokens, and a conversation goes on from them."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic

from forge_rl.gateway.http import ClientGoneError, while_connected
from forge_rl.types import Episode, Task, Turn
from tests.fake_backend import (
    EOS,
    VERSION,
    FakeBackend,
    agent_of,
    ids_of,
    letters_of,
    logprob_of,
    tokenizer,
    until,
)
from tests.tiny import bundled_folder

HI = {"role": "user", "content": "Hi"}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": "日", "a": 1}}\n</tool_call>'

QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% set before = messages[loop.index0 - 1] %}{% if before.role != 'tool' and not before.tool_calls %}"
    "{{ raise_exception('an output without its call') }}{% endif %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template shows tools and their calls, and wants an output to follow its call."""
    folder = tmp_path_factory.mktemp("qwen")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder() / name, folder / name)
    (folder / "chat_template.jinja").write_text(QWEN)
    return folder


def segments(turns: tuple[Turn, ...]) -> tuple[Any, ...]:
    return Episode(task=Task(id="1", source="s", messages=(HI,)), turns=turns).segments


async def test_turns_have_the_names_that_agents_give_themselves():
    async with agent_of(FakeBackend(["one", "two", "three"])) as agent:
        await agent.ask([HI])
        await agent.ask([HI], extra_headers={"x-agent-name": "researcher"})
        await agent.ask([HI], extra_headers={"x-agent-name": "x" * 500})
        assert [turn.agent for turn in agent.session.close()] == ["", "researcher", "x" * 80]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_the_engines_own_tokens(stream: bool):
    odd = letters_of("It is 日.")
    assert odd != ids_of("It is 日.")
    backend = FakeBackend([odd, "Good bye."])
    async with agent_of(backend) as agent:
        messages = [HI, await agent.ask([HI], stream=stream), {"role": "user", "content": "And now?"}]
        messages.append(await agent.ask(messages, stream=stream))
        assert messages[-1]["content"] == "Good bye."
        turns = agent.session.close()
    first = tokenizer().render([HI])
    assert turns[0] == Turn(
        prompt_ids=first,
        token_ids=odd,
        logprobs=tuple(logprob_of(token) for token in odd),
        versions=(VERSION,) * len(odd),
        text="It is 日.",
        messages=(HI,),
    )
    assert tuple(turns[1].prompt_ids) == tuple(tokenizer().extend((*first, *odd), [messages[2]]))
    assert tuple(turns[1].prompt_ids[: len(first) + len(odd)]) == (*first, *odd)
    assert tokenizer().decode(turns[1].prompt_ids) == tokenizer().decode(tokenizer().render(messages[:3]))
    assert len(segments(turns)) == 1
    assert [asked.session for asked in backend.asked] == [agent.session.key] * 2
    assert agent.session.key not in repr(agent.session)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shows_tools", [False, True])
async def test_tool_calls_go_on_from_the_engines_own_tokens(stream: bool, shows_tools: bool, qwen: Path):
    odd = letters_of(f"Let me see. {CALL}\n{CALL}")
    backend = FakeBackend([odd, odd, "It is 2."])
    async with agent_of(backend, model=qwen if shows_tools else None) as agent:
        messages: list[Any] = [HI]
        for _ in range(2):
            messages.append(await agent.ask(messages, stream=stream, tools=TOOLS))
            for call in messages[-1]["tool_calls"]:
                # What a client makes of the arguments on their way is the same call.
                arguments = json.loads(call["function"]["arguments"])
                assert arguments == {"a": 1, "b": "日"}
                call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), indent=1)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "2"})
        messages.append(await agent.ask(messages, stream=stream, tools=TOOLS))
        turns = agent.session.close()
    assert messages[-1]["content"] == "It is 2."
    assert [tuple(turn.token_ids) for turn in turns] == [odd, odd, ids_of("It is 2.")]
    for before, after in pairwise(turns):
        context = tuple(before.context)
        assert tuple(after.prompt_ids[: len(context)]) == context
        shown = tokenizer().decode(after.prompt_ids[len(context) :], skip_special=False)
        both = "<tool_response>\n2\n</tool_response>"
        between = "<|im_end|>\n<|im_start|>user\n" if shows_tools else "\n"
        assert shown == f"\n<|im_start|>user\n{both}{between}{both}<|im_end|>\n<|im_start|>assistant\n"
    assert len(segments(turns)) == 1


async def test_an_answer_cut_within_a_character_goes_on_from_its_tokens():
    cut = letters_of("Yes, 日", end=False)[:-1]
    async with agent_of(FakeBackend([(*cut, EOS, EOS), "Sure."])) as agent:
        message = await agent.ask([HI], max_tokens=len(cut))
        assert message["content"] == "Yes, "
        await agent.ask([HI, message, {"role": "user", "content": "Go on"}])
        first, second = agent.session.close()
    assert tuple(first.token_ids) == cut
    assert (first.text, first.truncated) == ("Yes, ", True)  # what the client saw, and vLLM's engines return
    assert not second.truncated
    rest = second.prompt_ids[len(first.prompt_ids) + len(cut) :]
    assert tokenizer().decode(rest, skip_special=False).startswith("<|im_end|>\n<|im_start|>user\nGo on")
    assert len(segments((first, second))) == 1


async def test_a_stopped_answer_goes_on_from_its_tokens():
    ids = letters_of("Think. STOP more")
    async with agent_of(FakeBackend([ids, "Sure."])) as agent:
        message = await agent.ask([HI], stop="STOP")
        assert message["content"] == "Think. "
        await agent.ask([HI, message, {"role": "user", "content": "Go on"}])
        first, second = agent.session.close()
    assert tuple(first.token_ids) == letters_of("Think. STOP", end=False)
    assert first.text == "Think. "
    assert len(segments((first, second))) == 1


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda messages: [{"role": "system", "content": "Be kind."}, *messages],
        lambda messages: [messages[0], {**messages[1], "content": "Another answer."}, *messages[2:]],
        lambda messages: [{"role": "user", "content": "Ho"}, *messages[1:]],
        lambda messages: messages[2:],
    ],
)
async def test_a_rewritten_history_is_a_new_segment(rewrite: Any):
    async with agent_of(FakeBackend([letters_of("One."), "Two.", "Three."])) as agent:
        messages = [HI, await agent.ask([HI]), {"role": "user", "content": "Next"}]
        history = rewrite(messages)
        answer = await agent.ask(history)
        await agent.ask([*history, answer, {"role": "user", "content": "Go on"}])
        turns = agent.session.close()
    assert tuple(turns[1].prompt_ids) == tokenizer().render(history)
    assert len(segments(turns)) == 2
    assert tuple(turns[2].prompt_ids[: len(turns[1].prompt_ids)]) == tuple(turns[1].prompt_ids)


async def test_other_tools_are_another_context():
    async with agent_of(FakeBackend([letters_of("One."), "Two."])) as agent:
        messages = [HI, await agent.ask([HI], tools=TOOLS), {"role": "user", "content": "Next"}]
        await agent.ask(messages)
        turns = agent.session.close()
    assert tuple(turns[1].prompt_ids) == tokenizer().render(messages)
    assert len(segments(turns)) == 2


async def test_the_longest_turn_that_fits_is_gone_on_from():
    backend = FakeBackend([letters_of("One."), letters_of("Two."), letters_of("Two, else."), "End."])
    async with agent_of(backend) as agent:
        root = [HI, await agent.ask([HI]), {"role": "user", "content": "Next"}]
        left = [*root, await agent.ask(root), {"role": "user", "content": "Left"}]
        await agent.ask(root)
        await agent.ask(left)
        turns = agent.session.close()
    assert tuple(turns[3].prompt_ids[: len(turns[1].prompt_ids) + len(turns[1].token_ids)]) == (tuple(turns[1].context))
    assert len(segments(turns)) == 2


async def test_each_of_several_completions_is_a_turn_that_can_be_gone_on_from():
    backend = FakeBackend([letters_of("Left."), letters_of("Right."), "End."])
    async with agent_of(backend) as agent:
        answer = await agent.client.chat.completions.create(model="fake", messages=[HI], n=2)  # type: ignore[list-item]
        right = answer.choices[1].message.model_dump(exclude_unset=True)
        await agent.ask([HI, right, {"role": "user", "content": "Go on"}])
        turns = agent.session.close()
    assert [turn.text for turn in turns] == ["Left.", "Right.", "End."]
    assert tuple(turns[2].prompt_ids[: len(turns[1].prompt_ids) + len(turns[1].token_ids)]) == (tuple(turns[1].context))


async def test_completions_go_on_from_the_tokens_behind_their_text():
    odd = letters_of(" upon a time", end=False)
    async with agent_of(FakeBackend([(*odd, EOS), " it ended"])) as agent:
        first = await agent.client.completions.create(model="fake", prompt="Once", max_tokens=len(odd))
        text = "Once" + first.choices[0].text + " and then"
        await agent.client.completions.create(model="fake", prompt=text)
        turns = agent.session.close()
    assert tuple(turns[1].prompt_ids) == (*tokenizer().encode("Once"), *odd, *tokenizer().encode(" and then"))
    assert len(segments(turns)) == 1


async def test_completions_go_on_from_tokens_that_end_within_a_character():
    cut = letters_of(" upon 日", end=False)[:-1]
    async with agent_of(FakeBackend([(*cut, EOS), " it ended"])) as agent:
        first = await agent.client.completions.create(model="fake", prompt="Once", max_tokens=len(cut))
        assert first.choices[0].text == " upon "
        await agent.client.completions.create(model="fake", prompt="Once upon a time")
        turns = agent.session.close()
    assert tuple(turns[1].prompt_ids) == (*tokenizer().encode("Once"), *cut, *tokenizer().encode("a time"))
    assert len(segments(turns)) == 1


async def test_a_cancelled_request_ends_at_the_engine_and_leaves_no_turn():
    backend = FakeBackend(["A long answer."], gate=asyncio.Event())
    async with agent_of(backend) as agent:
        for stream in (False, True):
            asking = asyncio.ensure_future(agent.ask([HI], stream=stream))
            await until(lambda: backend.open == 1)
            asking.cancel()
            await until(lambda: backend.open == 0)
        assert backend.aborted == 2
        assert backend.gate is not None
        backend.gate.set()
        await agent.ask([HI])
        assert len(agent.session.close()) == 1


async def test_a_session_ends_when_the_aborts_of_its_requests_have_ended():
    may_end, has_ended = asyncio.Event(), asyncio.Event()
    async with agent_of(FakeBackend()) as agent:

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()
                has_ended.set()

        async def disconnect() -> dict[str, str]:
            return {"type": "http.disconnect"}

        request = asyncio.ensure_future(while_connected(work(), disconnect, agent.session.running))  # type: ignore[arg-type]
        await until(lambda: any(task.cancelling() for task in agent.session.running))
        agent.session.close()
        ending = asyncio.ensure_future(agent.session.ended())
        await asyncio.sleep(0)
        may_end.set()
        await ending
        assert has_ended.is_set()
        with pytest.raises(ClientGoneError):
            await request


async def test_a_failed_request_leaves_no_turn():
    backend = FakeBackend(["A long answer."], fail=RuntimeError("a bug"), fail_after=2)
    async with agent_of(backend) as agent:
        for stream in (False, True):
            with pytest.raises(openai.APIError):
                await agent.ask([HI], stream=stream)
        assert agent.session.close() == ()


async def test_anthropics_client_has_sessions_too():
    odd = letters_of(f"Let me see. {CALL}")
    backend = FakeBackend([odd, "It is 2."])
    async with agent_of(backend) as agent:
        session = agent.session
        async with AsyncAnthropic(base_url=session.anthropic_url, api_key=session.key, max_retries=0) as client:
            tools: Any = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
            messages: list[Any] = [HI]
            asked: Any = {"model": "fake", "max_tokens": 400, "tools": tools}
            answer = await client.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": answer.content})
            call = answer.content[-1]
            assert call.type == "tool_use"
            output = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
            messages.append({"role": "user", "content": [output]})
            answer = await client.messages.create(messages=messages, **asked)
        turns = session.close()
    assert [block.text for block in answer.content if block.type == "text"] == ["It is 2."]
    assert tuple(turns[0].token_ids) == odd
    assert len(segments(turns)) == 1
