"""Bounds the time that code on hostile text may take in the event loop, by interrupting it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

_LEAST_S = 1e-3
"""Shortest time for which the system's timer is set."""


class LateError(BaseException):
    """Code that was interrupted. Not an Exception: the code itself might catch that and go on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the body once it has taken so many seconds of this thread's processor time.

        with time_limit(0.25):
            pattern.findall(text)

    Python's regular expressions look for signals as they match, and are interrupted too; other code in C ends first.
    Only the main thread gets signals: in another one, nothing is bounded.

    Raises:
        LateError: the body was interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    until = time.thread_time() + seconds
    runs = True

    def on_alarm(*_: object) -> None:
        if not runs:  # it came just after the end
            return
        if (left := until - time.thread_time()) > 0:  # others had the processor
            signal.setitimer(signal.ITIMER_REAL, max(left, _LEAST_S))
        else:
            raise LateError

    before = signal.signal(signal.SIGALRM, on_alarm)
    began, (left, interval) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, max(seconds, _LEAST_S))
    try:
        yield
    finally:
        runs = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), _LEAST_S), interval)
