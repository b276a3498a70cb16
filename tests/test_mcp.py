"""Tools of MCP servers that are made with the mcp package: over stdio and HTTP, shared and of one episode, lost."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvicorn

from benchmarks.ports import unused_port
from forge_rl.envs.env_flag import build_environment
from forge_rl.errors import ConfigError, ForgeError, ReplicaError
from forge_rl.types import Task, ToolCall
from forge_rl.worlds.mcp import McpConnection, McpEnv, McpSession
from tests.processes import lives

pytest.importorskip("mcp", reason="the mcp package is not installed")

TASK = Task(id="1", source="s", messages=({"role": "user", "content": "Hi"},))
SERVER = """
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer
from mcp_types import EmbeddedResource, ResourceLink, TextContent, TextResourceContents
server, counted = MCPServer("tests", log_level="CRITICAL"), []

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

@server.tool()
def count() -> str:
    counted.append(1)
    return f"{len(counted)} {os.getpid()} {os.environ.get('EXTRA')} {os.environ.get('FORGE_RL_TESTS')}"

@server.tool()
async def wait() -> str:
    await asyncio.sleep(1000)
    return ""

@server.tool(structured_output=False)
def read() -> list:
    inside = TextResourceContents(uri="file:///a.py", text="print('hello')", mimeType="text/x-python")
    return [
        TextContent(type="text", text="here"),
        EmbeddedResource(type="resource", resource=inside),
        ResourceLink(type="resource_link", name="b", uri="file:///b.py"),
    ]

@server.tool()
def die() -> str:
    os._exit(3)

server.run("streamable-http", port=int(sys.argv[1])) if sys.argv[1:] else server.run("stdio")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return f"{sys.executable} {path}"


async def call(session: McpSession, name: str, **arguments: object) -> str:
    called = ToolCall(id="c", name=name, arguments=json.dumps(arguments))
    step = await session.step("", truncated=False, calls=[called])
    return str(step.messages[0]["content"])


async def opened(env: McpEnv) -> McpSession:
    session = env(TASK)
    await session.reset()
    return session


async def test_a_command_serves_all_episodes_until_it_dies_and_another_one_after(server: str):
    made = build_environment(f'mcp:{server},timeout_s=60,tools=["add","count","read","die"],env={{"EXTRA": "x"}}')
    env = pickle.loads(pickle.dumps(made))

    session = env(TASK)
    shown = await session.reset()
    add = shown.tools[0]["function"]
    assert (add["name"], add["description"]) == ("add", "Add two numbers.")
    assert add["parameters"]["required"] == ["a", "b"]
    assert [tool["function"]["name"] for tool in shown.tools] == ["add", "count", "read", "die"]
    assert await call(session, "add", a=2, b=3) == "5"
    told = await call(session, "read")
    assert told == "here\nfile:///a.py\nprint('hello')\n[resource_link file:///b.py]"
    assert (await call(session, "add", a="x")).lower().startswith("error")
    assert "there is no tool 'wait'" in await call(session, "wait")
    first = (await call(session, "count")).split()
    second = await opened(env)
    assert (await call(second, "count")).split() == ["2", *first[1:]]
    assert first[2:] == ["x", "None"], "it gets no other variables"
    with pytest.raises(ReplicaError, match="died during a call of die"):
        await call(second, "die")
    third = await opened(env)
    again = (await call(third, "count")).split()
    assert (again[0], again[1] != first[1]) == ("1", True)
    assert (await third.step("It is 5.", truncated=False, calls=())).done
    await third.close()  # the server is for the next episode
    assert lives(int(again[1]))


async def test_an_episode_may_have_a_server_of_its_own_and_late_calls_are_told(server: str):
    env = McpEnv(server, per="session", timeout_s=1.0)

    one, two = await asyncio.gather(opened(env), opened(env))
    assert await call(one, "wait") == "error: wait took longer than 1 s"
    pids = []
    for session in (one, two):
        pid = int((await session._connection.call("count", {}, 60.0)).split()[1])  # type: ignore[union-attr]
        pids.append(pid)
        await session.close()
        assert not lives(pid)
    assert pids[0] != pids[1]


