"""What clients of the Tinker API get wrong, leave behind, or meet at a full disk: each costs its own client at most."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.tinker import sessions, tenants, training_routes, wire
from forge_rl.tinker.checkpoints import CheckpointStore, SaveSettings
from forge_rl.tinker.sessions import Sessions
from forge_rl.tinker.tenants import Tenants
from forge_rl.token_arrays import TokenIds
from forge_rl.types import Sampling, Turn
from tests.test_tinker import Client, pass_body, serving
from tests.tinker_fakes import FakeEngines, FakeTrainer

WAIT_S = 120.0


async def test_a_refused_request_takes_its_place_so_that_those_after_it_run(tmp_path: Path):
    trainer = FakeTrainer()
    async with asyncio.timeout(WAIT_S), serving(tmp_path, trainer, max_tokens_in_flight=40) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        adam = {"adam_params": {"learning_rate": None}}  # the client sends NaN as null
        assert "learning_rate" in str(await ann.post("optim_step", 400, **adam, model_id=model_id, seq_id=1))
        assert "path" in str(await ann.post("save_weights", 400, path="x" * 501, model_id=model_id, seq_id=2))
        assert "send less" in await ann.run(model_id, 3, pass_body(model_id, 3, tokens=(1,) * 41), status=400)
        path = f"tinker://{model_id}/weights/none"
        loaded = await ann.post("load_weights", model_id=model_id, seq_id=4, path=path, optimizer=True)
        assert "there is no checkpoint" in (await ann.result(loaded["request_id"]))["error"]
        assert isinstance(await ann.result(await ann.run(model_id, 5)), bytes)
        trainer.adapters.deaths.append("step")
        assert (await ann.result(await ann.step(model_id, 6)))["metrics"]["updates"] == 1
        assert trainer.adapters.states[model_id] == ["open 4 7", "pass 6", "step 0.1"]
    async with asyncio.timeout(WAIT_S), serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        assert "learning_rate" in (await ann.result(f"{model_id}:1"))["error"]
        assert isinstance(await ann.result(await ann.run(model_id, 7)), bytes)


async def test_refusals_are_not_written_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        training = server._trainings.get(model_id, "ann")
        monkeypatch.setattr("forge_rl.tinker.trainings._MOST_JOURNAL_BYTES", 100)
        for seq in range(1, 20):
            await ann.post("optim_step", 400, adam_params={}, model_id=model_id, seq_id=seq, unknown=1)
        assert 200 < training.journal.size < 400
        far = 10**6
        await ann.post("optim_step", 400, adam_params={}, model_id=model_id, seq_id=far, unknown=1)
        assert far not in training.waiting
        assert "at most 1048576" in str(await ann.post("create_session", 413, user_metadata={"a": "x" * (1 << 20)}))


async def test_a_body_counts_as_in_flight_from_its_reading_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counts, read = list[int](), wire.read_address

    def noting(body: bytes) -> wire.PassAddress:
        counts.append(server._tenants._in_flight["ann"])
        return read(body)

    monkeypatch.setattr(wire, "read_address", noting)
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        body = pass_body(model_id, 1, tokens=(1,) * 16)
        await ann.result(await ann.run(model_id, 1, body))
        assert counts == [len(body) // 64]
        while server._tenants._in_flight["ann"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_full_disk_costs_what_is_written_and_not_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = FakeTrainer()
    save = trainer.adapters.save

    async def full(name: str, folder: Path) -> None:
        (folder / "state").write_text("{")
        raise CheckpointError("an adapter cannot be written: No space left on device")

    def full_file(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with asyncio.timeout(WAIT_S), serving(tmp_path, trainer, snapshot_updates=1) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        monkeypatch.setattr(trainer.adapters, "save", full)
        await ann.result(await ann.run(model_id, 1))
        await ann.result(await ann.step(model_id, 2))
        saved = await ann.post("save_weights", model_id=model_id, path="one", seq_id=3)
        assert "No space left" in (await ann.result(saved["request_id"]))["error"]
        assert not list((tmp_path / "models" / model_id).glob("*.partial"))
        with monkeypatch.context() as patch:
            patch.setattr("forge_rl.tinker.training.write_whole", full_file)
            trainer.adapters.deaths += ["pass 3", "pass 3"]
            failed = await ann.result(await ann.run(model_id, 4, pass_body(model_id, 4, tokens=(1, 2))))
        assert "ended the trainer 2 times" in failed["error"]
        monkeypatch.setattr(trainer.adapters, "save", save)
        await ann.result(await ann.run(model_id, 5))
        await ann.result(await ann.step(model_id, 6))
        while not (tmp_path / "models" / model_id / "snapshot-6").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with monkeypatch.context() as patch:
        clients = Sessions(tmp_path / "sessions", max_sessions=1, on_end=lambda _: None)
        first = clients.create("bob")
        patch.setattr(sessions, "write_whole", full_file)
        with pytest.raises(OSError, match="No space left"):
            clients.create("bob")
        assert clients.of("bob") == [first]


async def test_a_training_that_cannot_begin_takes_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = FakeTrainer()

    async def refused(name: str, settings: object) -> None:
        raise ConfigError("the trainer takes no such adapter")

    async with serving(tmp_path, trainer, max_adapters=1) as server:
        ann = Client(server.url, "ann")
        session_id = await ann.session()
        with monkeypatch.context() as patch:
            patch.setattr(trainer.adapters, "open", refused)
            create = {"session_id": session_id, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
            promise = await ann.post("create_model", **create)
            assert "takes no such adapter" in (await ann.result(promise["request_id"]))["error"]
        await ann.model(session_id, 1)
        assert len(server._trainings) == 1


async def test_a_state_that_cannot_be_computed_again_ends_its_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = FakeTrainer()
    async with asyncio.timeout(WAIT_S), serving(tmp_path, trainer) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        model_id, other = await ann.model(await ann.session()), await bob.model(await bob.session())
        saved = await ann.post("save_weights", model_id=model_id, path="one", seq_id=1)
        path = (await ann.result(saved["request_id"]))["path"]

        async def full(name: str, folder: Path) -> None:
            raise CheckpointError("No space left on device")

        monkeypatch.setattr(trainer.adapters, "save", full)  # so that the journal keeps the load
        loaded = await ann.post("load_weights", model_id=model_id, seq_id=2, path=path, optimizer=True)
        assert (await ann.result(loaded["request_id"]))["path"] == path
        await ann.http.delete(f"training_runs/{model_id}/checkpoints/weights/one")
        trainer.adapters.deaths.append("pass 3")
        failed = await ann.result(await ann.run(model_id, 3, pass_body(model_id, 3, tokens=(1, 2))))
        assert "there is no checkpoint" in failed["error"]
        await ann.run(model_id, 4, status=404)
        assert isinstance(await bob.result(await bob.run(other, 1)), bytes)
        assert (trainer.restarts, trainer.restarts_in_a_row) == (1, 0)


async def test_a_folder_that_does_not_answer_at_the_start_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(tmp_path) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        model_id, other = await ann.model(await ann.session()), await bob.model(await bob.session())
    intact = Path.stat

    def stale(path: Path, **options: bool) -> Any:
        if path.name == "session" and path.parent.name == model_id:
            raise OSError(errno.ESTALE, "Stale file handle")
        return intact(path, **options)

    async with contextlib.AsyncExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", stale)
            with pytest.warns(UserWarning, match=f"{model_id} of ann is left out"):
                server = await stack.enter_async_context(serving(tmp_path))
        bob = Client(server.url, "bob")
        assert isinstance(await bob.result(await bob.run(other, 1)), bytes)
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        assert isinstance(await ann.result(await ann.run(model_id, 1)), bytes)


async def test_adapters_of_clients_that_are_gone_make_room_and_others_stay(tmp_path: Path):
    async with serving(tmp_path, max_adapters=2, max_total_adapters=3) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        silent_id, live_id, bobs_id = await ann.session(), await ann.session(), await bob.session()
        silent_model, live_model, other = await ann.model(silent_id), await ann.model(live_id), await bob.model(bobs_id)
        more = {"model_seq_id": 1, "base_model": "base", "lora_config": {"rank": 4}}
        await ann.post("create_model", 400, session_id=live_id, **more)
        await bob.post("create_model", 429, session_id=bobs_id, **more)
        server._training_routes._sessions._used_s[silent_id] -= training_routes._SILENT_S
        await ann.post("session_heartbeat", session_id=silent_id)  # it was only slow
        await ann.post("create_model", 400, session_id=live_id, **more)
        server._training_routes._sessions._used_s[silent_id] -= training_routes._SILENT_S
        await bob.model(bobs_id, 1)
        await ann.run(silent_model, 1, status=404)
        await ann.post("session_heartbeat", 410, session_id=silent_id)
        for client, model_id in ((ann, live_model), (bob, other)):
            assert isinstance(await client.result(await client.run(model_id, 1)), bytes)


async def test_samples_of_a_finished_session_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class HeldEngines(FakeEngines):
        async def generate(self, prompt_ids: TokenIds, sampling: Sampling) -> Turn:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("tests.test_tinker.FakeEngines", HeldEngines)
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        session_id = await ann.session()
        opened = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "base"}
        sampler_id = (await ann.post("create_sampling_session", **opened))["sampling_session_id"]
        sample = {"sampling_session_id": sampler_id, "seq_id": 0, "sampling_params": {}}
        promise = await ann.post("asample", **sample, prompt={"chunks": [{"tokens": [1]}]})
        await ann.post(f"sessions/{session_id}/finish")
        assert "was cancelled" in (await ann.result(promise["request_id"]))["error"]
        assert server._tenants._in_flight["ann"] == 0


async def test_weights_saved_to_be_sampled_from_go_once_many_others_were_used_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("forge_rl.tinker.execution._MOST_UNNAMED", 2)
    async with serving(tmp_path, max_checkpoints=4) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())

        async def save(seq: int, **settings: Any) -> str:
            saving = {"model_id": model_id, "seq_id": seq, **settings}
            promise = await ann.post("save_weights_for_sampler", **saving)
            return str((await ann.result(promise["request_id"])).get("sampling_session_id", ""))

        async def sample(sampler_id: str, seq: int) -> Any:
            request = {"sampling_session_id": sampler_id, "seq_id": seq, "sampling_params": {}}
            promise = await ann.post("asample", **request, prompt={"chunks": [{"tokens": [1]}]})
            return await ann.result(promise["request_id"])

        await save(1, path="seq-9")
        first, second = [await save(seq, sampling_session_seq_id=seq) for seq in (2, 3)]
        assert isinstance(await sample(first, 0), bytes)
        for seq in range(4, 9):
            third = await save(seq, sampling_session_seq_id=seq)
            assert isinstance(await sample(first, seq), bytes)
        assert "there is no checkpoint" in (await sample(second, 0))["error"]
        assert isinstance(await sample(third, 0), bytes)
        names = [card["checkpoint_id"] for card in (await ann.get("checkpoints"))["checkpoints"]]
        assert names == [f"sampler_weights/seq-{seq}" for seq in (8, 2, 9)]


async def test_an_overwritten_checkpoint_is_always_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path, max_checkpoints=9)
    async with serving(tmp_path) as server:
        model_id = await Client(server.url, "ann").model(await Client(server.url, "ann").session())
    record, remove, sizes = store.record(model_id, "ann"), shutil.rmtree, list[int]()

    async def write(folder: Path) -> None:
        (folder / "state").write_text("x" * len(sizes))

    def looking(path: Path, **options: Any) -> None:
        remove(path, **options)
        sizes.append(store.find(f"tinker://{model_id}/weights/one", "ann")[1].size_bytes)

    for seq in (1, 2):
        await store.save(record, SaveSettings(kind="weights", name="one", seq=seq, updates=0, overwrite=True), write)
        monkeypatch.setattr(shutil, "rmtree", looking)
    assert (sizes[0], sizes[-1]) == (0, 2)
    assert [path.name for path in (store.folder(model_id) / "weights").iterdir()] == ["one"]


async def test_usage_is_written_to_the_last_count_and_not_by_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    threads, write_whole = list[threading.Thread](), tenants.write_whole

    def noting(path: Path, text: str) -> None:
        threads.append(threading.current_thread())
        write_whole(path, text)

    monkeypatch.setattr(tenants, "write_whole", noting)
    accounts = Tenants({"ann": "tml-" + "a" * 20}, tmp_path / "usage.json", most_in_flight=1)
    writing = asyncio.create_task(accounts.keep_written())
    for _ in range(100):
        accounts.count("ann", trained_tokens=1)
    while not threads:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    accounts.count("ann", trained_tokens=1)
    accounts.close()
    await writing
    assert json.loads((tmp_path / "usage.json").read_text()) == {"ann": {"trained_tokens": 101}}
    assert 1 <= len(threads) <= 3
    assert threading.main_thread() not in threads


async def test_passes_count_once_however_often_they_are_computed_and_not_if_they_fail(tmp_path: Path):
    trainer = FakeTrainer()
    async with asyncio.timeout(WAIT_S), serving(tmp_path, trainer) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        await ann.result(await ann.run(model_id, 1))
        await ann.result(await ann.run(model_id, 2, pass_body(model_id, 2, tokens=(99, 100))))
        trainer.adapters.deaths.append("step")
        await ann.result(await ann.step(model_id, 3))
        await ann.result(await ann.run(model_id, 4, pass_body(model_id, 4, tokens=(1, 2))))
        assert trainer.restarts == 1
        assert (await ann.get("usage"))["tokens"] == {"trained_tokens": 5, "scored_tokens": 0}
    async with asyncio.timeout(WAIT_S), serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        await ann.result(await ann.run(model_id, 5))
        assert (await ann.get("usage"))["tokens"] == {"trained_tokens": 8, "scored_tokens": 0}
        await ann.post("unload_model", model_id=model_id)
        while (tmp_path / "models" / model_id).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert json.loads((tmp_path / "usage.json").read_text())[".passes"] == {}


async def test_a_usage_that_cannot_be_written_holds_up_snapshots_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full_file(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with asyncio.timeout(WAIT_S), serving(tmp_path, snapshot_updates=1) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        with monkeypatch.context() as patch:
            patch.setattr(tenants, "write_whole", full_file)
            await ann.result(await ann.run(model_id, 1))
            await ann.result(await ann.step(model_id, 2))
            await ann.result(await ann.run(model_id, 3))
            assert not (tmp_path / "models" / model_id / "snapshot-2").exists()
        await ann.result(await ann.step(model_id, 4))
        await ann.result(await ann.run(model_id, 5))
        await ann.result(await ann.step(model_id, 6))
        while not (tmp_path / "models" / model_id / "snapshot-6").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert json.loads((tmp_path / "usage.json").read_text())["ann"]["trained_tokens"] == 9
