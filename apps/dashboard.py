"""Serve a run's page on this machine, up to date while the run is live, with any episode that it keeps.

forge-rl dashboard runs/grpo-1a2b3c4d
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

import tyro
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forge_rl.errors import ConfigError, ForgeError, check_flags
from forge_rl.gateway.errors import ApiError
from forge_rl.gateway.gateway_config import GatewayConfig
from forge_rl.gateway.guard import Guard, InFlightLimit
from forge_rl.gateway.http import HttpServer
from forge_rl.gateway.keys import KeyRing
from forge_rl.look.page.document import closing, encoded, opening, policy
from forge_rl.look.page.run_data import RunData
from forge_rl.run.launch import launch

from .report import comparison_of

_MOST_AT_ONCE = 32
"""Maximum requests in progress."""
_HEADERS = {
    "content-security-policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Serve a run's page to this machine's browsers."""

    run: tyro.conf.Positional[Path]
    """Run folder, of a live or ended run."""
    compare: Path | None = None
    """Another run folder, to show next to it."""
    port: int = 8321
    """Port to listen on, at 127.0.0.1; 0 picks a free one."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"port": 0}, below={"port": 65536})


class Dashboard:
    """Serves the page of one or two runs, from construction until `stop`. All but the empty page needs the key.

    Raises:
        ConfigError: it is not a run folder, or the port is in use.
    """

    def __init__(self, config: Config) -> None:
        self._folders = [config.run, *([config.compare] if config.compare is not None else [])]
        self._runs = [RunData(folder) for folder in self._folders]
        # One reader at a time: requests read in threads, and `RunData` caches what it has read.
        self._reading = asyncio.Lock()
        key = secrets.token_urlsafe(24)
        routes = [
            Route("/", self._page),
            Route("/data.json", self._data),
            Route("/episode/{run:int}/{name}.json", self._episode),
        ]
        gateway = GatewayConfig(port=config.port, max_concurrent=_MOST_AT_ONCE)
        app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1)])
        guard = Guard(
            app,
            gateway,
            caller=KeyRing(key).caller,
            in_flight=InFlightLimit(_MOST_AT_ONCE),
            open_paths=frozenset({"/"}),
        )
        self._server = HttpServer(_WithHeaders(guard), gateway)
        self.url = f"{self._server.url}/#key={key}"
        """Address for a browser, with the key where servers do not see it."""

    async def stop(self) -> None:
        """Stop serving."""
        await self._server.stop()

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(opening(live=True) + closing())

    async def _data(self, request: Request) -> Response:
        async with self._reading:
            state = await asyncio.to_thread(lambda: encoded([run.state() for run in self._runs]))
            # A browser asks again and again; as long as nothing has changed, the answer is a few bytes.
            tag = f'"{hashlib.sha256(state.encode()).hexdigest()[:32]}"'
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers={"etag": tag})
            body = await asyncio.to_thread(lambda: encoded(self._everything()).encode())
        return Response(body, media_type="application/json", headers={"etag": tag})

    def _everything(self) -> dict[str, object]:
        runs = [run.data() for run in self._runs]
        for run in runs:
            total = sum(size for _, _, size in run["episodes"]["files"])
            run["whole"] = {"kept": total, "total": total}
        return {"runs": runs, "comparison": comparison_of(self._folders)}

    async def _episode(self, request: Request) -> Response:
        run_index, name = request.path_params["run"], request.path_params["name"]
        if run_index >= len(self._runs):
            return ApiError(404, "there is no such run").response(request.url.path)
        try:
            async with self._reading:
                body = await asyncio.to_thread(lambda: encoded(self._runs[run_index].episode(name)).encode())
        except ForgeError as error:
            status = 404 if isinstance(error, ConfigError) else 500
            return ApiError(status, error.message).response(request.url.path)
        return Response(body, media_type="application/json")


class _WithHeaders:
    """Adds the headers of `_HEADERS` to every response, and forbids storing it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = {**_HEADERS, "cache-control": "no-store"}
                header_pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
                message = {**message, "headers": [*message["headers"], *header_pairs]}
            await send(message)

        await self._app(scope, receive, with_headers)


async def main(config: Config) -> None:
    """Serve until a signal."""
    dashboard = Dashboard(config)
    try:
        print(f"open {dashboard.url}\nCtrl-C stops it", flush=True)
        await asyncio.Event().wait()
    finally:
        await dashboard.stop()


if __name__ == "__main__":
    launch(Config, main)
