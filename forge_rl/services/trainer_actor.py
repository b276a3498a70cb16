"""One rank of the Trainer service, in a process of its own."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import concurrent_endpoint

from forge_rl.algorithms.losses import Loss
from forge_rl.engines.factory import make_train_engine
from forge_rl.engines.platform import device_type, init_distributed
from forge_rl.engines.protocol import TrainEngine, TrainSettings
from forge_rl.metrics import Value
from forge_rl.runtime.service import ServiceActor
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec
from forge_rl.weights.transports.protocol import Transport

if TYPE_CHECKING:
    import torch


class TrainerActor(ServiceActor):
    """Does what Trainer asks of all ranks, one thing at a time; see `Trainer` and `TrainEngine`."""

    def __init__(self, model: Path, settings: TrainSettings, reference: bool, ranks: int) -> None:
        self._make_engine = functools.partial(make_train_engine, model, settings, reference=reference)
        self._ranks = ranks
        self._engine: TrainEngine | None = None
        self._lock = asyncio.Lock()

    @concurrent_endpoint
    async def meeting_point(self, port: int) -> tuple[str, int]:
        """Return address and port at which the ranks meet; asked of rank 0."""
        address = "127.0.0.1" if device_type() == "cpu" else socket.gethostbyname(socket.gethostname())
        if port:
            return address, port
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    @concurrent_endpoint
    async def setup(self, rank: int, address: str, port: int, resume: Path | None) -> tuple[int, int]:
        """Load the policy; return its version and number of parameters."""
        async with self._lock:
            init_distributed(rank, self._ranks, address, port)
            self._engine = self._make_engine()
            if resume is not None:
                self._engine.load_training_state(resume)
            return self._engine.version, self._engine.parameters

    @concurrent_endpoint
    async def step(
        self, loss: Loss, trained_tokens: int, temperature: float, total_steps: int
    ) -> tuple[dict[str, Value], float]:
        """Take one optimizer step on the rows that were sent; returns this rank's metrics, and the step's seconds."""
        async with self._lock:
            began = time.monotonic()
            metrics = self.engine.train_step(
                self.take_parcel(),
                loss,
                trained_tokens=trained_tokens,
                temperature=temperature,
                total_steps=total_steps,
            )
            return metrics, time.monotonic() - began

    @concurrent_endpoint
    async def logprobs(self, temperature: float) -> list[torch.Tensor]:
        """Score the rows that were sent."""
        async with self._lock:
            return self.engine.logprobs(self.take_parcel(), temperature=temperature)

    @concurrent_endpoint
    async def specs(self) -> tuple[TensorSpec, ...]:
        return self.engine.specs()

    @concurrent_endpoint
    async def publish(self, transport: Transport, drafted: Manifest) -> tuple[list[ShardReport], float]:
        """Write this rank's shards; returns what was written, and the seconds that it took."""
        async with self._lock:
            began = time.monotonic()
            reports = await transport.write(drafted, self.engine.local_shards(), rank=self.engine.rank)
            return reports, time.monotonic() - began

    @concurrent_endpoint
    async def offload(self) -> int:
        async with self._lock:
            return self.engine.offload() if device_type() == "cuda" else 0

    @concurrent_endpoint
    async def onload(self) -> int:
        async with self._lock:
            return self.engine.onload()

    @concurrent_endpoint
    async def wait_idle(self) -> int:
        """Return the version, once what runs has ended."""
        async with self._lock:
            return self.engine.version

    @concurrent_endpoint
    async def save(self, folder: Path, model: Path) -> None:
        async with self._lock:
            self.engine.save(folder, model)

    @property
    def engine(self) -> TrainEngine:
        """This rank's engine, once setup has run."""
        assert self._engine is not None, "setup comes first"
        return self._engine
