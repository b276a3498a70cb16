"""The checks that every decode engine must pass, against `forge_rl/engines/protocol.py` alone.

test_engine_conformance runs those in DECODE, on the tiny model. None depends on another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from forge_rl.engines.protocol import DecodeEngine
from forge_rl.errors import AttestationError, ConfigError, WeightsError
from forge_rl.token_arrays import Chunk
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Sampling, Turn
from forge_rl.weights import segment
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import LoadReport, Manifest, ShardReport, TensorSpec, complete, draft
from forge_rl.weights.slices import TensorSlice
from tests.engine_adapters import ADAPTER_CHECKS
from tests.engine_draws import whole_rollouts_draw_each_random_number_once
from tests.multinomial import multinomial_p_value

PROMPT = (1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 35, 47, 2, 198)
LONG_PROMPT = PROMPT * 12
"""More than a block of the prefix cache."""
TOKENS = 200


def completion(seed: int, **settings: object) -> Sampling:
    return Sampling(**{"max_tokens": TOKENS, "seed": seed, **settings})


def publish(
    model: torch.nn.Module, folder: Path, version: int, *, bucket_bytes: int, dtype: torch.dtype = torch.float32
) -> Manifest:
    """A version in the folder's files."""
    weights = dict(model.named_parameters())
    exact = {name: "float32" if name.endswith("e_score_correction_bias") else "" for name in weights}
    specs = [TensorSpec(name=name, shape=tuple(w.shape), dtype=exact[name]) for name, w in weights.items()]
    drafted = draft(specs, version=version, dtype=dtype, bucket_bytes=bucket_bytes)
    refs = {
        bucket.key: segment.create(folder / bucket.key.replace("/", "-"), bucket.bytes) for bucket in drafted.buckets
    }
    memory = {key: segment.writable(ref) for key, ref in refs.items()}
    wholes = {entry: TensorSlice.whole(entry.shape) for entry in drafted.tensors}
    sums = move([Move(e.of(memory[e.bucket]), weights[e.name].detach(), e.shape, w) for e, w in wholes.items()])
    reports = [
        ShardReport(name=entry.name, tensor_slice=whole, fingerprint=value)
        for (entry, whole), value in zip(wholes.items(), sums, strict=True)
    ]
    buckets = tuple(replace(bucket, segment=refs[bucket.key]) for bucket in drafted.buckets)
    return complete(replace(drafted, buckets=buckets), [reports])


async def fetch(manifest: Manifest, folder: Path, fail_at: int) -> AsyncGenerator[segment.SegmentBucket, None]:
    """Keeps no more than a transport promises: a bucket is overwritten, and its file gone, as soon as the next one is
    asked for; the one of number `fail_at` does not come."""
    for number, bucket in enumerate(manifest.buckets):
        if number == fail_at:
            raise WeightsError(f"bucket {bucket.key} did not come")
        assert bucket.segment is not None
        ref = segment.create(folder / "passing", bucket.bytes)
        memory = segment.writable(ref)
        memory.copy_(segment.readable(bucket.segment))
        try:
            yield segment.SegmentBucket(segment=ref, entries=manifest.entries[bucket.key])
        finally:
            memory.fill_(0x7F)
            os.unlink(ref.path)


def changed(model: torch.nn.Module) -> torch.nn.Module:
    """Another model of the same architecture, with weights some way off."""
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))
    return other


def expected(model: torch.nn.Module, turn: Turn) -> torch.Tensor:
    """Logprob of each token by transformers, computed anew from all tokens before it."""
    ids = torch.tensor(tuple(turn.context))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, ids[1:, None])[len(turn.prompt_ids) - 1 :, 0]


def gaps(model: torch.nn.Module, turn: Turn) -> torch.Tensor:
    """Distance of each logprob from transformers'."""
    return (expected(model, turn) - torch.tensor(turn.logprobs)).abs()


def check_logprobs(turn: Turn, models: dict[int, torch.nn.Module]) -> None:
    """Each token's version is one of these, and its logprob is that version's alone."""
    assert set(turn.versions) == models.keys()
    assert turn.versions.tolist() == sorted(turn.versions.tolist())
    versions = torch.tensor(turn.versions)
    for version, model in models.items():
        assert gaps(model, turn)[versions == version].max() < 1e-4, f"tokens of version {version}"


