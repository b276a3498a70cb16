"""The Tinker API over HTTP, with the client's payloads, on a trainer and engines that compute little."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from apps import tinker as app
from forge_rl.algorithms.aggregation import Counts
from forge_rl.algorithms.protocol import LossInputs
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.errors import ConfigError
from forge_rl.flags.command_line import parse
from forge_rl.gateway.errors import ApiError
from forge_rl.packing.rows import Layout, attends
from forge_rl.tinker import BaseModel, TinkerConfig, TinkerServer, TinkerServices, read_keys, wire
from forge_rl.tinker.journal import Journal, JournalEntry
from forge_rl.tinker.losses import WEIGHTS, TinkerLoss
from forge_rl.tinker.rows import PackedData
from forge_rl.tinker.server import NOT_HERE
from tests.tinker_fakes import FakeEngines, FakeTrainer

KEYS = {"ann": "tml-" + "a" * 20, "bob": "tml-" + "b" * 20}
BASE = BaseModel(
    name="base",
    folder=Path("base"),
    tokenizer_id="base",
    vocab_size=100,
    max_model_len=32,
    lora=LoRAConfig(rank=8),
)


class Client:
    """Sends what tinker 0.38.0 sends."""

    def __init__(self, url: str, tenant: str) -> None:
        self.http = httpx.AsyncClient(base_url=f"{url}/api/v1/", headers={"x-api-key": KEYS[tenant]}, timeout=300)

    async def post(self, route: str, status: int = 200, /, **body: Any) -> dict[str, Any]:
        response = await self.http.post(route, json=body)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def get(self, path: str, status: int = 200) -> dict[str, Any]:
        response = await self.http.get(path)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def result(self, request_id: str) -> Any:
        body = {"request_id": request_id, "allow_metadata_only": True}
        while True:
            response = await self.http.post("retrieve_future", json=body)
            assert response.status_code == 200, response.text
            if response.headers["content-type"] == wire.PROTOBUF:
                return response.content
            if response.json().get("type") != "try_again":
                return response.json()

    async def session(self) -> str:
        session = await self.post(
            "create_session", tags=[], user_metadata={}, sdk_version="0.38.0", type="create_session"
        )
        session_id: str = session["session_id"]
        return session_id

    async def model(self, session_id: str, seq: int = 0, **lora: Any) -> str:
        config = {"rank": 4, "seed": 7, "train_unembed": True, "train_mlp": True, "train_attn": True, **lora}
        promise = await self.post(
            "create_model",
            session_id=session_id,
            model_seq_id=seq,
            base_model="base",
            lora_config=config,
            optimizer_config={"type": "adamw"},
            type="create_model",
        )
        assert (await self.result(promise["request_id"]))["model_id"] == f"{session_id}:train:{seq}"
        return f"{session_id}:train:{seq}"

    async def run(self, model_id: str, seq: int, body: bytes | None = None, status: int = 200) -> str:
        response = await self.http.post(
            "forward_backward",
            content=pass_body(model_id, seq) if body is None else body,
            headers={"content-type": wire.PROTOBUF},
        )
        assert response.status_code == status, response.text
        return response.json()["request_id"] if status == 200 else response.text

    async def step(self, model_id: str, seq: int) -> str:
        adam = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
        promise = await self.post(
            "optim_step", adam_params=adam | {"grad_clip_norm": 0.0}, model_id=model_id, seq_id=seq, type="optim_step"
        )
        request_id: str = promise["request_id"]
        return request_id


def pass_body(model_id: str, seq: int, tokens: tuple[int, ...] = (1, 2, 3), loss: str = "cross_entropy") -> bytes:
    """A pass over one datum, as the client encodes it."""
    message = wire._message("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = model_id, seq, loss
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    for name, dtype in (("target_tokens", np.int64), ("weights", np.float32)):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense = np.arange(1, len(tokens) + 1).astype(dtype).tobytes()
        tensor.dtype = 2 if dtype == np.int64 else 1
        tensor.shape.append(len(tokens))
    return bytes(message.SerializeToString())


@contextlib.asynccontextmanager
async def serving(out: Path, trainer: FakeTrainer | None = None, **config: Any) -> AsyncIterator[TinkerServer]:
    settings = TinkerConfig(port=0, **config)
    services = TinkerServices(trainer=trainer or FakeTrainer(), engines=FakeEngines())
    async with TinkerServer(settings, BASE, KEYS, services, out=out) as server:
        yield server


def decoded(kind: str, body: bytes) -> Any:
    message = wire._message(kind)
    message.ParseFromString(body)
    return message


async def test_a_training_from_its_session_to_a_sample(tmp_path: Path):
    trainer = FakeTrainer()
    async with serving(tmp_path, trainer) as server:
        ann = Client(server.url, "ann")
        settings = await ann.post("client/config", sdk_version="0.38.0")
        assert (settings["pjwt_auth_enabled"], settings["parallel_fwdbwd_chunks"]) == (False, False)
        assert settings["sample_max_concurrent_requests"] == 256  # each waits in a request, of 1024 at a time
        assert (await ann.get("get_server_capabilities"))["supported_models"][0]["model_name"] == "base"
        session_id = await ann.session()
        model_id = await ann.model(session_id)
        assert (await ann.post("get_info", model_id=model_id))["lora_rank"] == 4
        late = await ann.step(model_id, 2)  # before the pass that it follows
        done = decoded("ForwardBackwardOutput", await ann.result(await ann.run(model_id, 1)))
        assert np.frombuffer(done.loss_fn_outputs[0].fields["logprobs"].data, np.float32).tolist() == [-1, -2, -3]
        assert done.metrics["loss:sum"] == 6
        assert (await ann.result(late))["metrics"] == {"grad_norm": 1.0, "updates": 1.0}
        assert trainer.adapters.states[model_id] == ["open 4 7", "pass 6", "step 0.1"]
        assert await ann.step(model_id, 2) == late  # sent again, and not done again
        saved = await ann.post("save_weights", model_id=model_id, path="one", seq_id=3, overwrite=False)
        path = (await ann.result(saved["request_id"]))["path"]
        assert path == f"tinker://{model_id}/weights/one"
        shown = await ann.post("save_weights_for_sampler", model_id=model_id, seq_id=4, sampling_session_seq_id=0)
        sampler_id = (await ann.result(shown["request_id"]))["sampling_session_id"]
        assert (await ann.get(f"samplers/{sampler_id}"))["base_model"] == "base"
        prompt = {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]}
        promise = await ann.post(
            "asample",
            sampling_session_id=sampler_id,
            seq_id=0,
            num_samples=2,
            prompt=prompt,
            sampling_params={"max_tokens": 4, "temperature": 0, "stop": None, "top_k": -1, "top_p": 1, "seed": None},
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
        )
        assert len(promise["sample_sequence_ids"]) == 2
        sample = decoded("SampleResponse", await ann.result(promise["request_id"]))
        assert [np.frombuffer(s.tokens, np.int32).tolist() for s in sample.sequences] == [[3, 1], [3, 1]]
        assert np.frombuffer(sample.sequences[0].logprobs, np.float32).tolist() == [0, -1]  # of a greedy sample, too
        assert sample.sequences[0].stop_reason == 1
        assert np.isnan(np.frombuffer(sample.prompt_logprobs, np.float32)).tolist() == [True, False, False]
        assert (sample.topk_prompt_logprobs.length, sample.topk_prompt_logprobs.k) == (3, 2)
        info = await ann.post("weights_info", tinker_path=path)
        assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == ("base", 4, True)
        listed = await ann.get(f"training_runs/{model_id}/checkpoints")
        assert [c["checkpoint_type"] for c in listed["checkpoints"]] == ["training", "sampler"]
        again = await ann.post("load_weights", session_id=session_id, model_seq_id=1, path=path, optimizer=True)
        assert (await ann.result(again["request_id"]))["model_id"] == f"{session_id}:train:1"
        assert trainer.adapters.states[f"{session_id}:train:1"][-1] == "step 0.1"
        usage = (await ann.get("usage"))["tokens"]
        assert usage == {"trained_tokens": 3, "scored_tokens": 0, "prompt_tokens": 3, "sampled_tokens": 4}
        await ann.http.delete(f"training_runs/{model_id}/checkpoints/weights/one")
        await ann.post("load_weights", 404, session_id=session_id, model_seq_id=2, path=path, optimizer=True)
        assert await ann.post(f"sessions/{session_id}/finish") == {}
        await ann.run(model_id, 5, status=404)


async def test_a_failed_pass_is_its_own_request_s_error_and_the_next_goes_on(tmp_path: Path):
    async with serving(tmp_path) as server:
        ann = Client(server.url, "ann")
        model_id = await ann.model(await ann.session())
        for seq, body, problem in (
            (1, pass_body(model_id, 1, loss="gspo"), "'gspo' is not supported"),
            (2, pass_body(model_id, 2, tokens=(13,)), "not finite"),
            (3, pass_body(model_id, 3, tokens=(99, 100)), "not from 0 to 99"),
            (4, pass_body(model_id, 4, tokens=tuple(range(17))), "1 to 16"),
            (5, pass_body(model_id, 5, loss="ppo"), "ppo takes advantages, logprobs, target_tokens"),
            (6, pass_body(model_id, 6) + b"\xfa\x3f\x03abc", "fields that are not supported"),
        ):
            failed = await ann.result(await ann.run(model_id, seq, body))
            assert problem in failed["error"]
            assert failed["category"] == "user"
        assert isinstance(await ann.result(await ann.run(model_id, 7)), bytes)


async def test_deaths_of_trainer_and_server_lose_nothing(tmp_path: Path):
    trainer = FakeTrainer()
    async with serving(tmp_path, trainer, snapshot_updates=2) as server:
        ann = Client(server.url, "ann")
        session_id = await ann.session()
        models = [await ann.model(session_id, seq) for seq in range(3)]
        for seq in range(1, 8, 2):
            if seq == 5:
                trainer.adapters.deaths.append("step")
            promises = [
                promise
                for model_id in models
                for promise in (await ann.run(model_id, seq), await ann.step(model_id, seq + 1))
            ]
            for promise in promises:
                await ann.result(promise)
        assert trainer.restarts == 1
        done = ["open 4 7", *["pass 6", "step 0.1"] * 4]
        assert [trainer.adapters.states[model_id] for model_id in models] == [done] * 3
        promises = [await ann.run(model_id, 9) for model_id in models]
        promises += [await ann.step(model_id, 10) for model_id in models]  # after which their states are written
        while any(len(trainer.adapters.states[model_id]) < len(done) + 2 for model_id in models):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    trainer = FakeTrainer()
    async with serving(tmp_path, trainer, snapshot_updates=2) as server:
        ann = Client(server.url, "ann")
        for promise in promises[:3]:
            assert isinstance(await ann.result(promise), bytes)  # a client that was cut off asks again
        for promise in promises[3:]:
            assert (await ann.result(promise))["metrics"]["updates"] == 5
        assert [trainer.adapters.states[model_id] for model_id in models] == [[*done, "pass 6", "step 0.1"]] * 3


async def test_passes_that_fit_into_one_row_run_together_if_asked_for(tmp_path: Path):
    trainer = FakeTrainer()
    async with serving(tmp_path, trainer, mix_rows=True) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        session_id = await ann.session()
        models = [await ann.model(session_id, seq) for seq in range(3)]
        other = await bob.model(await bob.session())
        gate = asyncio.Event()
        step = trainer.adapters.step

        async def held(name: str, adam: Any) -> Any:
            await gate.wait()
            return await step(name, adam)

        trainer.adapters.step = held  # type: ignore[method-assign]
        bodies = [(1, 2, 3), (1, 2), (5, 13), tuple(range(20, 36))]  # the last fills a row
        first = await ann.step(models[0], 1)  # the others come while it runs
        promises = [
            (client, await client.run(model_id, seq, pass_body(model_id, seq, tokens=tokens)))
            for client, model_id, seq, tokens in zip(
                (ann, ann, bob, ann), (*models[:2], other, models[2]), (2, 1, 1, 1), bodies, strict=True
            )
        ]
        gate.set()
        await ann.result(first)
        results = [await client.result(promise) for client, promise in promises]
        assert [isinstance(result, bytes) for result in results] == [True, True, False, True]
        assert "not finite" in results[2]["error"]  # bob's alone
        shared = [decoded("ForwardBackwardOutput", results[place]).metrics["adapters:max"] for place in (0, 1, 3)]
        assert shared == [3, 3, 1]
        assert trainer.adapters.together == [3]
        assert trainer.adapters.states[models[0]] == ["open 4 7", "step 0.1", "pass 6"]
        trainer.adapters.deaths += ["pass 7"] * 3
        gate.clear()
        first = await ann.step(models[2], 2)
        promises = [
            (ann, await ann.run(models[0], 3, pass_body(models[0], 3, (1, 2, 4)))),
            (ann, await ann.run(models[1], 2, pass_body(models[1], 2, (1,)))),
        ]
        gate.set()
        await ann.result(first)
        failed, kept = [await client.result(promise) for client, promise in promises]
        assert "ended the trainer 2 times" in failed["error"]
        assert isinstance(kept, bytes)
        assert trainer.adapters.states[models[1]] == ["open 4 7", "pass 3", "pass 1"]
    assert not TinkerConfig().mix_rows


async def test_a_request_that_ends_the_trainer_again_fails_alone(tmp_path: Path):
    trainer = FakeTrainer()
    async with serving(tmp_path, trainer) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        model_id, other = await ann.model(await ann.session()), await bob.model(await bob.session())
        trainer.adapters.deaths += ["pass 6", "pass 6"]
        failed = await ann.result(await ann.run(model_id, 1))
        assert "ended the trainer 2 times" in failed["error"]
        assert isinstance(await bob.result(await bob.run(other, 1)), bytes)
        trainer.adapters.deaths.append("pass 3")
        body = pass_body(model_id, 2, tokens=(1, 2))
        assert isinstance(await ann.result(await ann.run(model_id, 2, body)), bytes)  # the first is not tried again
        assert trainer.adapters.states[model_id] == ["open 4 7", "pass 3"]
        assert trainer.restarts == 3


async def test_tenants_do_not_see_each_other(tmp_path: Path):
    async with serving(tmp_path) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        session_id = await ann.session()
        model_id = await ann.model(session_id)
        saved = await ann.post("save_weights_for_sampler", model_id=model_id, path="mine", seq_id=1)
        path = (await ann.result(saved["request_id"]))["path"]
        bobs = await bob.session()
        assert (await bob.get("training_runs"))["training_runs"] == []
        await bob.get(f"training_runs/{model_id}", 404)
        await bob.run(model_id, 2, status=404)
        await bob.post("retrieve_future", 410, request_id=saved["request_id"])
        await bob.post("weights_info", 404, tinker_path=path)
        await bob.post("create_sampling_session", 404, session_id=bobs, sampling_session_seq_id=0, model_path=path)
        await bob.post("session_heartbeat", 410, session_id=session_id)
        lora = {"rank": 8}
        await bob.post("create_model", 410, session_id=session_id, model_seq_id=5, base_model="base", lora_config=lora)
        nobody = httpx.AsyncClient(base_url=f"{server.url}/api/v1/")
        assert (await nobody.post("create_session", json={})).status_code == 401
        assert (await nobody.get("healthz")).json() == {"status": "ok"}


async def test_one_tenant_cannot_fill_the_server(tmp_path: Path):
    async with serving(tmp_path, max_adapters=2, max_total_adapters=3) as server:
        ann, bob = Client(server.url, "ann"), Client(server.url, "bob")
        session_id, bobs = await ann.session(), await bob.session()
        lora = {"base_model": "base", "lora_config": {"rank": 8}}
        model_ids = [await ann.model(session_id), await bob.model(bobs)]
        other = await ann.post("create_model", session_id=session_id, model_seq_id=1, **lora)
        refusal = await bob.post("create_model", 429, session_id=bobs, model_seq_id=1, **lora)
        assert "--max-total-adapters" in str(refusal)
        same = await ann.post("create_model", session_id=session_id, model_seq_id=1, **lora)  # sent again
        assert same["request_id"] == other["request_id"]
        await ann.result((await ann.post("unload_model", model_id=model_ids[0]))["request_id"])
        await bob.post("create_model", session_id=bobs, model_seq_id=1, **lora)


async def test_limits_and_hostile_requests_are_refused_by_name(tmp_path: Path):
    async with serving(tmp_path, max_adapters=1, max_tokens_in_flight=40, max_body_bytes=4096) as server:
        ann = Client(server.url, "ann")
        session_id = await ann.session()
        model_id = await ann.model(session_id)
        other = {"session_id": session_id, "model_seq_id": 1, "base_model": "base"}
        assert "the most it may" in str(await ann.post("create_model", 400, **other, lora_config={"rank": 8}))
        assert "rank 16" in str(await ann.post("create_model", 400, **other, lora_config={"rank": 16}))
        assert "is not here" in str(await ann.post("create_model", 400, **(other | {"base_model": "x"})))
        dimuon = {"type": "dimuon", "version": 1}
        assert "optimizer_config" in str(await ann.post("create_model", 400, **other, optimizer_config=dimuon))
        await ann.run(model_id, 5, pass_body(model_id, 5, tokens=(1,) * 30))  # waits for those before it
        assert "in flight" in await ann.run(model_id, 6, pass_body(model_id, 6, tokens=(1,) * 30), status=429)
        assert "protobuf" in await ann.run(model_id, 7, b"\xff\xff", status=400)
        assert "seq_id" in await ann.run(model_id, 10**6, pass_body(model_id, 10**6), status=400)
        await ann.run(model_id, 8, b"x" * 5000, status=413)
        for path in NOT_HERE:
            assert "is not supported here" in str(await ann.post(path, 404))
        assert "has the tokens of a key" in str(await ann.get("billing/usage/events", 404))
        assert "is not supported here" in str(await ann.get("nothing", 404))
        assert "extra" in str(await ann.post("session_heartbeat", 400, session_id=session_id, x=1)).lower()
        web = {"origin": "https://elsewhere.example"}
        assert (await ann.http.post("create_session", json={}, headers=web)).status_code == 403
        escape = {"model_id": model_id, "path": "../../x", "seq_id": 1}
        promise = await ann.post("save_weights", **escape)
        assert "is not letters" in (await ann.result(promise["request_id"]))["error"]


def test_data_are_packed_whole_and_see_only_themselves():
    data = [
        wire.Datum(
            tokens=np.arange(1, length + 1, dtype=np.int32),
            inputs={"target_tokens": np.arange(length), "weights": np.full(length, length, np.float32)},
        )
        for length in (5, 6, 7, 16)
    ]
    packed = PackedData.pack(data, Layout(seq_len=16, shares=2, pad_multiple=8))
    assert [len(row) for row in packed.minibatch.rows] == [16, 8, 16, 8]
    first = packed.minibatch.rows[0]
    seen = attends(first.until, *torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"))
    assert seen[5:11, :5].sum() == 0
    assert seen[10].nonzero()[:, 0].tolist() == list(range(5, 11))
    assert first.columns[WEIGHTS].tolist() == [5.0] * 5 + [6.0] * 6 + [0.0] * 5
    logprobs = packed.of_data([row.targets.numpy() for row in packed.minibatch.rows])
    assert [values.tolist() for values in logprobs] == [list(range(length)) for length in (5, 6, 7, 16)]


def test_losses_are_those_of_the_api():
    p = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    q, a = (torch.tensor(values, dtype=torch.float64) for values in ([-1.5, -1.0, -0.5, 2.0], [1.0, -2.0, 0.5, 0.0]))
    whole = torch.ones(4, dtype=torch.bool)
    zeros = torch.zeros(4, dtype=torch.int32)
    inputs = LossInputs(
        logprobs=p,
        behaviour=q,
        advantages=a,
        weights=torch.ones(4),
        mask=whole,
        versions=zeros,
        episodes=zeros,
        turns=zeros,
        segments=zeros,
        lengths=zeros + 4,
        counts=Counts(tokens=4, sequences=1, observations=0),
        columns={WEIGHTS: a},
    )
    ratio = (p - q).exp()
    clipped = ratio.clamp(0.9, 1.3)
    expected = {
        "cross_entropy": -(a * p).sum(),
        "importance_sampling": -(ratio * a).sum(),
        "ppo": -torch.minimum(ratio * a, clipped * a).sum(),
        "cispo": -(clipped.detach() * p * a).sum(),
        "dro": -(p * a - 0.5 * 0.1 * (p - q) ** 2).sum(),
    }
    clips = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
    for kind, loss in expected.items():
        config = clips if kind in ("ppo", "cispo") else {"beta": 0.1} if kind == "dro" else {}
        computed, _ = TinkerLoss.read(kind, config)(inputs)
        assert torch.equal(computed, loss) or torch.isclose(computed, loss, rtol=1e-14)
        grads = (torch.autograd.grad(value, p, retain_graph=True)[0] for value in (computed, loss))
        torch.testing.assert_close(*grads, rtol=1e-14, atol=0)
    for kind, config in (
        ("custom", {}),
        ("ppo", {"beta": 1.0}),
        ("ppo", {"clip_low_threshold": 2.0}),
        ("dro", {"beta": -1}),
    ):
        with pytest.raises(ApiError):
            TinkerLoss.read(kind, config)


async def test_a_journal_ends_where_a_kill_cut_it_off(tmp_path: Path):
    journal = Journal(tmp_path / "journal")
    entries = [JournalEntry(seq=seq, kind="pass", body=bytes(range(seq))) for seq in range(1, 5)]
    for entry in entries:
        journal.append(entry)
    whole = (tmp_path / "journal").read_bytes()
    for cut in range(1, 21):
        (tmp_path / "journal").write_bytes(whole[:-cut])
        assert journal.read() == entries[:3]
        journal.append(entries[3])
        assert journal.read() == entries
    keeping = asyncio.ensure_future(journal.keep(2))
    await asyncio.sleep(0)  # it has begun
    entry = JournalEntry(seq=1, kind="optim_step", body=b"appended meanwhile")
    journal.append(entry)
    await keeping
    assert journal.read() == [*entries[2:], entry]
    assert os.listdir(tmp_path) == ["journal"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trainer.optimizer.lr 1e-4", "--trainer.optimizer.lr has no effect: requests bring their optimizer"),
        ("--trainer.minibatches 2", "--trainer.minibatches has no effect: requests bring their optimizer"),
        ("--generator.temperature 0.5", "--generator.temperature has no effect: requests set their temperature"),
        ("--generator.max-replicas 3", "--generator.max-replicas has no effect: the trainer lends no devices"),
        ("--trainer.seq-len 256 --generator.max-tokens 8 --lora.rank 4", ""),
    ],
)
def test_flags_without_an_effect_are_refused_by_name(flags: str, message: str) -> None:
    config = parse(app.Config, "tinker", flags.split())
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        config.check_effects()


@pytest.mark.parametrize(
    "text", ["", "ann", "ann secret", "ann tml-short", f"a/b {KEYS['ann']}", f"ann {KEYS['ann']}\nbob {KEYS['ann']}"]
)
def test_a_file_of_keys_that_names_no_tenants_is_refused(text: str):
    with pytest.raises(ConfigError, match="keys"):
        read_keys(Path("keys"), text)
