"""Trainings of all tenants on one trainer: each client's requests run in order, one at a time, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import warnings
from collections import deque
from collections.abc import Iterator

from forge_rl.errors import CheckpointError, ForgeError, ModelError, PoisonError, ReplicaError, ServiceError
from forge_rl.gateway.errors import ApiError, to_api_error
from forge_rl.system.folders import is_there
from forge_rl.tinker.checkpoints import AdapterRecord, CheckpointStore
from forge_rl.tinker.execution import MOST_AHEAD, RequestExecutor
from forge_rl.tinker.futures import Promise, Promises
from forge_rl.tinker.journal import JournalEntry
from forge_rl.tinker.tenants import Tenants
from forge_rl.tinker.tinker_config import TinkerConfig
from forge_rl.tinker.training import AdapterTrainer, PackedPass, Training

_MAX_ATTEMPTS = 2
"""Times that a request may end the trainer before it fails."""
_JOURNAL_BYTES = 64 << 20
"""Size of an adapter's journal from which its state is written to disk as soon as it has no gradient."""
_MOST_JOURNAL_BYTES = 1 << 30


class Trainings:
    """Executes the requests of all adapters one at a time, taking turns between adapters that have any.

        trainings = Trainings(trainer, executor, store, tenants, promises, TinkerConfig())
        await trainings.restore()
        request_id = trainings.submit(training, JournalEntry(seq=1, kind="optim_step", body=body))

    The effect of a request depends only on earlier requests of its own adapter. A request is on disk before its client
    gets an id for it; if the trainer or this process dies, each adapter's last state is loaded, and later requests are
    computed again.
    """

    def __init__(
        self,
        trainer: AdapterTrainer,
        executor: RequestExecutor,
        store: CheckpointStore,
        tenants: Tenants,
        promises: Promises,
        config: TinkerConfig,
    ) -> None:
        self._trainer = trainer
        self._executor = executor
        self._store = store
        self._tenants = tenants
        self._promises = promises
        self._snapshot_updates, self._mix_rows = config.snapshot_updates, config.mix_rows
        self._trainings: dict[str, Training] = {}
        self._ready: deque[Training] = deque()
        self._wake = asyncio.Event()
        self._dropped: list[Training] = []

    def __len__(self) -> int:
        return len(self._trainings)

    def of(self, tenant: str) -> list[Training]:
        """Return a tenant's trainings."""
        return [training for training in self._trainings.values() if training.record.tenant == tenant]

    def of_session(self, session_id: str) -> list[Training]:
        """Return a session's trainings."""
        return [training for training in self._trainings.values() if training.session_id == session_id]

    def get(self, model_id: str, tenant: str) -> Training:
        """Return a tenant's training.

        Raises:
            ApiError: there is none, or none any more.
        """
        training = self._trainings.get(model_id)
        if training is None or training.record.tenant != tenant:
            raise ApiError(404, f"there is no adapter {model_id[:100]!r} in training", code="not_found")
        return training

    def add(self, record: AdapterRecord, session_id: str) -> Training:
        """Register a new training, whose first request creates its adapter."""
        training = Training(record, session_id, self._store.folder(record.model_id))
        training.folder.mkdir(exist_ok=True)
        (training.folder / "session").write_text(session_id)
        self._store.add(record)  # last: a record without a session is that of a training that has ended
        self._trainings[record.model_id] = training
        return training

    async def restore(self) -> None:
        """Restore the trainings of an earlier process, and queue their unfinished requests.

        One whose files cannot be read stays on disk untouched, so that only its tenant is affected.

        Raises:
            ConfigError: this trainer takes no adapter of a training's rank, scale or targets.
            ServiceError: the trainer died.
        """
        for record in self._store.records():
            folder = self._store.folder(record.model_id)
            try:
                if not is_there(folder / "session"):
                    self._forget(record.model_id)  # it has ended
                # Without its key it takes no memory, and goes on if the key comes back.
                elif record.tenant in self._tenants:
                    await self._take_up(Training(record, (folder / "session").read_text(), folder))
            except (CheckpointError, ModelError, OSError, ValueError) as error:
                warnings.warn(f"training {record.model_id} of {record.tenant} is left out: {error}", stacklevel=2)
                with contextlib.suppress(ForgeError):
                    await self._trainer.adapters.drop(record.model_id)

    async def _take_up(self, training: Training) -> None:
        """Restore one training; it is not registered if its files cannot be read."""
        folder = training.folder
        if (poison := folder / "poison.json").is_file():
            training.poison = set(json.loads(poison.read_text()))
        # Snapshots and checkpoints that a kill cut off.
        for partial in (*folder.glob("*.partial"), *folder.glob("*/.*.partial")):
            # A small file that is written whole has such a name, too.
            if partial.is_dir():
                shutil.rmtree(partial)
            else:
                partial.unlink()
        entries = training.journal.read()
        results: dict[str, tuple[bool, str]] = {}
        if training.snapshot is not None:
            results = json.loads((training.snapshot[1] / "results.json").read_text())
            await self._executor.load_snapshot(training)
            # The snapshot includes the effect of the request that it is named for.
            training.expected = training.snapshot[0] + 1
        self._trainings[training.model_id] = training
        self._promises.take_up(results, training.record.tenant)
        for entry in entries:
            if entry.seq >= training.expected:
                self._wait(training, entry)

    def submit(self, training: Training, entry: JournalEntry, *, tokens: int = 0) -> str:
        """Accept a request; one with a seq that was accepted already is the same request, sent again.

        Args:
            tokens: number of tokens of a pass.

        Returns:
            The request's id.

        Raises:
            ApiError: its tenant has too many tokens in flight, or it is too far ahead of the others.
        """
        request_id = training.request_id(entry.seq)
        if entry.seq < training.expected or entry.seq in training.waiting:
            return request_id
        if entry.seq > training.expected + MOST_AHEAD:
            raise ApiError(400, f"seq_id {entry.seq} is too far past {training.expected}", param="seq_id")
        # Past the limit for passes, there is room for the optim_step after which the journal is cut.
        if training.journal.size > (_MOST_JOURNAL_BYTES if entry.kind == "pass" else 2 * _MOST_JOURNAL_BYTES):
            raise ApiError(400, "too many passes without optim_step", code="too_many_passes")
        with contextlib.ExitStack() as stack:
            tenant, size = training.record.tenant, len(entry.body)
            stack.enter_context(self._tenants.in_flight(tenant, tokens=tokens, body_bytes=size))
            training.journal.append(entry)
            # In flight until the request is settled; if the journal cannot be written, the stack has released it.
            training.admitted[entry.seq] = stack.pop_all()
        self._wait(training, entry)
        return request_id

    @contextlib.contextmanager
    def keeping_place(self, training: Training, seq: int) -> Iterator[None]:
        """Give a request that the body refuses its place among its training's requests, where it fails.

        Its client continues with the next number, which would otherwise wait for this one forever. A request refused
        with status 429 is sent again.
        """
        try:
            yield
        except ApiError as error:
            is_new = training.expected <= seq <= training.expected + MOST_AHEAD and seq not in training.waiting
            # A client that is refused on and on must not fill the disk.
            if is_new and error.status != 429 and training.journal.size <= 2 * _MOST_JOURNAL_BYTES:
                entry = JournalEntry(seq=seq, kind="refused", body=error.message.encode(errors="replace"))
                training.journal.append(entry)
                self._wait(training, entry)
            raise

    def end(self, training: Training, cause: ApiError | None = None) -> None:
        """End a training; its checkpoints stay.

        Args:
            cause: error for clients that wait for its requests; by default, that it was unloaded.
        """
        if self._trainings.pop(training.model_id, None) is None:
            return
        with contextlib.suppress(OSError):  # at worst, it is restored at the next start
            (training.folder / "session").unlink()
        for stack in training.admitted.values():
            stack.close()
        for seq in training.waiting:
            with contextlib.suppress(ApiError):
                promise = self._promises.get(training.request_id(seq), training.record.tenant)
                promise.fail(cause or ApiError(410, "its adapter was unloaded"))
        training.waiting.clear()
        self._dropped.append(training)
        self._wake.set()

    async def work(self) -> None:
        """Execute requests until cancelled.

        Raises:
            ForgeError: the trainer has failed for good.
        """
        while True:
            # Before the look for work, so that a request that arrives after it wakes the loop.
            self._wake.clear()
            await self._drop_ended()
            training = next((training for training in self._ready if training.expected in training.waiting), None)
            if training is None:
                # All of them lack their next request; `_wait` adds them again.
                self._ready.clear()
                await self._wake.wait()
                continue
            self._ready.remove(training)
            self._ready.append(training)  # behind the others
            if not (self._mix_rows and await self._run_together(training)):
                await self._step(training)

    def _wait(self, training: Training, entry: JournalEntry) -> None:
        training.waiting[entry.seq] = entry
        self._promises.open(training.request_id(entry.seq), training.record.tenant)
        if training not in self._ready:
            self._ready.append(training)
        self._wake.set()

    async def _drop_ended(self) -> None:
        while self._dropped:
            training = self._dropped.pop()
            with contextlib.suppress(ForgeError):  # its adapter may never have been opened, or its trainer is dead
                await self._trainer.adapters.drop(training.model_id)
            self._tenants.forget_passes(training.model_id)
            self._forget(training.model_id)

    def _forget(self, model_id: str) -> None:
        """Remove the files that only a running training needs, or the whole training if it has no checkpoint."""
        folder = self._store.folder(model_id)
        for path in folder.glob("snapshot-*"):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # at worst, it stays until the next start
            (folder / "journal").unlink()
        self._store.forget_empty(model_id)

    async def _step(self, training: Training) -> None:
        """Execute a training's next request, restarting the trainer as often as needed."""
        entry = training.waiting[training.expected]
        promise = self._promises.get(training.request_id(entry.seq), training.record.tenant)
        if entry.seq in training.poison:
            promise.fail(PoisonError("this request ended the trainer before", service="trainer"))
        # `end` may fail the promise while the request runs, which ends the loop too.
        while not promise.done.is_set():
            while not self._trainer.alive:
                with contextlib.suppress(ReplicaError):  # it died again while it was restarted
                    await self._recover()
            if promise.done.is_set():  # its training could not be restored
                break
            try:
                promise.keep(await self._executor.execute(training, entry))
            except Exception as error:
                if not isinstance(error, ApiError | ForgeError | OSError):
                    # A bug of ours that one client's request triggers costs that client, and is not run again.
                    training.add_poison(entry.seq)
                    warnings.warn(f"request {entry.seq} of {training.model_id} failed: {error!r}", stacklevel=2)
                if isinstance(error, ServiceError) and not self._trainer.alive:
                    training.attempts += 1
                    if training.attempts < _MAX_ATTEMPTS:
                        continue
                    training.add_poison(entry.seq)
                    error = PoisonError(
                        f"this request ended the trainer {training.attempts} times: {error.message}", service="trainer"
                    )
                promise.fail(error)
        await self._settle(training, entry, promise)

    async def _settle(self, training: Training, entry: JournalEntry, promise: Promise) -> None:
        """Finish a request: advance its training to the next one, and write a snapshot if one is due."""
        tenant, packed = training.record.tenant, training.packed_pass
        if promise.result is not None and packed is not None and packed.seq == entry.seq:
            tokens, is_trained = packed.packed.minibatch.tokens, packed.adapter_pass.backward
            counts = {"trained_tokens": tokens * is_trained, "scored_tokens": tokens * (not is_trained)}
            self._tenants.count_pass(tenant, training.model_id, entry.seq, **counts)
        training.attempts, training.packed_pass = 0, None
        training.waiting.pop(entry.seq, None)
        training.expected = entry.seq + 1
        if (stack := training.admitted.pop(entry.seq, None)) is not None:
            stack.close()
        # Without its adapter, a training could only fail, and would count against its key's limit.
        if entry.seq == 0 and promise.result is None:
            self.end(training)
            return
        with contextlib.suppress(OSError, ForgeError):  # the journal has all that a snapshot would have written
            needs_snapshot = training.updates - training.snapshot_updates >= self._snapshot_updates
            needs_snapshot |= entry.kind in ("load_weights", "create") or training.journal.size > _JOURNAL_BYTES
            # A snapshot holds no gradient, and waits for the step that uses it up.
            if needs_snapshot and self._trainer.alive and promise.result is not None and not training.has_gradient:
                await self._tenants.until_written()  # passes that leave the journal are not counted any more
                await self._executor.take_snapshot(training, entry.seq)

    async def _run_together(self, first: Training) -> bool:
        """Execute the next passes of a training and of others that fit into one row with it.

        Returns False if no other one fits, or if the joint pass fails, for example because one of the requests ends
        the trainer: `_step` then executes them one by one, which shows the culprit.
        """
        together, room = list[tuple[Training, PackedPass]](), self._trainer.layout.longest
        for training in (first, *(training for training in self._ready if training is not first)):
            entry = training.waiting.get(training.expected)
            is_pass = entry is not None and entry.kind == "pass" and entry.seq not in training.poison
            # A request that has ended the trainer once is tried again on its own.
            if entry is None or not is_pass or training.attempts:
                continue
            try:
                packed = await self._executor.packed(training, entry)
            except Exception:
                continue  # `_step` fails with the same
            # One pass computes gradients for all of its rows or for none.
            is_alike = not together or packed.adapter_pass.backward == together[0][1].adapter_pass.backward
            if is_alike and packed.tokens <= room:
                together.append((training, packed))
                room -= packed.tokens
            if training is first and not together:
                return False
        # Packing awaits a thread, during which trainings may have ended.
        together = [(training, packed) for training, packed in together if packed.seq in training.waiting]
        if len(together) < 2 or together[0][0] is not first or not self._trainer.alive:
            return False
        accepted = [
            (
                training.waiting[packed.seq],
                self._promises.get(training.request_id(packed.seq), training.record.tenant),
            )
            for training, packed in together
        ]
        try:
            results = await self._trainer.adapters.run_many([packed.adapter_pass for _, packed in together])
        except ForgeError:
            return False
        for (training, packed), (entry, promise), result in zip(together, accepted, results, strict=True):
            if isinstance(result, ForgeError):
                promise.fail(result)
            else:
                training.has_gradient |= packed.adapter_pass.backward
                promise.keep(packed.answer(result, adapters=len(together)))
            await self._settle(training, entry, promise)
            self._ready.remove(training)
            self._ready.append(training)  # behind the others
        return True

    async def _recover(self) -> None:
        """Restart the trainer, and bring all adapters back to where they were; if it dies meanwhile, it is left so.

        Raises:
            ForgeError: it cannot be restarted.
        """
        await self._trainer.restart(None, cause="it died")
        for training in list(self._trainings.values()):
            try:
                await self._executor.replay(training)
            except (ApiError, ForgeError, OSError) as error:
                if not self._trainer.alive:
                    return
                # Its state cannot be read, for example from a broken disk; only its tenant is affected.
                self.end(training, ApiError(507, str(error)) if isinstance(error, OSError) else to_api_error(error))
        # Deaths add up to --trainer.max-restarts only if nothing works in between: over weeks there are more, and a
        # tenant must not use them up.
        self._trainer.forget_restarts()
