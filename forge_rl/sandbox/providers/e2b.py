"""Rented sandboxes of E2B behind the protocol of pools: virtual machines elsewhere, each with a Python kernel.

Written from E2B's public API descriptions and tested against a stand-in of its API, never against the service itself.
The service's answers are not trusted: they are bounded, must be JSON, and only text and images are taken from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar

from forge_rl.errors import check_flags
from forge_rl.sandbox.limits import CellError, Image, Limits, Result, SandboxError, Usage
from forge_rl.sandbox.providers.base import ProviderPool, ProviderSession, start_or_end
from forge_rl.sandbox.providers.web import HttpError, HttpRequest, WebClient, json_object
from forge_rl.sandbox.providers.wire import SandboxWireError, image_of
from forge_rl.system.variables import api_key as key_in

_KERNEL_PORT, _FILES_PORT = 49999, 49983
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?(:[0-9]{1,5})?")
_TOKEN = re.compile(r"[!-~]{1,4096}")
_START_S, _REQUEST_S, _FILE_S, _GRACE_S = 90.0, 30.0, 120.0, 5.0
_MOST_SMALL = 1 << 20
_GONE = (404, 410, 502)


@dataclass(kw_only=True, eq=False, repr=False)
class E2BPool(ProviderPool["E2BSession"]):
    """Sessions in sandboxes that are rented from E2B, with the methods of `Pool`; each costs money while it is open.

        async with E2BPool() as pool, pool.session() as session:
            print((await session.run("2 + 2")).value)

    Sessions cannot be forked or undone. Of `Limits`, time, output and transfers hold; CPUs, memory and disk are the
    template's. Without `internet`, sandboxes reach no network.

    Raises:
        ConfigError: the variable of the key is not set, or a number is too low.
    """

    UNITS: ClassVar[str] = "E2B's sandboxes"
    template: str = "code-interpreter-v1"
    """Template that runs E2B's code interpreter."""
    limits: Limits = field(default_factory=Limits)
    """Limits of sessions that are opened without limits of their own."""
    sessions: int = 20
    """How many may be open."""
    idle_s: float = 300.0
    """Seconds without use after which a sandbox ends, even if this program is gone."""
    internet: bool = False
    """Let sandboxes reach the internet."""
    api_key_env: str = "E2B_API_KEY"
    """Environment variable with the key."""
    api_url: str = "https://api.e2b.app"
    """Address of E2B's API, or of your own installation."""
    sandbox_url: str = "https://{port}-{id}.{domain}"
    """Address of a port of a sandbox, with {port}, {id} and {domain}."""

    def __post_init__(self) -> None:
        check_flags(self, "E2BPool:", minimum={"sessions": 1, "idle_s": 1})
        self._start(WebClient("E2B", most_requests=2 * self.sessions))
        self._new = {"templateID": self.template, "secure": True, "allow_internet_access": self.internet}
        self._api_url = self.api_url.rstrip("/")
        self._headers = {"x-api-key": key_in("E2BPool", self.api_key_env)}

    async def _opened(self, limits: Limits | None) -> E2BSession:
        rented = await start_or_end(self._rent(), lambda rented: self._remove(rented.name))
        return E2BSession(self, rented, limits or self.limits)

    async def _rent(self) -> RentedSandbox:
        body = {**self._new, "timeout": math.ceil(self.idle_s)}
        answer = json_object(await self.api("POST", "/sandboxes", body, limit_s=_START_S), "E2B")
        name = _name(answer)
        try:
            return _rented(name, answer)
        except SandboxError:
            with contextlib.suppress(SandboxError):
                await self._remove(name)
            raise

    async def _end(self, session: E2BSession) -> None:
        await self._remove(session.rented.name)

    async def _remove(self, name: str) -> None:
        await self.api("DELETE", f"/sandboxes/{name}")

    async def api(self, method: str, path: str, body: object = None, *, limit_s: float = _REQUEST_S) -> bytes:
        """Send a request to E2B's API.

        Raises:
            SandboxError: E2B refuses, or does not answer properly.
        """
        try:
            request = HttpRequest(method=method, url=self._api_url + path, headers=self._headers, body=body)
            return await self.client.ask(request, most_bytes=_MOST_SMALL, limit_s=limit_s)
        except HttpError as error:
            hint = {401: "check the key", 429: "open fewer sessions at a time"}.get(error.status, "")
            raise SandboxError(f"E2B refused ({error.status}): {error.text[:500]}", hint=hint) from None


