"""The sandbox over HTTP: what its client can do, whose sessions they are, limits, leases, and its end."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from starlette.datastructures import Headers

from apps.sandbox import Config, SandboxServer
from forge_rl.errors import ConfigError
from forge_rl.gateway.errors import ApiError
from forge_rl.sandbox import CellError, Image, Limits, RemotePool, Result, SandboxError, SandboxPool, Usage
from forge_rl.sandbox.providers.wire import MAX_WAIT_S, SandboxWireError, result_from_json, result_to_json
from tests.sandbox_pool import left_in_cgroups

LIMITS = Limits(wall_s=20, memory_bytes=96 << 20, processes=24, scratch_bytes=4 << 20, transfer_bytes=64 << 10)
CONFIG = Config(
    port=0,
    sessions=8,
    sessions_per_key=3,
    warm=0,
    limits=LIMITS,
    lease_s=4.0,
    max_body_bytes=128 << 10,
    client_deadline_s=1.0,
    max_concurrent=8,
    network=("127.0.0.1:9",),
)


class Served:
    """A server in an event loop of its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.refused: SandboxError | None = None
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._serve()))
        self.thread.start()
        assert self.ready.wait(60)

    async def _serve(self) -> None:
        self.stop = asyncio.Event()
        try:
            async with SandboxServer(CONFIG, ("one", "two")) as server:
                self.url = server.url
                self.ready.set()
                await self.stop.wait()
        except SandboxError as error:
            self.refused = error
            self.ready.set()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    running = Served()
    if running.refused is not None:
        pytest.skip(str(running.refused))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_RL_API_KEY", "one")
    monkeypatch.setenv("OTHER_KEY", "two")


def ask(served: Served, method: str, path: str, body: object = None, **options: Any) -> httpx.Response:
    headers = {"authorization": "Bearer one", **options.pop("headers", {})}
    return httpx.request(method, served.url + path, json=body, headers=headers, timeout=30, **options)


def error_of(response: httpx.Response) -> str:
    return response.json()["error"]["message"]


async def test_a_remote_pool_does_what_a_pool_does(served: Served):
    async def use(pool: SandboxPool):
        async with pool.session(limits=Limits(**{**vars(LIMITS), "wall_s": 9}), undo=True) as session:
            await session.put("folder/data", b"\x00\xff" * 9)
            first = await session.run("x = [len(open('folder/data', 'rb').read())]; print('é'); x")
            error = await session.run("x.append(1)\n1 / 0")
            await session.restore()
            async with await session.fork() as fork:
                await fork.run("x.append(2); open('folder/data', 'w').write('3')")
                rest = await session.run("x"), await fork.run("x"), await fork.get("folder/data")
            image = await session.run("b'\\xff\\xd8\\xff' * 7")
            assert await session.get("folder/data") == b"\x00\xff" * 9
            with pytest.raises(SandboxError, match="No such file"):
                await session.get("nothing")
            ended = await session.run("import os; os._exit(1)")
            assert not session.alive
            return session.limits.wall_s, first, error, rest, image, ended

    async def work():
        async with RemotePool(served.url) as pool:
            return await use(pool)

    wall_s, first, error, (mine, forked, file), image, ended = await work()
    assert wall_s == 9
    assert (first.stdout, first.value, first.error) == ("é\n", "[18]", None)
    assert (error.error.name, "line 2" in error.error.traceback) == ("ZeroDivisionError", True)
    assert (mine.value, forked.value, file) == ("[18]", "[18, 2]", b"3")
    assert (image.image.media_type, image.image.data) == ("image/jpeg", b"\xff\xd8\xff" * 7)
    assert ended.error.name == "Ended"


