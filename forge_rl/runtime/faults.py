"""What is in flight and what has failed, so that every error names service, replica, call and phase."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forge_rl.errors import DeadlineError, ServiceError
from forge_rl.runtime.tasks import interrupted_by


@dataclass(frozen=True, kw_only=True)
class Call:
    """A remote call in flight."""

    service: str
    replica: int | None
    method: str
    since: float


@dataclass(kw_only=True)
class Fault:
    """Something that failed, for the log and the summary."""

    service: str
    replica: int | None
    """None where the whole service failed."""
    cause: str
    phase: str = ""
    """That the controller was in."""
    at_s: float = 0.0
    """When, on the monotonic clock."""
    fatal: bool = True
    """Whether the run cannot go on."""
    recovered_s: float | None = None
    """Seconds until the replica served again; None while it does not."""


class Faults:
    """Collects calls in flight and the faults of processes; one for each controller.

    Args:
        clock: monotonic seconds.
        phase: name of the phase that the controller is in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, phase: Callable[[], str] = lambda: "") -> None:
        self._clock = clock
        self._phase = phase
        self._calls: dict[int, tuple[str, int | None, str, float]] = {}
        self._next = 0
        self._meshes: dict[str, Callable[[str], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: asyncio.Event = asyncio.Event()
        self.seen: list[Fault] = []
        """All faults, the oldest first."""
        self.listeners: list[Callable[[Fault], None]] = []
        """Called with each fault when it is recorded, and when it has been recovered from."""
        self.on_span: Callable[[str, str, float, float, bool], None] | None = None
        """Told what a replica did when it is over: its lane, such as "generator/0", what it was, begin and end on the
        monotonic clock, and whether others of its kind may overlap with it."""
        self.closing = False
        """While services stop on purpose, a process that ends is no fault."""

    def install(self) -> None:
        """Take over from Monarch's default, which interrupts the controller and may let it exit 0."""
        import monarch.actor

        self._loop = asyncio.get_running_loop()
        monarch.actor.unhandled_fault_hook = self._on_mesh_failure

    def on_failure(self, actor_name: str, action: Callable[[str], None]) -> None:
        """Run an action in the loop, with the cause, when Monarch says that an actor of this name failed."""
        self._meshes[actor_name] = action

    @contextlib.contextmanager
    def calling(self, service: str, replica: int | None, method: str) -> Iterator[None]:
        """Note a call as in flight."""
        key = self.begin(service, replica, method)
        try:
            yield
        finally:
            self.end(key)

    def begin(self, service: str, replica: int | None, method: str) -> int:
        """Note a call as in flight until `end` is given what this returns."""
        key, self._next = self._next, self._next + 1
        self._calls[key] = service, replica, method, self._clock()
        return key

    def end(self, key: int) -> None:
        """A call is over."""
        del self._calls[key]

    def waiting_for(self) -> tuple[Call, int] | None:
        """The call that has been in flight for longest, and how many are; None if none is."""
        if not self._calls:
            return None
        service, replica, method, since = next(iter(self._calls.values()))
        return Call(service=service, replica=replica, method=method, since=since), len(self._calls)

    @contextlib.contextmanager
    def deadline(self, phase: str, seconds: float) -> Iterator[None]:
        """Bound a phase of the current task.

        Raises:
            DeadlineError: it took longer; names the service, replica and call that it waited for.
        """

        async def expire() -> None:
            await asyncio.sleep(seconds)
            raise self._late(phase, seconds)

        with interrupted_by(expire):
            yield

    def _late(self, phase: str, seconds: float) -> DeadlineError:
        waiting = self.waiting_for()
        message = f"phase {phase} did not end within its {seconds:g} s"
        if waiting is None:
            return DeadlineError(
                f"{message}; no remote call is in flight", service="controller", hint="raise --phase-deadline-s"
            )
        call, count = waiting
        others = f", and {count - 1} more calls are in flight" if count > 1 else ""
        return DeadlineError(
            f"{message}; this call has run for {self._clock() - call.since:.0f} s{others}",
            service=call.service,
            replica=call.replica,
            call=call.method,
            hint="see the replica's log; raise --phase-deadline-s if the work really takes longer",
        )

    @property
    def fatal(self) -> Fault | None:
        """The first fault that the run cannot go on after."""
        return next((fault for fault in self.seen if fault.fatal), None)

    async def wait(self) -> ServiceError:
        """Wait for the first fatal fault."""
        await self._failed.wait()
        fault = self.fatal
        assert fault is not None
        error = ServiceError(fault.cause, service=fault.service, replica=fault.replica)
        error.phase = fault.phase
        return error

    def record(self, service: str, replica: int | None, cause: str, *, fatal: bool = True) -> Fault:
        """Note a fault; while services stop on purpose it is not kept."""
        fault = Fault(
            service=service, replica=replica, cause=cause, phase=self._phase(), at_s=self._clock(), fatal=fatal
        )
        if not self.closing:
            self.seen.append(fault)
            if fatal:
                self._failed.set()
            self._tell(fault)
        return fault

    def recovered(self, fault: Fault) -> None:
        """Note that what failed is at full strength again."""
        fault.recovered_s = self._clock() - fault.at_s
        if fault in self.seen:
            self._tell(fault)

    def _tell(self, fault: Fault) -> None:
        for listener in list(self.listeners):
            listener(fault)

    def _on_mesh_failure(self, failure: object) -> None:
        """Monarch's hook; runs in a thread of Monarch's."""
        text = str(failure)
        found = re.search(r"mesh_name=([\w-]+)", text)
        action = self._meshes.get(found[1].rsplit("-", 1)[0]) if found else None
        if action is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action, cause_of(text))


ENGINE_DIED = 71
"""Exit status of a process that ended because the engine below it did."""
REWARD_STUCK = 72
"""Exit status of a process that ended because its reward function did not come back."""


def cause_of(text: str) -> str:
    """One line of cause from what Monarch says of a failure."""
    if found := re.search(r"Killed\(sig=(\d+)\)", text):
        return describe_exit(-int(found[1]))
    if found := re.search(r"exited with non-zero code (\d+)", text):
        return describe_exit(int(found[1]))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "unknown"


_PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes), linux/pidfd.h
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60


def when_process_ends(pid: int, action: Callable[[], None]) -> None:
    """Run an action in a thread as soon as a process of this user ends; at once if it has ended already."""

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            select.select([fd], [], [])
            os.close(fd)
        action()

    threading.Thread(target=watch, name=f"watch-{pid}", daemon=True).start()


def exit_status(pidfd: int) -> int | None:
    """How the ended process behind a pidfd ended; a negative status is a signal.

    Monarch waits for its children too. Where it came first, Linux 6.15 and later still tell; before that: None. One
    that is a child of another host's process is told of in /proc until that one has waited for it.
    """
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
        pid = next(line.split()[1] for line in lines if line.startswith("Pid:"))
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _EXIT_CODE_OFFSET)[0])
    return None


def describe_exit(status: int | None) -> str:
    """How a process ended; a negative status is a signal, None is not known."""
    if status is None:
        return "its process ended"
    if status == -9:
        return "its process was killed by SIGKILL (by hand, or by the kernel for want of memory)"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    if status == ENGINE_DIED:
        return "its vLLM engine process died"
    if status == REWARD_STUCK:
        return "its reward function did not come back within its deadline"
    return f"its process exited with status {status}"
