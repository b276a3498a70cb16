"""HTTP: uvicorn in the caller's event loop, and responses written at the client's pace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forge_rl.errors import ConfigError
from forge_rl.gateway.connections import KEEP_ALIVE_S, HttpProtocol, OpenConnections
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.gateway_config import GatewayConfig
from forge_rl.runtime.private_network import has_way_out, listen_outside
from forge_rl.system.tasks import cancel_once

CLIENT_GONE = 499
"""Status, in the metrics, of a request whose client disconnected."""
_GRACE_S = 5
"""Seconds for connections to close at shutdown."""
_SESSIONS = 16384
"""Connections allowed for sessions, on top of `max_concurrent` for other requests."""
_OTHER_FILES = 1024
"""Open files reserved for uses other than connections."""


class HttpServer:
    """Serves an app in the running event loop, from construction until `stop`.

    Args:
        app: the ASGI app.
        config: the gateway's config.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        listeners = _listen(config)
        self._connections = OpenConnections(_allow_connections(config.max_concurrent + _SESSIONS))
        host, port = listeners[0].getsockname()[:2]
        # The wildcard addresses accept connections, but are not addresses to connect to.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        """URL of the server on this machine."""
        self._server = _UvicornServer(
            uvicorn.Config(
                app,
                http=partial(HttpProtocol, open_connections=self._connections),  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="error",  # a line per invalid request would let anybody fill the disk
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._serving = asyncio.ensure_future(self._server.serve(sockets=listeners))

    async def stop(self) -> None:
        """Stop listening, and wait for connections to close."""
        self._server.should_exit = True
        await self._serving
        self._connections.stop()


def check_address(config: GatewayConfig) -> None:
    """Check early that the server can listen.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    for listener in _listen(config):
        listener.close()


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that does not handle signals, as the program does."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _listen(config: GatewayConfig) -> list[socket.socket]:
    """Listen at the address; from inside a private network, also at the same port inside, as the first listener."""
    host, port = config.host, config.port
    listeners: list[socket.socket] = []
    try:
        if has_way_out():
            listeners.append(listen_outside(host, port))
            # The same port inside and outside, also if 0 has picked it.
            port = listeners[0].getsockname()[1]
            if config.is_public:  # the address does not exist inside
                host = "::1" if ":" in host else "127.0.0.1"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners.insert(0, socket.create_server((host, port), family=family, backlog=2048))
    except OSError as error:
        for listener in listeners:
            listener.close()
        cause = str(error.strerror or error).partition(" (while")[0]
        raise ConfigError(
            f"the gateway cannot listen on {config.host} port {config.port}: {cause}",
            hint="set another --port (0 picks a free one), or stop the program that uses it",
        ) from error
    for listener in listeners:
        # Accepted sockets inherit both. Without TCP_NODELAY, which asyncio sets only on sockets made with TCP's number,
        # a body waits 40 ms for the client to acknowledge its head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Drops a client that reads nothing for this long, and the data buffered for it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.client_deadline_s * 1000))
    return listeners


def _allow_connections(count: int) -> int:
    """Raise this process's limit on open files for `count` connections; many systems default to 1024.

    Returns:
        Number of connections that the limit allows, at most `count`.
    """
    num_files = 2 * count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        soft = max(soft, num_files if hard == resource.RLIM_INFINITY else min(num_files, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else min(count, max(soft - _OTHER_FILES, soft // 2))


def encode(body: object, *, is_long: bool = False) -> bytes:
    """Encode as compact JSON; functions in the body are replaced by their results.

    The encoder of a short body holds the GIL throughout. A long one is written piece by piece, for use in a thread.
    """
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=lambda make: make())
    text = "".join(encoder.iterencode(body)) if is_long else encoder.encode(body)
    return text.encode(errors="replace")


class ClientGoneError(Exception):
    """The client closed its connection, or read nothing for too long."""


class AsgiResponse(Response):
    """A response written by a function of ASGI's receive and send."""

    def __init__(self, write: Callable[[Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(receive, send)


class ResponseWriter:
    """Writes a response no faster than its client reads.

    Args:
        send: ASGI's send.
        deadline_s: maximum time for the client to read data already written.
    """

    def __init__(self, send: Send, deadline_s: float) -> None:
        self._send = send
        self._deadline_s = deadline_s
        self.started_s: float | None = None
        """Monotonic time of the first write; None before."""
        self.is_stream = False

    async def write_json(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Write a complete JSON response."""
        await self._write(body, True, status, {"content-type": "application/json", **(headers or {})})

    async def write_events(self, data: bytes, *, last: bool = False) -> None:
        """Write server-sent events; the first call starts the stream."""
        self.is_stream = True
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self._write(data, last, 200, headers)

    async def write_error(self, error: ApiError, is_anthropic: bool) -> None:
        """Write an error in its API's format, as the last event if a stream has started."""
        body = encode(error.body(is_anthropic))
        if self.started_s is None:
            await self.write_json(body, error.status, error.headers)
        elif self.is_stream:
            event = b"event: error\n" if is_anthropic else b""
            await self.write_events(event + b"data: " + body + b"\n\n", last=True)

    async def _write(self, data: bytes, last: bool, status: int, headers: Mapping[str, str]) -> None:
        if self.started_s is None:
            self.started_s = time.monotonic()
            raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": status, "headers": raw_headers})
        try:
            # uvicorn waits here until the client has read most of the data already written.
            async with asyncio.timeout(self._deadline_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        except TimeoutError:
            raise ClientGoneError from None


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive, running: set[asyncio.Task[None]]) -> None:
    """Run work until it is done or its client disconnects; the request's body must have been read.

    Args:
        work: coroutine, cancelled when the client disconnects.
        receive: ASGI's receive.
        running: set that holds the work's task while it runs; cancelling the task aborts the request.

    Raises:
        ClientGoneError: the client disconnected.
        ApiError: the work was cancelled.
    """

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    # A task of its own: cancelling it when a session closes leaves this coroutine to write the error response.
    task = asyncio.ensure_future(work)
    # The body has been read, so that the only message left is the disconnect.
    watch = asyncio.ensure_future(until_gone())
    running.add(task)
    # Not before its abort has ended, for which `Session.ended` waits.
    task.add_done_callback(running.discard)
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        if task.cancelled():
            raise ApiError(503, "the session or the server was closed", code="closed")
        task.result()
    finally:
        watch.cancel()
        if not task.done():
            # Closing the session may have begun the abort.
            cancel_once(task)
            # Wait for the abort, so that the request has left its engine when the connection is given up.
            await asyncio.gather(task, return_exceptions=True)
