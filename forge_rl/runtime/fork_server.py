"""A process that imports what engines need, then forks each engine process, so that none repeats the imports.

python -m forge_rl.runtime.fork_server NAME OWNER MODULE...

NAME is the name of an abstract socket, which leaves no file behind; only processes of the same user are served. The
server refuses every request if its imports have started threads or opened a GPU. It ends with the process OWNER, or
once nothing that it forked has run for five minutes. Each program runs below a keeper, a forked process that ends it
once the requester is gone, so that programs outlive the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_rl.runtime.fork_messages import (
    MARK,
    ForkRefusal,
    Program,
    peer,
    receive_number,
    receive_program,
    send_answer,
    send_program,
)
from forge_rl.runtime.signals import STOP_SIGNALS
from forge_rl.system.streams import lasting

_IDLE_S = 300.0
_LOOK_S = 1.0
_NURSERY_S = 30.0
_MOST_WAITING = 4096
"""Requests that may wait for the imports. With no room left, the requester would block too, the controller included."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED."""


def main(name: str, owner: int, modules: Sequence[str]) -> None:
    """Serve until the owner ends; returns only in forked processes, once their programs have ended."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        owner_fd = os.pidfd_open(owner)
    except OSError:  # another one serves already, or nobody needs one any more
        return
    for number in STOP_SIGNALS:  # only the controller reacts to them
        signal.signal(number, signal.SIG_IGN)
    listener.listen(_MOST_WAITING)  # from now on, requests wait for the end of the imports
    sys.stdout, sys.stderr = lasting(1), lasting(2)  # loggers that are made on import hold them
    refusal = _import_all(modules)
    _set_title("forge_rl: fork server")
    # Frozen objects are left out of collections, which would write to, and so copy, pages that all forks share.
    gc.collect()
    gc.freeze()
    gc.disable()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(owner_fd, select.POLLIN)
    keepers: set[int] = set()
    used_at = time.monotonic()
    while True:
        events = dict(poll.poll(_LOOK_S * 1000))
        keepers = {pid for pid in keepers if not os.waitpid(pid, os.WNOHANG)[0]}
        if keepers or events:
            used_at = time.monotonic()
        if owner_fd in events or time.monotonic() > used_at + _IDLE_S:
            os._exit(0)
        if listener.fileno() not in events:
            continue
        connection, _ = listener.accept()
        # Any user can connect to an abstract socket; the kernel says who it is.
        if peer(connection)[1] != os.geteuid():
            connection.close()
            continue
        try:
            pid = os.fork()
        except OSError:  # no memory, or too many processes: the requester executes the program itself
            connection.close()
            continue
        if pid == 0:
            # An inherited listener would keep the name bound after the server's end, and no other server could start.
            listener.close()
            os.close(owner_fd)
            _keep(connection, refusal)
            return
        keepers.add(pid)
        connection.close()


def _import_all(modules: Sequence[str]) -> str:
    """Import modules; return why this process must not be forked, or ""."""
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # whatever it is, engines show it when they import the same
        return f"{type(error).__name__}: {error}".splitlines()[0]
    # A fork copies only the calling thread: locks that other threads hold would stay locked in the child forever.
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(threads) > 1:
        return f"imports have started threads: {', '.join(threads[1:])}"
    return "imports have opened a GPU" if _has_opened_gpu() else ""


def _has_opened_gpu() -> bool:
    if "libcuda.so" not in Path("/proc/self/maps").read_text():
        return False
    context = ctypes.c_void_p()
    # CUDA cannot be used in a fork of a process that has initialized it. This query does not initialize it itself.
    return bool(ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) != _NOT_INITIALIZED)


def _keep(connection: socket.socket, refusal: str) -> None:
    """Run a program in a forked process, and end it once the connection is closed; returns only in the program."""
    try:
        program, fds = receive_program(connection)
    except (EOFError, OSError, ValueError, TypeError, KeyError):
        os._exit(1)
    if _is_closed(connection):  # the requester has executed the program meanwhile
        os._exit(0)
    if refusal:
        send_answer(connection, refusal=refusal)
        os._exit(0)
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        connection.close()
        # The program must not outlive its keeper; if that has ended before this call, no signal comes.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        _become(program, fds, has_nursery=True)
        return
    _set_title("forge_rl: keeper of a forked process")
    # A copy held here would keep pipes open after the program's end, and their readers waiting.
    for fd in {0, 1, 2, *fds.values()}:
        os.close(fd)
    end_fd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(end_fd, select.POLLIN)
    poll.register(connection, select.POLLIN)
    has_ended = False
    with contextlib.suppress(OSError):
        send_answer(connection, pid=pid)
        has_ended = end_fd in dict(poll.poll())
    if not has_ended:  # the requester is gone
        os.kill(pid, signal.SIGKILL)
    # A closed connection is always ready, so that this would not wait for the program.
    poll.unregister(connection)
    poll.poll()
    # It is reaped last: until then, its exit status can be read by others.
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    with contextlib.suppress(OSError):
        send_answer(connection, status=status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)
        connection.settimeout(1.0)
        connection.recv(1)
    os.waitpid(pid, 0)  # where nothing reaps orphans, as in many containers, it would stay a zombie
    os._exit(0)


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the other side of a connection from which everything was read is gone."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _become(program: Program, fds: Mapping[int, int], *, has_nursery: bool) -> None:
    """Run a program in this process, which has just been forked, as Python would if it was executed."""
    _set_fds(fds)
    # What executing the program would have set: environment, folder, umask, priority and signals.
    os.environ.clear()
    os.environ.update(program.environment)
    _show_mark(program.environment.get(MARK, ""))
    os.chdir(program.folder)
    os.umask(program.umask)
    with contextlib.suppress(PermissionError):  # it may become lower only
        os.setpriority(os.PRIO_PROCESS, 0, program.niceness)
    if has_nursery:
        _open_nursery()
    for number in STOP_SIGNALS:
        if number not in program.ignored:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    _set_title(" ".join([sys.executable, *program.words]))
    gc.enable()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # all forked programs would draw the same; Python's own random numbers differ already
    place = next(index for index, word in enumerate(program.words) if word in ("-m", "-c"))
    kind, code, *rest = program.words[place:]
    if kind == "-m":
        sys.argv = [code, *rest]
        runpy.run_module(code, run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *rest]
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main_module.__dict__)


def _set_fds(fds: Mapping[int, int]) -> None:
    """Move received descriptors to the numbers that the program knows, first out of each other's way."""
    first_free = max([*fds, *fds.values(), 2]) + 1
    moved_fds: dict[int, int] = {}
    for number, fd in fds.items():
        moved_fds[number] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first_free)
        os.close(fd)
    for number, fd in moved_fds.items():
        os.dup2(fd, number)
        os.close(fd)