async def test_a_server_of_one_episode_ends_with_a_reset_that_is_cancelled(tmp_path: Path):
    path = tmp_path / "pid"
    code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    session = McpEnv(shlex.join([sys.executable, "-c", code]), per="session")(TASK)
    resetting = asyncio.ensure_future(session.reset())
    while not (path.exists() and path.read_text()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    resetting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resetting
    await session.close()
    async with asyncio.timeout(30):
        while lives(int(path.read_text())):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_hung_shared_server_is_replaced_and_a_slow_one_is_not(server: str, monkeypatch: pytest.MonkeyPatch):
    env = McpEnv(server, timeout_s=60.0)

    async def late_call(name: str) -> str:
        return await (await env.connect()).call(name, {}, 0.5)

    async def patient_check(connection: McpConnection, timeout_s: float) -> None:
        await check(connection, 60.0)

    session = await opened(env)
    first = (await call(session, "count")).split()[1]
    check = McpConnection._check
    with monkeypatch.context() as patched:
        patched.setattr(McpConnection, "_check", patient_check)  # on a busy machine a server that works is slow, too
        assert await late_call("wait") == "error: wait took longer than 0.5 s"
        assert (await call(session, "count")).split()[:2] == ["2", first]
    os.kill(int(first), signal.SIGSTOP)
    assert await late_call("count") == "error: count took longer than 0.5 s"
    other = await opened(env)
    assert not lives(int(first)), "its successor may need its ports and locks"
    assert (await call(other, "count")).split()[0] == "1"
    number, second = (await call(session, "count")).split()[:2]
    assert number == "2", "the episode goes on, with the same new server"
    assert second != first
    await env._shared[0].close()


async def test_arguments_that_cannot_be_sent_are_told_and_end_no_connection(server: str):
    env = McpEnv(server, timeout_s=60.0)
    first, second = await opened(env), await opened(env)
    assert (await call(first, "count")).split()[0] == "1"
    assert (await call(first, "add", a="\ud800", b=1)).startswith("error: the arguments of add cannot be sent: ")
    nested = json.loads("[" * 300 + "]" * 300)
    assert (await call(first, "add", a=nested, b=1)).startswith("error: the arguments of add cannot be sent: ")
    assert (await call(second, "count")).split()[0] == "2", "both episodes still have the same server"
    await env._shared[0].close()


async def test_an_error_of_a_tool_is_recorded_as_one(server: str):
    env = McpEnv(server, timeout_s=60.0)
    wrong = ToolCall(id="c", name="add", arguments='{"a": "x"}')
    step = await (await opened(env)).step("", truncated=False, calls=[wrong])
    assert step.calls[0].error == step.messages[0]["content"]
    assert step.calls[0].error.startswith("error: ")
    await env._shared[0].close()


DEAF = """
import json, sys, time
def reply(result): print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "initialize":
        info = {"name": "deaf", "version": "1"}
        reply({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info})
    elif request["method"] == "tools/list":
        reply({"tools": [{"name": "write", "inputSchema": {"type": "object"}}]})
        time.sleep(1000)
    elif "id" in request:
        error = {"code": -32601, "message": "unknown"}
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
"""


async def test_calls_to_a_server_that_reads_nothing_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.setattr("mcp.shared.jsonrpc_dispatcher._ABANDON_WRITE_TIMEOUT", 0.1)
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    command = shlex.join([sys.executable, str(tmp_path / "deaf.py")])
    session = await opened(McpEnv(command, per="session", timeout_s=0.5))
    async with asyncio.timeout(60):
        # More than a pipe holds: the second request cannot be written.
        for _ in range(2):
            assert await call(session, "write", text="x" * (1 << 20)) == "error: write took longer than 0.5 s"
    await session.close()


class Legacy:
    """A server of the protocol with sessions, over HTTP, which can forget its session as one that started again."""

    def __init__(self) -> None:
        self.session = "1"

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        body = b""
        while (event := await receive()).get("more_body") or event.get("body"):
            body += event["body"]
            if not event.get("more_body"):
                break
        request = json.loads(body or "{}")
        session = dict(scope["headers"]).get(b"mcp-session-id", b"").decode()
        status, answer = self.answer(request, session)
        headers = [(b"content-type", b"application/json")]
        headers += [(b"mcp-session-id", self.session.encode())] * (request.get("method") == "initialize")
        await send({"type": "http.response.start", "status": status, "headers": headers})
        text = json.dumps({"jsonrpc": "2.0", "id": request.get("id"), **answer}) if answer else ""
        await send({"type": "http.response.body", "body": text.encode()})

    def answer(self, request: dict[str, Any], session: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer to a request."""
        method = request.get("method", "")
        if method == "initialize":
            info = {"name": "legacy", "version": "1"}
            return 200, {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}}
        if "id" not in request:
            return 202 if method else 405, {}
        if method not in ("tools/list", "tools/call"):
            return 200, {"error": {"code": -32601, "message": "unknown"}}
        if session != self.session:
            return 404, {}
        if method == "tools/list":
            number = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
            tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("add", "busy", "broken")]
            return 200, {"result": {"tools": [*tools, {**tools[0], "name": "typed", "outputSchema": number}]}}
        content = [{"type": "text", "text": "5"}]
        return 200, {
            "add": {"result": {"content": content}},
            "busy": {"error": {"code": -32000, "message": "too many requests"}},
            "broken": {"result": {"content": 5}},
            "typed": {"result": {"content": content, "structuredContent": {"sum": "five"}}},
        }[request["params"]["name"]]


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        yield f"http://me:secret@127.0.0.1:{listening.getsockname()[1]}/mcp"
    finally:
        server.should_exit = True
        await running


async def test_errors_of_a_tool_are_text_and_a_session_that_the_server_forgot_is_replaced():
    legacy = Legacy()
    async with serving(legacy) as url:
        env = McpEnv(url, timeout_s=60.0)
        session = await opened(env)
        assert await call(session, "add") == "5"
        assert await call(session, "busy") == "error: too many requests"
        for name in ("broken", "typed"):
            assert (await call(session, name)).startswith(f"error: {name} returned an invalid result: ")
        assert await call(session, "add") == "5"
        first = env._shared[0]
        legacy.session = "2"
        with pytest.raises(ReplicaError, match="died during a call of add") as caught:
            await call(session, "add")
        assert "secret" not in str(caught.value)
        assert await call(await opened(env), "add") == "5"
        assert env._shared[0] is not first
        await env._shared[0].close()


async def test_a_server_over_http_is_waited_for_and_may_come_back(server: str):
    port = unused_port()
    env = McpEnv(f"http://127.0.0.1:{port}/mcp", timeout_s=60)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([*server.split(), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    process = start()
    try:
        session = await opened(env)
        assert await call(session, "add", a=2, b=3) == "5"
        process.kill()
        process.wait()
        with pytest.raises(ReplicaError):
            await call(session, "add", a=2, b=3)
        process = start()
        assert await call(await opened(env), "add", a=2, b=3) == "5"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mcp:/nowhere/server", "does not start: "),
        ("mcp:http://127.0.0.1:1/mcp,start_s=1", "not ready in 1 s"),
        ('mcp:SERVER,tools=["nope"]', "has no tool nope"),
    ],
)
async def test_a_server_that_does_not_start_says_so(server: str, text: str, message: str):
    env = build_environment(text.replace("SERVER", server))
    with pytest.raises(ForgeError, match=message):
        await opened(env)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["mcp", "mcp:,max_turns=3", "mcp:x,per=run", "mcp:x,max_turns=0", "mcp:x,nonsense=1"])
def test_a_wrong_flag_is_refused(text: str):
    with pytest.raises(ConfigError):
        build_environment(text)


def test_a_server_dies_with_the_process_that_started_it(server: str, tmp_path: Path):
    code = f"""
import asyncio, os, signal
from forge_rl.worlds.mcp import McpEnv
from forge_rl.types import Task
async def main():
    session = McpEnv({server!r})(Task(id="1", source="s", messages=({{"role": "user", "content": "Hi"}},)))
    await session.reset()
    print((await session._connection.call("count", {{}}, 60.0)).split()[1], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid = int(done.stdout)
    with pytest.raises(psutil.NoSuchProcess):  # noqa: PT012
        psutil.Process(pid).wait(30)
        psutil.Process(pid)
