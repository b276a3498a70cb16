"""Processes: exit statuses, and trees that are watched, looked at and killed whole. Real processes, no Monarch."""

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forge_rl.runtime import processes
from forge_rl.runtime.processes import (
    ProcessTree,
    cause_of,
    describe_exit,
    exit_status,
    idle_collection,
    is_traced,
    last_error,
    responsive_loop,
    when_process_ends,
)
from tests.security.other_user import NOBODY, as_user, needs_root


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
        assert exit_status(process.pid, fd) == status
        assert process.wait() == status  # still there for whoever waits for it
    finally:
        os.close(fd)


def test_a_child_that_somebody_else_waited_for_is_told_or_not_known():
    process, fd = ended("raise SystemExit(3)")
    process.wait()
    try:
        assert exit_status(process.pid, fd) in (3, None)  # Linux 6.15 and later still tell
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
            assert exit_status(pid, fd) is None
            os.kill(pid, signal.SIGKILL)
            select.select([fd], [], [])
            assert exit_status(pid, fd) == -signal.SIGKILL
        finally:
            os.close(fd)
            parent.kill()


@needs_root
@pytest.mark.parametrize("status", [3, -signal.SIGKILL])
def test_the_exit_status_of_an_undumpable_child_is_reported(status: int):
    def check() -> int | None:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE, as a process does that has secrets
            os.kill(os.getpid(), -status) if status < 0 else os._exit(status)
        fd = os.pidfd_open(child)
        os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOWAIT)
        return exit_status(child, fd)

    assert as_user(NOBODY, check) == status


def test_a_child_that_runs_has_no_exit_status():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    fd = os.pidfd_open(process.pid)
    try:
        assert exit_status(process.pid, fd) is None
    finally:
        os.close(fd)
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("status", "description"),
    [
        (None, "its process ended"),
        (0, "its process exited with status 0"),
        (3, "its process exited with status 3"),
        (-9, "its process was killed by SIGKILL (manually, or by the kernel when out of memory)"),
        (-11, "its process was ended by SIGSEGV"),
        (-40, "its process was ended by SIG40"),
        (71, "its engine died"),
    ],
)
def test_an_exit_status_is_described(status: int | None, description: str):
    assert describe_exit(status, {71: "its engine died"}) == description


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("supervision\n  event: proc Killed(sig=9) at host\nend", describe_exit(-9)),
        ("failed: Killed(sig=15))", "its process was ended by SIGTERM"),
        ("the process exited with non-zero code 3\nmore", "its process exited with status 3"),
        ("the process exited with non-zero code 71\nmore", "its engine died"),
        ("first line\n  last line  \n\n", "last line"),
        ("  \n", "unknown"),
    ],
)
def test_the_cause_is_one_line_of_what_monarch_says(text: str, cause: str):
    assert cause_of(text, {71: "its engine died"}) == cause


@contextlib.contextmanager
def family() -> Iterator[tuple[ProcessTree, subprocess.Popen[str], psutil.Process]]:
    """A marked shell, which is a tree's root, and its child."""
    value = uuid.uuid4().hex
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait; sleep 60"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FAMILY": value},
    ) as root:
        assert root.stdout is not None
        child = psutil.Process(int(root.stdout.readline()))
        try:
            yield ProcessTree("FAMILY", value), root, child
        finally:
            for process in (root, child):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


async def test_a_tree_tells_at_once_how_a_root_ended():
    with family() as (tree, root, _):
        status = asyncio.get_running_loop().create_future()
        tree.watch(root.pid, status.set_result)
        tree.signal_roots(signal.SIGKILL)
        assert await status == -signal.SIGKILL
        assert root.wait(timeout=60) == -signal.SIGKILL  # not reaped
        with pytest.raises((psutil.NoSuchProcess, ProcessLookupError)):
            tree.watch(root.pid, status.set_result)


async def test_a_tree_that_is_not_watched_any_more_tells_nothing():
    with family() as (tree, root, _):
        tree.watch(root.pid, lambda status: pytest.fail(f"told of {status}"))
        tree.unwatch()
        tree.signal_roots(signal.SIGKILL)
        await asyncio.to_thread(root.wait)


