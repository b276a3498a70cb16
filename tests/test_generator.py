"""A real vLLM engine behind the gateway: sessions record what it draws; weights are attested, and computed with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from apps.gateway import Config, serving
from forge_rl.errors import AttestationError, ConfigError, ReplicaError, WeightsError
from forge_rl.forecast.transfer import LOAD
from forge_rl.gateway import Gateway
from forge_rl.runtime.faults import Faults
from forge_rl.services.generator import Generator
from forge_rl.services.weight_store import WeightStore
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Sampling, Task, Turn
from forge_rl.weights.manifest import Manifest, TensorSpec
from forge_rl.weights.segment import writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard
from tests.conftest import left_behind, started_processes

KEY = "the-owner-of-this-gateway"
PROMPT = (1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 35, 47, 2, 198)


async def publish(store: WeightStore, weights: Mapping[str, torch.Tensor], version: int) -> Manifest:
    """Publish as a trainer of one rank does."""
    specs = [TensorSpec(name=name, shape=tuple(weight.shape)) for name, weight in weights.items()]
    shards = [
        LocalShard(name=name, tensor_slice=TensorSlice.whole(weight.shape), values=weight)
        for name, weight in weights.items()
    ]
    async with store.publishing(version, specs, torch.float32) as publication:
        reports = await store.transport().write(publication.draft, shards, rank=0)
        return await publication.commit([reports])


def gap(model: torch.nn.Module, turn: Turn) -> float:
    """Largest difference between the engine's logprobs and transformers'."""
    ids = torch.tensor(tuple(turn.context))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[1:, None])[len(turn.prompt_ids) - 1 :, 0]
    return float((expected - torch.tensor(turn.logprobs)).abs().max())


class Serving:
    """A gateway with one engine, and the loop that they live in."""

    def __init__(self, runner: asyncio.Runner, parts: tuple[Gateway, Generator, Faults]) -> None:
        self._runner = runner
        self.gateway, self.generator, self.faults = parts

    def run(self, work: Awaitable[None]) -> None:
        async def limited() -> None:
            await asyncio.wait_for(work, 300)

        self._runner.run(limited())


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one-device"), pytest.param(2, id="two-devices", marks=pytest.mark.nightly)],
)
def served_engine(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    before = started_processes()
    engine = Generator.Config(
        dtype="float32", max_model_len=256, max_tokens=8, kv_cache_gib=0.25, tensor_parallel_size=request.param
    )
    config = Config(model=str(tiny_model), port=0, generator=engine, out=tmp_path_factory.mktemp("gateway"))
    with asyncio.Runner() as runner:
        context = serving(config, KEY)
        yield Serving(runner, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))
    assert not left_behind(before), "processes are left"


def test_sessions_record_what_a_real_engine_draws(served_engine: Serving, tiny_model: Path) -> None:
    served_engine.run(_check_sessions(served_engine.gateway, served_engine.generator, tiny_model))


def test_prompts_are_scored_as_transformers_does(served_engine: Serving, tiny_model: Path) -> None:
    served_engine.run(_check_scores(served_engine, tiny_model))


async def _check_scores(served: Serving, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts = [[5, 9, 14, 3, 77, 8], [31, 2, 9]]
    async with AsyncOpenAI(base_url=served.gateway.base_url, api_key=KEY, max_retries=0) as client:
        done = await client.completions.create(
            model="tiny", prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, choice in zip(prompts, done.choices, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert choice.logprobs is not None
        logprobs, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert logprobs is not None
        assert tops is not None
        assert logprobs[0] is None
        expected = [float(scores[position, token]) for position, token in enumerate(prompt[1:])]
        assert logprobs[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
        assert [max(top.values()) for top in tops[1:]] == pytest.approx(scores.max(-1).values.tolist(), abs=1e-4)


async def _check_sessions(gateway: Gateway, generator: Generator, folder: Path) -> None:
    hi: Any = {"role": "user", "content": "Hi"}
    session = gateway.open(sampling=Sampling(max_tokens=12, seed=5))
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
        first = await client.chat.completions.create(model="tiny", messages=[hi], logprobs=True, top_logprobs=2)
        entries = first.choices[0].logprobs
        assert entries is not None
        assert entries.content is not None
        messages: list[Any] = [hi, first.choices[0].message, {"role": "user", "content": "And now?"}]
        text = ""
        async for chunk in await client.chat.completions.create(model="tiny", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
        several = await client.chat.completions.create(model="tiny", messages=[hi], n=3)
    turns = session.close()
    # A client that goes away frees its place on the engine.
    session = gateway.open(sampling=Sampling(max_tokens=200))
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="tiny", messages=[hi], stream=True)
        await anext(stream)
        await stream.close()
    async with asyncio.timeout(60):
        while "in flight by replica: 0: 0" not in repr(generator):  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)
    assert session.close() == ()

    tokenizer = Tokenizer(folder)
    assert tuple(turns[0].prompt_ids) == tokenizer.render([hi])
    assert [token.logprob for token in entries.content] == list(turns[0].logprobs)
    assert all(-30 < logprob < 0 for turn in turns for logprob in turn.logprobs)
    assert tuple(turns[1].prompt_ids) == tuple(tokenizer.extend(turns[0].context, [messages[2]]))
    assert turns[1].text == text
    assert [turn.text for turn in turns[2:]] == [choice.message.content for choice in several.choices]
    siblings = [turn for turn in turns if tuple(turn.prompt_ids) == tuple(turns[0].prompt_ids)]
    assert len({tuple(turn.token_ids) for turn in siblings}) == 4
    assert {version for turn in turns for version in turn.versions} == {0}
    task = Task(id="1", source="s", messages=(hi,))
    segments = Episode(task=task, turns=turns[:2]).segments
    assert len(segments) == 1
    assert math.isfinite(sum(segments[0].logprobs))


def test_a_constraint_holds_and_one_that_cannot_be_had_costs_no_engine(served_engine: Serving) -> None:
    served_engine.run(_check_constraints(served_engine.generator))


async def _check_constraints(generator: Generator) -> None:
    def asked(**constraint: object) -> Sampling:
        return Sampling(max_tokens=30, extra={"structured_outputs": constraint, "top_p": 0.9})

    # What the engine's backend does not have is refused, and makes it no other for all that follow.
    properties = {"type": "object", "properties": {"a": {"type": "string"}}, "patternProperties": {"^b": {}}}
    with pytest.raises(ConfigError, match="not supported by xgrammar"):
        await generator.generate(PROMPT, asked(json=properties))
    turn = await generator.generate(PROMPT, asked(choice=["yes", "no"]))
    assert turn.text in ("yes", "no")
    assert all(math.isfinite(logprob) for logprob in turn.logprobs)
    turn = await generator.generate(PROMPT, asked(json={"type": "object", "properties": {}, "maxProperties": 0}))
    assert turn.text.replace(" ", "").startswith("{")
    before = repr(generator.engines())
    # The first is refused before it is decoded, the second while its grammar is made.
    for regex in ("((((", "a{1,100}{1,100}"):
        with pytest.raises(ConfigError, match="vLLM"):
            await generator.generate(PROMPT, asked(regex=regex))
    assert (await generator.generate(PROMPT, asked(choice=["no"]))).text == "no"
    with pytest.raises(ConfigError, match="not finite under the request's repetition_penalty"):
        await generator.generate(PROMPT, Sampling(max_tokens=9, extra={"repetition_penalty": 1e-300}))
    assert repr(generator.engines()) == before


@pytest.mark.long
async def test_a_spare_with_the_same_weights_replaces_an_engine_whose_step_hangs(
    tiny_model: Path, tmp_path: Path, nothing_left: None
) -> None:
    engine = Generator.Config(dtype="float32", max_model_len=256, kv_cache_gib=0.25, stall_s=10, spares=1)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))
    async with serving(Config(model=str(tiny_model), port=0, generator=engine, out=tmp_path)) as served:
        _, generator, faults = served
        service = generator._service
        store = await WeightStore.start(WeightStore.Config(), service.cluster, faults, deadline_s=120)
        await publish(store, dict(model.named_parameters()), 1)
        await generator.load(store)
        while not generator.spares:
            await service.change()
        grammar = 'root ::= (("a"? "b"? [a-zA-Z ]?){1,3000}){1,3000}'
        hostile = Sampling(max_tokens=40, extra={"structured_outputs": {"grammar": grammar}})
        begun = asyncio.Event()
        decoding = generator.generate(PROMPT, Sampling(max_tokens=200), observe=lambda chunk: begun.set(), gather_s=0.0)
        honest = asyncio.create_task(decoding)
        await begun.wait()
        with pytest.raises(ReplicaError, match="hung: a step of its vLLM engine took longer"):
            await generator.generate(PROMPT, hostile)
        for turn in (await honest, await generator.generate(PROMPT, Sampling(max_tokens=20))):
            assert gap(model, turn) < 1e-4
            assert set(turn.versions) == {1}
        (fault,) = faults.seen
        assert fault.cause.startswith("hung")
        assert fault.recovered_s is not None
        assert service.replicas[0].log.name == "generator-1.log", "the spare's"
        assert generator.answers
        faults.closing = True
        await store.stop()


@pytest.mark.long
async def test_requests_beyond_the_kv_cache_finish_and_lower_the_limit(
    tiny_model: Path, tmp_path: Path, nothing_left: None
) -> None:
    # 64 blocks of 32 tokens; a request grows to 7 of them.
    engine = Generator.Config(dtype="float32", max_model_len=256, kv_cache_gib=1 / 1024, max_num_seqs=32)

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    async with serving(Config(model=str(tiny_model), port=0, generator=engine, out=tmp_path)) as served:
        _, generator, faults = served

        async def answer(tokens: int, count: int) -> tuple[list[Turn], dict[str, float]]:
            """Decode this many requests at once, past the limit."""
            seeds = [Sampling(max_tokens=tokens, seed=seed) for seed in range(count)]
            turns = await asyncio.gather(*[generator.generate(PROMPT, sampling) for sampling in seeds])
            return turns, generator.pop_metrics()

        _, engine_metrics = await answer(12, 32)
        assert engine_metrics["generator/preemptions"] == 0, "each fits into one block"
        assert generator.engines() == {0: 32}

        turns, engine_metrics = await answer(200, 32)
        assert max(len(turn.token_ids) for turn in turns) == 200
        assert max(gap(model, turn) for turn in turns) < 1e-4
        assert engine_metrics["generator/preemptions"] > 0
        assert engine_metrics["generator/waiting"] > 0
        assert engine_metrics["generator/kv_cache_usage"] > 0.9
        limit = generator.engines()[0]
        assert 8 <= engine_metrics["generator/request_limit"] <= limit < 32, "9 always fit"

        for _ in range(3):
            assert (await answer(8, 32))[1]["generator/preemptions"] == 0
        assert limit < generator.engines()[0], "it grows once there is room"
        assert faults.seen == []


def test_an_engine_computes_with_the_weights_that_were_published_last(served_engine: Serving, tiny_model: Path) -> None:
    served_engine.run(_check_weights(served_engine.generator, served_engine.faults, tiny_model))


async def _check_weights(generator: Generator, faults: Faults, folder: Path) -> None:
    store = await WeightStore.start(WeightStore.Config(), generator._service.cluster, faults, deadline_s=120)
    try:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version in (3, 4):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + 0.2 * torch.randn_like(weight))
            manifest = await publish(store, dict(model.named_parameters()), version)
            assert await generator.load(store) == version
            # Two workers share all but norms and the only key head.
            share = {1: 1, 2: 0.51}[generator.config.devices]
            (load,) = generator.last_load
            assert generator.load_s.keys() == set(LOAD)
            assert 0 < generator.load_s["load"] < sum(generator.load_s.values())
            assert len(load.bytes_read) == generator.config.devices
            assert max(load.bytes_read) <= share * manifest.bytes
            turns = await asyncio.gather(
                *[generator.generate(PROMPT, Sampling(max_tokens=8, seed=seed)) for seed in range(6)]
            )
            for turn in turns:
                assert gap(model, turn) < 1e-4
                assert set(turn.versions) == {version}
                assert tuple(turn.prompt_ids) == PROMPT
        assert 0 < load.in_place <= len(load.fingerprints)

        assert 0 < generator.pop_metrics()["generator/kv_cache_usage"] < 0.5
        second_turn = await generator.generate(PROMPT, Sampling(max_tokens=8, seed=0))
        assert tuple(second_turn.token_ids) == tuple(turns[0].token_ids), "a seed decides an answer"
        assert isinstance(await generator.chat("What is 2 + 3?"), str)
        with pytest.raises(ConfigError, match=r"--generator\.max-model-len"):
            await generator.generate(PROMPT * 20)

        manifest = await publish(store, dict(model.named_parameters()), 5)
        assert manifest.buckets[0].segment is not None
        writable(manifest.buckets[0].segment)[4096] ^= 1  # one bit of one weight
        with pytest.raises(AttestationError, match=r"1 of \d+ tensors differ: model\.embed_tokens"):
            await generator.load(store, 5)
        with pytest.raises(WeightsError, match="no weights: loading version 5 failed"):
            await generator.generate(PROMPT)
    finally:
        await store.stop()
