"""Sessions that outlive their processes: they are rebuilt from their own cells, and started only if a cell must run."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forge_rl.sandbox.images.image import ContainerImage
from forge_rl.sandbox.inside import cells
from forge_rl.sandbox.limits import Limits, Result, SandboxError, Usage
from forge_rl.sandbox.pool import Pool
from forge_rl.sandbox.providers.wire import SandboxWireError, result_from_json, result_to_json
from forge_rl.sandbox.session import PoolSession
from forge_rl.sandbox.workspaces.changes import Changes
from forge_rl.system.result_cache import ResultCache, content_key

T = TypeVar("T")
_BY_SANDBOX = frozenset({"CellOverrun", "OutOfMemory", "Ended", "BadFrame"})
"""Errors that may depend on the machine: results with them are not cached."""
_MAX_FAILURES = 16
"""Failures of the sandbox that one cell survives."""
MAX_DEATHS = 3
"""Deaths of a session in one cell that count as the cell's own doing; fewer may be somebody else's."""
_PLACE_S = 0.2


class DivergedError(SandboxError):
    """The cells of a lost session gave another result when they were run again."""


class _PutError(SandboxError):
    """A file could not be written in a session that lives on."""


class _LostError(SandboxError):
    """A session that was lost, or a command that was killed from outside, while cells were run again."""


@dataclass(eq=False)
class _SessionState:
    """A session with the state after some cells."""

    session: PoolSession
    key: bytes
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    owned: bool = True
    """False once it waits to be forked by others."""


@dataclass(frozen=True)
class _Action:
    """A cell that a session ran, or a file that was put there, and the result."""

    code: str | Sequence[str] = ""
    wall_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of a command; see `PoolSession.run`."""
    result_text: str = ""
    path: str = ""
    """Name of the file that was put; "" for a cell."""
    data: bytes = b""

    @property
    def about(self) -> list[object]:
        """The action as JSON values, without its result, which depends on these and on the history."""
        if self.path:
            return ["put", self.path, base64.b64encode(self.data).decode()]
        code = self.code if isinstance(self.code, str) else list(self.code)
        options = {
            name: base64.b64encode(value).decode() if name == "stdin" else value for name, value in self.options.items()
        }
        return ["run", code, self.wall_s, *([options] if options else [])]


