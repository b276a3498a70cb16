"""Worlds of ours served over OpenEnv's protocol, and the real package on either side."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import websockets

from apps.openenv_serve import Config, Session, World, app_of, key_of
from benchmarks.ports import unused_port
from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.system.interpreters import interpreter
from forge_rl.types import Task
from forge_rl.worlds.openenv import OpenEnvFactory
from tests.test_openenv import TASK, called

PEERS = Path(__file__).parent / "peers"


@asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[str]:
    world = World(Config(**config))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app_of(world, "the-key"), log_level="warning", lifespan="off"))
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        yield f"ws://forge:the-key@127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


async def test_a_world_is_played_over_the_protocol_in_many_sessions():
    async def play(url: str, seed: int) -> tuple[str, float | None, bool]:
        session = OpenEnvFactory(url, connect_s=30)(Task(id="1", source="s", messages=(), truth={"seed": seed}))
        shown = await session.reset()
        step = await session.step("5", truncated=False, calls=())
        await session.close()
        return str(shown.messages[-1]["content"]), step.reward, step.done

    async def check() -> None:
        tasks = ("chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1",)
        async with serving(env="tools", tasks=tasks, max_sessions=2) as url:
            played = await asyncio.gather(*(play(url, seed) for seed in (1, 2, 3, 1)))
            assert played[0] == played[3]
            assert len({text for text, _, _ in played}) > 1
            assert all(done and reward is not None for _, reward, done in played)
            with pytest.raises(websockets.InvalidStatus):  # a web page of the user's browser
                await websockets.connect(f"{url}/ws", origin="https://evil.example", proxy=None)  # type: ignore[arg-type]

    await check()


class Look:
    """A world whose tool has a name and nothing else."""

    def __init__(self, task: Task) -> None:
        pass

    async def reset(self) -> Observation:
        return Observation(messages=(), tools=({"type": "function", "function": {"name": "look"}},))

    async def step(self, completion: str) -> Step:
        return Step(done=True, reward=1.0)


async def test_tools_are_listed_though_their_schemas_leave_fields_out() -> None:
    session = Session(World(Config(env="tests.test_openenv_serve:Look", tasks=("chain_sum",))))
    await session.answer({"type": "reset", "data": {"seed": 1}})
    answer: Any = await session.answer({"type": "step", "data": {"type": "list_tools"}})
    [tool] = answer["data"]["observation"]["tools"]
    assert tool == {"name": "look", "description": "", "input_schema": {"type": "object", "properties": {}}}
    await session.close()


def test_sessions_draw_from_the_shared_tasks_one_at_a_time() -> None:
    world, drawing = World(Config(env="tools", tasks=("chain_sum",))), threading.Lock()
    draw = world._mixture.draw_from

    def drawn(source: str) -> Task:
        assert drawing.acquire(blocking=False), "another session is drawing"
        time.sleep(0.01)  # lets the others run
        task = draw(source)
        drawing.release()
        return task

    world._mixture.draw_from = drawn  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as threads:
        tasks = list(threads.map(world.task, [None] * 8))
    assert len({task.id for task in tasks}) == 8


async def test_a_world_of_ours_is_for_those_who_have_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made, file = key_of(Config(env="tools", out=tmp_path / "out"))
    assert (made, file.stat().st_mode & 0o777) == (file.read_text().strip(), 0o600)
    assert len(made) > 30
    (tmp_path / "open").write_text("k")
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users"):
        key_of(Config(env="tools", api_key_file=tmp_path / "open"))

    async with serving(env="tools", tasks=("chain_sum",)) as url, httpx.AsyncClient(trust_env=False) as client:
        bare = url.replace("forge:the-key@", "")
        basic = {"Authorization": "Basic \xff"}
        for wrong in ({}, {"Authorization": "Bearer the-kez"}, basic, {"x-api-key": "\xe9"}):
            with pytest.raises(websockets.InvalidStatus):
                await websockets.connect(f"{bare}/ws", proxy=None, additional_headers=wrong)
        for right in ({"Authorization": "Bearer the-key"}, {"x-api-key": "the-key"}):
            async with websockets.connect(f"{bare}/ws", proxy=None, additional_headers=right):
                pass
        plain = bare.replace("ws:", "http:")
        assert (await client.get(f"{plain}/health")).status_code == 200
        assert (await client.get(f"{plain}/schema")).status_code == 401
        with pytest.raises(ForgeError) as caught:
            await OpenEnvFactory(url.replace("the-key", "another-key"), connect_s=0.1)(TASK).reset()
        assert "another-key" not in str(caught.value)

        monkeypatch.setenv("A_WORLDS_KEY", "the-key")  # no flag, and so no list of processes, shows it
        named = OpenEnvFactory(bare, api_key_env="A_WORLDS_KEY", connect_s=0.1)
        assert "the-key" not in repr(named)
        session = named(TASK)
        assert (await session.reset()).messages
        await session.close()
        monkeypatch.delenv("A_WORLDS_KEY")
        for wrong in ("A_WORLDS_KEY", "the-key"):
            with pytest.raises(ConfigError, match=r"api_key_env is not the name|A_WORLDS_KEY is not set") as caught:
                OpenEnvFactory(bare, api_key_env=wrong)
            assert "the-key" not in str(caught.value)


@pytest.fixture(scope="session")
def openenv_python() -> str:
    """An interpreter with the package: $FORGE_RL_OPENENV_PYTHON, or one that uv makes."""
    if python := os.environ.get("FORGE_RL_OPENENV_PYTHON"):
        return python
    return str(interpreter(["openenv>=0.10,<0.11"]))


@contextmanager
def process(*command: str) -> Iterator[str]:
    """Run a server on a free port, PORT in its command."""
    port = str(unused_port())
    started = subprocess.Popen([word.replace("PORT", port) for word in command], cwd=PEERS.parent.parent)
    try:
        yield f"ws://127.0.0.1:{port}"
    finally:
        started.kill()
        started.wait()


@pytest.mark.long
async def test_an_echo_world_of_the_real_package_is_played(openenv_python: str, nothing_left: None):
    async def play(url: str, number: int) -> object:
        session = OpenEnvFactory(url, connect_s=120)(TASK)
        await session.reset()
        step = await session.step("", truncated=False, calls=called("echo_message", f'{{"message": "{number}"}}'))
        await session.close()
        return step.messages[0]["content"]

    async def check(url: str) -> None:
        assert await asyncio.gather(*(play(url, number) for number in range(12))) == [str(each) for each in range(12)]

    with process(openenv_python, "-E", str(PEERS / "openenv_echo.py"), "PORT") as url:
        await check(url)


@pytest.mark.long
def test_the_real_packages_client_plays_a_world_of_ours(openenv_python: str, tmp_path: Path, nothing_left: None):
    key, file = key_of(Config(env="tools", out=tmp_path / "out"))
    serve = (sys.executable, "-m", "apps.openenv_serve", "tools", "--tasks", "chain_sum", "--api-key-file", str(file))
    with process(*serve, "--port", "PORT") as bare:
        url = bare.replace("//", f"//forge:{key}@")
        asyncio.run(OpenEnvFactory(url, connect_s=120)(TASK).reset())  # it has started
        command = [openenv_python, "-E", str(PEERS / "openenv_client.py"), url]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told.pop("question").endswith("Answer with a number.")
    assert "the episode is over" in told.pop("refused")
    assert told == {
        "same": True,
        "tools": ["calculator"],
        "called": ["42", False],
        "last": [0.0, True],
        "steps": 2,
    }
