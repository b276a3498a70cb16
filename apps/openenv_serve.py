"""Serve one of forge_rl's worlds to OpenEnv's clients.

python -m apps.openenv_serve tools --port 8000
python -m apps.openenv_serve mine.py:World --tasks chain_sum

An action is {"message": TEXT} with the model's text, a tool call {"type": "call_tool", "tool_name": NAME, "arguments":
{...}}, or {"type": "list_tools"}. `reset(seed=N)` begins the task of that seed.

Clients need a key, from the file --api-key-file or, by default, generated and kept in the folder --out. OpenEnv's own
clients take it in their URL, ws://forge:KEY@HOST:PORT; others may send it as `Authorization: Bearer KEY`, as recipes do
with --env openenv:ws://HOST:PORT,api_key_env=OPENENV_API_KEY.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import shlex
import socket as sockets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from forge_rl.data.data_config import DataConfig
from forge_rl.data.mixture import Mixture
from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import Env, EnvFactory, close_env, make_env_beside, reset_env, step_env
from forge_rl.errors import CheckpointError, ConfigError, check_flags
from forge_rl.gateway.keys import kept_key, read_key
from forge_rl.rewards.verifiers import REASONING_GYM, ReasoningGymReward
from forge_rl.run.launch import launch
from forge_rl.system.folders import make_private
from forge_rl.types import Message, Task, ToolCall

_TEXT = {"type": "string"}
_ACTION = {
    "title": "ForgeAction",
    "type": "object",
    "properties": {"message": _TEXT | {"description": "Text that the model writes."}, "metadata": {"type": "object"}},
    "required": ["message"],
}
_OBSERVATION = {
    "title": "ForgeObservation",
    "type": "object",
    "properties": {
        "text": _TEXT | {"description": "Text of the new messages."},
        "messages": {"type": "array", "items": {"type": "object"}},
        "tools": {"type": "array", "items": {"type": "object"}},
        "done": {"type": "boolean"},
        "reward": {"type": "number"},
        "metadata": {"type": "object"},
    },
}
_STATE = {"type": "object", "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}}}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Serve one of forge_rl's worlds to OpenEnv's clients."""

    env: Annotated[str, tyro.conf.Positional]
    """The world, as in a recipe's --env."""
    tasks: tuple[str, ...] = ()
    """Tasks for a world without its own, as in a recipe's --tasks: files, folders, reasoning-gym data sets."""
    data: DataConfig = field(default_factory=DataConfig)
    verifier: ReasoningGymReward = field(default_factory=ReasoningGymReward)
    """Scores the last message of a reasoning-gym task's episode if the world returns no reward."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_key_file: Path | None = None
    """File with the clients' key, which no other user may have access to (chmod 600). By default a key is generated and
    kept in the file api_key in the folder --out."""
    out: Path = Path("runs/openenv")
    """Folder for the generated key."""
    max_sessions: int = 64
    """Maximum concurrent sessions; more are refused with OpenEnv's CAPACITY_REACHED."""

    def __post_init__(self) -> None:
        check_flags(self, "--", minimum={"max_sessions": 1, "port": 0}, maximum={"port": 65535})


