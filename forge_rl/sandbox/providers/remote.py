"""A pool of sandboxes on another machine or in another program: the client of `python -m apps.sandbox`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from urllib.parse import urlsplit

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import Limits, Result, SandboxError
from forge_rl.sandbox.providers.web import HttpError, HttpRequest, WebClient, json_object
from forge_rl.sandbox.providers.wire import MAX_WAIT_S, SandboxWireError, limits_from_json, result_from_json, unpacked
from forge_rl.system.variables import api_key as key_in

_REQUEST_S, _START_S, _RENEW_S, _GRACE_S = 60.0, 120.0, 20.0, 60.0
_MOST_SMALL = 1 << 20
_MOST_REQUESTS = 256


class RemotePool:
    """Sessions on a server of `python -m apps.sandbox`, with the methods of `Pool`.

        async with RemotePool("http://127.0.0.1:8100") as pool, pool.session() as session:
            print((await session.run("2 + 2")).value)

    Args:
        url: address of the server; plain HTTP shows keys and code to the network.
        api_key_env: environment variable with the server's key.

    Raises:
        ConfigError: the URL is not one, or the variable is not set.
    """

    def __init__(self, url: str, *, api_key_env: str = "FORGE_RL_API_KEY") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ConfigError("RemotePool's url is not one", hint="give it as http://HOST:PORT")
        self.url = f"{url.rstrip('/')}/v1"
        self._headers = {"authorization": f"Bearer {key_in('RemotePool', api_key_env)}"}
        self._client = WebClient(
            f"the sandbox server at {parts.hostname}",
            most_requests=_MOST_REQUESTS,
            # A proxy would read the key of a plain request, and may not reach what this machine reaches.
            uses_proxies=parts.scheme == "https",
        )
        self._open: dict[str, RemoteSession] = {}
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RemotePool:
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait([self._renewing])
        await asyncio.gather(*(session.close() for session in list(self._open.values())), return_exceptions=True)
        await self._client.close()

    @contextlib.asynccontextmanager
    async def session(
        self,
        *,
        limits: Limits | None = None,
        undo: bool = False,
        network: Sequence[str] = (),
        wait_s: float | None = None,
    ) -> AsyncIterator[RemoteSession]:
        """Open a session for a block of code; see `open`."""
        async with await self.open(limits=limits, undo=undo, network=network, wait_s=wait_s) as session:
            yield session

    async def open(
        self,
        *,
        limits: Limits | None = None,
        undo: bool = False,
        network: Sequence[str] = (),
        wait_s: float | None = None,
    ) -> RemoteSession:
        """Open a session, which its caller closes; the server ends it if this program is gone.

        Args:
            limits: no higher than the server's; None for those.
            undo: keep the state before each cell, for `restore`.
            network: addresses that the session may reach, from the server's --network list; see `Pool.open`.
            wait_s: how long to wait for a place; None for as long as the server lets one wait.

        Raises:
            SandboxError: no place became free, or the session could not be started.
        """
        body = {"limits": asdict(limits) if limits else None, "undo": undo, "network": [*network], "wait_s": wait_s}
        # Longer than the server waits, which would otherwise open a session that nobody closes.
        limit_s = _START_S + (MAX_WAIT_S if wait_s is None else wait_s)
        return self._opened(await self.ask("POST", "/sessions", body, limit_s=limit_s))

    def _opened(self, answer: dict[str, object]) -> RemoteSession:
        try:
            name, lease_s = answer["id"], answer["lease_s"]
            # The name becomes part of the paths of further requests.
            if not isinstance(name, str) or not name.isalnum() or not isinstance(lease_s, int | float) or lease_s <= 0:
                raise SandboxWireError("its session has no name")
            session = RemoteSession(self, name, limits_from_json(answer["limits"], _UNBOUNDED))
        except (KeyError, SandboxWireError) as error:
            raise SandboxError(f"the server's answer is not a session: {error}") from None
        self._open[name] = session
        if self._renewing is None:
            # Four times in a lease, so that a request or two may fail.
            self._renewing = asyncio.create_task(self._renew(float(lease_s) / 4))
        return session

    def forget(self, name: str) -> None:
        """Stop renewing a session's lease."""
        self._open.pop(name, None)

    async def _renew(self, interval_s: float) -> None:
        """Keep the open sessions' leases."""
        while True:
            await asyncio.sleep(interval_s)
            with contextlib.suppress(SandboxError):  # the next use of a session reports it
                await self.ask("POST", "/renew", {"sessions": list(self._open)}, limit_s=_RENEW_S)

    async def ask(
        self, method: str, path: str, body: object = None, *, limit_s: float = _REQUEST_S, most_bytes: int = _MOST_SMALL
    ) -> dict[str, object]:
        """Send a request to the server and return its answer.

        Raises:
            SandboxError: the server refuses, or does not answer properly.
        """
        try:
            request = HttpRequest(method=method, url=self.url + path, headers=self._headers, body=body)
            data = await self._client.ask(request, most_bytes=most_bytes, limit_s=limit_s)
        except HttpError as error:
            raise _refusal(error) from None
        return json_object(data, self._client.service)


