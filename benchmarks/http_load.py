"""A client in a process of its own: many streamed answers at a time over HTTP, counted as cheaply as can be."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """Outcome of some streams."""

    seconds: float
    """From the first request to the end of the last stream."""
    tokens: int
    """Tokens of all completions, as the server counts them."""
    complete: int
    """Streams that came to their end."""
    most_open: int
    """Most streams that had begun to answer, and had not ended, at a time."""


def stream_all(url: str, bodies: Sequence[dict[str, object]], deadline_s: float) -> Streamed:
    """Ask for all answers at the same time, and read their streams.

    Args:
        url: of an endpoint of OpenAI's API.
        bodies: requests; streaming, and its counts, are added.
        deadline_s: for each wait.
    """
    return asyncio.run(_stream_all(url, bodies, deadline_s))


async def _stream_all(url: str, bodies: Sequence[dict[str, object]], deadline_s: float) -> Streamed:
    tokens = complete = is_open = most_open = 0

    async def one(client: httpx.AsyncClient, body: dict[str, object]) -> None:
        nonlocal tokens, complete, is_open, most_open
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", url, json=asked) as response:
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
