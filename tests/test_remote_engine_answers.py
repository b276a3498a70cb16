"""Answers and addresses of remote engines that a run refuses or survives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forge_rl.engines.remote import KEY_VARIABLE, PREFIX, PROTOCOL, RemoteServer, wire
from forge_rl.engines.remote.engine import RemoteEngine, _header
from forge_rl.errors import ConfigError
from forge_rl.services.generator_config import GeneratorConfig
from forge_rl.types import Sampling
from tests.test_remote_engine import FACTS, KEY, SETTINGS, Engine, connected, listening, run

CLAIMED = json.dumps({"protocol": PROTOCOL, "session": "abc", "facts": FACTS}).encode() + b"\n"


GOOD = {"token_ids": [5], "logprobs": [-1.0], "versions": [1], "text": "x"}


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


GARBAGE: list[tuple[bytes, str]] = [
    (b"[1]\n", "not a JSON object"),
    (b"\xff\x00\x1b[2J\n", r"not a JSON object: .*\\x1b"),
    (b"[" * 100_000 + b"\n", "not a JSON object"),
    (line(token_ids=[]), "a chunk is empty"),
    (line(token_ids=["5"]), "token ids are not a list of integers"),
    (line(token_ids=[2**40]), "token ids are not a list of integers"),
    (line(token_ids=[True]), "token ids are not a list of integers"),
    (line(token_ids=5), "token ids are not a list of integers"),
    (line(logprobs=[None]), "logprobs are not a list of numbers"),
    (line(logprobs=[10**400]), "a number that is too large"),
    (line(versions=[1.0]), "versions are not a list of integers"),
    (line(text=5), "a text of type int"),
    (line(finish="\x1b"), r"the finish '.*x1b'"),
    (line(finish=["stop"]), "the finish"),
    (line(top=[[[1]]]), "a chunk is malformed"),
    (line(top=5), "a chunk is malformed"),
    (line(prompt=[[["a", 1, 1]]]), "entries are not a list of integers"),
    (line(cache=[1, 2, 3, 4, 5]), "the use of a cache is malformed"),
    (line(cache=[float("inf")] * 4), "the use of a cache is malformed"),
    (line(drafted="many"), "entries are not a list of integers"),
    (json.dumps({"error": ["x"], "message": {"a": "\x1b"}}).encode() + b"\n", "the server failed"),
]


def test_garbage_is_an_error_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with connected_to(b"", monkeypatch) as (remote, answer):
            assert [chunk async for chunk in remote.stream([5], Sampling(max_tokens=2))] == [], "no finish: see decode"
            for answer.body, message in GARBAGE:
                with pytest.raises(RuntimeError, match=message):
                    await anext(remote.stream([5], Sampling(max_tokens=2)))

    run(work)


def test_an_endless_line_and_a_bomb_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(wire, "MOST_LINE", 1 << 20)
        async with connected_to(b"x" * (4 << 20), monkeypatch) as (remote, answer):
            with pytest.raises(RuntimeError, match="a line has more than 1048576 bytes"):
                await anext(remote.stream([5], Sampling(max_tokens=2)))
            answer.body, answer.headers = b"x", [(b"content-encoding", b"gzip")]
            with pytest.raises(RuntimeError, match="the answer is compressed"):
                await anext(remote.stream([5], Sampling(max_tokens=2)))
            answer.status, answer.headers = 307, [(b"location", b"http://127.0.0.1:1/")]
            with pytest.raises(RuntimeError, match="status 307"):
                await anext(remote.stream([5], Sampling(max_tokens=2)))

    run(work)


def test_a_server_that_closes_its_sockets_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    async def work() -> None:
        async with connected(Engine(), monkeypatch) as remote:
            is_over = asyncio.Event()
            monkeypatch.setattr("os._exit", lambda status: (ended.append(status), is_over.set()))
            remote._client.base_url = "http://127.0.0.1:1/"
            await is_over.wait()
            with pytest.raises(RuntimeError, match=r"attempts failed|refused|reset"):
                await remote.hold(paused=True, asleep=False)

    run(work)
    assert ended == [73], "its process ends, and is started again"


@dataclasses.dataclass
class Answer:
    """What a server answers that claims to be an engine."""

    body: bytes
    headers: list[tuple[bytes, bytes]] = dataclasses.field(default_factory=list)
    status: int = 200


@contextlib.asynccontextmanager
async def connected_to(body: bytes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[RemoteEngine, Answer]]:
    """A server that claims to be an engine, and then answers with this."""
    answer = Answer(body)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reply = Answer(CLAIMED) if scope["path"] == f"{PREFIX}claim" else answer
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
        await send({"type": "http.response.body", "body": reply.body})

    monkeypatch.setenv(KEY_VARIABLE, KEY)
    async with listening(app) as url:
        remote = await RemoteEngine.connect(RemoteServer(url=url, owner="a", wait_s=30), SETTINGS)
        assert remote._beating is not None
        remote._beating.cancel()
        try:
            yield remote, answer
        finally:
            await remote._client.aclose()


def test_a_malformed_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (b"\x00\x00\x00\x05[1,2]", "not a JSON object"),
        (b"\xff\xff\xff\xff", "a header has 4294967295 bytes"),
        (b"\x00\x00\x00\x02{}", "a version is malformed"),
        (_header({"version": 1, "tensors": [["a", [2], "int4", 5]]}), "a tensor 'a' is malformed"),
        (_header({"version": 1, "tensors": [["a", [-2], "float32", 5]]}), "a tensor 'a' has a negative size"),
        (_header({"version": 1, "tensors": []}) + _header({"tensors": ["a"]}), "tensors that the version has not"),
        (_header({"version": 1, "tensors": []}) + _header({"tensors": "a"}), "tensors that the version has not"),
        (b"\x00\x00", "ends too early"),
    ]

    async def work() -> None:
        async with connected(Engine(), monkeypatch) as remote:
            for body, message in cases:
                with pytest.raises(RuntimeError, match=message):
                    await anext(remote._lines("load", body))

    run(work)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ("ftp://a",)}, "'ftp://a' is not the address of a server"),
        ({"urls": ("http://a:x",)}, "is not the address"),
        ({"urls": ("http://a?key=1",)}, "is not the address"),
        ({"urls": ("http://me:secret@a:8000",)}, "holds a user or password: http://a:8000"),
        ({"urls": ("http://a", "http://a/")}, "names a server twice"),
        ({"replicas": 0}, "replicas is 0"),
        ({"urls": ("http://a",), "replicas": 0, "spares": 1}, "there are none"),
        ({"urls": ("http://a",), "routed_experts": True}, "do not return the experts"),
        ({"kv_transfer_config": "OffloadingConnector"}, "is not a JSON object: OffloadingConnector"),
    ],
)
def test_addresses_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        GeneratorConfig(**settings)
    assert "secret" not in str(caught.value)


def test_a_key_is_not_sent_unencrypted_to_a_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        with pytest.raises(ConfigError, match=r"at the public address 8\.8\.8\.8"):
            await RemoteEngine.connect(RemoteServer(url="http://8.8.8.8:1", owner="a"), SETTINGS)

    run(work)
