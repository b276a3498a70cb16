"""The parts of a run that checkpoints hold, without the processes that a run has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.rollout.evaluation import EvalConfig, Evaluation
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.run.checkpoints.files import Checkpoint, Checkpoints
from forge_rl.run.checkpoints.parts import RunParts
from forge_rl.run.evaluation.evaluator import Evaluator, RolloutEvaluations
from forge_rl.run.service_set import RolloutServices, Services
from forge_rl.system.listeners import Listeners
from forge_rl.types import Task

BOUNDS = {"max_lag": 1, "over_sampling": 1.0, "max_episodes": 64}
UNCHANGED: dict[str, object] = {
    "schedule": {"given": BOUNDS, "changes": {}},
    "mixture": {"given": {"weights": {}, "adapting": {}}, "changes": {}},
    "reward": {"given": {"reward": "score"}, "changes": {}},
}


class Parts:
    """Stands for every service and for the rollouts; notes in `done` what it is told."""

    def __init__(self, *deaths: BaseException) -> None:
        self.name = "trainer"
        self.version = self.updates = self.batches = 0
        self.parameters = 1
        self.dtype = "float32"
        self.deaths = list(deaths)
        self.failures: list[Exception] = []
        self.disk = asyncio.Event()
        self.disk.set()
        self.done: list[str] = []
        self.config = ScheduleConfig()
        self.evaluations: list[Evaluation] = []

    def start_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def state(self) -> dict[str, object]:
        return {"batches": self.batches}

    async def restore(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    alive = True
    lora = LoRAConfig()

    async def wait_idle(self) -> int:
        return self.updates

    async def save(self, folder: Path, *, model: Path) -> None:
        self.done.append("save")
        (folder / "training" / "updates").write_text(str(self.updates))

    async def finish_save(self) -> None:
        await self.disk.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.done.append("saved")

    async def free_devices(self) -> None:
        self.done.append("devices cleared")

    async def hand_to_trainer(self, *, idle: bool) -> None:
        assert idle, "engines with devices of their own go on"
        self.done.append("devices to the trainer")

    async def restart(self, resume: Path | None, *, cause: str) -> None:
        self.updates = int((resume / "updates").read_text()) if resume else 0
        self.version = self.updates // 2
        self.done.append(f"restart at {self.version}")
        if self.deaths:
            raise self.deaths.pop(0)

    async def rollback(self, version: int) -> None:
        self.done.append(f"forget all after {version}")

    async def reset(self, state: dict[str, Any] | None = None, *, seed: int, optimizer: object = None) -> None:
        """Reset, as the rollouts if there is a state, else as the trainer."""
        if state is None:
            self.updates = 0
        else:
            self.batches = state["batches"]
        self.done.append(f"reset the {'trainer' if state is None else 'rollouts'} with seed {seed}")

    async def publish(self, store: object, *, dtype: str) -> int:
        self.done.append(f"publish {self.version}")
        return self.version

    async def load(self, store: object, version: int) -> int:
        self.done.append(f"load {version}")
        return version

    def step(self, checkpointer: Checkpointer) -> None:
        """One step of two updates and one publish; afterwards the rollouts are ahead again."""
        self.updates += 2
        self.version += 1
        self.batches = self.version
        checkpointer.end_step()
        self.batches += 1


class Unchanged:
    """Stands for the settings of a run that nobody changes."""

    def __init__(self) -> None:
        self.changed = Listeners[[]]()
        self.mixture = SimpleNamespace(state=dict, restore_sources=lambda state: None)

    def state(self) -> dict[str, object]:
        return UNCHANGED

    async def resume(self, state: object) -> None:
        assert state == UNCHANGED

    def roll_back(self, state: object) -> None:
        assert state == UNCHANGED


def checkpointer_of(parts: Parts, folder: Path, *, keeps_best: bool = True) -> Checkpointer:
    service = cast(Any, parts)
    rollout = RolloutServices(generator=service, weights=service, reward=service, environment=None, devices=service)
    services = Services(trainer=service, rollout=rollout)
    sets = {"held_out": [Task(id="1", source="a", messages=())]}
    return Checkpointer(
        Checkpoints(folder / "checkpoints", keep=2, keeps_best=keeps_best),
        RunParts(
            services=services,
            batches=service,
            evaluator=Evaluator(sets, RolloutEvaluations(EvalConfig(), service, max_tokens=1, warn=print)),
            live=cast(Any, Unchanged()),
        ),
        models=(folder, folder),
        warn=parts.done.append,
    )


def scores_of(checkpointer: Checkpointer) -> dict[int, float]:
    return checkpointer._evaluator.scores


def note_score(checkpointer: Checkpointer, step: int, value: float) -> None:
    """Ends an evaluation with a score."""
    checkpointer._evaluator._pending = None
    scores_of(checkpointer)[step] = value
    checkpointer.mark_best()


async def save(checkpointer: Checkpointer) -> Checkpoint:
    await checkpointer.begin_save()
    saved = await checkpointer.finish_save()
    assert saved is not None
    return saved
