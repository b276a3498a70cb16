"""User commands: run with resource limits, and killed with all their descendants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.errors import check_flags
from forge_rl.runtime.processes import signal_name
from forge_rl.system.supervised import supervised
from forge_rl.system.tasks import TaskGroup
from forge_rl.system.variables import handed_on

_KEPT_BYTES = 1 << 20
"""Bytes to keep from the end of a command's output."""
_MOST_S = 60.0
"""Timeout for a supervisor to exit after a signal."""
_MOST_OPEN_FILES = 1024
"""Maximum open files and connections of a process: the usual limit of a shell, on which programs rely."""


@dataclass(frozen=True, kw_only=True)
class CommandLimits:
    """Resource limits of a command and each process that it starts: `CommandLimits(memory_gib=2)`."""

    memory_gib: float = 8.0
    """Address space per process, in GiB. Python maps more than it uses."""
    cpu_s: float = 3600.0
    """CPU seconds per process."""
    file_gib: float = 1.0
    """Maximum size of a written file, in GiB."""
    at_a_time: int = 32
    """Maximum concurrent commands; others wait."""

    def __post_init__(self) -> None:
        check_flags(self, "the command's ", above=dict.fromkeys(vars(self), 0))

    def as_rlimits(self) -> dict[str, int]:
        """Return the limits by their names in Python's `resource` module."""
        return {
            "RLIMIT_AS": int(self.memory_gib * (1 << 30)),
            "RLIMIT_CPU": max(1, round(self.cpu_s)),
            "RLIMIT_FSIZE": int(self.file_gib * (1 << 30)),
            "RLIMIT_NOFILE": _MOST_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """Result of a command."""

    status: int
    """Exit status, or the negative number of the signal that killed it."""
    output: str
    """End of its stdout."""
    errors: str
    """End of its stderr."""

    @property
    def problem(self) -> str:
        """One-line cause of failure; "" on success."""
        if self.status == 0:
            return ""
        last = next((line for line in reversed(self.errors.splitlines()) if line.strip()), "it printed no error")
        if self.status < 0:
            name = signal_name(-self.status)
            why = " (its CPU time limit)" if name == "SIGXCPU" else ""
            return f"was ended by {name}{why}: {last}"
        return f"ended with status {self.status}: {last}"


async def run_command(
    command: Sequence[str],
    limits: CommandLimits | None,
    *,
    variables: Mapping[str, str],
    stdin: bytes,
    observe: Callable[[bytes], None] = lambda part: None,
) -> CommandResult:
    """Run a command until it exits; cancellation or the end of this process kills it.

    Args:
        command: program and arguments.
        limits: resource limits; None for no limits.
        variables: environment variables added to `forge_rl.system.variables.handed_on`.
        stdin: bytes to write to its stdin.
        observe: called with each part of its stderr as it arrives.
    """
    process = await asyncio.create_subprocess_exec(
        *supervised(command, limits.as_rlimits() if limits else None),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=handed_on(variables),
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        # At once, as a pipe that is full or not read would block the command.
        async with TaskGroup() as group:
            group.create_task(_feed(process.stdin, stdin))
            output = group.create_task(_tail(process.stdout))
            errors = group.create_task(_tail(process.stderr, observe))
            status = await process.wait()
    finally:
        await _end(process)
    return CommandResult(status=status, output=output.result(), errors=errors.result())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the supervisor kill everything it watches; no effect if it has exited."""
    # SIGTERM asks the supervisor to kill what it watches; SIGKILL is for a supervisor that does not exit.
    for end in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
                await process.wait()
                return


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it may not read its stdin
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _tail(pipe: asyncio.StreamReader, observe: Callable[[bytes], None] = lambda part: None) -> str:
    tail = b""
    while part := await pipe.read(1 << 16):
        observe(part)
        tail = (tail + part)[-_KEPT_BYTES:]
    return tail.decode(errors="replace")
