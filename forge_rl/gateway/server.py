"""The gateway: an HTTP server in the controller's event loop, in front of a decoding backend."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Send

from forge_rl.errors import ForgeError
from forge_rl.gateway import http
from forge_rl.gateway.adapters import ServedAdapters
from forge_rl.gateway.constraints import ConstraintChecker
from forge_rl.gateway.errors import ANTHROPIC_PATH, ApiError, to_api_error
from forge_rl.gateway.gateway_config import GatewayConfig
from forge_rl.gateway.guard import Guard, InFlightLimit
from forge_rl.gateway.keys import KeyRing, read_key
from forge_rl.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from forge_rl.gateway.reading import Reader
from forge_rl.gateway.request_state import REQUEST, RequestState
from forge_rl.gateway.sessions import Session
from forge_rl.gateway.shared import GatewayContext
from forge_rl.services.policy_backend import Backend
from forge_rl.system.tasks import cancel_once
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import PARSED, ToolParser, parser_for, reasoning_parser_for
from forge_rl.types import Sampling

if TYPE_CHECKING:
    from forge_rl.gateway.vllm_server import VLLMServer

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", ANTHROPIC_PATH, f"{ANTHROPIC_PATH}/count_tokens")
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
AGENT_HEADER = "x-agent-name"
"""Header by which an agent names itself or its sub-agent, which tells their turns apart in kept episodes."""
_MOST_NAME = 80
_LONG_TOKENS = 2048
"""Number of tokens from which responses are encoded in a thread."""


@dataclass(eq=False, repr=False)
class Gateway:
    """Serves OpenAI's and Anthropic's APIs, and records the turns of each session.

    Example:
        async with Gateway(GatewayConfig(), backend, tokenizer) as gateway:
            session = gateway.open(sampling=Sampling(max_tokens=64))
            ...  # a client of session.base_url with session.key
            turns = session.close()

    Raises:
        ConfigError: config.api_key_file is unreadable or unsafe, or holds no valid key.
    """

    config: GatewayConfig
    """Address, access and limits."""
    backend: Backend
    """Decodes completions."""
    tokenizer: Tokenizer
    """The model's tokenizer."""
    _: KW_ONLY
    api_key: InitVar[str] = ""
    """The owner's key, for requests outside of sessions; by default the key in config.api_key_file."""
    open_to_all: InitVar[bool] = False
    """Answer requests outside of sessions if the owner has no key. A run leaves it off, as its engines serve its
    episodes."""
    constraints: InitVar[ConstraintChecker | None] = None
    """Checks constraints on completions; by default the gateway's own checker, closed by `stop`."""
    healthy: Callable[[], bool] = lambda: True
    """Returns the health that /health reports."""
    warn: Callable[[str], None] = lambda text: None
    """Called with each warning, one line."""
    adapters: ServedAdapters | None = None
    """Adapters that requests outside of sessions may name as their model; None serves the model alone."""

    def __post_init__(self, api_key: str, open_to_all: bool, constraints: ConstraintChecker | None) -> None:
        config, backend, tokenizer = self.config, self.backend, self.tokenizer
        # An alias may repeat the name of the model, which /v1/models lists once.
        self._models = tuple(dict.fromkeys((backend.model, *config.aliases)))
        self._reader = Reader(tokenizer, backend.max_model_len)
        self._constraints = constraints or ConstraintChecker(tokenizer)
        self._owns_constraints = constraints is None
        self._vllm: VLLMServer | None = None
        self._replaced: set[str] = set()
        """Names of agents' sampling settings that the run's replaced so far."""
        if not api_key and config.api_key_file is not None:
            api_key = read_key(config.api_key_file)
        self._keys = KeyRing(api_key, open_to_all=open_to_all)
        if config.is_public and open_to_all and not api_key:
            self.warn(f"the gateway listens on {config.host} without a key: anyone who can reach it may use it")
        # /v1/models reports this as every model's time of creation.
        self._started_s = int(time.time())
        self._running: set[asyncio.Task[None]] = set()
        """Requests in flight outside of sessions."""
        self._in_flight = InFlightLimit(config.max_concurrent)
        """Completions in flight by session; None outside of sessions."""
        self._closing = False
        self._metrics = GatewayMetrics(self._in_flight.total, lambda: len(self._keys))
        self._http: http.HttpServer | None = None

    async def start(self) -> None:
        """Import vLLM's server, which takes seconds, and start listening.

        Raises:
            ConfigError: the port is in use, the address is not this machine's, or vLLM lacks a configured parser.
        """
        # Parsers and vLLM take seconds to load; an address in use is reported before that.
        http.check_address(self.config)
        name = self.config.tool_parser or await asyncio.to_thread(parser_for, self.tokenizer)
        reasoning = self.config.reasoning_parser
        if not reasoning:
            reasoning = await asyncio.to_thread(reasoning_parser_for, self.tokenizer, name)
        parser = ToolParser(name, self.tokenizer, reasoning if reasoning != "none" else "", self.warn)
        await parser.load()

        shared = GatewayContext(
            config=self.config,
            backend=self.backend,
            tokenizer=self.tokenizer,
            reader=self._reader,
            constraints=self._constraints,
            parser=parser,
            replaced=self._note_replaced,
        )

        def load() -> VLLMServer:
            from forge_rl.gateway.vllm_server import VLLMServer

            return VLLMServer(shared)

        # In a thread: the event loop may be a run's controller, which does not wait for the import.
        self._vllm = await asyncio.to_thread(load)
        # A collection over all objects of vLLM would block the event loop for half a second.
        gc.freeze()
        self._http = http.HttpServer(self._app(), self.config)

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients; Anthropic's omit the /v1."""
        assert self._http is not None, "start comes first"
        return f"{self._http.url}/v1"

    @property
    def model(self) -> str:
        """Name of the model in requests."""
        return self.backend.model

    def open(self, task_id: str = "", *, sampling: Sampling) -> Session:
        """Open a session for one episode, with its own key.

        Args:
            task_id: id of the episode's task, for display.
            sampling: the turns' sampling settings; config.agent_sampling says which of them requests override. Turns'
                seeds are derived from its seed.
        """
        # KeyRing.caller recognizes keys of this form, and never takes a closed session's for the owner's.
        key = f"forge-{secrets.token_hex(8)}.{secrets.token_urlsafe(32)}"
        session = Session(
            key=key,
            base_url=self.base_url,
            task_id=task_id,
            model=self.model,
            sampling=sampling,
            most_turns=self.config.session_turns,
            most_tokens=self.config.session_tokens,
            on_close=partial(self._keys.remove, key),
        )
        self._keys.add(key, session)
        return session

    async def stop(self) -> None:
        """Abort all requests, close all sessions, and stop listening."""
        self._closing = True
        # A copy of the key ring's sessions, as closing one removes its key.
        for session in self._keys.sessions:
            session.close()
        for task in self._running:
            cancel_once(task)
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
        app = Starlette(
            routes=[
                *(Route(path, partial(self._endpoint, path), methods=["POST"]) for path in _PATHS),
                *(Route(path, self._change_adapters, methods=["POST"]) for path in (_LOAD, _UNLOAD)),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._list_models),
                Route("/health", self._health),
                Route("/metrics", self._counts),
            ],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), self._failed),
        )
        app.router.redirect_slashes = False
        caller, in_flight = self._keys.caller, self._in_flight
        return Guard(app, self.config, caller=caller, in_flight=in_flight, refused=self._count_refusal)

    async def _endpoint(self, path: str, request: Request) -> Response:
        return http.AsgiResponse(partial(self._respond, path, request))

    async def _respond(self, path: str, request: Request, receive: Receive, send: Send) -> None:
        """Serve one request accepted by the guard."""
        start_time = time.monotonic()
        writer = http.ResponseWriter(send, self.config.client_deadline_s)
        status = 500
        session: Session | None = request.state.caller
        # Tasks by owner: closing a session cancels the requests of that session only.
        running = self._running if session is None else session.running
        try:
            # A single part, as the guard passes the whole body in one message.
            body = b"".join([part async for part in request.stream()])
            agent = request.headers.get(AGENT_HEADER, "")[:_MOST_NAME]
            work = self._serve(path, body, session, writer, agent)
            del body  # else it stays in memory until the response is done
            await http.while_connected(work, receive, running)
            status = 200
        except (http.ClientGoneError, ClientDisconnect):
            status = http.CLIENT_GONE
        except Exception as error:
            api_error = to_api_error(error)
            status = api_error.status
            # The client of a bug reads only that the gateway failed; raising it below leaves its traceback in the log.
            is_bug = not isinstance(error, ApiError | ForgeError)
            if session is not None and not is_bug:
                # The episode's outcome depends on the last refusal, if its agent fails.
                session.refusal = api_error
            with contextlib.suppress(http.ClientGoneError):
                await writer.write_error(api_error, path.startswith(ANTHROPIC_PATH))
            if is_bug:
                raise
        finally:
            first_event_s = writer.started_s - start_time if writer.is_stream and writer.started_s is not None else None
            self._metrics.request(path, status, time.monotonic() - start_time, first_event_s)

    async def _serve(
        self, path: str, body: bytes, session: Session | None, writer: http.ResponseWriter, agent: str
    ) -> None:
        if self._closing or (session is not None and session.closed):
            raise ApiError(503, "the session or the server was closed", code="closed")
        assert self._vllm is not None
        state = RequestState(session=session, agent=agent)
        # This coroutine has a task of its own, and with it a context: other requests do not see these values.
        REQUEST.set(state)
        PARSED.set({})
        request = await self._vllm.read(path, body, state, partial(self._check_model, session=session))
        del body
        if session is not None and not state.only_counts:
            session.check_room(state.num_completions)
        # The guard has counted one completion when it admitted the request.
        with self._in_flight.admit(state.num_completions - 1, session):
            try:
                answer = await self._vllm.answer(path, request, state)
                if isinstance(answer, AsyncGenerator):
                    await self._write_stream(answer, state, writer)
                # With logprobs even a short completion makes a long response.
                elif state.completion_tokens < _LONG_TOKENS and not any(choice.logprobs for choice in state.choices):
                    await writer.write_json(http.encode(answer))
                else:
                    await writer.write_json(await asyncio.to_thread(http.encode, answer, is_long=True))
            finally:
                # Also after a disconnect or an error: no completion may keep an engine busy that nobody reads.
                await state.end()
        self._metrics.tokens(state.prompt_tokens, state.completion_tokens)

    async def _write_stream(
        self, events: AsyncGenerator[str, None], state: RequestState, writer: http.ResponseWriter
    ) -> None:
        """Write events at the client's pace, once an engine has answered: earlier failures become error responses."""
        buffer = b""
        async with contextlib.aclosing(events):
            async for event in events:
                if state.failure is not None:
                    break
                buffer += event.encode(errors="replace")
                if state.started:
                    await writer.write_events(buffer)
                    buffer = b""
        if state.failure is not None:
            raise state.failure
        await writer.write_events(buffer, last=True)

    def _check_model(self, name: str, session: Session | None = None) -> str:
        """Return the adapter that a request's model stands for; "" for the model itself.

        Raises:
            ApiError: the name is unknown.
        """
        if name in self._models:
            return ""
        # Episodes of a run sample the policy alone.
        adapters = self._adapter_names if session is None else ()
        if name in adapters:
            return name
        problem = f"The model `{name[:100]}` does not exist; available: {', '.join((*self._models, *adapters))}"
        raise ApiError(404, problem, param="model", code="model_not_found")

    @property
    def _adapter_names(self) -> tuple[str, ...]:
        return () if self.adapters is None else tuple(self.adapters.names)

    async def _change_adapters(self, request: Request) -> Response:
        """Load or drop an adapter, with the paths and bodies of vLLM's server."""
        path = request.url.path
        if self.adapters is None or request.state.caller is not None or self._closing:
            # For an episode's key, or without adapters, the path does not exist.
            raise HTTPException(404)
        body = await request.body()
        load = path == _LOAD
        text = await (self.adapters.load(body, self._models) if load else self.adapters.unload(body))
        self._metrics.request(path, 200, 0.0)
        return Response(text, media_type="text/plain")

    def _note_replaced(self, name: str) -> None:
        """Count an agent's sampling setting replaced by the run's, and warn the first time."""
        self._metrics.replaced(name)
        if name not in self._replaced:
            self._replaced.add(name)
            self.warn(
                f"an agent sets {name}, which the run's sampling replaces, as training assumes it; set "
                "--gateway.agent-sampling to honour agents' settings"
            )

    def _count_refusal(self, path: str, caller: Hashable, error: ApiError) -> None:
        if isinstance(caller, Session):
            caller.refusal = error
        # One label for all paths: these are any client's text, and each value of a label stays in memory.
        self._metrics.request("refused", error.status, 0.0)

    async def _list_models(self, request: Request) -> Response:
        names = *self._models, *self._adapter_names
        if (name := request.path_params.get("name")) is not None:
            self._check_model(name)
            return JSONResponse(self._model_card(name))
        # Anthropic's listing has these fields, OpenAI's clients ignore them.
        page_fields = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in names], **page_fields})

    def _model_card(self, name: str) -> dict[str, object]:
        """Return a model's description, with the fields of OpenAI's and Anthropic's APIs."""
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "forge_rl",
            "parent": self.model if name in self._adapter_names else None,
            "max_model_len": self.backend.max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started_s)),
        }

    async def _health(self, request: Request) -> Response:
        is_healthy = self.healthy() and not self._closing
        return JSONResponse({"status": "ok" if is_healthy else "unavailable"}, 200 if is_healthy else 503)

    async def _counts(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _failed(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            reason = "Unknown path" if error.status_code == 404 else "Wrong method"
            # One label for all unknown paths, as for refusals.
            self._metrics.request("other", error.status_code, 0.0)
            message = f"{reason}: {request.method} {request.url.path}"
            error = ApiError(error.status_code, message, headers=error.headers or {})
        return to_api_error(error).response(request.url.path)
