"""Attacks on the gateway's guard: other sites' pages, wrong keys, odd methods and paths; and the guard by itself."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from forge_rl.errors import ConfigError
from forge_rl.gateway import GatewayConfig, keys
from forge_rl.gateway.guard import Guard, InFlightLimit
from forge_rl.gateway.keys import KeyRing
from forge_rl.types import Sampling
from tests.fake_backend import FakeBackend, serving
from tests.security.raw_http import BODY, JSON, answer_to, request_bytes

KEY = {"authorization": "Bearer right"}


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Another server's app: shows what reached it."""
    request = Request(scope, receive)
    body = (await request.body()).decode()
    shown = {"path": scope["path"], "body": body, "caller": request.state.caller if body else None}
    await JSONResponse(shown)(scope, receive, send)


def client_of(config: GatewayConfig | None = None, key: str = "right") -> httpx.AsyncClient:
    """A client of that app behind a guard."""
    config = config or GatewayConfig(port=8000)
    guard = Guard(app, config, caller=KeyRing(key, open_to_all=not key).caller, in_flight=InFlightLimit(2))
    return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://localhost:8000")


@pytest.mark.parametrize(
    ("settings", "host", "served"),
    [
        ({}, "localhost", True),
        ({}, "localhost:8000", True),
        ({}, "LOCALHOST:8000", True),
        ({}, "localhost.", True),
        ({}, "localhost.:8000", True),
        ({}, "127.0.0.1:8000", True),
        ({}, "127.1.2.3", True),
        ({}, "[::1]:8000", True),
        ({}, "attacker.example", False),
        ({}, "attacker.example:8000", False),
        ({}, "localhost.attacker.example", False),
        ({}, "127.0.0.1.attacker.example", False),
        ({}, "notlocalhost", False),
        ({}, "10.0.0.5", False),
        ({}, "0.0.0.0:8000", False),
        ({}, "[fe80::1]", False),
        ({}, "2130706433", False),
        ({}, "", False),
        ({}, "localhost:", False),
        ({}, "localhost:8000:1", False),
        ({}, "localhost@attacker.example", False),
        ({}, "localhost/", False),
        ({}, "localhost, attacker.example", False),
        ({}, "[::1", False),
        ({"host": "10.0.0.5"}, "10.0.0.5:8000", True),
        ({"host": "10.0.0.5"}, "10.0.0.6", False),
        ({"host": "0.0.0.0"}, "10.0.0.6", True),
        ({"host": "0.0.0.0"}, "attacker.example", False),
        ({"host": "::"}, "[fe80::1]:8000", True),
        ({"host": "gateway.example"}, "Gateway.Example", True),
        ({"allowed_hosts": ("gateway.example",)}, "gateway.example:80", True),
        ({"allowed_hosts": ("gateway.example",)}, "other.example", False),
        ({"allowed_hosts": ("*",)}, "attacker.example", True),
    ],
)
async def test_only_names_of_this_server_are_served(settings: dict[str, Any], host: str, served: bool):
    async with client_of(GatewayConfig(**settings)) as client:
        for path in ("/v1/models", "/health"):
            answer = await client.get(path, headers={**KEY, "host": host})
            assert answer.status_code == (200 if served else 403)
            assert served or answer.json()["error"]["code"] == "host_not_allowed"


async def test_two_hosts_and_none_are_refused_on_the_wire():
    async with serving(FakeBackend()) as gateway:
        for hosts in ("host: localhost\r\nhost: attacker.example\r\n", "host: attacker.example\r\n", ""):
            for version in ("1.0", "1.1"):
                head = f"GET http://localhost/v1/models HTTP/{version}\r\n{hosts}connection: close\r\n\r\n"
                found = await answer_to(gateway, head.encode())
                assert found.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), found
                assert b"fake" not in found


@pytest.mark.parametrize("key", ["right", ""])
@pytest.mark.parametrize(
    ("allowed", "origin", "served"),
    [
        ((), "https://attacker.example", False),
        ((), "http://localhost:3000", False),
        ((), "null", False),
        ((), "", False),
        ((), "http://localhost:8000", True),  # the server's own pages
        ((), "http://localhost:8000.attacker.example", False),
        (("https://chat.example",), "https://chat.example", True),
        (("https://chat.example",), "http://chat.example", False),
        (("https://chat.example",), "https://chat.example.attacker.example", False),
        (("*",), "https://any.example", True),
    ],
)
async def test_pages_of_other_origins_may_not_ask(key: str, allowed: tuple[str, ...], origin: str, served: bool):
    async with client_of(GatewayConfig(allowed_origins=allowed), key) as client:
        for path in ("/v1/models", "/health"):
            answer = await client.get(path, headers={**KEY, "origin": origin})
            assert answer.status_code == (200 if served else 403)
            shared = answer.headers.get("access-control-allow-origin")
            assert shared == ({"*": "*"}.get(*allowed, origin) if served and allowed else None)
        # A browser asks first, without a key, whether a page may send one.
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization,content-type"
        before = await client.options("/v1/chat/completions", headers=asked)
        assert (before.status_code == 200) == (served and (bool(allowed) or not key))


