"""Worlds behind OpenEnv's protocol, with faults staged by a peer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import websockets
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from forge_rl.envs.env_flag import build_environment
from forge_rl.envs.protocol import Step, reset_env, step_env
from forge_rl.errors import ConfigError, ForgeError, ReplicaError
from forge_rl.types import Task, ToolCall
from forge_rl.worlds.openenv import OpenEnvFactory

TASK = Task(id="1", source="s", messages=({"role": "user", "content": "Echo it."},), truth={"seed": 7})
TEXT = {"properties": {"metadata": {"type": "object"}, "code": {"type": "string"}}, "required": ["code"]}
MOVE = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
TOOLS = {"properties": {"type": {}, "tool_name": {"type": "string"}, "arguments": {}}, "required": ["tool_name"]}


@dataclass
class Peer:
    """A server whose answers are given: by message type, or for its first connections that it is full."""

    action: dict[str, Any]
    answers: list[dict[str, Any]]
    full: int = 0
    """Number of connections that it refuses at first."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    schema_statuses: list[int] = field(default_factory=list)
    """Statuses of the first requests of its schema, which fail."""

    async def talk(self, connection: ServerConnection) -> None:
        if self.full:
            self.full -= 1
            await connection.send(
                json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            )
            return
        async for text in connection:
            self.asked.append(json.loads(text))
            answer = self.answers.pop(0)
            if answer.get("type") == "gone":
                return
            await connection.send(json.dumps({"type": "observation", **answer}))

    def schema(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        if self.schema_statuses:
            return Response(self.schema_statuses.pop(0), "Error", Headers(), b"")
        return Response(200, "OK", Headers(), json.dumps({"action": self.action}).encode())


@asynccontextmanager
async def running(peer: Peer) -> AsyncIterator[Peer]:
    async with serve(peer.talk, "127.0.0.1", 0, process_request=peer.schema) as server:
        peer.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield peer


def seen(done: bool = False, reward: float | None = None, **observation: object) -> dict[str, Any]:
    return {"data": {"observation": observation, "reward": reward, "done": done}}


def called(name: str, arguments: str) -> list[ToolCall]:
    return [ToolCall(id="c", name=name, arguments=arguments)]


async def test_a_completion_fills_an_actions_text_and_turns_have_rewards():
    answers = [seen(text="Begin."), seen(text="more", reward=0.5), seen(done=True, reward=1, text="end")]
    async with running(Peer(TEXT, answers, full=2)) as peer:
        session = OpenEnvFactory(peer.url, connect_s=30)(TASK)
        shown = await session.reset()
        assert [message["content"] for message in shown.messages] == ["Echo it.\n\nBegin."]
        step = await session.step("print(1)", truncated=False, calls=())
        assert (step.done, step.reward, step.messages[0]["content"]) == (False, 0.5, "more")
        last = await session.step("print(2)", truncated=False, calls=())
        assert (last.done, last.reward, last.messages) == (True, 1.0, ())
        await session.close()
    assert peer.asked == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"code": "print(1)"}},
        {"type": "step", "data": {"code": "print(2)"}},
    ]


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        ({"output": "hello", "metadata": {"step": 1}, "done": False, "error": ""}, "hello"),
        ({"instruction": "Fix it.", "output": "", "info": {}}, '{"instruction": "Fix it."}'),
        ({"message": "Executed", "output": "2 files", "success": True}, "Executed\noutput: 2 files\nsuccess: true"),
        ({"text": "<page>", "goal": "Click.", "error": "no element 7"}, "<page>\ngoal: Click.\nerror: no element 7"),
        ({"prompt": "Guess.", "messages": [{"content": "Too high."}]}, 'Guess.\nmessages: [{"content": "Too high."}]'),
    ],
)
def test_all_that_an_observation_says_is_shown(observation: dict[str, object], shown: str):
    session = OpenEnvFactory("ws://127.0.0.1:1")(TASK)
    assert session._shown({"observation": observation}) == shown


