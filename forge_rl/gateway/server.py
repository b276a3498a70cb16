"""The gateway: an HTTP server in the controller's own event loop, before a backend that decodes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Send

from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ForgeError
from forge_rl.gateway import http
from forge_rl.gateway.backend import Backend
from forge_rl.gateway.call import CALL, Call
from forge_rl.gateway.config import GatewayConfig
from forge_rl.gateway.constraints import ConstraintChecker
from forge_rl.gateway.errors import ApiError, to_api_error
from forge_rl.gateway.guard import ANTHROPIC_PATH, Guard, InFlight
from forge_rl.gateway.json_text import encode, encode_beside
from forge_rl.gateway.keys import KeyRing, read_key
from forge_rl.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from forge_rl.gateway.reading import Reader
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.tools import ToolParser, parser_for
from forge_rl.types import Sampling

if TYPE_CHECKING:
    from forge_rl.gateway.vllm_server import VLLMServer

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", ANTHROPIC_PATH, f"{ANTHROPIC_PATH}/count_tokens")
_LONG_TOKENS = 2048
"""Responses with so many tokens are written beside the event loop."""


class Gateway:
    """Serves OpenAI's and Anthropic's APIs, and records the turns of each session.

    Example:
        async with Gateway(GatewayConfig(), backend, tokenizer) as gateway:
            session = gateway.open(sampling=Sampling(max_tokens=64))
            ...  # a client of session.base_url with session.key
            turns = session.close()

    Args:
        config: where it listens, and what it accepts.
        backend: decodes completions.
        tokenizer: the model's tokenizer.
        api_key: the owner's key, for requests outside of sessions; by default that of config.api_key_file.
        open_to_all: answer requests outside of sessions, where there is no such key. A run leaves it off: its engines
            are for its episodes.
        constraints: tries what forces an answer's form; by default in a process that the gateway ends with itself.
        healthy: what /health reports.
        warn: called with a line for the user.

    Raises:
        ConfigError: there is no good key in config.api_key_file.
    """

    def __init__(
        self,
        config: GatewayConfig,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        api_key: str = "",
        open_to_all: bool = False,
        constraints: ConstraintChecker | None = None,
        healthy: Callable[[], bool] = lambda: True,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self._backend = backend
        self._tokenizer = tokenizer
        self._models = tuple(dict.fromkeys((backend.model, *config.aliases)))
        self._reader = Reader(tokenizer, backend.max_model_tokens)
        self._constraints = constraints or ConstraintChecker(tokenizer)
        self._owns_constraints = constraints is None
        self._vllm: VLLMServer | None = None
        self._warn = warn
        self._replaced: set[str] = set()
        """Sampling settings of agents that were replaced by a run's."""
        if not api_key and config.api_key_file is not None:
            api_key = read_key(config.api_key_file)
        self._keys: KeyRing[Session] = KeyRing(api_key, open_to_all=open_to_all)
        self._healthy = healthy
        if config.is_public and open_to_all and not api_key:
            warn(f"the gateway listens on {config.host} without a key: whoever reaches it may use it")
        self._started_s = int(time.time())
        self._running: set[asyncio.Task[None]] = set()
        """Requests in flight outside of sessions."""
        self._in_flight = InFlight(config.max_concurrent)
        """Completions in flight, by session; None for those outside of sessions."""
        self._closing = False
        self._metrics = GatewayMetrics(self._in_flight.total, lambda: len(self._keys))
        self._http: http.HttpServer | None = None

    async def start(self) -> None:
        """Import vLLM's server, which takes seconds in a process that has not, and listen.

        Raises:
            ConfigError: the port is in use, there is no such address here, or there is no such parser in vLLM.
        """
        http.check_address(self.config)
        name = self.config.tool_parser or parser_for(self._tokenizer)
        parser = ToolParser(name, self._tokenizer, self.config.reasoning_parser)
        await parser.load()

        def load() -> VLLMServer:
            from forge_rl.gateway.vllm_server import VLLMServer

            given = (self._backend, self._tokenizer, self.config, self._reader, parser, self._constraints)
            return VLLMServer(*given, replaced=self._note_replaced)

        self._vllm = await asyncio.to_thread(load)
        gc.freeze()  # garbage collection would hold up the loop for half a second to look at all of vLLM
        self._http = http.HttpServer(self._app(), self.config)

    @property
    def base_url(self) -> str:
        """URL for OpenAI's clients; Anthropic's leave out the /v1."""
        assert self._http is not None, "start comes first"
        return f"{self._http.url}/v1"

    @property
    def model(self) -> str:
        """Name of the model, as requests have it."""
        return self._backend.model

    def open(self, task_id: str = "", *, sampling: Sampling) -> Session:
        """Begin a session: one episode, with a key of its own.

        Args:
            task_id: id of the episode's task, for people to read.
            sampling: how its turns are sampled, unless a request says otherwise: the training temperature, the most
                tokens of a turn, and the seed that those of its turns come from.
        """
        key = f"forge-{secrets.token_hex(8)}.{secrets.token_urlsafe(32)}"
        on_close = partial(self._keys.remove, key)
        session = Session(
            key,
            self.base_url,
            task_id=task_id,
            model=self.model,
            sampling=sampling,
            most_turns=self.config.session_turns,
            most_tokens=self.config.session_tokens,
            on_close=on_close,
        )
        self._keys.add(key, session)
        return session

    async def stop(self) -> None:
        """End all requests and sessions, and stop listening."""
        self._closing = True
        for session in self._keys.sessions:
            session.close()
        for task in self._running:
            task.cancel()
        if self._http is not None:
            await self._http.stop()
        gc.unfreeze()
        self._reader.close()
        if self._owns_constraints:
            await self._constraints.close()

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def __repr__(self) -> str:
        where = self._http.url if self._http is not None else "not started"
        return f"Gateway  {where}  sessions {len(self._keys)}  completions in flight {self._in_flight.total()}"

    def _app(self) -> ASGIApp:
        app = FastAPI(openapi_url=None, redirect_slashes=False)
        for path in _PATHS:
            app.add_route(path, partial(self._endpoint, path), methods=["POST"])
        app.add_route("/v1/models", self._list_models, methods=["GET"])
        app.add_route("/v1/models/{name:path}", self._list_models, methods=["GET"])
        app.add_route("/health", self._health, methods=["GET"])
        app.add_route("/metrics", self._counts, methods=["GET"])
        for kind in (ApiError, HTTPException, Exception):
            app.add_exception_handler(kind, self._failed)
        caller, in_flight = self._keys.caller, self._in_flight
        return Guard(app, self.config, caller=caller, in_flight=in_flight, refused=self._count_refusal)

    async def _endpoint(self, path: str, request: Request) -> Response:
        return http.AsgiResponse(partial(self._respond, path, request))

    async def _respond(self, path: str, request: Request, receive: Receive, send: Send) -> None:
        """Serve one request that the guard let through."""
        began = time.monotonic()
        writer = http.ResponseWriter(send, self.config.client_deadline_s)
        status = 500
        session: Session | None = request.state.caller
        running = self._running if session is None else session.running
        try:
            body = b"".join([part async for part in request.stream()])
            work = self._serve(path, body, session, writer)
            del body  # it would stay for as long as the answer takes
            await http.while_connected(work, receive, running)
            status = 200
        except (http.ClientGone, ClientDisconnect):
            status = http.CLIENT_GONE
        except Exception as error:
            api_error = to_api_error(error)
            status = api_error.status
            is_bug = not isinstance(error, ApiError | ValidationError | ForgeError)
            if session is not None and not is_bug:
                session.refusal = api_error
            with contextlib.suppress(http.ClientGone):
                await writer.write_error(api_error, path.startswith(ANTHROPIC_PATH))
            if is_bug:
                raise
        finally:
            first = writer.started_s - began if writer.is_stream and writer.started_s is not None else None
            self._metrics.request(path, status, time.monotonic() - began, first)

    async def _serve(self, path: str, body: bytes, session: Session | None, writer: http.ResponseWriter) -> None:
        if self._closing or (session is not None and session.closed):
            raise ApiError(503, "the session or the server was closed", code="closed")
        assert self._vllm is not None
        call = Call(session=session)
        CALL.set(call)
        request = await self._vllm.read(path, body, call, self._check_model)
        del body
        if session is not None and not call.counted:
            session.check_room(call.wanted)
        with self._in_flight.admit(call.wanted - 1, session):
            try:
                answer = await self._vllm.answer(path, request, call)
                if isinstance(answer, AsyncGenerator):
                    await self._write_stream(answer, call, writer)
                elif call.completion_tokens < _LONG_TOKENS and not any(each.logprobs for each in call.completions):
                    await writer.write_json(encode(answer))
                else:
                    await writer.write_json(await encode_beside(lambda: answer))
            finally:
                await call.end()
        self._metrics.tokens(call.prompt_tokens, call.completion_tokens)

    async def _write_stream(self, events: AsyncGenerator[str, None], call: Call, writer: http.ResponseWriter) -> None:
        """Write events no faster than the client reads; none before an engine answers, which may fail."""
        held = b""
        async with contextlib.aclosing(events):
            async for event in events:
                if call.failure is not None:
                    break
                held += event.encode(errors="replace")
                if call.started:
                    await writer.write_events(held)
                    held = b""
        if call.failure is not None:
            raise call.failure
        await writer.write_events(held, last=True)

    def _check_model(self, name: str) -> str:
        """Return the name if the model goes by it.

        Raises:
            ApiError: it does not.
        """
        if name not in self._models:
            problem = f"The model `{name[:100]}` does not exist; there is {', '.join(self._models)}"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return name

    def _note_replaced(self, name: str) -> None:
        """Count a sampling setting that was replaced by a run's, and say it the first time."""
        self._metrics.replaced(name)
        if name not in self._replaced:
            self._replaced.add(name)
            self._warn(
                f"an agent sets {name}, which is replaced by the run's: training assumes its sampling; "
                "--gateway.agent-sampling honours what agents set"
            )

    def _count_refusal(self, path: str, caller: Hashable, error: ApiError) -> None:
        if isinstance(caller, Session):
            caller.refusal = error
        self._metrics.request("refused", error.status, 0.0)

    async def _list_models(self, request: Request) -> Response:
        names = self._models
        if "name" in request.path_params:
            return JSONResponse(self._model_card(self._check_model(request.path_params["name"])))
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in names], **ends})

    def _model_card(self, name: str) -> dict[str, object]:
        """Describe a model for both OpenAI's and Anthropic's clients."""
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "forge_rl",
            "max_model_len": self._backend.max_model_tokens,
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_s)),
        }

    async def _health(self, request: Request) -> Response:
        good = self._healthy() and not self._closing
        return JSONResponse({"status": "ok" if good else "unavailable"}, 200 if good else 503)

    async def _counts(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            what = "Unknown path" if error.status_code == 404 else "Wrong method"
            self._metrics.request("other", error.status_code, 0.0)
            message = f"{what}: {request.method} {request.url.path}"
            error = ApiError(error.status_code, message, headers=error.headers or {})
        error = to_api_error(error)
        body = error.body(request.url.path.startswith(ANTHROPIC_PATH))
        return JSONResponse(body, error.status, headers=dict(error.headers))
