"""Runs a user's synchronous code in a thread, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from forge_rl.runtime.in_hand import RunningCalls, number_of_call
from forge_rl.runtime.link import users_line

_LAST_WORDS_S = 1.0
"""Time for a process to report why it exits, after a function's deadline."""

T = TypeVar("T")


class StuckError(Exception):
    """A function did not return within its deadline; its text is the line at which it is, as " (score.py:12)"."""


@dataclass(eq=False, slots=True)
class _UserCall:
    """A function to call, and its result or error."""

    function: Callable[[], Any]
    in_hand: RunningCalls | None
    number: int
    """Number of the call that it serves."""
    future: asyncio.Future[Any]
    """Gets the result in the event loop."""
    began: float = 0.0
    """When it was called, on the monotonic clock."""
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            with contextlib.nullcontext() if self.in_hand is None else self.in_hand.in_thread(self.number):
                self.result = self.function()
        except StopIteration as error:  # no future can hold it, and others' results must still be delivered
            self.error = RuntimeError(f"StopIteration {error}".strip())
        except BaseException as error:
            self.error = error

    def resolve(self) -> None:
        if self.future.done():  # its caller was cancelled, or told that it is stuck
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class UserThread:
    """A thread for functions that may take long, one at a time.

        thread = UserThread(60.0, exit_status=72)
        score = await thread.call(lambda: function(task, text), in_hand)

    Most functions take microseconds, and a change of threads a hundred. So the thread calls the waiting functions one
    after the other, and wakes the event loop once for many results.

    Args:
        deadline_s: timeout of a function, without its time in the queue. A thread cannot be killed, so the process
            exits soon after it instead.
        exit_status: the process's exit status in that case.
    """

    def __init__(self, deadline_s: float, *, exit_status: int) -> None:
        self._deadline_s = deadline_s
        self._exit_status = exit_status
        self._executor = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        """Guards both queues and `_works`: whether a queue is empty decides who wakes whom."""
        self._jobs: deque[_UserCall] = deque()
        """Functions that wait to be called."""
        self._works = False
        """Whether the thread is running functions; it looks for the next one before it stops."""
        self._results: list[_UserCall] = []
        """Functions that returned, until the event loop takes them; the first one in an empty list wakes it."""
        self._running: _UserCall | None = None
        self._thread = 0
        """Identifies the thread while it is at work."""
        self._timer: asyncio.TimerHandle | None = None
        """Next look at the time of the running function; None while there is none."""

    async def call(self, function: Callable[[], T], in_hand: RunningCalls | None = None) -> T:
        """Call a function in the thread. A StopIteration that it raises becomes a RuntimeError.

        Args:
            in_hand: record of the calls being executed.

        Raises:
            StuckError: it did not return within the deadline.
        """
        loop = asyncio.get_running_loop()
        job = _UserCall(function, in_hand, number_of_call.get(), loop.create_future())
        with self._lock:
            self._jobs.append(job)
            begins, self._works = not self._works, True
        # The thread takes further jobs by itself; only the first one after a rest must wake it.
        if begins:
            self._executor.submit(self._work, loop)
        if self._timer is None:
            self._timer = loop.call_later(self._deadline_s, self._look, loop)
        result: T = await job.future
        return result

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call functions until none waits; runs in the thread."""
        self._thread = threading.get_ident()
        while True:
            with self._lock:
                if not self._jobs:
                    self._works = False
                    return
                job = self._jobs.popleft()
            # Nobody waits for it, so it is not called at all.
            if job.future.cancelled():
                continue
            # Set before `_running`, which the event loop reads without the lock.
            job.began = time.monotonic()
            self._running = job
            job.run()
            self._running = None
            with self._lock:
                self._results.append(job)
                # A later result joins the list that the loop has already been woken for.
                is_first = len(self._results) == 1
            if is_first:
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            results, self._results = self._results, []
        for job in results:
            job.resolve()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the process soon if the running function is past its deadline, even if nobody waits for it any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        job, now_s = self._running, time.monotonic()
        if job is None and not self._works:
            return
        # Between two functions, the next one has its whole time before it.
        left_s = self._deadline_s if job is None else job.began + self._deadline_s - now_s
        if job is None or left_s > 0:
            self._timer = loop.call_later(left_s, self._look, loop)
            return
        # The error needs a moment to reach the controller before the process ends.
        loop.call_later(_LAST_WORDS_S, self._exit_if_stuck, loop, job)
        frame = sys._current_frames().get(self._thread)
        line = users_line(reversed(list(traceback.walk_stack(frame)))) if frame else ""
        faulthandler.dump_traceback()  # to the log
        if not job.future.done():
            job.future.set_exception(StuckError(line))

    def _exit_if_stuck(self, loop: asyncio.AbstractEventLoop, job: _UserCall) -> None:
        # A function that returned in that moment saves its process.
        if self._running is job:
            os._exit(self._exit_status)
        self._look(loop)
