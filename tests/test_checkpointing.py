"""Checkpoints of a run: controller and trainer are saved at the same step, and rolled back to the same step."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from forge_rl.algorithms.entropy import AdaptiveEntropy
from forge_rl.engines.lora_config import LoRAConfig
from forge_rl.errors import CheckpointError, ConfigError, ReplicaError, ServiceError
from forge_rl.rollout.evaluation import EvalConfig, Evaluation
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.run.checkpoints.files import Checkpoint, Checkpoints
from forge_rl.run.checkpoints.parts import RunParts
from forge_rl.run.evaluation.evaluator import Evaluator, RolloutEvaluations
from forge_rl.run.records.monitor import RunEnd
from forge_rl.run.service_set import RolloutServices, Services
from forge_rl.run.start.ending import Ending
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
    one = cast(Any, parts)
    rollout = RolloutServices(generator=one, weights=one, reward=one, environment=None, devices=one)
    services = Services(trainer=one, rollout=rollout)
    sets = {"held_out": [Task(id="1", source="a", messages=())]}
    return Checkpointer(
        Checkpoints(folder / "checkpoints", keep=2, keeps_best=keeps_best),
        RunParts(
            services=services,
            batches=one,
            evaluator=Evaluator(sets, RolloutEvaluations(EvalConfig(), one, max_tokens=1, warn=print)),
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


async def test_a_checkpoint_is_of_the_step_that_ended_and_resumes_there(tmp_path: Path) -> None:
    parts = Parts()
    first = checkpointer_of(parts, tmp_path)
    scores_of(first)[0] = 0.25
    parts.step(first)
    parts.step(first)
    saved = await save(first)
    assert (saved.step, first.saved) == (2, 2)
    state = saved.controller_state()
    assert state.pop("seconds") == pytest.approx(first.seconds, abs=60)
    assert state == {"format": 2, "step": 2, "updates": 4, "batches": 2, "rollouts": {"batches": 2}} | {
        "scores": {"0": 0.25},
        "scores_by": {},
        "evaluation": None,
        "live": UNCHANGED,
    }

    again = Parts()
    again.version, again.updates = 2, 4  # it loaded the training state
    second = checkpointer_of(again, tmp_path)
    await second.resume(saved)
    assert (again.batches, scores_of(second), second.saved, second.step) == (2, {0: 0.25}, 2, 2)


async def test_a_rollback_survives_repeated_deaths_of_the_trainer(
    tmp_path: Path,
) -> None:
    parts = Parts(ReplicaError("killed", service="trainer"), ReplicaError("killed", service="trainer"))
    checkpointer = checkpointer_of(parts, tmp_path)
    for _ in range(2):
        parts.step(checkpointer)
    await save(checkpointer)
    assert parts.done == ["devices to the trainer", "save", "saved"], "engines had them"
    parts.done.clear()
    parts.step(checkpointer)
    scores_of(checkpointer).update({0: 0.1, 2: 0.2, 3: 0.3})
    assert await checkpointer.rollback() == 2
    assert parts.done == [
        *["devices cleared", "restart at 2"] * 3,
        "forget all after 1",
        "publish 2",
        "load 2",
    ]
    assert not checkpointer.trained
    assert (parts.batches, scores_of(checkpointer), checkpointer.saved) == (2, {0: 0.1, 2: 0.2}, 2)


async def test_objects_of_the_recipe_follow_checkpoints_and_rollbacks(tmp_path: Path) -> None:
    parts = Parts()
    first, entropy = checkpointer_of(parts, tmp_path), AdaptiveEntropy(target=1.0, delta=0.25)
    first.kept.add("entropy", entropy)
    entropy.update(0.5)
    parts.step(first)
    entropy.update(0.5)  # of the next step
    saved = await save(first)
    assert saved.controller_state()["kept"] == {"entropy": {"coefficient": 0.25, "is_low": 1.0}}
    assert await first.rollback() == 1
    assert entropy.coefficient == 0.25

    again = Parts()
    again.version, again.updates = 1, 2
    second, other = checkpointer_of(again, tmp_path), AdaptiveEntropy(target=1.0)
    await second.resume(saved)
    second.kept.add("entropy", other)
    assert other.coefficient == 0.25

    fresh, entropy = checkpointer_of(Parts(), tmp_path / "other"), AdaptiveEntropy(target=1.0, initial=0.5)
    fresh.kept.add("entropy", entropy)
    entropy.update(0.5)
    assert await fresh.rollback() == 0
    assert entropy.coefficient == 0.5, "as it was added"


def test_an_object_whose_state_is_not_json_is_refused(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"a": {1}}

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(ConfigError, match="the state of odd is not JSON"):
        checkpointer_of(Parts(), tmp_path).kept.add("odd", Odd())


async def test_the_best_checkpoint_has_the_highest_score_even_a_late_one(
    tmp_path: Path,
) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    checkpoints = checkpointer.checkpoints

    def best() -> int | None:
        found = checkpoints.best()
        return found.step if found else None

    found: list[object] = []
    note_score(checkpointer, 0, 0.9)  # of no checkpoint
    for step, score in ((1, 0.2), (2, 0.7), (3, None), (4, 0.7), (5, None)):
        parts.step(checkpointer)
        if score is not None:
            checkpointer._evaluator.start(step, step)
        await save(checkpointer)
        found.append(best())
        if score is not None and step != 4:
            note_score(checkpointer, step, score)
    assert found == [None, 1, 2, 2, 2]
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2, 4, 5], "4 may be the best yet"
    note_score(checkpointer, 4, 0.7)
    assert best() == 2, "of equal ones the first"
    note_score(checkpointer, 4, 0.8)
    assert best() == 4

    again = checkpointer_of(Parts(), tmp_path)
    again._services.trainer.updates = 10
    saved = checkpoints.latest()
    assert saved is not None
    await again.resume(saved)
    assert again._evaluator.step == 4, "its score was not known when step 5 was saved"
    assert best() == 2

    note_score(checkpointer_of(Parts(), tmp_path, keeps_best=False), 5, 9.0)
    assert best() == 2, "it is not asked for"

    other = checkpointer_of(Parts(), tmp_path)
    other._evaluator.restore({"scores": {"4": 0.9}, "scores_by": {"4": "another reward"}, "evaluation": None})
    other.mark_best()
    assert best() == 2, "scores by another reward decide nothing"


async def test_a_rollback_forgets_an_evaluation_of_a_step_that_is_done_again(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    for step in (1, 2):
        parts.step(checkpointer)
        note_score(checkpointer, step, 0.1 * step)
        await save(checkpointer)
    evaluator = checkpointer._evaluator
    evaluator.start(2, 2)
    await checkpointer.rollback()
    assert (evaluator.step, len(parts.evaluations)) == (2, 2), "the weights are the same: it is started again"
    parts.step(checkpointer)
    evaluator.start(3, 3)
    await checkpointer.rollback()
    assert (evaluator.step, len(parts.evaluations)) == (None, 3)


def test_closing_ignores_a_checkpoint_whose_trainer_died(tmp_path: Path) -> None:
    async def check() -> None:
        parts, unseen = Parts(), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        checkpointer = checkpointer_of(parts, tmp_path)
        parts.step(checkpointer)
        parts.disk.clear()
        parts.failures.append(ReplicaError("killed", service="trainer"))
        await checkpointer.begin_save()
        parts.disk.set()
        await checkpointer.close()
        assert not parts.failures
        del checkpointer
        gc.collect()
        assert not unseen, "asyncio prints no traceback of it"

    asyncio.run(check())


@pytest.mark.parametrize("place", ["restart", "restore", "rollback", "publish", "load"])
async def test_a_rollback_cut_short_saves_nothing_and_the_next_repairs_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    for _ in range(2):
        parts.step(checkpointer)
    await save(checkpointer)
    parts.step(checkpointer)
    parts.last, reached = "the batch of step 3", asyncio.Event()  # type: ignore[attr-defined]

    async def hang(*_: object, **__: object) -> None:
        reached.set()
        await asyncio.sleep(3600)

    with monkeypatch.context() as patch:
        patch.setattr(parts, place, hang)
        rolling = asyncio.create_task(checkpointer.rollback())
        await reached.wait()
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
    log = SimpleNamespace(event=parts.done.append)
    monitor = SimpleNamespace(log=log, folder=tmp_path, summarise=lambda *_, **__: None)
    run: Any = SimpleNamespace(config=SimpleNamespace(checkpoint_every=1), step=checkpointer.step, scores={})
    await Ending(run, checkpointer._services, checkpointer, cast(Any, monitor)).stop()
    assert parts.done[-1] == "nothing is saved, as the run was rolling back; the same command resumes from step 2"
    with pytest.raises(CheckpointError, match="its rollback was interrupted"):
        await checkpointer.begin_save()
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints.all()] == [2]

    assert await checkpointer.rollback() == 2
    parts.step(checkpointer)
    state = (await save(checkpointer)).controller_state()
    assert (state["step"], state["updates"], state["batches"]) == (3, 6, 3)


async def test_within_a_step_no_checkpoint_is_written(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    parts.step(checkpointer)
    parts.updates += 1
    with pytest.raises(ConfigError, match="within step 2, after updates of the trainer"):
        await checkpointer.begin_save()
    assert not checkpointer.checkpoints.all()


async def test_a_rollback_never_goes_to_the_start_if_there_were_checkpoints(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    parts.step(checkpointer)
    saved = await save(checkpointer)
    (saved.training / "updates").write_text("8")
    parts.done.clear()
    with pytest.raises(CheckpointError, match=r"none is left to resume from \(damaged .*damaged-0\)"):
        await checkpointer.rollback()
    assert not any("restart" in line for line in parts.done)


async def test_without_a_checkpoint_a_rollback_goes_to_the_start(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    parts.step(checkpointer)
    assert await checkpointer.rollback() == 0
    assert parts.done == ["devices cleared", "restart at 0", "forget all after -1", "publish 0", "load 0"]
    assert (parts.batches, checkpointer.saved, checkpointer.step) == (0, None, 0)


async def test_a_reset_restores_the_first_weights_under_a_new_version(
    tmp_path: Path,
) -> None:
    parts = Parts()
    checkpointer, entropy = checkpointer_of(parts, tmp_path), AdaptiveEntropy(target=1.0, initial=0.5)
    checkpointer.kept.add("entropy", entropy)
    scores_of(checkpointer).update({0: 0.1, 1: 0.2})
    entropy.update(0.5)
    parts.step(checkpointer)
    checkpointer._evaluator.start(1, 1)
    checkpointer._first["mixture"] = {}
    await checkpointer.reset(3)
    assert parts.done == [
        "reset the rollouts with seed 3",
        "devices to the trainer",
        "reset the trainer with seed 3",
        "publish 1",
        "load 1",
    ]
    assert (parts.batches, checkpointer.step, scores_of(checkpointer)) == (0, 0, {0: 0.1})
    assert (checkpointer._evaluator.step, entropy.coefficient) == (None, 0.5)
    assert not checkpointer.trained
    checkpointer._evaluator.start(0, 1)
    parts.version, checkpointer._first["mixture"] = 2, {}
    await checkpointer.reset(3)
    assert [evaluation.version for evaluation in parts.evaluations] == [1, 1, 2], "the weights are the same"
    checkpointer._evaluator.rollback(-1)
    parts.step(checkpointer)
    await save(checkpointer)
    with pytest.raises(ConfigError, match="the run has checkpoints in"):
        await checkpointer.reset(3)
    assert checkpointer.step == 1
    entropy._coefficient = np.float32(0.5)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"the state of entropy is not JSON: .*float32"):
        parts.step(checkpointer)


@pytest.mark.parametrize(
    "error", [ReplicaError("killed", service="generator"), ServiceError("three restarts", service="trainer")]
)
async def test_a_rollback_ends_with_an_error_that_no_restart_cures(error: ServiceError, tmp_path: Path) -> None:
    parts = Parts(error)
    with pytest.raises(type(error), match=error.message):
        await checkpointer_of(parts, tmp_path).rollback()
    assert parts.done == ["devices cleared", "restart at 0"]


@pytest.mark.parametrize(
    ("updates", "broken", "said"),
    [
        (4, {}, "holds a training state of 4 updates, but .* of 2"),
        (2, {"step": 2}, "holds the name of step 1, but a controller state of 2"),
        (2, {"batches": 2}, "holds rollouts of 1 batches, but a controller state of 2"),
        (2, {"rollouts": {"batches": 2}}, "holds rollouts of 2 batches, but a controller state of 1"),
        (2, {"format": 3}, r"has the format 3; forge_rl .* reads formats 1 to 2"),
        (2, {"format": "x"}, "has the format 'x'"),
        (2, {"scores": None}, "are malformed"),
        (2, {"evaluation": [2]}, "an evaluation, are malformed"),
        (2, {"evaluation": ["2", 2]}, "an evaluation, are"),
    ],
)
async def test_a_checkpoint_whose_parts_do_not_fit_is_refused(
    updates: int, broken: dict[str, object], said: str, tmp_path: Path
) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    parts.step(checkpointer)
    saved = await save(checkpointer)
    path = saved.folder / "controller.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    parts.updates = updates
    with pytest.raises(CheckpointError, match=said):
        await checkpointer.resume(saved)


async def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    assert await checkpointer.finish_save() is None
    parts.step(checkpointer)
    parts.disk.clear()
    await checkpointer.begin_save()
    assert (checkpointer.saved, checkpointer.checkpoints.latest()) == (None, None)
    parts.step(checkpointer)
    second = asyncio.create_task(checkpointer.begin_save())
    await asyncio.sleep(0.05)
    assert not second.done()
    assert parts.done == ["devices to the trainer", "save"]
    parts.disk.set()
    await second
    saved = await checkpointer.finish_save()
    assert saved is not None
    found = [(each.step, each.controller_state()["updates"]) for each in checkpointer.checkpoints.all()]
    assert found == [(1, 2), (2, 4)], "each is of the step that it was begun in"
    assert [(each.training / "updates").read_text() for each in checkpointer.checkpoints.all()] == ["2", "4"]
    assert (saved.step, checkpointer.saved) == (2, 2)


async def test_checkpoints_that_cannot_be_written_leave_earlier_ones(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)

    async def step(failure: Exception | None) -> None:
        parts.failures = [] if failure is None else [failure]
        parts.step(checkpointer)
        await checkpointer.begin_save()
        await checkpointer.close()

    def told() -> list[str]:
        return [line for line in parts.done if line.startswith("step ")]

    full = OSError(28, "No space left on device")
    await step(None)
    await step(full)
    assert len(told()) == 1
    assert "step 2 has no checkpoint: " in told()[0]
    assert "No space left on device" in told()[0]
    with pytest.raises(CheckpointError, match="No space left"):
        await checkpointer.finish_save()
    await step(None)
    await step(full)
    await step(full)
    await step(full)
    assert len(told()) == 4
    assert [each.step for each in checkpointer.checkpoints.all()] == [1, 3]
    await step(None)
    assert [each.step for each in checkpointer.checkpoints.all()] == [3, 7]


async def test_a_rollback_drops_unfinished_checkpoints(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    for _ in range(2):
        parts.step(checkpointer)
        await save(checkpointer)
    latest = checkpointer.checkpoints.latest()
    assert latest is not None
    (latest.training / "updates").write_text("8")
    parts.step(checkpointer)
    parts.disk.clear()
    await checkpointer.begin_save()
    assert await checkpointer.rollback() == 1
    assert "restart at 1" in parts.done
    assert any(f"{latest.folder} is damaged" in line for line in parts.done)
    parts.disk.set()
    parts.step(checkpointer)
    await save(checkpointer)
    assert [each.step for each in checkpointer.checkpoints.all()] == [1, 2]
    assert all(each.damage() == "" for each in checkpointer.checkpoints.all())


class Stopped:
    """What a stop needs of a run."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self.config = SimpleNamespace(steps=10, checkpoint_every=10)
        self.batches, self.scores = SimpleNamespace(last=None), dict[int, float]()

    @property
    def step(self) -> int:
        return self._checkpointer.step

    def log(self, stats: Any, batch: Any = None, packed: Any = None) -> dict[str, Any]:
        self._checkpointer.end_step()
        return {}


