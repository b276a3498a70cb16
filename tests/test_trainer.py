"""The Trainer service on real processes: its ranks publish whole versions, and what is frozen once."""

import asyncio
import contextlib
import inspect
import pickle
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch

from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.degrees import check_model
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.protocol import StepRequest, TrainSettings
from forge_rl.errors import ConfigError, ForgeError, LossError
from forge_rl.forecast.transfer import PUBLISH
from forge_rl.packing.rows import PackedBatch
from forge_rl.packing.unpacking import read_scores, unpack
from forge_rl.run.run_config import RunConfig
from forge_rl.runtime.replica import Replica
from forge_rl.services import trainer_calls
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_actor import TrainerActor
from forge_rl.services.trainer_calls import RankCall
from forge_rl.services.trainer_config import TrainedModel, TrainingRun
from forge_rl.services.weight_store import WeightStore
from forge_rl.types import Score
from forge_rl.weights.manifest import Manifest
from tests.fake_actors import cluster
from tests.fakes import make_model, packed, random_batch
from tests.plain_trainer import logits_of
from tests.read_slices import read_version

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS = 2
START_S = 300.0
"""Longest start of ranks, which import for ten seconds each, on a busy machine."""


@contextlib.asynccontextmanager
async def open_trainer(
    folder: Path, *frozen: str, ranks: int = RANKS, after: asyncio.Future[None] | None = None, **settings: Any
) -> AsyncIterator[tuple[Trainer, WeightStore]]:
    """A trainer on a random model, and a store whose segments lie in the folder."""
    (folder / "shm").mkdir()
    optimizer = OptimizerConfig(lr=1e-2, decay="linear")
    config = Trainer.Config(ranks=ranks, seq_len=256, frozen=frozen, optimizer=optimizer, **settings)
    async with cluster(folder, trainer_ranks=ranks) as (run_cluster, faults), contextlib.AsyncExitStack() as stack:
        store_config = WeightStore.Config(shm=folder / "shm", transport="shared_memory")
        store = await WeightStore.start(store_config, run_cluster, faults, deadline_s=START_S)
        stack.push_async_callback(store.stop)
        trainer = await Trainer.start(
            config,
            ServiceStart(cluster=run_cluster, faults=faults, deadline_s=START_S),
            model=TrainedModel(folder=folder / "hf"),
            run=TrainingRun(seed=0, total_steps=3, skipped=folder / "skipped"),
            after=after,
        )
        stack.push_async_callback(trainer.stop)
        yield trainer, store
        faults.closing = True


async def read(store: WeightStore) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """The latest version; its fingerprints must be those of the manifest."""
    async with store.lease() as manifest:
        return manifest, await read_version(store.transport(), manifest)


async def test_ranks_publish_whole_versions_and_what_is_frozen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = make_model(tmp_path / "hf")
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    frozen = {name for name in start if "layers.0" in name or "embed_tokens" in name}

    after = asyncio.get_running_loop().create_future()
    calls: list[str] = []
    call = Replica.call

    async def recorded(self: Replica, method: str, *args: object, **how: Any) -> Any:
        calls.append(method)
        result = await call(self, method, *args, **how)
        if method == "prepare" and calls.count("prepare") == RANKS and not after.done():
            asyncio.get_running_loop().call_later(0.2, calls.append, "after")
            asyncio.get_running_loop().call_later(0.2, after.set_result, None)
        return result

    monkeypatch.setattr(Replica, "call", recorded)
    frozen_names = "model.layers.0.*", "model.embed_tokens.*"
    async with open_trainer(tmp_path, *frozen_names, after=after, dtype="bfloat16") as (trainer, store):
        assert calls.index("prepare") < calls.index("after") < calls.index("setup"), "it imports, and waits"
        monkeypatch.undo()
        assert await trainer.publish(store, dtype="float32") == 0
        first, weights = await read(store)
        assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
            name: tuple(tensor.shape) for name, tensor in start.items()
        }
        assert all(torch.equal(weights[name], start[name].bfloat16()) for name in start), "as the passes have them"
        batch = random_batch(0, vocab=43)
        await trainer.step(packed(batch, shares=RANKS, seq_len=256), ClippedSurrogate())
        assert await trainer.publish(store, dtype="float32") == trainer.version == 1
        second, weights = await read(store)
        assert {name for name in start if torch.equal(weights[name], start[name].bfloat16())} == frozen
        new_buckets = {bucket.key for bucket in second.written}
        assert {entry.name for entry in second.tensors if entry.bucket in new_buckets} == start.keys() - frozen
        assert {entry.name for entry in second.tensors if entry in first.tensors} == frozen
        assert trainer.busy_s > 0
        assert trainer.publish_s.keys() == set(PUBLISH)
        assert 0 < trainer.publish_s["write"] < sum(trainer.publish_s.values())


