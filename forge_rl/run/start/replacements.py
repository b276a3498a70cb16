"""Asks the run's job for a host in the place of each one that dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path

from forge_rl.errors import ForgeError
from forge_rl.run.records.monitor import RunMonitor
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.job_protocol import ReplacingJob

_BACKOFF_S, _LONGEST_BACKOFF_S = 10.0, 600.0
"""Seconds before the second host that is asked for, doubled for each further one, and at most."""
_REFUSALS = 5
"""Refusals in a row after which no host is asked for any more."""
_MOST_LETTERS = 50
"""Letters of a host's name that its successor keeps."""


class Replacements:
    """Hosts that a run asks its job for, in the place of those that die: few, at growing intervals, until it ends.

        async with replacing(job, folder, cluster, monitor) as replacements:
            replacements.begin(("host0", "host1"))

    Args:
        job: the run's job, which starts hosts; None if it cannot.
        folder: folder of the run.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        job: ReplacingJob | None,
        folder: Path,
        cluster: Cluster,
        monitor: RunMonitor,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._hosts: Collection[str] = ()
        self._job = job
        self._folder = folder
        self._cluster = cluster
        self._monitor = monitor
        self._sleep = sleep
        self._places: dict[str, str] = {}
        """Hosts that were asked for and are not gone, each with the host of the job that it replaces."""
        self._joined: set[str] = set()
        self._asked = 0
        self._refused = 0
        """Refusals in a row."""
        self._next_s = 0.0
        """Seconds to wait before the next host is asked for."""
        self._asking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, hosts: Collection[str]) -> None:
        """Replace hosts from now on, also those that are gone already; the run must be able to take others in.

        Args:
            hosts: hosts of the job that the run needs; others are not replaced.
        """
        if self.asks:
            self._hosts = hosts
            # First, before listeners that check whether a host is awaited.
            self._cluster.on_lost.add(self._on_lost, first=True)
            for host, cause in self._cluster.lost_hosts.items():
                self._on_lost(host, cause)

    @property
    def asks(self) -> bool:
        """Whether the job can be asked for hosts at all."""
        return self._job is not None and self._job.most_replaced > 0

    @property
    def waiting(self) -> list[str]:
        """Names of hosts that have been asked for and have not joined."""
        return [name for name in self._places if name not in self._joined]

    def place_of(self, name: str) -> str:
        """Return the host in whose place one of this name was asked for; "" if none was."""
        return self._places.get(name, "")

    def joined(self, name: str) -> None:
        """Note that a host has joined."""
        if name in self._places:
            self._joined.add(name)
            self._refused = 0
            self._stop_waiting(self._places[name])
            self._monitor.display.startup(f"host {name}", "ready")

    async def close(self) -> None:
        """Give back the hosts that were asked for."""
        self._cluster.on_lost.discard(self._on_lost)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _on_lost(self, host: str, cause: str) -> None:
        # At the end of a run, hosts go on purpose.
        if self._monitor.faults.closing:
            return
        # A replacement that died is replaced by `_replace`, which waits until its job has ended and then asks again.
        if host in self._joined and self._why_not() is None:
            self._cluster.awaited.add(self._places[host])
        elif host in self._hosts and host not in self._cluster.leaving:
            self._cluster.awaited.add(host)
            task = asyncio.get_running_loop().create_task(self._replace(host))
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._on_end, host))

    def _on_end(self, host: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._stop_waiting(host)
        # Nobody awaits this task, so its error must be reported here.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._monitor.faults.record("hosts", None, f"host {host} cannot be replaced: {error!r}")

    def _stop_waiting(self, host: str) -> None:
        self._cluster.awaited.discard(host)
        self._cluster.tell_change()

    async def _replace(self, lost_host: str) -> None:
        """Replace a lost host, and its replacement if that dies too, for as long as the job may be asked."""
        while (name := await self._ask(lost_host)) is not None:
            cause = await self._serve(name)
            if not cause:
                self._monitor.log.event(f"host {name} was let go, and is not replaced")
                return
            self._cluster.awaited.add(lost_host)
            self._monitor.log.warn(f"host {name}, asked for in the place of {lost_host}, is gone: {cause}")

    async def _ask(self, lost_host: str) -> str | None:
        """Wait for the time to ask; return the name of the host to ask for, or None if no more are asked for."""
        assert self._job is not None
        log = self._monitor.log
        # One at a time, so that several hosts that die together are asked for at the growing intervals too.
        async with self._asking:
            if (reason := self._why_not()) is not None:
                log.event(f"no host is asked for in the place of {lost_host}: {reason}")
                return None
            # 0 before the first host: the first death costs no wait.
            await self._sleep(self._next_s)
            self._next_s = min(_LONGEST_BACKOFF_S, max(_BACKOFF_S, 2 * self._next_s))
            self._asked += 1
            name = self._name(lost_host)
            self._places[name] = lost_host
        log.event(
            f"asking for host {name} in the place of {lost_host}, {self._asked} of at most {self._job.most_replaced}"
        )
        return name

    def _why_not(self) -> str | None:
        """Return why no more hosts are asked for; None if they are."""
        assert self._job is not None
        if self._asked >= self._job.most_replaced:
            return f"{self._asked} were asked for, the most"
        return "the last questions were refused" if self._refused >= _REFUSALS else None

    def _name(self, lost_host: str) -> str:
        """Return a name that no host of the run has had."""
        stem, number = re.sub(r"[^A-Za-z0-9.-]", "-", lost_host)[:_MOST_LETTERS].lstrip(".-") or "host", self._asked
        while (name := f"{stem}.{number}") in self._cluster.hosts or name in self._cluster.lost_hosts:
            number += 1
        return name

    async def _serve(self, name: str) -> str:
        """Ask for a host and wait until it is gone; return the cause, or "" if someone let it go."""
        assert self._job is not None
        display = self._monitor.display
        try:
            cause = await self._job.replace(name, self._folder, lambda text: self._say(name, text))
        except (ForgeError, OSError) as error:
            self._refused += 1
            cause = error.message if isinstance(error, ForgeError) else str(error)
        if name in self._joined:
            # The scheduler knows of the end of its job sooner than the host's silence shows it.
            self._cluster.lose(name, cause or "it was let go")
        else:
            display.startup(f"host {name}", "failed")
        self._joined.discard(name)
        del self._places[name]
        return cause

    def _say(self, name: str, text: str) -> None:
        if name not in self._joined:
            self._monitor.display.startup(f"host {name}", "starting", text)


@contextlib.asynccontextmanager
async def replacing(
    job: ReplacingJob | None, folder: Path, cluster: Cluster, monitor: RunMonitor
) -> AsyncIterator[Replacements]:
    """Replace hosts that die while the body runs; then give back those that were asked for."""
    replacements = Replacements(job, folder, cluster, monitor)
    try:
        yield replacements
    finally:
        await replacements.close()