class World:
    """The served world and its tasks, shared by all sessions."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.factory: EnvFactory = build_environment(config.env)
        if not callable(self.factory):
            raise ConfigError(f"the environment {config.env} runs whole episodes itself", hint="use one with steps")
        self._mixture = self._tasks(0)
        # Resets draw in threads, and neither a mixture nor its sources may be used by two at once.
        self._drawing = threading.Lock()
        self.sessions = 0

    def task(self, seed: int | None) -> Task:
        """Return the first task of a seed, or the next task without one."""
        if seed is not None:
            return _drawn(self._tasks(seed))
        with self._drawing:
            return _drawn(self._mixture)

    def _tasks(self, seed: int) -> Mixture:
        if self.config.tasks:
            return self.config.data.build(self.config.tasks, seed=seed)
        return Mixture(sources_of(self.factory, seed))


def _drawn(mixture: Mixture) -> Task:
    return mixture.draw_from(mixture.source_order(1)[0])


class Session:
    """One client's session, with its own environment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._env: Env | None = None
        self._task: Task | None = None
        self._tools: tuple[Mapping[str, object], ...] = ()
        self._episode = ""
        self._steps = 0
        self._done = True
        self._rewarded = False

    async def answer(self, message: Mapping[str, Any]) -> dict[str, object]:
        """Answer one message.

        Raises:
            ValueError: the message is not part of the protocol, or out of order.
        """
        data = message.get("data") or {}
        match message.get("type"):
            case "reset":
                return {"type": "observation", "data": await self._reset(data)}
            case "step":
                return {"type": "observation", "data": await self._step(data)}
            case "state":
                return {"type": "state", "data": {"episode_id": self._episode, "step_count": self._steps}}
        raise ValueError(f"unknown message type {message.get('type')!r}")

    async def close(self) -> None:
        """End the episode."""
        env, self._env = self._env, None
        await close_env(env)

    async def _reset(self, data: Mapping[str, Any]) -> dict[str, object]:
        await self.close()
        seed = data.get("seed")
        task = self._task = await asyncio.to_thread(self._world.task, seed if isinstance(seed, int) else None)
        self._env = await make_env_beside(self._world.factory, task)
        self._episode, self._steps, self._done = str(data.get("episode_id") or task.id), 0, False
        self._rewarded = False
        begun = await reset_env(self._env)
        self._tools = begun.tools or task.tools
        return _observation(begun.messages, tools=self._tools, metadata={"task": task.id, "source": task.source})

    async def _step(self, data: Mapping[str, Any]) -> dict[str, object]:
        if data.get("type") == "list_tools":
            # Tools of a task's row may leave out what OpenAI's API lets them leave out.
            functions: list[Any] = [tool["function"] for tool in self._tools]
            tool_list = [
                {
                    "name": function["name"],
                    "description": function.get("description", ""),
                    "input_schema": function.get("parameters", {"type": "object", "properties": {}}),
                }
                for function in functions
            ]
            return {"observation": {"tools": tool_list, "metadata": {}}, "reward": None, "done": self._done}
        if self._env is None or self._done:
            raise ValueError("the episode is over; reset begins another one")
        text, calls = str(data.get("message", "")), tuple[ToolCall, ...]()
        # A call of a tool needs no message; any other action does.
        if "tool_name" in data:
            arguments = json.dumps(data.get("arguments") or {})
            calls = (ToolCall(id=f"call-{self._steps}", name=str(data["tool_name"]), arguments=arguments),)
        elif "message" not in data:
            raise ValueError(f"an action needs the field `message`; it has {', '.join(data) or 'no fields'}")
        step = await step_env(self._env, text, parsed=(text, calls))
        self._steps += 1
        self._done = step.done
        self._rewarded |= step.reward is not None
        reward = step.reward
        # Reasoning-gym tasks bring their verifier, which scores if the world never gave a reward.
        if step.done and not self._rewarded and self._task is not None and self._task.verifier == REASONING_GYM:
            answer = text if step.output is None else step.output
            reward = (await self._world.config.verifier(self._task, answer)).total
        messages = step.messages or step.history or ()
        return _observation(messages, reward=reward, done=step.done, metadata={"parts": dict(step.parts)})


def _observation(
    messages: tuple[Message, ...],
    *,
    metadata: Mapping[str, object],
    tools: tuple[Mapping[str, object], ...] = (),
    reward: float | None = None,
    done: bool = False,
) -> dict[str, object]:
    text = "\n\n".join(str(message.get("content") or "") for message in messages)
    observation = {
        "text": text,
        "messages": [dict(message) for message in messages],
        "tools": [dict(tool) for tool in tools],
    }
    return {"observation": observation | {"metadata": metadata}, "reward": reward, "done": done, "metadata": metadata}


