"""Routes of the training runs and checkpoints on disk."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forge_rl.gateway.errors import ApiError
from forge_rl.tinker import requests
from forge_rl.tinker.checkpoints import AdapterRecord, CheckpointStore
from forge_rl.tinker.training import BaseModel


class CheckpointRoutes:
    """Answers requests about runs and checkpoints, which outlive their trainings."""

    def __init__(self, base: BaseModel, store: CheckpointStore) -> None:
        self._base = base
        self._store = store

    async def list_runs(self, tenant: str, body: bytes, request: Request) -> Response:
        def cards_of(tenant: str) -> list[dict[str, Any]]:
            return [self._run_card(record) for record in reversed(self._store.records(tenant))]

        cards = await asyncio.to_thread(cards_of, tenant)  # reads up to a thousand files
        page, cursor = _page(cards, request)
        return JSONResponse({"training_runs": page, "cursor": cursor})

    async def get_run(self, tenant: str, body: bytes, request: Request) -> Response:
        record = self._store.record(request.path_params["model_id"], tenant)
        return JSONResponse(await asyncio.to_thread(self._run_card, record))

    async def list_checkpoints(self, tenant: str, body: bytes, request: Request) -> Response:
        record = self._store.record(request.path_params["model_id"], tenant)
        checkpoints = await asyncio.to_thread(self._store.checkpoints, record.model_id)
        return JSONResponse({"checkpoints": [checkpoint.card() for checkpoint in checkpoints]})

    async def list_all_checkpoints(self, tenant: str, body: bytes, request: Request) -> Response:
        checkpoints = await asyncio.to_thread(lambda: list(self._store.all_of(tenant)))
        checkpoints.sort(key=lambda checkpoint: checkpoint.time, reverse=True)
        page, cursor = _page([checkpoint.card() for checkpoint in checkpoints], request)
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def get_weights_info(self, tenant: str, body: bytes, request: Request) -> Response:
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

    async def delete_checkpoint(self, tenant: str, body: bytes, request: Request) -> Response:
        place = request.path_params
        await self._store.delete(f"tinker://{place['model_id']}/{place['kind']}/{place['name']}", tenant)
        return JSONResponse({})

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
