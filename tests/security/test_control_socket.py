"""The socket by which a run is changed while it goes: other users, garbage, too much, too slow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.run.endpoints import check_reachable
from forge_rl.run.live import control_server as control_module
from forge_rl.run.live.attach import AttachedRun
from forge_rl.run.live.control_client import ELSEWHERE, SOCKET, exchange
from forge_rl.run.live.control_server import MOST_BYTES, _check_types, serving_control
from forge_rl.runtime.local_socket import connect, listening
from forge_rl.runtime.sealed import NONCE_BYTES, SealedChannel, nonce
from tests.security.other_user import NOBODY, ROOT, as_user, can_make_networks, needs_root

T = TypeVar("T")


class Asked:
    """Stands for a run's control."""

    secret = "not to be asked for"

    def __init__(self) -> None:
        self.order: list[int] = []
        self.lock = asyncio.Lock()

    async def status(self) -> dict[str, object]:
        return {"step": len(self.order)}

    async def note(self, number: int) -> list[int]:
        async with self.lock:
            self.order.append(number)
            return self.order

    async def long(self, size: int = 1 << 24) -> str:
        return "x" * size

    async def fail(self) -> None:
        raise RuntimeError("of its own")

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def _private(self) -> None:
        raise AssertionError("it was asked")

    def plain(self) -> None:
        raise AssertionError("it was asked")


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Asked, list[str]]]:
    control, warnings = Asked(), list[str]()
    async with serving_control(folder, control, warnings.append):
        yield control, warnings


def while_served(folder: Path, attack: Callable[[], T]) -> T:
    """Does something in a thread while the control is served; afterwards it must still answer."""

    async def check() -> T:
        async with served(folder):
            replies = await asyncio.to_thread(attack)
            assert (await asyncio.to_thread(attached(folder).ask, "status")) == {"step": 0}
            return replies

    return asyncio.run(check())


def attached(folder: Path) -> AttachedRun:
    (folder / "config.json").touch()
    return AttachedRun(folder)


def send(folder: Path, data: bytes) -> bytes:
    """Sends bytes, and returns all that comes back."""
    with connect(folder, SOCKET, timeout_s=20) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(OSError):
            while part := client.recv(1 << 16):
                found += part
        return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A run folder that all users could enter if its mode let them."""
    top = Path(tempfile.mkdtemp(dir="/tmp"))
    top.chmod(0o755)
    (top / "run").mkdir(mode=0o700)
    yield top / "run"
    shutil.rmtree(top)


def lets_in(folder: Path) -> bytes | None:
    """What another user gets as an answer; None if not even a connection."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        try:
            client.connect(str(folder / SOCKET))
            client.sendall(b'{"do": "status", "with": {}}\n')
            return client.recv(1000)
        except PermissionError:
            return None
        except OSError:
            return b""


@needs_root
def test_another_user_is_refused_even_where_modes_would_admit_it(folder: Path):
    def attack() -> list[bytes | None]:
        path = folder / SOCKET
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        refusals = [as_user(NOBODY, lambda: lets_in(folder))]
        folder.chmod(0o755)
        refusals.append(as_user(NOBODY, lambda: lets_in(folder)))
        path.chmod(0o666)
        refusals.append(as_user(NOBODY, lambda: lets_in(folder)))
        return refusals

    assert while_served(folder, attack) == [None, None, b""], "the last one is let in and asked for its name"


