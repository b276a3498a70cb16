"""Actor that watches and ends the processes of its host, in a process of its own: it answers while others hang."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
from monarch.actor import Actor, concurrent_endpoint

from forge_rl.runtime.host_logs import new_output
from forge_rl.runtime.processes import ProcessTree

_POLL_S = 0.5
"""Seconds between checks for stopped processes."""
_MOST_PROCESSES = 64
"""Maximum number of processes of a tree to check."""


class Event(NamedTuple):
    """Something that happened to a watched tree of processes."""

    mark: str
    """The tree."""
    pid: int
    """Process that ended; 0 if one was stopped instead."""
    status: int | None
    """Its exit status, see `processes.exit_status`."""


@dataclass(frozen=True, kw_only=True)
class _ProcessWatch:
    tree: ProcessTree
    descendants: bool
    """True if a stopped descendant counts too."""


class HostAgent(Actor):
    """Watches trees of processes, which are known by the value of an environment variable, and kills them.

    Args:
        variable: name of the environment variable.
    """

    def __init__(self, variable: str) -> None:
        self._variable = variable
        self._watched: dict[str, _ProcessWatch] = {}
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    @concurrent_endpoint
    async def process_id(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def watch(self, mark: str, pids: list[int], descendants: bool) -> None:
        """Report the end of these processes from now on, and once one is stopped, also a descendant if wanted."""
        tree = ProcessTree(self._variable, mark)
        self._watched[mark] = _ProcessWatch(tree=tree, descendants=descendants)
        for pid in pids:
            try:
                # Since the replica's answer, the process may have ended and its PID may have been reused.
                if not is_marked(pid, self._variable, mark):
                    raise ProcessLookupError(f"process {pid} is another one by now")
                tree.watch(pid, functools.partial(self._note, mark, pid))
            except (psutil.NoSuchProcess, ProcessLookupError):
                self._note(mark, pid, None)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())

    @concurrent_endpoint
    async def report(self, wait_s: float) -> list[Event]:
        """Return the events since the last report; if there are none, wait for one, at most this long."""
        if not self._events:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
        events = list(self._events)
        self._events.clear()
        return events

    @concurrent_endpoint
    async def new_output(self, name: str, offsets: dict[str, int]) -> dict[str, bytes]:
        return await asyncio.to_thread(new_output, name, offsets)

    @concurrent_endpoint
    async def signal(self, mark: str, number: int) -> None:
        """Send a signal to the watched processes of a tree."""
        if mark in self._watched:
            self._watched[mark].tree.signal_roots(signal.Signals(number))

    @concurrent_endpoint
    async def kill(self, mark: str, wait_s: float) -> list[int]:
        """Kill a tree's processes with all their descendants, and forget it; see `ProcessTree.kill`."""
        watched = self._watched.pop(mark, None)
        tree = watched.tree if watched is not None else ProcessTree(self._variable, mark)
        tree.unwatch()
        return await asyncio.to_thread(tree.kill, wait_s=wait_s)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            for mark, watched in list(self._watched.items()):
                max_processes = _MOST_PROCESSES if watched.descendants else len(watched.tree.roots)
                if watched.tree.has_been_stopped(max_processes=max_processes):
                    self._note(mark, 0, None)

    def _note(self, mark: str, pid: int, status: int | None) -> None:
        self._events.append(Event(mark, pid, status))
        self._news.set()


def is_marked(pid: int, variable: str, value: str) -> bool:
    """Return False if a process is known to lack the variable, as when its PID was reused.

    Raises:
        psutil.NoSuchProcess: it has exited.
    """
    try:
        return bool(psutil.Process(pid).environ().get(variable) == value)
    except psutil.AccessDenied:  # it closed its memory
        return True
