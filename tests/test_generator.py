"""The generator on a real vLLM engine: weights from the store, attested, and logprobs that are transformers' own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forge_rl.errors import AttestationError, ConfigError, WeightsError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.services.generator import Generator
from forge_rl.services.weight_store import WeightStore
from forge_rl.types import Sampling, Turn
from forge_rl.weights.manifest import Manifest, TensorSpec
from forge_rl.weights.segment import writable
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard

PROMPT = (1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 35, 47, 2, 198)


async def publish(store: WeightStore, model: torch.nn.Module, version: int) -> Manifest:
    """Publish as a trainer of one rank does."""
    weights = dict(model.named_parameters())
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


def test_an_engine_computes_with_the_weights_that_were_published_last(tiny_model: Path, tmp_path: Path) -> None:
    asyncio.run(_check_engine(tiny_model, tmp_path))


async def _check_engine(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    cluster, faults = Cluster(tmp_path / "logs"), Faults()
    faults.install()
    config = Generator.Config(dtype="float32", max_model_tokens=128, max_new_tokens=8, kv_cache_gib=0.25)
    try:
        store = await WeightStore.start(WeightStore.Config(), cluster, faults, deadline_s=120)
        generator = await Generator.start(config, cluster, faults, model=folder, seed=0, deadline_s=240)
        with pytest.raises(WeightsError, match="no weights"):
            await generator.generate(PROMPT)

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version in (3, 4):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + 0.2 * torch.randn_like(weight))
            await publish(store, model, version)
            assert await generator.load(store) == version
            turns = await asyncio.gather(
                *[generator.generate(PROMPT, Sampling(max_tokens=8, seed=seed)) for seed in range(6)]
            )
            for turn in turns:
                assert gap(model, turn) < 1e-4
                assert set(turn.versions) == {version}
                assert tuple(turn.prompt_ids) == PROMPT
        assert 0 < generator.attested_in_place <= 1

        again = await generator.generate(PROMPT, Sampling(max_tokens=8, seed=0))
        assert tuple(again.token_ids) == tuple(turns[0].token_ids), "a seed decides an answer"
        assert isinstance(await generator.chat("What is 2 + 3?"), str)
        with pytest.raises(ConfigError, match=r"--generator\.max-model-tokens"):
            await generator.generate(PROMPT * 10)

        manifest = await publish(store, model, 5)
        assert manifest.buckets[0].segment is not None
        writable(manifest.buckets[0].segment)[4096] ^= 1  # one bit of one weight
        with pytest.raises(AttestationError, match=r"1 of \d+ tensors differ: model\.embed_tokens"):
            await generator.load(store, 5)
        with pytest.raises(WeightsError, match="no weights: loading version 5 failed"):
            await generator.generate(PROMPT)

        await generator.stop()
        await store.stop()
    finally:
        faults.closing = True
        await cluster.close()
