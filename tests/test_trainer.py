"""The Trainer service on real processes: its ranks publish whole versions, and what is frozen once."""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_rl.algorithms import ClippedSurrogate
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import TrainSettings
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_actor import TrainerActor
from forge_rl.services.weight_store import WeightStore
from forge_rl.weights.manifest import Manifest
from forge_rl.weights.reading import combine_reports, read_slices
from forge_rl.weights.slices import TensorSlice
from tests.fake_actors import cluster
from tests.fakes import make_model, packed, random_batch

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS = 2


@contextlib.asynccontextmanager
async def open_trainer(folder: Path, *frozen: str) -> AsyncIterator[tuple[Trainer, WeightStore]]:
    """A trainer of two ranks on a random model, and a store whose segments lie in the folder."""
    (folder / "shm").mkdir()
    config = Trainer.Config(ranks=RANKS, row_tokens=256, frozen=frozen, optimizer=OptimizerConfig(lr=1e-2))
    async with cluster(folder) as (made, faults), contextlib.AsyncExitStack() as stack:
        kept = WeightStore.Config(shm=folder / "shm", transport="shared_memory")
        store = await WeightStore.start(kept, made, faults, deadline_s=60)
        stack.push_async_callback(store.stop)
        trainer = await Trainer.start(
            config,
            made,
            faults,
            model=folder / "hf",
            resume=None,
            reference=False,
            total_steps=2,
            deadline_s=120,
        )
        stack.push_async_callback(trainer.stop)
        yield trainer, store
        faults.closing = True


async def read(store: WeightStore) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The latest version; its fingerprints must be those of the manifest."""
    async with store.lease() as manifest:
        found = {entry.name: torch.empty(entry.shape, dtype=entry.torch_dtype) for entry in manifest.tensors}
        slices = {entry.name: TensorSlice.whole(entry.shape) for entry in manifest.tensors}
        report = await read_slices(store.transport(), manifest, slices, found.__getitem__)
    assert combine_reports([report]) == {entry.name: entry.fingerprint for entry in manifest.tensors}
    return manifest, found


def test_ranks_publish_whole_versions_and_what_is_frozen_once(tmp_path: Path):
    model = make_model(tmp_path / "hf")
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    frozen = {name for name in start if "layers.0" in name or "embed_tokens" in name}

    async def run() -> None:
        async with open_trainer(tmp_path, "model.layers.0.*", "model.embed_tokens.*") as (trainer, store):
            assert await trainer.publish(store, dtype="bfloat16") == 0
            first, weights = await read(store)
            assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
                name: tuple(tensor.shape) for name, tensor in start.items()
            }
            assert all(torch.equal(weights[name], start[name].bfloat16()) for name in start)
            batch = random_batch(0, vocab=43)
            await trainer.step(packed(batch, ranks=RANKS, row_tokens=256), ClippedSurrogate())
            assert await trainer.publish(store, dtype="bfloat16") == trainer.version == 1
            second, weights = await read(store)
            assert {name for name in start if torch.equal(weights[name], start[name].bfloat16())} == frozen
            own = {bucket.key for bucket in second.written}
            assert {entry.name for entry in second.tensors if entry.bucket in own} == start.keys() - frozen
            assert {entry.name for entry in second.tensors if entry in first.tensors} == frozen
            assert trainer.busy_s > 0

    asyncio.run(run())


def test_on_a_cpu_nothing_leaves_and_the_trainer_goes_on(tmp_path: Path):
    make_model(tmp_path / "hf")

    async def run() -> None:
        async with open_trainer(tmp_path) as (trainer, store):
            assert await trainer.offload() == 0
            await trainer.publish(store, dtype="float32")
            _, before = await read(store)
            assert await trainer.offload() == 0
            await trainer.step(packed(random_batch(0, vocab=43), ranks=RANKS, row_tokens=256), ClippedSurrogate())
            assert await trainer.onload() == 0
            assert await trainer.publish(store, dtype="float32") == 1
            _, after = await read(store)
            assert any(not torch.equal(after[name], before[name]) for name in before)

    asyncio.run(run())


@dataclass
class Counting:
    """An engine that holds so many bytes."""

    held: int
    offloaded: int = 0

    def offload(self) -> int:
        self.held, self.offloaded = 0, self.held
        return self.offloaded

    def onload(self) -> int:
        moved, self.offloaded = self.offloaded, 0
        self.held += moved
        return moved


@pytest.mark.parametrize(("device", "moved"), [("cuda", 7), ("cpu", 0)])
def test_a_rank_moves_its_state_on_a_gpu_only(device: str, moved: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("forge_rl.services.trainer_actor.device_type", lambda: device)
    settings = TrainSettings(dtype="float32", row_tokens=1, optimizer=OptimizerConfig())
    actor = TrainerActor(Path(), settings, False, 1)
    actor._engine = Counting(held=7)  # type: ignore[assignment]

    async def call(name: str) -> int:
        body: Any = inspect.unwrap(getattr(TrainerActor, name)._method)
        return await body(actor)

    assert asyncio.run(call("offload")) == moved
    assert asyncio.run(call("onload")) == moved


def test_a_step_without_room_says_which_flags_help() -> None:
    class Full:
        def train_step(self, *_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    settings = TrainSettings(dtype="float32", row_tokens=1, optimizer=OptimizerConfig())
    actor = TrainerActor(Path(), settings, False, 1)
    actor._engine = Full()  # type: ignore[assignment]
    step: Any = inspect.unwrap(TrainerActor.step._method)  # type: ignore[attr-defined]
    arguments = [None] * (len(inspect.signature(step).parameters) - 1)
    with pytest.raises(ForgeError, match=r"no room on the device: CUDA out of memory\. Tried .*GiB\.\n") as caught:
        asyncio.run(step(actor, *arguments))
    assert "--trainer.row-tokens" in caught.value.hint


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_rl.services.trainer.gpus", lambda: 2)
    config = Trainer.Config(ranks=3)
    given: Any = {"model": Path(), "resume": None, "reference": False, "total_steps": 1, "deadline_s": 1}
    nothing: Any = None
    with pytest.raises(ConfigError, match="3 ranks need a GPU each, and this machine has 2"):
        asyncio.run(Trainer.start(config, nothing, nothing, **given))


def test_a_pattern_that_freezes_nothing_ends_the_start(tmp_path: Path):
    make_model(tmp_path / "hf")

    async def run() -> None:
        async with open_trainer(tmp_path, "layers.0.*"):
            raise AssertionError("the trainer started")

    with pytest.raises(ConfigError, match="no weight of the model matches 'layers"):
        asyncio.run(run())