def test_every_field_of_a_result_survives_json_and_a_wrong_one_is_refused():
    usage = Usage(wall_s=1.5, cpu_s=0.5, memory_bytes=7)
    error = CellError(name="E", message="m\ud800", traceback="t")
    image = Image(media_type="image/jpeg", data=b"\xff\xd8\xff.")
    whole = Result(stdout="o", stderr="e", value="v", image=image, error=error, usage=usage, cut=True, status=-9)
    assert all(getattr(whole, one.name) != one.default for one in fields(Result))
    sent = json.dumps(result_to_json(whole))
    assert result_from_json(json.loads(sent), LIMITS) == whole
    for name, wrong in (("stdout", 1), ("status", True), ("usage", []), ("error", "x"), ("image", {"media_type": "x"})):
        with pytest.raises(SandboxWireError):
            result_from_json({**json.loads(sent), name: wrong}, LIMITS)


async def test_a_key_reaches_its_own_sessions_only(served: Served):
    async def work():
        async with (
            RemotePool(served.url) as mine,
            RemotePool(served.url, api_key_env="OTHER_KEY") as other,
            mine.session() as session,
            other.session() as theirs,
            httpx.AsyncClient(base_url=served.url, headers={"authorization": "Bearer one"}) as stolen,
        ):
            path = f"/v1/sessions/{theirs._name}"
            bodies = {"run": {"code": "1"}, "get": {"path": "x"}, "fork": {}, "restore": {}}
            tried = [await stolen.post(f"{path}/{do}", json=body) for do, body in bodies.items()]
            tried.append(await stolen.delete(path))
            renewed = await stolen.post("/v1/renew", json={"sessions": [theirs._name]})
            listed = await stolen.get("/v1/sessions")
            assert (await theirs.run("2")).value == "2"
            return [one.status_code for one in tried], renewed.json(), listed.json(), session._name

    tried, renewed, listed, name = await work()
    assert tried == [404] * 5
    assert renewed == {"sessions": []}
    assert listed == {"sessions": {name: True}}


async def test_a_key_has_so_many_sessions_and_other_keys_still_get_theirs(served: Served):
    async with RemotePool(served.url) as mine, RemotePool(served.url, api_key_env="OTHER_KEY") as other:
        sessions = [await mine.open() for _ in range(3)]
        for refused in (mine.open(), sessions[0].fork()):
            with pytest.raises(SandboxError, match=r"\(429\): the key has 3 open sessions"):
                await refused
        async with other.session() as theirs:
            assert (await theirs.run("1")).value == "1"
        await sessions[0].close()
        async with mine.session() as again:
            result = (await again.run("1")).value
    assert result == "1"


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "message"),
    [
        ("POST", "/v1/sessions", {"headers": {"authorization": "Bearer three"}}, 401, "wrong API key"),
        ("POST", "/v1/sessions", {"headers": {"authorization": ""}}, 401, "no API key"),
        ("POST", "/v1/sessions", {"headers": {"host": "evil.example"}}, 403, "is not served here"),
        ("POST", "/v1/sessions", {"headers": {"origin": "https://evil.example"}}, 403, "are not allowed"),
        ("GET", "/v1/sessions/../../etc/passwd", {}, 404, "Not Found"),
        ("GET", "/v1/nothing%1b[31m", {}, 404, "Not Found"),
        ("PUT", "/v1/sessions", {"body": {}}, 405, "Method Not Allowed"),
        ("POST", "/v1/sessions/0/run", {"body": {"code": "1"}}, 404, "no such session"),
        ("POST", "/v1/sessions", {"content": b"{", "headers": {"content-type": "application/json"}}, 400, "JSON"),
        ("POST", "/v1/sessions", {"content": b"[" * 99999, "headers": {"content-type": "application/json"}}, 400, ""),
        ("POST", "/v1/sessions", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "content type"),
        ("POST", "/v1/sessions", {"body": {"limits": {"wall_s": 21}}}, 400, "above the server's, 20"),
        ("POST", "/v1/sessions", {"body": {"limits": {"memory_bytes": "1"}}}, 400, "limits"),
        ("POST", "/v1/sessions", {"body": {"limits": {"processes": 0}}}, 400, "set Limits:processes to 1"),
        ("POST", "/v1/sessions", {"body": {"limits": {"uid": 0}}}, 400, "unknown limit 'uid'"),
        ("POST", "/v1/sessions", {"body": {"profile": "none"}}, 400, "profile"),
        ("POST", "/v1/sessions", {"body": {"wait_s": 1e9}}, 400, "wait_s"),
        ("POST", "/v1/sessions", {"body": {"network": ["127.0.0.1:8"]}}, 403, "not an address of --network"),
        ("POST", "/v1/sessions", {"body": {"network": ["/etc"]}}, 400, "network='/etc'"),
        ("POST", "/v1/sessions/0/run", {"body": {"code": "1", "wall_s": 99}}, 400, "above the server's limit, 20"),
        ("POST", "/v1/sessions/0/run", {"body": {"code": 1}}, 400, "code"),
        ("POST", "/v1/sessions/0/put", {"body": {"path": "x" * 5000, "data": ""}}, 400, "path"),
        ("POST", "/v1/sessions/0/run", {"body": {"code": "x" * (128 << 10)}}, 413, "longer than 131072 bytes"),
    ],
)
def test_what_is_wrong_is_refused_with_a_clear_error(
    served: Served, method: str, path: str, options: dict, status: int, message: str
):
    response = ask(served, method, path, options.pop("body", None), **options)
    assert (response.status_code, message in error_of(response)) == (status, True), response.text