@dataclass(frozen=True, kw_only=True, repr=False)
class RentedSandbox:
    """A sandbox of E2B; the headers hold its secret tokens."""

    name: str
    domain: str
    headers: dict[str, str]


def _name(answer: dict[str, object]) -> str:
    name = answer.get("sandboxID")
    # It becomes part of the addresses to which keys and tokens are sent.
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise SandboxError("E2B's answer names no sandbox")
    return name


def _rented(name: str, answer: dict[str, object]) -> RentedSandbox:
    domain = answer.get("domain") or "e2b.app"
    # As the name, it becomes part of the addresses to which the sandbox's tokens are sent.
    if not (isinstance(domain, str) and _DOMAIN.fullmatch(domain)):
        raise SandboxError("E2B's answer names a strange domain")
    headers = {}
    for header, key in (("x-access-token", "envdAccessToken"), ("e2b-traffic-access-token", "trafficAccessToken")):
        if (token := answer.get(key)) is not None:
            if not (isinstance(token, str) and _TOKEN.fullmatch(token)):
                raise SandboxError(f"E2B's {key} is not a token")
            headers[header] = token
    return RentedSandbox(name=name, domain=domain, headers=headers)


class E2BSession(ProviderSession):
    """A session in a rented sandbox; made by `E2BPool`."""

    def __init__(self, pool: E2BPool, rented: RentedSandbox, limits: Limits) -> None:
        super().__init__(pool, limits)
        self.rented = rented
        self._pool = pool
        self._until_s = time.monotonic() + pool.idle_s

    async def run(self, code: str, *, wall_s: float | None = None, cpu_s: float | None = None) -> Result:
        """Run a cell of Python and return its result. One that takes too long ends the session.

        Raises:
            SandboxError: the sandbox is gone, or a limit on CPU time is asked for, which E2B lacks.
        """
        wall_s = self.limits.wall_s if wall_s is None else wall_s
        if cpu_s is not None or self.limits.cpu_s is not None:
            raise SandboxError("E2B cannot limit a cell's CPU time", hint="limit wall_s instead of cpu_s")
        if not (0 < wall_s < math.inf):
            raise SandboxError(f"wall_s is {wall_s}", hint="give a cell a positive number of seconds")
        async with self._lock:
            await self._extend(wall_s)
            heard, began = _CellOutput(self.limits), time.perf_counter()
            request = HttpRequest(
                method="POST",
                url=f"{self._url(_KERNEL_PORT)}/execute",
                headers=self.rented.headers,
                body={"code": code, "context_id": None, "language": None, "env_vars": None},
            )
            try:
                async with (
                    asyncio.timeout(wall_s),
                    self._pool.client.stream(request, limit_s=wall_s + _GRACE_S) as chunks,
                ):
                    await heard.all(chunks)
            except TimeoutError:
                await self.close()
                heard.error = CellError(name="CellOverrun", message=f"the cell exceeded {wall_s:g} s: killed")
            except HttpError as error:
                raise await self._failed(error) from None
            except BaseException:  # a cancelled caller too, as its cell still runs
                await asyncio.shield(self.close())
                raise
            return heard.result(time.perf_counter() - began)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, relative to the user's home, which is where cells run."""
        self._check_size(path, data)
        await self._file("POST", path, data, _MOST_SMALL)

    async def get(self, path: str) -> bytes:
        """Read a file, relative to the user's home."""
        return await self._file("GET", path, None, self.limits.transfer_bytes)

    def _url(self, port: int) -> str:
        return self._pool.sandbox_url.format(port=port, id=self.rented.name, domain=self.rented.domain)

    async def _extend(self, work_s: float) -> None:
        """Let the sandbox live longer than its next work and an idle time."""
        self._check_alive()
        wanted_s = work_s + _GRACE_S + self._pool.idle_s
        # Half an idle time of slack, so that not each cell costs a request.
        if time.monotonic() + wanted_s - self._pool.idle_s / 2 > self._until_s:
            await self._pool.api("POST", f"/sandboxes/{self.rented.name}/timeout", {"timeout": math.ceil(wanted_s)})
            self._until_s = time.monotonic() + wanted_s

    async def _file(self, method: str, path: str, data: bytes | None, most_bytes: int) -> bytes:
        async with self._lock:
            await self._extend(_FILE_S)
            try:
                request = HttpRequest(
                    method=method,
                    url=f"{self._url(_FILES_PORT)}/files",
                    headers=self.rented.headers,
                    params={"path": path, "username": "user"},
                    file=data,
                )
                return await self._pool.client.ask(request, most_bytes=most_bytes, limit_s=_FILE_S)
            except HttpError as error:
                # 404 is a missing file here; 502 says that the sandbox is gone.
                if error.status == 502:
                    raise await self._failed(error) from None
                raise SandboxError(
                    f"the session could not transfer {path} ({error.status}): {error.text[:500]}"
                ) from None

    async def _failed(self, error: HttpError) -> SandboxError:
        if error.status in _GONE:
            await self.close()
        return SandboxError(f"the sandbox failed ({error.status}): {error.text[:500]}", hint="open another session")


