"""Lets an agent's process on this machine work in a task's container, through a program called like Docker's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from forge_rl.envs.protocol import EnvFactory
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.types import Episode, Score, Task
from forge_rl.worlds.container import ContainerSession

_PROGRAM = Path(__file__).parent / "peers" / "container_exec.py"
_REQUEST_BYTES = 4 << 20
"""Maximum size of a request: the kernel allows a command line of 2 MiB."""
_INVALID, _KILLED = 125, 137
"""Exit statuses of a request that cannot be read, and of a command that the session's limits ended."""


class ContainerEnv(Protocol):
    """An environment whose tasks have containers: HarborEnv and SwebenchEnv."""

    def container(self, task: Task) -> ContainerSession:
        """Return the container of one episode of a task."""


class ContainerAgents:
    """The workplaces of agents in the containers of an environment's tasks; see `AgentCommand`.

        environment = build_environment("harbor:tasks")
        start(..., agent=AgentCommand("agent", workplaces=ContainerAgents(environment)), reward=ContainerAgents.reward)

    Raises:
        ConfigError: the environment's tasks have no containers.
    """

    def __init__(self, environment: EnvFactory | ContainerEnv) -> None:
        if not hasattr(environment, "container"):
            raise ConfigError(
                f"the tasks of {environment!r:.80} have no containers for an agent to work in",
                hint="name Harbor's or SWE-bench's tasks, as --env harbor:FOLDER or --env swebench:FILE",
            )
        self._environment = cast(ContainerEnv, environment)

    def open(self, task: Task) -> contextlib.AbstractAsyncContextManager[AgentContainer]:
        """Hold the container of one episode while the body runs."""
        return agent_container(self._environment.container(task))

    @staticmethod
    def reward(task: Task, episode: Episode) -> Score:
        """Score an episode that ended at its deadline, or at the end of its context, before its tests ran."""
        return Score(total=0.0)


class AgentContainer:
    """The container of one episode, as its agent's process finds it.

    Args:
        session: session of the container.
        program: path of the program that runs commands there.
    """

    def __init__(self, session: ContainerSession, program: Path) -> None:
        self._session = session
        self.failure: ForgeError | None = None
        """First error that kept a command from running, if any."""
        self.variables = {"FORGE_RL_CONTAINER": str(program)}
        """Environment variables for the agent's process."""

    async def score(self) -> Score:
        """End the container, and run the task's tests in a fresh one.

        Raises:
            ForgeError: a command of the agent, or the tests, could not be run.
        """
        if self.failure is not None:
            raise self.failure
        reward, parts = await self._session.score()
        return Score(total=reward, parts=parts)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run the command that a connection asks for."""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):  # an agent may give up on a slow command
            try:
                request = json.loads(await reader.readline())
                command, folder = [str(part) for part in request["command"]], str(request["folder"])
                env = {str(name): str(value) for name, value in request["env"].items()}
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                response = _response(_INVALID, stderr=f"the request cannot be read: {error!r:.200}\n")
            else:
                response = await self._run(command, env, folder)
            writer.write(json.dumps(response).encode() + b"\n")
            await writer.drain()

    async def _run(self, command: list[str], env: Mapping[str, str], folder: str) -> dict[str, Any]:
        try:
            result = await self._session.execute(command, env=env, folder=folder)
        except ForgeError as error:
            # The agent only sees a failed command; `score` raises the first error, so that the policy is not blamed.
            self.failure = self.failure or error
            return _response(_INVALID, stderr=f"{error.message}\n")
        if result is None:
            return _response(_KILLED, stderr="files and processes exceeded the memory limit; the container has ended\n")
        note = "" if result.error is None else f"{result.error.name}: {result.error.message}\n"
        status = _KILLED if result.status is None else result.status
        return _response(status, result.stdout, result.stderr + note)


def _response(status: int, stdout: str = "", stderr: str = "") -> dict[str, Any]:
    return {"status": status, "stdout": stdout, "stderr": stderr}


@contextlib.asynccontextmanager
async def agent_container(session: ContainerSession) -> AsyncIterator[AgentContainer]:
    """Serve a container to programs of this user while the body runs, and close it."""
    with tempfile.TemporaryDirectory(prefix="forge_rl-c-") as folder:
        program, path = Path(folder) / "container", Path(folder) / "s"
        line = shlex.join([sys.executable, "-IS", str(_PROGRAM), str(path)])
        program.write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        # For this user only, as is the folder with the socket.
        program.chmod(0o700)
        container = AgentContainer(session, program)
        async with contextlib.AsyncExitStack() as stack:
            server = await asyncio.start_unix_server(container.answer, path, limit=_REQUEST_BYTES)
            await stack.enter_async_context(server)
            # Closed first, which ends the commands of an agent that was cut off: the server may wait for them.
            stack.push_async_callback(session.close)
            try:
                yield container
            except ForgeError as error:
                # An agent that fails after its container has failed is not to blame.
                if container.failure not in (None, error):
                    raise container.failure from error
                raise
