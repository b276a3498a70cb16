"""Calls in flight and faults, so that every error names service, replica, call and phase."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from forge_rl.errors import DeadlineError, ServiceError
from forge_rl.runtime.tasks import interrupted_by


class Call(NamedTuple):
    """Remote call in flight."""

    service: str
    replica: int | None
    method: str
    since: float


@dataclass(kw_only=True)
class Fault:
    """Failure of a replica or a service, for the log and the summary."""

    service: str
    replica: int | None
    """None if the whole service failed."""
    cause: str
    phase: str = ""
    """Name of the phase that the controller was in."""
    at_s: float = 0.0
    """Time of the failure, on the monotonic clock."""
    fatal: bool = True
    """True if the run cannot go on."""
    recovered_s: float | None = None
    """Seconds until the replica served again; None while it does not."""


class Faults:
    """Collects calls in flight and the faults of processes; one for each controller.

        faults = Faults(phase=lambda: clock.current)
        faults.install()
        with faults.deadline("train", 3600):
            await trainer.step(...)

    Args:
        clock: monotonic seconds.
        phase: gives the name of the phase that the controller is in.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, phase: Callable[[], str] = lambda: "") -> None:
        self._clock = clock
        self._phase = phase
        self._calls: dict[int, tuple[str, int | None, str, float]] = {}
        """Fields of each call in flight."""
        self._next = 0
        self._actions: dict[str, Callable[[str], None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: asyncio.Event = asyncio.Event()
        self.seen: list[Fault] = []
        """All faults, the oldest first."""
        self.listeners: list[Callable[[Fault], None]] = []
        """Called with each fault when it is recorded, and when it has been recovered from."""
        self.on_span: Callable[[str, str, float, float, bool], None] | None = None
        """Called after each piece of a replica's work with its lane, such as "generator/0", its name, begin and end on
        the monotonic clock, and whether others of its kind may overlap with it."""
        self.closing = False
        """Set while services stop on purpose: a process that ends is then no fault."""

    def install(self) -> None:
        """Take over from Monarch's default, which interrupts the controller and may let it exit 0."""
        import monarch.actor

        self._loop = asyncio.get_running_loop()
        monarch.actor.unhandled_fault_hook = self._on_mesh_failure

    def on_failure(self, actor_name: str, action: Callable[[str], None]) -> None:
        """Run an action in the loop, with Monarch's text, when Monarch says that an actor of this name failed."""
        self._actions[actor_name] = action

    def off_failure(self, actor_name: str) -> None:
        """Ignore from now on what Monarch says about an actor of this name."""
        self._actions.pop(actor_name, None)

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
        self._calls[key] = (service, replica, method, self._clock())
        return key

    def end(self, key: int) -> None:
        """Forget a call that is over."""
        del self._calls[key]

    def waiting_for(self) -> tuple[Call, int] | None:
        """Return the oldest call in flight and the number of those in flight; None if there is none."""
        if not self._calls:
            return None
        return Call(*next(iter(self._calls.values()))), len(self._calls)

    @contextlib.contextmanager
    def deadline(self, phase: str, seconds: float) -> Iterator[None]:
        """Bound a phase of the current task.

        Raises:
            DeadlineError: the phase took longer; names the service, replica and call that it waited for.
        """

        async def expire() -> None:
            await asyncio.sleep(seconds)
            raise self._late(phase, seconds)  # made now: the interruption ends the calls that it names

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

    def record(self, service: str, replica: int | None, cause: str, *, fatal: bool = True) -> None:
        """Note a fault, unless services stop on purpose."""
        if self.closing:
            return
        fault = Fault(
            service=service, replica=replica, cause=cause, phase=self._phase(), at_s=self._clock(), fatal=fatal
        )
        self.seen.append(fault)
        if fatal:
            self._failed.set()
        self._tell(fault)

    def recovered(self, service: str, replica: int) -> None:
        """Note that a replica is at full strength again after its faults so far."""
        for fault in self.seen:
            if (fault.service, fault.replica, fault.recovered_s) == (service, replica, None):
                fault.recovered_s = self._clock() - fault.at_s
                self._tell(fault)

    def _tell(self, fault: Fault) -> None:
        for listener in list(self.listeners):
            self.tell(listener, fault)

    def tell(self, listener: Callable[..., object], *news: object) -> None:
        """Call a listener; print and record what it raises, so that the caller continues."""
        try:
            listener(*news)
        except Exception as error:
            traceback.print_exception(error)
            cause = f"what happened could not be told: {type(error).__name__}: {error}".splitlines()[0]
            if not any(fault.cause == cause for fault in self.seen):
                self.seen.append(
                    Fault(
                        service="controller",
                        replica=None,
                        cause=cause,
                        phase=self._phase(),
                        at_s=self._clock(),
                        fatal=False,
                    )
                )

    def _on_mesh_failure(self, failure: object) -> None:
        """Take Monarch's report of a failure, in a thread of Monarch's."""
        text = str(failure)
        found = re.search(r"mesh_name=([\w-]+)", text)
        action = self._actions.get(found[1].rsplit("-", 1)[0]) if found else None
        if action is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action, text)
