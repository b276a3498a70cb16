"""Bounds of live settings, and what a change that is refused leaves as it was."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from forge_rl.data.sources.iterable import IterableSource
from forge_rl.errors import ConfigError, ForgeError, TaskError
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.live.attach import AttachedRun
from forge_rl.run.live.control_server import serving_control
from forge_rl.run.live.settings import replicas_knob
from forge_rl.types import Task
from tests.staged_rollouts import CountingSource, rollouts, run_until_idle
from tests.test_live import Live


def test_numbers_of_numpy_are_taken_and_written_as_json_has_them(tmp_path: Path):
    live = Live(tmp_path)
    live.settings.optimizer.put({"lr": np.float32(0.0625)})
    live.schedule.max_lag = cast(Any, np.int64(2))
    assert (live.trainer.lr, live.rollouts.config.max_lag) == (0.0625, 2)
    assert [type(live.trainer.lr), type(live.rollouts.config.max_lag)] == [float, int]
    changes = json.loads((tmp_path / "live.json").read_text())["live"]
    assert (changes["optimizer"]["changes"], changes["schedule"]["changes"]) == ({"lr": 0.0625}, {"max_lag": 2})
    for value in (np.float64(2), np.bool_(True), np.float64("nan")):
        with pytest.raises(ConfigError, match="schedule max_lag is set to"):
            live.schedule.max_lag = cast(Any, value)


async def test_an_attached_client_sets_several_weights_together_or_none(tmp_path: Path):
    live = Live(tmp_path, weights={"a": 1.0, "b": 0.0})

    class Knobs:
        async def set(self, knob: str, values: dict[str, Any]) -> None:
            await live.settings.write(knob, values)

        async def status(self) -> dict[str, object]:
            return live.settings.read()

    (tmp_path / "config.json").touch()
    async with serving_control(tmp_path, Knobs(), live.events.append):
        mixture = AttachedRun(tmp_path).mixture
        await asyncio.to_thread(mixture.update, {"a": 0, "b": np.float32(0.5)})
        assert await asyncio.to_thread(dict, mixture) == {"a": 0, "b": 0.5}
        with pytest.raises(ForgeError, match="from 0 to"):
            await asyncio.to_thread(mixture.update, {"a": 2, "b": -1})
        assert dict(live.mixture.state()["weights"]) == {"a": 0, "b": 0.5}  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match=r"Path.* cannot be sent to a run"):
            await asyncio.to_thread(mixture.update, {"a": cast(Any, tmp_path)})


async def test_a_reset_that_a_source_refuses_changes_nothing(tmp_path: Path):
    tasks = (
        Task(id=str(number), source="b", messages=({"role": "user", "content": str(number)},)) for number in range(99)
    )
    live = Live(tmp_path, sources={"a": CountingSource("a"), "b": IterableSource("b", tasks, held_out_share=0.0)})
    await live.rollouts.next_batch()
    before, rolled_out = live.mixture.state(), repr(live.rollouts)
    with pytest.raises(TaskError, match=r"the iterator of 'b' is at item .* and cannot go back to 0"):
        await live.checkpointer.reset(3)
    assert not live.checkpointer.rolling_back
    assert (live.mixture.state(), repr(live.rollouts)) == (before, rolled_out)
    drawn = live.mixture.draw_from("a"), live.mixture.draw_from("b")
    assert [int(task.id) for task in drawn] == [before["sources"]["a"]["drawn"] + 1, before["sources"]["b"]["index"]]  # type: ignore[index]
    await live.rollouts.close()


@pytest.mark.parametrize(
    ("schedule", "name", "value", "message"),
    [
        ({}, "max_lag", -1, "max-lag is -1"),
        ({}, "max_lag", 1.5, "max_lag is set to 1.5"),
        ({}, "max_lag", True, "set to True"),
        ({}, "max_lag", "2", "set to '2'"),
        ({}, "max_episodes", 0, "max-episodes is 0"),
        ({}, "max_episodes", 10**9, "at most 1000000"),
        ({}, "max_lag", 10**6, "at most 1000"),
        ({}, "over_sampling", math.nan, "over_sampling is set to nan"),
        ({}, "over_sampling", 9, "over-sampling is 9"),
        ({"max_lag": 1}, "over_sampling", 2, "waits for its stragglers all the same"),
        ({"over_sampling": 2, "max_lag": 2}, "max_lag", 0, "no later batch can use the surplus"),
        ({"kind": "asynchronous"}, "max_lag", 0, "choose --schedule.kind synchronous"),
        ({"kind": "one_step"}, "max_lag", 3, "has a fixed lag"),
        ({}, "kind", "asynchronous", "'kind' cannot change in a live run"),
        ({}, "retries", 3, "set one of max_lag, over_sampling, max_episodes"),
        ({}, "max_lagg", 3, "'max_lagg' cannot change"),
    ],
)
def test_a_bound_that_cannot_be_is_refused_and_nothing_changes(
    schedule: dict[str, Any], name: str, value: object, message: str, tmp_path: Path
):
    live = Live(tmp_path, **schedule)
    before = live.rollouts.config
    with pytest.raises(ConfigError) as caught:
        setattr(live.schedule, name, value)
    assert message in str(caught.value)
    assert live.rollouts.config == before
    assert live.events == []
    assert not (tmp_path / "live.json").exists()


async def test_a_bound_holds_from_the_next_batch_on():
    executor = rollouts(schedule=ScheduleConfig(max_lag=1))
    await executor.next_batch()
    executor.config = replace(executor.config, max_lag=3)
    assert executor._scheduler.config.max_lag == 1
    await executor.next_batch()
    await run_until_idle()
    assert executor._scheduler.config.max_lag == 3
    await executor.close()


@pytest.mark.parametrize(
    ("knob", "values", "message"),
    [
        ("optimizer", {"lr": -1e-5}, "at most 0.1"),
        ("optimizer", {"lr": 0}, "pause the run instead"),
        ("optimizer", {"lr": 10.0}, "at most 0.1"),
        ("optimizer", {"lr": math.nan}, "nan"),
        ("optimizer", {"lr": True}, "True"),
        ("optimizer", {"lr": "1e-5"}, "'1e-5'"),
        ("optimizer", {"lr": 1e-5, "beta1": 0.5}, "beta1"),
        ("group_size", {"group_size": 10**6}, "set one of schedule, mixture, optimizer, reward"),
        ("schedule", {"max_lag": 3, "max_episodes": 0}, "max-episodes is 0"),
        ("schedule", {"max_lag": 3, "over_sampling": "2"}, "set to '2'"),
        ("schedule", {"max_episodes": 32, "kind": "asynchronous"}, "'kind' cannot change"),
        ("mixture", {"weights": {"a": 3, "b": -1}}, "from 0 to 1e+09"),
        ("mixture", {"weights": {"a": 3, "c": 1}}, "no source named 'c'"),
        ("mixture", {"weights": {"a": 3}, "adapting": {"adapt": "success"}}, "set weights, or adapting"),
        ("mixture", {"weights": {"a": math.nan}}, "from 0 to 1e+09"),
        ("mixture", {"weights": {"a": 1e300}}, "from 0 to 1e+09"),
        ("mixture", {"weights": {"a": -1}}, "from 0 to 1e+09"),
        ("mixture", {"adapting": {"adapt": "failure"}}, "set off or success"),
        ("mixture", {"adapting": {"adapt": "success", "target": math.nan}}, "target is nan"),
        ("mixture", {"adapting": {"adapt": "success", "target": "high"}}, "'high'"),
    ],
)
def test_a_change_out_of_bounds_is_refused_and_changes_nothing(
    knob: str, values: dict[str, Any], message: str, tmp_path: Path
):
    live = Live(tmp_path)
    before = live.settings.state()
    with pytest.raises(ForgeError) as caught:
        asyncio.run(live.settings.write(knob, values))
    assert message in str(caught.value)
    assert live.settings.state() == before
    assert live.events == []


def test_a_change_of_replicas_that_is_refused_in_part_changes_nothing() -> None:
    class Service:
        replicas = 1

        def scale(self, replicas: int) -> None:
            if replicas > 4:
                raise ConfigError("no room")
            self.replicas = replicas

    services, texts = {"engines": Service(), "environments": Service()}, list[str]()
    knob = replicas_knob(services, texts.append, texts.append)
    for values in ({"engines": 3, "rewards": 2}, {"engines": 3, "environments": 5}):
        with pytest.raises(ConfigError):
            knob.put(values)
        assert (knob.read(), knob.changes(), texts) == ({"engines": 1, "environments": 1}, {}, [])
    knob.put({"engines": 3, "environments": 2})
    assert knob.changes() == {"engines": 3, "environments": 2}
    knob.put({})
    assert texts == ["engines 1 -> 3, environments 1 -> 2"]
