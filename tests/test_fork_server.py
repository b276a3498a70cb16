"""Programs that a fork server runs: they are as if executed, end with who asked for them, and do without a server."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from forge_rl.runtime.cluster import _fork_modules
from forge_rl.runtime.fork_client import (
    FAILURE,
    FORK_MODULES,
    FORK_SERVER,
    NO_FORK,
    await_server,
    server_variable,
    start_server,
)
from forge_rl.runtime.fork_messages import MARK, peer
from tests.processes import lives

STATE = (
    "import decimal, json, os, signal, sys; from pathlib import Path; print(json.dumps({"
    "'pid': os.getpid(), 'parent': os.getppid(), 'argv': sys.argv, 'folder': os.getcwd(), 'name': __name__, "
    f"'modules': 'decimal' in sys.modules, 'failure': os.environ.get('{FAILURE}', ''), "
    "'environment': dict(os.environ), 'shown': Path('/proc/self/environ').read_text(errors='replace'), "
    "'mask': [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())], "
    "'term': int(signal.getsignal(signal.SIGTERM)), 'fds': os.listdir('/proc/self/fd')}), flush=True)"
)
WAITING = f"{STATE}; import time; time.sleep(600)"


class Server:
    """A fork server of this test, and programs that it runs."""

    def __init__(self, modules: str = "decimal") -> None:
        self.variable = server_variable(secrets.token_hex(8), {}, modules)
        self.clients: list[subprocess.Popen[str]] = []

    def run(self, code: str, **more: str) -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, "-m", "forge_rl.runtime.fork_client", "-c", code, "word"],
            env={**os.environ, FORK_SERVER: self.variable, MARK: "test/fork-0", **more},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.clients.append(client)
        return client

    @property
    def pid(self) -> int:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect("\0" + self.variable.partition(":")[0])
            return peer(connection)[0]

    def close(self) -> None:
        for client in self.clients:
            client.kill()
            client.communicate()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def state_of(client: subprocess.Popen[str]) -> dict[str, object]:
    assert client.stdout is not None
    state: dict[str, object] = json.loads(client.stdout.readline())
    return state


def wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_forked_program_finds_what_an_executed_one_would(server: Server, tmp_path: Path) -> None:
    client = server.run(STATE, WORD="one two")
    state = state_of(client)
    assert client.wait(60) == 0
    assert state["pid"] != client.pid
    assert state["argv"] == ["-c", "word"]
    assert state["name"] == "__main__"
    assert state["folder"] == os.getcwd()
    assert state["failure"] == ""
    environment = state["environment"]
    assert isinstance(environment, dict)
    expected = {**os.environ, FORK_SERVER: server.variable, MARK: "test/fork-0", "WORD": "one two"}
    assert {name: value for name, value in environment.items() if name != "MONARCH_FILE_LOG"} == {
        name: value for name, value in expected.items() if name != "MONARCH_FILE_LOG"
    }
    assert f"{MARK}=test/fork-0\0" in str(state["shown"]), "processes of a replica are found by their mark in /proc"
    assert state["mask"] == []
    assert state["term"] == signal.SIG_DFL
    assert set(state["fds"]) >= {"0", "1", "2"}  # type: ignore[call-overload]
    assert len(state["fds"]) <= 5, "the server's sockets are not handed on"  # type: ignore[arg-type]


def test_a_program_and_its_children_have_the_priority_of_who_asks(server: Server) -> None:
    code = (
        "import json, multiprocessing, os\n"
        "os.setpriority(os.PRIO_PROCESS, 0, 12)\n"
        "from tests.forked_child import report\n"
        "context = multiprocessing.get_context('spawn')\n"
        "queue = context.SimpleQueue()\n"
        "child = context.Process(target=report, args=(queue,))\n"
        "child.start()\n"
        "print(json.dumps(queue.get()), flush=True)\n"
        "child.join()\n"
    )
    state = state_of(server.run(code))
    assert state["forked"]
    assert state["niceness"] == 12


def test_programs_share_one_server_and_its_imports(server: Server) -> None:
    states = [state_of(client) for client in [server.run(STATE), server.run(STATE)]]
    assert len({state["pid"] for state in states}) == 2
    assert all(state["failure"] == "" for state in states)
    assert lives(server.pid)


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)])
def test_the_client_ends_as_its_program(server: Server, code: str, status: int) -> None:
    assert server.run(code).wait(60) == status


def test_a_program_ends_when_its_client_is_killed(server: Server) -> None:
    client = server.run(WAITING)
    program = psutil.Process(int(str(state_of(client)["pid"])))
    client.kill()
    wait(lambda: not lives(program))


def test_a_program_and_its_client_end_with_the_keeper(server: Server) -> None:
    client = server.run(WAITING)
    program = psutil.Process(int(str(state_of(client)["pid"])))
    keeper = program.parent()
    assert keeper is not None
    keeper.kill()
    assert client.wait(60) == -signal.SIGKILL
    wait(lambda: not lives(program))


def test_programs_outlive_their_server_and_the_next_client_starts_another(server: Server) -> None:
    client = server.run(WAITING)
    program = psutil.Process(int(str(state_of(client)["pid"])))
    dead = server.pid
    os.kill(dead, signal.SIGKILL)
    wait(lambda: not lives(dead))
    assert state_of(server.run(STATE))["failure"] == ""
    assert server.pid != dead
    assert lives(program)


def test_everything_ends_when_the_clients_parent_is_killed(server: Server) -> None:
    command = [sys.executable, "-m", "forge_rl.runtime.fork_client", "-c", WAITING]
    code = f"import subprocess, sys; subprocess.run({command!r})"
    environment = {**os.environ, FORK_SERVER: server.variable}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        program = psutil.Process(int(str(state_of(parent)["pid"])))
        pid = server.pid
        parent.kill()
    wait(lambda: not lives(program) and not lives(pid))


def test_a_stop_signal_to_all_processes_ends_none(server: Server) -> None:
    client = server.run(WAITING)
    program = psutil.Process(int(str(state_of(client)["pid"])))
    keeper = program.parent()
    assert keeper is not None
    for pid in (client.pid, keeper.pid, server.pid):
        os.kill(pid, signal.SIGTERM)
    assert state_of(server.run(STATE))["failure"] == ""
    assert client.poll() is None
    assert lives(program)


@pytest.mark.parametrize("trouble", ["no_such_module", "tests.threads_on_import"])
def test_a_program_is_executed_where_the_server_cannot_fork(trouble: str) -> None:
    server = Server(trouble)
    try:
        client = server.run(STATE)
        state = state_of(client)
        assert client.wait(60) == 0
        assert state["pid"] == client.pid
        assert state["argv"] == ["-c", "word"]
        assert ("no_such_module" if trouble == "no_such_module" else "threads") in str(state["failure"])
        assert FORK_SERVER not in state["environment"]  # type: ignore[operator]
    finally:
        server.close()


def test_a_program_is_executed_while_the_server_is_stopped(server: Server) -> None:
    state_of(server.run(STATE))
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        client = server.run(STATE)
        state = state_of(client)
        assert state["pid"] == client.pid
        assert "stopped" in str(state["failure"])
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_program_that_was_executed_is_not_forked_later(server: Server, tmp_path: Path) -> None:
    state_of(server.run(STATE))
    file = tmp_path / "starts"
    os.kill(pid := server.pid, signal.SIGSTOP)
    try:
        client = server.run(f"open({str(file)!r}, 'a').write('started ')\n{STATE}")
        assert state_of(client)["pid"] == client.pid
    finally:
        os.kill(pid, signal.SIGCONT)
    for _ in range(2):  # the server takes requests one after the other
        assert state_of(server.run(STATE))["failure"] == ""
    wait(lambda: len(psutil.Process(pid).children()) == 0)
    assert file.read_text() == "started "


def test_no_zombie_is_left_where_nothing_reaps_orphans(server: Server) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become this process's, which reaps none
    try:
        assert server.run(STATE).wait(60) == 0
        wait(lambda: psutil.Process(server.pid).ppid() == os.getpid())
        client = server.run(STATE)
        program = int(str(state_of(client)["pid"]))
        assert client.wait(60) == 0
        wait(lambda: not psutil.pid_exists(program))
        os.kill(pid := server.pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    finally:
        libc.prctl(36, 0, 0, 0, 0)


def test_programs_of_one_server_draw_different_random_numbers() -> None:
    server = Server("numpy.random,random")
    code = "import json, random, numpy; print(json.dumps([random.random(), numpy.random.random()]), flush=True)"
    try:
        draws = [json.loads(server.run(code).communicate(timeout=60)[0]) for _ in range(2)]
        assert draws[0][0] != draws[1][0]
        assert draws[0][1] != draws[1][1]
    finally:
        server.close()


def test_threads_of_a_program_start_children_at_once(server: Server) -> None:
    code = (
        "import json, multiprocessing\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from tests.forked_child import report\n"
        "context = multiprocessing.get_context('spawn')\n"
        "def start(_):\n"
        "    queue = context.SimpleQueue()\n"
        "    child = context.Process(target=report, args=(queue,))\n"
        "    child.start()\n"
        "    state = queue.get()\n"
        "    child.join()\n"
        "    return [child.pid, state['pid'], state['forked']]\n"
        "with ThreadPoolExecutor(4) as threads:\n"
        "    print(json.dumps({'children': list(threads.map(start, range(8)))}), flush=True)\n"
    )
    children = state_of(server.run(code))["children"]
    assert isinstance(children, list)
    assert all(started == pid and forked for started, pid, forked in children)
    assert len({pid for pid, _, _ in children}) == 8


def test_children_of_a_program_are_forked_and_its_own(server: Server) -> None:
    code = (
        "import json, multiprocessing, os, sys, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "context = multiprocessing.get_context('spawn')\n"
        "queue = context.SimpleQueue()\n"
        "from tests.forked_child import report\n"
        "child = context.Process(target=report, args=(queue,))\n"
        "child.start()\n"
        "state = queue.get()\n"
        "child.join()\n"
        "print(json.dumps({**state, 'seen': child.pid, 'here': os.getpid(), 'status': child.exitcode}), flush=True)\n"
    )
    state = state_of(server.run(code, WORD="set before"))
    assert state["pid"] == state["seen"]
    assert state["parent"] == state["here"]
    assert state["status"] == 3
    assert state["threads"] == 1
    assert state["forked"], "the server's imports are there"
    assert f"{MARK}=test/fork-0\0" in str(state["shown"])


def test_a_socket_of_another_user_is_not_trusted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    state_of(server.run(STATE))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    from forge_rl.runtime import fork_client

    with pytest.raises(PermissionError, match="another user"):
        fork_client._connect(server.variable.partition(":")[0])


async def test_waiting_for_imports_can_be_cancelled_while_the_server_is_stopped(server: Server) -> None:
    start_server(server.variable, dict(os.environ), os.getpid())
    await await_server(server.variable, 60)
    os.kill(pid := server.pid, signal.SIGSTOP)
    try:
        task = asyncio.create_task(await_server(server.variable, 600))
        await asyncio.sleep(0.1)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.cancelled()
        await await_server(server.variable, 0.1)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_user_has_every_process_executed_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fork_modules({FORK_MODULES: "decimal"}) == "decimal"
    monkeypatch.setenv(NO_FORK, "1")
    assert _fork_modules({FORK_MODULES: "decimal"}) == ""


def test_a_server_ends_with_its_owner() -> None:
    server = Server()
    with subprocess.Popen(["sleep", "600"]) as owner:
        start_server(server.variable, dict(os.environ), owner.pid)

        def pid() -> int:
            with contextlib.suppress(OSError):
                return server.pid
            return 0

        wait(lambda: pid() != 0)
        process = psutil.Process(pid())
        owner.kill()
    wait(lambda: not lives(process))
