"""Tools of MCP servers that are made with the mcp package: over stdio and HTTP, shared and of one episode, lost."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

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
