"""A tenant's training, the model that its adapter adapts, and the trainer that holds it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.adapter_settings import AdamStep, AdapterPass, AdapterSettings
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.errors import ForgeError
from forge_rl.gateway.errors import ApiError
from forge_rl.packing.rows import Layout, Minibatch
from forge_rl.services.trainer_adapters import Pass
from forge_rl.system.folders import write_whole
from forge_rl.tinker import wire
from forge_rl.tinker.checkpoints import AdapterRecord
from forge_rl.tinker.futures import FutureResult
from forge_rl.tinker.journal import Journal, JournalEntry
from forge_rl.tinker.rows import PackedData

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Adapters(Protocol):
    """A trainer's adapters; `TrainerAdapters` implements it."""

    async def open(self, name: str, settings: AdapterSettings) -> None: ...
    async def drop(self, name: str) -> None: ...
    async def run(self, name: str, minibatch: Minibatch, loss: Loss, *, backward: bool = True) -> Pass: ...
    async def run_many(self, passes: Sequence[AdapterPass]) -> list[Pass | ForgeError]: ...
    async def step(self, name: str, adam: AdamStep) -> tuple[dict[str, float], int]: ...
    async def save(self, name: str, folder: Path) -> None: ...
    async def load(self, name: str, folder: Path, *, optimizer: bool) -> int: ...


class AdapterTrainer(Protocol):
    """A trainer of adapters; `Trainer` implements it."""

    @property
    def adapters(self) -> Adapters: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def alive(self) -> bool: ...
    async def restart(self, resume: Path | None, *, cause: str = "") -> None: ...
    def forget_restarts(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The model that all adapters adapt."""

    name: str
    """Name in requests."""
    folder: Path
    tokenizer_id: str
    """Where clients find its tokenizer."""
    vocab_size: int
    max_model_len: int
    lora: LoRAConfig
    """Largest rank, and the scale and targets of adapters."""

    def check_name(self, name: str) -> None:
        """Raise ApiError if a request names another base."""
        if name != self.name:
            raise ApiError(400, f"the base model {name[:100]!r} is not here; {self.name} is", param="base_model")

    def settings(self, record: AdapterRecord) -> AdapterSettings:
        """Return the settings of a training's adapter.

        Raises:
            ApiError: it would adapt nothing.
        """
        # Adapters are of linear layers only, so that train_unembed alone leaves nothing to train.
        targets = self.lora.targets
        if not record.train_mlp:
            targets = _ATTENTION
        if not record.train_attn:
            if not record.train_mlp:
                raise ApiError(400, "train_unembed alone adapts nothing here", param="lora_config")
            targets = ("gate_proj", "up_proj", "down_proj")
        return AdapterSettings(lora=replace(self.lora, rank=record.rank, targets=targets), seed=record.seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPass:
    """A pass that is ready for the trainer."""

    seq: int
    adapter_pass: AdapterPass
    packed: PackedData

    @property
    def tokens(self) -> int:
        """Tokens of its rows, padding included."""
        return sum(len(row) for row in self.adapter_pass.minibatch.rows)

    def answer(self, result: Pass, *, adapters: int = 1) -> FutureResult:
        """Return the answer for its client.

        Args:
            adapters: number of adapters whose rows were computed together.
        """
        # The client splits long data into several requests, and combines their metrics as the suffix says.
        metrics = {"loss:sum": result.metrics["loss"], "adapters:max": float(adapters)}
        body = wire.encode_pass(self.packed.of_data(result.logprobs), metrics)
        return FutureResult(body=body, is_protobuf=True)


@dataclass(eq=False)
class Training:
    """One adapter's requests and counts."""

    record: AdapterRecord
    session_id: str
    folder: Path
    expected: int = 0
    """Sequence number of the next request to execute."""
    waiting: dict[int, JournalEntry] = field(default_factory=dict)
    """Accepted requests by sequence number."""
    admitted: dict[int, contextlib.ExitStack] = field(default_factory=dict)
    updates: int = 0
    snapshot_updates: int = 0
    has_gradient: bool = False
    packed_pass: PackedPass | None = None
    """The last pass that was packed."""
    attempts: int = 0
    """Times that the next request has ended the trainer."""
    poison: set[int] = field(default_factory=set)
    """Sequence numbers of requests that have ended the trainer too often, and are never executed again."""

    @property
    def model_id(self) -> str:
        """Its id in the API."""
        return self.record.model_id

    def add_poison(self, seq: int) -> None:
        """Mark a request as one that ends the trainer; the mark survives a restart of this process."""
        self.poison.add(seq)
        with contextlib.suppress(OSError):  # a full disk: until the restart, the mark is in memory
            write_whole(self.folder / "poison.json", json.dumps(sorted(self.poison)))

    def request_id(self, seq: int) -> str:
        """Return the id by which its client asks for a request's result."""
        return f"{self.model_id}:{seq}"

    @property
    def journal(self) -> Journal:
        """Its requests on disk."""
        return Journal(self.folder / "journal")

    @property
    def snapshot(self) -> tuple[int, Path] | None:
        """Sequence number and folder of the newest snapshot on disk."""
        # A folder that still ends in .partial was cut off, and does not match.
        folders = {int(path.name.partition("-")[2]): path for path in self.folder.glob("snapshot-*[0-9]")}
        return max(folders.items()) if folders else None
