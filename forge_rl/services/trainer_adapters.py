"""Handles for training several named adapters over one trainer's base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.adapter_settings import AdamStep, AdapterPass, AdapterSettings
from forge_rl.errors import ForgeError
from forge_rl.metrics import merge_all, reduce
from forge_rl.packing.rows import Minibatch
from forge_rl.services.trainer_calls import (
    DROP_ADAPTER,
    LOAD_ADAPTER,
    OPEN_ADAPTER,
    RUN_ADAPTER,
    RUN_ADAPTERS,
    SAVE_ADAPTER,
    STEP_ADAPTER,
    R,
    RankCall,
)
from forge_rl.services.trainer_ranks import TrainerRanks


class _CallAll(Protocol):
    async def __call__(
        self, call: RankCall[R], *args: object, parcel: Callable[[int], object] | None = None, work: int = 1
    ) -> list[R]: ...


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Results of a pass over a minibatch."""

    metrics: dict[str, float]
    """`loss`, the sum over all rows divided by the loss's divisor, and the loss's own metrics."""
    logprobs: list[npt.NDArray[np.float32]]
    """[L] for each row, the logprobs of its targets before the pass; 0 where the mask is False."""


class TrainerAdapters:
    """Named adapters over a trainer's base; calls are made one at a time, in the order in which they come.

        await trainer.adapters.open("math", AdapterSettings(lora=LoRAConfig(rank=8), seed=1))
        await trainer.adapters.run("math", minibatch, loss)
        await trainer.adapters.step("math", AdamStep(lr=1e-4))

    A failed call leaves all adapters as they were. Ranks that are restarted hold none: open and load them again.
    """

    def __init__(self, call_all: _CallAll, ranks: TrainerRanks) -> None:
        self._all = call_all
        self._ranks = ranks

    async def open(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter; see `AdapterEngine.open`."""
        await self._all(OPEN_ADAPTER, name, settings)

    async def drop(self, name: str) -> None:
        """Forget an adapter."""
        await self._all(DROP_ADAPTER, name)

    async def run(self, name: str, minibatch: Minibatch, loss: Loss, *, backward: bool = True) -> Pass:
        """Run a pass over a minibatch of all shares; see `AdapterEngine.run`."""
        config = self._ranks.config
        replies = await self._all(
            RUN_ADAPTER,
            name,
            loss,
            backward,
            parcel=lambda rank: replace(minibatch, rows=minibatch.rows[config.share(rank) :: config.shares]),
            work=sum(len(row) for row in minibatch.rows),
        )
        heads = [replies[rank] for rank in config.head_ranks]
        # Rows were dealt to the shares in turn, and come back in that order.
        return Pass(
            metrics=reduce(merge_all(reply.metrics for reply in heads)),
            logprobs=[heads[index % len(heads)].logprobs[index // len(heads)] for index in range(len(minibatch.rows))],
        )

    async def run_many(self, passes: Sequence[AdapterPass]) -> list[Pass | ForgeError]:
        """Run passes of several adapters, over rows in common where they fit; see `AdapterEngine.run_many`.

        Returns:
            For each pass its result, or the error that `run` would have raised.
        """
        # Passes with rows in common run on one rank alone.
        (replies,) = await self._all(
            RUN_ADAPTERS,
            parcel=lambda _: list(passes),
            work=sum(len(row) for adapter_pass in passes for row in adapter_pass.minibatch.rows),
        )
        return [reply.error or Pass(metrics=reduce(reply.metrics), logprobs=reply.logprobs) for reply in replies]

    async def step(self, name: str, adam: AdamStep) -> tuple[dict[str, float], int]:
        """Take an optimizer step; returns its metrics and the adapter's number of updates."""
        replies = await self._all(STEP_ADAPTER, name, adam)
        return reduce(replies[0].metrics), replies[0].updates

    async def save(self, name: str, folder: Path) -> None:
        """Write an adapter into an existing folder of this machine; see `AdapterEngine.save`."""
        await self._all(SAVE_ADAPTER, name, folder)

    async def load(self, name: str, folder: Path, *, optimizer: bool) -> int:
        """Load an adapter from a folder of this machine; returns its number of updates."""
        return (await self._all(LOAD_ADAPTER, name, folder, optimizer))[0]