class RemoteSession:
    """A session on a server; made by `RemotePool`. See `PoolSession`, whose methods these are."""

    def __init__(self, pool: RemotePool, name: str, limits: Limits) -> None:
        self.limits = limits
        self.alive = True
        """Whether it takes another cell, as far as is known."""
        self._pool = pool
        self._path = f"/sessions/{name}"
        self._name = name
        self._closed = False

    async def run(self, code: str, *, wall_s: float | None = None, cpu_s: float | None = None) -> Result:
        """Run a cell of Python and return its result; see `PoolSession.run`."""
        answer = await self._ask(
            "run",
            {"code": code, "wall_s": wall_s, "cpu_s": cpu_s},
            limit_s=(self.limits.wall_s if wall_s is None else wall_s) + _GRACE_S,
            most_bytes=2 * self.limits.transfer_bytes + 24 * self.limits.output_bytes + _MOST_SMALL,
        )
        self.alive = answer.get("alive") is True
        try:
            return result_from_json(answer.get("result"), self.limits)
        except SandboxWireError as error:
            raise SandboxError(f"the server's answer is not a result: {error}") from None

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, relative to the session's folder."""
        await self._ask("put", {"path": path, "data": base64.b64encode(data).decode()})

    async def get(self, path: str) -> bytes:
        """Read a file, relative to the session's folder."""
        answer = await self._ask("get", {"path": path}, most_bytes=2 * self.limits.transfer_bytes + _MOST_SMALL)
        try:
            return unpacked(str(answer.get("data")))
        except SandboxWireError as error:
            raise SandboxError(f"the server's answer is not a file: {error}") from None

    async def fork(self) -> RemoteSession:
        """Return an independent copy of the session, which the caller closes."""
        return self._pool._opened(await self._ask("fork", {}))

    async def restore(self) -> None:
        """Go back to the state before the latest cell."""
        await self._ask("restore", {})
        self.alive = True

    async def close(self) -> None:
        """End the session; raise nothing if the server is gone, as its sessions are gone with it."""
        if self._closed:
            return
        self._closed, self.alive = True, False
        self._pool.forget(self._name)
        with contextlib.suppress(SandboxError):
            await self._pool.ask("DELETE", self._path)

    async def __aenter__(self) -> RemoteSession:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.shield(self.close())

    async def _ask(
        self, do: str, body: dict[str, object], *, limit_s: float = _REQUEST_S, most_bytes: int = _MOST_SMALL
    ) -> dict[str, object]:
        if self._closed:
            raise SandboxError("the session is closed")
        return await self._pool.ask("POST", f"{self._path}/{do}", body, limit_s=limit_s, most_bytes=most_bytes)


_LARGE = 1 << 40
_UNBOUNDED = Limits(
    wall_s=1e6,
    cpu_s=None,
    cpus=1e6,
    memory_bytes=_LARGE,
    processes=_LARGE,
    output_bytes=1 << 24,
    scratch_bytes=_LARGE,
    scratch_files=_LARGE,
    transfer_bytes=1 << 28,
)
"""Highest limits that a server's answer may state."""


def _refusal(error: HttpError) -> SandboxError:
    """Return the error that a server has stated; its text comes from another machine, and is cut."""
    try:
        message = json.loads(error.text)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = error.text
    return SandboxError(f"the sandbox server refused ({error.status}): {str(message)[:1000]}")
