"""Files that are read at offsets; the most recently opened ones stay open."""

from __future__ import annotations

import os
import weakref
from collections import deque
from pathlib import Path
from typing import ClassVar

from forge_rl.errors import TaskError

_MOST_OPEN = 64
"""Maximum number of files that a process keeps open."""


class OpenFile:
    """A file whose parts are read in any order, from any thread.

    It is opened at the first read and stays open until 64 others were opened after it, or nothing refers to it.

    Args:
        path: the file to read.
        named: the file that error messages name; `path` by default.

    Raises:
        OSError: the file cannot be found.
    """

    _recent: ClassVar[deque[weakref.ref[OpenFile]]] = deque()
    """Files that are open, the first opened first."""

    def __init__(self, path: Path, named: Path | None = None) -> None:
        self._path = path
        self._named = named or path
        self._size = path.stat().st_size
        self._descriptor: _Descriptor | None = None

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to before `end`.

        Raises:
            TaskError: the file has another size than before.
            OSError: the file cannot be read.
        """
        # A local reference keeps the descriptor open during the read, even if another thread drops it meanwhile.
        descriptor = self._descriptor or self._open()
        if os.fstat(descriptor.number).st_size != self._size:
            raise changed(self._named)
        # pread takes the offset as an argument: threads share the descriptor without moving a common position.
        return os.pread(descriptor.number, end - begin, begin)

    def _open(self) -> _Descriptor:
        descriptor = self._descriptor = _Descriptor(self._path)
        self._recent.append(weakref.ref(self))
        while len(self._recent) > _MOST_OPEN:
            if (other := self._recent.popleft()()) is not None:
                other._descriptor = None  # closed when no thread reads from it any more
        return descriptor


def changed(path: Path) -> TaskError:
    """Return the error for a file that has another size than when it was opened."""
    return TaskError(f"{path} changed while it was being read", hint="start the run again")


class _Descriptor:
    """A file descriptor, closed when nothing refers to it."""

    __slots__ = ("number",)

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # not if it could not be opened
            os.close(self.number)
