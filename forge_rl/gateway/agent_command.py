"""Agents in their own processes: a function given by name, or any command line."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.flags.texts import names_code
from forge_rl.flags.user_code import code_files
from forge_rl.gateway.sessions import Session
from forge_rl.runtime.commands import CommandLimits, CommandResult, run_command
from forge_rl.system.terminal import visible
from forge_rl.system.variables import handed_on
from forge_rl.types import Score, Task

_FAILED_STARTS = 8
"""Consecutive processes that end for one cause before calling the policy, after which AgentStartError is raised."""
_LOGGED_BYTES = 1 << 16
"""Maximum bytes logged of a process's stderr; the last ones are kept."""
_QUOTED_LINES = 12
"""Lines of stderr shown in an error."""
_LOG_BYTES = 16 << 20
"""Size at which a log is rotated; one old log is kept."""


class AgentError(ForgeError):
    """An agent's process failed, with the problem it reported."""


class AgentStartError(AgentError):
    """All processes of an agent fail for one cause before they call the policy; stops the run."""


class Workplace(Protocol):
    """The place in which an agent's process works in one episode."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables by which the process finds it."""

    async def score(self) -> Score:
        """Score what the process has done there, once it has ended."""


class Workplaces(Protocol):
    """Makes the workplace of each episode, such as `forge_rl.worlds.container_agent.ContainerAgents`."""

    def open(self, task: Task) -> contextlib.AbstractAsyncContextManager[Workplace]:
        """Hold the workplace of an episode while the body runs."""


class AgentCommand:
    """An agent run as a command line, in any language.

        start(..., agent=AgentCommand("node agent.js"))

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, which clients read
    automatically, and FORGE_RL_MODEL. It gets the task as JSON on stdin and in the file FORGE_RL_TASK_FILE: id, source,
    messages and tools. The text to score is its stdout, or the "answer" of a JSON object in the last line, or the
    policy's last answer if it prints nothing. `python` is the interpreter that runs forge_rl.

    Args:
        command: program and arguments, or a line that is split as in a shell.
        limits: resource limits of each process.
        log: file for the processes' stderr.
        workplaces: where the processes work. Their changes there are scored, not their output.

    Raises:
        ConfigError: the program does not exist, or the line has an open quotation.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        limits: CommandLimits | None = None,
        *,
        log: Path | None = None,
        workplaces: Workplaces | None = None,
    ) -> None:
        self.command = tuple(_words(command) if isinstance(command, str) else command)
        self.limits = limits or CommandLimits()
        if not self.command or shutil.which(self.command[0], path=_path()) is None:
            program = self.command[0] if self.command else ""
            raise ConfigError(f"the agent's program {program!r} was not found", hint="use a program on the PATH")
        self.log = log
        self.workplaces = workplaces
        self._slots = asyncio.Semaphore(self.limits.at_a_time)
        self._failed_starts: list[str] = []
        """Cause of each failure since a process last called the policy; all of them are equal."""

    def logging_to(self, log: Path) -> Self:
        """Return a copy of the agent that logs to `log`."""
        agent = copy.copy(self)
        # A shallow copy would share the list with the original.
        agent.log, agent._failed_starts = log, []
        return agent

    @property
    def files(self) -> tuple[Path, ...]:
        """The file with its code, whose edit a resumed run refuses; none if the command names none."""
        file = _script(self.command)
        return () if file is None else (file,)

    def __repr__(self) -> str:
        return f"AgentCommand({shlex.join(self.command)!r})"

    async def __call__(self, task: Task, session: Session) -> str | Score | None:
        """Run the command on a task; return the text to score, or the score of its workplace.

        Raises:
            AgentError: the command failed.
            AgentStartError: too many processes in a row failed for the same cause before they called the policy.
        """
        async with self._slots:
            if self.workplaces is None:
                return await self._run(task, session, {})
            async with self.workplaces.open(task) as workplace:
                await self._run(task, session, workplace.variables)
                return await workplace.score()

    async def _run(self, task: Task, session: Session, more: Mapping[str, str]) -> str | None:
        """Run the command with these additional variables; return its answer."""
        task_fields = {"id": task.id, "source": task.source, "messages": list(task.messages), "tools": list(task.tools)}
        with tempfile.TemporaryDirectory(prefix="forge_rl-agent-") as folder:
            file = Path(folder) / "task.json"
            file.write_text(json.dumps(task_fields))
            variables = {
                "OPENAI_BASE_URL": session.base_url,
                "OPENAI_API_BASE": session.base_url,  # older name that some packages still read
                "OPENAI_API_KEY": session.key,
                "ANTHROPIC_BASE_URL": session.anthropic_url,
                "ANTHROPIC_API_KEY": session.key,
                "FORGE_RL_MODEL": session.model,
                "FORGE_RL_TASK_FILE": str(file),
                "PATH": _path(),
                **more,
            }
            stdin = json.dumps(self._stdin(task_fields, session)).encode()
            process = await run_command(self.command, self.limits, variables=variables, stdin=stdin)
        self._note(session, process)
        if process.problem:
            raise AgentError(f"the agent's process {process.problem}", hint=self._hint)
        return _answer(process.output)

    def _stdin(self, task: Mapping[str, object], session: Session) -> Mapping[str, object]:
        return task

    @property
    def _hint(self) -> str:
        log = f"; its stderr is in {self.log}" if self.log else ""
        return f"run it by hand: {shlex.join(self.command)}{log}"

    def _note(self, session: Session, process: CommandResult) -> None:
        """Log a process's stderr; raise AgentStartError once too many in a row failed for one cause."""
        if self.log is not None and process.errors:
            stderr = process.errors.encode(errors="replace")[-_LOGGED_BYTES:]
            head = visible(f"--- task {session.task_id}: {process.problem or 'ended with status 0'}")
            _append(self.log, head.encode() + b"\n" + stderr.rstrip(b"\n") + b"\n")
        problem = process.problem or "ended with status 0"
        # Without numbers, which differ between processes that fail for one cause.
        cause = re.sub(r"\d+", "", problem)
        called_policy = bool(session.turns) or session.refusal is not None
        # A different cause starts the count again: only one that repeats stops the run.
        if called_policy or cause not in self._failed_starts:
            self._failed_starts.clear()
        if not called_policy:
            self._failed_starts.append(cause)
        if len(self._failed_starts) >= _FAILED_STARTS:
            self._failed_starts.clear()  # a retry starts from zero
            last = "\n".join(["", *process.errors.strip().splitlines()[-_QUOTED_LINES:]])
            raise AgentStartError(
                f"{_FAILED_STARTS} processes of the agent in a row ended before they called the policy; the last one "
                f"{problem}{last}",
                hint=self._hint,
            )


