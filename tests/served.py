"""Serves a stand-in of a service over HTTP on loopback, in the test's own event loop."""

import abc
import asyncio
import contextlib
import socket
from typing import Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


class Served(abc.ABC):
    """A service whose subclass answers requests; `url` is its address."""

    url: str

    @abc.abstractmethod
    async def answer(self, request: Request) -> Response:
        """Answer a request."""

    async def __aenter__(self) -> Self:
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        app = Starlette(routes=[Route("/{path:path}", self.answer, methods=methods)])
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        listener = socket.create_server(("127.0.0.1", 0))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving
