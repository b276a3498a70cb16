"""The HTTP server of the Tinker API: its services, its table of routes, and routes about the server itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forge_rl.errors import ForgeError
from forge_rl.gateway import http
from forge_rl.gateway.errors import ApiError, to_api_error
from forge_rl.gateway.guard import Guard, InFlightLimit
from forge_rl.tinker import requests, wire
from forge_rl.tinker.checkpoint_routes import CheckpointRoutes
from forge_rl.tinker.checkpoints import CheckpointStore
from forge_rl.tinker.execution import RequestExecutor
from forge_rl.tinker.futures import POLL_S, Promises
from forge_rl.tinker.sampling import LoadedAdapters, SampleService, SamplingEngines
from forge_rl.tinker.sampling_routes import SamplingRoutes
from forge_rl.tinker.sessions import Sessions
from forge_rl.tinker.tenants import Tenants
from forge_rl.tinker.tinker_config import TinkerConfig
from forge_rl.tinker.training import AdapterTrainer, BaseModel
from forge_rl.tinker.training_routes import TrainingRoutes
from forge_rl.tinker.trainings import Trainings

Handler = Callable[[str, bytes, Request], Awaitable[Response]]
_SAMPLERS = 4
"""Number of samplers that may each have the same number of requests at a time, within the maximum of their key."""
_API = "/api/v1"
_RUN = "training_runs/{model_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"
NOT_HERE: Mapping[str, str] = {
    "create_custom_loss": "custom losses run in the client, on forward's logprobs",
    "copy_weights": "each key has its own checkpoints",
    "save_weights_external": "save_weights writes PEFT's format; its folder is on the server",
    "retrieve_futures": "results are asked for one by one",
    "join_sampling_session": "copies of a sampler count on from a random number",
    "auth/token": "requests carry the key itself",
    "auth/apikey/me": "a key's name is known to the server's owner",
    "audit": "requests are not kept once they are done",
    "billing/usage/events": "usage has the tokens of a key",
    "billing/usage/checkpoints/current": "checkpoints lists the bytes of each",
    "sessions/search": "sessions lists those of a key",
    "sessions/{session_id}/project": "there are no projects",
    "sessions/{session_id}/trace_export": "requests are not traced",
    f"{_CHECKPOINT}/external_weights_urls": "a checkpoint's folder is on the server",
    f"{_CHECKPOINT}/publish": "each key has its own checkpoints",
    f"{_CHECKPOINT}/ttl": "save_weights sets how long a checkpoint stays",
}
"""Routes of the API that the server refuses by name, and why."""


@dataclass(frozen=True, kw_only=True)
class TinkerServices:
    """The services that train and sample for the server."""

    trainer: AdapterTrainer
    engines: SamplingEngines
    max_loaded: int = 16
    """Maximum adapters that the engines hold at a time."""
    max_scored: int = 4096
    """Maximum tokens of a prompt whose logprobs are asked for."""


class TinkerServer:
    """Serves the Tinker API to several tenants, over one base, one trainer and one set of engines.

        async with TinkerServer(config, base, keys, services, out=Path("runs/tinker")) as server:
            print(server.url)

    Args:
        keys: key of each tenant by name.
        out: folder for trainings, checkpoints, sessions and accounts, all of which survive a restart.
        seed: determines samples of requests without a seed.
    """

    def __init__(
        self,
        config: TinkerConfig,
        base: BaseModel,
        keys: Mapping[str, str],
        services: TinkerServices,
        *,
        out: Path,
        seed: int = 0,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._config = config
        self._base = base
        self._tenants = Tenants(keys, out / "usage.json", most_in_flight=config.max_tokens_in_flight)
        self._promises = Promises()
        store = CheckpointStore(out, max_checkpoints=config.max_checkpoints)
        sessions = Sessions(out / "sessions", max_sessions=config.max_sessions, on_end=self._end_session)
        executor = RequestExecutor(services.trainer, base, store, self._promises, sessions)
        self._trainings = Trainings(services.trainer, executor, store, self._tenants, self._promises, config)
        loaded = LoadedAdapters(services.engines, max_loaded=services.max_loaded)
        samples = SampleService(services.engines, loaded, store, seed=seed, max_scored=services.max_scored)
        self._training_routes = TrainingRoutes(
            config, base, self._tenants, self._promises, store, sessions, self._trainings
        )
        self._sampling_routes = SamplingRoutes(config, base, self._tenants, self._promises, store, sessions, samples)
        self._checkpoint_routes = CheckpointRoutes(base, store)
        self._http: http.HttpServer | None = None
        self._work: asyncio.Task[None] | None = None
        self._accounting: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL for clients."""
        assert self._http is not None, "start comes first"
        return self._http.url

    async def start(self) -> None:
        """Restore the trainings of an earlier server, and start to listen.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
            CheckpointError: files of an earlier server cannot be read.
        """
        http.check_address(self._config.http)
        await self._trainings.restore()
        self._work = asyncio.create_task(self._trainings.work())
        self._accounting = asyncio.create_task(self._tenants.keep_written())
        self._http = http.HttpServer(self._app(), self._config.http)

    async def failed(self) -> BaseException:
        """Wait until the trainer has failed for good; returns why."""
        assert self._work is not None, "start comes first"
        await asyncio.wait((self._work,))
        return self._work.exception() or asyncio.CancelledError()

    async def stop(self) -> None:
        """Stop listening and working; unfinished requests resume at the next start."""
        work = [self._work] if self._work else []
        for task in (*self._sampling_routes.tasks, *work):
            task.cancel()
        if self._http is not None:
            await self._http.stop()
        await asyncio.gather(*self._sampling_routes.tasks, *work, return_exceptions=True)
        self._tenants.close()
        if self._accounting is not None:
            await self._accounting

    async def __aenter__(self) -> TinkerServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def _app(self) -> Guard:
        training, sampling, checkpoint = self._training_routes, self._sampling_routes, self._checkpoint_routes
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._client_config,
            "telemetry": self._telemetry,
            "create_session": training.create_session,
            "session_heartbeat": training.heartbeat,
            "sessions/{session_id}/finish": training.finish_session,
            "create_model": training.create_model,
            "load_weights": training.load_weights,
            "get_info": training.get_info,
            "unload_model": training.unload,
            "forward_backward": training.submit_pass,
            "optim_step": partial(training.submit, "optim_step", requests.OptimStep),
            "save_weights": partial(training.submit, "save_weights", requests.SaveWeights),
            "save_weights_for_sampler": partial(training.submit, "save_weights_for_sampler", requests.SaveWeights),
            "create_sampling_session": sampling.create_sampler,
            "asample": sampling.sample,
            "cancel_future": sampling.cancel,
            "retrieve_future": self._retrieve,
            "weights_info": checkpoint.get_weights_info,
        }
        gets: dict[str, Handler] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": sampling.get_sampler,
            "sessions": training.list_sessions,
            "sessions/{session_id}": training.get_session,
            "training_runs": checkpoint.list_runs,
            _RUN: checkpoint.get_run,
            f"{_RUN}/checkpoints": checkpoint.list_checkpoints,
            "checkpoints": checkpoint.list_all_checkpoints,
            "usage": self._usage,
        }
        refused: dict[str, Handler] = {path: partial(self._refuse, path) for path in NOT_HERE}
        every = ["GET", "POST", "PUT", "DELETE"]
        app = Starlette(
            routes=[
                # First, as `sessions/search` would otherwise match `sessions/{session_id}`.
                *(Route(f"{_API}/{path}", self._endpoint(work), methods=every) for path, work in refused.items()),
                Route(f"{_API}/healthz", self._health),
                *(Route(f"{_API}/{path}", self._endpoint(work), methods=["POST"]) for path, work in posts.items()),
                *(Route(f"{_API}/{path}", self._endpoint(work), methods=["GET"]) for path, work in gets.items()),
                Route(f"{_API}/{_CHECKPOINT}", self._endpoint(checkpoint.delete_checkpoint), methods=["DELETE"]),
            ],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _failed),
        )
        app.router.redirect_slashes = False
        return Guard(
            app,
            self._config.http,
            caller=self._tenants.caller,
            in_flight=InFlightLimit(self._config.max_concurrent, "requests"),
            open_paths=frozenset({f"{_API}/healthz"}),
            content_types=frozenset({"application/json", wire.PROTOBUF}),
        )

    def _endpoint(self, work: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await work(request.state.caller, await request.body(), request)
            except ForgeError as error:
                raise to_api_error(error) from error
            except OSError as error:
                raise ApiError(507, f"the server cannot write: {error.strerror or error}") from error

        return endpoint

    async def _health(self, request: Request) -> Response:
        # The worker ends early only if the trainer has failed for good.
        works = self._work is not None and not self._work.done()
        return JSONResponse({"status": "ok" if works else "unavailable"}, 200 if works else 503)

    async def _client_config(self, tenant: str, body: bytes, request: Request) -> Response:
        """Tell the client how to use this server: the client's defaults, without features that are missing here."""
        settings = {
            "pjwt_auth_enabled": False,
            "proto_compress_fwdbwd": False,
            "sample_cancel_enabled": True,
            # The client would send the first part of a large pass last; the others may fill what its key has in flight
            # and wait for it.
            "parallel_fwdbwd_chunks": False,
            # Each sample waits in a request of its own; after a 429, the client asks for its result up to 30 s later.
            "sample_max_concurrent_requests": max(1, self._config.max_concurrent // _SAMPLERS),
        }
        return JSONResponse(settings)

    async def _telemetry(self, tenant: str, body: bytes, request: Request) -> Response:
        return JSONResponse({"status": "accepted"})  # and dropped

    async def _capabilities(self, tenant: str, body: bytes, request: Request) -> Response:
        model = {
            "model_name": self._base.name,
            "max_context_length": self._base.max_model_len,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def _refuse(self, path: str, tenant: str, body: bytes, request: Request) -> Response:
        raise ApiError(404, f"{path} is not supported here: {NOT_HERE[path]}", code="not_supported")

    async def _retrieve(self, tenant: str, body: bytes, request: Request) -> Response:
        request_id = requests.read(requests.Retrieve, body).request_id
        promise = self._promises.get(request_id, tenant)
        try:
            async with asyncio.timeout(POLL_S):
                await promise.done.wait()
        except TimeoutError:
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        # A client that gave up while it waited asks again, also after a restart. One that loses the response can ask
        # again until the promise is forgotten or the server restarts.
        promise.is_sent |= not await request.is_disconnected()
        kind = wire.PROTOBUF if promise.answer.is_protobuf else "application/json"
        return Response(promise.answer.body, media_type=kind)

    async def _usage(self, tenant: str, body: bytes, request: Request) -> Response:
        return JSONResponse({"tenant": tenant, "tokens": self._tenants.usage(tenant)})

    def _end_session(self, session_id: str) -> None:
        """End the trainings and samples of a session that ends."""
        for training in self._trainings.of_session(session_id):
            self._trainings.end(training)
        self._sampling_routes.cancel_session(session_id)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        reason = "not supported here" if error.status_code == 404 else "the wrong method"
        error = ApiError(error.status_code, f"{request.method} {request.url.path[:200]} is {reason}")
    return to_api_error(error).response(request.url.path)
