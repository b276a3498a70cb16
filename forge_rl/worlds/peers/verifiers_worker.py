"""Runs rollouts of a verifiers environment for `forge_rl.worlds.verifiers`; imports nothing from forge_rl.

python verifiers_worker.py list|serve CONFIG_JSON

Runs under an interpreter with verifiers 0.4. `list` writes one JSON line per task. `serve` reads calls as JSON lines,
each with a base URL and a key of the policy's endpoint, and writes their rewards; see `forge_rl.envs.worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import os
import sys
import threading
import time
import types
from typing import Any, TextIO

import httpx
import verifiers.v1 as vf
from agent_credit import AgentCredit  # next to this script, as is confined_runtime
from confined_runtime import confine
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.clients import EvalClient, EvalClientConfig, ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import server as interception
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

CHAT = "forge_rl_chat"
"""Name of the harness below."""
_GRACE_S = 5.0


class ChatConfig(vf.HarnessConfig):
    """Settings of the chat loop."""


class Chat(vf.Harness[ChatConfig]):
    """The null harness's chat loop, in this process; the null harness starts a new Python for each user turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with contextlib.AsyncExitStack() as stack:
            shared = httpx.AsyncClient(timeout=None)
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=shared)
            await stack.enter_async_context(client)
            tools: list[Any] = []
            dispatch: dict[str, Any] = {}
            servers: dict[str, Any] = {}
            if mcp_urls:
                config = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
                tools, dispatch, servers = await connect_mcp(config, stack, set())
            try:
                while True:
                    kwargs = {"tools": tools} if tools else {}
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **kwargs)
                    message = answer.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    if not message.tool_calls:
                        break
                    for call in message.tool_calls:
                        output = await self._call(call, dispatch, servers)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
            except APIStatusError as error:
                # The task's stop condition also ends the loop this way; the rollout records it.
                if trace.stop_condition is None and not is_context_overflow(error):
                    return ProgramResult(1, "", str(error))
        return ProgramResult(0, "", "")

    async def _call(self, call: Any, dispatch: dict, servers: dict) -> Any:
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except json.JSONDecodeError as error:
            return f"error: invalid JSON in tool arguments ({error})"
        if not isinstance(arguments, dict):
            return "error: tool arguments must be a JSON object"
        if call.function.name not in dispatch:
            return f"error: unknown tool {call.function.name!r}"
        return await call_mcp(servers, dispatch, call.function.name, arguments)


def merged(base: dict, overrides: dict) -> dict:
    """Merge nested dictionaries."""
    result = {**base, **overrides}
    for name in base.keys() & overrides.keys():
        if isinstance(base[name], dict) and isinstance(overrides[name], dict):
            result[name] = merged(base[name], overrides[name])
    return result


def environment_of(config: dict) -> vf.Env:
    """Load the environment; its agents run here, with the chat loop unless its author or the user chose a harness."""
    module = types.ModuleType(CHAT)
    module.Chat, module.__all__ = Chat, ["Chat"]  # type: ignore[attr-defined]
    # verifiers finds a harness by importing its id as a module.
    sys.modules[CHAT] = module
    Chat.__module__ = CHAT
    roles = resolve_env_config({"taskset": config["taskset"], **config["env"]})
    harness = {"id": config["harness"] or CHAT}
    env = dict(config["env"])
    for name, harness_config in roles.agent_harnesses().items():
        # bash, the default of verifiers, has full access to the machine.
        has_own_harness = harness_config.id not in (
            "bash",
            "null",
        )
        seat = {"runtime": {"type": "subprocess"}, "max_turns": config["max_turns"]}
        if config["harness"] or not has_own_harness:
            seat["harness"] = harness
        env[name] = merged(seat, env.get(name) or {})
    return load_environment(resolve_env_config({"taskset": config["taskset"], **env}))


def messages_of(data: Any) -> list:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if data.prompt is None:
        return [*system, {"role": "user", "content": data.description or data.name or f"task {data.idx}"}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message_to_wire(message) for message in data.prompt)]


def write_tasks(config: dict, out: TextIO) -> None:
    taskset = environment_of(config).taskset
    excluded_fields = [
        name for name, field in type(taskset).task_type().data_type().model_fields.items() if field.exclude
    ]
    if excluded_fields:
        raise SystemExit(f"its tasks cannot be sent: their JSON omits the fields {excluded_fields}")
    for task in itertools.islice(taskset, config["most_tasks"]):
        row = {"id": str(task.data.idx), "key": task.key, "messages": messages_of(task.data)}
        print(json.dumps({**row, "data": task.data.model_dump(mode="json")}), file=out)
    out.flush()


