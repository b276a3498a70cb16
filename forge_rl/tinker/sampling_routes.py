"""Routes of samplers and of the samples drawn from them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge_rl.errors import ForgeError
from forge_rl.gateway.errors import ApiError
from forge_rl.tinker import requests
from forge_rl.tinker.checkpoints import CheckpointStore
from forge_rl.tinker.futures import Promises
from forge_rl.tinker.sampling import SampleService
from forge_rl.tinker.sessions import Sessions
from forge_rl.tinker.tenants import Tenants
from forge_rl.tinker.tinker_config import TinkerConfig
from forge_rl.tinker.training import BaseModel


class SamplingRoutes:
    """Answers requests about samplers, and draws each request's samples in a task of its own."""

    def __init__(
        self,
        config: TinkerConfig,
        base: BaseModel,
        tenants: Tenants,
        promises: Promises,
        store: CheckpointStore,
        sessions: Sessions,
        samples: SampleService,
    ) -> None:
        self._config = config
        self._base = base
        self._tenants = tenants
        self._promises = promises
        self._store = store
        self._sessions = sessions
        self._samples = samples
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Tasks that draw samples, by id of the request."""

    async def create_sampler(self, tenant: str, body: bytes, request: Request) -> Response:
        values = requests.read(requests.CreateSamplingSession, body)
        self._sessions.get(values.session_id, tenant)
        if values.model_path is not None:
            self._store.find(values.model_path, tenant)
        else:
            self._base.check_name(values.base_model or "")
        sampler_id = self._sessions.open_sampler(values.session_id, values.sampling_session_seq_id, values.model_path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def get_sampler(self, tenant: str, body: bytes, request: Request) -> Response:
        sampler = self._sessions.sampler(request.path_params["sampler_id"], tenant)
        return JSONResponse(
            {"sampler_id": sampler.sampler_id, "base_model": self._base.name, "model_path": sampler.model_path}
        )

    async def sample(self, tenant: str, body: bytes, request: Request) -> Response:
        # In a thread, as a long prompt is a long list of integers to validate.
        with self._tenants.reading(tenant, body):
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
                del self._tasks[request_id]

            self._tasks[request_id] = asyncio.create_task(work())
            # No `finally` of the task, as one that is cancelled before its first step never enters its body.
            self._tasks[request_id].add_done_callback(end)
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": sequences})

    async def cancel(self, tenant: str, body: bytes, request: Request) -> Response:
        request_id = requests.read(requests.Retrieve, body).request_id
        self._promises.get(request_id, tenant)
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()
        return JSONResponse({})

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks that draw samples."""
        return list(self._tasks.values())

    def cancel_session(self, session_id: str) -> None:
        """Cancel the samples of a session that ends."""
        for request_id, task in self._tasks.items():
            if request_id.startswith(f"{session_id}:"):
                task.cancel()