@needs_root
def test_a_socket_that_another_user_listens_at_is_not_talked_to(folder: Path):
    folder.chmod(0o777)
    done = folder / "done"
    listens = (
        "import socket, os, sys, time; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        f"s.bind({str(folder / SOCKET)!r}); os.chmod({str(folder / SOCKET)!r}, 0o666); s.listen();"
        f"print('listens', flush=True); c, _ = s.accept(); print(c.recv(100))"
    )
    with subprocess.Popen([sys.executable, "-c", listens], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"listens\n"
        (folder / "config.json").touch()
        with pytest.raises(ConfigError, match="anybody may write to it"):
            AttachedRun(folder)
        folder.chmod(0o700)
        with pytest.raises(ConfigError, match="another user"):
            AttachedRun(folder).ask("status")
        assert other.stdout.read() == b"b''\n", "it was told nothing"
    assert not done.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"garbage\n",
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
        b"9" * 10_000 + b"\n",
        b"{}\n",
        b'{"do": "status"}\n',
        b'{"do": "status", "with": []}\n',
        b'{"do": "status", "with": {"self": 1}}\n',
        b'{"do": "status", "with": {"more": 1}}\n',
        b'{"do": "_private", "with": {}}\n',
        b'{"do": "__init__", "with": {}}\n',
        b'{"do": "__class__", "with": {}}\n',
        b'{"do": "plain", "with": {}}\n',
        b'{"do": "secret", "with": {}}\n',
        b'{"do": "lock", "with": {}}\n',
        b'{"do": "note.__class__", "with": {}}\n',
        b'{"do": 1, "with": {}}\n',
        b'{"do": "fail", "with": {}}\n',
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b'{"do": "status", "with": {}',
        b"x" * (4 * MOST_BYTES) + b"\n",
        b"x" * (4 * MOST_BYTES),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_garbage_gets_an_error_or_nothing_and_the_run_goes_on(data: bytes, tmp_path: Path):
    reply = while_served(tmp_path, lambda: send(tmp_path, data))
    assert not reply or "error" in json.loads(reply)


def test_two_requests_on_a_connection_are_one_and_the_rest_is_dropped(tmp_path: Path):
    line = b'{"do": "status", "with": {}}\n'
    assert while_served(tmp_path, lambda: send(tmp_path, line * 1000)).count(b"\n") <= 1


def test_clients_that_hang_are_cut_and_others_wait_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_module, "_READ_S", 1.0)

    def attack() -> None:
        hanging = [connect(tmp_path, SOCKET, timeout_s=20) for _ in range(control_module._MOST_CLIENTS)]
        for client in hanging:
            client.sendall(b'{"do": ')
        while b'"busy": true' not in send(tmp_path, b'{"do": "status", "with": {}}\n'):
            pass  # until all of those have been taken on
        attached(tmp_path).ask("status")  # waits
        for client in hanging:
            assert b"no request came within 1 s" in client.recv(1000)
            assert client.recv(1000) == b""
            client.close()

    while_served(tmp_path, attack)


def test_a_client_that_does_not_read_its_reply_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_module, "_WRITE_S", 0.2)

    def attack() -> int:
        with connect(tmp_path, SOCKET, timeout_s=20) as client:
            client.sendall(b'{"do": "long", "with": {}}\n')
            time.sleep(0.6)
            byte_count = 0
            with contextlib.suppress(OSError):
                while part := client.recv(1 << 20):
                    byte_count += len(part)
            return byte_count

    assert while_served(tmp_path, attack) < 1 << 24


def test_a_client_that_reads_slowly_gets_all_of_its_reply(tmp_path: Path):
    def found(size: int) -> int:
        with connect(tmp_path, SOCKET, timeout_s=20) as client:
            client.sendall(b'{"do": "long", "with": {"size": %d}}\n' % size)
            byte_count = 0
            while part := client.recv(1 << 13):
                byte_count += len(part)
            return byte_count - len(b'{"result": ""}\n')

    sizes = range(1 << 19, 1 << 20, 1 << 13)  # whatever a socket holds, some leave it almost empty at the end
    assert while_served(tmp_path, lambda: [*map(found, sizes)]) == [*sizes]


@pytest.mark.parametrize(
    ("kind", "fits", "differs"),
    [
        ("int", [1, 0, -1, 10**400], [1.0, True, None, "1", [1], {}]),
        ("int | None", [1, None], [50.0, False]),
        ("float", [1, 0.5, float("nan")], [True, "1", None]),
        ("bool", [True], [1, None]),
        ("str | list[Any]", ["", [1, {}]], [{}, 1]),
        ("dict[str, Any]", [{}, {"a": 1}], [[], ""]),
    ],
)
def test_an_argument_of_another_type_than_its_request_takes_is_refused(kind: str, fits: list[Any], differs: list[Any]):
    async def request(value: object) -> None: ...

    request.__annotations__["value"] = kind
    for value in fits:
        _check_types("chat", request, {"value": value})
    for value in differs:
        with pytest.raises(ConfigError, match="the request 'chat': value is ") as caught:
            _check_types("chat", request, {"value": value})
        assert caught.value.hint == f"make it {kind}"


def test_a_request_with_a_number_of_another_type_is_answered_by_an_error(tmp_path: Path):
    answer = while_served(tmp_path, lambda: send(tmp_path, b'{"do": "note", "with": {"number": 50.0}}\n'))
    assert json.loads(answer) == {"error": "the request 'note': number is 50.0", "hint": "make it int"}


def test_a_reply_that_is_cut_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_module, "_encoded", lambda reply: b'{"result": 1')
    with pytest.raises(ConfigError, match="was closed after 12 bytes of its reply"):
        while_served(tmp_path, lambda: attached(tmp_path).ask("status"))


def test_a_client_that_goes_away_meanwhile_hurts_nobody(tmp_path: Path):
    def attack() -> None:
        for _ in range(50):
            with connect(tmp_path, SOCKET, timeout_s=20) as client, contextlib.suppress(BrokenPipeError):
                client.sendall(b'{"do": "long", "with": {}}\n')  # refused before it is read, if too many are served

    while_served(tmp_path, attack)


