"""Link to a replica: many calls and streams at a time in few messages, as each message costs a millisecond.

The controller posts the calls that gathered while the last post was under way, and a long poll brings back the replies
that are ready; not too many at a time, so that both ends have work. Each call and each reply is pickled on its own, so
that a bad value breaks one call only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import pickle
import sysconfig
import traceback
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import cloudpickle  # type: ignore[import-untyped]

from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, ServiceError
from forge_rl.runtime.in_hand import InHand, number_of_call

POLL_S = 5.0
"""Seconds that a poll stays open when there is nothing to tell."""
_MOST = 512
"""Most calls or replies in a message. With thousands in flight the two ends would otherwise wait for each other in
turn, and an event loop would do nothing else for seconds."""
_MOST_BYTES = 4 << 20
"""Bytes past which a message takes no other call or reply: an event loop reads so many in a few milliseconds."""
_MOST_WAITING_BYTES = 16 << 20
"""Bytes of replies past which the replica's methods wait until the controller has collected some."""

Message: TypeAlias = tuple[int, str, bytes, bool]
"""Message to a replica: number of the call, method, its pickled arguments, whether it streams. "" as method cancels."""

Reply: TypeAlias = tuple[int, int, bytes]
"""Reply of a replica: number of the call, one of the kinds below, and the pickled value or error."""

T = TypeVar("T", Message, Reply)

_NOT_USERS = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")} | {Path(__file__).parents[1]}
"""Folders whose code is not the user's."""
_LOOK_S = 0.05
"""Least seconds between two looks at the deadlines of all calls."""
_NONE = pickle.dumps(None)
_VALUE, _ITEM, _ERROR = range(3)
_DIED, _STOPPED, _LATE, _KILLED, _SPARED = range(3, 8)  # said by the controller itself, with the cause as text


