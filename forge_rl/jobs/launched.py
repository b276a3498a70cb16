"""Monarch hosts that this process starts on other machines by commands, such as srun or ssh."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError, InfrastructureError
from forge_rl.jobs.host import MARK
from forge_rl.runtime.addresses import is_trusted, url
from forge_rl.runtime.children import quiet_stderr, set_defaults
from forge_rl.runtime.job_protocol import JobListener
from forge_rl.runtime.joining import identifier

if TYPE_CHECKING:
    from monarch.actor import HostMesh

Notice = Callable[[str, str], None]
"""Callback that receives a host's name and what happened to it."""

_START_S = 600.0
"""Seconds in which all hosts must listen; a first import from a shared disk takes minutes."""
_END_S = 10.0
_LINE_BYTES = 1 << 14
_LINES_KEPT = 20


@dataclass(eq=False)
class LaunchedHost:
    """A host process on another machine, and the launcher that started it and ends with it."""

    name: str
    process: asyncio.subprocess.Process
    address: asyncio.Future[str]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    """The last lines that it or the launcher printed."""

    async def follow(self, on_lost: Notice, on_ending: Notice, *, may_be_public: bool, is_here: bool = False) -> None:
        """Read its output until it ends; then report it as lost.

        Args:
            on_lost: called with the host's name and the cause.
            on_ending: called with the host's name and the signal that announced its end.
            is_here: it is on this machine, and serves on a socket.
        """
        while line := await self._line():
            text = line.decode(errors="replace").rstrip()
            key, value = _message(text)
            # The line comes from another machine: an address that is not trusted is ignored.
            if key == "address" and not self.address.done():
                if is_here or is_trusted(value, may_be_public=may_be_public):
                    self.address.set_result(value)
            elif key == "notice":
                on_ending(self.name, value)
            elif not key and text:
                self.last_lines.append(text)
        status = await self.process.wait()
        output = f": {' | '.join(list(self.last_lines)[-2:])}" if self.last_lines else ""
        cause = f"its launcher ended with status {status}{output}"
        # Wakes `_addresses`, which waits for all hosts.
        if not self.address.done():
            message = f"host {self.name} did not start: {cause}"
            self.address.set_exception(InfrastructureError(message, hint="see the last lines that it printed"))
        on_lost(self.name, cause)

    async def _line(self) -> bytes:
        """Return the next line, or b"" at the end; skips lines that are too long."""
        assert self.process.stdout is not None
        while True:
            # StreamReader raises ValueError for a line beyond its limit, and drops the line.
            with contextlib.suppress(ValueError):
                return await self.process.stdout.readline()

    async def end(self) -> None:
        """Close the host's stdin, which ends it and its processes; kill the launcher if it does not end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        # The host first gets time to end by itself.
        for stop in (lambda: None, self.process.terminate, self.process.kill):
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                stop()
                async with asyncio.timeout(_END_S):
                    await self.process.wait()
                return


@contextlib.asynccontextmanager
async def launched_hosts(
    commands: Mapping[str, Sequence[str]],
    listener: JobListener,
    *,
    ending: Notice,
    controller: str,
    env: Mapping[str, str],
    may_be_public: bool = False,
) -> AsyncIterator[dict[str, HostMesh]]:
    """Start a host by each command, and end them after the body or with this process.

    Args:
        commands: by host name; each runs `forge_rl.jobs.host` and passes its stdin and stdout on.
        ending: called with a host's name and a signal by which the scheduler said that it is about to end.
        controller: IP address of this machine, on which Monarch listens for the hosts.
        env: environment of the commands.
        may_be_public: whether hosts may listen on public addresses.

    Yields:
        Each host's Monarch mesh, by name.

    Raises:
        InfrastructureError: a host did not start; quotes its last lines.
        ConfigError: Monarch already runs in this process on another network.
    """
    set_defaults()
    listen_on(controller)
    hosts: list[LaunchedHost] = []
    closing = False

    def lost(name: str, cause: str) -> None:
        if not closing:
            listener.on_lost(name, cause)

    follow_tasks: list[asyncio.Task[None]] = []
    try:
        for name, command in commands.items():
            host = await launch_host(name, command, env)
            # Known from here on, so that it is ended even if the next one cannot be started.
            hosts.append(host)
            follow_tasks.append(asyncio.create_task(host.follow(lost, ending, may_be_public=may_be_public)))
        addresses = await _addresses(hosts, listener)
        with quiet_stderr():
            from monarch.actor import attach_to_workers

            meshes = {
                name: attach_to_workers(name=identifier(name), ca="trust_all_connections", workers=[address])
                for name, address in addresses.items()
            }
        yield meshes
    finally:
        closing = True
        await asyncio.gather(*(host.end() for host in hosts))
        # A cancelled address keeps `follow` from reporting a host that was ended on purpose as one that did not start.
        for host in hosts:
            host.address.cancel()
        await asyncio.gather(*follow_tasks)


def save_at_notice(listener: JobListener, name: str, notice: str) -> None:
    """Report that a host will end, and raise SIGUSR1 here, if it is handled, so that the run saves."""
    listener.say(f"the scheduler is about to end host {name} ({notice})")
    if signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN):
        signal.raise_signal(signal.SIGUSR1)


async def launch_host(name: str, command: Sequence[str], env: Mapping[str, str]) -> LaunchedHost:
    """Start a host by a command; `follow` then reads its output.

    Raises:
        ConfigError: the command does not exist.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env,
            limit=_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the controller, which still needs it to save
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}", hint="load what provides it") from None
    return LaunchedHost(name, process, asyncio.get_running_loop().create_future())


async def _addresses(hosts: Sequence[LaunchedHost], listener: JobListener) -> dict[str, str]:
    """Wait until all hosts listen, and return their addresses by name.

    Raises:
        InfrastructureError: a host has ended, or does not listen in time; quotes its last lines.
    """
    listener.say(f"starting {len(hosts)} host{'s' * (len(hosts) > 1)}: {', '.join(host.name for host in hosts)}")
    await asyncio.wait([host.address for host in hosts], timeout=_START_S, return_when=asyncio.FIRST_EXCEPTION)
    # A host that has ended comes before one that is late.
    addresses = {host.name: host.address.result() for host in hosts if host.address.done()}
    if late := next((host for host in hosts if host.name not in addresses), None):
        output = " | ".join(list(late.last_lines)[-3:])
        raise InfrastructureError(
            f"host {late.name} does not listen after {_START_S:.0f} s{': ' if output else ''}{output}",
            hint="check that its Python environment is the controller's, and that it is not overloaded",
        )
    return addresses


def listen_on(ip: str) -> None:
    """Make Monarch in this process listen on an address for other machines.

    Raises:
        ConfigError: Monarch already runs in this process on another network.
    """
    with quiet_stderr():
        from monarch.actor import enable_transport
    try:
        enable_transport(url(ip, 0))
    except RuntimeError:
        raise ConfigError(
            "Monarch already runs in this process, on another network",
            hint="start the run in a fresh process, as its first",
        ) from None


def _message(line: str) -> tuple[str, str]:
    """Return key and value of a line that a host wrote for the controller; ("", "") for any other line."""
    _, mark, text = line.partition(MARK)
    if mark:
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(text)
            if isinstance(message, dict) and len(message) == 1:
                ((key, value),) = message.items()
                if isinstance(value, str):
                    return key, value
    return "", ""
