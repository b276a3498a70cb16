"""Attacks by the body of a request: too much of anything, nonsense, and whatever a fuzzer finds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_rl.gateway import Gateway
from forge_rl.gateway.reading import holds_more
from forge_rl.gateway.request_state import _overlap
from forge_rl.types import Sampling
from tests.fake_backend import FakeBackend, serving
from tests.security.raw_http import BODY, JSON, address

HI = {"role": "user", "content": "Hi"}
BLOCK = {"type": "text", "text": "a"}
CHAT, COMPLETIONS, MESSAGES, COUNT = "/chat/completions", "/completions", "/messages", "/messages/count_tokens"
RESPONSES = "/responses"
LONG = "word " * 800_000


class Served:
    """A gateway in an event loop of its own, asked one request after the other."""

    def __init__(self, runner: asyncio.Runner, gateway: Gateway, backend: FakeBackend) -> None:
        self.gateway, self.backend, self.runner = gateway, backend, runner
        self.client = httpx.AsyncClient(base_url=gateway.base_url, timeout=60, trust_env=False)

    def post(self, path: str, body: Any, headers: dict[str, str] = JSON) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.runner.run(self.client.post(path, content=content, headers=headers))


@contextmanager
def served_by(backend: FakeBackend) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        context = serving(backend)
        gateway = runner.run(context.__aenter__())
        served = Served(runner, gateway, backend)
        try:
            yield served
            assert "completions in flight 0" in repr(gateway)
            assert gateway._reader._waiting_bytes == 0
        finally:
            runner.run(served.client.aclose())
            runner.run(context.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with served_by(FakeBackend(["Yes."])) as found:
        yield found


def tool(at: int = 0, description: str = "", parameters: Any = None) -> dict[str, Any]:
    function = {"name": f"t{at}", "description": description, "parameters": parameters or {}}
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("path", "fields", "status", "told"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, 400, "in at least"),
        (CHAT, {"messages": [{"role": "user", "content": "é" * 200_000}]}, 400, "in at least"),
        (CHAT, {"messages": [HI], "tools": [tool(0, LONG)]}, 400, "in at least"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 4096}, 400, "in the messages"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 4097}, 400, "at most 4096"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 100_000}, 413, "12288 objects"),
        (CHAT, {"messages": [{"role": "x", "no": ""}] * 4000}, 400, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [BLOCK] * 40_000}]}, 413, "12288 objects"),
        (CHAT, {"messages": [HI], "tools": [tool(at) for at in range(513)]}, 400, "at most 512"),
        (CHAT, {"messages": [HI], "tools": [tool(0, "", {"enum": [1] * 140_000})]}, 413, "131072 values"),
        (CHAT, {"messages": [HI], "metadata": {str(at): 0 for at in range(140_000)}}, 413, "131072 values"),
        (CHAT, {"messages": [HI], "stop": ["x"] * 17}, 400, "16 stop strings"),
        (CHAT, {"messages": [HI], "stop": "x" * 513}, 400, "512 characters"),
        (CHAT, {"messages": [HI], "n": 100, "logprobs": True, "top_logprobs": 20}, 400, "512 logprobs"),
        (CHAT, {"messages": [HI], "max_tokens": 10**400}, 400, "max_tokens"),
        (CHAT, {"messages": [HI], "n": 10**4000}, 400, "n"),
        (CHAT, {"messages": [HI], "seed": 1 << 63}, 400, "seed"),
        (CHAT, b'{"model":"fake","temperature":1e999,"messages":[{"role":"user","content":"Hi"}]}', 400, "temperature"),
        (CHAT, b'{"model":"fake","max_tokens":' + b"9" * 5000 + b',"messages":[]}', 400, "JSON"),
        (CHAT, b'{"model":"fake","messages":' + b"[" * 30_000, 400, "JSON"),
        (CHAT, b'{"model":"fake","messages":' + b"[" * 1_000_000, 413, "12288 objects"),
        (CHAT, b'{"a":' * 5_000, 400, "JSON"),
        (CHAT, b"\xff\xfe" * 20_000, 400, "JSON"),
        (CHAT, b"", 400, "JSON"),
        (COMPLETIONS, {"prompt": ["word " * 300] * 2048}, 400, "2048 completions"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 43}, 400, "129 completions"),
        (COMPLETIONS, {"prompt": ["a"] * 129, "logprobs": 0}, 400, "129 completions"),
        (COMPLETIONS, {"prompt": ["a"] * 100, "logprobs": 20}, 400, "512 logprobs"),
        (COMPLETIONS, {"prompt": [""] * 140_000}, 413, "131072 values"),
        (COMPLETIONS, {"prompt": [[]] * 40_000}, 413, "12288 objects"),
        (COMPLETIONS, {"prompt": [[]] * 12_000}, 400, "12000 completions"),
        (COMPLETIONS, {"prompt": [5] * 5000}, 400, "in at least"),
        (COMPLETIONS, {"prompt": [10**4000]}, 400, "token ids"),
        (COMPLETIONS, {"prompt": LONG}, 400, "in at least"),
        (MESSAGES, {"messages": [HI], "max_tokens": 5, "system": LONG}, 400, "in at least"),
        (MESSAGES, {"messages": [HI] * 4097, "max_tokens": 5}, 400, "at most 4096"),
        (MESSAGES, {"messages": [HI], "max_tokens": 5, "stop_sequences": ["x"] * 17}, 400, "16 stop strings"),
        (COUNT, {"messages": [HI], "tools": [{"name": "t", "description": LONG, "input_schema": {}}]}, 400, "4096"),
        (COUNT, {"messages": [{"role": "user", "content": [BLOCK] * 40_000}]}, 413, "12288 objects"),
        (RESPONSES, {"input": LONG}, 400, "in at least"),
        (RESPONSES, {"input": "Hi", "instructions": LONG}, 400, "in at least"),
        (RESPONSES, {"input": [HI] * 4097}, 400, "at most 4096"),
        (RESPONSES, {"input": [{"type": "nonsense"}] * 4000}, 400, "'nonsense'"),
        (RESPONSES, {"input": [{"role": "user", "content": [BLOCK] * 40_000}]}, 413, "12288 objects"),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "function", "name": "t"}] * 513}, 400, "at most 512"),
        (RESPONSES, {"input": "Hi", "stop": ["x"] * 17}, 400, "16 stop strings"),
        (CHAT, {"messages": [HI], "logit_bias": {str(at): 1 for at in range(9000)}, "n": 129}, 400, "n"),
    ],
)
def test_too_much_of_anything_is_refused_with_its_limit(served: Served, path: str, fields: Any, status: int, told: str):
    served.backend.asked.clear()
    body = fields if isinstance(fields, bytes) else {"model": "fake", **fields}
    answer = served.post(path, body)
    assert (answer.status_code, told in answer.json()["error"]["message"]) == (status, True), answer.text[:300]
    assert len(answer.content) < 1000, "what is refused is not sent back"
    assert not served.backend.asked
    assert served.post(CHAT, BODY).status_code == 200


@pytest.mark.parametrize(
    "setting",
    [
        b'"repetition_penalty":1e-300',
        b'"repetition_penalty":"1e-300"',
        b'"repetition_penalty":1e300',
        b'"repetition_penalty":NaN',
        b'"repetition_penalty":true',
        b'"temperature":5e-324',
        b'"temperature":1e-10',
        b'"temperature":3',
        b'"frequency_penalty":1e30',
        b'"presence_penalty":-1e30',
        b'"top_p":0',
        b'"top_p":5e-324',
        b'"min_p":2',
        b'"min_p":-Infinity',
        b'"top_k":-5',
        b'"top_k":1e30',
        b'"top_k":9223372036854775808',
        b'"min_tokens":-1',
        b'"logit_bias":{"5":1e308}',
        b'"logit_bias":{"5":NaN}',
        b'"logit_bias":{"5":"1"}',
        b'"logit_bias":[1]',
        b'"logit_bias":{%s}' % b",".join(b'"%d":1' % at for at in range(1025)),
        b'"stop_token_ids":%s' % json.dumps([1] * 1025).encode(),
        b'"allowed_token_ids":%s,"n":128' % json.dumps([1] * 2049).encode(),
        b'"bad_words":%s' % json.dumps(["a b"] * 129).encode(),
        b'"bad_words":%s,"n":9' % json.dumps(["a b"] * 128).encode(),
        b'"bad_words":[""]',
        b'"bad_words":["%s"]' % (b"a" * 129),
        b'"chat_template_kwargs":{"eos_token":""}',
        b'"chat_template_kwargs":{"image_token":"x"}',
        b'"chat_template_kwargs":{"additional_special_tokens":0}',
        b'"chat_template_kwargs":{"messages":1}',
        b'"chat_template_kwargs":{"raise_exception":true}',
        b'"chat_template_kwargs":{"add_generation_prompt":false}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_settings_that_could_break_an_engine_are_refused_by_name(served: Served, path: str, setting: bytes):
    served.backend.asked.clear()
    given = {
        CHAT: b'"messages":[{"role":"user","content":"Hi"}]',
        COMPLETIONS: b'"prompt":"Hi"',
        RESPONSES: b'"input":"Hi"',
    }
    answer = served.post(path, b'{"model":"fake",%s,%s}' % (given[path], setting))
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert told["param"] == setting.split(b'"')[1].decode(), told
    assert len(answer.content) < 1000
    assert not served.backend.asked


def test_what_an_agent_may_need_is_let_through():
    with served_by(FakeBackend(["Yes."], max_model_len=200_000)) as served:
        text = 'Commas, [brackets] and {braces}: "quoted\\", [[[ {{{ ,,, \n' * 4000
        for path, fields in (
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
            (CHAT, {"messages": [{"role": "user", "content": "Hi"}] * 4000}),
            (CHAT, {"messages": [HI], "tools": [tool(at, "x" * 100) for at in range(400)]}),
            (CHAT, {"messages": [HI], "stop": ["x" * 500] * 16, "n": 24, "logprobs": True, "top_logprobs": 20}),
            (COMPLETIONS, {"prompt": ["word"] * 128}),
            (CHAT, {"messages": [HI], "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}),
            (CHAT, {"messages": [HI], "temperature": 2, "logit_bias": {"5": -100}, "stop_token_ids": [7, 8]}),
            (CHAT, {"messages": [HI], "allowed_token_ids": list(range(49_000)), "bad_words": ["a b", "c"]}),
            (COMPLETIONS, {"prompt": [5] * 150_000}),
            (MESSAGES, {"messages": [HI], "system": text, "max_tokens": 5}),
        ):
            answer = served.post(path, {"model": "fake", **fields})
            assert answer.status_code == 200, answer.text[:300]


def test_an_answer_with_many_logprobs_is_the_same_as_with_few():
    with served_by(FakeBackend(["Well."])) as served:
        asked = {"model": "fake", "messages": [HI], "logprobs": True, "top_logprobs": 20}
        few, many = (served.post(CHAT, {**asked, "n": count}).json()["choices"] for count in (1, 24))
        assert all(choice["logprobs"] == few[0]["logprobs"] for choice in many)
        assert len(few[0]["logprobs"]["content"][0]["top_logprobs"]) == 20
        asked = {"model": "fake", "prompt": "Hi", "logprobs": 20}
        few, many = (served.post(COMPLETIONS, {**asked, "n": count}).json()["choices"] for count in (1, 24))
        assert all(choice["logprobs"] == few[0]["logprobs"] for choice in many)


def test_clients_that_go_leave_no_work_behind(served: Served):
    body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "w " * 100_000}]}).encode()

    async def leave() -> None:
        for _ in range(20):
            _, writer = await asyncio.open_connection(*address(served.gateway))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            await writer.drain()
            writer.close()

    served.runner.run(leave())
    assert served.post(CHAT, BODY).status_code == 200
    assert len(served.gateway._reader._executor._threads) == 1


ANY = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from([",", "[", '"', "\\", '\\"{']),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)


@given(ANY)
@settings(max_examples=100, deadline=None)
def test_values_are_counted_without_parsing(value: Any):
    def count(value: Any) -> tuple[int, int]:
        """Values after a comma, and objects and arrays."""
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        counts = [count(each) for each in inner]
        commas = max(len(inner) - 1, 0) + sum(each for each, _ in counts)
        return commas, isinstance(value, list | dict) + sum(each for _, each in counts)

    commas, containers = count(value)
    for text in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()):
        assert not holds_more(text, commas + 1, containers)
        assert holds_more(text, commas, containers)
        assert not containers or holds_more(text, commas + 1, containers - 1)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=6))
def test_what_may_become_a_stop_text_is_held_back(text: str, stop: str):
    ends = [length for length in range(1, len(stop)) if text.endswith(stop[:length])]
    assert _overlap(text, stop) == max(ends, default=0)


WORDS = st.text(max_size=8) | st.sampled_from(["user", "assistant", "tool", "system", "text", "fake", "function", "x"])
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 2, -1, 10**30])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
PARTS = WORDS | st.lists(
    st.fixed_dictionaries({"type": WORDS}, optional={"text": VALUES, "content": VALUES}), max_size=2
)
FUNCTION = st.fixed_dictionaries({"name": WORDS}, optional={"arguments": WORDS})
CALLS = st.lists(st.fixed_dictionaries({"id": WORDS, "function": FUNCTION}), max_size=2)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer"]), "content": PARTS | VALUES},
    optional={"tool_calls": CALLS | VALUES, "tool_call_id": VALUES, "name": VALUES},
)
TOOL = st.fixed_dictionaries(
    {"type": WORDS},
    optional={"function": VALUES, "name": WORDS, "input_schema": VALUES, "description": VALUES},
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("fake")},
    optional={
        "messages": st.lists(MESSAGE, max_size=3) | VALUES,
        "prompt": VALUES | st.lists(st.integers(-2, 60_000), max_size=3) | st.lists(WORDS, max_size=3),
        "max_tokens": st.integers(1, 20) | VALUES,
        "tools": st.lists(TOOL, max_size=2) | VALUES,
        **dict.fromkeys(
            ("n", "stop", "stream", "stream_options", "temperature", "seed", "logprobs", "top_logprobs"), VALUES
        ),
        "input": VALUES | st.lists(st.dictionaries(WORDS | st.just("type"), VALUES | WORDS, max_size=4), max_size=3),
        **dict.fromkeys(("response_format", "structured_outputs", "text", "reasoning", "chat_template_kwargs"), VALUES),
        **dict.fromkeys(("tool_choice", "system", "stop_sequences", "metadata", "thinking", "top_p"), VALUES),
    },
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, COUNT, RESPONSES])
def test_whatever_a_body_holds_the_client_is_told_and_the_server_goes_on(served: Served, path: str):
    seen: set[int] = set()

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(BODIES | VALUES | st.binary(max_size=40))
    def check(body: Any) -> None:
        answer = served.post(path, body if isinstance(body, bytes) else json.dumps(body).encode())
        assert 200 <= answer.status_code < 500, (body, answer.text)
        seen.add(answer.status_code)
        if answer.status_code == 200 and "event-stream" in answer.headers["content-type"]:
            assert "internal_error" not in answer.text

    check()
    assert 400 in seen
    assert served.post(path, {**BODY, "prompt": "x"} if path == COMPLETIONS else BODY).status_code in (200, 400)
    assert served.post(CHAT, BODY).status_code == 200


def test_headers_of_any_kind_are_told_apart(served: Served):
    session = served.gateway.open(sampling=Sampling(max_tokens=5))
    session.close()

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.sampled_from(["authorization", "content-type", "x-api-key", "origin", "expect"]), st.text(min_size=1))
    def check(name: str, value: str) -> None:
        sent = bytes(byte for byte in value.encode(errors="replace") if byte >= 32)  # what httpx would send
        headers: Any = {**{key.encode(): each.encode() for key, each in JSON.items()}, name.encode(): sent.strip()}
        assert served.post(CHAT, json.dumps(BODY).encode(), headers).status_code < 500

    check()
    answer = served.post(CHAT, BODY, {**JSON, "authorization": f"Bearer {session.key}"})
    assert answer.status_code == 401


NULLABLE = '(("a"? "b"? [a-zA-Z ]?){1,3000}){1,3000}'


def test_a_constraint_that_would_hold_up_an_engine_costs_its_own_request(served: Served):
    served.backend.asked.clear()
    pattern = "^((a?b?[a-zA-Z ]?){1,3000}){1,3000}$"
    forms: list[tuple[str, dict[str, Any]]] = [
        ("may be empty", {"structured_outputs": {"grammar": f"root ::= {NULLABLE}"}}),
        ("may be empty", {"structured_outputs": {"regex": pattern}}),
        ("may be empty", {"structured_outputs": {"grammar": f'root ::= [a-z]* "#" {NULLABLE}'}}),
        ("cannot be used", {"tools": [tool(0, "", schema(pattern=pattern))], "tool_choice": "required"}),
        (
            "nested repeats",
            {"structured_outputs": {"json": {"type": "string", "pattern": "^((a{1,3000}){1,3000}){1,3000}$"}}},
        ),
        ("takes", {"structured_outputs": {"grammar": "root ::= root root root | root root | [a-zA-Z ]"}}),
        ("its brackets nest", {"structured_outputs": {"regex": "(" * 3000 + "a" + ")*" * 3000}}),
        ("its brackets nest", {"structured_outputs": {"grammar": "root ::= " + "(" * 30000 + '"a"' + ")" * 30000}}),
        ("131072", {"structured_outputs": {"choice": [f"choice {at}" for at in range(10_000)]}}),
        ("has 588890 bytes", {"structured_outputs": {"choice": [f"choice {at}" for at in range(50_000)]}}),
        ("cannot be compiled", {"structured_outputs": {"regex": "(?<=a)b\\1"}}),
        ("cannot be compiled", {"structured_outputs": {"grammar": 'start: "a"+\n%import common.X'}}),
        ("whitespace_pattern", {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": "(a+)+"}}),
    ]
    for told, fields in forms:
        answer = served.post(CHAT, {"model": "fake", "messages": [HI], **fields})
        assert (answer.status_code, told in answer.text) == (400, True), (fields, answer.text)
        assert len(answer.content) < 1000
    assert not served.backend.asked
    for fields in (
        {"structured_outputs": {"regex": "[a-z]{1,20}(, [a-z]{1,20}){0,9}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'root ::= "a"? "b"{1,30} [a-z]*'}},
        {"response_format": {"type": "json_object"}},
        {"tools": [tool(0, "", schema(pattern="^[0-9]{5}$"))], "tool_choice": "required"},
    ):
        answer = served.post(CHAT, {"model": "fake", "messages": [HI], **fields})
        assert answer.status_code == 200, (fields, answer.text)


def schema(**of_x: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"type": "string", **of_x}}, "required": ["x"]}