class DurableSessions:
    """Opens durable sessions of a pool, which share their results if there is a cache.

        sessions = DurableSessions(pool, cache=ResultCache(Path("cache")))
        async with sessions.open() as session:
            print((await session.run("6 * 7")).value)

    A cell is looked up by the whole history of its session: its cells and files so far, with their results. Use a
    cache only if equal histories may have equal results: cells that draw random numbers, or look at the clock, then
    show every session the same ones.

    Args:
        pool: opens the sessions; its owner closes it after these.
        cache: results of cells; with None, each cell is run.
        parked: how many closed sessions are kept, to be forked by sessions with the same history.
        version: part of each result's key. Change it when something changes that cells depend on, unless it is Python's
            version, a name in the folders of packages, a preloaded module or a limit, which are part of the key.
    """

    def __init__(self, pool: Pool, *, cache: ResultCache | None = None, parked: int = 8, version: str = "") -> None:
        self.pool = pool
        self.cache = cache
        self.counts: Counter[str] = Counter()
        """Sessions "opened", "forked" from another's, and "rebuilt" after a loss; cells "run" and run again
        ("repeated")."""
        self._most_parked = parked if cache is not None else 0
        # The code that runs cells is part of the key: another version of it may give other results.
        self._root = [version, sys.version, Path(cells.__file__).read_text(), pool.signature()]
        self._live: OrderedDict[bytes, _SessionState] = OrderedDict()
        """By key: a session in that state, which may be in use."""
        self._parked: OrderedDict[_SessionState, None] = OrderedDict()

    def open(self, *, limits: Limits | None = None, image: ContainerImage | None = None) -> DurableSession:
        """Return a session, which starts nothing before a cell must run; its caller closes it.

        Args:
            limits, image: as for `Pool.open`.
        """
        limits = limits or self.pool.limits
        about = [self._root, asdict(limits), *([] if image is None else [image.digest])]
        return DurableSession(self, limits, (content_key(*about),), (), image)

    async def close(self) -> None:
        """Close the sessions that are kept."""
        while self._parked:
            await self._drop_parked()

    async def nearest(
        self, keys: Sequence[bytes], limits: Limits, image: ContainerImage | None = None
    ) -> tuple[PoolSession, int]:
        """Return a new session whose state includes as many of the actions as possible.

        Args:
            keys: key of the state before each action, and of the state after the last one.

        Returns:
            The session, and how many of the actions its state includes; 0 for a fresh one.
        """
        # From the latest state backwards. State 0 is a fresh session's, for which nothing needs to be forked.
        for place in range(len(keys) - 1, 0, -1):
            live = self._live.get(keys[place])
            # A session that is busy cannot be forked before its cell ends, and will not be in this state then.
            if live is None or live.lock.locked() or not live.session.alive:
                continue
            async with live.lock:
                # Its state may have changed while the lock was waited for.
                if live.key == keys[place]:
                    with contextlib.suppress(SandboxError):  # full, or gone: a fresh one then
                        fork = await live.session.fork()
                        self.counts["forked"] += 1
                        return fork, place
        self.counts["opened"] += 1
        session_limits = None if limits == self.pool.limits else limits
        # Parked sessions hold places of the pool: they are given up one by one until a place is free.
        while self._parked:
            with contextlib.suppress(SandboxError):
                return await self.pool.open(limits=session_limits, image=image, wait_s=_PLACE_S), 0
            await self._drop_parked()
        return await self.pool.open(limits=session_limits, image=image), 0

    def changes(self, live: _SessionState) -> None:
        """Note that a session's state is about to change."""
        if self._live.get(live.key) is live:
            del self._live[live.key]

    def is_at(self, live: _SessionState, key: bytes) -> None:
        """Note the state that a session is in now."""
        self.changes(live)
        live.key = key
        if self.cache is not None and live.owned:
            self._live[key] = live

    async def end(self, live: _SessionState, *, park: bool) -> None:
        """Close a session, or keep it for others if it may be of use."""
        live.owned = False
        if not park or not live.session.alive or self._live.get(live.key) is not live or not self._most_parked:
            self.changes(live)
            await live.session.close()
            return
        self._parked[live] = None
        while len(self._parked) > self._most_parked:
            await self._drop_parked()

    async def _drop_parked(self) -> None:
        live, _ = self._parked.popitem(last=False)
        async with live.lock:
            await self.end(live, park=False)