async def test_a_session_can_be_given_addresses_that_the_server_allows(served: Served):
    async with RemotePool(served.url) as pool, pool.session(network=["127.0.0.1:9"]) as session:
        result = await session.run("import socket; socket.create_connection(('127.0.0.1', 9))")
    assert "it cannot be reached: Connection refused" in result.error.message


async def test_a_path_leads_nowhere_that_the_session_cannot_go(served: Served):
    async with RemotePool(served.url) as pool, pool.session() as session, pool.session() as other:
        await other.put("secret", b"s")
        folder = (await other.run("import os; os.getcwd()")).value.strip("'")
        await session.run("import os; os.symlink('/etc/shadow', 'link')")
        for path in ("../../etc/shadow", "/etc/shadow", "link", f"{folder}/secret", "/proc/1/environ", "x\0y", ""):
            with pytest.raises(SandboxError, match="could not transfer"):
                await session.get(path)
            with pytest.raises(SandboxError, match="could not transfer"):
                await session.put(path, b"x")
        with pytest.raises(SandboxError, match="transfer_bytes is 65536"):
            await session.put("large", b"x" * (65 << 10))
        assert (await session.run("1")).value == "1"
        result = await other.get("secret")
    assert result == b"s"


def test_a_slow_body_is_given_up(served: Served):
    host, port = served.url.removeprefix("http://").split(":")
    head = "POST /v1/sessions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one\r\ncontent-length: 9\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    assert ask(served, "GET", "/health").json() == {"status": "ok"}


def test_a_session_that_nobody_renews_is_ended_and_one_that_is_stays(served: Served):
    async def work():
        key = {"authorization": "Bearer one"}
        async with (
            RemotePool(served.url) as pool,
            pool.session() as session,
            httpx.AsyncClient(base_url=served.url, headers=key, timeout=30) as other,
        ):
            await session.run("x = 1")
            name = (await other.post("/v1/sessions", json={})).json()["id"]
            deadline = time.monotonic() + 60
            while name in (await other.get("/v1/sessions")).json()["sessions"]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.3)
            gone = await other.post(f"/v1/sessions/{name}/run", json={"code": "1"})
            return (await session.run("x")).value, gone

    value, gone = asyncio.run(work())
    assert (value, gone.status_code) == ("1", 404)
    metrics = httpx.get(f"{served.url}/metrics").text
    assert re.search(r'forge_rl_sandbox_sessions_ended_total\{cause="lease"\} [1-9]', metrics)
    assert "forge_rl_sandbox_sessions_open 0.0" in metrics