async def test_simultaneous_clients_are_all_answered_one_change_at_a_time(tmp_path: Path):
    async with served(tmp_path) as (control, _):
        requests = [asyncio.to_thread(attached(tmp_path).ask, "note", number=number) for number in range(10)]
        replies = await asyncio.gather(*requests)
        assert sorted(control.order) == list(range(10))
        assert sorted(map(len, replies)) == list(range(1, 11))
        assert all(reply == control.order[: len(reply)] for reply in replies)


async def test_an_error_of_ours_is_told_and_the_end_of_the_run_ends_who_waits(tmp_path: Path):
    async with served(tmp_path) as (_, warnings):
        with pytest.raises(ForgeError, match="RuntimeError: of its own"):
            await asyncio.to_thread(attached(tmp_path).ask, "fail")
        assert len(warnings) == 1
        waiting = asyncio.create_task(asyncio.to_thread(attached(tmp_path).ask, "wait"))
        await asyncio.sleep(0.2)
    with pytest.raises(ConfigError, match="did not answer 'wait'"):
        await waiting
    assert not (tmp_path / SOCKET).exists()


def test_a_folder_longer_than_a_socket_path_is_still_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path.joinpath(*["a folder with a long name, as runs have them"] * 8)
    assert len(str(deep)) > 300
    deep.mkdir(parents=True)
    while_served(deep, lambda: None)
    monkeypatch.chdir(deep.parent)
    while_served(Path(deep.name), lambda: None)


def test_a_dead_runs_socket_is_named_and_replaced(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / SOCKET))
    (tmp_path / "events.jsonl").write_text(
        '{"time": 1, "level": "info", "text": "a"}\n{"time": 2, "level": "info", "text": "the last"}\n{"tim'
    )
    with pytest.raises(ConfigError, match=r"is not running: it was stopped.*its last event: the last") as caught:
        attached(tmp_path).ask("status")
    assert "the same command" in caught.value.hint
    while_served(tmp_path, lambda: None)
    (tmp_path / "summary.json").write_text('{"score_before": 0.25, "score_after": 0.5, "steps": 7}')
    with pytest.raises(ConfigError, match=r"it finished after 7 steps, with a held-out score of 0.500 after 0.250"):
        attached(tmp_path).ask("status")
    (tmp_path / "summary.json").write_text(
        '{"outcome": "failed", "steps": 3, "cause": "a full \\u001b[2J disk\\n, and more"}'
    )
    with pytest.raises(ConfigError, match=r"ended, failed after 3 steps: a full \\x1b\[2J disk") as caught:
        attached(tmp_path).ask("status")
    assert "more" not in str(caught.value)
    (tmp_path / "summary.json").write_text('{"outcome": "stopped", "steps": 3}')
    with pytest.raises(ConfigError, match="ended, stopped after 3 steps"):
        attached(tmp_path).ask("status")
    for malformed in ('{"outcome": "failed", "steps": 3, "cause": 5}', "[]", '{"outcome": "failed"}'):
        (tmp_path / "summary.json").write_text(malformed)
        with pytest.raises(ConfigError, match="its last event: the last"):
            attached(tmp_path).ask("status")


def test_what_is_no_run_folder_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        AttachedRun(tmp_path)
    with pytest.raises(ConfigError, match="is not a run folder"):
        AttachedRun(tmp_path / "nowhere")


async def test_where_no_socket_can_be_made_the_run_goes_on_without(tmp_path: Path):
    warnings: list[str] = []
    (tmp_path / SOCKET).mkdir()
    async with serving_control(tmp_path, Asked(), warnings.append):
        pass
    [warning] = warnings
    assert "nobody can attach" in warning


