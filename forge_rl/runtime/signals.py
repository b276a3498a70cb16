"""Stop signals: only the controller reacts to them, and it stops its processes once it has saved."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
"""Signals sent by scancel, systemd, a time limit or a closed terminal, often to all processes of a run at once. SIGUSR1
is the notice that Slurm users ask for by --signal=USR1@SECONDS."""

_DEFAULT, _IGNORE = 0, 1
"""C's SIG_DFL and SIG_IGN."""


def outlive_stop_signals(*, with_programs: bool = False) -> None:
    """Make this process ignore stop signals, since the controller still needs it to save; works in any thread.

    Forked processes react to them again, as user code that forks, such as a reward, may want to terminate them.

    Args:
        with_programs: whether programs that it starts ignore them too. Not if user code may start programs.
    """
    for number in STOP_SIGNALS:
        # Python's signal.signal works only in the main thread. The handler is a C function without effect because
        # handlers, unlike SIG_IGN, are not inherited by executed programs.
        _set_handler(number, _IGNORE if with_programs else _no_effect())
    os.register_at_fork(after_in_child=_heed_again)


@contextlib.contextmanager
def children_outlive_stop_signals() -> Iterator[None]:
    """Block stop signals in the processes that this thread starts in the body.

    A blocked signal stays blocked even if the process installs a handler, and descendants inherit the block. Only
    SIGKILL stops them from outside.
    """
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # unblocks some in this thread when it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _heed_again() -> None:
    for number in STOP_SIGNALS:
        if (old_handler := _set_handler(number, _DEFAULT)) != _no_effect():
            _set_handler(number, old_handler)


def _set_handler(number: int, handler: int) -> int:
    """Set the process's handler, an address; return the previous one."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    return function(number, handler) or _DEFAULT


def _no_effect() -> int:
    return ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or _DEFAULT
