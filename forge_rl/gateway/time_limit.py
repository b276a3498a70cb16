"""Bounds the processor time of code that reads hostile text in the event loop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_AGAIN_S = 0.05
"""Time until code that swallowed the error is interrupted again."""


class LateError(BaseException):
    """Raised in code that ran out of time. Not an Exception, which that code might catch."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function, and interrupt it once it has taken this much of the thread's processor time.

        call_within(1.0, lambda: pattern.findall(text))

    Python's bytecode and both packages of regular expressions can be interrupted; other C code runs to its end first.
    Python runs signal handlers in the main thread only: in another thread the time is not bounded.

    Raises:
        LateError: the function was interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    until = time.thread_time() + seconds
    runs = True

    def on_time(*_: object) -> None:
        if runs and time.thread_time() > until:  # the timer counts what other threads take, too
            raise LateError

    before = signal.signal(signal.SIGVTALRM, on_time)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
        return function()
    finally:
        runs = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
