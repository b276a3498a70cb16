"""Limits of sessions, and results of their cells."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forge_rl.errors import ConfigError, InfrastructureError, check_flags


class SandboxError(InfrastructureError):
    """A sandbox that cannot start, is full or was killed, or a session that has ended. Not an error of a cell."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a session and of each of its cells."""

    wall_s: float = 30.0
    """Seconds that a cell may take."""
    cpu_s: float | None = None
    """CPU seconds that a cell may take; None for as many as the time and `cpus` give."""
    cpus: float = 1.0
    """CPUs that a session may keep busy."""
    memory_bytes: int = 512 << 20
    """Memory of a session, with its files and the kernel's share."""
    processes: int = 64
    """Processes and threads of a session."""
    output_bytes: int = 64 << 10
    """Bytes kept of each of a cell's stdout, stderr and value; the rest is dropped."""
    scratch_bytes: int = 64 << 20
    """Bytes of a session's files, which are kept in memory."""
    scratch_files: int = 4096
    """Number of a session's files and folders."""
    transfer_bytes: int = 16 << 20
    """Largest file that goes in or out."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "Limits:",
            minimum={
                "cpus": 0.01,
                "memory_bytes": 16 << 20,
                "processes": 1,
                "output_bytes": 0,
                "scratch_bytes": 4096,
                "scratch_files": 8,
                "transfer_bytes": 0,
            },
            above={"wall_s": 0},
        )
        if self.cpu_s is not None and not 0 < self.cpu_s < math.inf:
            raise ConfigError(f"Limits:cpu_s is {self.cpu_s}", hint="set it to a value above 0, or to None")
        check_flags(self, "Limits:", below={"wall_s": math.inf, "cpus": math.inf})


@dataclass(frozen=True, kw_only=True)
class CellError:
    """How a cell failed. The cell wrote the texts: they may contain anything, terminal escapes included."""

    name: str
    """Class of the exception; `CellOverrun`, `OutOfMemory`, `Ended` or `BadFrame` if the sandbox ended the cell;
    `NotStarted` if a command could not be started."""
    message: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources that a cell used."""

    wall_s: float
    """Seconds, measured outside of the session."""
    cpu_s: float = 0.0
    """CPU seconds. Sessions of Python report them themselves: a hostile one can lie."""
    memory_bytes: int = 0
    """Most memory that the session has had so far; of Python, its first process, as it reports it."""


MEDIA_TYPES = {"image/png": b"\x89PNG\r\n\x1a\n", "image/jpeg": b"\xff\xd8\xff"}
"""Media types of images, and how their bytes begin."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image as a file. The session made it: decode it with care, or not at all."""

    media_type: str
    """image/png or image/jpeg; the bytes begin like one."""
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a cell, which wrote all texts in it."""

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """`repr` of the last statement's value, if it is an expression and not None."""
    image: Image | None = None
    """The last statement's value as an image, if it is one: a figure of matplotlib, an image of PIL, or another object
    with `_repr_png_` or `_repr_jpeg_`, or the bytes of a PNG or JPEG file."""
    error: CellError | None = None
    usage: Usage
    cut: bool = False
    """True if stdout or stderr was longer than the limit, or the image larger than a file that goes out."""
    status: int | None = None
    """Exit status of a command, 128 and its number if a signal ended it; None for Python. Not an error in itself."""
