"""The controller's watch over another host, through an agent there: its processes, and whether it answers at all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forge_rl.errors import ForgeError, ServiceError
from forge_rl.runtime.fork_messages import MARK
from forge_rl.runtime.host_logs import MOST_BYTES, GatheredLogs
from forge_rl.runtime.processes import cause_of, is_by_signal

if TYPE_CHECKING:
    from forge_rl.runtime.host_agent import Event

_BEAT_S = 1.0
"""Seconds after which an agent answers even if nothing happened."""
_LOOK_S = 0.5
_SILENT_LOOKS = 6
"""Looks, over 3 s, for which an agent may leave its report unanswered. Counts looks, not seconds, so that nobody is
late when this process itself was stopped."""
_SLACK = 2
"""Factor over the slowest of an agent's recent reports, up to which it may be silent if that is longer: a host short of
CPU time is slow before it is silent."""
_REMEMBERED = 20
"""Number of last reports."""
_SILENT_LOOKS_OF_ALL = 40
"""Looks, over 20 s, if no other host answers either: more likely this process has no time, or lost its network."""
_LATELY_S = 2.0
"""Seconds within which a host that is not silent answers at least once."""
_PROBE_S = 1.5
"""Time for the other processes of a host to answer once its agent does not."""
_MOST_ANSWERS = 16
"""Maximum number of answers with output, a megabyte each, between two reports."""
_CALL_S = 10.0
_LAST_CALL_S = 3.0
_START_S = 120.0
_RESTART_S = 30.0
_MOST_RESTARTS = 3


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Processes to watch on a host, and what to do about them; each function is called in the event loop."""

    mark: str
    """Value of MARK in their environment."""
    pids: Sequence[int]
    descendants: bool
    """A stopped descendant counts as well."""
    on_end: Callable[[int, int | None], None]
    """Called with the PID and exit status of each process that ends."""
    on_stopped: Callable[[], None]
    """Called while one of them is stopped, as by SIGSTOP."""
    probe: Callable[[], Awaitable[object]]
    """Returns if the processes answer, and raises a ForgeError if not; soon."""


class Processes(Protocol):
    """The part of a Cluster that an agent needs."""

    lost_hosts: dict[str, str]
    heard: dict[str, float]
    """Time of the event loop's clock at which each watched host answered last."""

    def spawn(self, name: str, *, env: Mapping[str, str] | None = None, host: str = "") -> Any: ...

    async def stop(self, name: str) -> None: ...

    def lose(self, host: str, cause: str) -> None: ...


