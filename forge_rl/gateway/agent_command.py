"""Agents in processes of their own: a function that a text names, or any command line."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.gateway.sessions import Session
from forge_rl.runtime.commands import CommandLimits, run_command
from forge_rl.types import Task
from forge_rl.user_code import names_code


class AgentError(ForgeError):
    """An agent's process failed: its problem, as it said it."""


class AgentCommand:
    """An agent that is a command line, in whatever language.

        start(..., agent=AgentCommand("node agent.js"))

    It finds the policy by its environment: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY,
    which clients read by themselves, and FORGE_RL_MODEL. The task comes as JSON on its stdin, and in the file that
    FORGE_RL_TASK_FILE names: id, source, messages and tools. The last line that it prints is the text to score, or the
    "answer" of a JSON object there; without one it is the policy's last answer.

    Args:
        command: program and arguments, or a line that is split as a shell would.
        limits: what each process may use; by default those of the gateway's config.

    Raises:
        ConfigError: there is no such program.
    """

    def __init__(self, command: str | Sequence[str], limits: CommandLimits | None = None) -> None:
        self.command = tuple(shlex.split(command) if isinstance(command, str) else command)
        self.limits = limits or CommandLimits()
        if not self.command or shutil.which(self.command[0]) is None:
            program = self.command[0] if self.command else ""
            raise ConfigError(f"there is no program {program!r} for the agent", hint="name one that is on the PATH")
        self._slots = asyncio.Semaphore(self.limits.at_a_time)

    def __repr__(self) -> str:
        return f"AgentCommand({shlex.join(self.command)!r})"

    async def __call__(self, task: Task, session: Session) -> str | None:
        """Let the command work on a task.

        Raises:
            AgentError: it failed.
        """
        shown = {"id": task.id, "source": task.source, "messages": list(task.messages), "tools": list(task.tools)}
        return await self._run(json.dumps(shown).encode(), session)

    async def _run(self, given: bytes, session: Session, shown: bytes | None = None) -> str | None:
        async with self._slots:
            with tempfile.TemporaryDirectory(prefix="forge_rl-agent-") as folder:
                file = Path(folder) / "task.json"
                file.write_bytes(shown or given)
                variables = {
                    "OPENAI_BASE_URL": session.base_url,
                    "OPENAI_API_BASE": session.base_url,  # as some packages still call it
                    "OPENAI_API_KEY": session.key,
                    "ANTHROPIC_BASE_URL": session.anthropic_url,
                    "ANTHROPIC_API_KEY": session.key,
                    "FORGE_RL_MODEL": session.model,
                    "FORGE_RL_TASK_FILE": str(file),
                }
                done = await run_command(self.command, self.limits, variables=variables, given=given)
        if done.problem:
            raise AgentError(f"the agent's process {done.problem}", hint=f"run it by hand: {shlex.join(self.command)}")
        return _answer(done.output)


class AgentFunction(AgentCommand):
    """An agent that is a function in a process of its own, plain or async, of (task) or (task, session).

        start(..., agent="mine.py:solve")

    Its environment is that of an AgentCommand.

    Args:
        name: MODULE:FUNCTION or FILE.py:FUNCTION.
        limits: what each process may use.

    Raises:
        ConfigError: the name has another form.
    """

    def __init__(self, name: str, limits: CommandLimits | None = None) -> None:
        if not names_code(name):
            raise ConfigError(
                f"the agent {name!r} names no function",
                hint="write MODULE:FUNCTION or FILE.py:FUNCTION; a command line is AgentCommand(...)",
            )
        super().__init__((sys.executable, "-m", "forge_rl.agent_child", name), limits)

    async def __call__(self, task: Task, session: Session) -> str | None:
        shown = {"id": task.id, "source": task.source, "messages": list(task.messages), "tools": list(task.tools)}
        given = {"task": shown, "session": {"base_url": session.base_url, "key": session.key}}
        return await self._run(json.dumps(given).encode(), session, json.dumps(shown).encode())

    async def check(self) -> None:
        """Load the function once, so that a wrong name is told before much is started.

        Raises:
            ConfigError: it cannot be loaded.
        """
        done = await run_command((*self.command, "--check"), self.limits, variables={}, given=b"")
        if done.problem:
            lines = [line for line in done.errors.splitlines() if line.strip()]
            problem, hint = (lines[-2], lines[-1]) if len(lines) > 1 else (done.problem, "")
            raise ConfigError(problem, hint=hint)


def _answer(output: str) -> str | None:
    """Return what a command answers by the last line that it prints; None if it prints none."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), None)
    if last is None:
        return None
    try:
        found = json.loads(last)
    except (ValueError, RecursionError):
        return last
    if isinstance(found, dict) and "answer" in found:
        return None if found["answer"] is None else str(found["answer"])
    return last
