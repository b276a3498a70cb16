"""Link to a replica: batches concurrent calls and streams into few messages, as each message costs a millisecond.

The controller posts the calls that accumulated during the last post. A long poll returns the replies that are ready.
Messages have a bounded size, as otherwise one end would be idle while the other reads. Each call and each reply is
pickled separately, so that a bad value breaks only one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import pickle
import sys
import sysconfig
import traceback
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime.in_hand import RunningCalls, number_of_call
from forge_rl.system.tasks import TaskGroup
from forge_rl.system.terminal import TRACE_LETTERS, shortened

POLL_S = 5.0
"""Seconds for which a poll waits for a first reply."""
_MOST = 512
"""Maximum calls or replies per message. With thousands in flight, the two ends would otherwise alternate waiting for
each other, and an event loop would be blocked for seconds."""
_MOST_BYTES = 4 << 20
"""A message beyond this size takes no further calls or replies: an event loop reads it in a few milliseconds."""
_MOST_WAITING_BYTES = 16 << 20
"""Beyond this many bytes of uncollected replies, the replica's methods wait until the controller collects some."""

Request: TypeAlias = tuple[int, str, bytes, bool]
"""Request to a replica: call number, method, pickled arguments, whether it streams. Method "" cancels the call."""

Reply: TypeAlias = tuple[int, int, bytes]
"""Reply of a replica: call number, one of the kinds below, and the pickled value or error."""

T = TypeVar("T", Request, Reply)

_NOT_USERS = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")} | {Path(__file__).parents[1]}
"""Folders with code that is not the user's."""
_LOOK_S = 0.05
"""Minimum seconds between two scans of all deadlines."""
_NONE = pickle.dumps(None)
_VALUE, _ITEM, _ERROR = range(3)
_DIED, _STOPPED, _LATE, _KILLED, _SPARED = range(3, 8)  # set by the controller itself, with the cause as text