class HostWatcher:
    """Watches processes of one other host. Its agent starts with the first watch, and is replaced if it dies or hangs.

    A host counts as lost if neither its agent nor any watched process answers: noticed within 5 s, later if its agent
    has lately taken longer than 1.5 s to report, and within 22 s if no other watched host answers meanwhile.

    Args:
        host: name of the host.
        cluster: starts the agent; loses the host if it does not answer.
        logs: takes what the host's processes print, if they do not print it to a shared disk.
    """

    def __init__(self, host: str, cluster: Processes, *, logs: GatheredLogs | None = None) -> None:
        self._host = host
        self._cluster = cluster
        self._logs = logs
        self._taking = asyncio.Lock()
        self._agent: Any = None
        self._names = (f"agent-{host}-{number}" for number in itertools.count())
        self._mark = ""
        """Name of the current agent, which is also its mark."""
        self._starting = asyncio.Lock()
        self._watched: dict[str, Watch] = {}
        self._polling: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._looks: deque[int] = deque(maxlen=_REMEMBERED)
        """Looks that each of the agent's last reports took."""

    async def watch(self, watch: Watch) -> None:
        """Watch processes until they are killed by `kill`.

        Raises:
            ForgeError: the host is lost, or no agent starts there.
        """
        async with self._starting:
            if self._polling is None:
                await self._start_first()
                self._polling = asyncio.get_running_loop().create_task(self._poll())
        self._watched[watch.mark] = watch
        with contextlib.suppress(ForgeError):  # then the agent is replaced, and the next one gets all watches
            await self._watch_again(watch)

    def signal(self, mark: str, number: signal.Signals) -> None:
        """Have a signal sent to the watched processes with a mark."""

        async def tell() -> None:
            with contextlib.suppress(ForgeError):
                await self._call("signal", mark, int(number))

        task = asyncio.get_running_loop().create_task(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def kill(self, mark: str, *, wait_s: float) -> None:
        """Kill the processes with a mark and all their descendants, unless the host is lost; ends their watch."""
        self._watched.pop(mark, None)
        if self._polling is not None and self._host not in self._cluster.lost_hosts:
            with contextlib.suppress(ForgeError):  # they end with their host or, orphaned, after a minute
                await self._call("kill", mark, wait_s, deadline_s=wait_s + _CALL_S)

    async def _take_output(self, *, deadline_s: float = _CALL_S, max_answers: int = _MOST_ANSWERS) -> None:
        """Fetch what the host's processes have printed so far, in at most so many answers.

        Raises:
            ServiceError: the agent does not answer, or died.
        """
        if self._logs is None:
            return
        async with self._taking:
            offsets = await asyncio.to_thread(self._logs.take, self._host, {})
            # Bounded, as processes can print faster than this fetches, and their ends are handled only afterwards.
            for _ in range(max_answers if offsets else 0):
                output = await self._call("new_output", self._logs.name, offsets, deadline_s=deadline_s)
                offsets = await asyncio.to_thread(self._logs.take, self._host, output)
                if sum(map(len, output.values())) < MOST_BYTES:  # all that there was
                    return

    async def close(self) -> None:
        """Stop watching; the cluster stops the agent."""
        if self._polling is not None and not self._polling.done() and self._host not in self._cluster.lost_hosts:
            # The tail of a log says how its process ended, so all of it is fetched if there is time.
            with contextlib.suppress(ForgeError, TimeoutError):
                async with asyncio.timeout(_LAST_CALL_S):
                    await self._take_output(deadline_s=_LAST_CALL_S, max_answers=sys.maxsize)
        tasks = [*self._telling, *([self._polling] if self._polling is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_first(self) -> None:
        """Start the first agent; once more if a signal ends it meanwhile.

        Raises:
            ForgeError: the host is lost, or no agent starts there.
        """
        try:
            await self._start(_START_S)
        except ServiceError as error:
            if not is_by_signal(error.message):
                raise
            await self._cluster.stop(self._mark)
            await self._start(_START_S)

    async def _start(self, deadline_s: float) -> None:
        """Start an agent.

        Raises:
            ForgeError: the host is lost, or the agent does not answer.
        """
        from forge_rl.runtime.host_agent import HostAgent

        name = next(self._names)
        mesh = self._cluster.spawn(name, env={MARK: name}, host=self._host)
        self._agent, self._mark = mesh.procs.spawn("host_agent", HostAgent, MARK), name
        await self._call("process_id", deadline_s=deadline_s)

    async def _poll(self) -> None:
        while True:
            try:
                events = await self._report()
                await self._take_output()  # first, as causes of death are read there
            except ServiceError as error:
                # Events that this report lost come again: the next agent finds which processes have ended.
                if not await self._replace(error.message):
                    return
                continue
            for event in events:
                self._handle(event)

    def _handle(self, event: Event) -> None:
        watch = self._watched.get(event.mark)
        # Its tree has been killed on request in the meantime; such events mean nothing.
        if watch is None:
            return
        if event.pid:
            watch.on_end(event.pid, event.status)
        else:
            watch.on_stopped()

    async def _report(self) -> list[Event]:
        """Return the agent's next report.

        Raises:
            ServiceError: it does not answer, or died.
        """
        # Without a deadline in seconds: looks are counted instead, see _SILENT_LOOKS.
        answer = asyncio.ensure_future(self._call("report", _BEAT_S, deadline_s=None))
        answer.add_done_callback(lambda late: late.cancelled() or late.exception())  # not logged if nobody waits
        looks = 0
        # Longer for a host that was slow lately; _SILENT_LOOKS_OF_ALL while no other host answers either.
        max_looks = min(_SILENT_LOOKS_OF_ALL, max(_SILENT_LOOKS, _SLACK * max(self._looks, default=0)))
        while looks < max_looks or (looks < _SILENT_LOOKS_OF_ALL and not self._another_answers()):
            await asyncio.wait((answer,), timeout=_LOOK_S)
            looks += 1
            if answer.done():
                events: list[Event] = answer.result()
                self._cluster.heard[self._host] = asyncio.get_running_loop().time()
                self._looks.append(looks)
                return events
        answer.cancel()
        raise self._error(f"it has not answered for {looks * _LOOK_S:g} s")

    def _another_answers(self) -> bool:
        """Return whether another host has answered lately, or there is none to ask."""
        lost_hosts, since = self._cluster.lost_hosts, asyncio.get_running_loop().time() - _LATELY_S
        answer_times = [
            time for host, time in self._cluster.heard.items() if host != self._host and host not in lost_hosts
        ]
        return not answer_times or max(answer_times) > since

    async def _replace(self, cause: str) -> bool:
        """Replace an agent that died or hangs, unless its whole host does; return whether the host lives."""
        # Without a watched process nobody else can answer, so an agent that fails is simply replaced.
        if self._watched and not await self._answers():
            self._cluster.lose(self._host, cause)
            return False
        old = self._mark
        for _ in range(_MOST_RESTARTS):
            with contextlib.suppress(ForgeError):
                await self._start(_RESTART_S)
                break
        else:
            self._cluster.lose(self._host, f"{cause}; another agent did not start {_MOST_RESTARTS} times")
            return False
        # The old agent may only hang. Like every process with a mark, it is killed through the new one.
        await self.kill(old, wait_s=_CALL_S)
        await self._cluster.stop(old)
        for watch in list(self._watched.values()):
            with contextlib.suppress(ForgeError):
                await self._watch_again(watch)
        return True

    async def _answers(self) -> bool:
        """Return whether any watched process answers."""

        async def ask(watch: Watch) -> bool:
            try:
                await watch.probe()
            except ForgeError:
                return False
            return True

        tasks = [asyncio.ensure_future(ask(watch)) for watch in list(self._watched.values())]
        try:
            return any([await answer for answer in asyncio.as_completed(tasks, timeout=_PROBE_S)])
        except TimeoutError:
            return any(task.result() for task in tasks if task.done() and not task.cancelled())
        finally:
            for task in tasks:
                task.cancel()

    async def _watch_again(self, watch: Watch) -> None:
        await self._call("watch", watch.mark, list(watch.pids), watch.descendants)

    def _call(self, method: str, *args: object, deadline_s: float | None = _CALL_S) -> Coroutine[Any, Any, Any]:
        return self._ask(getattr(self._agent, method), args, deadline_s)

    async def _ask(self, endpoint: Any, args: Sequence[object], deadline_s: float | None) -> Any:
        """Call an endpoint of the agent.

        Raises:
            ServiceError: it died, raised something, or did not answer in time.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await endpoint.call_one(*args)
        except TimeoutError:
            raise self._error(f"no answer within {deadline_s:g} s") from None
        except Exception as error:  # Monarch raises several unrelated classes
            raise self._error(cause_of(str(error))) from error

    def _error(self, message: str) -> ServiceError:
        return ServiceError(message, service=self._mark, hint="see the agent's log in the run folder")
