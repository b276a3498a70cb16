"""Adapters beside the model of a gateway: named by requests, loaded and dropped by them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from apps.gateway import Config, describe_other_template, main
from apps.gateway import serving as program
from forge_rl.errors import ConfigError, ModelError
from forge_rl.gateway.adapters import ServedAdapters
from forge_rl.models.adapters import Adapter
from forge_rl.services.generator import Generator
from forge_rl.types import Sampling
from tests.engine_adapters import adapted
from tests.fake_backend import FakeBackend, serving

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ENGINE = Generator.Config(dtype="float32", max_model_len=256, kv_cache_gib=0.25)


@dataclass
class FakeEngines:
    """Engines that note which adapters they hold, and refuse one."""

    loaded: dict[str, Path] = field(default_factory=dict)

    async def load_adapter(self, name: str, folder: Path) -> None:
        if folder.name == "bad":
            raise ConfigError(f"{folder.name} has rank 99, and the engine serves at most 16")
        self.loaded[name] = folder

    async def drop_adapter(self, name: str) -> None:
        del self.loaded[name]


@asynccontextmanager
async def gateway_of(
    backend: FakeBackend, *folders: Path, max_adapters: int = 3
) -> AsyncIterator[tuple[AsyncOpenAI, httpx.AsyncClient, FakeEngines]]:
    engines = FakeEngines()

    def find(place: Path) -> Path:
        if not place.is_dir():
            raise ModelError(f"{place} holds no adapter in PEFT's format")
        return place

    adapters = ServedAdapters(engines, find, folders=folders, max_adapters=max_adapters)
    for folder in folders:
        (folder / "first").mkdir(parents=True)
        await adapters.add("first", folder / "first")
    async with (
        serving(backend, adapters=adapters, api_key="secret", open_to_all=False, aliases=("alias",)) as gateway,
        AsyncOpenAI(base_url=gateway.base_url, api_key="secret", max_retries=0) as client,
        httpx.AsyncClient(base_url=gateway.base_url, headers={"authorization": "Bearer secret"}) as http,
    ):
        yield client, http, engines


async def change(http: httpx.AsyncClient, action: str, **body: object) -> httpx.Response:
    return await http.post(f"/{action}_lora_adapter", json=body)


async def test_requests_name_adapters_as_their_model_in_all_apis(tmp_path: Path):
    backend = FakeBackend()
    async with gateway_of(backend, tmp_path) as (client, http, _):
        assert [model.id async for model in client.models.list()] == ["fake", "alias", "first"]
        assert (await http.get("/models/first")).json()["parent"] == "fake"
        answer = await client.chat.completions.create(model="first", messages=HI)
        assert answer.model == "first"
        await client.completions.create(model="first", prompt="Hi")
        await client.responses.create(model="first", input="Hi")
        base_url = str(client.base_url).removesuffix("/v1/")
        async with AsyncAnthropic(base_url=base_url, api_key="secret", max_retries=0) as anthropic:
            await anthropic.messages.create(model="first", messages=HI, max_tokens=9)
        await client.chat.completions.create(model="alias", messages=HI)
        assert [asked.sampling.adapter for asked in backend.asked] == ["first"] * 4 + [""]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="second", messages=HI)
        assert caught.value.code == "model_not_found"
        assert "available: fake, alias, first" in caught.value.message


async def test_episodes_of_a_run_cannot_name_adapters_nor_change_them(tmp_path: Path):
    adapters = ServedAdapters(FakeEngines(), lambda place: place, folders=(tmp_path,), max_adapters=2)
    await adapters.add("first", tmp_path)
    async with serving(FakeBackend(), adapters=adapters, api_key="secret", open_to_all=False) as gateway:
        session = gateway.open(sampling=Sampling(max_tokens=4))
        headers = {"authorization": f"Bearer {session.key}"}
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers) as http:
            chat = await http.post("/chat/completions", json={"model": "first", "messages": HI})
            assert chat.status_code == 404
            assert "first" not in chat.json()["error"]["message"].partition("available")[2]
            assert (await change(http, "unload", lora_name="first")).status_code == 404
        session.close()


async def test_requests_load_replace_and_drop_adapters(tmp_path: Path):
    (tmp_path / "more" / "second").mkdir(parents=True)
    async with gateway_of(FakeBackend(), tmp_path / "more") as (client, http, engines):
        place = str(tmp_path / "more" / "second")
        answer = await change(http, "load", lora_name="second", lora_path=place)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' added successfully.")
        assert engines.loaded["second"] == Path(place)
        await client.chat.completions.create(model="second", messages=HI)
        again = await change(http, "load", lora_name="second", lora_path=place)
        assert again.status_code == 400
        assert "already been loaded" in again.json()["error"]["message"]
        again = await change(http, "load", lora_name="second", lora_path=place, load_inplace=True)
        assert again.status_code == 200
        answer = await change(http, "unload", lora_name="second", lora_int_id=1)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="second", messages=HI)
        assert set(engines.loaded) == {"first"}


@pytest.mark.parametrize(
    ("action", "body", "status", "message"),
    [
        ("load", {"lora_name": "x"}, 400, "missing parameter: lora_path"),
        ("load", {"lora_name": "", "lora_path": "ROOT/first"}, 400, "must be provided"),
        ("load", {"lora_name": 7, "lora_path": "ROOT/first"}, 400, "invalid lora_name"),
        ("load", {"lora_name": "x", "lora_path": "ROOT/first", "evil": 1}, 400, "evil"),
        ("load", {"lora_name": "fake", "lora_path": "ROOT/first"}, 400, "the model's own name"),
        ("load", {"lora_name": "x", "lora_path": "/etc"}, 403, "in none of the folders"),
        ("load", {"lora_name": "x", "lora_path": "ROOT/../.."}, 403, "in none of the folders"),
        ("load", {"lora_name": "x", "lora_path": "ROOT/link"}, 403, "in none of the folders"),
        ("load", {"lora_name": "x", "lora_path": "ROOT/\0"}, 403, "in none of the folders"),
        ("load", {"lora_name": "x", "lora_path": "ROOT/" + "a/" * 9000}, 403, "in none of the folders"),
        ("load", {"lora_name": "x", "lora_path": "ROOT/none"}, 400, "holds no adapter"),
        ("load", {"lora_name": "x", "lora_path": "ROOT/bad"}, 400, "rank 99"),
        ("unload", {"lora_name": "x"}, 404, "cannot be found"),
        ("unload", {}, 400, "missing parameter: lora_name"),
        ("unload", [], 400, "invalid body"),
    ],
)
async def test_wrong_requests_for_adapters_are_named_errors_and_change_nothing(
    tmp_path: Path, action: str, body: Any, status: int, message: str
):
    root = tmp_path / "root"
    (root / "bad").mkdir(parents=True)
    (root / "link").symlink_to("/etc")
    async with gateway_of(FakeBackend(), root) as (_, http, engines):
        text = json.dumps(body).replace("ROOT", str(root))
        headers = {"content-type": "application/json"}
        answer = await http.post(f"/{action}_lora_adapter", content=text, headers=headers)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]
        assert list(engines.loaded) == ["first"]
        without_key = await http.post(f"/{action}_lora_adapter", json={}, headers={"authorization": "Bearer wrong"})
        assert without_key.status_code == 401


async def test_there_are_limits_to_how_many_and_who_may_load_them(tmp_path: Path):
    place = tmp_path / "first"
    async with gateway_of(FakeBackend(), tmp_path, max_adapters=1) as (_, http, _):
        answer = await change(http, "load", lora_name="second", lora_path=str(place))
        assert "1 adapters are loaded" in answer.json()["error"]["message"]
    async with gateway_of(FakeBackend()) as (_, http, _):  # without folders to load from
        for action in ("load", "unload"):
            answer = await change(http, action, lora_name="first", lora_path=str(place))
            assert answer.status_code == 403
            assert "--adapter-folders" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"adapters": ("math",)}, "--adapters has 'math'"),
        ({"adapters": ("=x",)}, "--adapters has '=x'"),
        ({"adapters": ("a=x", "a=y")}, "names 'a' twice"),
        ({"adapters": ("a=x", "b=y"), "max_adapters": 1}, "--max-adapters is 1"),
        ({"adapter_folders": (Path("x"),), "without_key": "this-machine"}, "--adapter-folders"),
    ],
)
def test_wrong_flags_for_adapters_are_refused(flags: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Config(**flags)


async def test_adapters_that_cannot_be_served_are_refused_before_engines_start(tiny_model: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted(model, tmp_path / "other", target_modules=["q_proj"])
    name = tiny_model.name
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    for text, error, message in (
        (f"{name}={tmp_path / 'other'}", ConfigError, "the model's own name"),
        (f"a={tiny_model}", ModelError, "holds no adapter"),
        (f"a={tmp_path / 'none'}", ModelError, "holds no model"),
        (f"a={tmp_path / 'other'}", ConfigError, "factors of shapes"),
    ):
        with pytest.raises(error, match=message):
            await main(Config(model=str(tiny_model), port=0, adapters=(text,), generator=ENGINE, out=tmp_path / "out"))
        assert not list((tmp_path / "out" / "logs").glob("*"))


def test_an_adapter_with_another_chat_template_than_the_model_is_named(tmp_path: Path):
    folder, model = tmp_path / "adapter", tmp_path / "model"
    folder.mkdir()
    model.mkdir()
    (model / "chat_template.jinja").write_text("{{ messages }}\n")
    assert describe_other_template(folder, model) == "", "it has none of its own"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert describe_other_template(folder, model) == ""
    (folder / "chat_template.jinja").write_text("{{ messages[0] }}")
    assert describe_other_template(folder, model).startswith(f"the adapter in {folder} has another chat template")


@pytest.mark.long
async def test_adapters_answer_as_merged_models_do_and_come_and_go_under_requests(
    tiny_model: Path, tmp_path: Path, nothing_left: None
):
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    models: dict[str, Any] = {tiny_model.name: base}
    runs = tmp_path / "runs"
    for number, name in enumerate(("run", "best", "late")):
        folder = runs / name
        if name != "late":
            folder = folder / "checkpoints" / f"step-{number + 1:06d}" / "model"
        folder.mkdir(parents=True)
        adapted(base, folder, rank=4 * (number + 1), seed=number)
        merged = tmp_path / f"merged-{name}"
        merged.mkdir()
        Adapter.read(folder).merge(tiny_model, merged)
        models[name] = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    steps = runs / "best" / "checkpoints"
    (steps / "best").symlink_to("step-000002")
    shutil.copytree(runs / "run" / "checkpoints" / "step-000001", steps / "step-000009")  # newer, and not the best
    config = Config(
        model=str(tiny_model),
        port=0,
        adapters=(f"run={runs / 'run'}", f"best={runs / 'best'}"),
        adapter_folders=(runs,),
        generator=ENGINE,
        out=tmp_path / "out",
    )
    prompt = list(range(20, 60))

    async def check(client: AsyncOpenAI, name: str, max_tokens: int = 24) -> None:
        answer = await client.completions.create(
            model=name, prompt=prompt, max_tokens=max_tokens, logprobs=0, extra_body={"return_token_ids": True}
        )
        ids = torch.tensor([*prompt, *answer.choices[0].token_ids])  # type: ignore[attr-defined]
        with torch.no_grad():
            logprobs = models[name](ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(1, ids[len(prompt) :, None])[:, 0]
        assert answer.choices[0].logprobs is not None
        assert (torch.tensor(answer.choices[0].logprobs.token_logprobs) - expected).abs().max() < 1e-3, name

    async with (
        program(config, "secret") as (gateway, _, _),
        AsyncOpenAI(base_url=gateway.base_url, api_key="secret", max_retries=0) as client,
        httpx.AsyncClient(base_url=gateway.base_url, headers={"authorization": "Bearer secret"}, timeout=600) as http,
    ):
        assert [model.id async for model in client.models.list()] == [tiny_model.name, "run", "best"]
        await asyncio.gather(*(check(client, name) for name in (tiny_model.name, "run", "best")))
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                for name in (tiny_model.name, "run", "best"):
                    group.create_task(check(client, name, max_tokens=64))
            answer = await change(http, "load", lora_name="late", lora_path=str(runs / "late"))
            assert answer.status_code == 200, answer.text
            group.create_task(check(client, "late"))
            stream = await client.completions.create(model="best", prompt=prompt, max_tokens=200, stream=True)
            await anext(stream)
            assert (await change(http, "unload", lora_name="best")).status_code == 200
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="best", prompt=prompt)
            assert [event.choices[0].finish_reason async for event in stream][-1] in ("length", "stop")
        for name in (tiny_model.name, "run", "late"):
            await check(client, name)
