"""Runs a user's synchronous code in a thread, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forge_rl.runtime.in_hand import RunningCalls, number_of_call
from forge_rl.runtime.link import users_line

_LAST_WORDS_S = 1.0
"""Time for a process to report why it exits, after a function's deadline."""

T = TypeVar("T")


class StuckError(Exception):
    """A function did not return within its deadline; its text is the line at which it is, as " (score.py:12)"."""


class UserThread:
    """A thread for functions that may take long, one at a time.

        thread = UserThread(60.0, exit_status=72)
        score = await thread.call(lambda: function(task, text), in_hand)

    Args:
        deadline_s: timeout of a function, without its time in the queue. A thread cannot be killed, so the process
            exits soon after it instead.
        exit_status: of the process then.
    """

    def __init__(self, deadline_s: float, *, exit_status: int) -> None:
        self._deadline_s = deadline_s
        self._exit_status = exit_status
        self._thread = ThreadPoolExecutor(1)
        self._turn = asyncio.Lock()
        """Held while the thread is busy, so that time in the queue does not count."""

    async def call(self, function: Callable[[], T], in_hand: RunningCalls | None = None) -> T:
        """Call a function in the thread, which must not raise StopIteration: no future can hold that.

        Args:
            in_hand: record of the calls being executed.

        Raises:
            StuckError: it did not return within the deadline.
        """
        number, thread = number_of_call.get(), 0

        def run() -> T:
            nonlocal thread
            thread = threading.get_ident()
            with contextlib.nullcontext() if in_hand is None else in_hand.in_thread(number):
                return function()

        def exit_if_stuck() -> None:
            if not running.done():
                os._exit(self._exit_status)

        def finished(done: asyncio.Future[T]) -> None:
            stuck.cancel()
            self._turn.release()
            done.exception()  # the caller may have been cancelled: asyncio would complain that nobody looked

        await self._turn.acquire()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._thread, run)
        stuck = loop.call_later(self._deadline_s + _LAST_WORDS_S, exit_if_stuck)  # even if nobody waits any more
        running.add_done_callback(finished)
        await asyncio.wait([running], timeout=self._deadline_s)
        if running.done():
            return running.result()
        frame = sys._current_frames().get(thread)
        line = users_line(reversed(list(traceback.walk_stack(frame)))) if frame else ""
        faulthandler.dump_traceback()  # to the log
        raise StuckError(line)