async def test_an_action_of_several_fields_is_json_and_what_does_not_fit_is_told():
    refused = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid", "errors": ["y is missing"]}}

    async with running(Peer(MOVE, [seen(board="...", turn=1), refused, seen(board="x..", turn=2)])) as peer:
        session = OpenEnvFactory(peer.url, max_turns=4)(Task(id="1", source="s", messages=()))
        shown = await session.reset()
        board, _, form = str(shown.messages[-1]["content"]).partition("\n\n")
        assert board == '{"board": "...", "turn": 1}'
        assert form == f"Answer with an action: a JSON object of this schema. {json.dumps(MOVE)}"
        told: list[Step] = []
        for text in ("left", '{"x": 1}', 'I go {"x": 1, "y": 2}.', "{x}"):
            told.append(await session.step(text, truncated=False, calls=()))
        assert [str(step.messages[0]["content"]) if step.messages else "" for step in told] == [
            "error: write the action as a JSON object",
            "error: Invalid: ['y is missing']",
            '{"board": "x..", "turn": 2}',
            "",
        ]
        assert [step.done for step in told] == [False, False, False, True]
        await session.close()


async def test_server_tools_reach_the_model_and_no_call_ends_the_episode():
    listed = seen(tools=[{"name": "echo", "description": "Echo.", "input_schema": {"type": "object"}}])
    result = {"content": [{"type": "text", "text": "Hi"}], "data": "Hi"}
    error = seen(tool_name="nope", error={"error_type": "tool_not_found", "message": "Unknown tool"})

    async with running(Peer(TOOLS, [seen(), listed, seen(tool_name="echo", result=result), error])) as peer:
        session = OpenEnvFactory(peer.url)(TASK)
        shown = await session.reset()
        assert [tool["function"]["name"] for tool in shown.tools] == ["echo"]
        texts = [
            (await session.step("", truncated=False, calls=called(*one))).messages[0]["content"]
            for one in (("echo", '{"message": "Hi"}'), ("nope", "{}"), ("echo", "{"), ("echo", "[]"))
        ]
        assert texts[:2] == ["Hi", "error: Unknown tool"]
        assert all(str(text).startswith("error: ") for text in texts[2:])
        assert (await session.step("Hi", truncated=False, calls=())).done
        await session.close()


async def test_calls_are_not_sent_once_others_have_taken_the_time_of_a_reply():
    class Slow(Peer):
        async def talk(self, connection: ServerConnection) -> None:
            async for text in connection:
                self.asked.append(json.loads(text))
                await asyncio.sleep(0.3 if len(self.asked) > 2 else 0)
                await connection.send(json.dumps({"type": "observation", **self.answers.pop(0)}))

    async with running(Slow(TOOLS, [seen(), seen(), *[seen(result={"content": []})] * 9])) as peer:
        session = OpenEnvFactory(peer.url)(TASK)
        await session.reset()
        session._factory = replace(session._factory, deadline_s=0.5)
        step = await session.step("", truncated=False, calls=called("echo", "{}") * 3)
        await session.close()
    assert [message["content"] for message in step.messages] == [
        "",
        "",
        "error: not run, as the calls before it took 0.5 s",
    ]
    assert not step.done
    assert len(peer.asked) == 4


class Busy(Peer):
    async def talk(self, connection: ServerConnection) -> None:
        async for text in connection:
            self.asked.append(json.loads(text))
            if len(self.asked) > 1:
                time.sleep(0.5)  # noqa: ASYNC251 -- as a step of any session may hold up the server's loop
            await connection.send(json.dumps({"type": "observation", **self.answers.pop(0)}))


