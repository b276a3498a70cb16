"""The HTTP server of the Tinker API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
from forge_rl.tinker.checkpoints import AdapterRecord, CheckpointStore, now
from forge_rl.tinker.execution import RequestExecutor
from forge_rl.tinker.futures import POLL_S, FutureResult, Promises
from forge_rl.tinker.journal import JournalEntry, Kind
from forge_rl.tinker.sampling import LoadedAdapters, SampleService, SamplingEngines
from forge_rl.tinker.sessions import Sessions
from forge_rl.tinker.tenants import Tenants
from forge_rl.tinker.tinker_config import TinkerConfig
from forge_rl.tinker.training import AdapterTrainer, BaseModel, Training
from forge_rl.tinker.trainings import Trainings

Handler = Callable[[str, bytes, Request], Awaitable[Response]]
_SAMPLERS = 4
"""Number of samplers that may each have the same number of requests at a time, within the maximum of their key."""
_SILENT_S = 1800.0
"""Time without a request, which clients send every 10 s, after which a session's adapters make room for others."""
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
        self._store = CheckpointStore(out, max_checkpoints=config.max_checkpoints)
        self._sessions = Sessions(out / "sessions", max_sessions=config.max_sessions, on_end=self._end_session)
        executor = RequestExecutor(services.trainer, base, self._store, self._promises, self._sessions)
        self._trainings = Trainings(services.trainer, executor, self._store, self._tenants, self._promises, config)
        loaded = LoadedAdapters(services.engines, max_loaded=services.max_loaded)
        self._samples = SampleService(services.engines, loaded, self._store, seed=seed, max_scored=services.max_scored)
        self._sampling: dict[str, asyncio.Task[None]] = {}
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
        for task in (*self._sampling.values(), *([self._work] if self._work else [])):
            task.cancel()
        if self._http is not None:
            await self._http.stop()
        await asyncio.gather(*self._sampling.values(), *([self._work] if self._work else []), return_exceptions=True)
        self._tenants.close()
        if self._accounting is not None:
            await self._accounting

    async def __aenter__(self) -> TinkerServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def _app(self) -> Guard:
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._client_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish_session,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "forward_backward": self._pass,
            "optim_step": partial(self._submit, "optim_step", requests.OptimStep),
            "save_weights": partial(self._submit, "save_weights", requests.SaveWeights),
            "save_weights_for_sampler": partial(self._submit, "save_weights_for_sampler", requests.SaveWeights),
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
        }
        gets: dict[str, Handler] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._get_sampler,
            "sessions": self._list_sessions,
            "sessions/{session_id}": self._get_session,
            "training_runs": self._list_runs,
            _RUN: self._get_run,
            f"{_RUN}/checkpoints": self._list_checkpoints,
            "checkpoints": self._list_all_checkpoints,
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
                Route(f"{_API}/{_CHECKPOINT}", self._endpoint(self._delete_checkpoint), methods=["DELETE"]),
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

    # Sessions.

    async def _create_session(self, tenant: str, body: bytes, request: Request) -> Response:
        values = requests.read(requests.CreateSession, body)
        session = self._sessions.create(tenant, _texts(values.user_metadata), values.display_name)
        note = "this server adapts no output head: train_unembed is accepted and has no effect"
        return JSONResponse({"type": "create_session", "session_id": session.session_id, "info_message": note})

    async def _heartbeat(self, tenant: str, body: bytes, request: Request) -> Response:
        self._sessions.get(requests.read(requests.SessionId, body).session_id, tenant)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, tenant: str, body: bytes, request: Request) -> Response:
        session_id = self._sessions.get(request.path_params["session_id"], tenant).session_id
        self._end_session(session_id)  # first: a training without its session could not be ended with it
        self._sessions.end(session_id, tenant)
        return JSONResponse({})

    def _end_session(self, session_id: str) -> None:
        for training in self._trainings.of_session(session_id):
            self._trainings.end(training)
        for request_id, task in self._sampling.items():
            if request_id.startswith(f"{session_id}:"):
                task.cancel()

    def _make_room(self, tenant: str) -> None:
        """End sessions whose clients are gone, as long as their adapters leave no room for another one of a tenant."""
        for session in self._sessions.silent_sessions(_SILENT_S):
            is_full = len(self._trainings) >= self._config.max_total_adapters
            if session.tenant == tenant:
                is_full |= len(self._trainings.of(tenant)) >= self._config.max_adapters
            if is_full and self._trainings.of_session(session.session_id):
                self._end_session(session.session_id)
                self._sessions.end(session.session_id, session.tenant)

    async def _list_sessions(self, tenant: str, body: bytes, request: Request) -> Response:
        return JSONResponse({"sessions": [session.session_id for session in self._sessions.of(tenant)]})

    async def _get_session(self, tenant: str, body: bytes, request: Request) -> Response:
        session = self._sessions.get(request.path_params["session_id"], tenant)
        runs = [training.model_id for training in self._trainings.of_session(session.session_id)]
        return JSONResponse(
            {
                "training_run_ids": runs,
                "sampler_ids": list(session.samplers),
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    # Trainings.

    async def _create_model(self, tenant: str, body: bytes, request: Request) -> Response:
        values = requests.read(requests.CreateModel, body)
        self._check_base(values.base_model)
        lora = values.lora_config
        if lora.rank > self._base.lora.rank:
            raise ApiError(
                400, f"rank {lora.rank}; the largest here is {self._base.lora.rank}", param="lora_config.rank"
            )
        record = AdapterRecord(
            model_id=f"{values.session_id}:train:{values.model_seq_id}",
            tenant=tenant,
            rank=lora.rank,
            # Drawn once and kept in the record: a replay after a failure starts from the same factors.
            seed=secrets.randbits(62) if lora.seed is None else lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            created=now(),
            user_metadata=_texts(values.user_metadata),
        )
        # Refuses a training that would adapt nothing, before it exists.
        self._base.settings(record)
        return self._open(record, values.session_id, JournalEntry(seq=0, kind="create", body=body))

    async def _load_weights(self, tenant: str, body: bytes, request: Request) -> Response:
        if requests.read(requests.RequestPlace, body).model_id is not None:
            return await self._submit("load_weights", requests.LoadWeights, tenant, body, request)
        values = requests.read(requests.LoadWeights, body)
        if values.session_id is None:
            raise ApiError(400, "neither model_id nor session_id", param="model_id")
        saved, _, _ = self._store.find(values.path, tenant)
        self._check_base(values.base_model or self._base.name)
        record = AdapterRecord(
            model_id=f"{values.session_id}:train:{_seq(values.model_seq_id)}",
            tenant=tenant,
            rank=saved.rank,
            seed=saved.seed,
            train_attn=saved.train_attn,
            train_mlp=saved.train_mlp,
            created=now(),
            user_metadata=_texts(values.user_metadata),
        )
        return self._open(record, values.session_id, JournalEntry(seq=0, kind="load_weights", body=body))

    def _open(self, record: AdapterRecord, session_id: str, entry: JournalEntry) -> Response:
        """Accept the first request of a training; when a client sends it again, it belongs to the same training."""
        self._sessions.get(session_id, record.tenant)
        current = self._trainings.of(record.tenant)
        training = next((training for training in current if training.model_id == record.model_id), None)
        if training is None:
            if self._store.holds(record.model_id):  # its checkpoints belong to the ended one
                raise ApiError(410, f"the training {record.model_id} has ended; create another one", code="ended")
            self._make_room(record.tenant)
            current = self._trainings.of(record.tenant)
            if len(current) >= self._config.max_adapters:
                raise ApiError(
                    400,
                    f"this key trains {len(current)} adapters, the most it may; finish a session, or unload a model",
                    code="too_many_adapters",
                )
            if len(self._trainings) >= self._config.max_total_adapters:
                raise ApiError(
                    429,
                    f"all keys together train {len(self._trainings)} adapters, the most that fit; try again when a "
                    "session has finished, or ask the server's owner to raise --max-total-adapters",
                    code="too_many_adapters",
                )
            training = self._trainings.add(record, session_id)
        return self._promised(self._trainings.submit(training, entry), record.model_id)

    async def _get_info(self, tenant: str, body: bytes, request: Request) -> Response:
        model_id = requests.read(requests.ModelId, body).model_id
        record = self._store.record(model_id, tenant)
        data = {"arch": None, "model_name": self._base.name, "tokenizer_id": self._base.tokenizer_id}
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model_id,
                "model_data": data,
                "is_lora": True,
                "lora_rank": record.rank,
                "model_name": self._base.name,
            }
        )

    async def _unload(self, tenant: str, body: bytes, request: Request) -> Response:
        model_id = requests.read(requests.ModelId, body).model_id
        self._trainings.end(self._trainings.get(model_id, tenant))
        # The client asks for the result of this request as of any other; it is known already.
        request_id = f"{model_id}:unload"
        answer = json.dumps({"type": "unload_model", "model_id": model_id}).encode()
        self._promises.open(request_id, tenant).keep(FutureResult(body=answer))
        return self._promised(request_id, model_id)

    async def _pass(self, tenant: str, body: bytes, request: Request) -> Response:
        # Only the address is read here. Data are checked when the pass is next in its adapter's order, and fail that
        # request.
        with self._reading(tenant, body):
            address = await asyncio.to_thread(wire.read_address, body)
        training = self._trainings.get(address.model_id, tenant)
        entry = JournalEntry(seq=address.seq_id, kind="pass", body=body)
        with self._trainings.keeping_place(training, address.seq_id):
            return self._promised(self._trainings.submit(training, entry, tokens=address.tokens), training.model_id)

    async def _submit(
        self,
        kind: Kind,
        form: type[requests.OptimStep] | type[requests.SaveWeights] | type[requests.LoadWeights],
        tenant: str,
        body: bytes,
        request: Request,
    ) -> Response:
        place = requests.read(requests.RequestPlace, body)
        if place.model_id is None:
            raise ApiError(400, "missing parameter: model_id", param="model_id", code="missing_required_parameter")
        training: Training = self._trainings.get(place.model_id, tenant)
        entry = JournalEntry(seq=_seq(place.seq_id), kind=kind, body=body)
        with self._trainings.keeping_place(training, entry.seq):
            requests.read(form, body)
            return self._promised(self._trainings.submit(training, entry), training.model_id)

    # Samples.

    async def _create_sampler(self, tenant: str, body: bytes, request: Request) -> Response:
        values = requests.read(requests.CreateSamplingSession, body)
        self._sessions.get(values.session_id, tenant)
        if values.model_path is not None:
            self._store.find(values.model_path, tenant)
        else:
            self._check_base(values.base_model or "")
        sampler_id = self._sessions.open_sampler(values.session_id, values.sampling_session_seq_id, values.model_path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _get_sampler(self, tenant: str, body: bytes, request: Request) -> Response:
        sampler = self._sessions.sampler(request.path_params["sampler_id"], tenant)
        return JSONResponse(
            {"sampler_id": sampler.sampler_id, "base_model": self._base.name, "model_path": sampler.model_path}
        )

    async def _sample(self, tenant: str, body: bytes, request: Request) -> Response:
        # In a thread, as a long prompt is a long list of integers to validate.
        with self._reading(tenant, body):
            values = await asyncio.to_thread(requests.read, requests.SampleRequest, body)
        if values.sampling_session_id is None or values.seq_id is None:
            raise ApiError(400, "no sampling_session_id and seq_id", param="sampling_session_id")
        if values.num_samples > self._config.max_samples:
            raise ApiError(
                400, f"{values.num_samples} samples; at most {self._config.max_samples}", param="num_samples"
            )
        sampler = self._sessions.sampler(values.sampling_session_id, tenant)
        request_id = f"{values.sampling_session_id}:{values.seq_id}"
        sequences = [f"{request_id}:{index}" for index in range(values.num_samples)]
        if request_id not in self._promises:
            admission = self._tenants.in_flight(tenant, tokens=self._samples.tokens_of(values), body_bytes=len(body))
            # Entered here, so that a refusal is this response, and left when the task ends.
            admission.__enter__()
            promise = self._promises.open(request_id, tenant)

            async def work() -> None:
                try:
                    result, counts = await self._samples.sample(values, sampler, tenant)
                    self._tenants.count(tenant, **counts)
                    promise.keep(result)
                except Exception as error:
                    promise.fail(error)
                    if not isinstance(error, ApiError | ForgeError):
                        raise

            def end(task: asyncio.Task[None]) -> None:
                if task.cancelled():
                    promise.fail(ApiError(499, "the request was cancelled"))
                admission.__exit__(None, None, None)
                del self._sampling[request_id]

            self._sampling[request_id] = asyncio.create_task(work())
            # No `finally` of the task, as one that is cancelled before its first step never enters its body.
            self._sampling[request_id].add_done_callback(end)
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": sequences})

    async def _cancel(self, tenant: str, body: bytes, request: Request) -> Response:
        request_id = requests.read(requests.Retrieve, body).request_id
        self._promises.get(request_id, tenant)
        if (task := self._sampling.get(request_id)) is not None:
            task.cancel()
        return JSONResponse({})

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

    # What is on disk.

    async def _list_runs(self, tenant: str, body: bytes, request: Request) -> Response:
        def cards_of(tenant: str) -> list[dict[str, Any]]:
            return [self._run_card(record) for record in reversed(self._store.records(tenant))]

        cards = await asyncio.to_thread(cards_of, tenant)  # reads up to a thousand files
        page, cursor = _page(cards, request)
        return JSONResponse({"training_runs": page, "cursor": cursor})

    async def _get_run(self, tenant: str, body: bytes, request: Request) -> Response:
        record = self._store.record(request.path_params["model_id"], tenant)
        return JSONResponse(await asyncio.to_thread(self._run_card, record))

    def _run_card(self, record: AdapterRecord) -> dict[str, Any]:
        checkpoints = self._store.checkpoints(record.model_id)
        last = {kind: [c.card() for c in checkpoints if c.kind == kind][-1:] for kind in ("weights", "sampler_weights")}
        return {
            "training_run_id": record.model_id,
            "base_model": self._base.name,
            "model_owner": record.tenant,
            "is_lora": True,
            "lora_rank": record.rank,
            "last_request_time": checkpoints[-1].time if checkpoints else record.created,
            "last_checkpoint": next(iter(last["weights"]), None),
            "last_sampler_checkpoint": next(iter(last["sampler_weights"]), None),
            "user_metadata": record.user_metadata,
        }

    async def _list_checkpoints(self, tenant: str, body: bytes, request: Request) -> Response:
        record = self._store.record(request.path_params["model_id"], tenant)
        checkpoints = await asyncio.to_thread(self._store.checkpoints, record.model_id)
        return JSONResponse({"checkpoints": [checkpoint.card() for checkpoint in checkpoints]})

    async def _weights_info(self, tenant: str, body: bytes, request: Request) -> Response:
        record, _, _ = self._store.find(requests.read(requests.WeightsInfo, body).tinker_path, tenant)
        return JSONResponse(
            {
                "base_model": self._base.name,
                "is_lora": True,
                "lora_rank": record.rank,
                "train_unembed": False,
                "train_mlp": record.train_mlp,
                "train_attn": record.train_attn,
            }
        )

    async def _list_all_checkpoints(self, tenant: str, body: bytes, request: Request) -> Response:
        checkpoints = await asyncio.to_thread(lambda: list(self._store.all_of(tenant)))
        checkpoints.sort(key=lambda checkpoint: checkpoint.time, reverse=True)
        page, cursor = _page([checkpoint.card() for checkpoint in checkpoints], request)
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def _delete_checkpoint(self, tenant: str, body: bytes, request: Request) -> Response:
        place = request.path_params
        await self._store.delete(f"tinker://{place['model_id']}/{place['kind']}/{place['name']}", tenant)
        return JSONResponse({})

    async def _usage(self, tenant: str, body: bytes, request: Request) -> Response:
        return JSONResponse({"tenant": tenant, "tokens": self._tenants.usage(tenant)})

    def _reading(self, tenant: str, body: bytes) -> contextlib.AbstractContextManager[None]:
        """Count a body as in flight while a thread reads it, as messages take many times the memory of their bytes."""
        return self._tenants.in_flight(tenant, tokens=0, body_bytes=len(body))

    def _check_base(self, name: str) -> None:
        if name != self._base.name:
            raise ApiError(400, f"the base model {name[:100]!r} is not here; {self._base.name} is", param="base_model")

    def _promised(self, request_id: str, model_id: str) -> Response:
        return JSONResponse({"request_id": request_id, "model_id": model_id})


def _page(cards: list[dict[str, Any]], request: Request) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the page of a listing that a request asks for, and its cursor."""
    values = []
    for name, default in (("offset", 0), ("limit", 20)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or len(text) > 9:
            raise ApiError(400, f"{name} is {text[:40]!r}", param=name)
        values.append(int(text))
    offset, limit = values[0], min(values[1], 1000)
    return cards[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(cards)}


def _seq(value: int | None) -> int:
    if value is None:
        raise ApiError(400, "the request has no place among its adapter's requests", param="seq_id")
    return value


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return metadata as the API lists it, bounded."""
    if metadata is None:
        return None
    texts = {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}
    if len(json.dumps(texts)) > 1 << 14:
        raise ApiError(400, "user_metadata is longer than 16384 letters", param="user_metadata")
    return texts


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        reason = "not supported here" if error.status_code == 404 else "the wrong method"
        error = ApiError(error.status_code, f"{request.method} {request.url.path[:200]} is {reason}")
    return to_api_error(error).response(request.url.path)
