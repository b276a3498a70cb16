"""The whole way of a folder of the zoo, through a run's services: trained, published, attested, served, saved.

Trainer, store and engines are those of a run, each in processes of its own, driven here as a recipe drives them. What
differs: one store serves all folders, and trainers, like a run's engines, are forked by a process that has imported
what they need.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.report import without_nan
from forge_rl.algorithms.losses import ClippedSurrogate
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.platform import resolve_dtype
from forge_rl.engines.protocol import Dtype
from forge_rl.errors import ModelError
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.supervision import Restart
from forge_rl.services.generator import Generator
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_config import TrainedModel, TrainingRun
from forge_rl.services.weight_store import WeightStore
from forge_rl.types import Sampling
from tests.fake_actors import WarmCluster, new_service_name
from tests.fakes import packed, random_batch
from tests.zoo.folders import transformers_config
from tests.zoo.trained import check_files, dtype_of, modelling_of, write_model

START_S = 300.0
IDS = tuple((number * 37 + 11) % 250 for number in range(48))
"""Tokens that each version scores."""
PROMPTS = tuple(tuple((number * 37 + 11 * index + 5) % 250 for number in range(8 + index % 3)) for index in range(64))
"""Prompts of greedy and of sampled completions."""


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Distances of an engine's logprobs from those of transformers on the same weights, see `gap`."""

    started: float
    """On the folder that the run starts from."""
    loaded: float
    """Once two published versions are loaded."""
    restarted: float
    """On the saved folder, in a new engine."""
    completions: float
    """Of 64 greedy and 64 sampled completions, whose greedy tokens are also compared with the most probable ones."""
    changed: float
    """Of the first folder's logprobs from those after two updates: what a load without effect would leave."""

    @property
    def passes(self) -> bool:
        """Whether rounding explains all distances, and versions differ by more."""
        distances = self.started, self.loaded, self.restarted, self.completions
        return all(distance < 1 for distance in distances) and self.changed > 5


@dataclass(frozen=True, kw_only=True)
class Zoo:
    """Services that all folders share, and where those of one folder start."""

    cluster: Cluster
    faults: Faults
    store: WeightStore

    @contextlib.asynccontextmanager
    async def trainer(self, name: str, folder: Path, model: Path) -> AsyncIterator[Trainer]:
        """Start a trainer in float32."""
        config = Trainer.Config(
            ranks=1, seq_len=64, dtype="float32", modelling=modelling_of(name), optimizer=OptimizerConfig(lr=1e-2)
        )
        trainer = await Trainer.start(
            config,
            self._start("trainer"),
            model=TrainedModel(folder=model),
            run=TrainingRun(seed=0, total_steps=6, skipped=folder / "skipped"),
        )
        try:
            yield trainer
        finally:
            await trainer.stop()

    @contextlib.asynccontextmanager
    async def generator(self, model: Path, dtype: Dtype) -> AsyncIterator[Generator]:
        """Start an engine that serves a folder."""
        config = Generator.Config(
            dtype=dtype, max_model_len=128, max_tokens=8, kv_cache_gib=0.05, restart=Restart(max_restarts=0)
        )
        generator = await Generator.start(config, self._start("generator"), model=model, seed=0)
        try:
            await generator.serve_model()
            yield generator
        finally:
            await generator.stop()

    def _start(self, service: str) -> ServiceStart:
        name = f"{service}-{new_service_name()}"
        return ServiceStart(cluster=self.cluster, faults=self.faults, deadline_s=START_S, name=name)


@contextlib.asynccontextmanager
async def open_zoo(folder: Path) -> AsyncIterator[Zoo]:
    """Start what checkpoints share; logs and versions are in a folder."""
    # transformers imports it for some models, which changes LD_LIBRARY_PATH and so would cost new fork servers.
    importlib.import_module("cv2")
    for part in ("logs", "shm"):
        (folder / part).mkdir(parents=True)
    cluster, faults = WarmCluster(folder / "logs"), Faults()
    faults.install()
    try:
        await cluster.import_for_trainer(ranks=1)
        config = WeightStore.Config(shm=folder / "shm", transport="shared_memory")
        store = await WeightStore.start(config, cluster, faults, deadline_s=START_S)
        yield Zoo(cluster=cluster, faults=faults, store=store)
        faults.closing = True
        await store.stop()
    finally:
        faults.closing = True
        await cluster.close()


async def whole_ways(
    names: Sequence[str], folder: Path, timeout_s: float = START_S
) -> dict[str, Gaps | str | Exception]:
    """Take checkpoints the whole way, one after the other; return what was measured of each, why vLLM refuses it, or
    the error with which it failed, after which all services start anew.

    Args:
        folder: for all that they write.
        timeout_s: seconds for each.
    """
    results: dict[str, Gaps | str | Exception] = {}
    while len(results) < len(names):
        async with open_zoo(folder / f"services-{len(results)}") as zoo:
            for name in names[len(results) :]:
                try:
                    async with asyncio.timeout(timeout_s):
                        results[name] = await whole_way(zoo, name, folder / str(len(results)))
                except Exception as error:
                    results[name] = error
                    break
    return results