class Link:
    """The controller's end of a link. Starts with the first call.

    Args:
        actor: Monarch's handle of one process with a ServiceActor.
        error: makes an error from its class, the method and a message.
        on_lost: called with the error when the link breaks unasked; the owner must then call `close`.
        begin: called with the method when a call begins; returns a key.
        end: called with that key when the call has ended, and whether the replica answered.
    """

    def __init__(
        self,
        actor: Any,
        *,
        error: Callable[[type[ServiceError], str, str], ServiceError],
        on_lost: Callable[[Exception], None],
        begin: Callable[[str], int],
        end: Callable[[int, bool], None],
    ) -> None:
        self._actor = actor
        self._error = error
        self._on_lost = on_lost
        self._begin = begin
        self._end = end
        self._numbers = itertools.count()
        self._calls: dict[int, _Pending] = {}
        self.deadlines = Deadlines(self._calls)
        self._outbox: deque[Request] = deque()
        self._waiting = asyncio.Event()
        self._broken: tuple[int, bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self.silent_polls = 0
        """Number of watchdog checks since the replica last answered a poll."""

    @property
    def open(self) -> bool:
        """True while the replica must answer polls."""
        return self._task is not None and self._broken is None

    async def ask(
        self,
        method: str,
        args: tuple[object, ...],
        deadline_s: float,
        on_item: Callable[[Any], object] | None = None,
    ) -> Any:
        """Await a method of the actor; see Replica.ask."""
        key = self._begin(method)  # a `with` would cost as much as everything else here
        kind = _STOPPED
        try:
            call = _Pending(next(self._numbers), method, deadline_s, on_item)
            self._send(call, args)
            try:
                kind, payload = await call
            finally:
                if self._calls.pop(call.number, None) is not None:  # cancelled here: cancel it in the replica too
                    self._put((call.number, "", b"", False))
        finally:
            self._end(key, kind <= _ERROR)
        return self._value(method, kind, payload)

    def fail(self, cause: str, *, died: bool, in_hand: Collection[int] | None = None) -> None:
        """Fail all calls in flight and later ones, with ReplicaError if the replica died, else ServiceError.

        `in_hand` has the numbers of the calls that it was executing when it died; they are blamed. None if unknown.
        """
        if self._broken is not None:
            return
        self._broken = (_DIED if died else _STOPPED, cause.encode())
        for number, call in self._calls.items():
            # Without a record of what was running, blame stays unknown; with one, only the calls in it are blamed.
            kind = _DIED if in_hand is None else _KILLED if number in in_hand else _SPARED
            call.put((kind, cause.encode()) if died else self._broken)
        self._calls.clear()
        self.deadlines.cancel()
        if self._task is not None:
            self._task.cancel()

    def interrupt(self, cause: str) -> None:
        """Cancel all calls in flight; they raise a ReplicaError that blames none of them."""
        for call in self._calls.values():
            call.put((_SPARED, cause.encode()))

    async def close(self) -> None:
        """Stop the link's tasks."""
        self.fail("the service has been stopped", died=False)
        if self._task is not None:
            await asyncio.wait([self._task])

    def _send(self, call: _Pending, args: tuple[object, ...]) -> None:
        method = call.method
        if self._broken is not None:
            self._value(method, *self._broken)  # raises
        try:
            # Pickled here, not in `_post`, so that a bad argument raises in its own caller and breaks no other call.
            payload = _dumps(args)
        except Exception as error:
            raise self._error(ServiceError, method, f"an argument cannot be pickled: {_describe(error)}") from error
        self._calls[call.number] = call
        self.deadlines.start(call)
        self._put((call.number, method, payload, call.on_item is not None))

    def _put(self, message: Request) -> None:
        self._outbox.append(message)
        self._waiting.set()
        # Started by the first call, as a replica without calls need not answer polls.
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _value(self, method: str, kind: int, payload: bytes) -> Any:
        if kind in (_VALUE, _ITEM):
            try:
                return pickle.loads(payload)
            except Exception as error:
                message = f"the result cannot be unpickled: {_describe(error)}"
                raise self._error(ServiceError, method, message) from error
        if kind == _ERROR:
            # A ForgeError travels whole; any other error only as a text.
            text, pickled = pickle.loads(payload)
            raise _unpack(pickled) or self._error(ServiceError, method, text)
        kinds = {_STOPPED: ServiceError, _LATE: DeadlineError}
        failure = self._error(kinds.get(kind, ReplicaError), method, payload.decode())
        if isinstance(failure, ReplicaError):
            failure.blamed = {_KILLED: True, _SPARED: False}.get(kind)
        raise failure

    async def _run(self) -> None:
        try:
            # If either task fails, the other ends too: half a link would leave its calls waiting.
            async with TaskGroup() as group:
                group.create_task(self._post())
                group.create_task(self._collect())
        except ExceptionGroup as errors:
            self._on_lost(errors.exceptions[0])

    async def _post(self) -> None:
        while True:
            await self._waiting.wait()
            # Calls that come while a message is on its way gather for the next one.
            messages = _pop_message(self._outbox)
            if not self._outbox:
                self._waiting.clear()
            await self._actor.link_post.call_one(pickle.dumps(messages))

    async def _collect(self) -> None:
        while True:
            replies: list[Reply] = pickle.loads(await self._actor.link_collect.call_one(POLL_S))
            self.silent_polls = 0
            for number, kind, payload in replies:
                # An item leaves its stream open; any other reply is a call's last.
                call = self._calls.get(number) if kind == _ITEM else self._calls.pop(number, None)
                if call is None or call.done():  # cancelled meanwhile
                    continue
                if kind != _ITEM:
                    call.put((kind, payload))
                    continue
                # A stream's deadline counts from its previous item.
                self.deadlines.start(call)
                assert call.on_item is not None, "a plain method yields no items"
                try:
                    # The call stays registered, by which `ask` knows that it must cancel the stream in the replica.
                    if call.on_item(self._value(call.method, kind, payload)) is True:
                        call.put((_VALUE, _NONE))
                except Exception as error:  # the caller's error, unless it broke this link
                    if not call.done():
                        call.set_exception(error)


# A future itself rather than an object that has one, as thousands are in flight.
class _Pending(asyncio.Future[tuple[int, bytes]]):
    """Reply to a call in flight."""

    __slots__ = ("deadline_s", "due", "method", "number", "on_item")

    def __init__(
        self, number: int, method: str, deadline_s: float, on_item: Callable[[Any], object] | None = None
    ) -> None:
        super().__init__()
        self.number = number
        self.method = method
        self.deadline_s = deadline_s
        self.due = math.inf
        """Deadline on the loop's clock."""
        self.on_item = on_item

    def put(self, reply: tuple[int, bytes]) -> None:
        if not self.done():
            self.set_result(reply)

    def be_late(self) -> None:
        self.put((_LATE, f"no {'answer' if self.on_item is None else 'item'} within {self.deadline_s:g} s".encode()))


class Deadlines:
    """Times out late calls. One timer scans all of them, as thousands are in flight and few are late.

    Args:
        calls: calls in flight.
    """

    def __init__(self, calls: Mapping[int, _Pending]) -> None:
        self._calls = calls
        self._held = False
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = math.inf
        """Time of the timer."""

    def start(self, call: _Pending) -> None:
        """Start a call's deadline now; a stream gets none while streams are held."""
        loop = asyncio.get_running_loop()
        call.due = math.inf if self._held and call.on_item is not None else loop.time() + call.deadline_s
        # The timer only moves to an earlier time; later deadlines are found when it goes off.
        if call.due < self._look_at:
            self.cancel()
            self._wait(loop, call.due)

    def _wait(self, loop: asyncio.AbstractEventLoop, wake_at: float) -> None:
        if wake_at < math.inf:
            self._look_at, self._timer = wake_at, loop.call_at(wake_at, self._look)

    def hold_streams(self, is_held: bool) -> None:
        """Suspend the deadlines of streams, or restart them."""
        if is_held != self._held:
            self._held = is_held
            for call in self._calls.values():
                if call.on_item is not None:
                    self.start(call)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._look_at, self._timer = math.inf, None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        loop_time, next_due = loop.time(), math.inf
        for call in list(self._calls.values()):
            if call.due <= loop_time:
                call.be_late()
            else:
                next_due = min(next_due, call.due)
        self._look_at, self._timer = math.inf, None
        # No sooner than _LOOK_S from now, so that calls which become late one after another share a scan.
        self._wait(loop, max(next_due, loop_time + _LOOK_S))


class LinkEnd:
    """The replica's end of a link: runs the actor's methods for the controller."""

    def __init__(self, actor: object) -> None:
        self._actor = actor
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._replies: deque[Reply] = deque()
        self._waiting_bytes = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self.in_hand: RunningCalls | None = None
        """Records the running calls, if enabled."""

    def post(self, messages: bytes) -> None:
        """Start new calls and stop cancelled ones."""
        for number, method, payload, streams in pickle.loads(messages):
            if method:
                task = asyncio.get_running_loop().create_task(self._answer(number, method, payload, streams))
                self._tasks[number] = task
                task.add_done_callback(functools.partial(self._tasks.pop, number))
            elif number in self._tasks:
                # Removed first, by which `_answer` tells the controller's cancellation from the method's own.
                self._tasks.pop(number).cancel()

    async def collect(self, wait_s: float) -> bytes:
        """Return pickled replies as soon as there is one, or an empty list after `wait_s` seconds."""
        if not self._replies:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ready.wait()
            await asyncio.sleep(0)  # other calls of the same post finish in the same loop iteration
        replies = _pop_message(self._replies)
        self._waiting_bytes -= sum(len(payload) for _, _, payload in replies)
        self._room.set()
        if not self._replies:
            self._ready.clear()
        return pickle.dumps(replies)

    async def _put(self, number: int, kind: int, payload: bytes) -> None:
        """Queue a reply, once few enough bytes are waiting."""
        # Checked after each wake-up, as several methods may wait and one reply may fill the room.
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            self._room.clear()
            await self._room.wait()
        self._waiting_bytes += len(payload)
        self._replies.append((number, kind, payload))
        self._ready.set()

    async def _answer(self, number: int, method: str, payload: bytes, streams: bool) -> None:
        number_of_call.set(number)
        try:
            result = getattr(self._actor, method)(*pickle.loads(payload))
            if streams:
                # Closed as soon as the controller cancels, not when the generator is collected.
                async with contextlib.aclosing(result) as items:
                    async for item in items:
                        await self._put(number, _ITEM, _dumps(item))
                await self._put(number, _VALUE, _NONE)
            else:
                work = result if self.in_hand is None else self.in_hand.noting(number, result)
                await self._put(number, _VALUE, _dumps(await work))
        except BaseException as error:
            # In an asyncio task, a SystemExit or KeyboardInterrupt of user code would end the process and all calls.
            if isinstance(error, asyncio.CancelledError) and number not in self._tasks:
                raise  # cancelled by the controller
            await self._put(number, _ERROR, _pack(error))


def _pop_message(queue: deque[T]) -> list[T]:
    """Pop the calls or replies of one message."""
    items: list[T] = []
    size = 0
    while queue and len(items) < _MOST and size < _MOST_BYTES:
        items.append(queue.popleft())
        size += len(items[-1][2])
    return items


def _dumps(value: object) -> bytes:
    """Pickle a value, with plain pickle if possible, as cloudpickle takes ten times as long."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Lambdas and whatever else plain pickle refuses take the same way as definitions of __main__.
        data = b"__main__"
    # __main__ is a different module in the other process, so its definitions must be sent by value.
    if b"__main__" in data:
        data = cloudpickle.dumps(value)
    return data


def _pack(error: BaseException) -> bytes:
    """Pickle an error's text, and a ForgeError itself; print any other error to the log in full."""
    pickled = b""
    if isinstance(error, ForgeError):
        with contextlib.suppress(Exception):  # fall back to the text
            pickled = _dumps(error)
    else:
        print(shortened("".join(traceback.format_exception(error)), TRACE_LETTERS), end="", file=sys.stderr, flush=True)
    return pickle.dumps((_describe(error) + users_line(traceback.walk_tb(error.__traceback__)), pickled))


def _unpack(pickled: bytes) -> ForgeError | None:
    with contextlib.suppress(Exception):  # fall back to the text
        error = pickle.loads(pickled) if pickled else None
        return error if isinstance(error, ForgeError) else None
    return None


def users_line(frames: Iterable[tuple[types.FrameType, int]]) -> str:
    """Locate the innermost line of the user's code, as " (score.py:12)" or ""; `frames` starts at the outermost."""
    lines = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    user_lines = [(path, line) for path, line in lines if path.suffix == ".py" and not _NOT_USERS & {*path.parents}]
    return f" ({user_lines[-1][0]}:{user_lines[-1][1]})" if user_lines else ""


def _describe(error: BaseException) -> str:
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception:  # its own __str__ is broken
        return type(error).__name__