class AgentFunction(AgentCommand):
    """An agent run as a plain or async function of (task) or (task, session), in its own process.

        start(..., agent="mine.py:solve")

    Its environment variables are the same as an AgentCommand's.

    Args:
        name: MODULE:FUNCTION or FILE.py:FUNCTION.
        limits: resource limits of each process.

    Raises:
        ConfigError: the name is malformed.
    """

    def __init__(self, name: str, limits: CommandLimits | None = None) -> None:
        if not names_code(name):
            raise ConfigError(
                f"the agent {name!r} does not name a function",
                hint="write MODULE:FUNCTION or FILE.py:FUNCTION; for a command line, use AgentCommand(...)",
            )
        super().__init__((sys.executable, "-m", "forge_rl.gateway.agent_child", name), limits)
        self._name = name

    @property
    def files(self) -> tuple[Path, ...]:
        return code_files(self._name)

    def _stdin(self, task: Mapping[str, object], session: Session) -> Mapping[str, object]:
        return {"task": task, "session": {"base_url": session.base_url, "key": session.key}}

    async def check(self) -> None:
        """Load the function once, so that a wrong name fails early.

        Raises:
            ConfigError: the function cannot be loaded.
        """
        process = await run_command((*self.command, "--check"), self.limits, variables={}, stdin=b"")
        if process.problem:
            lines = [line for line in process.errors.splitlines() if line.strip()]
            # agent_child ends with the message and the hint, a line each.
            problem, hint = (lines[-2], lines[-1]) if len(lines) > 1 else (process.problem, "")
            raise ConfigError(problem, hint=hint)


def code_file(agent: str) -> Path | None:
    """Return the file with an agent's code; None if the agent's text names none. Imports nothing.

        code_file("python agent.py --turns 3")  # Path("agent.py")

    Args:
        agent: FILE.py:FUNCTION, MODULE:FUNCTION of a module in the working directory, or a command line, of which it is
            the first argument that is a file, or else the program.

    Raises:
        ConfigError: the line has an open quotation.
    """
    return next(iter(code_files(agent)), None) if names_code(agent) else _script(_words(agent))


def _script(command: Sequence[str]) -> Path | None:
    """Return the first argument of a command that is a file, or else its program; None if neither is."""
    # Unlike Path.is_file, takes arguments of any length, such as a whole program. This interpreter is no agent's code.
    names = (name for name in (*command[1:], *command[:1]) if name != sys.executable and os.path.isfile(name))
    return next(map(Path, names), None)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"the agent's command {command!r:.80} is not a command line: {error}", hint="close the quotation"
        ) from None


def _answer(output: str) -> str | None:
    """Return the "answer" of a JSON object in the last line of a command's output, or all of it; None if empty."""
    text = output.strip()
    try:
        content = json.loads(text.rpartition("\n")[2])
    except (ValueError, RecursionError):
        return text or None
    if isinstance(content, dict) and "answer" in content:
        return None if content["answer"] is None else str(content["answer"])
    return text


def _path() -> str:
    """Return the PATH of agents, with this interpreter's folder first."""
    return os.pathsep.join([str(Path(sys.executable).parent), handed_on().get("PATH", os.defpath)])


def _append(log: Path, text: bytes) -> None:
    """Append to a log, and rotate it when it is long."""
    # The first process of a run has no log yet, and another may have rotated it just now.
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(text)
