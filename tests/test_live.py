"""Live settings: what may change, how it is told, and how a continued run takes it up. No process is started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_rl.data.adaptive import Adapting
from forge_rl.data.mixture import Mixture
from forge_rl.data.sources import Source
from forge_rl.errors import CheckpointError, ConfigError, ForgeError
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.run.checkpoints.files import Checkpoint, Checkpoints
from forge_rl.run.checkpoints.parts import RunParts
from forge_rl.run.evaluation.evaluator import Evaluator, RolloutEvaluations
from forge_rl.run.live import settings as live_module
from forge_rl.run.live.control import Control
from forge_rl.run.live.knobs import is_live_state
from forge_rl.run.live.settings import LiveSettings, changes_by
from forge_rl.run.service_set import Services
from forge_rl.system.listeners import Listeners
from tests.staged_rollouts import rollouts
from tests.test_mixture import Counting


@dataclass(frozen=True)
class Flagged:
    """A reward that flags name."""

    scale: float = 1.0

    def __call__(self, task: object, text: str) -> float:
        return self.scale


FLAGS, OFF = Flagged(), Adapting()


class FakeReward:
    """Stands for the service."""

    def __init__(self, function: object) -> None:
        self.function = function
        self.replaced = Listeners[[]]()

    async def replace(self, function: object) -> None:
        if function == "broken":
            raise ForgeError("it cannot be pickled")
        self.function = function
        self.replaced.tell()


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of rewards are scales."""
    monkeypatch.setattr(
        live_module, "build_reward", lambda texts: "broken" if texts[0] == "broken" else Flagged(float(texts[0]))
    )


