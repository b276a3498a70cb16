"""Routes of sessions and of the trainings in them."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge_rl.gateway.errors import ApiError
from forge_rl.tinker import requests, wire
from forge_rl.tinker.checkpoints import AdapterRecord, CheckpointStore, now
from forge_rl.tinker.futures import FutureResult, Promises
from forge_rl.tinker.journal import JournalEntry, Kind
from forge_rl.tinker.sessions import Sessions
from forge_rl.tinker.tenants import Tenants
from forge_rl.tinker.tinker_config import TinkerConfig
from forge_rl.tinker.training import BaseModel, Training
from forge_rl.tinker.trainings import Trainings

_SILENT_S = 1800.0
"""Time without a request, which clients send every 10 s, after which a session's adapters make room for others."""


class TrainingRoutes:
    """Answers requests about sessions and their trainings; those that change an adapter are queued in its order."""

    def __init__(
        self,
        config: TinkerConfig,
        base: BaseModel,
        tenants: Tenants,
        promises: Promises,
        store: CheckpointStore,
        sessions: Sessions,
        trainings: Trainings,
    ) -> None:
        self._config = config
        self._base = base
        self._tenants = tenants
        self._promises = promises
        self._store = store
        self._sessions = sessions
        self._trainings = trainings

    async def create_session(self, tenant: str, body: bytes, request: Request) -> Response:
        values = requests.read(requests.CreateSession, body)
        session = self._sessions.create(tenant, _texts(values.user_metadata), values.display_name)
        note = "this server adapts no output head: train_unembed is accepted and has no effect"
        return JSONResponse({"type": "create_session", "session_id": session.session_id, "info_message": note})

    async def heartbeat(self, tenant: str, body: bytes, request: Request) -> Response:
        self._sessions.get(requests.read(requests.SessionId, body).session_id, tenant)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, tenant: str, body: bytes, request: Request) -> Response:
        self._sessions.end(request.path_params["session_id"], tenant)
        return JSONResponse({})

    async def list_sessions(self, tenant: str, body: bytes, request: Request) -> Response:
        return JSONResponse({"sessions": [session.session_id for session in self._sessions.of(tenant)]})

    async def get_session(self, tenant: str, body: bytes, request: Request) -> Response:
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

    async def create_model(self, tenant: str, body: bytes, request: Request) -> Response:
        values = requests.read(requests.CreateModel, body)
        self._base.check_name(values.base_model)
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

    async def load_weights(self, tenant: str, body: bytes, request: Request) -> Response:
        if requests.read(requests.RequestPlace, body).model_id is not None:
            return await self.submit("load_weights", requests.LoadWeights, tenant, body, request)
        values = requests.read(requests.LoadWeights, body)
        if values.session_id is None:
            raise ApiError(400, "neither model_id nor session_id", param="model_id")
        saved, _, _ = self._store.find(values.path, tenant)
        self._base.check_name(values.base_model or self._base.name)
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

    async def get_info(self, tenant: str, body: bytes, request: Request) -> Response:
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

    async def unload(self, tenant: str, body: bytes, request: Request) -> Response:
        model_id = requests.read(requests.ModelId, body).model_id
        self._trainings.end(self._trainings.get(model_id, tenant))
        # The client asks for the result of this request as of any other; it is known already.
        request_id = f"{model_id}:unload"
        answer = json.dumps({"type": "unload_model", "model_id": model_id}).encode()
        self._promises.open(request_id, tenant).keep(FutureResult(body=answer))
        return self._promised(request_id, model_id)

    async def submit_pass(self, tenant: str, body: bytes, request: Request) -> Response:
        # Only the address is read here. Data are checked when the pass is next in its adapter's order, and fail that
        # request.
        with self._tenants.reading(tenant, body):
            address = await asyncio.to_thread(wire.read_address, body)
        training = self._trainings.get(address.model_id, tenant)
        entry = JournalEntry(seq=address.seq_id, kind="pass", body=body)
        with self._trainings.keeping_place(training, address.seq_id):
            return self._promised(self._trainings.submit(training, entry, tokens=address.tokens), training.model_id)

    async def submit(
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

    def _make_room(self, tenant: str) -> None:
        """End sessions whose clients are gone, as long as their adapters leave no room for another one of a tenant."""
        for session in self._sessions.silent_sessions(_SILENT_S):
            is_full = len(self._trainings) >= self._config.max_total_adapters
            if session.tenant == tenant:
                is_full |= len(self._trainings.of(tenant)) >= self._config.max_adapters
            if is_full and self._trainings.of_session(session.session_id):
                self._sessions.end(session.session_id, session.tenant)

    def _promised(self, request_id: str, model_id: str) -> Response:
        return JSONResponse({"request_id": request_id, "model_id": model_id})


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
