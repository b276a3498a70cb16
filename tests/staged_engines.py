"""A Generator of fake engines, on real processes, and what tests of it do to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from forge_rl.engines.protocol import Quantization
from forge_rl.runtime import supervision
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.supervision import Restart
from forge_rl.services.device_sharing import DeviceSharing
from forge_rl.services.engine_pool import LendOne
from forge_rl.services.generator import Generator
from forge_rl.services.service_start import ServiceStart
from forge_rl.token_arrays import Chunk
from forge_rl.types import Sampling, Turn
from tests.fake_actors import cluster, new_service_name
from tests.fake_engine import FOLDER, FakeEngine, FakeStore, Orders, draw
from tests.tiny import bundled_folder, bundled_tokenizer

PROMPT = (1, 4093, 198, 1780)
MODEL = bundled_folder()


@dataclass
class Stage:
    """A generator of fake engines, and their orders."""

    generator: Generator
    orders: Orders
    store: FakeStore
    faults: Faults

    async def load(self, version: int) -> int:
        self.store.latest = version
        return await self.generator.load(self.store)

    async def pid(self, engine: int) -> int:
        return await self._call(engine, "process_id")

    async def spare(self) -> int:
        """The process of the only spare."""
        (spare,) = self.generator._service.spares.values()
        return await spare.call("process_id", deadline_s=60)

    async def state(self, engine: int) -> tuple[int, list[str]]:
        service = self.generator._service
        return await service.replicas[engine].ask("state", deadline_s=60)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_serving(self, *engines: int) -> None:
        await self.until(lambda: set(self.generator.engines()) == set(engines))

    async def _call(self, engine: int, method: str) -> int:
        service = self.generator._service
        return await service.replicas[engine].call(method, deadline_s=60)

    def only_once(self, engine: int, **orders: object) -> None:
        """Give an engine these orders until its first fault."""
        self.orders.tell(engine, **orders)
        self.faults.listeners.add(lambda fault: self.orders.tell(engine) if fault.replica == engine else None)


@contextlib.asynccontextmanager
async def stage(
    tmp_path: Path,
    engines: int = 2,
    *,
    guests: int = 0,
    spares: int = 0,
    max_restarts: int = 100,
    replace: LendOne = contextlib.nullcontext,
    urls: tuple[str, ...] = (),
    quantization: Quantization = "none",
) -> AsyncIterator[Stage]:
    (tmp_path / "logs").mkdir()
    os.environ[FOLDER] = str(tmp_path)
    config = Generator.Config(
        replicas=engines,
        urls=urls,
        guests=guests,
        spares=spares,
        quantization=quantization,
        max_model_len=256,
        restart=Restart(max_restarts=max_restarts),
    )
    async with cluster(tmp_path / "logs") as (meshes, faults):
        generator = await Generator.start(
            config,
            ServiceStart(cluster=meshes, faults=faults, deadline_s=120, name=new_service_name()),
            model=MODEL,
            seed=0,
            sharing=DeviceSharing(replace=replace),
            make_tokenizer=lambda folder: bundled_tokenizer(),
            actor=FakeEngine,
        )
        try:
            with mock.patch.object(supervision, "BACKOFF_S", 0.01):
                yield Stage(generator, Orders(tmp_path), FakeStore(), faults)
        finally:
            faults.closing = True
            await generator.stop()


def right(turn: Turn, count: int = 20, prompt: tuple[int, ...] = PROMPT) -> bool:
    """Check that a turn is what one undisturbed engine would have decoded."""
    return tuple(turn.context) == prompt + draw(prompt, count) and len(turn.versions) == count


async def stream(
    generator: Generator, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
) -> AsyncGenerator[Chunk, None]:
    """A completion's chunks as they come; closing this cancels it."""
    chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
    decoding = asyncio.ensure_future(
        generator.generate(prompt_ids, sampling, engine=engine, observe=chunks.put_nowait, gather_s=0.0)
    )
    decoding.add_done_callback(lambda _: chunks.put_nowait(None))
    try:
        while (chunk := await chunks.get()) is not None:
            yield chunk
        await decoding
    finally:
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)


async def read(chunks: AsyncIterator[Chunk], count: int) -> list[int]:
    """Read the next tokens of a completion."""
    ids: list[int] = []
    while len(ids) < count:
        ids += (await anext(chunks)).token_ids.tolist()
    return ids
