"""CPU time limit for code that parses hostile text in the event loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_AGAIN_S = 0.05
"""Interval at which code that swallowed the error is interrupted again."""


class LateError(BaseException):
    """Raised in code that exceeds its time limit. Not an Exception, which that code might catch."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function, and interrupt it once it has used `seconds` of the thread's CPU time.

        call_within(1.0, lambda: pattern.findall(text))

    Python bytecode and the re and regex packages can be interrupted; other C code finishes first. Outside of
    the main thread, the only one in which Python runs signal handlers, the time is not limited.

    Raises:
        LateError: the function was interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    until = time.thread_time() + seconds
    runs = True

    def on_time(*_: object) -> None:
        if runs and time.thread_time() > until:  # the timer also counts other threads' time
            raise LateError

    before = signal.signal(signal.SIGVTALRM, on_time)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
        return function()
    finally:
        runs = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