class Server:
    """Runs rollouts concurrently."""

    def __init__(self, config: dict, out: TextIO) -> None:
        self.env = environment_of(config)
        self.task_cls = type(self.env.taskset).task_type()
        self.out = out
        self.running: dict[int, asyncio.Task] = {}
        self.models: dict[str, str] = {}
        self.first: EvalClient | None = None
        self.keys: dict[str, str] = {}
        self.credit = AgentCredit()
        # verifiers would make a client with connections of its own for each episode.
        interception.resolve_client = self.client_of

    def client_of(self, config: Any) -> Any:
        """Make the client of one episode: all share one connection pool, each has its own key."""
        if config.api_key_var not in self.keys:
            return EvalClient(config)  # a judge, or another model of the environment
        if self.first is None:
            self.first = EvalClient(config)
        client = copy.copy(self.first)
        client.base_url, client.api_key = config.base_url, self.keys[config.api_key_var]
        return client

    async def run(self, number: int, call: dict) -> dict:
        # verifiers names keys by environment variable; `client_of` looks this one up in `self.keys` instead.
        variable = f"FORGE_RL_API_KEY_{number}"
        self.keys[variable] = call["key"]
        try:
            model = self.models.get(call["base_url"]) or await self.model_at(call)
            client = EvalClientConfig(base_url=call["base_url"], api_key_var=variable)
            data = self.task_cls.data_type().model_validate(call["task"])
            task = self.task_cls(data, self.env.taskset.config.task)
            slot = self.env.slots(task)[0]
            episode = await self.env.run_slot(slot, ModelContext(model=model, client=client))
        finally:
            del self.keys[variable]
        return result_of(episode, self.credit)

    async def model_at(self, call: dict) -> str:
        """Ask the policy's server for its model name."""
        async with httpx.AsyncClient(timeout=60) as client:
            headers = {"Authorization": f"Bearer {call['key']}"}
            answer = await client.get(f"{call['base_url']}/models", headers=headers)
            answer.raise_for_status()
        model = self.models[call["base_url"]] = answer.json()["data"][0]["id"]
        return model

    async def answer(self, number: int, call: dict) -> None:
        try:
            reply = {"id": number, "result": await self.run(number, call)}
        except (Exception, asyncio.CancelledError) as error:  # if it was cancelled, nobody reads it
            reply = {"id": number, "error": f"{type(error).__name__}: {error}"}
        finally:
            del self.running[number]
        self.say(reply)

    def say(self, line: dict) -> None:
        print(json.dumps(line), file=self.out, flush=True)

    def take(self, line: str) -> None:
        call = json.loads(line)
        if "cancel" in call:
            if call["cancel"] in self.running:
                self.running[call["cancel"]].cancel()
        elif "ping" in call:
            self.say({"id": call["id"], "result": None})
        else:
            self.running[call["id"]] = asyncio.create_task(self.answer(call["id"], call))

    async def serve(self) -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for line in sys.stdin:
                loop.call_soon_threadsafe(self.take, line)
            loop.call_soon_threadsafe(end.set)
            time.sleep(_GRACE_S)  # the parent is gone: stop tools and programs in time, or leave them
            os._exit(1)

        async with self.env.serving():
            threading.Thread(target=read, daemon=True).start()
            self.say({"id": 0})
            await end.wait()
            tasks = list(self.running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def result_of(episode: Any, credit: AgentCredit) -> dict:
    """Return the mean reward of the trained traces, and their parts; raise the recorded error if the episode failed."""
    errors = [error for trace in episode.traces if not trace.ok for error in trace.errors[-1:]]
    if not episode.ok:
        error = (episode.errors[-1:] or errors or [None])[-1]
        raise RuntimeError(f"{error.type}: {error.message}" if error else "the episode failed")
    # An environment that marks no agent as trainable trains all of them.
    traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    parts: dict[str, float] = {}
    for trace in episode.traces:
        seat = f"{trace.agent.name}/" if len(episode.traces) > 1 else ""
        values = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        values |= {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in values.items():
            parts[seat + name] = float(value)
    total = credit.mean([trace.agent.name for trace in traces], [float(trace.reward) for trace in traces])
    return {"reward": float(total), "parts": parts, "answer": traces[-1].last_reply}


def main() -> None:
    # The real stdout carries answers, one a line; anything that prints would break them.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # send the environment's prints to the log
    # A script has its own folder on the path, not the one in which the run was started.
    sys.path.append(os.getcwd())
    # Programs that environments start find what is installed beside this interpreter.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    config = json.loads(sys.argv[2])
    if config["confine"]:
        confine(config["filter"])
    if sys.argv[1] == "list":
        write_tasks(config, out)
    else:
        asyncio.run(Server(config, out).serve())


if __name__ == "__main__":
    main()
