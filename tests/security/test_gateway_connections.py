"""Attacks on the gateway's connections: heads without end, connections that never ask, requests that are ambiguous."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from forge_rl.gateway import Gateway, connections
from tests.fake_backend import FakeBackend, serving, until
from tests.security.raw_http import BODY, address, answer_to, is_healthy, request_bytes

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
CLOSE = b"connection: close\r\n\r\n"


def statuses(answers: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)]


def open_count(gateway: Gateway) -> int:
    assert gateway._http is not None
    return gateway._http._connections._count


@pytest.mark.parametrize(
    "parts",
    [
        [GET + b"x: " + b"y" * connections.MOST_HEAD_BYTES + b"\r\n" + CLOSE],
        [b"GET /" + b"y" * connections.MOST_HEAD_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n" + CLOSE],
        [b"GET /health?" + b"y" * connections.MOST_HEAD_BYTES + b" HTTP/1.1\r\nhost: localhost\r\n" + CLOSE],
        [GET + b"".join(b"x-%d: y\r\n" % at for at in range(connections.MOST_HEADERS)) + CLOSE],
        [GET, *([b"x: " + b"y" * 1000 + b"\r\n"] * 40)],
        [GET + b"x: ", *([b"y" * 1000] * 40)],
        [GET, b"y" * 40_000],
        [b"\r\n" * 20_000],
        [b"y" * 40_000],
    ],
    ids=["value", "path", "query", "count", "endless", "endless value", "endless name", "blank lines", "method"],
)
async def test_a_head_without_end_is_refused(parts: list[bytes]):
    async with serving(FakeBackend()) as gateway:
        found = await answer_to(gateway, *parts)
        assert statuses(found) in ([431], [400], []), found
        assert b"200" not in found
        if parts[0].startswith(GET) and found:
            assert statuses(found) == [431]
            assert b"headers" in found
        await until(lambda: open_count(gateway) == 0)
        assert await is_healthy(gateway)


async def test_a_usual_head_is_taken_whole_and_byte_by_byte():
    head = GET + b"x: " + b"y" * 20_000 + b"\r\n" + b"".join(b"x-%d: y\r\n" % at for at in range(90)) + CLOSE
    async with serving(FakeBackend()) as gateway:
        assert statuses(await answer_to(gateway, head)) == [200]
        slowly = [(GET + CLOSE)[at : at + 1] for at in range(len(GET + CLOSE))]
        assert statuses(await answer_to(gateway, *slowly)) == [200]


@pytest.mark.parametrize("after", [b"0\r\nx: ", b"5;", b"0\r\nx: y\r\n"], ids=["trailer", "extension", "trailers"])
async def test_what_brings_a_chunked_body_no_further_has_an_end(after: bytes):
    backend = FakeBackend()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    endless = b"x: y\r\n" * 200 if after.endswith(b"\n") else b"y" * 1000
    async with serving(backend) as gateway:
        assert await answer_to(gateway, head + b"transfer-encoding: chunked\r\n\r\n" + after, *[endless] * 80) == b""
        await until(lambda: open_count(gateway) == 0)
        assert "completions in flight 0" in repr(gateway)
        assert await is_healthy(gateway)
    assert len(backend.asked) == 1


async def test_an_endless_chunked_body_is_refused_while_it_is_read():
    backend = FakeBackend()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with serving(backend, max_body_bytes=4096) as gateway:
        reader, writer = await asyncio.open_connection(*address(gateway))
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n")
        for _ in range(20):
            writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 30)
        assert "completions in flight 0" in repr(gateway)
        writer.close()
    assert not backend.asked


@pytest.mark.parametrize("sent", [b"", b"GET", GET, b"\r\n"])
async def test_a_connection_that_does_not_ask_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_DEADLINE_S", 0.05)
    monkeypatch.setattr(connections, "_SWEEP_S", 0.05)

    async with serving(FakeBackend()) as gateway:
        assert await answer_to(gateway, sent) == b""
        await until(lambda: open_count(gateway) == 0)
        assert await is_healthy(gateway)


async def test_a_head_that_comes_a_byte_at_a_time_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_DEADLINE_S", 0.3)
    monkeypatch.setattr(connections, "_SWEEP_S", 0.05)

    async with serving(FakeBackend()) as gateway:
        for before in (b"", GET + b"\r\n"):  # on a new connection, and on one that was used
            reader, writer = await asyncio.open_connection(*address(gateway))
            writer.write(before)
            sent = 0
            while open_count(gateway) or not sent:
                writer.write(b"GET /health HTTP/1.1\r\n" if not sent else b"x")
                sent += 1
                await asyncio.sleep(0.01)
                assert sent < 3000
            with contextlib.suppress(ConnectionResetError):  # by bytes that came after the close
                assert statuses(await reader.read(-1)) == [200] * bool(before)
            writer.close()


async def test_an_idle_used_connection_is_closed_and_a_busy_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr(connections, "HEAD_DEADLINE_S", 0.1)
    monkeypatch.setattr(connections, "_SWEEP_S", 0.05)

    backend = FakeBackend(gate=asyncio.Event())
    async with serving(backend) as gateway:
        reader, writer = await asyncio.open_connection(*address(gateway))
        writer.write(request_bytes())
        await until(lambda: backend.open == 1)
        assert statuses(await answer_to(gateway, GET + b"\r\n")) == [200]
        await asyncio.sleep(0.3)
        assert backend.gate is not None
        backend.gate.set()
        assert statuses(await asyncio.wait_for(reader.read(-1), 30)) == [200]
        writer.close()


async def test_half_open_connections_make_room_for_a_client_that_asks(monkeypatch: pytest.MonkeyPatch):
    backend = FakeBackend(gate=asyncio.Event())
    async with serving(backend) as gateway:
        assert gateway._http is not None
        monkeypatch.setattr(gateway._http._connections, "_max_connections", 50)
        served, writer = await asyncio.open_connection(*address(gateway))
        writer.write(request_bytes())
        await until(lambda: backend.open == 1)
        half_open = [await asyncio.open_connection(*address(gateway)) for _ in range(300)]
        for _, other in half_open:
            other.write(b"GET / HT")
        await until(lambda: open_count(gateway) <= 50)
        assert backend.gate is not None
        backend.gate.set()
        assert await is_healthy(gateway)
        assert b" 200 " in await asyncio.wait_for(served.readline(), 30), "what is answered is not cut"
        assert open_count(gateway) <= 50
        for _, other in [*half_open, (served, writer)]:
            other.close()


async def test_idle_connections_make_room_where_none_is_half_open(monkeypatch: pytest.MonkeyPatch):
    async with serving(FakeBackend()) as gateway:
        assert gateway._http is not None
        monkeypatch.setattr(gateway._http._connections, "_max_connections", 10)
        idle = []
        for _ in range(30):
            reader, writer = await asyncio.open_connection(*address(gateway))
            writer.write(GET + b"\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 30)
            idle.append(writer)
        await until(lambda: open_count(gateway) <= 10)
        assert await is_healthy(gateway)
        for writer in idle:
            writer.close()


async def test_pipelined_requests_are_answered_in_order_within_a_bound():
    async with serving(FakeBackend()) as gateway:
        few = GET + b"\r\n" + request_bytes() + GET + CLOSE
        found = await answer_to(gateway, few)
        assert statuses(found) == [200] * 3
        assert found.index(b"chat.completion") < found.rindex(b"HTTP/1.1")
        many = await answer_to(gateway, (GET + b"\r\n") * 5000)
        assert len(statuses(many)) < 20
        await until(lambda: open_count(gateway) == 0)
        assert await is_healthy(gateway)


@pytest.mark.parametrize(
    "headers",
    [
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: xchunked\r\n",
        "content-length: -1\r\n",
        "content-length: 5, 5\r\n",
        "content-length: 0x5\r\n",
        "content-length: 99999999999999999999\r\n",
        "content-length : 5\r\n",
        "x y: 5\r\n",
        " folded: 5\r\n",
        "x: \0\r\n",
    ],
)
async def test_a_request_whose_end_could_be_read_in_two_ways_is_refused(headers: str):
    backend = FakeBackend()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    smuggled = b"5\r\nGET /\r\n0\r\n\r\n" + request_bytes(body={**BODY, "user": "smuggled"})
    async with serving(backend) as gateway:
        found = await answer_to(gateway, f"{head}{headers}\r\n".encode() + smuggled)
        assert statuses(found) in ([400], [])
        assert not backend.asked
        assert await is_healthy(gateway)
