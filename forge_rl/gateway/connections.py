"""HTTP connections: limits on headers, trailers and open connections, and deadlines for requests."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forge_rl.gateway.errors import ApiError

KEEP_ALIVE_S = 75
"""Maximum time from a response to the end of the next request's headers."""
MOST_HEAD_BYTES = 32 << 10
"""Maximum bytes of request line and headers together, and of other bytes outside of bodies, such as trailers."""
MOST_HEADERS = 100
MOST_PIPELINED = 8
"""Maximum requests that wait behind the current one on a connection."""
HEAD_DEADLINE_S = 20.0
"""Maximum time from the connection, or the first byte of a request, to the end of the headers."""
_SWEEP_S = 1.0
"""Interval of the check for connections that miss their deadline."""


class HttpProtocol(HttpToolsProtocol):
    """Reads a connection's requests, with limits on their headers.

    Args:
        open_connections: limits the number of connections, and their waits for a request.
    """

    def __init__(self, *args: Any, open_connections: OpenConnections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_connections = open_connections
        self._overhead_bytes = 0
        """Bytes received since the last body part or complete request."""
        self._reads_head = False
        self._error = ApiError(400, "this is not HTTP/1.1")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open_connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._overhead_bytes += len(data)
        # Parsed before the check, as parts of a body reset the count.
        super().data_received(data)
        # Headers that never end would be collected without limit: on_headers_complete is never called for them.
        if self._overhead_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            is_body = self.cycle is not None and self.cycle.more_body and not self._reads_head
            self._too_large(f"the {'trailers' if is_body else 'headers'} are longer than {MOST_HEAD_BYTES} bytes")
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = True
        self._open_connections.begin(self)

    def on_headers_complete(self) -> None:
        # An exception in a callback makes httptools stop parsing, and uvicorn call send_400_response.
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MOST_HEAD_BYTES:
            raise self._too_large(f"the headers are longer than {MOST_HEAD_BYTES} bytes")
        if len(self.headers) > MOST_HEADERS:
            raise self._too_large(f"there are more than {MOST_HEADERS} headers")
        if len(self.pipeline) >= MOST_PIPELINED:
            raise self._too_large(f"more than {MOST_PIPELINED} requests are pipelined on one connection")
        self._reads_head = False
        self._open_connections.serve(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._overhead_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # A pipelined request is served next, without a wait to limit.
        if not self.pipeline:
            self._open_connections.wait(self, HEAD_DEADLINE_S if self._reads_head else KEEP_ALIVE_S)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse an invalid request and close the connection, which cuts off a response in progress."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        error = self._error
        body = json.dumps(error.body(is_anthropic=False)).encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _too_large(self, message: str) -> ApiError:
        self._error = ApiError(431, message, code="request_too_large")
        return self._error


class OpenConnections:
    """Limits the number of open connections, and closes those whose next request misses its deadline.

    Above the limit, a new connection replaces the oldest one that never sent a request, or else the one idle longest
    since its last response; connections with a request in progress are never closed.

    Args:
        max_connections: maximum number of open connections.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._count = 0
        self._unused: OrderedDict[HttpProtocol, float] = OrderedDict()
        """Connections without a complete request so far, oldest first, each with its deadline."""
        self._idle: OrderedDict[HttpProtocol, float] = OrderedDict()
        """Connections between requests, in the order of their last response, each with its deadline."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_SWEEP_S, self._sweep)

    def add(self, connection: HttpProtocol) -> None:
        """Add a new connection; close another one if there are too many."""
        self._count += 1
        self._unused[connection] = self._loop.time() + HEAD_DEADLINE_S
        if self._count > self._max_connections:
            # `_unused` ends with the new connection itself, which is closed only if all others serve a request.
            waiting = self._idle if len(self._unused) == 1 and self._idle else self._unused
            waiting.popitem(last=False)[0].transport.close()

    def remove(self, connection: HttpProtocol) -> None:
        """Remove a closed connection."""
        self._count -= 1
        self.serve(connection)

    def begin(self, connection: HttpProtocol) -> None:
        """Start the deadline of a connection's request at its first byte."""
        for waiting in (self._unused, self._idle):
            if connection in waiting:
                # Never later than before: the first byte of a head must not buy a slow client more time.
                waiting[connection] = min(waiting[connection], self._loop.time() + HEAD_DEADLINE_S)

    def serve(self, connection: HttpProtocol) -> None:
        """Stop the deadline of a connection, whose request is in progress."""
        self._unused.pop(connection, None)
        self._idle.pop(connection, None)

    def wait(self, connection: HttpProtocol, deadline_s: float) -> None:
        """Give an idle connection `deadline_s` seconds for its next request."""
        self._idle[connection] = self._loop.time() + deadline_s

    def stop(self) -> None:
        """Stop the deadline checks."""
        self._timer.cancel()

    def _sweep(self) -> None:
        current_time = self._loop.time()
        for waiting in (self._unused, self._idle):
            for connection in [connection for connection, deadline in waiting.items() if deadline < current_time]:
                connection.transport.close()
        self._timer = self._loop.call_later(_SWEEP_S, self._sweep)