class Stream:
    """A completion that is collected as it is decoded."""

    def __init__(self, engine: DecodeEngine, sampling: Sampling, prompt: Sequence[int]) -> None:
        self.chunks: list[Chunk] = []
        self._prompt = tuple(prompt)
        self._task = asyncio.create_task(self._collect(engine, sampling))

    @property
    def count(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def turn(self) -> Turn:
        """The whole completion."""
        await self._task
        return Turn(
            prompt_ids=self._prompt,
            token_ids=np.concatenate([chunk.token_ids for chunk in self.chunks]),
            logprobs=np.concatenate([chunk.logprobs for chunk in self.chunks]),
            versions=np.concatenate([chunk.versions for chunk in self.chunks]),
            text="".join(chunk.text for chunk in self.chunks),
            truncated=self.chunks[-1].finish == "length",
        )

    async def _collect(self, engine: DecodeEngine, sampling: Sampling) -> None:
        async for chunk in engine.stream(self._prompt, sampling):
            self.chunks.append(chunk)


@dataclass
class Decoder:
    """An engine under check, with the transformers model whose weights it last loaded.

    Versions are variations of the first model, so that a check does not depend on those before it.
    """

    engine: DecodeEngine
    folder: Path
    """Folder of the versions."""
    tokenizer: Tokenizer
    unfinished: Callable[[], int]
    """Requests that the engine still has."""
    base: torch.nn.Module
    """Model that the engine was started with."""
    speculates: bool = False
    """Whether it drafts tokens."""
    serves_adapters: bool = False
    version: int = 0
    model: torch.nn.Module = field(init=False)

    def publish(self, *, bucket_bytes: int = 1 << 20) -> tuple[torch.nn.Module, Manifest]:
        """The next version."""
        self.version += 1
        model = changed(self.base)
        return model, publish(model, self.folder, self.version, bucket_bytes=bucket_bytes)

    async def load(self, manifest: Manifest, *, fail_at: int = -1) -> LoadReport:
        async with contextlib.aclosing(fetch(manifest, self.folder, fail_at)) as buckets:
            return await self.engine.load(manifest, buckets, reader="engine 7")

    async def load_next(self, **settings: int) -> dict[int, torch.nn.Module]:
        """Publish and load a version; returns its model by its number."""
        self.model, manifest = self.publish(**settings)
        report = await self.load(manifest)
        assert report.version == self.version
        return {self.version: self.model}

    async def pause(self) -> None:
        await self.engine.hold(paused=True, asleep=False)

    async def resume(self) -> None:
        await self.engine.hold(paused=False, asleep=False)

    def stream(self, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> Stream:
        return Stream(self.engine, sampling, prompt)

    async def complete(self, sampling: Sampling, prompt: Sequence[int] = PROMPT) -> Turn:
        return await self.stream(sampling, prompt).turn()

    async def start(self, prompt: Sequence[int] = PROMPT) -> list[Stream]:
        """Requests in flight that have some of their tokens, and not all."""
        streams = [self.stream(completion(seed), prompt) for seed in range(4)]
        await self.complete(completion(99, max_tokens=8), prompt)  # those before it have got as far
        return streams

    async def standing_still(self, streams: Sequence[Stream]) -> list[int]:
        """Tokens that the streams have; fails if more come."""
        before: list[int] = []
        while (found := [stream.count for stream in streams]) != before:  # what was decoded before may be on its way
            before = found
            await asyncio.sleep(0.5)
        assert all(0 < count < TOKENS for count in before), "an engine that stands still decodes to the end"
        return before


async def a_completion_comes_in_pieces_and_ends_with_a_reason(decoder: Decoder) -> None:
    models = await decoder.load_next()
    stream = decoder.stream(completion(0))
    turn = await stream.turn()
    assert len(stream.chunks) > 1, "it comes in pieces"
    assert [chunk.finish for chunk in stream.chunks] == [""] * (len(stream.chunks) - 1) + ["length"]
    assert all(chunk.top == () for chunk in stream.chunks)
    assert len(turn.token_ids) == TOKENS
    assert turn.truncated
    check_logprobs(turn, models)
    again = await decoder.complete(completion(0))
    assert again.token_ids.tolist() == turn.token_ids.tolist(), "a seed draws the same tokens again"
    (gathered,) = [chunk async for chunk in decoder.engine.stream(PROMPT, completion(0), gather_s=3600)]
    assert gathered.token_ids.tolist() == turn.token_ids.tolist(), "what is gathered is sent with the end, not later"
    assert (gathered.text, gathered.finish) == (turn.text, "length")
    assert gathered.logprobs.tolist() == pytest.approx(turn.logprobs.tolist(), abs=1e-4)
    assert gathered.versions.tolist() == turn.versions.tolist()
    assert again.text == turn.text


async def a_seed_decides_each_token_by_its_position(decoder: Decoder) -> None:
    """Whatever else is decoded, drafted, or already in the prompt."""
    await decoder.load_next()
    turn = await decoder.complete(completion(5))
    running = await decoder.start()
    ids, places = turn.token_ids.tolist(), range(0, TOKENS, 9)
    single = [decoder.stream(completion(5, max_tokens=1), [*PROMPT, *ids[:place]]) for place in places]  # no draft
    assert [(await stream.turn()).token_ids.tolist() for stream in single] == [[ids[place]] for place in places]
    rest = await decoder.complete(completion(5, max_tokens=TOKENS - 70), [*PROMPT, *ids[:70]])
    assert rest.token_ids.tolist() == ids[70:]
    answers = [turn, *[await stream.turn() for stream in running]]
    assert len({tuple(answer.token_ids.tolist()) for answer in answers}) == 5


async def a_stop_text_ends_a_completion(decoder: Decoder) -> None:
    await decoder.load_next()
    whole = await decoder.complete(completion(0))
    stop = next(part for at in range(40, 200) if (part := whole.text[at : at + 4]).isascii() and part.isalpha())
    turn = await decoder.complete(completion(0, stop=("no such text", stop)))
    assert not turn.truncated
    assert turn.text == whole.text[: whole.text.index(stop)]
    assert turn.token_ids.tolist() == whole.token_ids[: len(turn.token_ids)].tolist()
    assert stop in decoder.tokenizer.decode(turn.token_ids)
    assert stop not in decoder.tokenizer.decode(turn.token_ids[:-1])


async def the_likeliest_tokens_are_those_of_transformers(decoder: Decoder) -> None:
    await decoder.load_next()
    for temperature in (1.0, 0.0):
        stream = decoder.stream(completion(1, max_tokens=20, temperature=temperature, top_logprobs=3))
        turn = await stream.turn()
        with torch.no_grad():
            logits = decoder.model(torch.tensor([tuple(turn.context)])).logits[0].float()
        expected = logits[len(PROMPT) - 1 : -1].log_softmax(-1).topk(3)
        top = [pairs for chunk in stream.chunks for pairs in chunk.top]
        assert [[token for token, _ in pairs] for pairs in top] == expected.indices.tolist()
        found = torch.tensor([[logprob for _, logprob in pairs] for pairs in top])
        assert (found - expected.values).abs().max() < 1e-4
        if temperature == 0:
            assert [pairs[0][0] for pairs in top] == list(turn.token_ids)
            assert all(math.isnan(logprob) for logprob in turn.logprobs)
        else:
            assert gaps(decoder.model, turn).max() < 1e-4


async def a_request_that_cannot_be_served_is_a_config_error(decoder: Decoder) -> None:
    await decoder.load_next()
    with pytest.raises(ConfigError, match=r"does not take the request: .*logprobs"):
        await decoder.complete(completion(0, max_tokens=8, top_logprobs=5000))
    with pytest.raises(ConfigError, match=r"does not take the request: .*temperature must be in \[0, 2\]"):
        await decoder.complete(completion(0, max_tokens=8, temperature=2.5))
    for extra in ({"min_tokens": "x"}, {"stop_token_ids": 5}, {"priority": []}):  # which would end vLLM's only reader
        with pytest.raises(ConfigError, match="does not take the request"):
            await decoder.complete(completion(0, max_tokens=8, extra=extra))
    assert len((await decoder.complete(completion(0, max_tokens=8))).token_ids) == 8


async def given_tokens_are_scored_as_transformers_does_at_any_temperature(decoder: Decoder) -> None:
    await decoder.load_next()
    turn = await decoder.complete(completion(1, max_tokens=20), LONG_PROMPT)
    with torch.no_grad():
        logits = decoder.model(torch.tensor([tuple(turn.context)])).logits[0].float()[len(LONG_PROMPT) - 1 : -1]
    requests = [(1.0, 3), (0.7, 5), (1.0, 0), (2.0, 40)]  # together, so that vLLM scores them in one step
    found = await asyncio.gather(
        *(decoder.engine.score(LONG_PROMPT, turn.token_ids, temperature=t, top_k=k) for t, k in requests)
    )
    for (temperature, k), scored in zip(requests, found, strict=True):
        expected = (logits / temperature).log_softmax(-1)
        own = expected.gather(1, torch.tensor(turn.token_ids).long()[:, None])[:, 0]
        assert (torch.tensor(scored.logprobs) - own).abs().max() < 1e-4
        assert scored.top_ids.shape == scored.top_logprobs.shape == (20, k)
        if k:
            top = expected.topk(k)
            assert (torch.tensor(scored.top_logprobs) - top.values).abs().max() < 1e-4
            assert scored.top_ids[:, :3].tolist() == top.indices[:, :3].tolist()
    assert torch.tensor(found[0].logprobs).sub(torch.tensor(turn.logprobs)).abs().max() < 1e-4
    assert decoder.unfinished() == 0
    old = found[0]
    await decoder.load_next()
    new = await decoder.engine.score(LONG_PROMPT, turn.token_ids)
    assert torch.tensor(new.logprobs).sub(torch.tensor(old.logprobs)).abs().max() > 1e-2, "those of the old weights"
    assert len((await decoder.engine.score(PROMPT, ())).logprobs) == 0
    with pytest.raises(ConfigError, match="does not take the request"):
        await decoder.engine.score(LONG_PROMPT * 5, turn.token_ids)


async def closing_a_stream_ends_its_request(decoder: Decoder) -> None:
    await decoder.load_next()
    async with contextlib.aclosing(decoder.engine.stream(PROMPT, completion(7))) as chunks:
        await anext(chunks)
        assert decoder.unfinished() == 1
    assert decoder.unfinished() == 0


async def buckets_may_be_small_and_gone_with_the_next_one(decoder: Decoder) -> None:
    for bucket_bytes in (64 << 10, 20 << 10, 64 << 20):
        decoder.model, manifest = decoder.publish(bucket_bytes=bucket_bytes)
        places = {entry.name.partition("layers.1.")[2]: entry.bucket for entry in manifest.tensors}
        straddling = places["self_attn.q_proj.weight"] != places["self_attn.v_proj.weight"]
        assert straddling == (bucket_bytes < 1 << 20)
        report = await decoder.load(manifest)
        assert report.version == decoder.version
        assert report.fingerprints == {entry.name: entry.fingerprint for entry in manifest.tensors}
        assert 0 < report.in_place <= len(manifest.tensors)
        assert set(report.seconds) == {"wait", "pause", "load", "fingerprint", "finish"}
        assert min(report.seconds.values()) > 0
        check_logprobs(await decoder.complete(completion(0, max_tokens=16)), {decoder.version: decoder.model})


async def requests_in_flight_go_on_under_the_new_version(decoder: Decoder) -> None:
    seen: list[set[int]] = []
    while not seen or (len(seen) < 5 and len(seen[-1]) == 1):  # else they ended before the load began
        old = await decoder.load_next()
        decoder.model, manifest = decoder.publish()
        new = {decoder.version: decoder.model}
        streams = await decoder.start(LONG_PROMPT)
        load = asyncio.create_task(decoder.load(manifest))
        meanwhile = await decoder.complete(completion(3, max_tokens=8), LONG_PROMPT)
        await load
        turns = [await stream.turn() for stream in streams]
        later = await decoder.complete(completion(4, max_tokens=8), LONG_PROMPT)
        for turn in (*turns, meanwhile, later):
            check_logprobs(turn, {version: (old | new)[version] for version in turn.versions})
        assert set(later.versions) == new.keys(), "a block of the old weights was used"
        seen.append(set.union(*(set(turn.versions.tolist()) for turn in turns)))
    assert len(seen[-1]) == 2, seen


def of_few_words(model: torch.nn.Module) -> tuple[torch.nn.Module, list[int]]:
    """The model, changed so that it writes only three tokens, and these in many orders; and the tokens.

    Element 0 of the residual stream becomes a constant, by which the output projection suppresses the others.
    """
    words = [301, 302, 303]
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0
        weights["model.embed_tokens.weight"][:, 0] = 0.2
        weights["lm_head.weight"].mul_(10)[:, 0] = -10
        weights["lm_head.weight"][words, 0] = 0
    return model, words


async def answers_that_repeat_each_other_are_sampled_exactly(decoder: Decoder) -> None:
    models: dict[int, torch.nn.Module] = {}
    manifests = []
    for _ in range(2):
        decoder.version += 1
        models[decoder.version], words = of_few_words(changed(decoder.base))
        manifests.append(publish(models[decoder.version], decoder.folder, decoder.version, bucket_bytes=1 << 20))
    await decoder.load(manifests[0])
    first = models[manifests[0].version]
    counts = np.zeros((3, 3, 3), np.int64)
    for _ in range(10):
        waves = [decoder.stream(Sampling(max_tokens=6)) for _ in range(60)]
        for turn in [await stream.turn() for stream in waves]:
            counts[tuple(words.index(token) for token in turn.token_ids[:3])] += 1
    check_logprobs(turn, {manifests[0].version: first})
    orders = torch.cartesian_prod(*[torch.tensor(words)] * 3)
    with torch.no_grad():
        logits = first(torch.cat([torch.tensor(PROMPT).expand(27, -1), orders], 1)).logits[:, -4:-1].double()
    probs = logits.log_softmax(-1).gather(2, orders[:, :, None]).sum((1, 2)).exp()
    assert multinomial_p_value(counts.flatten(), probs.numpy()) > 1e-4
    streams = await decoder.start()
    await decoder.load(manifests[1])
    for stream in streams:
        check_logprobs(await stream.turn(), models)
    drafted = sum(stream.chunks[-1].drafted for stream in streams)
    accepted = sum(stream.chunks[-1].accepted for stream in streams)
    assert (0 < accepted < drafted) if decoder.speculates else (accepted == drafted == 0)


async def after_a_load_that_fails_nothing_is_served_until_one_succeeds(decoder: Decoder) -> None:
    old = await decoder.load_next()
    model, manifest = decoder.publish(bucket_bytes=64 << 10)
    streams = await decoder.start()
    with pytest.raises(WeightsError, match=rf"bucket {decoder.version}/3 did not come"):
        await decoder.load(manifest, fail_at=3)
    with pytest.raises(WeightsError, match=f"serves nothing: version {decoder.version} could not be loaded"):
        await decoder.complete(completion(0, max_tokens=8))
    await decoder.resume()
    await decoder.standing_still(streams)
    await decoder.load(manifest)
    decoder.model = model
    for stream in streams:
        check_logprobs(await stream.turn(), old | {decoder.version: model})


async def a_version_that_does_not_fit_is_refused(decoder: Decoder) -> None:
    await decoder.load_next()
    _, good = decoder.publish(bucket_bytes=64 << 10)
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        (entry,) = [entry for entry in good.tensors if entry.name == name]
        (bucket,) = [bucket for bucket in good.buckets if bucket.key == entry.bucket]
        assert bucket.segment is not None
        segment.writable(bucket.segment)[entry.offset + 77] ^= 1  # one bit
    with pytest.raises(
        AttestationError,
        match=rf"engine 7 holds other weights than version {decoder.version}: 2 of {len(good.tensors)} tensors differ: "
        r"model\.embed_tokens\.weight, model\.layers\.1\.self_attn\.k_proj\.weight",
    ):
        await decoder.load(good)

    def without(name: str) -> Manifest:
        return replace(good, tensors=tuple(entry for entry in good.tensors if entry.name != name))

    with pytest.raises(WeightsError, match=r"leaves 1 of the engine's weights unchanged: .*input_layernorm"):
        await decoder.load(without("model.layers.0.input_layernorm.weight"))
    with pytest.raises(WeightsError, match=r"part of model\.layers\.0\.mlp\.gate_up_proj"):
        await decoder.load(without("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match="does not fit the engine's model"):
        await decoder.load(replace(good, tensors=(*good.tensors[:-1], replace(good.tensors[-1], shape=(7,)))))
    with pytest.raises(WeightsError, match="serves nothing"):
        await decoder.complete(completion(0))
    models = await decoder.load_next(bucket_bytes=64 << 10)
    check_logprobs(await decoder.complete(completion(0, max_tokens=16)), models)


async def paused_requests_go_on_as_if_nothing_had_been(decoder: Decoder) -> None:
    await decoder.load_next()
    undisturbed = [await stream.turn() for stream in await decoder.start()]
    await decoder.resume()  # nothing was paused: nothing happens
    streams = await decoder.start()
    await decoder.pause()
    await decoder.pause()
    late = decoder.stream(completion(5))
    await decoder.standing_still(streams)
    assert not late.count
    await decoder.resume()
    await decoder.resume()
    for stream, expected in zip(streams, undisturbed, strict=True):
        turn = await stream.turn()
        assert turn.token_ids.tolist() == expected.token_ids.tolist()
        assert turn.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert len((await late.turn()).token_ids) == TOKENS


async def a_load_while_paused_leaves_it_paused(decoder: Decoder) -> None:
    old = await decoder.load_next()
    streams = await decoder.start()
    await decoder.pause()
    new = await decoder.load_next()
    counts = await decoder.standing_still(streams)
    await decoder.resume()
    await check_switch(streams, counts, old, new)


async def resume_waits_for_a_load_that_is_under_way(decoder: Decoder) -> None:
    old = await decoder.load_next()
    streams = await decoder.start()
    await decoder.pause()
    load = asyncio.create_task(decoder.load_next(bucket_bytes=20 << 10))  # many, so that there is time
    while not load.done():
        await asyncio.sleep(0)
        await decoder.resume()
    new = await load
    for stream in streams:
        check_logprobs(await stream.turn(), old | new)


async def resume_does_not_serve_half_of_a_version(decoder: Decoder) -> None:
    old = await decoder.load_next()
    model, manifest = decoder.publish(bucket_bytes=64 << 10)
    streams = await decoder.start()
    await decoder.pause()
    with pytest.raises(WeightsError, match="did not come"):
        await decoder.load(manifest, fail_at=3)
    await decoder.resume()
    counts = await decoder.standing_still(streams)
    await decoder.load(manifest)
    decoder.model = model
    await check_switch(streams, counts, old, {decoder.version: model})


async def sleeping_requests_go_on_under_what_was_loaded_meanwhile(decoder: Decoder) -> None:
    old = await decoder.load_next()
    streams = await decoder.start()
    await decoder.engine.hold(paused=False, asleep=True)
    await decoder.engine.hold(paused=False, asleep=True)
    before = await decoder.standing_still(streams)
    await decoder.engine.hold(paused=True, asleep=True)
    await decoder.engine.hold(paused=True, asleep=False)
    assert await decoder.standing_still(streams) == before
    await decoder.resume()
    await decoder.engine.hold(paused=False, asleep=True)
    new = await decoder.load_next()
    counts = await decoder.standing_still(streams)
    await decoder.resume()
    await check_switch(streams, counts, old, new)


async def check_switch(
    streams: Sequence[Stream], counts: Sequence[int], old: dict[int, torch.nn.Module], new: dict[int, torch.nn.Module]
) -> None:
    """Checks that so many tokens are of the old version, and all others of the new one, computed anew."""
    for stream, count in zip(streams, counts, strict=True):
        turn = await stream.turn()
        assert turn.versions.tolist() == [*old] * count + [*new] * (TOKENS - count)
        check_logprobs(turn, old | new)


DECODE: dict[str, Callable[[Decoder], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        a_completion_comes_in_pieces_and_ends_with_a_reason,
        a_seed_decides_each_token_by_its_position,
        a_stop_text_ends_a_completion,
        the_likeliest_tokens_are_those_of_transformers,
        a_request_that_cannot_be_served_is_a_config_error,
        given_tokens_are_scored_as_transformers_does_at_any_temperature,
        closing_a_stream_ends_its_request,
        buckets_may_be_small_and_gone_with_the_next_one,
        requests_in_flight_go_on_under_the_new_version,
        answers_that_repeat_each_other_are_sampled_exactly,
        after_a_load_that_fails_nothing_is_served_until_one_succeeds,
        a_version_that_does_not_fit_is_refused,
        paused_requests_go_on_as_if_nothing_had_been,
        a_load_while_paused_leaves_it_paused,
        resume_waits_for_a_load_that_is_under_way,
        resume_does_not_serve_half_of_a_version,
        sleeping_requests_go_on_under_what_was_loaded_meanwhile,
        whole_rollouts_draw_each_random_number_once,
        *ADAPTER_CHECKS,
    )
}
