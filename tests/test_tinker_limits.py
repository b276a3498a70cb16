"""What one tenant of the Tinker API can do to others, and what a kill leaves behind: nothing that stops the server."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_rl.engines.adapter_settings import AdamStep
from forge_rl.errors import ConfigError
from forge_rl.gateway.errors import ApiError
from forge_rl.tinker import futures, sessions, trainings, wire
from forge_rl.tinker.checkpoints import CheckpointStore, SaveSettings
from forge_rl.tinker.futures import FutureResult, Promises
from forge_rl.tinker.requests import SampleRequest
from forge_rl.tinker.sampling import LoadedAdapters, SampleService
from forge_rl.tinker.sessions import Sampler, Sessions
from forge_rl.tinker.tenants import Tenants
from forge_rl.token_arrays import ScoredTokens, TokenIds
from forge_rl.types import Sampling, Turn
from tests.test_tinker import KEYS, Client, pass_body, serving
from tests.tinker_fakes import FakeEngines, FakeTrainer


async def test_a_state_that_cannot_be_read_at_the_start_costs_its_tenant_alone(tmp_path: Path):
    async with serving(tmp_path, snapshot_updates=1) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        anns, bobs = await ann.model(await ann.session()), await bob.model(await bob.session())
        for client, model_id in ((ann, anns), (bob, bobs)):
            await client.result(await client.run(model_id, 1))
            await client.result(await client.step(model_id, 2))
        await ann.result(await ann.run(anns, 3))  # after the snapshot
        await bob.result(await bob.run(bobs, 3))
    (state,) = (tmp_path / "models" / anns).glob("snapshot-*/state")
    state.write_text("{")
    trainer, stack = FakeTrainer(), contextlib.AsyncExitStack()
    with pytest.warns(UserWarning, match=f"training {anns} of ann is left out"):
        server = await stack.enter_async_context(serving(tmp_path, trainer))
    async with stack:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        assert isinstance(await bob.result(await bob.run(bobs, 4)), bytes)
        await ann.run(anns, 4, status=404)
        assert trainer.adapters.states.keys() == {bobs}
    assert state.exists()  # for whoever repairs it


async def test_an_error_that_its_client_has_not_got_outlives_the_server(tmp_path: Path):
    async with serving(tmp_path, snapshot_updates=1) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        failed = await ann.run(model_id, 1, pass_body(model_id, 1, tokens=(99, 100)))
        await ann.result(await ann.run(model_id, 2))
        await ann.result(await ann.step(model_id, 3))
        while not list((tmp_path / "models" / model_id).glob("snapshot-3")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with serving(tmp_path) as server:
        answer = await Client(server.url, "ann").result(failed)
        assert "not from 0 to 99" in answer["error"]
        assert answer["category"] == "user"


async def test_a_training_that_has_ended_is_not_opened_again_over_its_checkpoints(tmp_path: Path):
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        session_id = await ann.session()
        model_id = await ann.model(session_id)
        await ann.result((await ann.post("save_weights", model_id=model_id, path="one", seq_id=1))["request_id"])
        await ann.post("unload_model", model_id=model_id)
        create = {"session_id": session_id, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
        assert "has ended" in str(await ann.post("create_model", 410, **create))


async def test_trainings_without_checkpoints_leave_nothing_and_those_without_a_key_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(tmp_path) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        session_id = await ann.session()
        for seq in range(3):
            model_id = await ann.model(session_id, seq)
            await ann.post("unload_model", model_id=model_id)
            while (tmp_path / "models" / model_id).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        model_id, bobs = await ann.model(session_id, 4), await bob.model(await bob.session())
    monkeypatch.delitem(KEYS, "bob")
    trainer = FakeTrainer()
    async with serving(tmp_path, trainer) as server:
        await Client(server.url, "ann").model(session_id, 5)
        assert trainer.adapters.states.keys() == {model_id, f"{session_id}:train:5"}
    monkeypatch.setitem(KEYS, "bob", "tml-" + "b" * 20)
    async with serving(tmp_path) as server:
        assert isinstance(await Client(server.url, "bob").result(await Client(server.url, "bob").run(bobs, 1)), bytes)


async def test_a_greedy_sample_leaves_room_for_the_token_that_scores_it(tmp_path: Path):
    class FullEngines(FakeEngines):
        async def generate(self, prompt_ids: TokenIds, sampling: Sampling) -> Turn:
            assert sampling.max_tokens is not None
            turn = await super().generate(prompt_ids, sampling)
            ids = np.zeros(sampling.max_tokens, np.int32)
            return replace(turn, token_ids=ids, logprobs=np.full(len(ids), np.nan), versions=ids)

        async def score(self, prompt_ids: TokenIds, token_ids: TokenIds, **settings: Any) -> ScoredTokens:
            assert len(prompt_ids) + len(token_ids) < self.max_model_len
            return await super().score(prompt_ids, token_ids, **settings)

    engines = FullEngines()
    service = SampleService(
        engines,
        LoadedAdapters(engines, max_loaded=1),
        CheckpointStore(tmp_path, max_checkpoints=1),
        seed=0,
        max_scored=99,
    )
    request = SampleRequest.model_validate(
        {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"temperature": 0}}
    )
    _, counts = await service.sample(request, Sampler(sampler_id="s", seq=0, model_path=None), "ann")
    assert counts == {"prompt_tokens": 2, "sampled_tokens": 29}


async def test_a_checkpoint_that_a_kill_cut_off_is_none(tmp_path: Path):
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        partial = tmp_path / "models" / model_id / "weights" / ".one.partial"
        partial.mkdir(parents=True)
        (partial / "checkpoint.json").write_text("{")
        for seq, path in ((1, "one"), (2, "two"), (3, "two")):
            save = {"model_id": model_id, "path": path, "seq_id": seq, "overwrite": seq == 3}
            saved = await ann.result((await ann.post("save_weights", **save))["request_id"])
            assert saved["path"].endswith(path)
        assert len((await ann.get("checkpoints"))["checkpoints"]) == 2
        record = server._store.record(model_id, "ann")
        settings = SaveSettings(kind="weights", name="two", seq=2, updates=0)

        async def write(folder: Path) -> None:
            raise AssertionError("it is written")

        assert (await server._store.save(record, settings, write)).seq == 3  # computed again after a kill


def test_results_of_one_tenant_do_not_make_the_server_forget_another_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(futures, "_MOST_DONE", 2)
    promises = Promises()
    promises.open("anns", "ann").keep(FutureResult(body=b"1"))
    for number in range(5):
        promises.open(f"bobs-{number}", "bob").keep(FutureResult(body=b"1"))
    assert promises.get("anns", "ann").result == FutureResult(body=b"1")
    with pytest.raises(ApiError, match="no result"):
        promises.get("bobs-0", "bob")


def test_long_bodies_count_as_tokens_in_flight(tmp_path: Path):
    tenants = Tenants(KEYS, tmp_path / "usage.json", most_in_flight=100)
    with tenants.in_flight("ann", tokens=0, body_bytes=6400), pytest.raises(ApiError, match="100 of at most 100"):
        tenants.in_flight("ann", tokens=1).__enter__()
    with tenants.in_flight("ann", tokens=100):
        pass


def test_millions_of_empty_messages_are_refused_before_they_are_kept():
    with pytest.raises(ApiError, match="more than 65536 data"):
        wire.read_address(b"\x1a\x00" * (1 << 17))  # empty data
    chunks = b"\x0a\x00" * (1 << 17)
    with pytest.raises(ApiError, match="more than 65536 data"):
        wire.read_address(b"\x1a\x80\x80\x10" + chunks)  # one datum of empty chunks
    assert wire.read_address(pass_body("m:train:0", 3)).tokens == 3


async def test_a_full_journal_leaves_room_for_the_step_that_empties_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        await ann.result(await ann.run(model_id, 1))
        journal = server._trainings.get(model_id, "ann").journal
        monkeypatch.setattr(trainings, "_JOURNAL_BYTES", 0)
        monkeypatch.setattr(trainings, "_MOST_JOURNAL_BYTES", full := journal.size - 1)
        assert "too many passes" in await ann.run(model_id, 2, status=400)
        await ann.result(await ann.step(model_id, 2))
        while journal.size > full:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert isinstance(await ann.result(await ann.run(model_id, 3)), bytes)


def test_a_session_forgets_the_samplers_that_are_idle_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "_MOST_SAMPLERS", 2)
    clients = Sessions(tmp_path / "sessions.json", max_sessions=1, on_end=lambda _: None)
    session_id = clients.create("ann").session_id
    first, second = (clients.open_sampler(session_id, seq, None) for seq in range(2))
    clients.sampler(first, "ann")
    clients.open_sampler(session_id, 2, None)
    assert clients.sampler(first, "ann").seq == 0
    with pytest.raises(ApiError, match="no sampler"):
        clients.sampler(second, "ann")


async def test_cancelled_requests_leave_engines_and_counts_alike(tmp_path: Path):
    class SlowEngines(FakeEngines):
        def __init__(self) -> None:
            super().__init__()
            self.begun, self.may_end = asyncio.Event(), asyncio.Event()

        async def drop_adapter(self, name: str) -> None:
            await super().drop_adapter(name)
            self.begun.set()
            await self.may_end.wait()

    engines = SlowEngines()
    loaded = LoadedAdapters(engines, max_loaded=1)
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "checkpoint.json").touch()

    async def use(folder: Path) -> str:
        async with loaded.using(folder) as name:
            assert name in engines.adapters
            return name

    first = await use(folders[0])
    request = asyncio.ensure_future(use(folders[1]))
    await engines.begun.wait()  # the first adapter is gone
    for _ in range(3):
        request.cancel()
        await asyncio.sleep(0)
    engines.may_end.set()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    assert request.cancelled()
    assert first not in engines.adapters
    assert await use(folders[0]) == first  # loaded again, in the place that the cancelled request left
    assert len(engines.adapters) == 1


@pytest.mark.parametrize(
    "settings", [{"lr": 1e300}, {"lr": -1.0}, {"lr": 1.0, "eps": 1e-50}, {"lr": 1.0, "weight_decay": 1e39}]
)
def test_steps_that_float32_cannot_take_are_refused(settings: dict[str, float]):
    with pytest.raises(ConfigError, match="of an optimizer step is"):
        AdamStep(**settings)
