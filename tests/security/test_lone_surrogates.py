"""Half of a surrogate pair, JSON without a bottom and numbers without an end are the sender's error, never ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tools import ToolEnv
from forge_rl.errors import ModelError
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.services.environment import Environment
from forge_rl.tokens.message_form import decoded_arguments
from forge_rl.types import Outcome, Task, ToolCall, Turn
from tests.fake_backend import TRAINING, FakeBackend, serving, tokenizer
from tests.staged_rollouts import StagedReward

LONE = "\ud800"
HI = [{"role": "user", "content": "Hi"}]
CALL_ID = "call00001"


def body_of(**more: object) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 5, **more}


def chat(**more: object) -> tuple[str, dict[str, Any]]:
    return "/chat/completions", body_of(messages=HI) | more


def message(**more: object) -> tuple[str, dict[str, Any]]:
    return "/messages", body_of(messages=HI) | more


def count(**more: object) -> tuple[str, dict[str, Any]]:
    return "/messages/count_tokens", {"model": "fake", "messages": HI} | more


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


def function(**more: object) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "add", **more}}]


def called(arguments: str) -> list[dict[str, object]]:
    call = {"id": CALL_ID, "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "tool_calls": [call]}
    return [*HI, answer, {"role": "tool", "tool_call_id": CALL_ID, "content": "8"}]


LONE_BODIES = {
    "messages.0.content": chat(messages=user(LONE)),
    "messages.0.content.1.text": chat(messages=user([{"type": "text", "text": text} for text in ("a", LONE)])),
    "messages.0.name": chat(messages=[{**HI[0], "name": LONE}]),
    "messages.1.tool_calls.0.function.arguments": chat(messages=called(LONE)),
    "model": chat(model=LONE),
    "tools.0.function.name": chat(tools=function(name=LONE)),
    "tools.0.function.description": chat(tools=function(description=LONE)),
    "tools.0.function.parameters.a.1": chat(tools=function(parameters={"a": [1, LONE]})),
    "tools.0.function.parameters": chat(tools=function(parameters={LONE: 1})),
    "stop": chat(stop=f"x{LONE}"),
    "stop.1": chat(stop=["a", "\udfff"]),
    "user": chat(user=LONE),
    "metadata.task": chat(metadata={"task": LONE}),
    "prompt": ("/completions", body_of(prompt=LONE)),
    "prompt.1": ("/completions", body_of(prompt=["a", LONE])),
    "suffix": ("/completions", body_of(prompt="a", suffix=LONE)),
    "messages.0.content.0.text": message(messages=user([{"type": "text", "text": LONE}])),
    "system": message(system=LONE),
    "stop_sequences.0": message(stop_sequences=[LONE]),
    "tools.0.input_schema.b": message(tools=[{"name": "add", "input_schema": {"b": LONE}}]),
    "tools.0.name": count(tools=[{"name": LONE, "input_schema": {}}]),
    "system.0.text": count(system=[{"type": "text", "text": LONE}]),
}


def answers_to(path: str, *bodies: str, backend: FakeBackend | None = None) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        headers = {"content-type": "application/json"}
        async with (
            serving(backend or FakeBackend()) as gateway,
            httpx.AsyncClient(base_url=gateway.base_url, headers=headers) as client,
        ):
            return [await client.post(path, content=body.encode(errors="surrogatepass")) for body in bodies]

    return asyncio.run(ask())


@pytest.mark.parametrize("param", LONE_BODIES)
def test_the_parameter_with_a_lone_surrogate_is_named(param: str):
    path, body = LONE_BODIES[param]
    escaped, raw = (json.dumps(body, ensure_ascii=ascii_only) for ascii_only in (True, False))
    for answer in answers_to(path, escaped, raw):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == f"{param} has a lone surrogate, which stands for no character"
        if not path.startswith("/messages"):
            assert error["param"] == param


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/messages", "/messages/count_tokens"])
def test_a_key_with_a_lone_surrogate_is_the_bodys(path: str):
    (answer,) = answers_to(path, json.dumps({LONE: 1}))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the body has a lone surrogate, which stands for no character"


def test_a_whole_pair_is_a_character():
    backend = FakeBackend()
    body = r'{"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "\ud83d\ude00"}]}'
    assert answers_to("/chat/completions", body, backend=backend)[0].status_code == 200
    assert "\n😀<|im_end|>" in backend.asked[0].prompt


@pytest.mark.parametrize("name", ["%ED%A0%80", "%FF", "%00", "%5Cud800"])
async def test_a_model_of_no_text_does_not_exist(name: str):
    async with serving(FakeBackend()) as gateway, httpx.AsyncClient(base_url=gateway.base_url) as client:
        answer = await client.get(f"/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize("arguments", [r'{"a": "\ud800"}', r'{"\udfff": 1}', r'{"a": ["\ud800x"]}', r'"\ud800"'])
def test_call_arguments_with_a_lone_surrogate_are_shown_as_written(arguments: str):
    backend = FakeBackend()
    path, body = chat(messages=called(arguments), tool_choice="none")
    answers = answers_to(path, json.dumps(body), json.dumps({**body, "tools": function()}), backend=backend)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(json.dumps(arguments) in request.prompt for request in backend.asked)


NESTED = "[" * 5000 + "]" * 5000
DEEP = "[" * 900 + "]" * 900
"""Deep enough for functions that call themselves to fail, not for the parser of JSON."""
BIG = "1" * 5000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        chat(messages=user("@")),
        chat(seed="@"),
        chat(metadata="@"),
        chat(unknown="@"),
        chat(tools=function(parameters={"a": "@"})),
        ("/completions", body_of(prompt="@")),
        ("/completions", body_of(prompt=[["@"]])),
        message(tools=[{"name": "add", "input_schema": {"a": "@"}}]),
        message(messages=[*HI, {"role": "assistant", "content": [{"type": "tool_use", "input": {"a": "@"}}]}, *HI]),
        count(system="@"),
    ],
)
def test_json_without_a_bottom_and_numbers_without_an_end_are_refused(path: str, body: dict[str, Any]):
    values = (NESTED, '{"a":' * 5000 + "1" + "}" * 5000, BIG, f"[{BIG}]")
    answers = answers_to(path, *(json.dumps(body).replace('"@"', value) for value in values))
    assert [answer.status_code for answer in answers] == [400] * len(values)


def test_arguments_of_any_depth_are_shown():
    bodies = []
    for levels in (30, 64, 65, 200, *range(900, 1000, 10), 5000):
        arguments = '{"a":' + "[" * levels + '"b"' + "]" * levels + "}"
        _, body = chat(messages=called(arguments), tool_choice="none", tools=function())
        bodies.append(json.dumps(body))
    answers = answers_to("/chat/completions", *bodies, backend=FakeBackend(max_model_len=1 << 20))
    assert {answer.status_code for answer in answers} == {200}


def test_arguments_that_no_template_can_show_stay_text():
    assert decoded_arguments('{"a": [1, {"b": "\\u00e9"}]}') == {"a": [1, {"b": "é"}]}
    assert decoded_arguments("7") == 7
    for text in ('{"a": "\\ud800"}', "[" * 65 + "]" * 65, NESTED, BIG, f'{{"a": {BIG}}}', "no JSON"):
        assert decoded_arguments(text) == text


async def test_a_session_of_a_task_with_a_lone_surrogate_serves():
    async with serving(FakeBackend(), open_to_all=False) as gateway:
        session = gateway.open(f"task-{LONE}", sampling=TRAINING)
        headers = {"authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers) as client:
            body = {"model": "fake", "messages": HI}
            assert (await client.post("/chat/completions", json=body)).status_code == 200
        assert len(session.turns) == 1


def files(folder: str) -> str:
    """List a folder."""
    return "1\udcff.txt"


class Plain:
    """An environment of a user."""

    async def reset(self) -> Observation:
        return Observation(messages=({"role": "user", "content": f"first {LONE}"},))

    async def step(self, completion: str) -> Step:
        if completion == "done":
            return Step(done=True, output=LONE)
        return Step(done=False, messages=({"role": "user", "content": f"then {LONE}"},))


@pytest.mark.parametrize(
    ("factory", "arguments", "prompt_text", "output"),
    [
        (ToolEnv([files]), r'{"folder": "x"}', "1?.txt", "done"),
        (ToolEnv([files], compact=list), r'{"folder": "\ud800"}', '"arguments": {"folder": "?"}', "done"),
        (ToolEnv([files], compact=list), f'{{"folder": {DEEP}}}', "[[[[", "done"),
        (lambda task: Plain(), "", "then ?", "?"),
    ],
)
async def test_an_environments_texts_can_be_shown(factory: Any, arguments: str, prompt_text: str, output: str):
    prompts, answers = list[str](), ["call", "done"]

    async def decode(prompt_ids: Sequence[int]) -> Turn:
        prompts.append(tokenizer().decode(prompt_ids))
        text = answers.pop(0)
        ids = tokenizer().encode(text)
        logprobs, versions = [-1.0] * len(ids), [0] * len(ids)
        return Turn(prompt_ids=prompt_ids, token_ids=ids, logprobs=logprobs, versions=versions, text=text)

    async def parse(turn: Turn, tools: object) -> tuple[str, tuple[ToolCall, ...]]:
        return turn.text, (ToolCall(id=CALL_ID, name="files", arguments=arguments),) if answers else ()

    environment = Environment(Environment.Config(), factory)  # without processes
    reward: Any = StagedReward(lambda task, text: 1.0)
    task = Task(id="1", source="s", messages=tuple(HI))
    episode = await EpisodeRunner(tokenizer(), environment, reward, parse)(task, decode)
    assert (episode.outcome, episode.text) == (Outcome.COMPLETED, output), episode.problem
    assert prompt_text in prompts[1]


@pytest.mark.parametrize("text", [LONE, "a\udfffb", f"<|im_end|>{LONE}", "\ud83d \ude00"])
def test_a_task_or_world_with_a_lone_surrogate_is_told_so(text: str):
    for content in (user(text), [{"role": text, "content": "Hi"}]):
        with pytest.raises(ModelError, match=r"lone surrogate, U\+D"):
            tokenizer().render(content)
        with pytest.raises(ModelError, match=r"lone surrogate, U\+D"):
            tokenizer().extend((5, 2), content)
    with pytest.raises(ModelError, match="lone surrogate"):
        tokenizer().encode(text)
    with pytest.raises(ModelError) as caught:
        tokenizer().render(user(text))
    str(caught.value).encode()


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=20))
def test_any_text_is_encoded_or_refused(text: str):
    try:
        text.encode()
    except UnicodeEncodeError:
        with pytest.raises(ModelError):
            tokenizer().render(user(text))
    else:
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        rendered_text = tokenizer().decode(tokenizer().render(user(text)), skip_special=False)
        assert rendered_text.endswith(tokenizer().decode(tokenizer().encode(prompt), skip_special=False))
