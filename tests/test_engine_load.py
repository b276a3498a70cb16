"""Loads into a real vLLM engine: by small buckets, while requests are in flight, and such that fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_rl.data.bundled import bundled_model, default_cache
from forge_rl.errors import AttestationError, WeightsError
from forge_rl.runtime.cluster import THIS_HOST, Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.services.generator import Generator
from forge_rl.services.generator_actor import GeneratorActor
from forge_rl.types import Sampling, Turn
from forge_rl.weights import segment
from forge_rl.weights.fingerprints import Move, move
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec, complete, draft
from forge_rl.weights.slices import TensorSlice
from tests.tiny import make_tiny_model

PROMPT = (1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 35, 47, 2, 198)
LONG_PROMPT = PROMPT * 12
"""More than a block of the prefix cache."""


@dataclass(frozen=True)
class FolderTransport:
    """A reader's side of a transport that keeps no more than it promises: a bucket is overwritten, and its file gone,
    as soon as the next one is asked for."""

    folder: Path
    fail_at: int = -1
    """Number of a bucket that does not come."""

    async def fetch(
        self, manifest: Manifest, names: Collection[str] | None = None
    ) -> AsyncGenerator[segment.SegmentBucket, None]:
        for number, bucket in enumerate(manifest.buckets):
            if number == self.fail_at:
                raise WeightsError(f"bucket {bucket.key} did not come")
            assert bucket.segment is not None
            ref = segment.create(self.folder / "passing", bucket.bytes)
            memory = segment.writable(ref)
            memory.copy_(segment.readable(bucket.segment))
            try:
                yield segment.SegmentBucket(segment=ref, entries=manifest.entries(bucket.key))
            finally:
                memory.fill_(0x7F)
                os.unlink(ref.path)


class Shelf:
    """Versions in a folder, with what Generator.load asks of a WeightStore."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest
        self.fail_at = -1
        folder.mkdir()

    def put(self, model: torch.nn.Module, version: int, *, bucket_bytes: int) -> Manifest:
        weights = dict(model.named_parameters())
        specs = [TensorSpec(name=name, shape=tuple(weight.shape)) for name, weight in weights.items()]
        manifest = draft(specs, version=version, dtype=torch.float32, bucket_bytes=bucket_bytes)
        buckets = [
            replace(b, segment=segment.create(self.folder / b.key.replace("/", "-"), b.bytes)) for b in manifest.buckets
        ]
        memory = {bucket.key: segment.writable(bucket.segment) for bucket in buckets}
        sums = move(
            [
                Move(e.of(memory[e.bucket]), weights[e.name].detach(), e.shape, TensorSlice.whole(e.shape))
                for e in manifest.tensors
            ]
        )
        reports = [
            ShardReport(name=entry.name, tensor_slice=TensorSlice.whole(entry.shape), fingerprint=value)
            for entry, value in zip(manifest.tensors, sums, strict=True)
        ]
        self.manifest = complete(replace(manifest, buckets=tuple(buckets)), [reports])
        return self.manifest

    def transport(self, host: str = THIS_HOST) -> FolderTransport:
        return FolderTransport(self.folder, self.fail_at)

    @contextlib.asynccontextmanager
    async def lease(self, version: int | None = None) -> AsyncIterator[Manifest]:
        yield self.manifest


def change(model: torch.nn.Module) -> torch.nn.Module:
    """Another model of the same architecture, with weights some way off."""
    other = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + 0.2 * torch.randn_like(weight))
    return other


def gaps(model: torch.nn.Module, turn: Turn) -> torch.Tensor:
    """How far each logprob is from transformers', computed anew from all tokens before it."""
    ids = torch.tensor(turn.prompt_ids + turn.token_ids)
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[1:, None])[len(turn.prompt_ids) - 1 :, 0]
    return (expected - torch.tensor(turn.logprobs)).abs()


@contextlib.asynccontextmanager
async def a_generator(
    folder: Path, tmp_path: Path, *, actor: type[GeneratorActor] = GeneratorActor
) -> AsyncIterator[Generator]:
    (tmp_path / "logs").mkdir()
    cluster, faults = Cluster(tmp_path / "logs"), Faults()
    faults.install()
    config = Generator.Config(dtype="float32", max_model_tokens=512, kv_cache_gib=0.25)
    try:
        generator = await Generator.start(config, cluster, faults, model=folder, seed=0, deadline_s=240, actor=actor)
        yield generator
        await generator.stop()
    finally:
        faults.closing = True
        await cluster.close()


async def start_long(generator: Generator, prompt: Sequence[int] = PROMPT) -> list[asyncio.Task[Turn]]:
    """Requests in flight that have some of their tokens."""
    long = [
        asyncio.create_task(generator.generate(prompt, Sampling(max_tokens=200, seed=seed, temperature=1.0)))
        for seed in range(4)
    ]
    await generator.generate(prompt, Sampling(max_tokens=8, seed=9))  # those before it have got as far
    return long


def test_a_live_engine_takes_new_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", bundled_model(default_cache()), tied=False)
    asyncio.run(_check(folder, tmp_path))