class Adapters:
    """Parts of a run with updates of their own, of which the trainer knows nothing."""

    def __init__(self) -> None:
        self.updates, self.stepping = 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        self.updates = state["updates"]

    async def save(self, folder: Path) -> None:
        (folder / "adapters").write_text(str(self.updates))


async def test_a_stop_within_the_step_of_adapters_saves_no_part_of_it(tmp_path: Path) -> None:
    parts, adapters, events = Parts(), Adapters(), list[str]()
    checkpointer = checkpointer_of(parts, tmp_path)
    checkpointer.add_part("adapters", adapters)
    log = SimpleNamespace(event=events.append)
    run = Stopped(checkpointer)
    ending = Ending(cast(Any, run), checkpointer._services, checkpointer, cast(Any, SimpleNamespace(log=log)))
    adapters.updates += 2
    checkpointer.end_step()
    await save(checkpointer)
    for updates in (2, 3):  # as when one of two adapters has taken its update, and only the trainer knows of it yet
        adapters.stepping, adapters.updates = True, updates
        with pytest.raises(ConfigError, match="within step 2, after updates of the adapters"):
            await checkpointer.begin_save()
        await ending.save()
        assert events.pop() == (
            "step 2 is not saved, as the adapters took only a part of the updates in it; the same command resumes from "
            "step 1"
        )
    assert (run.step, checkpointer.saved) == (1, 1)

    # Stopped after the last update, before the end of the step.
    adapters.stepping, adapters.updates = False, 4
    await ending.save()
    saved = checkpointer.checkpoints.latest()
    assert saved is not None
    assert saved.step == 2
    assert (saved.folder / "adapters").read_text() == "4"
    assert saved.controller_state()["kept"] == {"adapters": {"updates": 4}}

    successor, resumed_adapters = checkpointer_of(Parts(), tmp_path), Adapters()
    await successor.resume(saved)
    successor.add_part("adapters", resumed_adapters)
    assert (resumed_adapters.updates, successor.trained) == (4, [])


async def test_a_body_that_ends_before_the_last_step_is_saved(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    ends: list[RunEnd] = []
    monitor = SimpleNamespace(
        log=SimpleNamespace(event=parts.done.append), summarise=lambda end, show: ends.append(end), folder=tmp_path
    )
    run = Stopped(checkpointer)
    parts.step(checkpointer)
    await Ending(cast(Any, run), checkpointer._services, checkpointer, cast(Any, monitor)).finish()
    assert checkpointer.saved == 1
    assert [(end.outcome, end.step, end.checkpoint) for end in ends] == [
        ("stopped", 1, checkpointer.checkpoints.of_step(1))
    ]