def _show_mark(mark: str) -> None:
    """Show a process's mark in /proc, in the room of the server's own: /proc has the environment with which a program
    was executed, and marks are looked up there."""
    # Fields 50 and 51 of proc(5), env_start and env_end; the split leaves out the first two fields.
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    variable = f"{MARK}=".encode()
    entries = ctypes.string_at(start, end - start).split(b"\0")
    address = start
    for entry in entries:
        if entry.startswith(variable) and len(entry) > len(variable) + len(mark) + 2:
            # Readers split at NUL bytes, so the rest of the room becomes a variable of its own.
            entry_text = variable + mark.encode() + b"\0_="
            ctypes.memmove(address, entry_text.ljust(len(entry), b"x"), len(entry))
            return
        address += len(entry) + 1


def _open_nursery() -> None:
    """Make this process's `multiprocessing` fork its children from a copy of the process that has no threads.

    Later this process has threads, whose locks would stay locked in a fork. The children are its own, as executed ones
    would be. Where forking fails, they are executed, and stderr says why.
    """
    import multiprocessing.util as multiprocessing_util

    connection, nursery_end = socket.socketpair()
    nursery = os.fork()
    if nursery == 0:
        connection.close()
        _nurse(nursery_end)
        return
    nursery_end.close()
    connection.settimeout(_NURSERY_S)
    lock = threading.Lock()  # threads start children too, and there is one connection
    execute: Any = multiprocessing_util.spawnv_passfds

    def fork(texts: Sequence[str], fds: Sequence[int]) -> int | None:
        with lock:
            if connection.fileno() < 0:
                return None
            try:
                return _fork_by(connection, Program.here(texts[1:], os.environ), {fd: fd for fd in (0, 1, 2, *fds)})
            except (OSError, EOFError, ForkRefusal) as error:
                connection.close()
                _end(nursery)  # it may be late, and would fork the program that is now executed
                print(f"forge_rl: processes are executed, not forked: {error!r}", file=sys.stderr, flush=True)
                return None

    def spawn(path: bytes, words: Sequence[Any], fds: Sequence[int]) -> int:
        texts = [os.fsdecode(word) for word in words]
        pid = fork(texts, fds) if "--multiprocessing-fork" in texts else None
        return int(execute(path, words, fds)) if pid is None else pid

    vars(multiprocessing_util)["spawnv_passfds"] = spawn


def _end(child: int) -> None:
    """Kill and reap a child of this process."""
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork_by(nursery: socket.socket, program: Program, fds: Mapping[int, int]) -> int:
    """Have the nursery fork a child of this process; return its process id."""
    # Such libraries are loaded only when a program is executed; a fork has them only if this process does.
    maps = Path("/proc/self/maps").read_text()
    for library in program.environment.get("LD_PRELOAD", "").replace(":", " ").split():
        if os.path.realpath(library) not in maps:
            raise ForkRefusal(f"{library} is to be loaded first")
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the nursery's child forks it and ends, so that it becomes this process's
    try:
        send_program(nursery, program, fds)
        return receive_number(nursery, "pid")
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _nurse(connection: socket.socket) -> None:
    """Fork programs until the other side is gone; returns only in the programs."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_title("forge_rl: forks processes of an engine")
    while True:
        try:
            program, fds = receive_program(connection)
        except (EOFError, OSError):
            os._exit(0)
        read_fd, write_fd = os.pipe()
        middle = os.fork()
        # The middle process ends at once, which orphans the program and so makes the requester its parent.
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                os.close(read_fd)
                os.close(write_fd)
                connection.close()
                _become(program, fds, has_nursery=False)
                return
            os.write(write_fd, str(pid).encode())
            os._exit(0)
        # Without this copy, the read below returns nothing, rather than blocking, if no process reports a PID.
        os.close(write_fd)
        for fd in fds.values():
            os.close(fd)
        os.waitpid(middle, 0)
        pid_text = os.read(read_fd, 32)
        os.close(read_fd)
        if pid_text:
            send_answer(connection, pid=int(pid_text))
        else:
            send_answer(connection, refusal="it cannot be forked")


def _set_title(title: str) -> None:
    """Set what `ps` shows, if setproctitle is installed, as vLLM has it; the first call must be the server's."""
    with contextlib.suppress(ImportError):
        importlib.import_module("setproctitle").setproctitle(title)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
