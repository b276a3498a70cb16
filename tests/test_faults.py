"""Faults: causes, exit statuses of real processes, deadlines of phases. No Monarch; test_runtime.py has it."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from forge_rl.errors import DeadlineError
from forge_rl.runtime.faults import ENGINE_DIED, REWARD_STUCK, Fault, Faults, cause_of, describe_exit, exit_status


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ended(command: str, *, kill: int | None = None) -> tuple[subprocess.Popen[bytes], int]:
    """A child that has ended but was not waited for, and a pidfd of it."""
    process = subprocess.Popen([sys.executable, "-S", "-c", command])
    fd = os.pidfd_open(process.pid)
    if kill is not None:
        process.send_signal(kill)
    os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
    return process, fd


@pytest.mark.parametrize(
    ("command", "kill", "status"),
    [
        ("", None, 0),
        ("raise SystemExit(3)", None, 3),
        ("import time; time.sleep(60)", signal.SIGKILL, -9),
        ("import time; time.sleep(60)", signal.SIGTERM, -15),
    ],
)
def test_the_exit_status_of_a_child_is_read_without_waiting_for_it(command: str, kill: int | None, status: int):
    process, fd = ended(command, kill=kill)
    try:
        assert exit_status(fd) == status
        assert process.wait() == status  # still there for whoever waits for it
    finally:
        os.close(fd)


def test_a_child_that_somebody_else_waited_for_is_told_or_not_known():
    process, fd = ended("raise SystemExit(3)")
    process.wait()
    try:
        assert exit_status(fd) in (3, None)  # Linux 6.15 and later still tell
    finally:
        os.close(fd)


def test_the_exit_status_of_a_child_of_another_process_is_told():
    # The shell becomes a program that does not wait for the child which the shell had started.
    command = ["sh", "-c", "sleep 60 & echo $!; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        fd = os.pidfd_open(pid)
        try:
            assert exit_status(fd) is None
            os.kill(pid, signal.SIGKILL)
            select.select([fd], [], [])
            assert exit_status(fd) == -signal.SIGKILL
        finally:
            os.close(fd)
            parent.kill()


def test_a_child_that_runs_has_no_exit_status():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    fd = os.pidfd_open(process.pid)
    try:
        assert exit_status(fd) is None
    finally:
        os.close(fd)
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "its process ended"),
        (0, "its process exited with status 0"),
        (3, "its process exited with status 3"),
        (-9, "its process was killed by SIGKILL (by hand, or by the kernel for want of memory)"),
        (-11, "its process was ended by SIGSEGV"),
        (ENGINE_DIED, "its vLLM engine process died"),
        (REWARD_STUCK, "its reward function did not come back within its deadline"),
    ],
)
def test_an_exit_status_is_described(status: int | None, said: str):
    assert describe_exit(status) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("supervision\n  event: proc Killed(sig=9) at host\nend", describe_exit(-9)),
        ("failed: Killed(sig=15))", "its process was ended by SIGTERM"),
        ("the process exited with non-zero code 3\nmore", "its process exited with status 3"),
        ("first line\n  last line  \n\n", "last line"),
        ("  \n", "unknown"),
    ],
)
def test_the_cause_is_one_line_of_what_monarch_says(text: str, said: str):
    assert cause_of(text) == said


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


def test_a_late_phase_names_the_call_that_it_waited_for():
    async def main() -> None:
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

    asyncio.run(main())


def test_a_late_phase_names_its_own_call_although_that_is_cancelled():
    async def main() -> None:
        faults = Faults()
        with (
            pytest.raises(DeadlineError) as caught,
            faults.deadline("train", 0.01),
            faults.calling("reward", 1, "score"),
        ):
            await asyncio.sleep(60)
        assert (caught.value.service, caught.value.replica, caught.value.call) == ("reward", 1, "score")

    asyncio.run(main())


def test_a_late_phase_without_calls_blames_the_controller():
    async def main() -> None:
        with (
            pytest.raises(DeadlineError, match="no remote call is in flight") as caught,
            Faults().deadline("train", 0.01),
        ):
            await asyncio.sleep(60)
        assert caught.value.service == "controller"

    asyncio.run(main())


def test_a_phase_in_time_is_not_touched_afterwards():
    async def main() -> None:
        with Faults().deadline("train", 0.02):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_cancellation_from_outside_is_no_deadline():
    async def main() -> None:
        async def phase() -> None:
            with Faults().deadline("train", 60):
                await asyncio.sleep(60)

        task = asyncio.create_task(phase())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_the_error_of_a_phase_passes_through():
    async def main() -> None:
        with pytest.raises(ValueError, match="mine"), Faults().deadline("train", 60):
            raise ValueError("mine")

    asyncio.run(main())


def test_the_first_fatal_fault_is_what_is_waited_for():
    async def main() -> None:
        clock = Clock()
        faults = Faults(clock, phase=lambda: "rollout")
        waiter = asyncio.create_task(faults.wait())
        faults.record("generator", 1, "killed", fatal=False)
        await asyncio.sleep(0.01)
        assert not waiter.done()
        assert faults.fatal is None
        clock.now += 3
        fatal = faults.record("trainer", 0, "stuck")
        faults.record("weights", 0, "too")
        error = await waiter
        assert (error.service, error.replica, error.message, error.phase) == ("trainer", 0, "stuck", "rollout")
        assert faults.fatal is fatal
        assert faults.seen[:2] == [
            Fault(service="generator", replica=1, cause="killed", phase="rollout", at_s=100.0, fatal=False),
            Fault(service="trainer", replica=0, cause="stuck", phase="rollout", at_s=103.0, fatal=True),
        ]

    asyncio.run(main())


def test_listeners_hear_of_faults_and_of_recoveries():
    clock = Clock()
    faults = Faults(clock)
    heard: list[tuple[int | None, float | None]] = []
    faults.listeners.append(lambda fault: heard.append((fault.replica, fault.recovered_s)))
    first = faults.record("generator", 1, "killed", fatal=False)
    clock.now += 2
    faults.record("generator", 0, "killed", fatal=False)
    clock.now += 5
    faults.recovered(first)
    assert heard == [(1, None), (0, None), (1, 7.0)]
    assert [fault.recovered_s for fault in faults.seen] == [7.0, None]


def test_what_ends_while_closing_is_no_fault():
    faults = Faults()
    faults.listeners.append(lambda fault: pytest.fail(f"told of {fault}"))
    faults.closing = True
    faults.recovered(faults.record("generator", 0, "killed"))
    assert faults.seen == []
    assert faults.fatal is None
