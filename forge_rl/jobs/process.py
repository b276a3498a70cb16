"""`--job process:N`: Monarch hosts simulated by processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import check_flags
from forge_rl.runtime.children import quiet_stderr, set_defaults
from forge_rl.runtime.job_protocol import JobListener
from forge_rl.runtime.joining import host_log, join_command, last_line
from forge_rl.runtime.processes import clean_up_after, describe_exit
from forge_rl.runtime.scratch import make_scratch
from forge_rl.system.variables import handed_on, kept_back

if TYPE_CHECKING:
    from monarch.actor import HostMesh

_END_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ProcessHosts:
    """Several hosts on this machine, each a process, to try what needs many hosts on one."""

    hosts: int = 2
    """Number of hosts, named host0, host1 and so on."""
    most_replaced: int = 0
    """Number of further hosts that the run may start in all, in the place of those that die."""

    def __post_init__(self) -> None:
        check_flags(self, "--job process:", minimum={"hosts": 1, "most_replaced": 0}, maximum={"hosts": 64})

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(f"host{number}" for number in range(self.hosts))

    def describe(self, command: Sequence[str]) -> str:
        """Return a table of the hosts."""
        rows = [f"  {name:<8} a process of this machine" for name in ("local", *self.names)]
        return "\n".join(["hosts:", *rows])

    @contextlib.asynccontextmanager
    async def open(self, listener: JobListener) -> AsyncIterator[Mapping[str, HostMesh]]:
        """Start the hosts; see `local_hosts`."""
        async with local_hosts(self.names, on_lost=listener.on_lost) as hosts:
            yield hosts

    async def replace(self, name: str, folder: Path, say: Callable[[str], None]) -> str:
        """Start a process that joins a run, and wait until it ends; see `ReplacingJob`."""
        log = host_log(folder, name)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *join_command(folder, name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=handed_on(),
                start_new_session=True,
            )
        # Kills the process if this one is killed before it can do so itself.
        guard = clean_up_after([], [process.pid])
        try:
            say(f"process {process.pid} of this machine")
            status = await process.wait()
            return f"{describe_exit(status)}{last_line(log)}" if status else ""
        finally:
            await _end(process)
            guard.kill()
            guard.communicate()


@contextlib.asynccontextmanager
async def local_hosts(
    names: Sequence[str], *, on_lost: Callable[[str, str], None] | None = None
) -> AsyncIterator[dict[str, HostMesh]]:
    """Start hosts as processes of this machine, to try multi-host runs on one host.

        async with local_hosts(["a", "b"]) as hosts:
            cluster = Cluster(logs, hosts=hosts)

    They end with the body, or with this process, however it ends.

    Args:
        names: host names; may be empty.
        on_lost: called with a host's name and the cause when its process ends while the body runs.

    Yields:
        Each host's Monarch mesh, by name.
    """
    if not names:
        yield {}
        return
    set_defaults()
    from monarch.job import ProcessJob

    scratch = make_scratch()  # hosts leave folders behind
    # ProcessJob adds to this process's variables and cannot remove any, so secrets are set to "".
    job = ProcessJob(dict.fromkeys(names, 1), env={**dict.fromkeys(kept_back(), ""), "TMPDIR": scratch})
    guard = None
    try:
        with quiet_stderr():
            job.apply()
            pids = {name: job._host_to_pid[f"{name}_0"].pid for name in names}
            # Monarch's hosts have their own sessions and would outlive this process. Their children end with them.
            guard = clean_up_after([str(job._tmpdir), scratch], list(pids.values()))
            state = job.state(cached_path=None)
        with _watching(pids, on_lost) if on_lost is not None else contextlib.nullcontext():
            yield {name: getattr(state, name) for name in names}
    finally:
        await asyncio.to_thread(job.kill)
        if guard is not None:
            guard.kill()
            guard.communicate()
        shutil.rmtree(scratch, ignore_errors=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Stop a process, by SIGKILL if SIGTERM does not suffice; its children end with it."""
    for stop in (process.terminate, process.kill):
        if process.returncode is None:
            stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await process.wait()


@contextlib.contextmanager
def _watching(pids: Mapping[str, int], on_lost: Callable[[str, str], None]) -> Iterator[None]:
    """Call `on_lost` in this event loop with the name of each process that ends while the body runs."""
    loop = asyncio.get_running_loop()
    fds: dict[str, int] = {}

    def end(name: str) -> None:
        loop.remove_reader(fds[name])
        os.close(fds.pop(name))
        on_lost(name, f"the host's process {pids[name]} ended")

    try:
        for name, pid in pids.items():
            fds[name] = os.pidfd_open(pid)
            loop.add_reader(fds[name], functools.partial(end, name))
        yield
    finally:
        for fd in fds.values():
            loop.remove_reader(fd)
            os.close(fd)