async def whole_way(zoo: Zoo, name: str, folder: Path) -> Gaps | str:
    """Take a checkpoint the whole way, and compare with transformers at each stop.

    A model that vLLM refuses is trained, published, saved and loaded by transformers all the same; the result is the
    refusal.

    Raises:
        AssertionError: the saved folder is not what the run began with, or an engine loaded another version.
        ForgeError: a service failed.
    """
    model, step = write_model(name, folder), folder / "step"
    saved, dtype = step / "model", dtype_of(model)
    first = await asyncio.to_thread(expected_logprobs, model, dtype)
    await zoo.store.rollback(-1)  # the versions of another model
    async with zoo.trainer(name, folder, model) as trainer:
        try:
            async with zoo.generator(model, dtype) as generator:
                started = gap(await score(generator), first, dtype)
                await train(trainer, zoo.store, dtype, generator)
                loaded_logprobs = await score(generator)
                completions = await asyncio.gather(
                    *(complete(generator, index, greedy) for greedy in (True, False) for index in range(len(PROMPTS)))
                )
            refusal = None
        except ModelError as error:
            refusal = error.message
            await train(trainer, zoo.store, dtype)
        for part in ("training", "model"):
            (step / part).mkdir(parents=True)
        await trainer.save(step, model=model)
        await trainer.finish_save()
    check_files(name, model, saved)
    last = await asyncio.to_thread(expected_logprobs, saved, dtype)
    if refusal is not None:
        return refusal
    async with zoo.generator(saved, dtype) as generator:
        restarted = gap(await score(generator), last, dtype)
    return Gaps(
        started=started,
        loaded=gap(loaded_logprobs, last, dtype),
        restarted=restarted,
        completions=await asyncio.to_thread(completions_gap, saved, completions, dtype),
        changed=gap(first["float32"], last, dtype),
    )


async def train(trainer: Trainer, store: WeightStore, dtype: Dtype, generator: Generator | None = None) -> None:
    """Take two updates, publish each, and load it into the engine, which attests it."""
    for seed in (1, 2):
        await trainer.step(packed(random_batch(seed, vocab=250)), ClippedSurrogate())
        version = await trainer.publish(store, dtype=dtype)
        if generator is not None:
            assert await generator.load(store) == version


async def score(generator: Generator) -> torch.Tensor:
    """Return an engine's logprobs of IDS from the second on."""
    scores = await generator.score(IDS[:1], IDS[1:])
    return torch.tensor(scores.logprobs)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An engine's completion of a prompt."""

    ids: tuple[int, ...]
    """Prompt and completion."""
    logprobs: torch.Tensor
    """[T], the engine's logprobs of the completion."""
    greedy: bool


async def complete(generator: Generator, index: int, greedy: bool) -> Completion:
    """Complete one of PROMPTS."""
    prompt, temperature = PROMPTS[index], 0.0 if greedy else 1.0
    turn = await generator.generate(prompt, Sampling(max_tokens=8, temperature=temperature, seed=index))
    logprobs = turn.logprobs
    if greedy:  # an engine reports none
        logprobs = (await generator.score(prompt, turn.token_ids)).logprobs
    return Completion(ids=tuple(turn.context.tolist()), logprobs=torch.tensor(logprobs), greedy=greedy)


Expected = dict[str, torch.Tensor]
"""transformers' logprobs by dtype, in float32 and the engine's."""


def expected_logprobs(folder: Path, dtype: Dtype) -> Expected:
    """Compute logprobs of IDS with transformers."""
    return {
        name: _scores(_causal(folder, name), torch.tensor([IDS]))[0].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
        for name in {"float32", dtype}
    }


def completions_gap(folder: Path, completions: Sequence[Completion], dtype: Dtype) -> float:
    """Return the distance of completions' logprobs from those of transformers, see `gap`; a greedy token's is also that
    from the most probable one."""
    by_length: dict[int, list[Completion]] = defaultdict(list)
    for completion in completions:
        by_length[len(completion.ids)].append(completion)
    expected: dict[str, torch.Tensor] = {}
    for name in {"float32", dtype}:
        model, logprobs = _causal(folder, name), []
        for batch in by_length.values():
            ids = torch.tensor([completion.ids for completion in batch])
            for completion, scores in zip(batch, _scores(model, ids), strict=True):
                new = scores[-len(completion.logprobs) :]
                tokens = torch.tensor(completion.ids[-len(new) :])
                logprobs.append(new.max(-1).values if completion.greedy else new.gather(1, tokens[:, None])[:, 0])
        expected[name] = torch.cat(logprobs)
    measured = torch.cat([completion.logprobs for batch in by_length.values() for completion in batch])
    return gap(measured, expected, dtype)


def gap(measured: torch.Tensor, expected: Expected, dtype: Dtype) -> float:
    """Return the distance of logprobs from those of transformers, in units of what rounding explains."""
    distances = (measured - expected["float32"]).abs()
    if dtype == "float32":
        return without_nan(float(distances.max()) / 1e-3)
    return without_nan(float(distances.mean() / (expected[dtype] - expected["float32"]).abs().mean()) / 2)


def _causal(folder: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=transformers_config(folder),
        dtype=resolve_dtype(cast(Dtype, dtype)),
        attn_implementation="eager",
    ).eval()


def _scores(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Return logprobs of all tokens in each place but the first; token_ids is [B, T], the result [B, T - 1, V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(token_ids).logits
    return logits[:, :-1].float().log_softmax(-1)