class Link:
    """Controller's end of a link. It starts with the first call.

    Args:
        actor: Monarch's handle of one process with a ServiceActor.
        error: makes the error of a kind for a method from a message.
        lost: told why, when the link breaks by itself. `close` is then called by whoever owns the link.
        begin: told the method when a call begins.
        end: given what `begin` returned when that call has ended, and whether the replica answered it.
    """

    def __init__(
        self,
        actor: Any,
        *,
        error: Callable[[type[ServiceError], str, str], ServiceError],
        lost: Callable[[Exception], None],
        begin: Callable[[str], int],
        end: Callable[[int, bool], None],
    ) -> None:
        self._actor = actor
        self._error = error
        self._lost = lost
        self._begin = begin
        self._end = end
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self.deadlines = Deadlines(self._calls)
        self._outbox: deque[Message] = deque()
        self._waiting = asyncio.Event()
        self._broken: tuple[int, bytes] | None = None
        self._task: asyncio.Task[None] | None = None
        self.silent_polls = 0
        """Number of the watchdog's looks since the replica last answered a poll."""

    @property
    def open(self) -> bool:
        """True while the replica owes replies to polls."""
        return self._task is not None and self._broken is None

    async def ask(
        self,
        method: str,
        args: tuple[object, ...],
        deadline_s: float,
        on_item: Callable[[Any], object] | None = None,
    ) -> Any:
        """Await a method of the actor; see Replica.ask."""
        key = self._begin(method)  # a `with` would cost as much as all else here
        kind = _STOPPED
        try:
            call = _Call(next(self._numbers), method, deadline_s, on_item)
            self._send(call, args)
            try:
                kind, payload = await call
            finally:
                if self._calls.pop(call.number, None) is not None:  # it is given up: the replica is to give it up too
                    self._put((call.number, "", b"", False))
        finally:
            self._end(key, kind <= _ERROR)
        return self._value(method, kind, payload)

    def fail(self, cause: str, *, died: bool, in_hand: Collection[int] = ()) -> None:
        """End all calls in flight, and all later ones: with ReplicaError if the replica died, else ServiceError.

        `in_hand` are the numbers of the calls whose code it ran when it died; theirs is the blame.
        """
        if self._broken is not None:
            return
        self._broken = (_DIED if died else _STOPPED, cause.encode())
        for number, call in self._calls.items():
            kind = _DIED if not in_hand else _KILLED if number in in_hand else _SPARED
            call.put((kind, cause.encode()) if died else self._broken)
        self._calls.clear()
        self.deadlines.cancel()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End the link's tasks."""
        self.fail("the service has been stopped", died=False)
        if self._task is not None:
            await asyncio.wait([self._task])

    def _send(self, call: _Call, args: tuple[object, ...]) -> None:
        method = call.method
        if self._broken is not None:
            self._value(method, *self._broken)  # raises
        try:
            payload = _dumps(args)
        except Exception as error:
            raise self._error(ServiceError, method, f"an argument cannot be pickled: {_describe(error)}") from error
        self._calls[call.number] = call
        self.deadlines.start(call)
        self._put((call.number, method, payload, call.on_item is not None))

    def _put(self, message: Message) -> None:
        self._outbox.append(message)
        self._waiting.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _value(self, method: str, kind: int, payload: bytes) -> Any:
        if kind in (_VALUE, _ITEM):
            try:
                return pickle.loads(payload)
            except Exception as error:
                message = f"its answer cannot be unpickled: {_describe(error)}"
                raise self._error(ServiceError, method, message) from error
        if kind == _ERROR:
            text, pickled = pickle.loads(payload)
            raise _unpack(pickled) or self._error(ServiceError, method, text)
        kinds = {_STOPPED: ServiceError, _LATE: DeadlineError}
        failure = self._error(kinds.get(kind, ReplicaError), method, payload.decode())
        if isinstance(failure, ReplicaError):
            failure.blamed = {_KILLED: True, _SPARED: False}.get(kind)
        raise failure

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._post())
                group.create_task(self._collect())
        except ExceptionGroup as errors:
            self._lost(errors.exceptions[0])

    async def _post(self) -> None:
        while True:
            await self._waiting.wait()
            messages = _pop_message(self._outbox)
            if not self._outbox:
                self._waiting.clear()
            await self._actor.link_post.call_one(pickle.dumps(messages))

    async def _collect(self) -> None:
        while True:
            replies: list[Reply] = pickle.loads(await self._actor.link_collect.call_one(POLL_S))
            self.silent_polls = 0
            for number, kind, payload in replies:
                call = self._calls.get(number) if kind == _ITEM else self._calls.pop(number, None)
                if call is None or call.done():  # it was given up meanwhile
                    continue
                if kind != _ITEM:
                    call.put((kind, payload))
                    continue
                self.deadlines.start(call)
                assert call.on_item is not None, "a plain method gives no items"
                try:
                    if call.on_item(self._value(call.method, kind, payload)) is True:
                        call.put((_VALUE, _NONE))
                except Exception as error:  # the caller's, who gets it, unless it has broken this link
                    if not call.done():
                        call.set_exception(error)


class _Call(asyncio.Future[tuple[int, bytes]]):
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
        """Time on the loop's clock when it is late."""
        self.on_item = on_item

    def put(self, reply: tuple[int, bytes]) -> None:
        if not self.done():
            self.set_result(reply)

    def be_late(self) -> None:
        self.put((_LATE, f"no {'answer' if self.on_item is None else 'item'} within {self.deadline_s:g} s".encode()))