class Live:
    """A process of a run: its live settings, with what they belong to."""

    def __init__(
        self,
        folder: Path,
        *,
        reward: object = FLAGS,
        adapting: Adapting = OFF,
        step: int = 0,
        weights: dict[str, float] | None = None,
        lr: float = 3e-5,
        sources: Mapping[str, Source] | None = None,
        **schedule: Any,
    ) -> None:
        self.folder = folder
        self.mixture = Mixture(sources or {name: Counting(name) for name in "ab"}, weights)
        self.rollouts = rollouts(mixture=self.mixture, schedule=ScheduleConfig(**schedule))
        self.reward = FakeReward(reward)
        self.events: list[str] = []
        trainer: Any = SimpleNamespace(updates=0, version=0, lr=lr)
        self.trainer = trainer
        reward_service = cast(Any, self.reward)
        self.settings = LiveSettings(self.rollouts, self.mixture, adapting, reward_service, trainer, self.events.append)
        self.schedule = self.settings.schedule
        evaluations = RolloutEvaluations(EvalConfig(), self.rollouts, max_tokens=1, warn=self.events.append)
        services = Services(trainer=trainer)
        checkpoints = Checkpoints(folder / "checkpoints", keep=1)
        evaluator = Evaluator({}, evaluations)
        self.checkpointer = Checkpointer(
            checkpoints,
            RunParts(services=services, batches=self.rollouts, evaluator=evaluator, live=self.settings),
            models=(folder,),
            warn=self.events.append,
        )
        self.checkpointer.step = step

    def replace_reward(self, text: str) -> None:
        asyncio.run(self.settings.write("reward", {"texts": [text]}))

    def checkpoint(self) -> Checkpoint:
        """Writes the controller's part of a checkpoint."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        state: dict[str, object] = {
            "step": self.checkpointer.step,
            "updates": 0,
            "seconds": 1.0,
            "scores": {},
            "evaluation": None,
            "live": self.settings.state(),
        }
        (folder / "controller.json").write_text(json.dumps(state | {"rollouts": self.rollouts.state()}))
        return Checkpoint(step=self.checkpointer.step, folder=folder)

    def continued(self, before: Live | None, **flags: Any) -> Live:
        """Continues in another process, from a checkpoint that `before` wrote as it is now, or from the start."""
        continued_live = Live(self.folder, **flags)
        asyncio.run(continued_live.checkpointer.resume(before.checkpoint() if before else None))
        return continued_live


def change_all(live: Live) -> None:
    live.mixture["a"] = 3
    live.schedule.max_lag = 2
    live.schedule.over_sampling = 1.5
    live.schedule.max_episodes = 64
    live.settings.optimizer.put({"lr": 1e-5})
    live.replace_reward("7")


def seen(live: Live) -> tuple[object, ...]:
    config = live.rollouts.config
    bounds = config.max_lag, config.over_sampling, config.max_episodes
    return (live.mixture["a"], *bounds, live.trainer.lr, live.reward.function)


CHANGED = (3, 2, 1.5, 64, 1e-5, Flagged(7.0))


def test_each_change_is_told_with_what_was_before_and_who_made_it(tmp_path: Path):
    live = Live(tmp_path)
    live.mixture["a"] = 3
    with changes_by("attached"):
        live.schedule.max_lag = 2
        live.replace_reward("7")
    asyncio.run(live.reward.replace(len))
    assert live.events == [
        "mixture a 1 -> 3",
        "schedule max_lag 1 -> 2, from the next batch on (attached)",
        "reward Flagged -> 7 (attached)",
        "reward 7 -> builtins:len",
    ]


@pytest.mark.parametrize("saved_after", [True, False])
def test_live_changes_hold_in_a_resumed_run_saved_or_not(saved_after: bool, tmp_path: Path):
    live = Live(tmp_path)
    live.checkpointer.step = 4
    checkpoint = None
    if not saved_after:
        checkpoint = Live(tmp_path, step=4)  # as it was
    change_all(live)
    live.checkpointer.step += saved_after
    resumed_live = live.continued(checkpoint or live)
    assert seen(resumed_live) == CHANGED
    assert resumed_live.settings.knobs["reward"].read() == "7"
    assert all("as it was changed live" in event for event in resumed_live.events)
    assert [event.split(" ")[0] for event in resumed_live.events] == ["schedule", "mixture", "learning", "reward"]
    assert seen(resumed_live.continued(resumed_live)) == CHANGED, "and once more"
    assert seen(live.continued(None)) == CHANGED, "also from the start, where there is no checkpoint"


def test_a_change_that_a_later_checkpoint_took_back_does_not_come_again(tmp_path: Path):
    live = Live(tmp_path)
    live.schedule.max_lag = 3
    later = Live(tmp_path, step=2)  # another process, after the checkpoint, has nothing of it
    assert live.continued(later).rollouts.config.max_lag == 1


@pytest.mark.parametrize(
    ("flags", "expected", "message"),
    [
        (
            {"max_lag": 4},
            (3, 4, 1.5, 64, 1e-5, Flagged(7.0)),
            "the current flags set schedule max_lag 4, which overrides the live change to 2",
        ),
        ({"reward": Flagged(2.0)}, (3, 2, 1.5, 64, 1e-5, Flagged(2.0)), "the current flags set the reward Flagged"),
        ({"weights": {"a": 0, "b": 9}}, (0, 2, 1.5, 64, 1e-5, Flagged(7.0)), "mixture a 3 -> 0 (by the current flags)"),
        ({"over_sampling": 1.5, "max_lag": 2}, CHANGED, ""),
        ({"lr": 2e-5}, (3, 2, 1.5, 64, 2e-5, Flagged(7.0)), "the current flags set learning rate 2e-05"),
    ],
)
def test_flags_changed_on_resuming_win_over_live_changes(
    flags: dict[str, Any], expected: tuple[object, ...], message: str, tmp_path: Path
):
    live = Live(tmp_path)
    change_all(live)
    resumed_live = live.continued(live, **flags)
    assert seen(resumed_live) == expected
    assert message in "\n".join(resumed_live.events)


def test_adapting_that_was_set_live_holds_and_flags_that_change_win(tmp_path: Path):
    live = Live(tmp_path)
    live.mixture.adapt(Adapting(adapt="success", most=0.8))
    live.mixture["a"] = 0.3
    resumed_live = live.continued(live)
    assert resumed_live.mixture.adapting.most == 0.8
    assert resumed_live.mixture["a"] == 0.3
    other = live.continued(live, adapting=Adapting(adapt="success", most=0.7))
    assert other.mixture.adapting.most == 0.7
    assert other.mixture["a"] == 0.5, "set by hand no more"


def test_flags_changed_on_resuming_hold_after_a_rollback_to_a_checkpoint_of_before(tmp_path: Path):
    live = Live(tmp_path)
    checkpoint = live.checkpoint()

    def rolled_back(resumed: Live) -> Live:
        asyncio.run(resumed.checkpointer._follow(checkpoint))
        return resumed

    adapting = rolled_back(live.continued(live, adapting=Adapting(adapt="success", most=0.8)))
    assert adapting.mixture.adapting.most == 0.8
    reweighted = rolled_back(live.continued(live, weights={"a": 0, "b": 9}))
    assert (reweighted.mixture["a"], reweighted.mixture["b"]) == (0, 9)
    assert not reweighted.settings.state()["mixture"]["changes"]
    changed = live.continued(live, weights={"a": 0, "b": 9})
    changed.mixture["a"] = 4
    assert rolled_back(changed).mixture["a"] == 4


def test_a_reward_typed_at_a_prompt_is_not_restored_with_a_warning(tmp_path: Path):
    live = Live(tmp_path)
    asyncio.run(live.reward.replace(lambda task, text: 1.0))
    resumed_live = live.continued(live)
    assert resumed_live.reward.function == Flagged()
    assert "set it again" in resumed_live.events[-1]


def test_a_reward_that_is_gone_is_named_as_a_live_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    live = Live(tmp_path)
    live.replace_reward("7")

    def refuse(texts: Sequence[str]) -> object:
        raise ConfigError(f"no such file: {texts[0]}")

    monkeypatch.setattr(live_module, "build_reward", refuse)
    with pytest.raises(
        ConfigError, match="was replaced live by 7, which cannot be built again: no such file: 7"
    ) as caught:
        live.continued(live)
    assert "another --reward" in caught.value.hint
    assert live.continued(live, reward=Flagged(2.0)).reward.function == Flagged(2.0)


async def test_a_second_request_to_stop_now_does_not_cut_off_what_the_first_saves(monkeypatch: pytest.MonkeyPatch):
    control, signals, signalled = Control(*cast(Any, [None] * 4)), list[int](), asyncio.Event()

    def kill(_: int, number: int) -> None:
        signals.append(number)
        signalled.set()

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(signal, "getsignal", lambda _: print)
    await control.stop(now=True)
    with pytest.raises(ConfigError, match="the run is ending already"):
        await control.stop(now=True)
    await signalled.wait()
    assert signals == [signal.SIGTERM]


def test_a_reward_that_is_refused_leaves_the_one_before(tmp_path: Path):
    live = Live(tmp_path)
    with pytest.raises(ForgeError, match="pickled"):
        live.replace_reward("broken")
    assert live.settings.knobs["reward"].read() == "Flagged"
    assert live.events == []


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"step": 9, "live": {}, "mixture": {}}', b'{"step": 9, "live": null, "mixture": 1}', b"\xff"],
)
def test_a_broken_file_of_changes_is_refused(content: bytes, tmp_path: Path):
    (tmp_path / "live.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"live\.json cannot be read") as caught:
        asyncio.run(Live(tmp_path).checkpointer.resume(None))
    assert "delete" in caught.value.hint


def test_the_state_of_live_settings_is_known_as_such(tmp_path: Path):
    live = Live(tmp_path)
    change_all(live)
    assert is_live_state(json.loads(json.dumps(live.settings.state())))
