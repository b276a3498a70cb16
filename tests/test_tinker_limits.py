"""What one tenant of the Tinker API can do to others, and what a kill leaves behind: nothing that stops the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.adapter_settings import AdamStep
from forge_rl.errors import CheckpointError, ConfigError
from forge_rl.gateway.errors import ApiError
from forge_rl.packing.rows import Minibatch
from forge_rl.services.trainer_adapters import Pass
from forge_rl.tinker import futures, sessions, tenants, trainings, wire
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
        session_id = await ann.session()
        other = await ann.model(session_id)
    (state,) = (tmp_path / "models" / anns).glob("snapshot-*/state")
    record, session = tmp_path / "models" / other / "model.json", tmp_path / "sessions" / f"{session_id}.json"
    for path in (state, record, session, tmp_path / "models" / bobs / ".poison.json.partial"):
        path.write_text("{")  # the last is what a kill leaves of a file
    trainer, stack = FakeTrainer(), contextlib.AsyncExitStack()
    with pytest.warns(UserWarning, match="left out") as warned:
        server = await stack.enter_async_context(serving(tmp_path, trainer))
    texts = [str(warning.message) for warning in warned]
    assert [any(part in text for text in texts) for part in (f"{anns} of ann", str(record), str(session))] == [True] * 3
    async with stack:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        assert isinstance(await bob.result(await bob.run(bobs, 4)), bytes)
        await ann.run(anns, 4, status=404)
        assert trainer.adapters.states.keys() == {bobs}
    assert state.exists()  # for whoever repairs it
    assert record.exists()


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
        store = server._checkpoint_routes._store
        record = store.record(model_id, "ann")
        settings = SaveSettings(kind="weights", name="two", seq=2, updates=0)

        async def write(folder: Path) -> None:
            raise AssertionError("it is written")

        assert (await store.save(record, settings, write)).seq == 3  # computed again after a kill


async def test_the_name_of_an_expired_checkpoint_is_free_and_a_damaged_one_costs_its_own_alone(tmp_path: Path):
    async with serving(tmp_path, max_checkpoints=2) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())

        async def save(seq: int, path: str) -> dict[str, Any]:
            promise = await ann.post("save_weights", model_id=model_id, path=path, seq_id=seq, ttl_seconds=60)
            answer: dict[str, Any] = await ann.result(promise["request_id"])
            return answer

        def record(path: str) -> Path:
            return tmp_path / "models" / model_id / "weights" / path / "checkpoint.json"

        await save(1, "one")
        fields = json.loads(record("one").read_text())
        record("one").write_text(json.dumps({**fields, "expires_at": "2020-01-01T00:00:00+00:00"}))
        assert (await save(2, "one"))["path"].endswith("one")
        assert "already" in (await save(3, "one"))["error"]
        await save(4, "two")
        assert "the most it may have" in (await save(5, "three"))["error"]
        record("two").write_text("{")
        with pytest.warns(UserWarning, match="two/checkpoint.json cannot be read"):
            assert [card["checkpoint_id"] for card in (await ann.get("checkpoints"))["checkpoints"]] == ["weights/one"]
        assert "two/checkpoint.json cannot be read" in (await save(6, "two"))["error"]


async def test_a_sample_that_is_cancelled_before_it_begins_gives_back_its_place(tmp_path: Path):
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        opened = {"session_id": await ann.session(), "sampling_session_seq_id": 0, "base_model": "base"}
        sampler_id = (await ann.post("create_sampling_session", **opened))["sampling_session_id"]
        sample = {"sampling_session_id": sampler_id, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        routes = server._sampling_routes
        await routes.sample("ann", json.dumps(sample | {"sampling_params": {}}).encode(), None)  # type: ignore[arg-type]
        routes.tasks[0].cancel()
        assert "was cancelled" in (await ann.result(f"{sampler_id}:0"))["error"]
        assert not routes.tasks
        assert server._tenants._requests["ann"] == 0


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_result_counts_as_sent_if_its_client_is_still_there(tmp_path: Path, gives_up: bool):
    async with serving(tmp_path) as server:
        promise = server._promises.open("x", "ann")
        promise.keep(FutureResult(body=b"1"))
        messages = [{"type": "http.request", "body": b'{"request_id": "x"}'}, {"type": "http.disconnect"}]
        responses = list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            if len(messages) == 1 and not gives_up:
                await asyncio.Event().wait()
            return messages.pop(0)

        async def send(message: dict[str, Any]) -> None:
            responses.append(message)

        named = {"host": "127.0.0.1", "x-api-key": KEYS["ann"], "content-type": "application/json"}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        route = {"method": "POST", "path": "/api/v1/retrieve_future", "root_path": "", "query_string": b""}
        scope = {"type": "http", "http_version": "1.1", "headers": headers, "client": ("127.0.0.1", 1), **route}
        await server._app()(scope, receive, send)  # type: ignore[arg-type]
        assert responses[0]["status"] == 200
        assert promise.is_sent is not gives_up


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
    accounts = Tenants(KEYS, tmp_path / "usage.json", most_in_flight=100)
    with accounts.in_flight("ann", tokens=0, body_bytes=6400), pytest.raises(ApiError, match="100 of at most 100"):
        accounts.in_flight("ann", tokens=1).__enter__()
    with accounts.in_flight("ann", tokens=100):
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
        await ann.result(await ann.step(model_id, 3))
        while journal.size > full:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert isinstance(await ann.result(await ann.run(model_id, 4)), bytes)


def test_a_session_forgets_the_samplers_that_are_idle_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sessions, "_MOST_SAMPLERS", 2)
    clients = Sessions(tmp_path / "sessions", max_sessions=1, on_end=lambda _: None)
    session_id = clients.create("ann").session_id
    first, second = (clients.open_sampler(session_id, seq, None) for seq in range(2))
    clients.sampler(first, "ann")
    clients.open_sampler(session_id, 2, None)
    assert clients.sampler(first, "ann").seq == 0
    with pytest.raises(ApiError, match="no sampler"):
        clients.sampler(second, "ann")


def test_the_sessions_of_one_tenant_do_not_make_another_s_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    write_whole = sessions.write_whole

    def counted(path: Path, text: str) -> None:
        sizes.append(len(text))
        write_whole(path, text)

    monkeypatch.setattr(sessions, "write_whole", counted)
    clients = Sessions(tmp_path / "sessions", max_sessions=2, on_end=lambda _: None)
    large = clients.create("ann").session_id
    for seq in range(40):
        clients.open_sampler(large, seq, "tinker://" + "x" * 400)
    small = clients.create("bob").session_id
    sampler_id = clients.open_sampler(small, 0, None)
    assert sizes[-1] < 500 < sizes[-3]
    clients.end(large, "ann")
    later = Sessions(tmp_path / "sessions", max_sessions=2, on_end=lambda _: None)
    assert later.sampler(sampler_id, "bob").seq == 0
    with pytest.raises(ApiError, match="no session"):
        later.get(large, "ann")


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


HOSTILE = {
    "nested deep": "[" * 100_000 + "]" * 100_000,
    "400 digits": "9" * 400,
    "5000 digits": "9" * 5000,
    "NaN": "NaN",
    "past the largest float": "1e999",
    "half of a letter": '"\\ud800"',
    "zero byte": '"\\u0000"',
    **{text: text for text in ('"x"', "null", "[]", "{}", "true", "-1", "1.5")},
}
"""JSON values that a client may send in any place."""
SAMPLE = '"sampling_session_id": "SAMPLER", "seq_id": SEQ, "prompt": {"chunks": [{"tokens": [1]}]}'
PLACES = (
    *(("create_session", form) for form in ('{"user_metadata": {"a": X}}', '{"tags": [X]}', '{"unknown": X}', "X")),
    *(
        ("create_model", f'{{"session_id": "SESSION", "model_seq_id": 3, "base_model": "base", {form}}}')
        for form in ('"lora_config": {"rank": 4, "seed": X}', '"user_metadata": X', '"optimizer_config": X')
    ),
    *(
        ("save_weights", f'{{"model_id": "MODEL", "seq_id": SEQ, {form}}}')
        for form in ('"path": X', '"ttl_seconds": X', '"user_metadata": {"a": X}', '"kind": X')
    ),
    ("save_weights", '{"model_id": "MODEL", "seq_id": X}'),
    *(
        ("optim_step", f'{{"model_id": "MODEL", "seq_id": SEQ, "adam_params": {form}}}')
        for form in ("X", '{"learning_rate": X}', '{"eps": X}', '{"grad_clip_norm": X}')
    ),
    ("create_sampling_session", '{"session_id": "SESSION", "sampling_session_seq_id": X, "base_model": "base"}'),
    *(
        ("asample", f"{{{SAMPLE}, {form}}}")
        for form in ('"sampling_params": {"seed": X}', '"sampling_params": {"stop": [X]}', '"num_samples": X')
    ),
    *((route, '{"request_id": X}') for route in ("retrieve_future", "cancel_future")),
    *(("telemetry", form) for form in ("X", '{"events": [X]}')),
)
"""Requests with a place for any value."""


async def test_hostile_values_are_their_client_s_own_errors(tmp_path: Path):
    async with serving(tmp_path) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        session_id = await ann.session()
        model_id, other = await ann.model(session_id), await bob.model(await bob.session())
        opened = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "base"}
        sampler_id = (await ann.post("create_sampling_session", **opened))["sampling_session_id"]
        seqs = dict.fromkeys((model_id, sampler_id), 1)  # of the next request of each
        accepted = 0
        for route, form in PLACES:
            owner = sampler_id if route == "asample" else model_id
            for value in HOSTILE.values():
                seq = seqs[owner]
                text = form.replace("X", value).replace("SEQ", str(seq)).replace("SESSION", session_id)
                body = text.replace("MODEL", model_id).replace("SAMPLER", sampler_id)
                answer = await ann.http.post(route, content=body, headers={"content-type": "application/json"})
                assert answer.status_code < 500, (route, body[:200], answer.text)
                assert len(answer.text) < 1000, (route, body[:200])
                if answer.status_code == 200 and answer.json().get("request_id", "").endswith(f":{seq}"):
                    result = await ann.result(answer.json()["request_id"])
                    assert not isinstance(result, dict) or result.get("category") != "server", (route, body[:200])
                    accepted += 1
                seqs[owner] += f"{owner}:{seq}" in server._promises  # a refused request takes its place, too
        assert accepted > 10, "some values are harmless in their place"
        for path in (
            "training_runs/..",
            "training_runs/a%00b",
            "sessions/%ff",
            "checkpoints?limit=-1",
            "samplers/%2e%2e",
        ):
            assert 400 <= (await ann.http.get(path)).status_code < 500
        seq = seqs[model_id]
        for name, values in (
            ("NaN", np.full(3, np.nan, np.float32)),
            ("infinity", np.full(3, np.inf, np.float32)),
            ("one value", np.ones(1, np.float32)),
            ("a part of a value", b"abc"),
        ):
            message = wire._message("ForwardBackwardRequest")
            message.ParseFromString(pass_body(model_id, seq))
            message.data[0].loss_fn_inputs["weights"].dense = bytes(values)
            result = await ann.result(await ann.run(model_id, seq, message.SerializeToString()))
            assert result["category"] == "user", name
            seq += 1
        assert isinstance(await bob.result(await bob.run(other, 1)), bytes)


async def test_a_mistake_of_the_server_s_own_costs_the_client_that_found_it(tmp_path: Path):
    trainer = FakeTrainer()
    step = trainer.adapters.step

    async def mistaken(name: str, adam: AdamStep) -> tuple[dict[str, float], int]:
        if adam.lr == 0.5:
            raise ValueError("nobody thought of this")
        return await step(name, adam)

    trainer.adapters.step = mistaken  # type: ignore[method-assign]
    async with serving(tmp_path, trainer) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        model_id, other = await ann.model(await ann.session()), await bob.model(await bob.session())
        await ann.result(await ann.run(model_id, 1))
        body = {"adam_params": {"learning_rate": 0.5}, "model_id": model_id, "seq_id": 2}
        with pytest.warns(UserWarning, match=f"request 2 of {model_id} failed: ValueError"):
            result = await ann.result((await ann.post("optim_step", **body))["request_id"])
        assert result["category"] == "server"
        assert "nobody thought" not in result["error"]
        assert isinstance(await bob.result(await bob.run(other, 1)), bytes)
        trainer.adapters.deaths.append("pass 6")  # what it left in the journal is not computed again
        assert isinstance(await ann.result(await ann.run(model_id, 3)), bytes)
        assert trainer.restarts == 1


async def test_waiting_requests_of_one_tenant_are_bounded_and_cost_the_next_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class HeldEngines(FakeEngines):
        def __init__(self) -> None:
            super().__init__()
            self.may_end = asyncio.Event()

        async def generate(self, prompt_ids: TokenIds, sampling: Sampling) -> Turn:
            if len(prompt_ids) == 2:
                await self.may_end.wait()
            return await super().generate(prompt_ids, sampling)

    monkeypatch.setattr(tenants, "_MOST_REQUESTS", 20)
    engines = HeldEngines()
    monkeypatch.setattr("tests.test_tinker.FakeEngines", lambda: engines)
    async with serving(tmp_path) as server:

        async def sample(
            client: Client, sampler_id: str, seq: int, tokens: list[int], status: int = 200
        ) -> dict[str, Any]:
            prompt = {"chunks": [{"tokens": tokens}]}
            return await client.post(
                "asample", status, sampling_session_id=sampler_id, seq_id=seq, prompt=prompt, sampling_params={}
            )

        samplers = {}
        for name in ("ann", "bob"):
            client = Client(server.url, name)
            opened = {"session_id": await client.session(), "sampling_session_seq_id": 0, "base_model": "base"}
            samplers[name] = client, (await client.post("create_sampling_session", **opened))["sampling_session_id"]
        waiting = [await sample(*samplers["ann"], seq, [1, 2]) for seq in range(20)]
        assert "20 requests, the most there may be" in str(await sample(*samplers["ann"], 20, [1, 2], 429))
        answer = await sample(*samplers["bob"], 0, [1])
        assert isinstance(await samplers["bob"][0].result(answer["request_id"]), bytes)
        engines.may_end.set()
        for promise in waiting:
            await samplers["ann"][0].result(promise["request_id"])
        await sample(*samplers["ann"], 20, [1, 2])
    looks = 0

    class Done(asyncio.Event):
        def is_set(self) -> bool:
            nonlocal looks
            looks += 1
            return super().is_set()

    monkeypatch.setattr(futures, "_MOST_DONE", 2)
    few = Promises()
    for name in "abc":
        few.open(name, "ann").keep(FutureResult(body=b""))
    few.get("c", "ann").is_sent = True
    few.open("d", "ann")
    assert [name in few for name in "abc"] == [True, True, False], "its client has the last"
    promise_of = futures.Promise
    monkeypatch.setattr(futures, "Promise", lambda tenant: promise_of(tenant, done=Done()))
    promises = Promises()
    for number in range(10_000):
        promises.open(str(number), "ann")
    assert looks < 32 * 10_000


def test_a_file_of_all_sessions_is_split_into_one_for_each(tmp_path: Path):
    sampler = Sampler(sampler_id="b:sample:0", seq=0, model_path="tinker://x")
    old = [
        sessions.ClientSession(session_id="b", tenant="ann", samplers={sampler.sampler_id: sampler}),
        sessions.ClientSession(session_id="c", tenant="bob", user_metadata={"x": "y"}),
        sessions.ClientSession(session_id="a", tenant="ann", display_name="late"),
    ]
    file, folder = tmp_path / "sessions.json", tmp_path / "sessions"
    file.write_text(json.dumps([asdict(session) for session in old]))
    for _ in range(2):  # as it is split, and after
        read = Sessions(folder, max_sessions=2, on_end=lambda _: None)
        assert read.of("ann") == [old[0], old[2]]
        assert read.of("bob") == [old[1]]
        assert [path.name for path in tmp_path.iterdir()] == ["sessions"]
    ended: list[str] = []
    later = Sessions(folder, max_sessions=4, on_end=ended.append)
    created = [later.create("ann").session_id for _ in range(2)]
    assert not ended, "there may be four"
    later.get("b", "ann")
    created.append(later.create("ann").session_id)
    assert ended == ["a"], "the one idle longest"
    assert [session.session_id for session in later.of("ann")] == [*created[:2], "b", created[2]]
    file.write_text('[{"session_id": "d"')
    with pytest.raises(CheckpointError, match=r"sessions\.json cannot be read"):
        Sessions(folder, max_sessions=2, on_end=lambda _: None)
    assert file.exists()


async def test_a_training_with_many_passes_in_its_queue_and_one_with_a_single_pass_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer, model_ids = FakeTrainer(), list[str]()
    has_begun, may_step = asyncio.Event(), asyncio.Event()
    step, run = trainer.adapters.step, trainer.adapters.run

    async def held_step(name: str, adam: AdamStep) -> tuple[dict[str, float], int]:
        has_begun.set()
        await may_step.wait()
        return await step(name, adam)

    async def noted_run(name: str, minibatch: Minibatch, loss: Loss, *, backward: bool = True) -> Pass:
        model_ids.append(name)
        return await run(name, minibatch, loss, backward=backward)

    monkeypatch.setattr(trainer.adapters, "step", held_step)
    monkeypatch.setattr(trainer.adapters, "run", noted_run)
    async with serving(tmp_path, trainer) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        anns, bobs = await ann.model(await ann.session()), await bob.model(await bob.session())
        await ann.step(anns, 1)
        await has_begun.wait()  # all that follows is in the queue before this step ends
        promises = [await ann.run(anns, seq) for seq in range(2, 22)]
        bobs_promise = await bob.run(bobs, 1)
        may_step.set()
        assert isinstance(await bob.result(bobs_promise), bytes)
        for promise in promises:
            await ann.result(promise)
    assert bobs in model_ids[:2], "after at most one more of the other training"
    assert model_ids.count(anns) == 20


async def test_slow_clients_hold_up_nobody(tmp_path: Path):
    async with serving(tmp_path, client_deadline_s=0.5, max_concurrent=8) as server:
        bob = Client(server.url, "bob")
        other = await bob.model(await bob.session())
        head = f"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEYS['ann']}\r\n"
        body = f"{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{"
        host, _, port = server.url.removeprefix("http://").partition(":")
        connections = [await asyncio.open_connection(host, int(port)) for _ in range(32)]
        for number, (_, writer) in enumerate(connections):
            writer.write((head[:40] if number % 2 else body).encode())
        async with asyncio.timeout(60):
            assert isinstance(await bob.result(await bob.run(other, 1)), bytes)
            statuses = [(await reader.readline()).split()[1] for reader, _ in connections[::2]]
            assert set(statuses) == {b"408", b"429"}  # 8 may be in progress
            assert isinstance(await Client(server.url, "ann").session(), str)
        for _, writer in connections:
            writer.close()
