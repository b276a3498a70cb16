"""Cache of results by content: in memory, then in an SQLite file that processes and later runs share."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import struct
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.system.folders import make_private

_TABLES = """
create table if not exists results (key blob primary key, value blob, mark blob, bytes int, used int) without rowid;
create index if not exists by_use on results (used);
create table if not exists total (bytes int);
insert into total select 0 where not exists (select * from total);
create trigger if not exists added after insert on results begin update total set bytes = bytes + new.bytes; end;
create trigger if not exists gone after delete on results begin update total set bytes = bytes - old.bytes; end;
"""
_NEXT = "(select coalesce(max(used), 0) + 1 from results)"
_ROW_BYTES = 128
"""Bytes of a row without its value."""
_KEPT_SHARE = 0.9
"""Share of the bound that eviction leaves."""
_MOST_TOUCHED = 4096
_LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_FILE_LOCK = 0
"""Byte of the lock file that stands for the database file itself; others stand for keys."""


def content_key(*parts: object) -> bytes:
    """Return the key of JSON values: 32 bytes that are equal for equal values, in any order of object keys.

    Raises:
        TypeError, ValueError: they have no JSON form.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


class ResultCache:
    """Cache of texts by key, in memory and in a file; of concurrent equal calls, only one runs.

        cache = ResultCache(Path("cache"), most_bytes=1 << 30)
        text, was_kept = await cache.get(content_key("price", "v1", ["apple"]), compute)

    `compute` returns a text and whether to keep it; exceptions are not kept. A damaged file is replaced by an empty
    one, and an unusable file is ignored: neither fails a call. Pickling keeps only the settings.

    Args:
        folder: folder of the file, made private; created on first use. None for no file.
        most_bytes: bytes of all results in the file; the least recently used are evicted.
        memory_bytes: bytes of the results that this process also keeps in memory.
        value_bytes: largest result that is kept.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        most_bytes: int = 1 << 30,
        memory_bytes: int = 32 << 20,
        value_bytes: int = 1 << 20,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Calls that were answered from "memory", the "file" or an equal call ("joined"), and that "ran"."""
        self._settings = (folder, most_bytes, memory_bytes, value_bytes)
        self._most_value = min(value_bytes, most_bytes)
        self._memory: OrderedDict[bytes, str] = OrderedDict()
        self._memory_bytes, self._most_memory = 0, memory_bytes
        self._flights: dict[bytes, asyncio.Future[str | None]] = {}
        """Calls that run, with the result that they share; None if they share none."""
        self._file = _ResultFile(folder, most_bytes)

    def __reduce__(self) -> tuple[object, ...]:
        return _of_settings, self._settings

    async def get(
        self, key: bytes, compute: Callable[[], Awaitable[tuple[str, bool]]], *, wait_s: float | None = None
    ) -> tuple[str, bool]:
        """Return a call's result, and whether it was found without running the call.

        Args:
            key: see `content_key`.
            wait_s: longest time to wait for an equal call in another process; None for no limit.
        """
        while True:
            if (value := self._recall(key)) is not None:
                self.counts["memory"] += 1
                return value, True
            if (flight := self._flights.get(key)) is None:
                return await self._run(key, compute, wait_s)
            # If the caller that ran the call was cancelled, the loop makes another one run it.
            with contextlib.suppress(_CancelledFlight):
                if (shared := await asyncio.shield(flight)) is not None:
                    self.counts["joined"] += 1
                    return shared, True
                self.counts["ran"] += 1
                return (await compute())[0], False  # it failed for another caller: each now tries on its own, at once

    async def _run(
        self, key: bytes, compute: Callable[[], Awaitable[tuple[str, bool]]], wait_s: float | None
    ) -> tuple[str, bool]:
        flight = self._flights[key] = asyncio.get_running_loop().create_future()
        shared: str | None = None
        try:
            if (shared := self._read(key)) is not None:
                return shared, True
            async with self._file.alone(key, wait_s) as lock:
                if (shared := self._read(key)) is not None:  # another process has kept it since
                    return shared, True
                self.counts["ran"] += 1
                value, keep = await compute()
                if keep and len(encoded := value.encode("utf-8", "surrogatepass")) <= self._most_value:
                    shared = value
                    self._remember(key, value)
                    # The writing thread gets the lock, so that other processes find the result and do not run the call.
                    self._file.write_later(key, encoded, lock)
                return value, False
        except asyncio.CancelledError:
            flight.set_exception(_CancelledFlight())
            flight.exception()  # nobody may be waiting
            raise
        finally:
            del self._flights[key]
            if not flight.done():
                flight.set_result(shared)

    def forget(self, key: bytes) -> None:
        """Drop a result that turned out to be wrong."""
        if (value := self._memory.pop(key, None)) is not None:
            self._memory_bytes -= len(value) + _ROW_BYTES
        self._file.forget_later(key)

    def close(self) -> None:
        """Write pending results, and close the file."""
        self._file.close()

    def _recall(self, key: bytes) -> str | None:
        value = self._memory.get(key)
        if value is not None:
            self._memory.move_to_end(key)
            self._file.touch(key)
        return value

    def _read(self, key: bytes) -> str | None:
        if (value := self._file.read(key)) is not None:
            self.counts["file"] += 1
            self._remember(key, value)
        return value

    def _remember(self, key: bytes, value: str) -> None:
        if (older := self._memory.pop(key, None)) is not None:
            self._memory_bytes -= len(older) + _ROW_BYTES
        self._memory[key] = value
        self._memory_bytes += len(value) + _ROW_BYTES
        while self._memory_bytes > self._most_memory:
            _, old_value = self._memory.popitem(last=False)
            self._memory_bytes -= len(old_value) + _ROW_BYTES


