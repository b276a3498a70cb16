"""Trainer ranks that die or hang: named at once, replaced, and training goes on from the checkpoint as it had been."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.ports import unused_port
from forge_rl.algorithms.aggregation import Aggregation
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import Loss, LossInputs
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.titan.index import TensorReader
from forge_rl.errors import CheckpointError, ConfigError, ReplicaError, ServiceError
from forge_rl.run.checkpoints.files import Checkpoints
from forge_rl.runtime import watchdog
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.replica import Replica
from forge_rl.runtime.service import Service
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_config import TrainedModel, TrainingRun
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.manifest import Manifest, ShardReport
from forge_rl.weights.transports.protocol import LocalShard
from forge_rl.weights.transports.shared_memory import SharedMemoryTransport
from tests.fake_actors import cluster
from tests.fake_store import latest, segments
from tests.fakes import make_model, packed, random_batch
from tests.processes import lives
from tests.read_slices import read_version

WAIT_S = 240.0
"""Longest wait for a death to be told, which takes seconds, on a busy machine."""
pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass(frozen=True)
class Deadly(Loss):
    """A loss in which a rank gets a signal, while the others go on to wait for it; or sleeps, without one."""

    signal: signal.Signals | None
    rank: int = 1
    aggregation = Aggregation()

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if torch.distributed.get_rank() == self.rank:
            if self.signal is None:
                time.sleep(600)
            else:
                os.kill(os.getpid(), self.signal)
        return ClippedSurrogate()(inputs)


@dataclass(frozen=True)
class Severed(Loss):
    """A loss beside which rank 0 meets an error that is not the loss's, and only then rank 1 dies, or never."""

    dies: bool

    @property
    def aggregation(self) -> Aggregation:
        if torch.distributed.get_rank() == 0:
            raise RuntimeError("Connection closed by peer")
        time.sleep(0.5)
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return Aggregation()

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return ClippedSurrogate()(inputs)


class DeadlyTransport(SharedMemoryTransport):
    """Kills the process of rank 1 as soon as it has written its shards."""

    async def write(self, drafted: Manifest, shards: Iterable[LocalShard], *, rank: int) -> list[ShardReport]:
        reports = await super().write(drafted, shards, rank=rank)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return reports


@contextlib.asynccontextmanager
async def open_trainer(folder: Path, *, ranks: int = 2, **config: int) -> AsyncIterator[tuple[Trainer, Faults]]:
    """A trainer on a random model."""
    make_model(folder / "hf")
    async with cluster(folder, trainer_ranks=ranks) as (run_cluster, faults):
        trainer = await Trainer.start(
            Trainer.Config(ranks=ranks, seq_len=64, optimizer=OptimizerConfig(lr=1e-2), **config),
            ServiceStart(cluster=run_cluster, faults=faults, deadline_s=WAIT_S),
            model=TrainedModel(folder=folder / "hf"),
            run=TrainingRun(seed=0, total_steps=9, skipped=folder / "skipped"),
        )
        try:
            yield trainer, faults
        finally:
            faults.closing = True
            await trainer.stop()


async def step(trainer: Trainer, seed: int, loss: Loss | None = None) -> float:
    batch = packed(random_batch(seed, vocab=43), shares=trainer.config.ranks)
    return (await trainer.step(batch, loss or ClippedSurrogate()))["loss"]


async def save(trainer: Trainer, folder: Path) -> Path:
    """Returns the training state's folder."""
    for part in ("model", "training"):
        (folder / part).mkdir(parents=True)
    await trainer.save(folder, model=folder.parent / "hf")
    await trainer.finish_save()
    return folder / "training"


def content(saved: Path) -> dict[str, torch.Tensor]:
    """Weights, optimizer state and steps of a training state."""
    reader = TensorReader(saved)
    sizes = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(tensor.size) for name, tensor in sizes.items()}  # type: ignore[union-attr]
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def ended(replica: Replica) -> bool:
    """Tells whether none of its ranks' processes is left."""
    return not any(map(lives, replica.tree.roots.values()))


async def read(store: WeightStore, version: int) -> dict[str, torch.Tensor]:
    async with store.lease(version) as manifest:
        return await read_version(store.transport(), manifest)


def furthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.long
def test_ranks_that_die_or_are_stopped_are_replaced_and_training_goes_on(tmp_path: Path, shm: Path):
    async def run() -> None:
        async with (
            open_trainer(tmp_path, port=unused_port(), max_restarts=5) as (trainer, faults),
            contextlib.AsyncExitStack() as stack,
        ):
            store = await WeightStore.start(
                WeightStore.Config(shm=shm, transport="shared_memory"),
                trainer._ranks.service.cluster,
                faults,
                deadline_s=WAIT_S,
            )
            stack.push_async_callback(store.stop)
            losses = [await step(trainer, 0)]
            saved = await save(trainer, tmp_path / "saved")
            published = {}
            for seed in (1, 2):
                losses.append(await step(trainer, seed))
                assert await trainer.publish(store, dtype="float32") == trainer.version
                published[trainer.version] = await read(store, trainer.version)

            # In the middle of a step.
            with pytest.raises(ReplicaError, match=r"trainer replica 0, call step: rank 1: .*SIGKILL"):
                await asyncio.wait_for(step(trainer, 3, Deadly(signal.SIGKILL)), WAIT_S)
            for call in (step(trainer, 3), trainer.wait_idle(), trainer.offload()):
                with pytest.raises(ReplicaError, match=r"rank 1: .*SIGKILL"):
                    await asyncio.wait_for(call, WAIT_S)
            dead = trainer._ranks.service.replicas[0]
            await trainer.restart(saved)
            assert ended(dead)
            assert (trainer.version, trainer.updates) == (0, 1)
            before, after = content(saved), content(await save(trainer, tmp_path / "again"))
            assert before.keys() == after.keys()
            assert any(name.startswith("exp_avg_sq.") for name in before)
            assert all(torch.equal(torch.as_tensor(before[n]), torch.as_tensor(after[n])) for n in before)
            await store.rollback(trainer.version - 1)
            assert await latest(store) is None
            for seed in (1, 2):
                assert await step(trainer, seed) == pytest.approx(losses[seed], abs=1e-6)
                assert await trainer.publish(store, dtype="float32") == trainer.version == seed - 1
                assert furthest(await read(store, trainer.version), published[trainer.version]) < 1e-6
            assert furthest(published[0], published[1]) > 1e-3
            file_bytes = sum(path.stat().st_size for path in segments(shm))

            # In the middle of a publish; a restart that fails is told, and can be tried again.
            await step(trainer, 3)
            transports = store._recovery.transports
            deadly = DeadlyTransport("local", transports["local"]._volumes)  # type: ignore[attr-defined]
            store._recovery.transports = {"local": deadly}
            with pytest.raises(ReplicaError, match=r"call publish: rank 1: .*SIGKILL"):
                await asyncio.wait_for(trainer.publish(store, dtype="float32"), WAIT_S)
            store._recovery.transports = transports
            assert await latest(store) == 1
            dead = trainer._ranks.service.replicas[0]
            (tmp_path / "empty").mkdir()
            with pytest.raises(CheckpointError, match="empty cannot be read"):
                await trainer.restart(tmp_path / "empty")
            assert not trainer.alive
            with pytest.raises(ServiceError, match=r"its restart failed: the training state in .*empty cannot be read"):
                await step(trainer, 0)
            assert faults.seen[-1].recovered_s is None
            await asyncio.gather(store.rollback(-1), trainer.restart(None))
            assert ended(dead)
            assert (trainer.version, trainer.updates) == (0, 0)
            assert await trainer.publish(store, dtype="float32") == 0
            assert await step(trainer, 0) == pytest.approx(losses[0], abs=1e-6)
            assert await trainer.publish(store, dtype="float32") == 1
            assert await latest(store) == 1
            assert furthest(await read(store, 1), await read(store, 0)) > 1e-3
            await step(trainer, 1)
            await trainer.publish(store, dtype="float32")
            assert sum(path.stat().st_size for path in segments(shm)) == file_bytes

            # In the middle of a save: the one before it stays as it was.
            checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
            async with checkpoints.writing(1, {}, bytes_needed=0) as folder:
                await trainer.save(folder, model=tmp_path / "hf")
                await trainer.finish_save()

            async def save_and_die() -> None:
                async with checkpoints.writing(2, {}, bytes_needed=0) as folder:
                    await trainer.save(folder, model=tmp_path / "hf")
                    os.kill(list(trainer._ranks.service.replicas[0].tree.roots)[1], signal.SIGKILL)
                    await asyncio.wait_for(trainer.finish_save(), WAIT_S)

            with pytest.raises(ReplicaError, match=r"call finish_save: rank 1: .*SIGKILL"):
                await save_and_die()
            assert (tmp_path / "checkpoints" / ".step-000002.partial").exists()
            checkpoint = checkpoints.set_damaged_aside(pytest.fail)
            assert checkpoint is not None
            assert checkpoint.step == 1
            await trainer.restart(checkpoint.training)
            assert (trainer.version, trainer.updates) == (2, 2)
            assert await step(trainer, 2) == pytest.approx(losses[2], abs=1e-6)

            # A rank that is stopped is noticed; the other one waits for it in a collective.
            with pytest.raises(ReplicaError, match="call step: hung: its process was stopped"):
                await asyncio.wait_for(step(trainer, 1, Deadly(signal.SIGSTOP)), WAIT_S)
            restarting = asyncio.create_task(trainer.restart(saved))
            await asyncio.sleep(0)
            assert not trainer.alive
            for call in (step(trainer, 0), trainer.wait_idle(), trainer.offload()):
                with pytest.raises(ServiceError, match="trainer: it is being restarted"):
                    await call
            await restarting
            assert await step(trainer, 1) == pytest.approx(losses[1], abs=1e-6)

            # It is well, and brought back to a checkpoint: whoever waits is told, and no restart is needed for it.
            assert trainer.restarts_left == 0
            waiting = asyncio.create_task(step(trainer, 1, Deadly(None)))
            await asyncio.sleep(0)
            await trainer.restart(saved, cause="it is rolled back")
            with pytest.raises(ReplicaError, match="call step: it is rolled back"):
                await waiting
            assert await step(trainer, 1) == pytest.approx(losses[1], abs=1e-6)

            # While nobody calls it, and for the last time.
            assert trainer.restarts_left == 0
            assert faults.fatal is None
            assert all(fault.recovered_s is not None for fault in faults.seen)
            causes = ["SIGKILL" if "SIGKILL" in fault.cause else fault.cause for fault in faults.seen]
            assert causes == [
                *("SIGKILL", "SIGKILL", "it is restarted though it lives", "SIGKILL"),
                "hung: its process was stopped",
            ]
            fatal, death = asyncio.create_task(faults.wait()), asyncio.create_task(trainer.death())
            given_up = asyncio.create_task(trainer.death())
            await asyncio.sleep(0)
            given_up.cancel()
            assert trainer.alive
            dead = trainer._ranks.service.replicas[0]
            os.kill(list(dead.tree.roots)[1], signal.SIGKILL)
            error = await asyncio.wait_for(fatal, WAIT_S)
            assert (error.service, error.replica) == ("trainer", None)
            assert "SIGKILL" in str(error)
            assert str(error).startswith(f"trainer: {await death}")
            assert not trainer.alive
            assert str(error).endswith("; it has been restarted 5 times, of at most 5")
            with pytest.raises(ReplicaError, match=r"call step: .*SIGKILL"):
                await step(trainer, 0)
            with pytest.raises(ServiceError, match=r"SIGKILL.*; it has been restarted 5 times, of at most 5"):
                await trainer.restart(saved)
            assert trainer._ranks.service.replicas == [dead]

    asyncio.run(run())
    logs = {path.name for path in tmp_path.glob("trainer-*.log")}
    assert logs == {"trainer-0.log", *(f"trainer-0.{number}.log" for number in range(1, 7))}


