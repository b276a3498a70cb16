"""The Trainer service: one replica whose ranks share the policy (FSDP2), step it, publish it, and checkpoint it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import concurrent_endpoint

from forge_rl.algorithms.losses import Loss
from forge_rl.data.packing import Layout, Packed, Row
from forge_rl.engines.optimizer import OptimizerConfig
from forge_rl.engines.platform import Dtype, cpu_cores, device_type, init_distributed, resolve_dtype
from forge_rl.errors import ConfigError
from forge_rl.metrics import Value, merge_all, reduce
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.service import Replica, Service, ServiceActor
from forge_rl.services.weights import WeightStore
from forge_rl.weights.manifest import Manifest, ShardReport, TensorSpec
from forge_rl.weights.transport import Transport

if TYPE_CHECKING:
    import torch

    from forge_rl.engines.titan.train import TitanEngine


class Trainer:
    """Typed handle of the Trainer service."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The trainer: its processes, its rows, its optimizer."""

        ranks: int = 1
        """Processes that share the policy by FSDP2: one for each GPU, or some on a CPU."""
        dtype: Dtype = "auto"
        """Format of forward and backward; weights and optimizer state are float32. auto is bfloat16 on
        CUDA, float32 on CPU."""
        row_tokens: int = 1024
        """Most tokens of a packed row, which is one microbatch; also the longest sequence that can be trained."""
        recompute: bool = False
        """Recompute activations in the backward pass: less memory, a third more work."""
        frozen: tuple[str, ...] = ()
        """Weights that are not trained: patterns of Hugging Face names, such as "model.embed_tokens.*"
        "model.layers.[0-9].*". What is frozen is published once."""
        port: int = 0
        """Port at which the ranks meet; 0 finds a free one."""
        optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

        def __post_init__(self) -> None:
            if self.ranks < 1:
                raise ConfigError(f"the trainer has {self.ranks} ranks", mend="set --trainer.ranks to 1 or more")
            if not 0 <= self.port < 65536:
                raise ConfigError(f"{self.port} is no port", mend="set --trainer.port to 0, or to 1024 to 65535")
            multiple = _pad_multiple()
            if self.row_tokens < 1 or self.row_tokens % multiple:
                raise ConfigError(
                    f"a row of {self.row_tokens} tokens cannot be packed",
                    mend=f"set --trainer.row-tokens to a multiple of {multiple}",
                )

    def __init__(self, config: Config, service: Service, *, total_steps: int) -> None:
        self.config = config
        self._service = service
        self._total_steps = total_steps
        self._deadline_s = 3600.0
        self._specs: tuple[TensorSpec, ...] | None = None
        self.version = 0
        """Optimizer steps behind the weights."""
        self.parameters = 0
        """Of the policy."""
        self.busy_s = 0.0
        """Seconds that the ranks computed since the controller last took them."""

    @classmethod
    async def start(
        cls,
        config: Config,
        cluster: Cluster,
        faults: Faults,
        *,
        model: Path,
        resume: Path | None,
        reference: bool,
        total_steps: int,
        deadline_s: float,
    ) -> Trainer:
        """Spawn the ranks and load the policy.

        Args:
            config: the service's.
            cluster: where it runs.
            faults: where its failures are noted.
            model: Hugging Face folder to start from; also the frozen reference, if there is one.
            resume: training state to continue from instead.
            reference: keep a frozen reference.
            total_steps: of the run, for the learning rate's course.
            deadline_s: for the whole start.
        """
        service = Service("trainer", cluster, faults)
        threads = max(1, cpu_cores() // config.ranks)
        replica = service.spawn(
            TrainerActor, config, model, reference, ranks=config.ranks, env={"OMP_NUM_THREADS": str(threads)}
        )
        await service.watch(replica, deadline_s=deadline_s)
        trainer = cls(config, service, total_steps=total_steps)
        address, port = await service.call(replica, "meeting_point", deadline_s=deadline_s, rank=0)
        started = await service.call_ranks(
            replica, "setup", lambda rank: (rank, address, port, resume), deadline_s=deadline_s
        )
        trainer.version, trainer.parameters = started[0]
        return trainer

    @property
    def layout(self) -> Layout:
        """How `pack` must lay out a batch for this trainer."""
        return Layout(ranks=self.config.ranks, row_tokens=self.config.row_tokens, pad_multiple=_pad_multiple())

    async def step(self, packed: Packed, loss: Loss, *, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step: forward, backward, clip, update. The version rises by one.

        Args:
            packed: from `pack` with this trainer's layout; must hold trained tokens.
            loss: sums per-token losses; normalised here by the global count of trained tokens.
            temperature: that the episodes were sampled at.

        Returns:
            Metrics, merged over microbatches and ranks.
        """
        parts = await self._service.call_ranks(
            self._replica,
            "step",
            lambda rank: (
                packed.rows[rank :: self.config.ranks],
                loss,
                packed.trained_tokens,
                temperature,
                self._total_steps,
            ),
            deadline_s=self._deadline_s,
        )
        self.version += 1
        return self._reduce(parts)

    async def logprobs(self, packed: Packed, *, temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probability of every trained target under the current weights.

        Returns:
            One tensor a row of `packed`, [L] float32; 0 where the row's mask is False. `unpack` sorts them by episode.
        """
        ranks = self.config.ranks
        parts = await self._service.call_ranks(
            self._replica,
            "logprobs",
            lambda rank: (packed.rows[rank::ranks], temperature),
            deadline_s=self._deadline_s,
        )
        return [parts[index % ranks][index // ranks] for index in range(len(packed.rows))]

    async def publish(self, store: WeightStore, *, dtype: str) -> int:
        """Write the current weights to the store as a new version.

        Args:
            store: where to.
            dtype: "float32" or "bfloat16", the engines' own.

        Returns:
            The version, once it is committed and readers can see it.
        """
        import torch

        if self._specs is None:
            self._specs = await self._service.call(self._replica, "specs", deadline_s=self._deadline_s, rank=0)
        async with store.publishing(self.version, self._specs, getattr(torch, dtype)) as publication:
            parts = await self._all("publish", store.transport(), publication.draft, deadline_s=self._deadline_s)
            self.busy_s += max(seconds for _, seconds in parts)
            await publication.commit([reports for reports, _ in parts])
        return self.version

    async def settle(self) -> int:
        """Wait until the ranks are idle, and take over their version: for a step whose answer was not waited for."""
        versions = await self._all("settle", deadline_s=self._deadline_s)
        self.version = versions[0]
        return self.version

    async def save(self, folder: Path, *, model: Path) -> None:
        """Write a checkpoint: `folder/model` for Hugging Face, and `folder/training`. Both folders exist, empty.

        Args:
            folder: of the checkpoint.
            model: the folder that the run started from; its config and tokenizer are copied.
        """
        await self._all("save", folder, model, deadline_s=self._deadline_s)

    async def stop(self) -> None:
        """End the ranks."""
        await self._service.stop()

    def __repr__(self) -> str:
        return (
            f"Trainer  version {self.version}  {self.parameters / 1e6:.0f} M parameters  "
            f"{self.config.ranks} rank(s)  {self.config.dtype}"
        )

    @property
    def _replica(self) -> Replica:
        return self._service.replicas[0]

    async def _all(self, method: str, *args: object, deadline_s: float) -> list[Any]:
        return await self._service.call_ranks(self._replica, method, lambda _: args, deadline_s=deadline_s)

    def _reduce(self, parts: Sequence[tuple[dict[str, Value], float]]) -> dict[str, float]:
        self.busy_s += max(seconds for _, seconds in parts)
        return reduce(merge_all([metrics for metrics, _ in parts]))


class TrainerActor(ServiceActor):
    """One rank."""

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


def _pad_multiple() -> int:
    """FlexAttention works in blocks of 128 tokens; the CPU's attention takes any length."""
    return 128 if device_type() == "cuda" else 1
