"""Other processes, any of which may end while it is looked at."""

import os
from pathlib import Path

import psutil  # type: ignore[import-untyped]


def lives(process: psutil.Process | int) -> bool:
    """Tells whether a process runs; a zombie does not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def below(process: psutil.Process, word: str) -> list[psutil.Process]:
    """The descendants of a process whose command line has a word."""
    return [child for child in process.children(recursive=True) if word in command_line(child)]


def command_line(process: psutil.Process) -> str:
    """The command line of a process; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def log_of(process: psutil.Process) -> str:
    """The name of the file that a process prints to; empty once it has ended."""
    try:
        return Path(os.readlink(f"/proc/{process.pid}/fd/1")).name
    except OSError:
        return ""