@dataclass(eq=False)
class _CellOutput:
    """Answer of a cell so far, cut to the limits."""

    limits: Limits
    texts: dict[str, str] = field(default_factory=lambda: {"stdout": "", "stderr": ""})
    value: str | None = None
    image: Image | None = None
    error: CellError | None = None
    cut: bool = False

    async def all(self, parts: AsyncIterator[bytes]) -> None:
        """Take all lines of an answer, each a JSON object, until the last."""
        remaining_bytes = 2 * self.limits.transfer_bytes + 64 * self.limits.output_bytes + _MOST_SMALL
        buffer = bytearray()
        async for part in parts:
            remaining_bytes -= len(part)
            if remaining_bytes < 0:
                raise SandboxError("the cell's answer is too large")
            buffer += part
            *lines, tail = buffer.split(b"\n")
            buffer = tail
            for line in lines:
                if line and self._one(bytes(line)):
                    return
        raise SandboxError("the sandbox ended its answer too early")

    def _one(self, line: bytes) -> bool:
        """Take a line; True if it was the last."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise SandboxError("the sandbox answered with something else than JSON objects")
        match event.get("type"):
            case "end_of_execution":
                return True
            case "stdout" | "stderr" as stream:
                text = self.texts[stream] + str(event.get("text", ""))
                self.texts[stream] = text[: self.limits.output_bytes]
                self.cut |= len(text) > self.limits.output_bytes
            case "error":
                name, message, trace = (str(event.get(key, "")) for key in ("name", "value", "traceback"))
                max_chars = self.limits.output_bytes
                self.error = CellError(name=name[:200], message=message[:max_chars], traceback=trace[:max_chars])
            case "result":
                self._show(event)
        return False

    def _show(self, event: dict[str, object]) -> None:
        if event.get("is_main_result") is True and isinstance(event.get("text"), str):
            self.value = str(event["text"])[: self.limits.output_bytes]
        for key, media_type in (("png", "image/png"), ("jpeg", "image/jpeg")):
            data = event.get(key)
            if isinstance(data, str):
                try:
                    image = image_of(media_type, "".join(data.split()))
                except SandboxWireError as error:
                    raise SandboxError(f"the sandbox's answer is not a result: {error}") from None
                fits = len(image.data) <= self.limits.transfer_bytes
                self.image, self.cut = (image if fits else self.image), self.cut or not fits

    def result(self, wall_s: float) -> Result:
        """Return everything as a result; E2B reports no CPU time and memory."""
        return Result(
            stdout=self.texts["stdout"],
            stderr=self.texts["stderr"],
            value=self.value,
            image=self.image,
            error=self.error,
            usage=Usage(wall_s=wall_s),
            cut=self.cut,
        )
