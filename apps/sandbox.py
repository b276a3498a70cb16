"""Serve sandboxes over HTTP: stateful sessions of untrusted Python on this machine, which needs Linux and root.

python -m apps.sandbox --port 8100

Requests are JSON and need a key, as `Authorization: Bearer KEY`: one of --api-key-file, the environment's
FORGE_RL_API_KEY, or one that is generated and kept in the folder --out. Each key has sessions of its own.
`forge_rl.sandbox.RemotePool` is the client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import math
import secrets
import shlex
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forge_rl.errors import CheckpointError, ConfigError, ForgeError, check_flags
from forge_rl.gateway import GatewayConfig, check_address
from forge_rl.gateway.errors import ApiError, invalid
from forge_rl.gateway.guard import Guard, InFlightLimit
from forge_rl.gateway.http import HttpServer
from forge_rl.gateway.keys import kept_key, read_key
from forge_rl.run.launch import launch
from forge_rl.sandbox import Limits, Pool, PoolSession, SandboxError
from forge_rl.sandbox.network import named_addresses
from forge_rl.sandbox.pool import Profile
from forge_rl.sandbox.providers.wire import MAX_WAIT_S, SandboxWireError, limits_from_json, result_to_json, unpacked
from forge_rl.system.folders import make_private
from forge_rl.system.terminal import visible
from forge_rl.system.variables import pop_key

KEY_VARIABLE = "FORGE_RL_API_KEY"
_SWEEP_S = 1.0
_MOST_PATH = 4096

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Serve sandboxes over HTTP."""

    host: str = "127.0.0.1"
    """Address to listen on. The default serves only this machine; 0.0.0.0 serves others too, without encryption."""
    port: int = 8100
    """Port to listen on; 0 picks a free one."""
    api_key_file: tuple[Path, ...] = ()
    """Files with one API key each, which no other user may have access to (chmod 600)."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted in requests' Host header, besides loopback and the listening address; * accepts all."""
    profile: Profile = "standard"
    """How sessions are confined: strict gives each session namespaces of its own; process runs command lines instead of
    Python."""
    without: tuple[str, ...] = ()
    """Layers of isolation that may be missing on this machine: cgroup, landlock, seccomp."""
    packages: tuple[Path, ...] = ()
    """Folders of packages that sessions may import; they can read all of it."""
    sessions: int | None = None
    """How many sessions may be open; by default as many as memory and open files allow."""
    sessions_per_key: int = 256
    """How many sessions a key may have open, forks included."""
    requests_per_s: float = 200.0
    """Requests per second that a key may make on average; ten seconds' worth may come at once."""
    max_concurrent: int = 256
    """Maximum requests of a key in progress; further ones are refused with status 429."""
    max_body_bytes: int = 8 << 20
    """Maximum bytes of a request's body. A file takes a third more than its own bytes."""
    client_deadline_s: float = 30.0
    """Maximum time for a client to send its request, or to read its answer."""
    lease_s: float = 300.0
    """A session that is neither used nor renewed for this long is ended."""
    warm: int = 4
    """Sessions kept started for the next that are opened."""
    network: tuple[str, ...] = ()
    """Addresses that clients may give their sessions, as HOST:PORT. By default sessions have no network."""
    limits: Annotated[Limits, tyro.conf.arg(name="limits")] = field(default_factory=Limits)
    """Limits of sessions; clients may ask for lower ones."""
    out: Path = Path("runs/sandbox")
    """Folder for the generated key."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--",
            minimum={"sessions_per_key": 1, "max_concurrent": 1, "max_body_bytes": 1024, "warm": 0},
            above={"requests_per_s": 0, "lease_s": 0, "client_deadline_s": 0},
        )
        _ = self.http, named_addresses(self.network)  # checks the rest

    @property
    def http(self) -> GatewayConfig:
        """The settings of the HTTP server."""
        return GatewayConfig(
            host=self.host,
            port=self.port,
            allowed_hosts=self.allowed_hosts,
            max_body_bytes=self.max_body_bytes,
            max_concurrent=self.max_concurrent,
            client_deadline_s=self.client_deadline_s,
        )


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Open(_Body):
    limits: dict[str, float | int | None] | None = None
    undo: bool = False
    network: list[str] = Field([], max_length=100)
    wait_s: float | int | None = Field(None, ge=0, le=MAX_WAIT_S)


class _Run(_Body):
    code: str
    wall_s: float | int | None = Field(None, gt=0)
    cpu_s: float | int | None = Field(None, gt=0)


class _Put(_Body):
    path: str = Field(max_length=_MOST_PATH)
    data: str


class _Get(_Body):
    path: str = Field(max_length=_MOST_PATH)


class _Renew(_Body):
    sessions: list[str] = Field(max_length=100_000)


class _Nothing(_Body):
    pass


@dataclass(eq=False)
class _Leased:
    """An open session, which ends when nobody has used or renewed it for --lease-s."""

    session: PoolSession
    until_s: float
    uses: int = 0


@dataclass(eq=False)
class _Caller:
    """State of one key: its allowance of requests, and its sessions."""

    allowance: float
    """Requests that may come at once; refills with time."""
    filled_s: float
    sessions: dict[str, _Leased] = field(default_factory=dict)
    opening: int = 0


class SandboxServer:
    """HTTP server in front of a pool of sandboxes: `async with SandboxServer(config, keys) as server:`.

    Args:
        config: address, access and limits.
        keys: the accepted API keys.
    """

    def __init__(self, config: Config, keys: tuple[str, ...]) -> None:
        self.config = config
        now_s = time.monotonic()
        self._callers = {
            _digest(key): _Caller(allowance=10 * config.requests_per_s, filled_s=now_s) for key in dict.fromkeys(keys)
        }
        """Callers by the digests of their keys, so that lookup times reveal nothing about keys."""
        self._pool = Pool(
            profile=config.profile,
            limits=config.limits,
            warm=config.warm,
            sessions=config.sessions,
            packages=config.packages,
            without=config.without,
        )
        self._closing = False
        self._http: HttpServer | None = None
        self._stack = contextlib.AsyncExitStack()
        registry = self._registry = CollectorRegistry()
        name = "forge_rl_sandbox"
        self._requests = Counter("requests", "Requests", ["endpoint", "status"], namespace=name, registry=registry)
        self._seconds = Histogram(
            *("request_seconds", "Seconds from a request to its answer", ["endpoint"]),
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
            namespace=name,
            registry=registry,
        )
        self._cells = Counter("cells", "Cells by how they ended", ["outcome"], namespace=name, registry=registry)
        self._ended = Counter("sessions_ended", "Ended sessions", ["cause"], namespace=name, registry=registry)
        for gauge, text, count in (
            ("sessions_open", "Open sessions", lambda: sum(len(caller.sessions) for caller in self._callers.values())),
            ("sessions_most", "Sessions that may be open", lambda: self._pool.most),
        ):
            Gauge(gauge, text, namespace=name, registry=registry).set_function(count)

    @property
    def url(self) -> str:
        """URL of the server on this machine."""
        assert self._http is not None, "it has not started"
        return self._http.url

    async def __aenter__(self) -> SandboxServer:
        check_address(self.config.http)
        await self._stack.enter_async_context(self._pool)
        try:
            app = Guard(
                self._app(),
                self.config.http,
                caller=self._caller,
                in_flight=InFlightLimit(self.config.max_concurrent, "requests"),
                refused=lambda path, caller, error: self._requests.labels("refused", str(error.status)).inc(),
            )
            self._http = HttpServer(app, self.config.http)
        # The pool already runs: without this, a port in use would leave its processes behind.
        except BaseException:
            await self._stack.aclose()
            raise
        self._sweeping = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *raised: object) -> None:
        """End all sessions, answer the requests that wait for them, and stop listening."""
        assert self._http is not None
        self._closing = True
        self._sweeping.cancel()
        open_ones = [(caller, name) for caller in self._callers.values() for name in list(caller.sessions)]
        try:
            await asyncio.gather(*(self._end(caller, name, "shutdown") for caller, name in open_ones))
            await self._http.stop()
        finally:
            await self._stack.aclose()

    def _app(self) -> Starlette:
        def route(path: str, method: str, handle: Callable[[_Caller, Request], Awaitable[Response]]) -> Route:
            endpoint = f"{method} {path}"

            async def timed(request: Request) -> Response:
                began, status = time.monotonic(), 500
                try:
                    if self._closing:
                        raise ApiError(503, "the server is shutting down", code="closed")
                    response = await handle(request.state.caller, request)
                    status = response.status_code
                    return response
                except (ApiError, ForgeError, SandboxWireError) as error:
                    api_error = _to_api_error(error)
                    status = api_error.status
                    return api_error.response(path)
                finally:
                    self._requests.labels(endpoint, str(status)).inc()
                    self._seconds.labels(endpoint).observe(time.monotonic() - began)

            return Route(path, timed, methods=[method])

        async def unknown(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            text = f"{request.method} {visible(request.url.path)[:200]}: {error.detail}"
            return ApiError(error.status_code, text, code="not_found").response("")

        session_path = "/v1/sessions/{name}"
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                route("/v1/sessions", "POST", self._open),
                route("/v1/sessions", "GET", self._list),
                route("/v1/renew", "POST", self._renew),
                route(session_path, "DELETE", self._delete),
                route(f"{session_path}/run", "POST", self._run),
                route(f"{session_path}/put", "POST", self._put),
                route(f"{session_path}/get", "POST", self._get),
                route(f"{session_path}/fork", "POST", self._fork),
                route(f"{session_path}/restore", "POST", self._restore),
            ],
            exception_handlers={HTTPException: unknown},
        )

    def _caller(self, headers: Headers) -> _Caller:
        """Return the caller whose key a request carries, and deduct the request from the caller's allowance.

        Raises:
            ApiError: the key is missing or wrong, or its requests come too fast.
        """
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        key = bearer.strip() if kind.lower() == "bearer" else ""
        caller = self._callers.get(_digest(key))
        if caller is None:
            message = "wrong API key" if key else "no API key: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        now_s, rate = time.monotonic(), self.config.requests_per_s
        # A token bucket: it fills at the allowed rate, and holds ten seconds' worth.
        caller.allowance = min(max(10 * rate, 1), caller.allowance + rate * (now_s - caller.filled_s))
        caller.filled_s = now_s
        if caller.allowance < 1:
            wait_s = math.ceil((1 - caller.allowance) / rate)
            raise ApiError(
                *(429, f"more than {rate:g} requests per second (requests-per-s)"),
                code="rate_limit_exceeded",
                headers={"retry-after": str(wait_s)},
            )
        caller.allowance -= 1
        return caller

    @contextlib.contextmanager
    def _use(self, caller: _Caller, request: Request) -> Iterator[_Leased]:
        """Use one of a caller's sessions: its lease cannot end meanwhile, and starts again afterwards."""
        lease = caller.sessions.get(request.path_params["name"])
        if lease is None:
            raise ApiError(404, "no such session: it was closed, or its lease has ended", code="no_session")
        lease.uses += 1
        try:
            yield lease
        finally:
            lease.uses -= 1
            lease.until_s = time.monotonic() + self.config.lease_s

    async def _open(self, caller: _Caller, request: Request) -> Response:
        body = await _read(request, _Open)
        limits = None if body.limits is None else limits_from_json(body.limits, self.config.limits)
        # A session may reach only what the operator named, whatever its client asks for.
        if foreign_addresses := named_addresses(body.network) - named_addresses(self.config.network):
            raise ApiError(
                403, f"not an address of --network: {visible(min(foreign_addresses))}", code="address_not_allowed"
            )
        with self._place(caller):
            wait_s = MAX_WAIT_S if body.wait_s is None else body.wait_s
            try:
                session = await self._pool.open(limits=limits, undo=body.undo, network=body.network, wait_s=wait_s)
            except SandboxError as error:
                raise ApiError(503, error.message, code="full", headers={"retry-after": "1"}) from None
            return self._lease(caller, session)

    @contextlib.contextmanager
    def _place(self, caller: _Caller) -> Iterator[None]:
        """Count a session that is about to be opened."""
        max_sessions = self.config.sessions_per_key
        if len(caller.sessions) + caller.opening >= max_sessions:
            raise ApiError(
                429, f"the key has {max_sessions} open sessions (sessions-per-key)", code="too_many_sessions"
            )
        # Counted while it opens, or many requests at once could pass the limit together.
        caller.opening += 1
        try:
            yield
        finally:
            caller.opening -= 1

    def _lease(self, caller: _Caller, session: PoolSession) -> Response:
        name = secrets.token_hex(16)
        caller.sessions[name] = _Leased(session, time.monotonic() + self.config.lease_s)
        return JSONResponse({"id": name, "lease_s": self.config.lease_s, "limits": asdict(session.limits)}, 201)

    async def _list(self, caller: _Caller, request: Request) -> Response:
        return JSONResponse({"sessions": {name: lease.session.alive for name, lease in caller.sessions.items()}})

    async def _renew(self, caller: _Caller, request: Request) -> Response:
        body = await _read(request, _Renew)
        # The answer names only sessions that are still open.
        names = [name for name in body.sessions if name in caller.sessions]
        for name in names:
            caller.sessions[name].until_s = time.monotonic() + self.config.lease_s
        return JSONResponse({"sessions": names})

    async def _run(self, caller: _Caller, request: Request) -> Response:
        body = await _read(request, _Run)
        for name in ("wall_s", "cpu_s"):
            value, limit = getattr(body, name), getattr(self.config.limits, name)
            if value is not None and limit is not None and value > limit:
                raise ApiError(400, f"{name} is above the server's limit, {limit:g}", param=name, code="invalid_value")
        with self._use(caller, request) as lease:
            result = await lease.session.run(body.code, wall_s=body.wall_s, cpu_s=body.cpu_s)
            self._cells.labels("error" if result.error else "value").inc()
            return JSONResponse({"result": result_to_json(result), "alive": lease.session.alive})

    async def _put(self, caller: _Caller, request: Request) -> Response:
        body = await _read(request, _Put)
        with self._use(caller, request) as lease:
            await lease.session.put(body.path, unpacked(body.data))
        return JSONResponse({})

    async def _get(self, caller: _Caller, request: Request) -> Response:
        body = await _read(request, _Get)
        with self._use(caller, request) as lease:
            data = await lease.session.get(body.path)
        return JSONResponse({"data": base64.b64encode(data).decode()})

    async def _fork(self, caller: _Caller, request: Request) -> Response:
        await _read(request, _Nothing)
        # A fork counts as one more session of the key.
        with self._use(caller, request) as lease, self._place(caller):
            return self._lease(caller, await lease.session.fork())

    async def _restore(self, caller: _Caller, request: Request) -> Response:
        await _read(request, _Nothing)
        with self._use(caller, request) as lease:
            await lease.session.restore()
        return JSONResponse({})

    async def _delete(self, caller: _Caller, request: Request) -> Response:
        with self._use(caller, request):
            pass
        await self._end(caller, request.path_params["name"], "closed")
        return JSONResponse({})

    async def _end(self, caller: _Caller, name: str, cause: str) -> None:
        # Removed before it closes, so that no further request uses it, and only one caller closes it.
        lease = caller.sessions.pop(name, None)
        if lease is not None:
            self._ended.labels(cause).inc()
            # Shielded: a client that hangs up must not leave half of a session behind.
            await asyncio.shield(lease.session.close())

    async def _sweep(self) -> None:
        """End the sessions whose leases have ended."""
        while True:
            # Often enough that a short lease is exceeded by at most a quarter.
            await asyncio.sleep(min(_SWEEP_S, self.config.lease_s / 4))
            now_s = time.monotonic()
            late = [
                (caller, name)
                for caller in self._callers.values()
                for name, lease in caller.sessions.items()
                # A session in use is never swept, however long a cell runs.
                if not lease.uses and lease.until_s < now_s
            ]
            await asyncio.gather(*(self._end(caller, name, "lease") for caller, name in late))

    async def _health(self, request: Request) -> Response:
        serving = not self._closing and any(not host.lost for host in self._pool.hosts)
        return JSONResponse({"status": "ok" if serving else "no server"}, 200 if serving else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


async def _read(request: Request, kind: type[B]) -> B:
    """Read a request's body.

    Raises:
        ApiError: it is not JSON, or not of this kind.
    """
    try:
        # Requests that need nothing, or leave all at its default, may have no body.
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise invalid(error) from None


def _to_api_error(error: Exception) -> ApiError:
    match error:
        case ApiError():
            return error
        case SandboxWireError():
            return ApiError(400, str(error).removeprefix("its "), code="invalid_value")
        case ConfigError():
            return ApiError(400, error.message, code="invalid_value")
        case SandboxError():
            return ApiError(409, f"{error.message}; {error.hint}" if error.hint else error.message, code="sandbox")
    return ApiError(500, "the server failed; see its log", code="internal_error")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _keys(config: Config) -> tuple[tuple[str, ...], str]:
    """Read the API keys, or generate one; return them, and a shell expression for the first.

    Raises:
        ConfigError: a key file is unreadable or unsafe, or no valid key is there.
    """
    environment_key = pop_key("the server", KEY_VARIABLE)
    files = config.api_key_file
    if not files and environment_key:
        return (environment_key,), f"${KEY_VARIABLE}"
    if not files:
        make_private(config.out, CheckpointError)
        files = (config.out / "api_key",)
        kept_key(files[0])
    return tuple(read_key(file) for file in files), f"$(cat {shlex.quote(str(files[0].resolve()))})"


async def main(config: Config) -> None:
    """Serve until a signal; then end all sessions."""
    keys, shell_key = _keys(config)
    # The pool warns of missing layers of isolation; they are printed in the program's own form.
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        async with SandboxServer(config, keys) as server:
            for warning in caught_warnings:
                print(f"warning: {visible(str(warning.message))}", file=sys.stderr, flush=True)
            if config.http.is_public:
                print(
                    "warning: other machines may reach the server, without encryption: put a proxy with TLS before it",
                    file=sys.stderr,
                    flush=True,
                )
            print(
                f'serving sandboxes at {server.url}\nthe API key is "{shell_key}"\n\n'
                f"  FORGE_RL_API_KEY={shell_key} python program.py  # with forge_rl.sandbox.RemotePool({server.url!r})"
                "\n\nCtrl-C stops it",
                flush=True,
            )
            await asyncio.Event().wait()


if __name__ == "__main__":
    launch(Config, main)
