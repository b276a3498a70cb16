"""Limits of the gateway: keys, bodies, concurrency, slow clients, its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from forge_rl.errors import ConfigError
from forge_rl.gateway import Gateway, GatewayConfig
from forge_rl.types import Sampling
from tests.fake_backend import FakeBackend, letters_of, serving, tokenizer, until

BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def request_bytes(gateway: Gateway, body: dict[str, Any]) -> bytes:
    """An HTTP request as it is sent."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def address(gateway: Gateway) -> tuple[str, int]:
    url = httpx.URL(gateway.base_url)
    assert url.port is not None
    return url.host, url.port


async def listener_of(gateway: Gateway) -> Any:
    """The socket on which a gateway listens; what is set on it holds for connections from then on."""
    assert gateway._http is not None
    uvicorn = gateway._http._server
    await until(lambda: uvicorn.started)
    return uvicorn.servers[0].sockets[0]


async def test_an_answers_body_does_not_wait_for_the_ack_of_its_head():
    async with serving(FakeBackend()) as gateway:
        assert (await listener_of(gateway)).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer right-and-more"}, 401),
        ({"authorization": "Basic right"}, 401),
        ({"x-api-key": "righ"}, 401),
        ({"authorization": "Bearer right"}, 200),
        ({"authorization": "bearer right"}, 200),
        ({"x-api-key": "right"}, 200),
    ],
)
async def test_only_the_key_opens_what_has_one(headers: dict[str, str], status: int):
    async with (
        serving(FakeBackend(), api_key="right") as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, headers=headers) as client,
    ):
        answer = await client.post("/chat/completions", json=BODY)
        assert answer.status_code == status
        assert (await client.get("/models")).status_code == status
        if status == 401:
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "right" not in answer.text


async def parts_of(data: bytes, size: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.mark.parametrize("tells_length", [True, False])
async def test_a_body_that_is_too_long_is_refused_while_it_is_read(tells_length: bool):
    backend = FakeBackend()
    async with (
        serving(backend, max_body_bytes=4096) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, headers={"content-type": "application/json"}) as client,
    ):
        for extra, status in ((5 << 20, 413), (2000, 200)):
            body = json.dumps(BODY).encode() + b" " * extra
            content = body if tells_length else parts_of(body, 1000)
            answer = await client.post("/chat/completions", content=content)
            assert answer.status_code == status, "the connection serves on after a refusal"
            if status == 413:
                assert answer.json()["error"]["code"] == "request_too_large"
    assert len(backend.asked) == 1


async def test_a_body_that_does_not_come_is_not_waited_for():
    backend = FakeBackend()
    async with serving(backend, client_deadline_s=0.2) as gateway:
        reader, writer = await asyncio.open_connection(*address(gateway))
        writer.write(request_bytes(gateway, BODY)[:-5])
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()
        await until(lambda: "completions in flight 0" in repr(gateway))
    assert not backend.asked


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_only_json_is_taken(kind: str):
    async with serving(FakeBackend()) as gateway, httpx.AsyncClient() as client:
        url = f"{gateway.base_url}/chat/completions"
        answer = await client.post(url, content=json.dumps(BODY), headers={"content-type": kind})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]


async def test_more_completions_than_may_be_in_flight_are_refused():
    backend = FakeBackend(gate=asyncio.Event())
    async with (
        serving(backend, max_concurrent=3) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client,
    ):
        running = [asyncio.ensure_future(client.post("/chat/completions", json=BODY)) for _ in range(2)]
        await until(lambda: backend.open == 2)
        refused = await client.post("/chat/completions", json={**BODY, "n": 2})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        running.append(asyncio.ensure_future(client.post("/chat/completions", json=BODY)))
        await until(lambda: backend.open == 3)
        assert (await client.post("/chat/completions", json=BODY)).status_code == 429
        assert backend.gate is not None
        backend.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 3
        await until(lambda: "completions in flight 0" in repr(gateway))
        assert (await client.post("/chat/completions", json={**BODY, "n": 3})).status_code == 200


async def test_sessions_and_other_clients_have_separate_limits():
    backend = FakeBackend(gate=asyncio.Event())
    async with serving(backend, max_concurrent=1) as gateway, httpx.AsyncClient(timeout=60) as client:
        url = f"{gateway.base_url}/chat/completions"
        keys = [gateway.open(sampling=Sampling(max_tokens=40)).key for _ in range(5)]
        headers = [{}, *({"authorization": f"Bearer {key}"} for key in keys)]
        running = [asyncio.ensure_future(client.post(url, json=BODY, headers=each)) for each in headers]
        await until(lambda: backend.open == 6)
        for each in headers:
            assert (await client.post(url, json=BODY, headers=each)).status_code == 429
        assert backend.gate is not None
        backend.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 6
        await until(lambda: "completions in flight 0" in repr(gateway))


