"""One rank of the Trainer service, in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from monarch.actor import concurrent_endpoint

from forge_rl.algorithms.losses import Loss
from forge_rl.data.packing import Row
from forge_rl.engines.platform import device_type, init_distributed, resolve_dtype
from forge_rl.metrics import Value
from forge_rl.runtime.service import ServiceActor
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec
from forge_rl.weights.transports.protocol import Transport

if TYPE_CHECKING:
    import torch

    from forge_rl.engines.titan.train import TitanEngine
    from forge_rl.services.trainer import Trainer


class TrainerActor(ServiceActor):
    """Does what Trainer asks of all ranks, one thing at a time."""

    def __init__(self, config: Trainer.Config, model: Path, reference: bool) -> None:
        self._config = config
        self._model = model
        self._reference = reference
        self._engine: TitanEngine | None = None
        self._turn = asyncio.Lock()

    @concurrent_endpoint
    async def meeting_point(self) -> tuple[str, int]:
        """Address and port at which the ranks meet; asked of rank 0."""
        address = "127.0.0.1" if device_type() == "cpu" else socket.gethostbyname(socket.gethostname())
        if self._config.port:
            return address, self._config.port
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    @concurrent_endpoint
    async def setup(self, rank: int, address: str, port: int, resume: Path | None) -> tuple[int, int]:
        """Load the policy. Returns its version and its number of parameters."""
        async with self._turn:
            init_distributed(rank, self._config.ranks, address, port)
            from forge_rl.engines.titan.train import TitanEngine

            self._engine = TitanEngine(
                self._model,
                dtype=resolve_dtype(self._config.dtype),
                row_tokens=self._config.row_tokens,
                optimizer=self._config.optimizer,
                recompute=self._config.recompute,
                reference=self._reference,
                frozen=self._config.frozen,
            )
            if resume is not None:
                self._engine.load_training_state(resume)
            return self._engine.version, sum(p.numel() for p in self._engine.model.parameters())

    @concurrent_endpoint
    async def step(
        self, rows: Sequence[Row], loss: Loss, trained_tokens: int, temperature: float, total_steps: int
    ) -> tuple[dict[str, Value], float]:
        """Metrics of this rank, and the seconds that it took."""
        async with self._turn:
            began = time.monotonic()
            metrics = self.engine.train_step(
                rows, loss, trained_tokens=trained_tokens, temperature=temperature, total_steps=total_steps
            )
            return metrics, time.monotonic() - began

    @concurrent_endpoint
    async def logprobs(self, rows: Sequence[Row], temperature: float) -> list[torch.Tensor]:
        """See Trainer.logprobs."""
        async with self._turn:
            return self.engine.logprobs(rows, temperature=temperature)

    @concurrent_endpoint
    async def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor that is published; asked of rank 0."""
        return self.engine.specs()

    @concurrent_endpoint
    async def publish(self, transport: Transport, drafted: Manifest) -> tuple[list[ShardReport], float]:
        """Write this rank's shards; returns what was written, and the seconds that it took."""
        async with self._turn:
            began = time.monotonic()
            reports = await transport.write(drafted, self.engine.local_shards(), rank=self.engine.rank)
            return reports, time.monotonic() - began

    @concurrent_endpoint
    async def offload(self) -> int:
        """See Trainer.offload; the bytes of this rank."""
        async with self._turn:
            return self.engine.offload() if device_type() == "cuda" else 0

    @concurrent_endpoint
    async def onload(self) -> int:
        """See Trainer.onload; the bytes of this rank."""
        async with self._turn:
            return self.engine.onload()

    @concurrent_endpoint
    async def settle(self) -> int:
        """The version, once what runs has ended."""
        async with self._turn:
            return self.engine.version

    @concurrent_endpoint
    async def save(self, folder: Path, model: Path) -> None:
        """See Trainer.save."""
        async with self._turn:
            self.engine.save(folder, model)

    @property
    def engine(self) -> TitanEngine:
        """This rank's engine, once setup has run."""
        assert self._engine is not None, "setup comes first"
        return self._engine
