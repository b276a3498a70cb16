"""HTTP bodies and responses: bodies are bounded while they are read, responses end when their client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forge_rl.gateway.errors import ApiError

CLIENT_GONE = 499
"""Status in the metrics of a request whose client did not wait."""


class ClientGone(Exception):
    """The client closed its connection, or took nothing for too long."""


class AsgiResponse(Response):
    """An ASGI response that a function writes.

    Args:
        write: called with ASGI's receive and send.
    """

    def __init__(self, write: Callable[[Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(receive, send)


class ResponseWriter:
    """Writes a response no faster than its client reads.

    Args:
        send: ASGI's send.
        deadline_s: longest time for the client to read what was written before.
        clock: monotonic seconds.
    """

    def __init__(self, send: Send, deadline_s: float, clock: Callable[[], float]) -> None:
        self._send = send
        self._deadline_s = deadline_s
        self._clock = clock
        self.started_s: float | None = None
        """Time at which the first bytes were written."""
        self.is_stream = False

    async def write_json(self, body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Write a whole JSON response."""
        await self._start(status, "application/json", headers)
        await self._put(encode(body), more=False)

    async def write_event(self, data: bytes) -> None:
        """Write server-sent events; the first ones start the stream."""
        if self.started_s is None:
            self.is_stream = True
            await self._start(200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"})
        await self._put(data, more=True)

    async def end_stream(self) -> None:
        """End the stream."""
        await self._put(b"", more=False)

    async def _start(self, status: int, kind: str, headers: Mapping[str, str] | None) -> None:
        self.started_s = self._clock()
        listed = [(name.encode(), value.encode()) for name, value in {"content-type": kind, **(headers or {})}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})

    async def _put(self, data: bytes, *, more: bool) -> None:
        try:
            # uvicorn waits here while the client has not taken most of what was written before.
            async with asyncio.timeout(self._deadline_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone from None


async def read_body(request: Request, most_bytes: int, deadline_s: float) -> bytes:
    """Read the body of a request, never more of it than is allowed.

    Raises:
        ApiError: it is too long, too slow, or no JSON by its header.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page in somebody's browser cannot send this type here without being allowed to.
        raise ApiError(415, f"the content type is {kind or 'missing'}; send application/json")
    too_long = ApiError(413, f"the body is longer than {most_bytes} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for part in request.stream():
                body += part
                if len(body) > most_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {deadline_s:g} s") from None
    return bytes(body)


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive, running: set[asyncio.Task[None]]) -> None:
    """Run work until its client disconnects; the request's body was read before.

    Args:
        work: cancelled when the client goes.
        receive: ASGI's receive.
        running: holds the work's task meanwhile; cancelling it there ends the request.

    Raises:
        ClientGone: the client went.
        ApiError: the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_gone(receive))
    running.add(task)
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        if task.cancelled():
            raise ApiError(503, "the session or the server was closed", code="closed")
        task.result()
    finally:
        watch.cancel()
        running.discard(task)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def write_error(error: ApiError, is_anthropic: bool, writer: ResponseWriter) -> None:
    """Write an error in its API's shape; in the middle of a stream it is the last event."""
    body = error.anthropic() if is_anthropic else error.openai()
    if writer.started_s is None:
        await writer.write_json(body, status=error.status, headers=error.headers)
        return
    if writer.is_stream:
        await writer.write_event((b"event: error\n" if is_anthropic else b"") + b"data: " + encode(body) + b"\n\n")
        await writer.end_stream()


def encode(body: object) -> bytes:
    """Encode as compact JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
