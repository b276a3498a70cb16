"""Handing devices over: which calls are made, in which order, and the state after a failure."""

import asyncio
import gc
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_rl import RunConfig
from forge_rl.engines.host import HostInfo
from forge_rl.errors import ConfigError, ReplicaError
from forge_rl.rollout.placement import DeviceHandover, Placement, shares_devices
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.plan.placing import place
from forge_rl.run.run_models import RunModels
from forge_rl.run.start import services
from forge_rl.run.start.checks import CheckedRun
from forge_rl.runtime.cluster import THIS_HOST


class NotingServices:
    """Engines and a trainer that note their calls; each takes a second of the clock."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: set[str] = set()
        self.now = 0.0

    async def _note(self, call: str) -> int:
        self.calls.append(call)
        self.now += 1
        await asyncio.sleep(0)
        if call in self.fails:
            self.fails.remove(call)
            raise ReplicaError("gone", service="trainer", replica=0)
        return 0

    async def pause(self) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def sleep(self) -> None:
        await self._note("sleep")

    async def wake(self) -> None:
        await self._note("wake")

    async def offload(self) -> int:
        return await self._note("offload")

    async def onload(self) -> int:
        return await self._note("onload")

    def pop(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def shared() -> tuple[NotingServices, DeviceHandover]:
    noted = NotingServices()
    return noted, DeviceHandover(noted, noted, clock=lambda: noted.now)


def apart() -> tuple[NotingServices, DeviceHandover]:
    noted = NotingServices()
    return noted, DeviceHandover(noted, clock=lambda: noted.now)


async def test_shared_devices_are_left_before_the_other_takes_them() -> None:
    noted, devices = shared()
    await devices.hand_to_engines()
    assert noted.pop() == ["offload"], "engines are awake when they have started"
    await devices.hand_to_engines()
    assert noted.pop() == []
    await devices.hand_to_trainer(idle=True)
    assert noted.pop() == ["sleep", "onload"]
    await devices.hand_to_engines()
    assert noted.pop() == ["offload", "wake"]
    assert devices.pop_metrics() == {
        "transition/offload_s": 2,
        "transition/sleep_s": 1,
        "transition/onload_s": 1,
        "transition/wake_s": 1,
    }
    assert devices.pop_metrics() == {}


async def test_engines_with_devices_of_their_own_only_pause_and_not_when_idle() -> None:
    noted, devices = apart()
    await devices.hand_to_engines()
    await devices.hand_to_trainer(idle=True)
    async with devices.lend():
        pass
    await devices.hand_to_engines()
    assert noted.pop() == [], "also where engines decode while a checkpoint is written"
    await devices.hand_to_trainer()
    await devices.hand_to_trainer()
    await devices.hand_to_engines()
    assert noted.pop() == ["pause", "resume"]
    assert devices.pop_metrics() == {"transition/pause_s": 1, "transition/resume_s": 1}


async def test_devices_are_lent_and_returned_unless_rollouts_start_meanwhile() -> None:
    noted, devices = shared()
    await devices.hand_to_trainer()
    noted.pop()
    async with devices.lend(), devices.lend():
        assert noted.pop() == ["offload", "wake"]
    assert noted.pop() == ["sleep", "onload"]
    async with devices.lend():
        await devices.hand_to_engines()
        noted.pop()
    assert noted.pop() == []


async def test_loans_and_rollouts_at_the_same_time_end_where_the_last_call_says() -> None:
    noted, devices = shared()
    await devices.hand_to_trainer()

    async def borrow() -> None:
        async with devices.lend():
            await asyncio.sleep(0)

    noted.pop()
    await asyncio.gather(borrow(), devices.hand_to_engines(), borrow())
    assert noted.pop() == ["offload", "wake"]
    await asyncio.gather(devices.hand_to_trainer(), borrow())
    assert noted.pop()[-2:] == ["sleep", "onload"]


@pytest.mark.parametrize("fails", ["sleep", "onload", "offload", "wake"])
async def test_after_a_transition_that_failed_the_next_one_is_whole(fails: str) -> None:
    noted, devices = shared()
    await devices.hand_to_trainer()
    if fails in ("sleep", "onload"):
        await devices.hand_to_engines()
    noted.fails = {fails}
    with pytest.raises(ReplicaError):
        await (devices.hand_to_engines() if fails in ("offload", "wake") else devices.hand_to_trainer())
    noted.pop()
    await devices.hand_to_engines()
    assert noted.pop() == ["offload", "wake"]


async def test_a_restarting_trainer_gets_room_and_is_offloaded_afterwards() -> None:
    noted, devices = shared()
    await devices.hand_to_engines()
    noted.pop()
    await devices.free_devices()
    assert noted.pop() == ["sleep"]
    await devices.hand_to_engines()
    assert noted.pop() == ["offload", "wake"]
    noted, devices = apart()
    await devices.hand_to_engines()
    await devices.free_devices()
    assert noted.pop() == []


async def test_a_starting_engine_holds_the_devices_until_it_has_started() -> None:
    noted, devices = shared()
    await devices.hand_to_trainer()
    noted.pop()
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def start() -> None:
        async with devices.start_engine():
            noted.calls.append("start")
            begun.set()
            await may_end.wait()
            noted.calls.append("started")

    starting = asyncio.create_task(start())
    for _ in range(9):
        await asyncio.sleep(0)
    assert noted.pop() == [], "the trainer has them"
    await devices.hand_to_engines()
    await begun.wait()
    assert noted.pop() == ["offload", "wake", "start"]
    training, freeing = asyncio.create_task(devices.hand_to_trainer()), asyncio.create_task(devices.free_devices())
    async with devices.lend():
        pass
    for _ in range(9):
        await asyncio.sleep(0)
    assert noted.pop() == []
    may_end.set()
    await asyncio.gather(starting, training, freeing)
    assert noted.pop()[:2] == ["started", "sleep"]
    noted, devices = apart()
    await devices.hand_to_trainer()
    async with devices.start_engine():
        pass


def test_devices_are_shared_where_that_is_said_or_there_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(gpus: int, placement: Placement = "auto", *, decodes_while_training: bool = False) -> bool:
        monkeypatch.setattr("forge_rl.rollout.placement.gpus", lambda: gpus)
        return shares_devices(placement, ranks=2, engines=2, decodes_while_training=decodes_while_training)

    assert [shares(gpus) for gpus in (0, 1, 3, 4, 8)] == [False, True, True, False, False]
    assert [shares(gpus, decodes_while_training=True) for gpus in (0, 4)] == [False, False]
    assert [shares(gpus, "colocated") for gpus in (0, 1, 8)] == [True, True, True]
    assert [shares(gpus, "separate") for gpus in (0, 4)] == [False, False]
    with pytest.raises(ConfigError, match="2 trainer ranks and 2 engine devices need 4 separate GPUs, but there are 3"):
        shares(3, "separate")
    with pytest.raises(ConfigError, match="need 4 separate GPUs, but there are 1") as caught:
        shares(1, decodes_while_training=True)
    assert caught.value.hint.startswith("choose --schedule.kind pipelined")
    with pytest.raises(
        ConfigError, match="during training under the schedule asynchronous, but --placement is colocated"
    ):
        RunConfig(placement="colocated", schedule=ScheduleConfig(kind="asynchronous"))


@pytest.mark.parametrize(("gpus", "begun"), [(1, ["generator"]), (0, ["generator", "trainer"])])
async def test_on_shared_gpus_the_trainer_starts_after_the_engines(
    gpus: int, begun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting: list[str] = []
    engines_up = asyncio.Event()

    class Started:
        choice = "nowhere"

        def __init__(self, name: str) -> None:
            self.name = name

        async def start(self, *_: object, after: asyncio.Future[object] | None = None, **__: object) -> "Started":
            if after is not None:
                await asyncio.wait((after,))
            starting.append(self.name)
            if self.name == "generator":
                await engines_up.wait()
            return self

        async def stop(self) -> None: ...

    for name in ("Trainer", "Generator", "WeightStore", "RewardService"):
        monkeypatch.setattr(services, name, Started(name.lower()))
    monkeypatch.setattr(services, "gpus", lambda: gpus)
    placed = place(RunConfig(), {THIS_HOST: HostInfo.of_this_host()})
    hosts: Any = SimpleNamespace(cluster=None, placed=placed, without_model=())

    reward: Any = len
    log = SimpleNamespace(event=print)
    monitor: Any = SimpleNamespace(display=SimpleNamespace(startup=lambda *_: None), faults=None, log=log)
    prepared: Any = SimpleNamespace(folder=tmp_path, checkpoint=None, monitor=monitor)
    checked: CheckedRun[RunConfig] = CheckedRun(
        config=RunConfig(), models=RunModels(policy=tmp_path), shares_devices=True, sets={}
    )
    async with asyncio.TaskGroup() as group:

        async def opened() -> None:
            async with services.running_services(prepared, checked, hosts, reward=reward, environment=None):
                pass

        group.create_task(opened())
        for _ in range(5):
            await asyncio.sleep(0)
        assert [name for name in starting if name in ("generator", "trainer")] == begun
        engines_up.set()
    assert "trainer" in starting


class Waits:
    """A trainer's devices, its own and lent to guests while it waits."""

    def __init__(self) -> None:
        self.own, self.guest = NotingServices(), NotingServices()
        self.devices = DeviceHandover(
            self.own, guests=DeviceHandover(self.guest, self.guest, clock=self.clock), clock=self.clock
        )

    def clock(self) -> float:
        return self.guest.now

    async def wait(self, seconds: float) -> list[str]:
        async with self.devices.trainers_wait():
            if seconds:
                await asyncio.sleep(0.01)
                self.guest.now += seconds
        return self.guest.pop()