@pytest.mark.parametrize(
    "degree",
    [
        "tensor_parallel_degree",
        pytest.param("pipeline_parallel_degree", marks=pytest.mark.long),
        pytest.param("context_parallel_degree", marks=pytest.mark.nightly),
    ],
)
async def test_ranks_that_share_rows_count_once_and_publish_one_model(degree: str, tmp_path: Path):
    model = make_model(tmp_path / "hf")
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.double()
    batch = random_batch(0, vocab=43, groups=4)

    async with open_trainer(tmp_path, dtype="float64", **{degree: 2}) as (trainer, store):
        laid = packed(batch, **vars(trainer.layout) | {"seq_len": 32})
        assert len(laid.rows) > 1
        row_logprobs = unpack(laid, await trainer.logprobs(laid))
        for index, episode in enumerate(batch.episodes):
            (segment,) = episode.segments
            ids = torch.tensor(segment.token_ids, dtype=torch.int64)
            with torch.no_grad():
                logprobs = logits_of(model, ids).log_softmax(-1)
            expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0][torch.tensor(segment.trained[1:])]
            assert (row_logprobs[index] - expected).abs().max() < 1e-5, (
                "but for the trainer's angles, which are float32"
            )
        assert await trainer.publish(store, dtype="float32") == 0
        _, weights = await read(store)
        assert all(torch.equal(weights[name], start[name]) for name in start)
        assert trainer.scored is None
        trainer.keeps_logprobs = True
        before = await trainer.logprobs(laid)
        stats = await trainer.step(laid, ClippedSurrogate())
        check_scored(trainer, laid, before)
        assert stats["tokens/trained"] == laid.trained_tokens
        await trainer.publish(store, dtype="float32")
        _, weights = await read(store)
        assert all((weights[name] != start[name]).any() for name in start)
        stats = await trainer.step(laid, Broken())
        assert (stats["updates"], stats["updates/skipped"]) == (1, 1)
        with pytest.raises(LossError, match="ZeroDivisionError: no tokens of that kind"):
            await trainer.step(laid, Broken(raises=True))
        assert trainer.alive
        assert (await trainer.step(laid, ClippedSurrogate()))["updates"] == 2


def check_scored(trainer: Trainer, laid: PackedBatch, before: Sequence[torch.Tensor], rows: int | None = None) -> None:
    """Checks that the last step kept gaps and entropies of each row, and those of the first `rows` of them."""
    assert trainer.scored is not None
    scored_batch, scored_rows = trainer.scored
    assert scored_batch is laid
    assert len(scored_rows) == len(laid.rows) > 1
    for row, scored, expected in list(zip(laid.rows, scored_rows, before, strict=True))[:rows]:
        gaps, entropies = read_scores([scored])
        assert np.allclose(gaps, (expected - row.behaviour)[row.mask], rtol=2**-8, atol=1e-6)
        assert (entropies > 0).all()


@dataclass(frozen=True, kw_only=True)
class Broken(ClippedSurrogate):
    """A loss whose gradient is not finite where the first group is, which is on one rank; or that raises there."""

    raises: bool = False

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, sums = super().__call__(inputs)
        first = bool((inputs.episodes[inputs.mask] == 0).any())
        if first and self.raises:
            raise ZeroDivisionError("no tokens of that kind")
        return loss * (float("nan") if first else 1), sums


