"""Executes the requests of trainings on a trainer of adapters, and writes and restores their states."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

from forge_rl.engines.adapter_settings import AdamStep, AdapterPass
from forge_rl.errors import ForgeError
from forge_rl.gateway.errors import ApiError
from forge_rl.tinker import requests, wire
from forge_rl.tinker.checkpoints import AdapterCheckpoint, CheckpointStore, SaveSettings
from forge_rl.tinker.futures import FutureResult, Promises
from forge_rl.tinker.journal import JournalEntry
from forge_rl.tinker.losses import TinkerLoss
from forge_rl.tinker.rows import PackedData, check_data
from forge_rl.tinker.sessions import Sessions
from forge_rl.tinker.training import AdapterTrainer, BaseModel, PackedPass, Training

MOST_AHEAD = 4096
"""Maximum requests of an adapter that wait for earlier ones."""
MOST_DATA = 4096
_MOST_UNNAMED = 32
"""Maximum checkpoints of a training without a name: a loop that samples from each of its steps writes thousands."""


class RequestExecutor:
    """Executes requests one at a time; the effect of each depends only on earlier requests of its own adapter."""

    def __init__(
        self,
        trainer: AdapterTrainer,
        base: BaseModel,
        store: CheckpointStore,
        promises: Promises,
        sessions: Sessions,
    ) -> None:
        self._trainer = trainer
        self._base = base
        self._store = store
        self._promises = promises
        self._sessions = sessions

    async def execute(self, training: Training, entry: JournalEntry) -> FutureResult:
        """Execute a request; raises ApiError or ForgeError for its client."""
        match entry.kind:
            case "create":
                return await self._create(training)
            case "pass":
                return await self._pass(training, entry)
            case "optim_step":
                adam = requests.read(requests.OptimStep, entry.body).adam_params
                step = AdamStep(
                    lr=adam.learning_rate,
                    beta1=adam.beta1,
                    beta2=adam.beta2,
                    eps=adam.eps,
                    weight_decay=adam.weight_decay,
                    # To clients, 0 means no clipping; the step reports the norm in any case.
                    max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf"),
                )
                metrics, training.updates = await self._trainer.adapters.step(training.model_id, step)
                training.has_gradient = False
                return _json(metrics={"grad_norm": metrics["grad_norm"], "updates": float(training.updates)})
            case "save_weights" | "save_weights_for_sampler":
                return await self._save(training, entry)
            case "load_weights":
                request = requests.read(requests.LoadWeights, entry.body)
                # The first request of a training that starts from a checkpoint; its adapter does not exist yet.
                if request.model_id is None:
                    await self._create(training)
                _, checkpoint, folder = self._store.find(request.path, training.record.tenant)
                training.updates = await self._trainer.adapters.load(
                    training.model_id, folder, optimizer=request.optimizer
                )
                training.has_gradient, training.snapshot_updates = False, training.updates
                return _json(type="load_weights", path=checkpoint.path, model_id=training.model_id)
            case "refused":
                raise ApiError(400, entry.body.decode())
        raise AssertionError(entry.kind)

    async def packed(self, training: Training, entry: JournalEntry) -> PackedPass:
        """Check and pack a pass; raises ApiError for its client."""
        # It was packed for a joint pass that was not run.
        if training.packed_pass is not None and training.packed_pass.seq == entry.seq:
            return training.packed_pass
        request = await asyncio.to_thread(wire.read_pass, entry.body, most_data=MOST_DATA)
        loss = TinkerLoss.read(request.loss_fn, request.loss_config)
        layout = self._trainer.layout
        most_tokens = min(layout.longest, self._base.max_model_len)
        check_data(request, vocab_size=self._base.vocab_size, most_tokens=most_tokens)
        packed = await asyncio.to_thread(PackedData.pack, request.data, layout)
        adapter_pass = AdapterPass(
            name=training.model_id, minibatch=packed.minibatch, loss=loss, backward=not request.forward_only
        )
        training.packed_pass = PackedPass(seq=entry.seq, adapter_pass=adapter_pass, packed=packed)
        return training.packed_pass

    async def take_snapshot(self, training: Training, seq: int) -> None:
        """Write a training's state to disk, and drop the journal's requests up to `seq`."""
        earlier = training.snapshot
        partial = training.folder / f"snapshot-{seq}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            await self._trainer.adapters.save(training.model_id, partial)
            # The requests up to `seq` leave the journal, so that their results could not be computed again.
            requested = range(max(0, seq - MOST_AHEAD), seq + 1)
            results = self._promises.unsent(training.request_id(past) for past in requested)
            (partial / "results.json").write_text(json.dumps(results))
            # The snapshot counts from here on; a kill before leaves the earlier one and the whole journal.
            partial.rename(training.folder / f"snapshot-{seq}")
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # else each attempt would take more of a full disk
        await training.journal.keep(seq)
        training.snapshot_updates = training.updates
        if earlier is not None:
            shutil.rmtree(earlier[1], ignore_errors=True)

    async def load_snapshot(self, training: Training) -> None:
        """Open a training's adapter with its state on disk."""
        await self._trainer.adapters.open(training.model_id, self._base.settings(training.record))
        assert training.snapshot is not None
        training.updates = await self._trainer.adapters.load(training.model_id, training.snapshot[1], optimizer=True)
        training.has_gradient, training.snapshot_updates = False, training.updates

    async def replay(self, training: Training) -> None:
        """Restore one adapter after a restart of the trainer: its snapshot, and the requests executed since then."""
        snapshot = training.snapshot
        if snapshot is not None:
            await self.load_snapshot(training)
        for entry in training.journal.read():
            # Requests not executed yet are left to the queue, and those before the snapshot are in its weights.
            is_past = entry.seq >= training.expected or (snapshot is not None and entry.seq <= snapshot[0])
            if is_past or entry.seq in training.poison:
                continue
            # Saves change no state of the adapter.
            if entry.kind in ("create", "pass", "optim_step", "load_weights"):
                try:
                    await self.execute(training, entry)
                except (ApiError, ForgeError):
                    # As the first time; or what it needs has gone since, such as a checkpoint.
                    if not self._trainer.alive or self._promises.has_result(training.request_id(entry.seq)):
                        raise

    async def _create(self, training: Training) -> FutureResult:
        settings = self._base.settings(training.record)
        with contextlib.suppress(ForgeError):
            await self._trainer.adapters.drop(training.model_id)  # of an attempt that was cut off
        await self._trainer.adapters.open(training.model_id, settings)
        training.updates = training.snapshot_updates = 0
        training.has_gradient = False
        return _json(type="create_model", model_id=training.model_id)

    async def _pass(self, training: Training, entry: JournalEntry) -> FutureResult:
        packed = await self.packed(training, entry)
        run = packed.adapter_pass
        result = await self._trainer.adapters.run(run.name, run.minibatch, run.loss, backward=run.backward)
        training.has_gradient |= run.backward
        return packed.answer(result)

    async def _save(self, training: Training, entry: JournalEntry) -> FutureResult:
        request = requests.read(requests.SaveWeights, entry.body)
        is_sampler = entry.kind == "save_weights_for_sampler"
        settings = SaveSettings(
            kind="sampler_weights" if is_sampler else "weights",
            # Derived from the request, so that computing it again leads to the same checkpoint.
            name=request.path or f"seq-{entry.seq}",
            seq=entry.seq,
            updates=training.updates,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
            overwrite=request.overwrite,
            is_unnamed=is_sampler and request.path is None,
        )

        async def write(folder: Path) -> None:
            await self._trainer.adapters.save(training.model_id, folder)

        checkpoint: AdapterCheckpoint = await self._store.save(training.record, settings, write)
        answer: dict[str, object] = {"type": entry.kind, "path": checkpoint.path}
        # Without a path, the client wants to sample from these weights at once.
        if settings.is_unnamed:
            seq = request.sampling_session_seq_id or 0
            answer["sampling_session_id"] = self._sessions.open_sampler(training.session_id, seq, checkpoint.path)
            with contextlib.suppress(ApiError, OSError):  # a client has deleted it; or the next save tries again
                await self._delete_unnamed(training)
        return _json(**answer)

    async def _delete_unnamed(self, training: Training) -> None:
        """Delete a training's checkpoints without a name beyond the maximum, those sampled from least recently."""
        checkpoints = await asyncio.to_thread(self._store.checkpoints, training.model_id)
        uses = {path: place for place, path in enumerate(self._sessions.paths(training.session_id))}
        paths = [checkpoint.path for checkpoint in checkpoints if checkpoint.is_unnamed]
        for path in sorted(paths, key=lambda path: uses.get(path, -1))[:-_MOST_UNNAMED]:
            await self._store.delete(path, training.record.tenant)


def _json(**fields: object) -> FutureResult:
    return FutureResult(body=json.dumps(fields).encode())
