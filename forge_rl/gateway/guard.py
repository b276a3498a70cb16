"""The gateway's guard: ASGI middleware that passes complete, authorized requests to an app."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.gateway_config import GatewayConfig

_OPEN_PATHS = frozenset({"/health", "/metrics"})
_JSON = frozenset({"application/json"})
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
_BODIES_AT_ONCE = 32
"""Maximum bytes of incomplete bodies, in bodies of maximum length; more bytes are refused with status 503."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")


class InFlightLimit:
    """Counts each caller's completions in flight, and enforces a limit.

    Args:
        limit: maximum in flight for one caller.
        unit: name of the counted thing, for errors.
    """

    def __init__(self, limit: int, unit: str = "completions") -> None:
        self._limit = limit
        self._unit = unit
        self._counts: Counter[Hashable] = Counter()

    def total(self) -> int:
        """Number in flight of all callers together."""
        return self._counts.total()

    @contextlib.contextmanager
    def admit(self, count: int, caller: Hashable) -> Iterator[None]:
        """Add `count` to a caller's completions in flight inside the context.

        Raises:
            ApiError: the caller would exceed the limit.
        """
        if self._counts[caller] + count > self._limit:
            raise ApiError(
                429,
                f"{self._counts[caller]} of at most {self._limit} {self._unit} are in flight; try again",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        self._counts[caller] += count
        try:
            yield
        finally:
            self._counts[caller] -= count
            # Sessions come and go; a count of zero would keep each of them in memory.
            if not self._counts[caller]:
                del self._counts[caller]


class Guard:
    """Refuses requests from other sites' pages, with wrong keys, or with bodies that are too long, slow or not JSON.

    Accepted requests reach the app with their whole body in one message and the caller in scope["state"]["caller"].
    Others are answered here, in the format of the API: wrong host, which blocks DNS rebinding (403); other origin
    (403); wrong key (401); too many requests (429); the body's type (415), length (413) and time (408). /health and
    /metrics need no key. WebSockets are closed.

        app = Guard(other_app, GatewayConfig(), caller=KeyRing("secret").caller, in_flight=InFlightLimit(256))

    Args:
        app: serves accepted requests.
        config: limits, and allowed hosts and origins.
        caller: returns the caller, None for the owner; raises ApiError for a missing or wrong key.
        in_flight: counts each caller's requests.
        refused: called with the path, the caller if known, and the error of each refused request.
        open_paths: paths that need no key.
        content_types: types of bodies, none of which a web page can send to another origin without CORS.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        *,
        caller: Callable[[Headers], Hashable],
        in_flight: InFlightLimit,
        refused: Callable[[str, Hashable, ApiError], None] = lambda path, caller, error: None,
        open_paths: frozenset[str] = _OPEN_PATHS,
        content_types: frozenset[str] = _JSON,
    ) -> None:
        self._app = app
        self._config = config
        self._caller = caller
        self._in_flight = in_flight
        self._refused = refused
        self._open_paths = open_paths
        self._content_types = content_types
        self._any_address = config.host in ("0.0.0.0", "::")
        self._hosts = {"localhost", config.host.lower(), *(name.lower() for name in config.allowed_hosts)}
        """Names of this server; every address of a server that listens on all addresses is another one."""
        if self._any_address:
            self._hosts.add(socket.gethostname().lower())
        self._origins = frozenset(config.allowed_origins)
        self._arriving_bytes = 0
        """Bytes of bodies that are still being received."""
        self._admitting: ASGIApp = self._admit
        if self._origins:
            self._admitting = CORSMiddleware(
                self._admit, config.allowed_origins, allow_methods=("GET", "POST"), allow_headers=("*",)
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # 1008 is a violation of the server's policy.
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            self._check_site(Headers(scope=scope))
        except ApiError as error:
            await self._refuse(error, None, scope, receive, send)
            return
        await self._admitting(scope, receive, send)

    def _check_site(self, headers: Headers) -> None:
        """Check the headers by which a browser shows that another site sent the request.

        Raises:
            ApiError: the host or the page's origin is not allowed.
        """
        # Two Host headers join to a text that names no server, and are refused.
        host = ",".join(headers.getlist("host")).lower()
        if not self._serves(host):
            raise ApiError(
                403,
                f"the host {host[:100]!r} is not served here; the server's owner may add it to allowed-hosts",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        # Browsers send an Origin with requests of other sites' pages; here it is missing, or is this host and port.
        if origin is None or origin.lower().partition("://")[2] == host:
            return
        if "*" not in self._origins and origin not in self._origins:
            raise ApiError(
                403,
                f"pages of {origin[:100]!r} are not allowed; the server's owner may add it to allowed-origins",
                code="origin_not_allowed",
            )

    def _serves(self, host: str) -> bool:
        """Return whether a Host header, in lower case, names this server, at any port, as it may be forwarded.

        Starlette's TrustedHostMiddleware knows no addresses, of which any may be this server's: DNS rebinding needs a
        name.
        """
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".")
        if name in self._hosts or "*" in self._hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or self._any_address
        except ValueError:
            return False

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._open_paths and scope["method"] in _WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller: Hashable = None
        with contextlib.ExitStack() as stack:
            try:
                # The key is checked before the body is read: a stranger cannot make this process hold one.
                caller = self._caller(headers)
                # In flight until the app has answered, to the end of a stream.
                stack.enter_context(self._in_flight.admit(1, caller))
                if scope["method"] not in _WITHOUT_BODY:
                    receive = _replay(await self._read_body(headers, receive), receive)
            except ApiError as error:
                await self._refuse(error, caller, scope, receive, send)
                return
            # Nobody is left to answer.
            except _IncompleteRequestError:
                return
            state = {**scope.get("state", {}), "caller": caller}
            await self._app({**scope, "state": state}, receive, send)

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        """Read the body of a request, up to the maximum length.

        Raises:
            ApiError: the body is too long, too slow, or not JSON by its header.
            _IncompleteRequestError: the client disconnected before the end of the body.
        """
        max_bytes, deadline_s = self._config.max_body_bytes, self._config.client_deadline_s
        length = headers.get("content-length", "0")
        # Without parameters such as the charset.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in self._content_types and (length != "0" or "transfer-encoding" in headers):
            # A web page cannot send these to another origin without CORS.
            raise ApiError(
                415, f"the content type is {kind[:100] or 'missing'}; send {' or '.join(sorted(self._content_types))}"
            )
        too_long = ApiError(
            413, f"the body is longer than {max_bytes} bytes (max-body-bytes)", code="request_too_large"
        )
        # Refused before a byte of it arrives. A chunked body announces no length, and is counted below.
        if length.isdecimal() and int(length) > max_bytes:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(deadline_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise _IncompleteRequestError
                    part, more = message.get("body", b""), message.get("more_body", False)
                    body += part
                    self._arriving_bytes += len(part)
                    if len(body) > max_bytes:
                        raise too_long
                    # Of all clients together: many slow uploads must not fill the memory.
                    if self._arriving_bytes > _BODIES_AT_ONCE * max_bytes:
                        raise ApiError(503, "too many request bodies at once; try again", headers={"retry-after": "1"})
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {deadline_s:g} s (client-deadline-s)") from None
        finally:
            self._arriving_bytes -= len(body)
        return bytes(body)

    async def _refuse(self, error: ApiError, caller: Hashable, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused(scope["path"], caller, error)
        await error.response(scope["path"])(scope, receive, send)


class _IncompleteRequestError(Exception):
    """The client closed its connection before its request was complete."""


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI receive that first returns a whole body, and keeps it only until then."""
    body_message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replayed() -> Message:
        nonlocal body_message
        message, body_message = body_message, None
        return message if message is not None else await receive()

    # The closure then holds the only reference, and drops it with the first message.
    del body
    return replayed