def test_requests_beyond_a_keys_rate_are_refused():
    server = SandboxServer(Config(requests_per_s=0.1, sessions=1), ("one", "two"))
    server._caller(Headers({"authorization": "Bearer one"}))
    with pytest.raises(ApiError, match="429") as refused:
        server._caller(Headers({"authorization": "Bearer one"}))
    assert refused.value.headers == {"retry-after": "10"}
    server._caller(Headers({"authorization": "Bearer two"}))


@pytest.mark.parametrize("wait_s", [None, 0.0, 600.0])
async def test_a_client_waits_longer_than_the_server_lets_it(wait_s: float | None, monkeypatch: pytest.MonkeyPatch):
    async def ask(pool: RemotePool, method: str, path: str, body: object, *, limit_s: float) -> None:
        assert limit_s > (MAX_WAIT_S if wait_s is None else wait_s)
        raise SandboxError("asked")

    monkeypatch.setattr(RemotePool, "ask", ask)
    async with RemotePool("http://127.0.0.1:9") as pool:
        with pytest.raises(SandboxError, match="asked"):
            await pool.open(wait_s=wait_s)


async def test_a_plain_request_passes_no_proxy_which_would_read_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORGE_RL_API_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "")
        async with RemotePool("http://127.0.0.1:9") as pool:
            with pytest.raises(SandboxError):
                await pool.ask("GET", "/sessions", limit_s=2)
        with pytest.raises(BlockingIOError):
            proxy.accept()


async def test_the_clients_key_is_in_no_message_and_a_hostile_answer_is_refused(monkeypatch: pytest.MonkeyPatch):
    answers = iter((b"[1]", b"{" * 9999, b'{"id": "../x", "lease_s": 9, "limits": {}}', b'{"id": "x", "lease_s": 9}'))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                with listener.accept()[0] as one:
                    one.recv(1 << 16)
                    head = b"HTTP/1.1 201 Created\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                    one.sendall(head % len(answer) + answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("FORGE_RL_API_KEY", "very-secret")

        async def work() -> list[str]:
            told = []
            async with RemotePool(f"http://127.0.0.1:{listener.getsockname()[1]}") as pool:
                for _ in range(4):
                    with pytest.raises(SandboxError) as error:
                        await pool.open()
                    told.append(f"{error.value!r} {error.value} {pool!r}")
            return told

        told = await work()
        thread.join()
    assert "very-secret" not in "".join(told)
    for wrong, message in zip(told, ("JSON object", "JSON object", "no name", "not a session"), strict=True):
        assert message in wrong
    for url in ("ftp://x", "http://", "http://user:password@x"):
        with pytest.raises(ConfigError, match="url is not one"):
            RemotePool(url)


@pytest.mark.usefixtures("served")  # which skips where there can be none
def test_a_server_that_is_stopped_ends_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FORGE_RL_API_KEY")
    command = [sys.executable, "-m", "apps.sandbox", "--port", "0", "--out", str(tmp_path / "out"), "--warm", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]
    monkeypatch.setenv("FORGE_RL_API_KEY", (tmp_path / "out" / "api_key").read_text().strip())

    mine: set[str] = set()

    async def work():
        async with RemotePool(url) as pool:
            session = await pool.open()
            cell = asyncio.create_task(session.run("import time; time.sleep(15)"))
            await asyncio.sleep(0.3)
            pids = {str(each.pid) for each in psutil.Process(server.pid).children(recursive=True)}
            mine.update(path.name for path in left_in_cgroups() if not pids.isdisjoint(path.name.split("-")))
            assert mine
            server.send_signal(signal.SIGTERM)
            return await asyncio.gather(cell, return_exceptions=True)

    (ended,) = asyncio.run(work())
    _, stderr = server.communicate(timeout=60)
    assert server.returncode == 128 + signal.SIGTERM, stderr
    assert not isinstance(ended, BaseException)
    assert "the session was closed" in ended.error.message
    assert mine.isdisjoint(path.name for path in left_in_cgroups())
    assert "Traceback" not in stderr