class _CancelledFlight(Exception):
    """The caller that ran a call was cancelled: the next one runs it."""


class _KeyLock:
    """A lock of one key among processes; the kernel releases it if the process dies."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._offset = fd, offset
        self.held = False

    def acquire(self, *, wait: bool) -> bool:
        if not hasattr(fcntl, "F_OFD_SETLK"):  # outside of Linux, processes may run equal calls
            return True
        # Locks of the open file description; a process's locks go when any descriptor of the file is closed.
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            fcntl.fcntl(self._fd, command, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, self._offset, 1, 0))
        except OSError:
            return False
        return True

    def release(self) -> None:
        if not hasattr(fcntl, "F_OFD_SETLK"):
            return
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self._offset, 1, 0))


class _ResultFile:
    """The SQLite file. Reads are made in place, writes in a thread that ends when nothing is left to write."""

    def __init__(self, folder: Path | None, most_bytes: int) -> None:
        self._most_bytes, self._usable = most_bytes, folder is not None
        self._folder = folder or Path()
        self._path = self._folder / "results-1.sqlite"
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._locks = -1
        self._inode = 0
        self._lock = threading.Lock()
        """Guards the pending results and the writing thread."""
        self._replacing = threading.Lock()
        self._writing: threading.Thread | None = None
        self._waiting: list[tuple[bytes, bytes | None, _KeyLock | None]] = []
        self._touched: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        """Results to delete, which the file may still hold."""

    @contextlib.asynccontextmanager
    async def alone(self, key: bytes, wait_s: float | None) -> AsyncIterator[_KeyLock]:
        """Hold a key's lock against other processes, or continue without it after `wait_s`."""
        # Seven bytes of the key, as the offset of a file lock is a signed 64-bit number.
        lock = _KeyLock(self._locks, 1 + int.from_bytes(key[:7]))
        lock.held = self._opened() and lock.acquire(wait=False)
        if self._usable and not lock.held:
            lock.held = await _acquired_in_thread(lock, wait_s)
        try:
            yield lock
        finally:
            if lock.held:
                lock.release()

    def read(self, key: bytes) -> str | None:
        """Return a kept result, or None."""
        if not self._opened() or (database := self._reader) is None or key in self._forgotten:
            return None
        try:
            row = database.execute("select value, mark from results where key = ?", (key,)).fetchone()
        except sqlite3.OperationalError:  # busy, or a disk that fails
            return None
        except sqlite3.DatabaseError as error:
            self._replace(database, error)
            return None
        if row is None:
            return None
        value, mark = row
        # Damaged, as a crash can leave it with `synchronous = off`; only this row is lost.
        if not isinstance(value, bytes) or mark != _mark(key, value):
            self.forget_later(key)
            return None
        self.touch(key)
        return value.decode("utf-8", "surrogatepass")

    def touch(self, key: bytes) -> None:
        """Note that a result was used; written along with the next result."""
        if len(self._touched) < _MOST_TOUCHED:
            self._touched.add(key)

    def write_later(self, key: bytes, value: bytes, lock: _KeyLock) -> None:
        """Keep a result, then release its lock."""
        was_held, lock.held = lock.held, False
        self._later(key, value, lock if was_held else None)

    def forget_later(self, key: bytes) -> None:
        """Delete a result, and stop reading it at once."""
        with self._lock:
            self._forgotten.add(key)
        self._later(key, None, None)

    def close(self) -> None:
        if (thread := self._writing) is not None:
            thread.join()
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None
        if self._locks >= 0:
            os.close(self._locks)
            self._locks = -1

    def _later(self, key: bytes, value: bytes | None, lock: _KeyLock | None) -> None:
        if self._writer is None:
            if lock is not None:
                lock.release()
            return
        with self._lock:
            self._waiting.append((key, value, lock))
            if self._writing is None:
                self._writing = threading.Thread(target=self._write_all, name="result cache", daemon=True)
                self._writing.start()

    def _write_all(self) -> None:
        while True:
            with self._lock:
                # Under the lock, so that `_later` either adds to this thread's work or starts another thread.
                batch, self._waiting = self._waiting, []
                if not batch:
                    self._writing = None
                    return
            database = self._writer
            try:
                if database is not None:
                    self._write(database, batch)
            except sqlite3.OperationalError as error:
                warnings.warn(f"results were not kept in {self._path}: {error}", stacklevel=2)
            except sqlite3.DatabaseError as error:
                self._replace(database, error)
            finally:
                for _, _, lock in batch:
                    if lock is not None:
                        lock.release()

    def _write(self, database: sqlite3.Connection, batch: list[tuple[bytes, bytes | None, _KeyLock | None]]) -> None:
        # Swapped: results that are used during the write are noted with the next one.
        touched_keys, self._touched = self._touched, set()
        # The last of several writes to a key counts.
        latest = {key: value for key, value, _ in batch}
        rows = [
            (key, value, _mark(key, value), len(value) + _ROW_BYTES)
            for key, value in latest.items()
            if value is not None
        ]
        with database:
            database.execute("begin immediate")
            database.executemany("delete from results where key = ?", [(key,) for key in latest])
            database.executemany(f"insert into results values (?, ?, ?, ?, {_NEXT})", rows)
            database.executemany(f"update results set used = {_NEXT} where key = ?", [(key,) for key in touched_keys])
            self._evict(database)
        with self._lock:
            self._forgotten -= latest.keys() - {key for key, _, _ in self._waiting}

    def _evict(self, database: sqlite3.Connection) -> None:
        (total,) = database.execute("select bytes from total").fetchone()
        if total <= self._most_bytes:
            return
        # Leaves a margin, so that the next results do not evict again.
        excess = total - int(self._most_bytes * _KEPT_SHARE)
        dropped_keys = []
        for key, size in database.execute("select key, bytes from results order by used"):
            dropped_keys.append((key,))
            excess -= size
            if excess <= 0:
                break
        database.executemany("delete from results where key = ?", dropped_keys)

    def _opened(self) -> bool:
        """Open the file on first use; return whether it can be used."""
        if self._reader is not None or not self._usable:
            return self._usable
        try:
            make_private(self._folder, ConfigError, deep=False)
            self._locks = os.open(self._folder / "locks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with self._file_alone():
                try:
                    self._connect()
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError:
                    self._start_anew()
        except (OSError, sqlite3.Error, ConfigError) as error:
            self._usable = False
            warnings.warn(f"results of tools are kept in memory only: {error}", stacklevel=2)
        return self._usable

    def _connect(self) -> None:
        writer = sqlite3.connect(self._path, timeout=10, isolation_level=None, check_same_thread=False)
        try:
            writer.execute("pragma journal_mode = wal")
            writer.execute("pragma synchronous = off")  # a machine that crashes may damage it, which is noticed
            writer.execute("pragma journal_size_limit = 4194304")
            writer.executescript(_TABLES)
            writer.execute("select bytes from total").fetchone()
            os.chmod(self._path, 0o600)
            # Writers never block readers.
            self._reader = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=0, check_same_thread=False
            )
            self._reader.execute("select count(*) from total").fetchone()
        except BaseException:
            writer.close()
            raise
        self._writer, self._inode = writer, os.stat(self._path).st_ino

    def _replace(self, failed_database: sqlite3.Connection | None, error: sqlite3.DatabaseError) -> None:
        """Drop a damaged file, unless another thread or process has replaced it already, and open the new one."""
        with self._replacing:
            if failed_database not in (self._reader, self._writer):
                return
            warnings.warn(f"the cache {self._path} is damaged ({error}) and starts anew", stacklevel=2)
            try:
                with self._file_alone():
                    # Another inode: another process has replaced the file already.
                    if self._path.exists() and self._path.stat().st_ino != self._inode:
                        self._connect()
                    else:
                        self._start_anew()
            except (OSError, sqlite3.Error) as second_error:
                self._usable, self._reader, self._writer = False, None, None
                warnings.warn(f"results of tools are kept in memory only: {second_error}", stacklevel=2)

    def _start_anew(self) -> None:
        for ending in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + ending).unlink(missing_ok=True)
        self._connect()

    @contextlib.contextmanager
    def _file_alone(self) -> Iterator[None]:
        lock = _KeyLock(self._locks, _FILE_LOCK)
        lock.acquire(wait=True)
        try:
            yield
        finally:
            lock.release()


