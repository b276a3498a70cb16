"""Real engines for rollout benchmarks: vLLM, a weight store, and episodes of given lengths."""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from forge_rl.engines.platform import resolve_dtype
from forge_rl.envs.protocol import Observation, Step
from forge_rl.models.bundled import default_cache
from forge_rl.models.resolve import resolve_model
from forge_rl.rollout.dispatcher import PolicyClient
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.state import InflightEpisode
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.services.generator import Generator
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.weight_store import WeightStore
from forge_rl.system.tasks import task_group
from forge_rl.token_arrays import TokenIds
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.types import Episode, Task, Turn
from forge_rl.weights.manifest import TensorSpec
from forge_rl.weights.slices import TensorSlice
from forge_rl.weights.transports.protocol import LocalShard

_DEADLINE_S = 900.0


class Engines:
    """A generator, and a stand-in for the trainer that republishes the model's own weights.

    Args:
        generator: a started generator without weights.
        store: an empty store.
        faults: records the faults of both.
        folder: folder of the model.
    """

    def __init__(self, generator: Generator, store: WeightStore, faults: Faults, folder: Path) -> None:
        self.generator = generator
        self.faults = faults
        self.tokenizer = Tokenizer(folder)
        self.version = -1
        """Last published version."""
        self._store = store
        self._dtype = resolve_dtype(generator.config.dtype)
        self._weights = {name: part for path in folder.glob("*.safetensors") for name, part in load_file(path).items()}

    async def advance(self) -> None:
        """Publish the next version and load it into all engines."""
        specs = [TensorSpec(name=name, shape=tuple(part.shape)) for name, part in self._weights.items()]
        shards = [
            LocalShard(name=name, tensor_slice=TensorSlice.whole(part.shape), values=part)
            for name, part in self._weights.items()
        ]
        async with self._store.publishing(self.version + 1, specs, self._dtype) as publication:
            reports = await self._store.transport().write(publication.draft, shards, rank=0)
            await publication.commit([reports])
        self.version += 1
        await self.generator.load(self._store, self.version)


@contextlib.asynccontextmanager
async def engines(config: Generator.Config, model: str) -> AsyncIterator[Engines]:
    """Start engines, load version 0, and stop all processes after the body.

    Args:
        config: settings of the generator.
        model: name of a bundled model, a folder, or a hub id.
    """
    folder = resolve_model(model, default_cache())
    torch.set_num_threads(1)  # the cores are for the engines
    with tempfile.TemporaryDirectory(prefix="engines-") as logs:
        cluster, faults = Cluster(Path(logs)), Faults()
        faults.install()
        generator: Generator | None = None
        store: WeightStore | None = None
        try:
            store = await WeightStore.start(WeightStore.Config(), cluster, faults, deadline_s=_DEADLINE_S)
            start = ServiceStart(cluster=cluster, faults=faults, deadline_s=_DEADLINE_S)
            generator = await Generator.start(config, start, model=folder, seed=0)
            running = Engines(generator, store, faults, folder)
            await running.advance()
            yield running
        finally:
            faults.closing = True
            async with task_group() as stopping:
                for service in (generator, store):
                    if service is not None:
                        stopping.create_task(service.stop())
            await cluster.close()


@contextlib.asynccontextmanager
async def serving(config: Generator.Config, folder: Path) -> AsyncIterator[Generator]:
    """Start engines that serve the weights of a model's folder, and stop them after the body."""
    with tempfile.TemporaryDirectory(prefix="engines-") as logs:
        cluster, faults = Cluster(Path(logs)), Faults()
        faults.install()
        generator: Generator | None = None
        try:
            start = ServiceStart(cluster=cluster, faults=faults, deadline_s=_DEADLINE_S)
            generator = await Generator.start(config, start, model=folder, seed=0)
            await generator.serve_model()
            yield generator
        finally:
            faults.closing = True
            if generator is not None:
                await generator.stop()
            await cluster.close()


class Stories:
    """Runs episodes of given lengths: if the model ends a turn early, the environment asks it to continue.

    Args:
        tokenizer: tokenizer of the model.
        tokens: returns the length of an episode in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Callable[[InflightEpisode], int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens

    async def __call__(self, task: Task, client: PolicyClient) -> Episode:
        """Run one episode; implements RunEpisode."""
        story = _Story(self._tokens(client.episode), random.Random("/".join(map(str, client.episode.place))))
        runner = EpisodeRunner(self._tokenizer, story, None)  # type: ignore[arg-type]  # the environment scores
        return await runner(task, functools.partial(story.decode, client))


class _Story:
    """Session of one episode, and the service that opens it."""

    thoughts = False

    def __init__(self, tokens: int, drawn: random.Random) -> None:
        self._left = tokens
        self._drawn = drawn

    async def open(self, task: Task) -> tuple[_Story, Observation]:
        text = f"Tell me a very long story about {task.id} friends in the mountains."
        return self, Observation(messages=({"role": "user", "content": text},))

    async def decode(self, client: PolicyClient, prompt_ids: TokenIds) -> Turn:
        """Decode one turn, up to the number of tokens left."""
        turn = await client(prompt_ids, replace(client.sampling, max_tokens=self._left))
        self._left -= len(turn.token_ids)
        return turn

    async def step(self, answer: str, *, truncated: bool = False, parsed: object = None) -> Step:
        if self._left <= 0 or truncated:  # many short turns can exceed the context
            return Step(done=True, reward=self._drawn.random())
        return Step(messages=({"role": "user", "content": "And then? Tell me more."},), done=False)

    async def close(self) -> None:
        """Nothing to close."""

    def abandon(self) -> None:
        """Nothing to close."""