async def test_guests_decode_only_in_waits_longer_than_the_handover() -> None:
    waits = Waits()
    back = ["sleep", "onload"]
    assert await waits.wait(9) == ["offload", *back], "guests are awake when they have started"
    assert await waits.wait(9) == ["offload", "wake", *back]
    assert await waits.wait(1) == ["offload", "wake", *back]  # took 4 s
    assert await waits.wait(5) == [], "it waited 3 s before"
    assert await waits.wait(5) == ["offload", "wake", *back]
    assert await waits.wait(0) == [], "a batch that is ready is not waited for"
    assert waits.own.pop() == []
    assert waits.devices.pop_metrics()["transition/wake_s"] == 3

    assert await waits.wait(1) == []
    for _ in range(20):
        assert await waits.wait(4) == [], "no longer than the change takes"
    assert await waits.wait(1) == ["offload", "wake", *back], "it may have become faster"
    assert await waits.wait(4) == []


@pytest.mark.parametrize("fails", ["body", "offload", "onload", "offload onload", "body offload"])
def test_devices_come_back_from_guests_if_the_wait_ends_in_an_error(fails: str) -> None:
    async def wait(here: Waits) -> None:
        async with here.devices.trainers_wait():
            await asyncio.sleep(0.01)
            if "body" in fails:
                raise ReplicaError("gone", service="reward")

    async def main() -> None:
        waits, unseen = Waits(), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        waits.guest.fails = {*fails.split()} - {"body"}
        with pytest.raises(ReplicaError, match="gone"):
            await wait(waits)
        gc.collect()
        assert unseen == []
        assert waits.guest.pop() == ["offload", "sleep", "onload"]
        await waits.devices.free_devices()  # as before a trainer that died starts again
        assert waits.guest.pop() == ["sleep"]
        waits.devices._waited_s = math.inf
        assert await waits.wait(9) == ["offload", "wake", "sleep", "onload"]

    asyncio.run(main())


async def test_a_guest_starts_again_while_its_devices_are_lent() -> None:
    waits = Waits()
    async with waits.devices.start_engine():
        pass  # an engine with devices of its own need not wait

    async def start() -> None:
        async with waits.devices.start_engine(guest=True):
            waits.guest.calls.append("started")
            await asyncio.sleep(0.02)
            waits.guest.now += 60

    starting = asyncio.create_task(start())
    await asyncio.sleep(0.01)
    assert waits.guest.pop() == []
    assert await waits.wait(9) == ["offload", "started", "sleep", "onload"]
    await starting
    assert await waits.wait(9) == ["offload", "wake", "sleep", "onload"], "its start is no part of the change"
