"""Parts of engines whose workers are on several hosts, and buckets of weights for all of these hosts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from forge_rl.weights.manifest import TensorEntry
    from forge_rl.weights.transports.protocol import TensorBucket


@dataclass(frozen=True, kw_only=True)
class EnginePart:
    """One host's part of an engine. The first part schedules, and its workers are first; the others follow it."""

    number: int
    """This host's index among the engine's hosts."""
    count: int
    """Number of hosts of the engine."""
    address: str
    """Address of the first host where all workers meet."""
    port: int
    """Port of the store there."""
    folder: Path
    """The model's folder on this host."""
    may_be_public: bool = False
    """Whether this host may be reached at a public address."""


@dataclass(frozen=True)
class BucketOnHosts:
    """The same bucket on each host of an engine: a `TensorBucket` that opens the copy on its part's host.

    Args:
        copies: the bucket as each part's host has it, in the parts' order.
        part: number of the part that opens it.
    """

    copies: tuple[TensorBucket, ...]
    part: int = 0

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return self.copies[self.part].entries

    def open(self) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return self.copies[self.part].open()
