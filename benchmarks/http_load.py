"""HTTP client in its own process: many concurrent streams, and polling of /health during a request."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

_HEALTH_EVERY_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Result of concurrent streams."""

    seconds: float
    """Seconds from the first request to the end of the last stream."""
    tokens: int
    """Tokens of all completions, as counted by the server."""
    complete: int
    """Number of streams that finished."""
    most_open: int
    """Maximum number of concurrently open streams."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Result of one request during which /health was polled."""

    status: int
    seconds: float
    worst_health_ms: float
    """Maximum latency of /health, in milliseconds."""


def post_watching_health(base_url: str, path: str, body: bytes, deadline_s: float) -> Watched:
    """Post a request, and poll /health every few milliseconds until it is answered.

    Args:
        base_url: URL of an OpenAI API, including /v1.
        path: path of the endpoint below it.
        body: JSON.
        deadline_s: timeout of each wait.
    """
    answered = threading.Event()
    worst_s = 0.0

    def watch(client: httpx.Client) -> None:
        nonlocal worst_s
        while not answered.is_set():
            began = time.perf_counter()
            client.get(f"{base_url.removesuffix('/v1')}/health").raise_for_status()
            worst_s = max(worst_s, time.perf_counter() - began)
            answered.wait(_HEALTH_EVERY_S)

    with (
        httpx.Client(timeout=deadline_s, trust_env=False) as poster,
        httpx.Client(timeout=deadline_s, trust_env=False) as watcher,
        ThreadPoolExecutor(1) as executor,
    ):
        # Once before the clock starts, which opens the connection.
        watcher.get(f"{base_url.removesuffix('/v1')}/health")
        watching = executor.submit(watch, watcher)
        began = time.perf_counter()
        try:
            answer = poster.post(f"{base_url}{path}", content=body, headers={"content-type": "application/json"})
            seconds = time.perf_counter() - began
        finally:
            answered.set()
        watching.result()
    return Watched(status=answer.status_code, seconds=seconds, worst_health_ms=1000 * worst_s)


def stream_all(url: str, bodies: Sequence[dict[str, object]], deadline_s: float) -> Streamed:
    """Send all requests at once, and read their streams.

    Args:
        url: URL of an endpoint of an OpenAI API.
        bodies: requests; the streaming options are added.
        deadline_s: timeout of each wait.
    """
    return asyncio.run(_stream_all(url, bodies, deadline_s))


async def _stream_all(url: str, bodies: Sequence[dict[str, object]], deadline_s: float) -> Streamed:
    tokens = complete = is_open = most_open = 0

    async def one(client: httpx.AsyncClient, body: dict[str, object]) -> None:
        nonlocal tokens, complete, is_open, most_open
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", url, json=request) as response:
            if response.status_code != 200:
                return
            begun = False
            before = b""
            try:
                async for data in response.aiter_raw():
                    if not begun:
                        begun = True
                        is_open += 1
                        most_open = max(most_open, is_open)
                    # Only the end of a stream is kept, where the usage is: parsing a thousand streams would slow the
                    # client.
                    before = (before + data)[-4096:]
            finally:
                is_open -= begun
        *_, usage, done = before.rstrip().split(b"\n\n")
        if done == b"data: [DONE]":
            tokens += json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
            complete += 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=deadline_s, trust_env=False) as client:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                group.create_task(one(client, body))
        seconds = time.perf_counter() - began
    return Streamed(seconds=seconds, tokens=tokens, complete=complete, most_open=most_open)
