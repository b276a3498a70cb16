"""HTTP as bytes: what no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx

from forge_rl.gateway import Gateway

BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}


def address(gateway: Gateway) -> tuple[str, int]:
    url = httpx.URL(gateway.base_url)
    assert url.port is not None
    return url.host, url.port


def request_bytes(path: str = "/v1/chat/completions", body: Any = BODY, *, headers: str = "") -> bytes:
    """A request as it is sent; headers end with a line break each."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def answer_to(gateway: Gateway, *parts: bytes, deadline_s: float = 30.0) -> bytes:
    """Send bytes on a connection of their own, part after part, and return all that comes until it is closed."""
    reader, writer = await asyncio.open_connection(*address(gateway))
    found = b""

    async def read() -> None:
        nonlocal found
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                found += data

    try:
        async with asyncio.timeout(deadline_s):
            reading = asyncio.ensure_future(read())
            for part in parts:
                if reading.done():
                    break
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            await reading
    except ConnectionError:  # it was reset while it was written to or read from
        pass
    finally:
        writer.close()
    return found


async def is_healthy(gateway: Gateway) -> bool:
    """Return whether a client gets its completion."""
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=30, trust_env=False) as client:
        answer = await client.post("/chat/completions", json=BODY)
        return answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] != ""