async def _check(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shelf = Shelf(tmp_path / "weights")
    async with a_generator(folder, tmp_path) as generator:
        await _small_buckets_are_enough(generator, shelf, first)
        second = await _requests_in_flight_go_on_under_the_new_version(generator, shelf, first)
        await _after_a_load_that_fails_nothing_is_served_until_one_succeeds(generator, shelf, second)
        await _what_does_not_fit_is_refused(generator, shelf, second)


async def _small_buckets_are_enough(generator: Generator, shelf: Shelf, model: torch.nn.Module) -> None:
    for version, bucket_bytes in ((1, 64 << 10), (2, 20 << 10), (3, 64 << 20)):
        model = change(model) if version < 3 else model
        manifest = shelf.put(model, version, bucket_bytes=bucket_bytes)
        places = {entry.name.partition("layers.1.")[2]: entry.bucket for entry in manifest.tensors}
        straddling = places["self_attn.q_proj.weight"] != places["self_attn.v_proj.weight"]
        assert straddling == (version < 3)
        assert await generator.load(shelf) == version
        turn = await generator.generate(PROMPT, Sampling(max_tokens=16, seed=0))
        assert gaps(model, turn).max() < 1e-4
        assert set(turn.versions) == {version}
    assert set(generator.load_seconds) == {"wait", "pause", "load", "fingerprint", "finish"}
    assert min(generator.load_seconds.values()) > 0


async def _requests_in_flight_go_on_under_the_new_version(
    generator: Generator, shelf: Shelf, model: torch.nn.Module
) -> torch.nn.Module:
    shelf.put(model, 10, bucket_bytes=1 << 20)
    await generator.load(shelf)
    other = change(model)
    shelf.put(other, 11, bucket_bytes=1 << 20)
    in_flight = await start_long(generator, LONG_PROMPT)
    load = asyncio.create_task(generator.load(shelf))
    meanwhile = await generator.generate(LONG_PROMPT, Sampling(max_tokens=8, seed=3))
    await load
    for turn in await asyncio.gather(*in_flight):
        versions = torch.tensor(turn.versions)
        assert len(versions) == 200
        assert turn.versions == tuple(sorted(turn.versions))
        assert set(turn.versions) == {10, 11}
        # What was computed with the old weights is not used any more: each token's logprob is that of one version.
        assert gaps(model, turn)[versions == 10].max() < 1e-4
        assert gaps(other, turn)[versions == 11].max() < 1e-4
    for turn in (meanwhile, await generator.generate(LONG_PROMPT, Sampling(max_tokens=8, seed=4))):
        versions = torch.tensor(turn.versions)
        assert gaps(other, turn)[versions == 11].max() < 1e-4, "a block of the old weights was used"
    assert set(turn.versions) == {11}
    return other


async def _after_a_load_that_fails_nothing_is_served_until_one_succeeds(
    generator: Generator, shelf: Shelf, model: torch.nn.Module
) -> None:
    other = change(model)
    shelf.put(other, 12, bucket_bytes=64 << 10)
    in_flight = await start_long(generator)
    shelf.fail_at = 3
    with pytest.raises(WeightsError, match="bucket 12/3 did not come"):
        await generator.load(shelf)
    with pytest.raises(WeightsError, match="hold no weights: loading version 12 failed"):
        await generator.generate(PROMPT)
    service = generator._service
    with pytest.raises(WeightsError, match="serves nothing: version 12 could not be loaded"):
        await anext(service.replicas[0].stream("stream", PROMPT, Sampling(max_tokens=8), deadline_s=60))
    done, _ = await asyncio.wait(in_flight, timeout=1)
    assert not done, "an engine decoded with half of a version"

    shelf.fail_at = -1
    await generator.load(shelf)
    for turn in await asyncio.gather(*in_flight):
        versions = torch.tensor(turn.versions)
        assert set(turn.versions) == {11, 12}
        assert gaps(model, turn)[versions == 11].max() < 1e-4
        assert gaps(other, turn)[versions == 12].max() < 1e-4


async def _what_does_not_fit_is_refused(generator: Generator, shelf: Shelf, model: torch.nn.Module) -> None:
    good = shelf.put(model, 20, bucket_bytes=64 << 10)

    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"):
        (entry,) = [entry for entry in good.tensors if entry.name == name]
        (bucket,) = [bucket for bucket in good.buckets if bucket.key == entry.bucket]
        segment.writable(bucket.segment)[entry.offset + 77] ^= 1  # one bit
    with pytest.raises(
        AttestationError,
        match=rf"generator replica 0 holds other weights than version 20: 2 of {len(good.tensors)} tensors differ: "
        r"model\.embed_tokens\.weight, model\.layers\.1\.self_attn\.k_proj\.weight",
    ):
        await generator.load(shelf)

    def without(name: str) -> Manifest:
        return replace(good, tensors=tuple(entry for entry in good.tensors if entry.name != name))

    shelf.manifest = without("model.layers.0.input_layernorm.weight")
    with pytest.raises(WeightsError, match=r"leaves 1 of the engine's weights as they were: .*input_layernorm"):
        await generator.load(shelf)
    shelf.manifest = without("model.layers.0.mlp.up_proj.weight")
    with pytest.raises(WeightsError, match=r"part of model\.layers\.0\.mlp\.gate_up_proj"):
        await generator.load(shelf)
    shelf.manifest = replace(good, tensors=(*good.tensors[:-1], replace(good.tensors[-1], shape=(7,))))
    with pytest.raises(WeightsError, match="does not fit the engine's model"):
        await generator.load(shelf)
    with pytest.raises(WeightsError, match="hold no weights"):
        await generator.generate(PROMPT)

    shelf.put(model, 21, bucket_bytes=64 << 10)
    assert await generator.load(shelf) == 21
    assert gaps(model, await generator.generate(PROMPT, Sampling(max_tokens=16, seed=0))).max() < 1e-4