class DurableSession:
    """Runs cells one at a time, and survives the death of their processes; made by `DurableSessions.open`."""

    def __init__(
        self,
        sessions: DurableSessions,
        limits: Limits,
        keys: tuple[bytes, ...],
        log: tuple[_Action, ...],
        image: ContainerImage | None = None,
    ) -> None:
        self.limits = limits
        self.image = image
        self.was_kept: bool | None = None
        """Whether the latest cell's result came from the cache; None without a cache."""
        self._sessions = sessions
        self._keys = list(keys)
        self._log = list(log)
        self._live: _SessionState | None = None
        self._done = 0
        """How many actions the live session's state includes."""
        self._lost = False
        self._lock = asyncio.Lock()
        self._ended = ""
        """Why it takes no more cells."""

    @property
    def alive(self) -> bool:
        """Whether it takes another cell; False once a cell has killed it, or it was closed."""
        return not self._ended

    async def run(
        self,
        code: str | Sequence[str],
        *,
        wall_s: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        folder: str = "",
        folders: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a cell as `PoolSession.run` does, or return its result from the cache; then `usage` is 0.

        If the processes are lost, they are replaced, and the session's earlier cells are run again first.

        Raises:
            DivergedError: those gave something else than before.
            SandboxError: the sandbox fails again and again, the session has ended before, or a file of `put` cannot be
                written; the next cell runs without that file.
        """
        async with self._lock:
            self._check()
            if wall_s is not None and not 0 < wall_s < math.inf:
                raise SandboxError(f"wall_s is {wall_s}", hint="give a cell a positive number of seconds")
            cache, results = self._sessions.cache, list[Result]()
            options = {"stdin": stdin, "env": env, "folder": folder, "folders": folders}
            action = _Action(
                code=code, wall_s=wall_s, options={name: value for name, value in options.items() if value}
            )

            async def compute() -> tuple[str, bool]:
                results.append(await self._run(action))
                error = results[0].error
                # Without its usage: a result from the cache has used nothing.
                text = json.dumps(result_to_json(replace(results[0], usage=Usage(wall_s=0.0))))
                return text, not self._ended and (error is None or error.name not in _BY_SANDBOX)

            if cache is None:
                results.append(await self._run(action))
            else:
                key = content_key(self._keys[-1].hex(), *action.about)
                text, self.was_kept = await cache.get(key, compute)
                # Answered from the cache: `compute` did not run.
                if not results:
                    try:
                        results.append(result_from_json(json.loads(text), self.limits))
                    except (ValueError, RecursionError, SandboxWireError):  # not by this version
                        cache.forget(key)
                        await compute()
            # The result is part of the history: a rebuilt session is compared with it, cell by cell.
            self._append(replace(action, result_text=_shown(results[0])))
            return results[0]

    async def put(self, path: str, data: bytes) -> None:
        """Note a file, which is written before the next cell runs.

        Raises:
            SandboxError: it is too large, or the session has ended.
        """
        if len(data) > self.limits.transfer_bytes:
            raise SandboxError(
                f"{path} has {len(data)} bytes", hint=f"Limits:transfer_bytes is {self.limits.transfer_bytes}"
            )
        async with self._lock:
            self._check()
            self._append(_Action(path=path, data=data))

    async def get(self, path: str) -> bytes:
        """Read a file.

        Raises:
            SandboxError: the file does not exist, is not regular, or is too large; or as `run` does.
        """
        async with self._lock:
            self._check()
            _, data = await self._surviving(lambda live: live.session.get(path))
            return data

    async def fork(self) -> DurableSession:
        """Return an independent copy, which starts no processes before a cell must run. The caller closes it."""
        async with self._lock:
            self._check()
            return DurableSession(self._sessions, self.limits, tuple(self._keys), tuple(self._log), self.image)

    async def changes(self) -> Changes:
        """Return all that differs from the session's image; see `PoolSession.changes`.

        Raises:
            SandboxError: as `run` does, or the session has no image.
        """
        async with self._lock:
            self._check()
            _, changes = await self._surviving(lambda live: live.session.changes(leave_out=()))
            return changes

    async def branch(self) -> PoolSession:
        """Return a plain session in the same state, which is not rebuilt if it dies. The caller closes it.

        Raises:
            SandboxError: as `run` does.
        """
        async with self._lock:
            self._check()
            _, session = await self._surviving(lambda live: live.session.fork())
            return session

    async def close(self) -> None:
        """End the session; its processes may be kept for other sessions that reach the same state."""
        self._ended = self._ended or "it is closed"
        if self._live is not None:
            live, self._live = self._live, None
            # A session that lacks the last actions is not in the state of its key.
            await self._sessions.end(live, park=self._done == len(self._log))

    async def __aenter__(self) -> DurableSession:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.shield(self.close())

    def _check(self) -> None:
        if self._ended:
            raise SandboxError(f"the session has ended: {self._ended}", hint="open another")

    def _append(self, action: _Action) -> None:
        self._log.append(action)
        self._keys.append(content_key(self._keys[-1].hex(), *action.about, action.result_text))
        if self._live is not None and self._done == len(self._log):
            self._sessions.is_at(self._live, self._keys[-1])

    async def _run(self, action: _Action) -> Result:
        """Run the next cell; run it again in another session if the first is lost or killed."""

        async def run(live: _SessionState) -> Result:
            self._sessions.counts["run"] += 1
            self._sessions.changes(live)
            return await live.session.run(action.code, wall_s=action.wall_s, **action.options)

        deaths = 0
        while True:
            live, result = await self._surviving(run)
            if live.session.alive and not _killed(result):
                self._done += 1
                return result
            await self._lose()
            if result.error is None or result.error.name not in _BY_SANDBOX:  # it was lost after the cell
                return result
            deaths += 1
            # Anybody may have killed a session that just ended; time and memory are the cell's own doing at once.
            if result.error.name != "Ended" or deaths == MAX_DEATHS:
                self._ended = result.error.message
                return result

    async def _surviving(self, use: Callable[[_SessionState], Awaitable[T]]) -> tuple[_SessionState, T]:
        """Use the session's processes, or new ones if they are lost; return the processes and the result."""
        failures = 0
        while True:
            self._check()  # it may have been closed meanwhile, and would get processes that nobody closes
            try:
                live = await self._caught_up()
                async with live.lock:
                    return live, await use(live)
            except _PutError:
                await self._lose()  # the attempt may have made folders that the log does not have
                raise
            except DivergedError as error:
                self._ended = error.message
                await self._lose()
                raise
            except SandboxError as error:
                is_lost = isinstance(error, _LostError) or self._live is None or not self._live.session.alive
                failures += 1
                if not is_lost or failures == _MAX_FAILURES:
                    raise
                await self._lose()

    async def _caught_up(self) -> _SessionState:
        """Return the session's processes in the state after all of its actions; rebuild them if they are lost."""
        live = self._live
        if live is not None and not live.session.alive:
            await self._lose()
            live = None
        if live is None:
            session, self._done = await self._sessions.nearest(self._keys, self.limits, self.image)
            if self._ended:  # closed while it waited for these processes
                await session.close()
                self._check()
            live = self._live = _SessionState(session, self._keys[self._done])
            if self._lost:
                self._sessions.counts["rebuilt"] += 1
                self._lost = False
        async with live.lock:
            if self._done < len(self._log):
                self._sessions.changes(live)
            while self._done < len(self._log):
                await self._repeat(live, self._log[self._done])
                self._done += 1
        self._sessions.is_at(live, self._keys[-1])
        return live

    async def _repeat(self, live: _SessionState, action: _Action) -> None:
        if action.path:
            try:
                await live.session.put(action.path, action.data)
            except SandboxError as error:
                if live.session.alive:
                    raise self._without_put(error) from error
                raise
            return
        self._sessions.counts["repeated"] += 1
        result = await live.session.run(action.code, wall_s=action.wall_s, **action.options)
        if not live.session.alive or _killed(result):
            raise _LostError("the session was lost while its cells were run again")
        if (result_text := _shown(result)) == action.result_text:
            return
        if (cache := self._sessions.cache) is not None:
            # Its kept result would lead other sessions into the same difference.
            cache.forget(content_key(self._keys[self._done].hex(), *action.about))
        raise DivergedError(
            f"cell {self._done + 1} of a session gave {result_text:.200}, not {action.result_text:.200}, when it was "
            "run again",
            hint="cells that depend on time or chance cannot be run again: start the episode again",
        )

    def _without_put(self, error: SandboxError) -> SandboxError:
        """Remove the next action, a file that cannot be written, so that later cells run; return the error to raise."""
        path, later_actions = self._log[self._done].path, self._log[self._done + 1 :]
        if not all(action.path for action in later_actions):
            return DivergedError(
                f"{path} was written before a cell, and cannot be written when it is run again: {error.message}",
                hint="start the episode again",
            )
        del self._log[self._done :], self._keys[self._done + 1 :]
        for action in later_actions:
            self._append(action)
        return _PutError(error.message, hint=error.hint)

    async def _lose(self) -> None:
        if self._live is not None:
            live, self._live, self._done, self._lost = self._live, None, 0, True
            await self._sessions.end(live, park=False)


def _killed(result: Result) -> bool:
    """Return True if a cell's processes were killed from outside; in the profile `process`, its session lives on."""
    return result.error is not None and result.error.name == "Ended"


def _shown(result: Result) -> str:
    """Return all that a cell showed as one text, without what differs each time."""
    error = result.error and (result.error.name, result.error.message, result.error.traceback)
    image = result.image and base64.b64encode(result.image.data).decode()
    return repeatable(json.dumps([result.stdout, result.stderr, result.value, image, error, result.status]))


def repeatable(text: str) -> str:
    """Return an output without addresses of objects and durations in seconds, such as pytest prints."""
    text = re.sub(r"\b0x[0-9a-f]{6,16}\b", "0x", text)
    return re.sub(r"\b\d{1,9}(\.\d{1,9})? ?(ms|s|seconds?)\b", "s", text)
