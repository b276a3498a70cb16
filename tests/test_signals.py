"""Stop signals: who outlives them, and what it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import pytest

from forge_rl.runtime.signals import STOP_SIGNALS, children_outlive_stop_signals, outlive_stop_signals

_WAIT = "import os, time; os.write(1, b'.'); time.sleep(60)"


def _thread(with_programs: bool) -> None:
    """Called in a thread, as Monarch does."""
    import threading

    thread = threading.Thread(target=outlive_stop_signals, kwargs={"with_programs": with_programs})
    thread.start()
    thread.join()


def _itself(with_programs: bool) -> None:
    """Gets the signals in its main thread, and ends well."""
    _thread(with_programs)
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)


def _starts(with_programs: bool) -> None:
    """Starts a program, which it prints the end of."""
    _thread(with_programs)
    _end_of(subprocess.Popen([sys.executable, "-c", _WAIT], stdout=subprocess.PIPE), lives=with_programs)


def _handles(_: bool) -> None:
    """Starts a program that has handlers of its own, as vLLM's processes do."""
    handlers = f"import signal, sys; [signal.signal(n, lambda *_: sys.exit(7)) for n in {[*map(int, STOP_SIGNALS)]}]"
    with children_outlive_stop_signals():
        program = subprocess.Popen([sys.executable, "-c", f"{handlers}; {_WAIT}"], stdout=subprocess.PIPE)
    _end_of(program, lives=True)
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    for number in STOP_SIGNALS:
        os.kill(tracker._pid, number)
    assert tracker._check_alive(), "Python's own tracker was started there too"


def _forks(with_programs: bool) -> None:
    """Forks, as `multiprocessing` does, and terminates that process."""
    import multiprocessing
    import time

    _thread(with_programs)
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()
    process = fork.Process(target=lambda: runs.set() or time.sleep(60))
    process.start()
    runs.wait(60)
    process.terminate()
    process.join(30)
    print(process.exitcode)
    process.kill()


def _end_of(program: subprocess.Popen[bytes], *, lives: bool) -> None:
    assert program.stdout is not None
    program.stdout.read(1)
    for number in STOP_SIGNALS:
        program.send_signal(number)
    try:
        print(program.wait(1.0 if lives else 30.0))
    except subprocess.TimeoutExpired:
        print("lives")
        program.kill()


@pytest.mark.parametrize(
    ("scenario", "with_programs", "output"),
    [
        (_itself, False, ""),
        (_itself, True, ""),
        (_starts, False, -int(signal.SIGTERM)),
        (_starts, True, "lives"),
        (_forks, False, -int(signal.SIGTERM)),
        (_handles, True, "lives"),
    ],
)
def test_a_process_that_outlives_stop_signals_and_what_it_starts(
    scenario: Callable[[bool], None], with_programs: bool, output: object
) -> None:
    run = f"from tests.test_signals import {scenario.__name__}; {scenario.__name__}({with_programs})"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(output)


_STUBBORN = """
import asyncio, contextlib, dataclasses, sys, time
from forge_rl.run import launch
launch._LAST_S = 0.5

async def goes_on():
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.sleep(60)

async def main(_):
    beside = asyncio.create_task(goes_on())
    print("ready", flush=True)
    match sys.argv[1]:
        case "task": await asyncio.sleep(60)
        case "main": await goes_on()
        case "loop": time.sleep(60)
        case "save":
            try:
                await asyncio.sleep(60)
            finally:
                print("saving", flush=True)
                await asyncio.sleep(1)
                print("saved", flush=True)

@dataclasses.dataclass(frozen=True)
class Config: ...

launch.launch(Config, main, prog="x", args=[])
"""


@pytest.mark.parametrize(("stuck", "signals"), [("task", 1), ("main", 2), ("loop", 2)])
def test_a_program_ends_at_the_latest_with_its_second_signal(stuck: str, signals: int) -> None:
    with subprocess.Popen([sys.executable, "-c", _STUBBORN, stuck], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        for _ in range(signals):
            time.sleep(0.1)  # two at once are one
            program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 143


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)])
def test_signals_of_two_kinds_are_one_request_which_lets_a_run_save(numbers: tuple[signal.Signals, ...]) -> None:
    with subprocess.Popen([sys.executable, "-c", _STUBBORN, "save"], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        program.send_signal(numbers[0])
        assert program.stdout.readline() == b"saving\n"
        program.send_signal(numbers[1])
        assert program.stdout.readline() == b"saved\n"
        assert program.wait(60) == 143
