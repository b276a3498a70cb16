"""Environments of an OpenEnv server, over its WebSocket: one connection is one episode's session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.task_list import TaskList, seeded
from forge_rl.envs.tool import read_arguments, tool_schema
from forge_rl.envs.tools import not_run
from forge_rl.errors import ConfigError, ForgeError, ReplicaError, check_flags, check_installed
from forge_rl.system.redaction import without_credentials
from forge_rl.system.strict_json import parse_json
from forge_rl.system.variables import api_key
from forge_rl.types import Message, Task, ToolCall

T = TypeVar("T")

_MAX_BYTES = 100 << 20
"""Maximum message size, the same as in OpenEnv's own client."""
_AGAIN_S = (0.2, 5.0)
"""Minimum and maximum delay between connection attempts, in seconds."""
_MAIN_FIELDS = ("text", "prompt", "message", "response", "output", "result")
"""Observation fields that, if text, are shown first and without their name."""
_STEP_FIELDS = ("reward", "done")
"""Observation fields that repeat values sent alongside the observation."""
_HINT = "write --env openenv:ws://HOST:PORT"


@dataclass(frozen=True)
class OpenEnvFactory:
    """Makes episodes in an OpenEnv server's environment, each in a session of its own.

        OpenEnvFactory("ws://127.0.0.1:8000")  # --env openenv:ws://127.0.0.1:8000
        OpenEnvFactory("https://me-my-env.hf.space", action="code", max_turns=4)
        OpenEnvFactory("ws://host:8000", api_key_env="OPENENV_API_KEY")  # a server that requires a key

    The server's action schema determines how the model acts. If an action is a tool call, the model gets the server's
    tools, and a completion without a call ends the episode. If an action has exactly one required text field, the
    completion is that field. Otherwise the completion is the action as JSON, whose schema the model is shown; the reply
    to an invalid one is an error.

    Rewards come from the server, per turn. While the server is full, connecting is retried until a session is free. If
    the server goes away during an episode, that is an infrastructure error, and the episode is retried.
    """

    url: str
    """URL of the server: ws, wss, http or https."""
    action: str = ""
    """Action field that receives the completion; inferred from the schema by default."""
    show: str = ""
    """Observation field shown to the model; by default all that are not empty."""
    prompt: str = ""
    """System message of tasks made from seeds."""
    tasks: int = 1000
    """Number of seeds to train on when no tasks are set."""
    held_out: int = 100
    """Number of additional held-out seeds."""
    max_turns: int = 16
    """Maximum completions per episode."""
    connect_s: float = 120.0
    """Timeout for a connection and a free session."""
    deadline_s: float = 300.0
    """Timeout of one reply of the server. No further call of a completion is sent once its calls took this long."""
    api_key_env: str = ""
    """Environment variable with the server's API key, if it requires one. A key inside the URL of a flag would be
    visible to all users of the machine."""

    def __post_init__(self) -> None:
        check_installed("--env openenv", "websockets", "openenv")
        scheme, _, rest = self.url.partition("://")
        if scheme not in ("ws", "wss", "http", "https") or not rest:
            raise ConfigError(f"the address {self.url!r} is not a URL", hint=_HINT)
        check_flags(self, "--env openenv: ", minimum={"tasks": 1, "held_out": 0, "max_turns": 1})
        api_key("--env openenv", self.api_key_env)

    def __call__(self, task: Task) -> OpenEnvSession:
        """Make the environment of one episode; the server gets the `seed` in the task's truth."""
        return OpenEnvSession(self, task)

    def sources(self, seed: int) -> dict[str, TaskList]:
        """Return a task source of seeds."""
        source = seeded("openenv", tasks=self.tasks, held_out=self.held_out, prompt=self.prompt, seed=seed)
        return {"openenv": source}

    @property
    def address(self) -> str:
        """URL of the server's WebSocket."""
        scheme, _, rest = self.url.rstrip("/").partition("://")
        scheme = {"http": "ws", "https": "wss"}.get(scheme, scheme)
        return f"{scheme}://{rest.removesuffix('/ws')}/ws"

    @property
    def shown_url(self) -> str:
        """URL without credentials, for messages."""
        return without_credentials(self.url)

    @property
    def headers(self) -> dict[str, str]:
        """Request headers: the API key, if there is one."""
        key = api_key("--env openenv", self.api_key_env)
        return {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def schema_url(self) -> str:
        """URL of the server's action schema."""
        scheme, _, rest = self.address.partition("://")
        return f"{'https' if scheme == 'wss' else 'http'}://{rest.removesuffix('/ws')}/schema"


class OpenEnvSession:
    """One episode, in a session of the server."""

    def __init__(self, factory: OpenEnvFactory, task: Task) -> None:
        self._factory = factory
        self._task = task
        self._socket: Any = None
        self._field = ""
        """Action field that receives the completion; "" if the completion is the action as JSON."""
        self._by_tools = False
        self._turns = 0

    async def reset(self) -> Observation:
        """Connect, wait for a free session, and begin the episode.

        Raises:
            ForgeError: the server does not exist, or stayed full for too long.
            ReplicaError: the server went away.
        """
        schema = await self._schema()
        fields = schema.get("properties", {})
        # An action that is a tool call has this field; an option that names another field takes precedence.
        self._by_tools = "tool_name" in fields and not self._factory.action
        self._field = self._factory.action or _text_field(schema)
        if self._factory.action and self._factory.action not in fields:
            raise ForgeError(
                f"an action of {self._factory.shown_url} has no field {self._factory.action!r}",
                hint=f"set action to one of: {', '.join(fields)}",
            )
        seed = self._task.truth.get("seed")
        data = await self._begin({"seed": seed} if isinstance(seed, int) else {})
        tools: Sequence[Mapping[str, object]] = ()
        if self._by_tools:
            # Listing tools is an action too, and comes after the reset that begins the session.
            tool_list = await self._ask("step", {"type": "list_tools"})
            empty_schema = {"type": "object", "properties": {}}
            tools = [
                tool_schema(tool["name"], tool.get("description") or "", tool.get("input_schema") or empty_schema)
                for tool in tool_list["observation"].get("tools", ())
            ]
        text = self._shown(data)
        if not self._by_tools and not self._field:
            form = {name: field for name, field in fields.items() if name != "metadata"}
            required_names = [name for name in schema.get("required", ()) if name in form]
            schema_text = json.dumps({"properties": form, "required": required_names}, ensure_ascii=False)
            text += f"\n\nAnswer with an action: a JSON object of this schema. {schema_text}"
        messages = self._task.messages
        has_question = bool(messages) and messages[-1]["role"] == "user"
        if not (self._by_tools and has_question):  # a tool environment has little to show, and the question is enough
            # Many chat templates require user and assistant messages to alternate.
            text = f"{messages[-1]['content']}\n\n{text}" if has_question else text
            messages = (*messages[: len(messages) - has_question], {"role": "user", "content": text})
        return Observation(messages=messages, tools=tuple(tools))

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        """Take the completion as an action, or run its tool calls one after the other."""
        self._turns += 1
        messages: list[Message] = []
        rewards: list[float] = []
        done = truncated or (self._by_tools and not calls)
        deadline_s, start_time = self._factory.deadline_s, time.monotonic()
        # A truncated completion may lack calls, or a part of one.
        for call in calls if self._by_tools and not truncated else ():
            # The step of an environment has a deadline too, which calls must not exceed together.
            if time.monotonic() - start_time >= deadline_s:
                text, reward = not_run(deadline_s), None
            else:
                text, reward, done = await self._call(call)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})
            rewards += [] if reward is None else [reward]
            if done:
                break
        if not self._by_tools and (completion or not truncated):
            text, reward, done = await self._act(completion)
            messages.append({"role": "user", "content": text})
            rewards += [] if reward is None else [reward]
        done = done or truncated or self._turns == self._factory.max_turns
        # None leaves scoring to the run's reward, for environments without rewards.
        return Step(done=done, messages=() if done else tuple(messages), reward=sum(rewards) if rewards else None)

    async def close(self) -> None:
        """Release the session."""
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def _call(self, call: ToolCall) -> tuple[str, float | None, bool]:
        try:
            _check_text(arguments := read_arguments(call.name, call.arguments))
        except (ValueError, RecursionError) as error:
            return f"error: {error}", None, False
        return await self._do({"type": "call_tool", "tool_name": call.name, "arguments": arguments})

    async def _act(self, completion: str) -> tuple[str, float | None, bool]:
        if self._field:
            return await self._do({self._field: completion})
        # The first to the last brace: models write text or fences around the object.
        begin, end = completion.find("{"), completion.rfind("}")
        try:
            _check_text(action := parse_json(completion[begin : end + 1]) if begin >= 0 else None)
        except (ValueError, RecursionError) as error:
            return f"error: the action is not JSON: {error}", None, False
        if not isinstance(action, dict):
            return "error: write the action as a JSON object", None, False
        return await self._do(action)

    async def _do(self, action: dict[str, object]) -> tuple[str, float | None, bool]:
        """Send an action; return the text for the model, the reward, and whether the episode is done."""
        try:
            data = await self._ask("step", action)
        except _RejectedActionError as error:
            return f"error: {error}", None, False
        reward = data.get("reward")
        return self._shown(data), None if reward is None else float(reward), bool(data.get("done"))

    def _shown(self, data: Mapping[str, Any]) -> str:
        observation = {key: value for key, value in data.get("observation", {}).items() if value is not None}
        # The user's choice replaces all that follows.
        if self._factory.show:
            value = observation.get(self._factory.show, "")
            return value if isinstance(value, str) else json.dumps(value)
        # Shown only if there is nothing else.
        metadata = observation.pop("metadata", None)
        # Replies to tool calls have a form of their own: an error, or a list of content blocks.
        if isinstance(error := observation.get("error"), dict) and "tool_name" in observation:
            return f"error: {error.get('message')}"
        if isinstance(result := observation.get("result"), dict) and isinstance(content := result.get("content"), list):
            return "\n".join(part.get("text") or f"[{part.get('type')}]" for part in content)
        fields = {
            name: value for name, value in observation.items() if value not in ("", [], {}) and name not in _STEP_FIELDS
        }
        main = next((name for name in _MAIN_FIELDS if isinstance(fields.get(name), str)), "")
        if not main:
            return json.dumps(fields or metadata or {}, ensure_ascii=False)
        other_fields = {name: value for name, value in fields.items() if name != main}
        labelled_lines = (
            f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for name, value in other_fields.items()
        )
        return "\n".join([fields[main], *labelled_lines])

    async def _schema(self) -> dict[str, Any]:
        import httpx

        async def ask() -> dict[str, Any]:
            async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
                answer = await client.get(self._factory.schema_url, headers=self._factory.headers)
                # So a proxy answers for a hosted server that is still starting.
                if answer.status_code in (502, 503, 504):
                    raise httpx.TransportError(f"status {answer.status_code}")
                schema: dict[str, Any] = answer.raise_for_status().json()
                return schema

        try:
            schemas = await self._again(ask, (httpx.TransportError,))
            return dict(schemas["action"])
        except (httpx.HTTPError, KeyError, TypeError, ValueError, RecursionError) as error:
            message = without_credentials(str(error))
            raise ForgeError(
                f"{self._factory.shown_url} returned no action schema: {type(error).__name__}: {message}",
                hint=f"is it an OpenEnv server? {_HINT}",
            ) from error

    async def _begin(self, data: dict[str, object]) -> dict[str, Any]:
        """Connect and reset. A server without a free session accepts the connection and refuses in its first reply."""
        import websockets

        async def begin() -> dict[str, Any]:
            self._socket = await websockets.connect(
                self._factory.address,
                max_size=_MAX_BYTES,
                # Pings keep proxies from closing idle sessions. A server may be too busy with another session's step to
                # answer them; `deadline_s` bounds each reply.
                ping_timeout=None,
                proxy=None,
                additional_headers=self._factory.headers,
            )
            try:
                return await self._ask("reset", data)
            except BaseException:
                await self.close()
                raise

        try:
            return await self._again(begin, (OSError, websockets.WebSocketException, _FullError, ReplicaError))
        except (OSError, websockets.WebSocketException, _FullError) as error:
            raise ForgeError(
                f"no session at {self._factory.shown_url} in {self._factory.connect_s:g} s: "
                f"{type(error).__name__}: {error}",
                hint="start the server, or allow it as many sessions as there are concurrent episodes",
            ) from error

    async def _again(self, do: Callable[[], Awaitable[T]], errors: tuple[type[Exception], ...]) -> T:
        """Retry on these errors until `connect_s` has passed."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + self._factory.connect_s, _AGAIN_S[0]
        while True:
            try:
                return await do()
            except errors:
                if loop.time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            # Twice as long each time: many episodes may wait for one full server.
            pause = min(2 * pause, _AGAIN_S[1])

    async def _ask(self, kind: str, data: Mapping[str, object]) -> dict[str, Any]:
        import websockets

        if self._socket is None:
            raise ForgeError("the session is closed", hint="use a new session for each episode")
        try:
            async with asyncio.timeout(self._factory.deadline_s):
                with contextlib.suppress(websockets.ConnectionClosed):  # a full server replies, then closes
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            # Closed, as a late answer would be taken for that of the next request.
            await self.close()
            raise self._gone(f"no answer to `{kind}` in {self._factory.deadline_s:g} s") from None
        except (OSError, websockets.WebSocketException) as error:
            await self.close()
            raise self._gone(f"the connection was lost in `{kind}`: {error}") from error
        except (ValueError, RecursionError):
            answer = None
        is_error = isinstance(answer, dict) and answer.get("type") == "error"
        if not isinstance(answer, dict) or not isinstance(answer.get("data", {} if is_error else None), dict):
            raise ForgeError(
                f"{self._factory.shown_url} answered `{kind}` with no JSON object that has an object `data`",
                hint="fix the environment behind the server",
            )
        if is_error:
            error_data = answer.get("data", {})
            if error_data.get("code") == "CAPACITY_REACHED":
                raise _FullError(error_data.get("message", ""))
            errors = f": {error_data['errors']}" if error_data.get("errors") else ""
            if kind == "step" and error_data.get("code") in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
                raise _RejectedActionError(f"{error_data.get('message')}{errors}")
            raise ForgeError(
                f"{self._factory.shown_url} answered `{kind}` with {error_data.get('code')}: "
                f"{error_data.get('message')}{errors}",
                hint="fix the environment behind the server",
            )
        reply_data: dict[str, Any] = answer["data"]
        return reply_data

    def _gone(self, cause: str) -> ReplicaError:
        return ReplicaError(cause, service=f"openenv at {self._factory.shown_url}", hint="see the server's log")


class _FullError(Exception):
    """The server has no free session."""


class _RejectedActionError(Exception):
    """The environment rejected an action; the model sees the message."""


def _check_text(value: object) -> None:
    """Raise a ValueError if a string of a JSON value has a lone surrogate, at which a server may fail."""
    json.dumps(value, ensure_ascii=False).encode()


def _text_field(schema: Mapping[str, Any]) -> str:
    """Return the only required field of an action if it is text, else ""."""
    fields: Mapping[str, Any] = schema.get("properties", {})
    required_names = [name for name in schema.get("required", ()) if name != "metadata"]
    if len(required_names) == 1 and fields.get(required_names[0], {}).get("type") == "string":
        return str(required_names[0])
    return ""
