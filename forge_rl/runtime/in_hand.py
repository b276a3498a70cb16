"""Records the calls that a process is executing in a file that outlives it, so that a death can be blamed on a call."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import types
from collections.abc import Awaitable, Generator, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_SLOTS = struct.Struct("qq")
"""Numbers of the calls running in the event loop and in the worker thread, each plus 1; 0 for none."""

number_of_call: ContextVar[int] = ContextVar("number_of_call", default=-1)
"""Number of the call that the current task serves."""


class RunningCalls:
    """Records the calls currently running in a process's event loop and in its worker thread.

        in_hand = RunningCalls(path)
        answer = await in_hand.noting(7, method())
        with in_hand.in_thread(8):
            function()

    A record costs half a microsecond: it goes to mapped memory, which the kernel keeps when the process dies.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            self._memory = mmap.mmap(fd, _SLOTS.size)
        finally:
            os.close(fd)

    @types.coroutine
    def noting(self, number: int, work: Awaitable[Any]) -> Generator[Any, Any, Any]:
        """Await a call's work, recording its number while the loop runs its code but not while it waits."""
        # Drives the awaitable step by step, as `await` would, to mark exactly the time in which its code runs.
        steps: Any = work.__await__()
        value, error = None, None
        while True:
            struct.pack_into("q", self._memory, 0, number + 1)
            try:
                waits_for = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            finally:
                struct.pack_into("q", self._memory, 0, 0)
            try:
                value, error = (yield waits_for), None
            except BaseException as raised:  # including a cancellation, which is meant for the work
                value, error = None, raised

    @contextlib.contextmanager
    def in_thread(self, number: int) -> Iterator[None]:
        """Record a call's number while the body runs, in a thread that runs one call at a time."""
        struct.pack_into("q", self._memory, 8, number + 1)
        try:
            yield
        finally:
            struct.pack_into("q", self._memory, 8, 0)


def create(path: Path) -> None:
    """Create the file for a process that starts."""
    path.write_bytes(bytes(_SLOTS.size))


def read(path: Path) -> frozenset[int]:
    """Return the numbers of the calls that a process was executing when it ended; empty if unknown."""
    with contextlib.suppress(OSError, struct.error):
        return frozenset(noted - 1 for noted in _SLOTS.unpack(path.read_bytes()) if noted > 0)
    return frozenset()