async def test_a_server_that_is_too_busy_to_answer_pings_loses_no_session(monkeypatch: pytest.MonkeyPatch):
    connect, ready, ended = websockets.connect, threading.Event(), threading.Event()
    peer = Busy(TEXT, [seen(text="Begin."), seen(text="more")])

    async def hold() -> None:
        async with running(peer):
            ready.set()
            await asyncio.to_thread(ended.wait)

    def impatient(address: str, **settings: Any) -> Any:
        return connect(address, **{"ping_interval": 0.05, "ping_timeout": 0.05, **settings})

    monkeypatch.setattr(websockets, "connect", impatient)
    with ThreadPoolExecutor(1) as threads:
        serving = threads.submit(lambda: asyncio.run(hold()))
        try:
            await asyncio.to_thread(ready.wait)
            session = OpenEnvFactory(peer.url)(TASK)
            await session.reset()
            assert (await session.step("x", truncated=False, calls=())).messages[0]["content"] == "more"
            await session.close()
        finally:
            ended.set()
        serving.result()


async def test_lone_surrogates_are_refused_in_actions_and_replaced_in_replies():
    answers = [seen(board="\ud800"), seen(board="a\udfffb", turn=1)]
    async with running(Peer(MOVE, answers)) as peer:
        session = OpenEnvFactory(peer.url)(TASK)
        observation = await reset_env(session)
        assert '{"board": "?"}' in str(observation.messages[-1]["content"])
        refusal = await step_env(session, r'{"x": "\ud800"}')
        assert str(refusal.messages[0]["content"]).startswith("error: the action is not JSON")
        step = await step_env(session, '{"x": 1}')
        assert step.messages[0]["content"] == '{"board": "a?b", "turn": 1}'
        await session.close()
    assert [request["type"] for request in peer.asked] == ["reset", "step"]


@pytest.mark.parametrize("late", [False, True])
async def test_a_server_that_goes_away_in_an_episode_is_infrastructure(late: bool):
    async with running(Peer(TEXT, [seen(text="Begin."), {"type": "gone"}])) as peer:
        session = OpenEnvFactory(peer.url, deadline_s=0.2 if late else 60)(TASK)
        await session.reset()
        if late:
            peer.answers[:] = []
            session._socket.recv = asyncio.Event().wait
        with pytest.raises(ReplicaError, match="no answer" if late else "connection was lost in `step`"):
            await session.step("x", truncated=False, calls=())
        await session.close()


@pytest.mark.parametrize("text", ["no JSON", "[" * 100_000, "[]", '{"type": "observation"}', '{"data": 1}'])
async def test_an_answer_that_is_no_object_is_told(text: str):
    async def answer() -> str:
        return text

    async with running(Peer(TEXT, [seen(text="Begin.")])) as peer:
        session = OpenEnvFactory(peer.url)(TASK)
        await session.reset()
        session._socket.recv = answer
        with pytest.raises(ForgeError, match="answered `step` with no JSON object that has an object `data`"):
            await session.step("x", truncated=False, calls=())
        await session.close()


async def test_a_server_that_is_full_not_there_or_no_such_server_is_told():
    starting = [502, 503, 503]
    async with running(Peer(TEXT, [seen(text="Begin.")], schema_statuses=starting)) as peer:
        session = OpenEnvFactory(peer.url)(TASK)
        await session.reset()
        await session.close()
        assert not starting
        starting += [500, 503]
        with pytest.raises(ForgeError, match="returned no action schema: HTTPStatusError"):
            await OpenEnvFactory(peer.url)(TASK).reset()
        assert starting == [503]
        starting += [503] * 99
        with pytest.raises(ForgeError, match="returned no action schema: TransportError: status 503"):
            await OpenEnvFactory(peer.url, connect_s=0.3)(TASK).reset()
    async with running(Peer(TEXT, [], full=99)) as peer:
        with pytest.raises(ForgeError, match="full"):
            await OpenEnvFactory(peer.url, connect_s=0.5)(TASK).reset()
    with pytest.raises(ForgeError, match="returned no action schema: ConnectError"):
        await OpenEnvFactory("ws://127.0.0.1:1", connect_s=0.1)(TASK).reset()
    for text in ("openenv:localhost", "openenv", "openenv:ws://x,max_turns=0"):
        with pytest.raises(ConfigError):
            build_environment(text)