@pytest.mark.nightly
async def test_ranks_that_take_too_long_or_raise_are_replaced_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with open_trainer(tmp_path, max_restarts=4) as (trainer, faults):
        await step(trainer, 0)
        saved = await save(trainer, tmp_path / "saved")
        expected = await step(trainer, 1)

        # One that computes for ever is noticed by its deadline.
        monkeypatch.setattr(watchdog, "_LEAST_DEADLINE_S", 2.0)
        monkeypatch.setattr(watchdog, "_SLACK", 0.0)
        with pytest.raises(ReplicaError, match="call step: hung: no answer within 2 s") as raised:
            await step(trainer, 1, Deadly(None))
        assert "--trainer.deadline-s" in raised.value.hint
        assert not trainer.alive
        monkeypatch.undo()
        await trainer.restart(saved)
        assert await step(trainer, 1) == pytest.approx(expected, abs=1e-6)

        # A rank that meets the death of another one first does not hide it.
        with pytest.raises(ReplicaError, match=r"call step: rank 1: .*SIGKILL"):
            await asyncio.wait_for(step(trainer, 0, Severed(dies=True)), WAIT_S)
        await trainer.restart(saved)
        # What a rank raises may be a device's or a collective's error: the ranks start again, but not for ever.
        with pytest.raises(ReplicaError, match="call step failed: RuntimeError: Connection closed by peer"):
            await asyncio.wait_for(step(trainer, 0, Severed(dies=False)), WAIT_S)
        await trainer.restart(saved)
        with pytest.raises(ServiceError, match="call step: RuntimeError: Connection closed by peer") as caught:
            await asyncio.wait_for(step(trainer, 0, Severed(dies=False)), WAIT_S)
        assert not isinstance(caught.value, ReplicaError)
        assert not trainer.alive, "rank 1 waits in a collective: nothing can be saved"
        await trainer.restart(saved)
        assert await step(trainer, 1) == pytest.approx(expected, abs=1e-6)

        assert trainer.restarts_left == 0
        assert all(fault.recovered_s is not None for fault in faults.seen)
        causes = ["SIGKILL" if "SIGKILL" in fault.cause else fault.cause for fault in faults.seen]
        assert causes == [
            *("hung: no answer within 2 s", "SIGKILL"),
            *["call step failed: RuntimeError: Connection closed by peer"] * 2,
        ]

        # The owner of the work may count anew, also for ranks that were started as the last ones.
        trainer.forget_restarts()
        assert trainer.restarts_left == 4
        os.kill(list(trainer._ranks.service.replicas[0].tree.roots)[1], signal.SIGKILL)
        assert "SIGKILL" in await asyncio.wait_for(trainer.death(), WAIT_S)
        await asyncio.sleep(0)
        assert faults.fatal is None
        await trainer.restart(saved)
        assert await step(trainer, 1) == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
