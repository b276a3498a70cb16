"""Checkpoints of a run: controller and trainer are saved at the same step."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_rl.errors import CheckpointError, ConfigError, ReplicaError
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.run.records.monitor import RunEnd
from forge_rl.run.start.ending import Ending
from tests.staged_checkpoints import UNCHANGED, Parts, checkpointer_of, note_score, save, scores_of


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

    resumed_parts = Parts()
    resumed_parts.version, resumed_parts.updates = 2, 4  # it loaded the training state
    second = checkpointer_of(resumed_parts, tmp_path)
    await second.resume(saved)
    assert (resumed_parts.batches, scores_of(second), second.saved, second.step) == (2, {0: 0.25}, 2, 2)


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
        checkpoint = checkpoints.best()
        return checkpoint.step if checkpoint else None

    best_steps: list[object] = []
    note_score(checkpointer, 0, 0.9)  # of no checkpoint
    for step, score in ((1, 0.2), (2, 0.7), (3, None), (4, 0.7), (5, None)):
        parts.step(checkpointer)
        if score is not None:
            checkpointer._evaluator.start(step, step)
        await save(checkpointer)
        best_steps.append(best())
        if score is not None and step != 4:
            note_score(checkpointer, step, score)
    assert best_steps == [None, 1, 2, 2, 2]
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2, 4, 5], "4 may be the best yet"
    note_score(checkpointer, 4, 0.7)
    assert best() == 2, "of equal ones the first"
    note_score(checkpointer, 4, 0.8)
    assert best() == 4

    resumed_checkpointer = checkpointer_of(Parts(), tmp_path)
    resumed_checkpointer._services.trainer.updates = 10
    saved = checkpoints.latest()
    assert saved is not None
    await resumed_checkpointer.resume(saved)
    assert resumed_checkpointer._evaluator.step == 4, "its score was not known when step 5 was saved"
    assert best() == 2

    note_score(checkpointer_of(Parts(), tmp_path, keeps_best=False), 5, 9.0)
    assert best() == 2, "it is not asked for"

    other = checkpointer_of(Parts(), tmp_path)
    other._evaluator.restore({"scores": {"4": 0.9}, "scores_by": {"4": "another reward"}, "evaluation": None})
    other.mark_best()
    assert best() == 2, "scores by another reward decide nothing"


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


async def test_within_a_step_no_checkpoint_is_written(tmp_path: Path) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    parts.step(checkpointer)
    parts.updates += 1
    with pytest.raises(ConfigError, match="within step 2, after updates of the trainer"):
        await checkpointer.begin_save()
    assert not checkpointer.checkpoints.all()


@pytest.mark.parametrize(
    ("updates", "broken", "message"),
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
    updates: int, broken: dict[str, object], message: str, tmp_path: Path
) -> None:
    parts = Parts()
    checkpointer = checkpointer_of(parts, tmp_path)
    parts.step(checkpointer)
    saved = await save(checkpointer)
    path = saved.folder / "controller.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    parts.updates = updates
    with pytest.raises(CheckpointError, match=message):
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
    saved_updates = [
        (checkpoint.step, checkpoint.controller_state()["updates"]) for checkpoint in checkpointer.checkpoints.all()
    ]
    assert saved_updates == [(1, 2), (2, 4)], "each is of the step that it was begun in"
    assert [(checkpoint.training / "updates").read_text() for checkpoint in checkpointer.checkpoints.all()] == [
        "2",
        "4",
    ]
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
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints.all()] == [1, 3]
    await step(None)
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints.all()] == [3, 7]


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
