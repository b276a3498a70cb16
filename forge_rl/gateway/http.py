"""uvicorn in an event loop that is not its own: listens, serves, and stops when asked."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from contextlib import AbstractContextManager

import uvicorn
from starlette.types import ASGIApp

from forge_rl.errors import ConfigError
from forge_rl.gateway.config import GatewayConfig

_GRACE_S = 5
"""Seconds that connections may take to close at the end."""
_KEEP_ALIVE_S = 75


class HttpServer:
    """Serves an app as soon as it is made and the event loop runs.

    Args:
        app: the ASGI app.
        config: where to listen.

    Raises:
        ConfigError: the port is in use, or there is no such address here.
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        listener = _listen(config)
        _allow_connections(config.max_concurrent)
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        """URL that reaches it from this machine."""
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Stop listening, and wait until connections are closed."""
        self._server.should_exit = True
        await self._serving


def check_address(config: GatewayConfig) -> None:
    """Check, before much is started, that the server could listen.

    Raises:
        ConfigError: the port is in use, or there is no such address here.
    """
    _listen(config).close()


class _Server(uvicorn.Server):
    """A server that leaves signals to the program that it is a part of."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def _listen(config: GatewayConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        cause = str(error.strerror or error).partition(" (while")[0]
        raise ConfigError(
            f"the gateway cannot listen on {config.host} port {config.port}: {cause}",
            hint="set another --port (0 takes a free one), or end the program that has it",
        ) from error
    # A client that takes nothing for this long loses its connection, and what was kept for it. Accepted connections
    # inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(config.client_deadline_s * 1000))
    return listener


def _allow_connections(count: int) -> None:
    """Raise this process's limit of open files to what connections need; many systems begin with 1024."""
    wanted = 2 * count + 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
