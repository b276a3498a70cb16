"""Files of the controller's machine, for processes on hosts that do not see its disks: they ask, and it answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_PIECE_BYTES = 4 << 20
"""Maximum bytes of a file in one message."""
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """An operation on one file of the folder that the controller has opened to another process."""

    action: Literal["size", "read", "write", "rename", "mkdir"]
    name: str
    """Relative path of the file."""
    offset: int = 0
    length: int = 0
    """Bytes to read."""
    data: bytes = b""
    """Bytes to write; at offset 0 they replace the file."""
    to: str = ""
    """New name."""


Answer: TypeAlias = int | bytes | OSError | None


class FolderServer:
    """Answers requests about one folder of this machine, from processes that can reach nothing else here.

        answer = FolderServer(folder).answer(request)

    Args:
        folder: existing folder. Its subfolders can be used, and none can be created.
        read_only: refuse to write, and follow links of files.
    """

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._folder = folder.resolve()
        self._read_only = read_only

    def answer(self, request: FileRequest) -> Answer:
        """Carry out a request; return a file's size or bytes, None after a change, or the file system's error."""
        try:
            if self._read_only and request.action not in ("size", "read"):
                raise PermissionError(errno.EROFS, "the folder can only be read")
            match request.action:
                case "size":
                    with self._opened(request.name, os.O_RDONLY) as fd:
                        return os.fstat(fd).st_size
                case "read":
                    with self._opened(request.name, os.O_RDONLY) as fd:
                        return os.pread(fd, min(request.length, _PIECE_BYTES), request.offset)
                case "write":
                    new = os.O_CREAT | os.O_TRUNC if request.offset == 0 else 0
                    with self._opened(request.name, os.O_WRONLY | new) as fd:
                        num_written = 0
                        while num_written < len(request.data):
                            # One call may write less than it is given.
                            num_written += os.pwrite(fd, request.data[num_written:], request.offset + num_written)
                    return None
                case "rename":
                    self._path(request.name).rename(self._path(request.to))
                    return None
                case "mkdir":
                    self._path(request.name).mkdir(exist_ok=True)
                    return None
        except OSError as error:
            return OSError(error.errno, error.strerror or str(error))

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        """Open a regular file."""
        # O_NONBLOCK: opening a FIFO would otherwise block until somebody writes. A link is followed only in a folder
        # that the other process cannot change.
        flags |= os.O_NONBLOCK | (0 if self._read_only else os.O_NOFOLLOW)
        fd = os.open(self._path(name), flags, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise PermissionError(errno.EPERM, "not a regular file")
            yield fd
        finally:
            os.close(fd)

    def _path(self, name: str) -> Path:
        """Return the path of a file; nothing leads out of the folder."""
        inner = PurePosixPath(name)
        if not inner.name or inner.is_absolute() or ".." in inner.parts or "\0" in name:
            raise PermissionError(errno.EPERM, "not a file of the folder")
        path = self._folder / inner
        # The file itself may not exist yet, but a link in the path of its folder could lead out.
        if path.parent.resolve() != path.parent:
            raise PermissionError(errno.EPERM, "a link leads to it")
        return path


class FileDesk:
    """Hands the requests of this process's threads to the controller, which calls `exchange` until it returns None.

    Its event loop must be another thread's than the one that asks; see `process_desk`.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: asyncio.Queue[tuple[FileRequest, Future[Answer]] | None] = asyncio.Queue()
        self._unanswered: Future[Answer] | None = None

    def open(self) -> None:
        """Let the next load or save use the controller's files; called in the event loop of `exchange`."""
        self._loop, self._requests, self._unanswered = asyncio.get_running_loop(), asyncio.Queue(), None

    def place(self, folder: Path) -> Folder:
        """Return a folder of the controller's machine as this process can use it: by requests if open, else itself."""
        return folder if self._loop is None else FarFolder(desk=self, path=folder)

    def ask(self, request: FileRequest) -> Any:
        """Return the controller's answer; blocks.

        Raises:
            OSError: the controller's file system raised it.
        """
        assert self._loop is not None, "open comes first"
        future: Future[Answer] = Future()
        # Only the loop's own thread may touch an asyncio queue.
        self._loop.call_soon_threadsafe(self._requests.put_nowait, (request, future))
        answer = future.result()
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def exchange(self, answer: Answer) -> FileRequest | None:
        """Take the answer to the last request, and return the next one; None once closed."""
        # One round trip both brings an answer and takes the next request.
        if self._unanswered is not None:
            self._unanswered.set_result(answer)
            self._unanswered = None
        if (entry := await self._requests.get()) is None:
            return None
        request, self._unanswered = entry
        return request

    def close(self) -> None:
        """Make `exchange` return None; called by the thread that has finished loading or saving."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._requests.put_nowait, None)
            self._loop = None


@functools.cache
def process_desk() -> FileDesk:
    """Return the desk of this process, which its actors share."""
    return FileDesk()


@dataclass(frozen=True, kw_only=True)
class FarFolder:
    """A folder of the controller's machine, used like a local one by threads of a process that does not see it.

    folder = FarFolder(desk=desk, path=Path("run/checkpoints/.step-000012.partial"))
    with (folder / "training").open("index.json", "rb") as file:
        index = json.load(file)
    """

    desk: FileDesk
    path: Path
    """Path on the controller's machine, for messages."""
    inner: str = ""
    """Path in the folder that the controller opened."""

    def __truediv__(self, name: str) -> FarFolder:
        return dataclasses.replace(self, path=self.path / name, inner=self._name(name))

    def __str__(self) -> str:
        return str(self.path)

    def size(self, name: str) -> int:
        """Return the bytes of a regular file; raises OSError for anything else."""
        return cast(int, self.desk.ask(FileRequest(action="size", name=self._name(name))))

    def rename(self, name: str, to: str) -> None:
        """Rename a file of this folder."""
        self.desk.ask(FileRequest(action="rename", name=self._name(name), to=self._name(to)))

    def mkdir(self, name: str) -> None:
        """Make a folder in this one, unless it exists."""
        self.desk.ask(FileRequest(action="mkdir", name=self._name(name)))

    def open(self, name: str, mode: str) -> BinaryIO:
        """Open a file to read ("rb") or to write from its beginning ("wb")."""
        if mode == "rb":
            raw = _FarFile(self.desk, self._name(name), size=self.size(name))
            return cast(BinaryIO, io.BufferedReader(raw, _BUFFER_BYTES))
        assert mode == "wb", mode
        self.desk.ask(FileRequest(action="write", name=self._name(name)))
        return cast(BinaryIO, io.BufferedWriter(_FarFile(self.desk, self._name(name), size=None), _BUFFER_BYTES))

    def _name(self, name: str) -> str:
        return (PurePosixPath(self.inner) / name).as_posix()