class Deadlines:
    """Tells calls that they are late. One timer serves all, and looks at each: thousands are in flight, few are late.

    Args:
        calls: those in flight.
    """

    def __init__(self, calls: Mapping[int, _Call]) -> None:
        self._calls = calls
        self._held = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, call: _Call) -> None:
        """Give a call its deadline's seconds from now; a stream none while streams are held."""
        loop = asyncio.get_running_loop()
        call.due = math.inf if self._held and call.on_item is not None else loop.time() + call.deadline_s
        if call.due == math.inf:
            return
        if self._timer is None or call.due < self._timer.when():
            self.cancel()
            self._timer = loop.call_at(call.due, self._look)

    def hold_streams(self, held: bool) -> None:
        """Suspend the deadlines of streams, or restart them."""
        if held != self._held:
            self._held = held
            for call in self._calls.values():
                if call.on_item is not None:
                    self.start(call)

    def cancel(self) -> None:
        """Tell nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now, due = loop.time(), math.inf
        for call in list(self._calls.values()):
            if call.due <= now:
                call.be_late()
            else:
                due = min(due, call.due)
        self._timer = None if due == math.inf else loop.call_at(max(due, now + _LOOK_S), self._look)


class LinkEnd:
    """Replica's end of a link: runs the methods of an actor that the controller calls."""

    def __init__(self, actor: object) -> None:
        self._actor = actor
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._replies: deque[Reply] = deque()
        self._waiting_bytes = 0
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self.in_hand: InHand | None = None
        """Takes notes of what runs, where they are wanted."""

    def post(self, messages: bytes) -> None:
        """Start methods that are called and cancel those that are given up."""
        for number, method, payload, streams in pickle.loads(messages):
            if method:
                task = asyncio.get_running_loop().create_task(self._answer(number, method, payload, streams))
                self._tasks[number] = task
                task.add_done_callback(functools.partial(self._tasks.pop, number))
            elif number in self._tasks:
                self._tasks[number].cancel()

    async def collect(self, wait_s: float) -> bytes:
        """Return pickled replies, as soon as there is one; an empty list after `wait_s` seconds."""
        if not self._replies:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ready.wait()
            await asyncio.sleep(0)  # others of the same post end in the same turn of the loop
        replies = _pop_message(self._replies)
        self._waiting_bytes -= sum(len(payload) for _, _, payload in replies)
        self._room.set()
        if not self._replies:
            self._ready.clear()
        return pickle.dumps(replies)

    async def _put(self, number: int, kind: int, payload: bytes) -> None:
        """Queue a reply; waits first while too many bytes wait already."""
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
                async with contextlib.aclosing(result) as items:
                    async for item in items:
                        await self._put(number, _ITEM, _dumps(item))
                await self._put(number, _VALUE, _NONE)
            else:
                work = result if self.in_hand is None else self.in_hand.noting(number, result)
                await self._put(number, _VALUE, _dumps(await work))
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the controller gave it up
            await self._put(number, _ERROR, _pack(error))


def _pop_message(queue: deque[T]) -> list[T]:
    """Take the calls or replies of one message."""
    taken: list[T] = []
    size = 0
    while queue and len(taken) < _MOST and size < _MOST_BYTES:
        taken.append(queue.popleft())
        size += len(taken[-1][2])
    return taken


def _dumps(value: object) -> bytes:
    """Pickle a value: with plain pickle if it will do, as cloudpickle takes ten times as long."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        data = b"__main__"
    # __main__ is another module in the other process: what is defined there must be sent by value.
    if b"__main__" in data:
        data = cloudpickle.dumps(value)
    return data


def _pack(error: BaseException) -> bytes:
    """Pickle an error's text, and a ForgeError itself; any other is printed to the log in full."""
    pickled = b""
    if isinstance(error, ForgeError):
        with contextlib.suppress(Exception):  # the text must do
            pickled = _dumps(error)
    else:
        traceback.print_exception(error)
    return pickle.dumps((_describe(error) + users_line(traceback.walk_tb(error.__traceback__)), pickled))


def _unpack(pickled: bytes) -> ForgeError | None:
    with contextlib.suppress(Exception):  # the text must do
        error = pickle.loads(pickled) if pickled else None
        return error if isinstance(error, ForgeError) else None
    return None


def users_line(frames: Iterable[tuple[types.FrameType, int]]) -> str:
    """Name the innermost line of the user's own code, of frames from the outermost on; " (score.py:12)", or ""."""
    found = [(Path(frame.f_code.co_filename), line) for frame, line in frames]
    own = [(path, line) for path, line in found if path.suffix == ".py" and not _NOT_USERS & {*path.parents}]
    return f" ({own[-1][0]}:{own[-1][1]})" if own else ""


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ is broken
        return type(error).__name__