@pytest.mark.processes
@pytest.mark.skipif(not can_make_networks(), reason="this machine lets its users make no networks of their own")
def test_a_run_in_a_network_of_its_own_is_reached_from_outside(tmp_path: Path):
    serve = f"""
import asyncio, sys
from pathlib import Path
from tests.security.test_control_socket import served
async def main():
    async with served(Path({str(tmp_path)!r})):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""
    command = [sys.executable, "-m", "forge_rl.runtime.private_network", sys.executable, "-c", serve]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdin is not None
        assert inside.stdout.readline() == "ready\n"
        assert os.readlink(f"/proc/{inside.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        assert attached(tmp_path).ask("note", number=3) == [3]
        inside.stdin.close()
        assert inside.wait(30) == 0


def test_listening_leaves_nothing(tmp_path: Path):
    with listening(tmp_path, "x.sock"):
        assert (tmp_path / "x.sock").is_socket()
    assert list(tmp_path.iterdir()) == []


@contextlib.asynccontextmanager
async def served_outside(folder: Path) -> AsyncIterator[tuple[Asked, dict[str, object]]]:
    """Serves only over TCP, as to another machine; yields the control, and the file for clients."""
    control = Asked()
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving_control(folder, control, print, listener):
        (folder / SOCKET).unlink()
        assert stat.S_IMODE((folder / ELSEWHERE).stat().st_mode) == 0o600
        yield control, json.loads((folder / ELSEWHERE).read_text())
    assert not (folder / ELSEWHERE).exists()


def outside(folder: Path, attack: Callable[[dict[str, Any]], T]) -> tuple[T, list[int]]:
    """Does something in a thread; afterwards the control must still answer. Returns what was noted, too."""

    async def check() -> tuple[T, list[int]]:
        async with served_outside(folder) as (control, place):
            reply = await asyncio.to_thread(attack, place)
            await asyncio.to_thread(attached(folder).ask, "status")
            return reply, control.order

    return asyncio.run(check())


def over_tcp(place: dict[str, Any], message: bytes) -> bytes:
    """Sends bytes after the server's nonce; returns all that comes back."""
    with socket.create_connection((place["host"], place["port"]), timeout=20) as client:
        client.recv(NONCE_BYTES + 1, socket.MSG_WAITALL)
        data = b""
        with contextlib.suppress(OSError):
            client.sendall(message)
            client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                data += part
        return data


REQUEST = b'{"do": "note", "with": {"number": 7}}\n'


def test_a_client_of_another_machine_notices_that_the_machine_of_the_run_is_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """No machine can lose its power here: the kernel is asked what it would do then."""
    connect, connections = socket.create_connection, list[socket.socket]()

    def connected(*arguments: Any, **options: Any) -> socket.socket:
        connection = connect(*arguments, **options)
        connections.append(connection.dup())
        return connection

    monkeypatch.setattr(socket, "create_connection", connected)
    outside(folder, lambda _: None)
    [connection] = connections
    with connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, every_s, tries = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        assert idle_s + every_s * tries <= 60


def test_a_client_of_another_machine_is_served_with_the_key_of_the_folder(folder: Path):
    (folder / "config.json").touch()
    replies, noted = outside(folder, lambda _: attached(folder).ask("note", number=7))
    assert (replies, noted) == ([7], [7])
    assert len(outside(folder, lambda _: attached(folder).ask("long"))[0]) == 1 << 24


@pytest.mark.parametrize(
    "message",
    {
        "another key": nonce() + SealedChannel(b"guessed", b"", nonce()).seal("request", REQUEST),
        "no key": REQUEST,
        "nothing": b"",
        "garbage": bytes(range(256)) * 10,
        "too much": nonce() + b"x" * (2 * MOST_BYTES),
    }.values(),
)
def test_a_client_without_the_key_gets_nothing(message: bytes, folder: Path):
    assert outside(folder, lambda place: over_tcp(place, message)) == (b"", [])


def test_overheard_requests_and_replies_are_not_taken_again(folder: Path):
    def attack(place: dict[str, Any]) -> bytes:
        with socket.create_connection((place["host"], place["port"]), timeout=20) as client:
            theirs, ours = client.recv(NONCE_BYTES + 1, socket.MSG_WAITALL).strip(), nonce()
            overheard = ours + SealedChannel(place["key"].encode(), theirs, ours).seal("request", REQUEST)
            client.sendall(overheard)
            reply = client.makefile("rb").readline()
        with pytest.raises(PermissionError):
            SealedChannel(place["key"].encode(), theirs, nonce()).open("reply", reply)
        return over_tcp(place, overheard)

    assert outside(folder, attack) == (b"", [7]), "once"


def test_clients_of_other_machines_wait_while_too_many_are_served(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(control_module, "_READ_S", 1.0)
    monkeypatch.setattr(control_module, "_MOST_OUTSIDE", 1)

    def attack(place: dict[str, Any]) -> bytes:
        with socket.create_connection((place["host"], place["port"]), timeout=20) as client:
            theirs, ours = client.recv(NONCE_BYTES + 1, socket.MSG_WAITALL).strip(), nonce()
            client.sendall(ours)
            assert exchange(folder, {"do": "status", "with": {}})["busy"]
            assert attached(folder).ask("note", number=7) == [7], "it asks again"
            reply = client.makefile("rb").readline()
        return SealedChannel(place["key"].encode(), theirs, ours).open("reply", reply)

    reply, noted = outside(folder, attack)
    assert (json.loads(reply), noted) == ({"error": "no request came within 1 s"}, [7])


@pytest.mark.parametrize("text", ["0.0.0.0:0", "[::]:9000", "8.8.8.8:9000", "x"])
def test_addresses_for_clients_elsewhere_are_private_and_known(text: str):
    with pytest.raises(ConfigError, match="--attach-on"):
        check_reachable(text, "--attach-on", may_be_public=False)
    check_reachable("10.0.0.1:0", "--attach-on", may_be_public=False)