async def test_updates_and_versions_are_counted_apart_and_saved(tmp_path: Path):
    make_model(tmp_path / "hf")
    batch = random_batch(0, vocab=43, groups=4)
    uniform = replace(
        batch,
        groups=tuple(
            replace(g, episodes=tuple(replace(e, score=Score(total=0.1)) for e in g.episodes)) for g in batch.groups
        ),
    )

    async with open_trainer(tmp_path, minibatches=2, epochs=2) as (trainer, store):
        laid, nothing = (packed(groups_batch, **vars(trainer.layout)) for groups_batch in (batch, uniform))
        assert await trainer.publish(store, dtype="float32") == 0
        assert await trainer.offload() == 0, "on a CPU nothing leaves"
        trainer.keeps_logprobs = True
        before = await trainer.logprobs(laid)
        stats = await trainer.step(laid, ClippedSurrogate())
        check_scored(trainer, laid, before, rows=len(laid.minibatches[0].rows))  # others follow an update
        assert await trainer.onload() == 0
        assert (trainer.updates, trainer.version, stats["updates"], stats["updates/skipped"]) == (4, 0, 4, 0)
        assert stats["lr"] == pytest.approx(1e-2), "the largest of updates 0 to 3 of 12"
        assert "logprob_gap" in stats
        stats = await trainer.step(nothing, ClippedSurrogate())
        assert stats == {"tokens/trained": 0, "updates": 4, "updates/skipped": 0}
        assert trainer.scored == (nothing, [])
        for part in ("model", "training"):
            (tmp_path / "saved" / part).mkdir(parents=True)
        await trainer.save(tmp_path / "saved", model=tmp_path / "hf")
        await trainer.finish_save()
        stats = await trainer.step(laid, ClippedSurrogate())
        assert (trainer.updates, trainer.version) == (8, 0)
        assert stats["lr"] == pytest.approx(1e-2 * 4 / 12), "that of the ninth minibatch of 12, as 4 gave no update"
        assert "logprob_gap" not in stats, "the weights are no version's"
        assert [await trainer.publish(store, dtype="float32") for _ in range(2)] == [1, 2]

        await trainer.restart(tmp_path / "saved" / "training")
        assert (trainer.updates, trainer.version) == (4, 1), "its weights were never published"
        await store.rollback(trainer.version - 1)
        assert await trainer.publish(store, dtype="float32") == 1

        stats = await trainer.step(laid, Broken())
        assert (trainer.updates, stats["updates"], stats["updates/skipped"]) == (6, 6, 2)
        assert stats["loss"] == pytest.approx(stats["loss"]), "that of the others"
        is_failing = [any((row.episodes == 0).any() for row in minibatch.rows) for minibatch in laid.minibatches]
        assert [sum(is_failing[:2]), sum(is_failing[2:])] == [1, 1]
        files = sorted((tmp_path / "skipped").iterdir())
        numbers = [5 + is_failing[:index].count(False) for index in range(4) if is_failing[index]]
        assert [int(path.name.split("-")[1]) for path in files] == numbers
        assert trainer.skipped == tuple(f"torch.load('{path}')" for path in files)
        saved = torch.load(files[0])
        first = laid.minibatches[is_failing.index(True)]
        assert (saved["tokens"], saved["temperature"], len(saved["rows"])) == (first.tokens, 1.0, len(first.rows))
        for row_fields, row in zip(saved["rows"], first.rows, strict=True):
            assert row_fields.pop("routed") is None is row.routed
            assert row_fields.pop("columns") == {}
            assert all(torch.equal(value, getattr(row, name)) for name, value in row_fields.items())
        await trainer.step(laid, ClippedSurrogate())
        assert trainer.updates == 10
        only_bad = replace(laid, minibatches=(first, first))
        assert trainer.skipped == ()
        trainer._skipped = Path("/dev/full")  # as on a disk that is full: an error of the system's
        stats = await trainer.step(only_bad, Broken())
        assert (stats["updates/skipped"], stats["tokens/trained"]) == (2, 0)
        assert trainer.skipped[-1].startswith("it could not be saved in /dev/full/update-000011-2.pt: ")
        trainer._skipped = tmp_path / "skipped"
        with pytest.raises(ForgeError, match="4 updates in a row had a gradient that is not finite") as caught:
            await trainer.step(only_bad, Broken())
        assert f"torch.load('{tmp_path / 'skipped' / 'update-000011-4.pt'}')" in caught.value.hint
        assert "--trainer.max-skipped-updates" in caught.value.hint

        with pytest.raises(
            LossError, match=r"ZeroDivisionError: no tokens of that kind \(.*test_trainer.py:"
        ) as loss_error:
            await trainer.step(laid, Broken(raises=True))
        assert "in __call__" in loss_error.value.trace
        assert "ZeroDivisionError" in (tmp_path / "trainer-0.1.log").read_text()
        assert trainer.updates == 10 + is_failing.index(True) == await trainer.wait_idle(), "those before it count"
        stats = await trainer.step(laid, ClippedSurrogate())
        assert stats["updates"] == trainer.updates == 14 + is_failing.index(True)


