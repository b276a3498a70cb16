"""Commands of a user's own: run with limits, and ended with all that they have started."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_rl.errors import ConfigError
from forge_rl.supervised import supervised
from forge_rl.variables import handed_on

_KEPT_BYTES = 1 << 20
"""End of what a command prints that is kept."""
_MOST_S = 60.0
"""Longest time until a supervisor that was told to end has ended."""


@dataclass(frozen=True, kw_only=True)
class CommandLimits:
    """Bounds what a command, and each process that it starts, may use: `CommandLimits(memory_gib=2)`."""

    memory_gib: float = 8.0
    """Address space of a process. Python maps more than it uses."""
    cpu_s: float = 3600.0
    """Seconds of a processor's time for a process."""
    file_gib: float = 1.0
    """Longest file that may be written."""
    open_files: int = 1024
    """Files and connections that a process may have open."""
    at_a_time: int = 32
    """Commands that run side by side; others wait."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"the command's {flag} is {value}", hint=f"set {flag} to a value above 0")

    def as_rlimits(self) -> dict[str, int]:
        """Return the bounds by their names in Python's module resource."""
        return {
            "RLIMIT_AS": int(self.memory_gib * (1 << 30)),
            "RLIMIT_CPU": max(1, round(self.cpu_s)),
            "RLIMIT_FSIZE": int(self.file_gib * (1 << 30)),
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Tells how a command ended."""

    status: int
    """Exit status; the negative of a signal that ended it."""
    output: str
    """End of what it wrote to stdout."""
    errors: str
    """End of what it wrote to stderr."""

    @property
    def problem(self) -> str:
        """Cause of the failure, in a line; "" if there was none."""
        if self.status == 0:
            return ""
        last = next((line for line in reversed(self.errors.splitlines()) if line.strip()), "it printed no error")
        if self.status < 0:
            name = signal.Signals(-self.status).name
            why = " (its limit of processor time)" if name == "SIGXCPU" else ""
            return f"was ended by {name}{why}: {last}"
        return f"ended with status {self.status}: {last}"


async def run_command(
    command: Sequence[str],
    limits: CommandLimits | None,
    *,
    variables: Mapping[str, str],
    given: bytes,
    observe: Callable[[bytes], None] = lambda part: None,
) -> Finished:
    """Run a command to its end; cancelling ends it, and so does the end of this process.

    Args:
        command: program and arguments.
        limits: bounds on its resources; None for no bounds.
        variables: added to its environment, which else has what `forge_rl.variables` hands on.
        given: its stdin.
        observe: called with each part of its stderr as it comes.
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
        async with asyncio.TaskGroup() as group:
            group.create_task(_feed(process.stdin, given))
            output = group.create_task(_tail(process.stdout))
            errors = group.create_task(_tail(process.stderr, observe))
            status = await process.wait()
    finally:
        await _end(process)
    return Finished(status=status, output=output.result(), errors=errors.result())


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the supervisor end what it watches; without effect if it has ended."""
    for end in (process.terminate, process.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST_S):
                await process.wait()
                return


async def _feed(pipe: asyncio.StreamWriter, given: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it need not read
        pipe.write(given)
        await pipe.drain()
    pipe.close()


async def _tail(pipe: asyncio.StreamReader, observe: Callable[[bytes], None] = lambda part: None) -> str:
    kept = b""
    while part := await pipe.read(1 << 16):
        observe(part)
        kept = (kept + part)[-_KEPT_BYTES:]
    return kept.decode(errors="replace")