def test_wrong_hosts_and_origins_in_the_settings_are_named():
    for wrong in ({"allowed_hosts": ("http://a",)}, {"allowed_hosts": ("a:80",)}, {"allowed_origins": ("a",)}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).replace("_", "-")):
            GatewayConfig(**wrong)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions?api_key=right", "/v1/models?key=right", "/right", "/v1/../v1/x"]
)
@pytest.mark.parametrize(
    "method", ["GET", "HEAD", "OPTIONS", "TRACE", "POST", "PUT", "DELETE", "PATCH", "CONNECT", "X"]
)
async def test_no_method_or_path_goes_without_a_key(method: str, path: str):
    async with client_of() as client:
        for headers in ({}, {"cookie": "key=right"}, {"authorization": "Basic right"}, {"api-key": "right"}):
            answer = await client.request(method, path, headers={**headers, **JSON})
            assert answer.status_code == 401
            assert "right" not in answer.text.replace("right?", "")


async def test_odd_methods_and_paths_are_refused_by_the_gateway():
    async with serving(FakeBackend()) as gateway:
        for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/v1/models/%00"):
            found = await answer_to(gateway, f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{CLOSE}".encode())
            assert b" 404 " in found.splitlines()[0]
            assert b"root:" not in found
        for line in ("TRACE /v1/models", "OPTIONS /v1/models", "CONNECT localhost:80", "FOO /", "PRI *", "GET *"):
            found = await answer_to(gateway, f"{line} HTTP/1.1\r\nhost: localhost\r\n{CLOSE}".encode())
            assert found.splitlines()[0].split()[1] in (b"400", b"404", b"405", b"415"), found
        head = await answer_to(gateway, f"HEAD /health HTTP/1.1\r\nhost: localhost\r\n{CLOSE}".encode())
        assert head.startswith(b"HTTP/1.1 200 ")
        assert head.endswith(b"\r\n\r\n")
        upgrade = "connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        found = await answer_to(gateway, f"GET /v1/x HTTP/1.1\r\nhost: localhost\r\n{upgrade}\r\n".encode(), b"x")
        assert b" 101 " not in found


CLOSE = "connection: close\r\n\r\n"


async def test_keys_are_compared_by_their_digests_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[bytes, bytes]] = []
    own = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return own(one, other)

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)

    async with client_of() as client:
        for key in ("", "r", "righ", "right", "right" * 1000):
            answer = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == (200 if key == "right" else 401)
    assert [len(each) for pair in compared for each in pair] == [32] * 10
    assert b"right" not in b"".join(each for pair in compared for each in pair)


async def test_an_app_behind_the_guard_sees_whole_bodies_of_those_who_may_ask():
    config = GatewayConfig(max_body_bytes=1024)
    async with client_of(config) as client:
        for headers, content, status in (
            ({**KEY, **JSON}, b"{}", 200),
            ({**KEY, "content-type": "application/json; charset=utf-8"}, b"{}", 200),
            (KEY, b"", 200),
            (JSON, b"{}", 401),
            (KEY, b"{}", 415),
            ({**KEY, "content-type": "text/plain"}, b"{}", 415),
            ({**KEY, **JSON}, b"x" * 1025, 413),
        ):
            for path in ("/v1/other", "/v1/messages/x"):
                answer = await client.post(path, headers=headers, content=content)
                assert answer.status_code == status
                if status == 200:
                    assert answer.json() == {"path": path, "body": content.decode(), "caller": None}
                else:
                    assert ("type" in answer.json()) == path.startswith("/v1/messages"), "the API's own shape"


async def test_no_more_reaches_an_app_than_may_be_in_flight():
    gate, inside = asyncio.Event(), 0

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal inside
        inside += 1
        await gate.wait()
        await app(scope, receive, send)

    counts = InFlightLimit(2)
    guard = Guard(slow, GatewayConfig(), caller=KeyRing("right").caller, in_flight=counts)
    transport = httpx.ASGITransport(guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY) as client:
        asking = [asyncio.ensure_future(client.get("/v1/models")) for _ in range(5)]
        while inside < 2 or counts.total() < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        gate.set()
        assert sorted(answer.status_code for answer in await asyncio.gather(*asking)) == [200] * 2 + [429] * 3
        assert counts.total() == 0


async def test_websockets_are_closed():
    guard = Guard(app, GatewayConfig(), caller=KeyRing("right").caller, in_flight=InFlightLimit(2))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await guard({"type": "websocket", "path": "/", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_a_session_learns_what_its_agent_was_refused():
    async with serving(FakeBackend(), open_to_all=False, max_body_bytes=1024) as gateway:
        session = gateway.open(sampling=Sampling(max_tokens=5))
        long = {**BODY, "user": "x" * 2000}
        headers = f"authorization: Bearer {session.key}\r\n{CLOSE[:-2]}"
        assert b" 413 " in await answer_to(gateway, request_bytes(body=long, headers=headers))
        assert session.refusal is not None
        assert session.refusal.status == 413
