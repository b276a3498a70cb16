"""Faults: calls in flight, deadlines of phases, records. No Monarch; test_runtime.py has it."""

import asyncio

import pytest

from forge_rl.errors import DeadlineError, Fault
from forge_rl.runtime.faults import Faults


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_calls_in_flight_are_known_oldest_first():
    clock = Clock()
    faults = Faults(clock)
    assert faults.waiting_for() is None
    with faults.calling("generator", 1, "generate"):
        clock.now += 5
        with faults.calling("reward", 0, "score"):
            waiting = faults.waiting_for()
            assert waiting is not None
            call, count = waiting
            assert (call.service, call.replica, call.method, call.since, count) == ("generator", 1, "generate", 100, 2)
    assert faults.waiting_for() is None


def test_a_call_that_fails_is_no_longer_in_flight():
    faults = Faults()

    def fail() -> None:
        with faults.calling("reward", 0, "score"):
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert faults.waiting_for() is None


async def test_a_late_phase_names_the_call_that_it_waited_for():
    clock = Clock()
    faults = Faults(clock)
    with faults.calling("trainer", 0, "step"):
        clock.now += 7
        with (
            faults.calling("reward", 1, "score"),
            pytest.raises(DeadlineError) as caught,
            faults.deadline("train", 0.01),
        ):
            await asyncio.sleep(60)
    error = caught.value
    assert (error.service, error.replica, error.call) == ("trainer", 0, "step")
    assert error.message == (
        "phase train did not end within its 0.01 s; this call has run for 7 s, and 1 more calls are in flight"
    )
    assert "--phase-deadline-s" in error.hint
    await asyncio.sleep(0)  # the task is not left cancelled


async def test_a_late_phase_names_its_own_call_although_that_is_cancelled():
    faults = Faults()
    with (
        pytest.raises(DeadlineError) as caught,
        faults.deadline("train", 0.01),
        faults.calling("reward", 1, "score"),
    ):
        await asyncio.sleep(60)
    assert (caught.value.service, caught.value.replica, caught.value.call) == ("reward", 1, "score")


async def test_a_late_phase_without_calls_blames_the_controller():
    with (
        pytest.raises(DeadlineError, match="no remote call is in flight") as caught,
        Faults().deadline("train", 0.01),
    ):
        await asyncio.sleep(60)
    assert caught.value.service == "controller"


async def test_a_phase_in_time_is_not_touched_afterwards():
    with Faults().deadline("train", 0.02):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)


async def test_a_cancellation_from_outside_is_no_deadline():
    async def phase() -> None:
        with Faults().deadline("train", 60):
            await asyncio.sleep(60)

    task = asyncio.create_task(phase())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_error_of_a_phase_passes_through():
    with pytest.raises(ValueError, match="mine"), Faults().deadline("train", 60):
        raise ValueError("mine")


async def test_the_first_fatal_fault_is_what_is_waited_for():
    clock = Clock()
    faults = Faults(clock, phase=lambda: "rollout")
    waiter = asyncio.create_task(faults.wait())
    faults.record("generator", 1, "killed", fatal=False)
    await asyncio.sleep(0.01)
    assert not waiter.done()
    assert faults.fatal is None
    clock.now += 3
    faults.record("trainer", 0, "stuck")
    faults.record("weights", 0, "too")
    error = await waiter
    assert (error.service, error.replica, error.message, error.phase) == ("trainer", 0, "stuck", "rollout")
    assert faults.fatal is faults.seen[1]
    assert faults.seen[:2] == [
        Fault(service="generator", replica=1, cause="killed", phase="rollout", at_s=100.0, fatal=False),
        Fault(service="trainer", replica=0, cause="stuck", phase="rollout", at_s=103.0, fatal=True),
    ]


def test_listeners_hear_of_faults_and_of_recoveries():
    clock = Clock()
    faults = Faults(clock)
    heard: list[tuple[int | None, float | None]] = []
    faults.listeners.add(lambda fault: heard.append((fault.replica, fault.recovered_s)))
    faults.record("generator", 1, "killed", fatal=False)
    clock.now += 2
    faults.record("generator", 0, "killed", fatal=False)
    clock.now += 5
    faults.recovered("generator", 1)
    faults.recovered("generator", 1)  # it has
    faults.recovered("reward", 0)
    assert heard == [(1, None), (0, None), (1, 7.0)]
    assert [fault.recovered_s for fault in faults.seen] == [7.0, None]


def test_what_ends_while_closing_is_no_fault():
    faults = Faults()
    faults.listeners.add(lambda fault: pytest.fail(f"told of {fault}"))
    faults.closing = True
    faults.record("generator", 0, "killed")
    faults.recovered("generator", 0)
    assert faults.seen == []
    assert faults.fatal is None


async def test_time_in_which_the_run_is_paused_does_not_count_towards_a_deadline():
    async def main() -> None:
        faults = Faults()
        began = faults.clock()
        with faults.deadline("rollout", 0.1):
            faults.hold.pause()
            await asyncio.sleep(0.3)
            faults.hold.resume()
            try:
                await asyncio.sleep(60)
            finally:
                assert 0.38 < faults.clock() - began < 30

    with pytest.raises(DeadlineError):
        await main()
