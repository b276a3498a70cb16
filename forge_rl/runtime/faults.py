"""Tracks calls in flight and faults, so that every error names service, replica, call and phase."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

from forge_rl.errors import DeadlineError, Fault, ServiceError
from forge_rl.runtime.hold import Hold
from forge_rl.system.listeners import Listeners
from forge_rl.system.tasks import interrupted_by
from forge_rl.system.terminal import TRACE_LETTERS, shortened


class CallInFlight(NamedTuple):
    """A remote call in flight."""

    service: str
    replica: int | None
    method: str
    since: float


class Faults:
    """Collects calls in flight and process faults; one per controller.

        faults = Faults(phase=lambda: clock.current)
        faults.install()
        with faults.deadline("train", 3600):
            await trainer.step(...)

    Args:
        clock: monotonic seconds.
        phase: returns the name of the controller's current phase.
        hold: the run's pause, which extends deadlines; never paused by default.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        phase: Callable[[], str] = lambda: "",
        hold: Hold | None = None,
    ) -> None:
        self.clock = clock
        self.hold = hold or Hold(clock)
        self._phase = phase
        self._calls: dict[int, tuple[str, int | None, str, float]] = {}
        """Fields of each call in flight."""
        self._next = 0
        self._actions: dict[str, Callable[[str], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()
        self._failed: asyncio.Event = asyncio.Event()
        self.seen: list[Fault] = []
        """All faults, oldest first."""
        self.listeners = Listeners[[Fault]](self.listener_failed)
        """Called with each fault when it is recorded, and again on recovery."""
        self.spans = Listeners[[str, str, float, float, bool]]()
        """Called after each span of a replica's work with its lane, such as "generator/0", its name, begin and end on
        the monotonic clock, and whether other spans of its kind may overlap it."""
        self.closing = False
        """True while services stop on purpose: a process that exits is then not a fault."""

    def install(self) -> None:
        """Replace Monarch's default fault hook, which interrupts the controller and may let it exit 0."""
        import monarch.actor

        self._loop, self._context = asyncio.get_running_loop(), contextvars.copy_context()
        monarch.actor.unhandled_fault_hook = self._on_mesh_failure

    def on_failure(self, actor_name: str, action: Callable[[str], None]) -> None:
        """Run an action in the event loop, with Monarch's message, when Monarch reports that this actor failed."""
        self._actions[actor_name] = action

    def off_failure(self, actor_name: str) -> None:
        """Ignore Monarch's reports about this actor from now on."""
        self._actions.pop(actor_name, None)

    @contextlib.contextmanager
    def calling(self, service: str, replica: int | None, method: str) -> Iterator[None]:
        """Track a call as in flight while the body runs."""
        key = self.begin(service, replica, method)
        try:
            yield
        finally:
            self.end(key)

    def begin(self, service: str, replica: int | None, method: str) -> int:
        """Track a call as in flight; returns the key for `end`."""
        key, self._next = self._next, self._next + 1
        self._calls[key] = (service, replica, method, self.clock())
        return key

    def end(self, key: int) -> None:
        """Stop tracking a call."""
        del self._calls[key]

    def waiting_for(self) -> tuple[CallInFlight, int] | None:
        """Return the oldest call in flight and the number of calls in flight; None if there is none."""
        if not self._calls:
            return None
        # A dict keeps the order of insertion, so the first call is the oldest.
        return CallInFlight(*next(iter(self._calls.values()))), len(self._calls)

    @contextlib.contextmanager
    def deadline(self, phase: str, seconds: float) -> Iterator[None]:
        """Set a deadline for a phase of the current task; time in which the run is paused does not count.

        Raises:
            DeadlineError: the phase took longer; names the service, replica and call that it was waiting for.
        """

        async def expire() -> None:
            remaining_s, held_s = seconds, self.hold.seconds
            # Each round sleeps for as long as the run was paused during the previous sleep.
            while remaining_s > 0:
                await asyncio.sleep(remaining_s)
                await self.hold.released()
                remaining_s, held_s = self.hold.seconds - held_s, self.hold.seconds
            raise self._late(phase, seconds)  # built now, as the interruption ends the calls that it names

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
        more_calls = f", and {count - 1} more calls are in flight" if count > 1 else ""
        return DeadlineError(
            f"{message}; this call has run for {self.clock() - call.since:.0f} s{more_calls}",
            service=call.service,
            replica=call.replica,
            call=call.method,
            hint="see the replica's log; raise --phase-deadline-s if the work really takes longer",
        )

    @property
    def fatal(self) -> Fault | None:
        """The first fatal fault, if any."""
        return next((fault for fault in self.seen if fault.fatal), None)

    async def wait(self) -> ServiceError:
        """Wait for the first fatal fault."""
        await self._failed.wait()
        fault = self.fatal
        assert fault is not None
        error = ServiceError(fault.cause, service=fault.service, replica=fault.replica)
        error.phase = fault.phase
        return error

    async def raise_fatal(self) -> None:
        """Wait for the first fatal fault.

        Raises:
            ServiceError: the fault, half a second late, as a call in flight may fail with a better message.
        """
        error = await self.wait()
        await asyncio.sleep(0.5)
        raise error

    def record(self, service: str, replica: int | None, cause: str, *, fatal: bool = True) -> None:
        """Record a fault, unless services are stopping on purpose."""
        if self.closing:
            return
        fault = self._add(service, replica, cause, fatal=fatal)
        if fatal:
            self._failed.set()
        self.listeners.tell(fault)

    def recovered(self, service: str, replica: int) -> None:
        """Record that a replica has recovered from its faults so far."""
        for fault in self.seen:
            if (fault.service, fault.replica, fault.recovered_s) == (service, replica, None):
                fault.recovered_s = self.clock() - fault.at_s
                self.listeners.tell(fault)

    def _add(self, service: str, replica: int | None, cause: str, *, fatal: bool) -> Fault:
        fault = Fault(
            service=service,
            replica=replica,
            cause=shortened(cause),
            phase=self._phase(),
            at_s=self.clock(),
            fatal=fatal,
        )
        self.seen.append(fault)
        return fault

    def listener_failed(self, error: Exception) -> None:
        """Print and record a listener's exception, so that its caller can continue."""
        print(shortened("".join(traceback.format_exception(error)), TRACE_LETTERS), end="", file=sys.stderr)
        cause = shortened(f"a listener failed: {type(error).__name__}: {error}").splitlines()[0]
        # A listener that fails at every event is recorded once.
        if not any(fault.cause == cause for fault in self.seen):
            self._add("controller", None, cause, fatal=False)

    def _on_mesh_failure(self, failure: object) -> None:
        """Handle Monarch's failure report, in one of Monarch's threads."""
        text = str(failure)
        # Monarch appends a suffix to the name under which the actors were spawned.
        match = re.search(r"mesh_name=([\w-]+)", text)
        action = self._actions.get(match[1].rsplit("-", 1)[0]) if match else None
        if action is not None and self._loop is not None and not self._loop.is_closed():
            # Not in the thread's own context, in which Monarch finds an actor without processes and spawns nothing.
            self._loop.call_soon_threadsafe(action, text, context=self._context)