Folder: TypeAlias = Path | FarFolder
"""A folder that a process uses, wherever it is."""


@contextlib.contextmanager
def filled(folder: Folder) -> Iterator[Path]:
    """Yield a local folder for new files, which are in `folder` once the body has ended: itself, or a temporary one."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary_folder:
        yield Path(temporary_folder)
        # Sorted, so that a folder comes before what is in it.
        for path in sorted(Path(temporary_folder).rglob("*")):
            name = path.relative_to(temporary_folder).as_posix()
            if path.is_dir():
                folder.mkdir(name)
                continue
            with path.open("rb") as source, folder.open(name, "wb") as target:
                shutil.copyfileobj(source, target, _PIECE_BYTES)
            path.unlink()


class _FarFile(io.RawIOBase):
    """Reads or writes a file by requests; `size` is None for writing."""

    def __init__(self, desk: FileDesk, name: str, *, size: int | None) -> None:
        self._desk, self._name, self._size = desk, name, size
        self._offset = 0

    def readable(self) -> bool:
        return self._size is not None

    def writable(self) -> bool:
        return self._size is None

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size or 0}[whence]
        self._offset = max(0, base + offset)
        return self._offset

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """Read the rest in large pieces, unlike the base class."""
        return b"".join(iter(lambda: self._read(_PIECE_BYTES), b""))

    def _read(self, length: int) -> bytes:
        length = min(length, _PIECE_BYTES)
        data = self._desk.ask(FileRequest(action="read", name=self._name, offset=self._offset, length=length))
        self._offset += len(data)
        return cast(bytes, data)

    def write(self, data: ReadableBuffer) -> int:
        piece = bytes(memoryview(data).cast("B")[:_PIECE_BYTES])
        if piece:
            self._desk.ask(FileRequest(action="write", name=self._name, offset=self._offset, data=piece))
            self._offset += len(piece)
        return len(piece)
