"""Rollbacks and resets of a run to a checkpoint, or to its start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from forge_rl.algorithms.entropy import AdaptiveEntropy
from forge_rl.errors import CheckpointError, ConfigError, ReplicaError, ServiceError
from forge_rl.run.start.ending import Ending
from tests.staged_checkpoints import Parts, checkpointer_of, note_score, save, scores_of


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

    second_parts = Parts()
    second_parts.version, second_parts.updates = 1, 2
    second, other = checkpointer_of(second_parts, tmp_path), AdaptiveEntropy(target=1.0)
    await second.resume(saved)
    second.kept.add("entropy", other)
    assert other.coefficient == 0.25

    fresh, entropy = checkpointer_of(Parts(), tmp_path / "other"), AdaptiveEntropy(target=1.0, initial=0.5)
    fresh.kept.add("entropy", entropy)
    entropy.update(0.5)
    assert await fresh.rollback() == 0
    assert entropy.coefficient == 0.5, "as it was added"


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
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints.all()] == [1, 2]
    assert all(checkpoint.damage() == "" for checkpoint in checkpointer.checkpoints.all())