async def test_a_thousand_streams_are_held_at_once():
    backend = FakeBackend(["Hello there, all of you."], gate=asyncio.Event())
    first, whole = 0, 0

    async def stream(gateway: Gateway) -> None:
        nonlocal first, whole
        reader, writer = await asyncio.open_connection(*address(gateway))
        writer.write(request_bytes(gateway, {**BODY, "stream": True}))
        head = await reader.readuntil(b"data: ")
        assert b" 200 " in head.splitlines()[0]
        first += 1
        rest = await reader.readuntil(b"[DONE]")
        whole += rest.count(b'"content":"') >= 5
        writer.close()

    async with serving(backend) as gateway, asyncio.TaskGroup() as group:
        for _ in range(1000):
            group.create_task(stream(gateway))
        await until(lambda: first == 1000, 300)
        assert (backend.open, whole) == (1000, 0)
        assert backend.gate is not None
        backend.gate.set()
        await until(lambda: whole == 1000, 300)
    assert backend.aborted == 0


async def test_a_slow_client_holds_up_its_own_answer_and_loses_it_in_the_end():
    backend = FakeBackend([letters_of("x", end=False) * 400_000], max_model_len=500_000, chunk_tokens=100)
    async with serving(backend, client_deadline_s=0.5) as gateway:
        (await listener_of(gateway)).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, address(gateway))
        body = {**BODY, "stream": True, "logprobs": True, "top_logprobs": 5}
        await loop.sock_sendall(slow, request_bytes(gateway, body))
        await until(lambda: backend.open == 1)
        await until(lambda: backend.aborted == 1, 60)
        assert backend.chunks < 4000, "decoding ends with the client"
        async with httpx.AsyncClient() as client:
            backend.answers = ["Yes."]
            answer = await client.post(f"{gateway.base_url}/chat/completions", json=BODY, timeout=60)
            assert answer.status_code == 200
        slow.close()


async def test_a_long_prompt_does_not_hold_up_the_others():
    backend = FakeBackend(max_model_len=1_000_000)
    async with (
        serving(backend) as gateway,
        httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client,
    ):
        text = "many words " * 20_000
        long = client.post("/chat/completions", json={**BODY, "messages": [{"role": "user", "content": text}]})
        answers = await asyncio.gather(long, client.post("/chat/completions", json=BODY))
        assert [answer.status_code for answer in answers] == [200, 200]
        assert [len(asked.prompt_ids) > 1000 for asked in backend.asked] == [False, True]
        assert backend.asked[1].prompt_ids == tokenizer().render([{"role": "user", "content": text}])


async def test_a_port_in_use_is_named():
    async with serving(FakeBackend()) as gateway:
        port = address(gateway)[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use"):
            async with serving(FakeBackend(), port=port):
                pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 65536},
        {"host": ""},
        {"max_body_bytes": 3},
        {"max_concurrent": 0},
        {"client_deadline_s": 0},
        {"session_turns": 0},
        {"session_tokens": 0},
    ],
)
def test_wrong_flags_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
        GatewayConfig(**wrong)


def test_it_is_private_unless_told_otherwise():
    assert not GatewayConfig().is_public
    assert not GatewayConfig(host="localhost").is_public
    assert not GatewayConfig(host="::1").is_public
    assert GatewayConfig(host="0.0.0.0").is_public
    assert GatewayConfig(host="example.org").is_public


@pytest.mark.parametrize(("key", "warnings"), [("", 1), ("hidden", 0)])
async def test_a_public_gateway_without_a_key_is_warned_of(key: str, warnings: int):
    warned: list[str] = []
    config = GatewayConfig(host="0.0.0.0")
    gateway = Gateway(config, FakeBackend(), tokenizer(), api_key=key, open_to_all=True, warn=warned.append)
    assert "hidden" not in repr(gateway)
    async with gateway, httpx.AsyncClient() as client:
        assert gateway.base_url.startswith("http://127.0.0.1:")
        assert (await client.get(f"{gateway.base_url.removesuffix('/v1')}/health")).status_code == 200
    assert len(warned) == warnings


async def test_it_ends_with_its_requests():
    backend = FakeBackend(gate=asyncio.Event())
    gateway = Gateway(GatewayConfig(), backend, tokenizer(), open_to_all=True)
    await gateway.start()
    session = gateway.open(sampling=Sampling(max_tokens=5))
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
        keys = [{}, {"authorization": f"Bearer {session.key}"}]
        running = [
            asyncio.ensure_future(client.post("/chat/completions", json={**BODY, "stream": stream}, headers=headers))
            for headers in keys
            for stream in (False, True)
        ]
        await until(lambda: backend.chunks == 4)
        await gateway.stop()
        answers = await asyncio.gather(*running)
        assert [answer.status_code for answer in answers] == [503, 200, 503, 200]
        assert all('"code":"closed"' in answer.text for answer in answers)
        assert backend.open == 0
        assert session.closed
        with pytest.raises(httpx.ConnectError):
            await client.get("/models")
