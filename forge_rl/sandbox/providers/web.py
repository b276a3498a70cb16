"""Requests to a server of sandboxes over HTTP: with a deadline, and answers of bounded size that are not trusted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from forge_rl.sandbox.limits import SandboxError

_CONNECT_S = 20.0
_MOST_ERROR = 4096


class LargeAnswerError(SandboxError):
    """An answer with more bytes than its request allows."""


@dataclass(eq=False)
class HttpError(Exception):
    """An answer with an error's status."""

    status: int
    text: str
    """The start of its body."""


@dataclass(frozen=True, kw_only=True, repr=False)
class HttpRequest:
    """A request; its headers may hold a secret."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: object = None
    """Sent as JSON, unless it is None."""
    params: Mapping[str, str] | None = None
    file: bytes | None = None
    """Sent as the only file of a form, instead of a body."""
    content: bytes | None = None
    """Raw bytes to send, instead of a body."""


class WebClient:
    """Sends requests to one service; `close` ends it. Redirects are errors, and headers appear in no message.

    Args:
        service: name of the service for errors.
        most_requests: connections at a time.
        transport: instead of TCP.
        uses_proxies: use the proxies that the environment names, as HTTPS_PROXY.
    """

    def __init__(
        self,
        service: str,
        *,
        most_requests: int,
        transport: httpx.AsyncBaseTransport | None = None,
        uses_proxies: bool = True,
    ) -> None:
        self.service = service
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=most_requests, max_keepalive_connections=most_requests),
            # A redirect would carry keys in headers to an address that nobody named.
            follow_redirects=False,
            transport=transport,
            trust_env=uses_proxies,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, request: HttpRequest, *, most_bytes: int, limit_s: float) -> bytes:
        """Send a request and return the body of its answer.

        Args:
            most_bytes: longest answer.
            limit_s: time for the whole request.

        Raises:
            HttpError: the answer has the status of an error.
            LargeAnswerError: the answer is too large.
            SandboxError: it is incomplete at the deadline, or there is none.
        """
        parts = bytearray()
        async with self.stream(request, limit_s=limit_s) as chunks:
            async for part in chunks:
                parts += part
                if len(parts) > most_bytes:
                    raise LargeAnswerError(f"{self.service} answered with more than {most_bytes} bytes")
        return bytes(parts)

    @asynccontextmanager
    async def stream(self, request: HttpRequest, *, limit_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request; the parts of its answer's body arrive inside the context. See `ask`."""
        timeout = httpx.Timeout(limit_s, connect=min(limit_s, _CONNECT_S))
        try:
            async with (
                asyncio.timeout(limit_s),
                self._client.stream(
                    request.method,
                    request.url,
                    # Answers are bounded and read as they are sent, and so must not be compressed.
                    headers={"accept-encoding": "identity", **request.headers},
                    json=request.body,
                    content=request.content,
                    params=request.params,
                    files=None if request.file is None else {"file": ("file", request.file)},
                    timeout=timeout,
                ) as response,
            ):
                if not response.is_success:
                    raise HttpError(response.status_code, await _start_of(response))
                yield response.aiter_raw(1 << 16)
        except (TimeoutError, httpx.TimeoutException):
            raise SandboxError(f"{self.service} did not answer within {limit_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            cause = str(error)[:200] or type(error).__name__
            raise SandboxError(f"{self.service} cannot be reached: {cause}") from None


async def _start_of(response: httpx.Response) -> str:
    parts = bytearray()
    async for part in response.aiter_raw(_MOST_ERROR):
        parts += part
        if len(parts) >= _MOST_ERROR:
            break
    return bytes(parts[:_MOST_ERROR]).decode("utf-8", "replace")


def json_object(data: bytes, service: str) -> dict[str, object]:
    """Return the JSON object that a service has answered.

    Raises:
        SandboxError: it is not one.
    """
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise SandboxError(f"{service} answered with something else than a JSON object")
    return answer