async def test_a_stopped_member_is_seen_if_it_is_near_enough():
    with family() as (tree, root, child):
        tree.watch(root.pid, lambda status: None)
        assert not tree.has_stopped(max_processes=64)
        assert sorted(tree.members) == sorted([root.pid, child.pid])
        child.suspend()
        while child.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert tree.has_stopped(max_processes=64)
        assert not tree.has_stopped(max_processes=1)
        child.resume()
        assert not tree.has_stopped(max_processes=64)
        tree.unwatch()


async def test_a_member_that_a_debugger_has_stopped_does_not_count_as_stopped():
    code = "import ctypes, os, signal; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), signal.SIGSTOP)"

    traced = await asyncio.to_thread(psutil.Popen, [sys.executable, "-c", code])  # its tracer is this process
    tree = ProcessTree("NOBODY", "none")
    try:
        while traced.status() != psutil.STATUS_TRACING_STOP:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        tree.watch(traced.pid, lambda status: None)
        assert is_traced(traced.pid)
        assert not is_traced(os.getpid())
        assert not tree.has_stopped(max_processes=64)
    finally:
        tree.unwatch()
        traced.kill()
        traced.wait()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("watched", [False, True])
async def test_a_tree_is_killed_whole(watched: bool, stopped: bool):
    with family() as (tree, root, child):
        if watched:
            tree.watch(root.pid, lambda status: None)
            tree.unwatch()
        if stopped:
            child.suspend()
        assert await asyncio.to_thread(tree.kill, wait_s=30.0) == []
        assert root.wait(timeout=60) == -signal.SIGKILL  # not reaped
        with contextlib.suppress(psutil.NoSuchProcess):
            assert child.status() == psutil.STATUS_ZOMBIE


def test_an_action_runs_when_a_process_ends_and_at_once_if_it_has():
    for running in (True, False):
        process = subprocess.Popen(["sleep", "60" if running else "0"])
        if not running:
            process.wait()
        pipe = os.pipe()
        when_process_ends(process.pid, lambda told=pipe: os.close(told[1]))
        if running:
            assert not select.select([pipe[0]], [], [], 0.05)[0]
            process.kill()
        assert os.read(pipe[0], 1) == b""
        os.close(pipe[0])
        process.wait()


def test_an_end_is_noticed_even_with_over_a_thousand_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    process = subprocess.Popen(["sleep", "60"])
    crowd = [os.dup(null) for _ in range(1100)]
    try:
        ended = threading.Event()
        when_process_ends(process.pid, ended.set)
        process.kill()
        process.wait()
        assert ended.wait(30)
    finally:
        for fd in (null, *crowd):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_cause_is_quoted_from_the_log_and_not_what_points_to_it(tmp_path: Path):
    log = tmp_path / "generator-0.log"
    assert last_error(log) == ""
    log.write_text(
        "Traceback (most recent call last):\n"
        "(EngineCore pid=12) ERROR 11-22 01:40:13 [core.py:710] ValueError: Head size 16 is not supported\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)\n"
        "nothing of note\n"
    )
    assert last_error(log) == "ValueError: Head size 16 is not supported"


def test_a_responsive_loop_leaves_the_interpreter_as_it_was():
    before = gc.get_threshold(), sys.getswitchinterval()
    with responsive_loop():
        assert gc.get_threshold()[0] > before[0][0]
        assert sys.getswitchinterval() < before[1]
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), sys.getswitchinterval()) == before


def test_cycles_are_collected_while_a_body_waits_and_not_if_it_is_short(monkeypatch: pytest.MonkeyPatch):
    class Node:
        def __init__(self) -> None:
            self.itself = self

    async def collected_within(seconds: float) -> bool:
        node = weakref.ref(Node())
        with idle_collection():
            await asyncio.sleep(seconds)
        await asyncio.sleep(0.1)
        return node() is None

    monkeypatch.setattr(processes, "_IDLE_S", 0.05)
    gc.disable()
    try:
        assert not asyncio.run(collected_within(0))
        assert asyncio.run(collected_within(0.1))
    finally:
        gc.enable()
