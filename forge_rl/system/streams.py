"""Standard streams that keep a program running when their reader or terminal is gone, or the disk is full."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import stat
import sys
from typing import TYPE_CHECKING, Any

from forge_rl.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_READER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
_SLOW_READER_S = 1.0
"""Longest wait for a reader of a stream that does not block."""


class LastingFile(io.FileIO):
    """A stream's file that drops failed writes, where `print` would raise in the middle of work.

    On a full disk, only the output of that time is lost. A reader or terminal that is gone does not come back: the
    descriptor then leads to /dev/null, also for native code and children, which could end at such an error.

    Args:
        number: the descriptor; stays open.
        ends: end the program instead: raise SystemExit with the status that a shell gives a program whose reader is
            gone, or ConfigError if the disk is full.
    """

    def __init__(self, number: int, *, ends: bool = False) -> None:
        super().__init__(number, "w", closefd=False)
        self.failure = ""
        """Error with which the stream lost its reader."""
        self._ends = ends

    def write(self, data: ReadableBuffer) -> int:
        size = memoryview(data).nbytes
        try:
            count = super().write(data)
            # A non-blocking stream whose reader is slow returns None instead of raising.
            if count is None and select.select([], [self], [], _SLOW_READER_S)[1]:
                count = super().write(data)
        except OSError as error:
            # A file on a network may give EIO for a while, a terminal gives it for good.
            if error.errno in _READER_GONE or (
                error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            ):
                self._lead_to_nowhere(str(error))
            if self._ends:
                # Raised once; what is printed while the program ends is dropped.
                self._ends = False
                if self.failure:
                    raise SystemExit(128 + signal.SIGPIPE) from None
                raise ConfigError(f"stdout cannot be written: {error.strerror}", hint="write it elsewhere") from None
            return size
        return size if count is None else count

    def _lead_to_nowhere(self, failure: str) -> None:
        self.failure = failure
        _open_nowhere(self.fileno())


def lasting(number: int, *, template: io.TextIOWrapper | None = None, ends: bool = False) -> io.TextIOWrapper:
    """Return a text stream over a descriptor that drops failed writes; see `LastingFile`.

    Args:
        template: stream whose encoding and buffering it has; by default UTF-8, and one line at a time.
        ends: end the program when the reader is gone.
    """
    file = LastingFile(number, ends=ends)
    if template is None:
        return io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "replace", line_buffering=True)
    buffer: Any = file if template.write_through else io.BufferedWriter(file)
    return io.TextIOWrapper(
        buffer,
        template.encoding,
        template.errors,
        line_buffering=template.line_buffering,
        write_through=template.write_through,
    )


def outlive_readers(*, ends: bool = False) -> None:
    """Keep a program alive when its standard streams are closed, at its start or later.

    Descriptors that are closed at the start lead to nowhere: otherwise the next file that is opened would get the
    number, and be written to by native code that prints.

    Args:
        ends: end the program when nobody reads stdout any more, for programs that do nothing but print.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            _open_nowhere(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, lasting(number))
        elif _leads_to(stream, number) and not isinstance(_file_of(stream), LastingFile):
            with contextlib.suppress(OSError):
                stream.flush()
            setattr(sys, name, lasting(number, template=stream, ends=ends and number == 1))


def reader_failure(stream: object) -> str:
    """Return the error with which a stream lost its reader; "" if it has one, or the stream records none."""
    return str(getattr(_file_of(stream), "failure", ""))


def _file_of(stream: object) -> object:
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _leads_to(stream: object, number: int) -> bool:
    """Return whether a stream is Python's own for this descriptor; a notebook or a test may have replaced it."""
    if not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def _open_nowhere(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    # Python's descriptors are not inherited by default, but children need their standard streams.
    os.set_inheritable(number, True)