async def test_a_rank_that_a_signal_ends_at_the_start_starts_all_ranks_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    watch, crashed = Service.watch, list[int]()

    async def watch_and_crash(service: Service, replica: Replica, *, deadline_s: float) -> None:
        await watch(service, replica, deadline_s=deadline_s)
        if not crashed:
            crashed.append(await replica.call("process_id", deadline_s=60, rank=0))
            os.kill(crashed[0], signal.SIGSEGV)

    monkeypatch.setattr(Service, "watch", watch_and_crash)
    async with open_trainer(tmp_path, ranks=1) as (trainer, faults):
        assert (trainer.restarts, [fault.fatal for fault in faults.seen]) == (1, [False])
        await step(trainer, 0)


async def test_a_trainer_without_restarts_ends_the_run_at_its_first_death(tmp_path: Path):
    async with open_trainer(tmp_path, ranks=1, max_restarts=0) as (trainer, faults):
        with pytest.raises(ReplicaError, match=r"call step: .*SIGKILL"):
            await asyncio.wait_for(step(trainer, 0, Deadly(signal.SIGKILL, rank=0)), WAIT_S)
        assert [(fault.replica, fault.fatal) for fault in faults.seen] == [(0, True)]
        with pytest.raises(ServiceError, match="it has been restarted 0 times, of at most 0"):
            await trainer.restart(None)
    with pytest.raises(ConfigError) as caught:
        Trainer.Config(max_restarts=-1)
    assert "--trainer.max-restarts " in caught.value.hint
