"""Labels that distinguish the containers of live programs from those that killed programs left behind."""

from __future__ import annotations

import os
from pathlib import Path


def this_owner() -> str:
    """Return a label that no other process has, on this machine or another."""
    return f"{_machine()} pid {os.getpid()} {_start_time(os.getpid())}"


def has_ended(owner: str) -> bool:
    """Return whether an owner was a process of this machine that no longer runs."""
    machine, _, process = owner.partition(" pid ")
    pid, _, start_time = process.partition(" ")
    if machine != _machine() or not pid.isdecimal():
        return False
    try:
        # The kernel reuses PIDs: a process that began at another time is not the owner.
        return _start_time(int(pid)) != start_time
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is read
        return True


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + f" {os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
