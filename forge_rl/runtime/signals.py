"""Signals that ask a run to stop: the controller alone heeds them, and ends its processes once it has saved."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""What scancel, systemd, a time limit or a closed terminal sends, often to all processes of a run at once."""

_DEFAULT, _IGNORE = 0, 1
"""C's SIG_DFL and SIG_IGN."""


def outlive_stop_signals(*, with_programs: bool = False) -> None:
    """Keep stop signals from ending this process, from any of its threads: the controller still needs it to save.

    Processes that it forks are ended by them again, as whoever forks one, such as a user's reward, may terminate it.

    Args:
        with_programs: whether programs that it starts outlive them too. Not where a user's code may start some.
    """
    for number in STOP_SIGNALS:
        # Python's own signal.signal wants the main thread. As a handler, unlike SIG_IGN, is not passed on to programs,
        # a function of C without any effect is one.
        _set_handler(number, _IGNORE if with_programs else _no_effect())
    os.register_at_fork(after_in_child=_heed_again)


@contextlib.contextmanager
def children_outlive_stop_signals() -> Iterator[None]:
    """Have stop signals not reach the processes that this thread starts in the body, whatever handlers they install.

    Nor do they reach what those start. Only SIGKILL ends them from outside.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # which lets some through again in this thread, where it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_again() -> None:
    for number in STOP_SIGNALS:
        if (before := _set_handler(number, _DEFAULT)) != _no_effect():
            _set_handler(number, before)


def _set_handler(number: int, handler: int) -> int:
    """Set a handler of the process, an address; return the one before."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    return function(number, handler) or _DEFAULT


def _no_effect() -> int:
    return ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or _DEFAULT