@pytest.mark.long
async def test_a_port_in_use_is_named(tmp_path: Path):
    make_model(tmp_path / "hf")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f":{port}") as caught:
            async with open_trainer(tmp_path, port=port):
                pytest.fail("the ranks have met")
    assert "--trainer.port" in caught.value.hint


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
    settings = TrainSettings(dtype="float32", seq_len=1, optimizer=OptimizerConfig())
    actor = TrainerActor(settings, False, 1)
    actor._engine = Counting(held=7)  # type: ignore[assignment]

    async def call(name: str) -> int:
        body: Any = inspect.unwrap(getattr(TrainerActor, name)._method)
        return await body(actor)

    assert asyncio.run(call("offload")) == moved
    assert asyncio.run(call("onload")) == moved


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minibatches": 4}, "2 groups cannot be split into 4 minibatches"),
        (
            {"minibatches": 2, "epochs": 2, "optimizer": OptimizerConfig(warmup_updates=13)},
            "the warm-up of 13 updates is longer than the run of 12",
        ),
    ],
)
def test_updates_that_a_run_does_not_have_are_refused_before_it_starts(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        RunConfig(steps=3, groups_per_batch=2, trainer=Trainer.Config(**settings))


async def test_a_step_without_room_says_which_flags_help() -> None:
    class Full:
        rank = 0

        def train_batch(self, *_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    settings = TrainSettings(dtype="float32", seq_len=1, optimizer=OptimizerConfig())
    actor = TrainerActor(settings, False, 1)
    actor._engine = Full()  # type: ignore[assignment]
    actor._parcel.append(pickle.dumps([]))
    step: Any = inspect.unwrap(TrainerActor.step._method)  # type: ignore[attr-defined]
    request = StepRequest(loss=ClippedSurrogate(), total_updates=1)
    with pytest.raises(ForgeError, match=r"ran out of device memory: CUDA out of memory\. Tried .*GiB\.\n") as caught:
        await step(actor, request)
    assert "--trainer.seq-len" in caught.value.hint


def test_calls_to_ranks_return_what_their_endpoints_do():
    calls = [value for value in vars(trainer_calls).values() if isinstance(value, RankCall)]
    assert len(calls) > 9
    for call in calls:
        endpoint = inspect.unwrap(getattr(TrainerActor, call.method)._method)
        assert get_type_hints(endpoint)["return"] == call.reply, call.method


def test_a_step_is_asked_for_in_few_bytes_and_by_name():
    request = StepRequest(loss=ClippedSurrogate(), total_updates=9, version=3, lr=1e-3)
    pickled = pickle.dumps(request)
    assert pickle.loads(pickled) == request
    assert len(pickled) < len(pickle.dumps(request.loss)) + 250


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_rl.engines.degrees.gpus", lambda: 2)
    make_model(tmp_path)
    with pytest.raises(ConfigError, match="3 ranks need a GPU each, and this machine has 2"):
        check_model(TrainSettings(), 3, read_architecture(tmp_path))
