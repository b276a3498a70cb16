"""A trainer and engines of the Tinker API's server that compute little, and can be made to fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forge_rl.algorithms.protocol import Loss
from forge_rl.engines.adapter_settings import AdamStep, AdapterPass, AdapterSettings
from forge_rl.errors import ConfigError, ForgeError, LossError, ReplicaError
from forge_rl.packing.rows import Layout, Minibatch
from forge_rl.services.trainer_adapters import Pass
from forge_rl.token_arrays import ScoredTokens, TokenIds
from forge_rl.types import Sampling, Turn


@dataclass
class FakeAdapters:
    """Adapters whose state is what was done to them, in order."""

    states: dict[str, list[str]] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    """Calls that end the trainer, once each."""
    alive: bool = True
    together: list[int] = field(default_factory=list)
    """Number of passes of each call for several."""

    def _do(self, name: str, what: str) -> None:
        if self.deaths and what.startswith(self.deaths[0]):
            self.deaths.pop(0)
            self.alive = False
            self.states.clear()
            raise ReplicaError("it was killed", service="trainer")
        if name not in self.states:
            raise ConfigError(f"there is no adapter {name}")
        self.states[name].append(what)

    async def open(self, name: str, settings: AdapterSettings) -> None:
        self.states[name] = []
        self._do(name, f"open {settings.lora.rank} {settings.seed}")

    async def drop(self, name: str) -> None:
        if self.states.pop(name, None) is None:
            raise ConfigError(f"there is no adapter {name}")

    async def run(self, name: str, minibatch: Minibatch, loss: Loss, *, backward: bool = True) -> Pass:
        ids = [int(token) for row in minibatch.rows for token in row.token_ids]
        if 13 in ids:
            raise LossError("the gradient is not finite")
        if backward:
            self._do(name, f"pass {sum(ids)}")
        logprobs = [-row.targets.float().numpy() for row in minibatch.rows]
        return Pass(metrics={"loss": float(sum(ids))}, logprobs=logprobs)

    async def run_many(self, passes: Sequence[AdapterPass]) -> list[Pass | ForgeError]:
        self.together.append(len(passes))
        results = list[Pass | ForgeError]()
        for one in passes:
            try:
                results.append(await self.run(one.name, one.minibatch, one.loss, backward=one.backward))
            except LossError as error:
                results.append(error)
        return results

    def updates(self, name: str) -> int:
        return sum(what.startswith("step") for what in self.states[name])

    async def step(self, name: str, adam: AdamStep) -> tuple[dict[str, float], int]:
        self._do(name, f"step {adam.lr:g}")
        return {"grad_norm": 1.0}, self.updates(name)

    async def save(self, name: str, folder: Path) -> None:
        (folder / "state").write_text(json.dumps(self.states[name]))

    async def load(self, name: str, folder: Path, *, optimizer: bool) -> int:
        self.states[name] = json.loads((folder / "state").read_text())
        return self.updates(name) if optimizer else 0


class FakeTrainer:
    def __init__(self) -> None:
        self.adapters = FakeAdapters()
        self.layout = Layout(seq_len=16)
        self.restarts = self.restarts_in_a_row = 0

    @property
    def alive(self) -> bool:
        return self.adapters.alive

    async def restart(self, resume: Path | None, *, cause: str = "") -> None:
        self.restarts += 1
        self.restarts_in_a_row += 1
        self.adapters.alive = True

    def forget_restarts(self) -> None:
        self.restarts_in_a_row = 0


class FakeEngines:
    """Engines whose answers are their adapter's name as a number, and the prompt's length."""

    max_model_len = 32

    def __init__(self) -> None:
        self.adapters: dict[str, Path] = {}
        self.seeds: list[int | None] = []

    async def load_adapter(self, name: str, folder: Path) -> None:
        self.adapters[name] = folder

    async def drop_adapter(self, name: str) -> None:
        del self.adapters[name]

    async def generate(self, prompt_ids: TokenIds, sampling: Sampling) -> Turn:
        assert not sampling.adapter or sampling.adapter in self.adapters
        self.seeds.append(sampling.seed)
        ids = np.array([len(prompt_ids), bool(sampling.adapter)])
        logprobs = np.full(2, np.nan if sampling.temperature == 0 else -1.0)
        return Turn(
            prompt_ids=prompt_ids, token_ids=ids, logprobs=logprobs, versions=np.zeros(2), text="", truncated=True
        )

    async def score(
        self, prompt_ids: TokenIds, token_ids: TokenIds, *, temperature: float = 1.0, top_k: int = 0, adapter: str = ""
    ) -> ScoredTokens:
        count = len(token_ids)
        top_ids = np.tile(np.arange(top_k), (count, 1))
        return ScoredTokens(logprobs=-np.arange(count), top_ids=top_ids, top_logprobs=-1.0 * top_ids)