def _of_settings(folder: Path | None, most_bytes: int, memory_bytes: int, value_bytes: int) -> ResultCache:
    return ResultCache(folder, most_bytes=most_bytes, memory_bytes=memory_bytes, value_bytes=value_bytes)


def _mark(key: bytes, value: bytes) -> bytes:
    """Return a checksum that tells a damaged result from an intact one."""
    return hashlib.blake2b(value, key=key, digest_size=8).digest()


async def _acquired_in_thread(lock: _KeyLock, wait_s: float | None) -> bool:
    """Wait for another process in a thread; return whether the lock was acquired within `wait_s`."""
    loop = asyncio.get_running_loop()
    acquired = asyncio.Event()
    deciding = threading.Lock()
    is_held = given_up = False

    def wait() -> None:
        nonlocal is_held
        lock.acquire(wait=True)
        # Decided under a lock, so that exactly one of this thread and its waiter has the lock of the key.
        with deciding:
            if given_up:
                lock.release()
                return
            is_held = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(acquired.set)

    threading.Thread(target=wait, name="result cache lock", daemon=True).start()
    try:
        async with asyncio.timeout(wait_s):
            await acquired.wait()
    except TimeoutError:
        pass
    finally:
        with deciding:
            given_up = not acquired.is_set()
            if given_up and is_held:
                lock.release()
    return not given_up