def app_of(world: World, key: str) -> Any:
    """Return the ASGI app: OpenEnv's WebSocket, and the paths that its clients request first.

    Args:
        key: key required of all requests except to /health.
    """

    async def say(socket: WebSocket, code: str, message: str) -> None:
        await socket.send_text(json.dumps({"type": "error", "data": {"message": message, "code": code}}))

    async def session(socket: WebSocket) -> None:
        # A web page in this user's browser has an origin; OpenEnv's clients send none.
        if "origin" in socket.headers or not _has_key(socket.headers, key):
            await socket.close()
            return
        # Accepted even if all sessions are in use, as the refusal is a message of the protocol.
        await socket.accept()
        if world.sessions >= world.config.max_sessions:
            await say(socket, "CAPACITY_REACHED", f"all {world.config.max_sessions} sessions are in use")
            await socket.close()
            return
        world.sessions += 1
        client_session = Session(world)
        try:
            while True:
                try:
                    message = json.loads(await socket.receive_text())
                    if message["type"] == "close":
                        break
                    await socket.send_text(json.dumps(await client_session.answer(message), default=str))
                except (json.JSONDecodeError, TypeError, KeyError) as error:
                    await say(socket, "INVALID_JSON", f"{type(error).__name__}: {error}")
                except WebSocketDisconnect:
                    break
                except Exception as error:  # a world's error, reported to its client
                    await say(socket, "EXECUTION_ERROR", f"{type(error).__name__}: {error}")
        finally:
            world.sessions -= 1
            await client_session.close()
            with contextlib.suppress(RuntimeError):  # already closed by the client
                await socket.close()

    def json_endpoint(path: str, value: object) -> Any:
        async def answer(request: Request) -> JSONResponse:
            if path != "/health" and not _has_key(request.headers, key):
                return JSONResponse({"error": "missing or wrong key"}, 401, {"www-authenticate": "Basic"})
            return JSONResponse(value)

        return answer

    name = world.config.env
    schema = {"action": _ACTION, "observation": _OBSERVATION, "state": _STATE}
    routes = {
        "/health": {"status": "healthy"},
        "/schema": schema,
        "/metadata": {"name": name, "description": f"the world {name} of forge_rl", "version": "1"},
    }
    return Starlette(
        routes=[
            *(Route(path, json_endpoint(path, value)) for path, value in routes.items()),
            WebSocketRoute("/ws", session),
        ]
    )


def _has_key(headers: Headers, key: str) -> bool:
    """Return whether a request carries the key: as Bearer, as the Basic password, as from URLs, or as x-api-key."""
    kind, _, credential = headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            credential = base64.b64decode(credential).decode(errors="replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif kind.lower() != "bearer":
        credential = headers.get("x-api-key", "")
    # Compares in constant time, so that response times reveal nothing of the key.
    return hmac.compare_digest(credential.strip().encode(errors="replace"), key.encode())


def key_of(config: Config) -> tuple[str, Path]:
    """Read or generate the key; return it and its file.

    Raises:
        ConfigError: the key file is unreadable or unsafe, or holds no valid key.
    """
    if config.api_key_file is not None:
        return read_key(config.api_key_file), config.api_key_file
    make_private(config.out, CheckpointError)
    return kept_key(config.out / "api_key"), config.out / "api_key"


async def main(config: Config) -> None:
    """Serve until a signal."""
    key, file = key_of(config)
    world = await asyncio.to_thread(World, config)

    try:
        # Opened here and not by uvicorn, so that a port in use is an error with a hint, and the chosen port can be
        # printed.
        listening = sockets.create_server((config.host, config.port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}", hint="set another --port") from None
    listening.setsockopt(sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1)  # accepted sockets inherit it
    server = uvicorn.Server(uvicorn.Config(app_of(world, key), log_level="warning", lifespan="off"))
    port, shell_key = listening.getsockname()[1], f"$(cat {shlex.quote(str(file.resolve()))})"
    print(
        f"serving {config.env} to OpenEnv's clients at ws://{config.host}:{port}\n"
        f'the URL with the key is "ws://forge:{shell_key}@{config.host}:{port}"\n'
        f"a recipe: OPENENV_API_KEY={shell_key} python -m recipes.grpo "
        f"--env openenv:ws://{config.host}:{port},api_key_env=OPENENV_API_KEY\nCtrl-C stops it",
        flush=True,
    )
    await server.serve(sockets=[listening])


if __name__ == "__main__":
    launch(Config, main)
