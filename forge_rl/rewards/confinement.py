"""Sandboxes a scoring process: no network, other processes or file writes, and few files to read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import stat
import struct
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_MOST_BYTES = 4 << 30
"""Maximum address space of a process."""
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 1, 38, 22, 2
_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom")

# Landlock's system calls have the same numbers on all architectures: Linux, Documentation/userspace-api/landlock.rst.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file access rights by Landlock version; 16 from version 5 on."""

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of each architecture, and its column in `_ALLOWED`."""
_ALLOWED: dict[str, tuple[int, int]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "close": (3, 57),
    "lseek": (8, 62), "dup": (32, 23), "fcntl": (72, 25), "fstat": (5, 80), "newfstatat": (262, 79),
    "statx": (332, 291), "stat": (4, 79), "lstat": (6, 79), "access": (21, 48), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, 78), "readlinkat": (267, 78), "getdents64": (217, 61),
    "getcwd": (79, 17), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214), "membarrier": (324, 283), "futex": (202, 98), "rseq": (334, 293),
    "set_robust_list": (273, 99), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "setitimer": (38, 103), "getitimer": (36, 102), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, 169), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160),
    "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163), "getrandom": (318, 278),
    "poll": (7, 73), "ppoll": (271, 73), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""Allowed system calls, enough to compute, read files and write to open ones; numbers on x86-64 and 64-bit ARM."""
_OPENAT = (257, 56)
_OPEN = 2  # only on x86-64
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000  # the last bit is O_TMPFILE's
_EPERM = 1

# Classic BPF: linux/filter.h and linux/seccomp.h.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent exits."""
    _libc().prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def missing_confinement() -> str:
    """Return a warning about what `confine` lacks on this machine, or "". Confines nothing itself."""
    libc = _libc()
    # A null filter fails with EFAULT only if the kernel supports filters.
    filters = libc.prctl(_SECCOMP, _FILTER, None, 0, 0) == -1 and ctypes.get_errno() == errno.EFAULT
    lacking = []
    if not filters or platform.machine() not in _ARCHITECTURES:
        lacking.append("seccomp, which blocks the network, other processes and writing files")
    if libc.syscall(_CREATE_RULESET, None, 0, 1) < 1:
        lacking.append("Landlock, which blocks reading files")
    if not lacking:
        return ""
    return f"processes that score model output run without {' and without '.join(lacking)}: this kernel lacks it"


def confine(packages: Iterable[Path]) -> None:
    """Restrict this process to computing and to reading the files of Python and of some packages. Irreversible.

    Seccomp blocks the network, other processes, signals, programs and writing files, on x86-64 and 64-bit ARM;
    Landlock blocks reading other files. Either is skipped if the kernel lacks it, see `missing_confinement`.

    Args:
        packages: folders with packages that may be imported later.
    """
    # Limits of the process itself, which hold also where the kernel has neither Landlock nor seccomp.
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    libc = _libc()
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # required by both
    python_folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    python_folders.add(str(Path(__file__).parent.parent))
    # Landlock comes first: the seccomp filter would refuse its system calls.
    _restrict_reading(libc, [*map(str, packages), *sorted(python_folders), *_SYSTEM, *_SYSTEM_FILES])
    if platform.machine() in _ARCHITECTURES:
        number, column = _ARCHITECTURES[platform.machine()]
        _filter_calls(libc, _program(number, column))


def _restrict_reading(libc: ctypes.CDLL, readable: Iterable[str]) -> None:
    """Block opening anything except these files and the contents of these folders, with Landlock."""
    # With a null ruleset and flag 1, the call returns the version of Landlock that the kernel supports.
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    # Network from version 4 on; abstract sockets and signals to other processes from version 6 on.
    handled = struct.pack("QQQ", rights, 3, 3)[: 8 * (1 + (version >= 4) + (version >= 6))]
    rules = libc.syscall(_CREATE_RULESET, handled, len(handled), 0)
    if rules < 0:
        return
    for path in readable:
        with contextlib.suppress(OSError):  # skip paths that do not exist
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            # The kernel rejects a rule that gives a right to list folders to a plain file.
            access = _READ_FILE | _READ_FOLDER if is_folder else _READ_FILE
            libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", access, descriptor), 0)
            os.close(descriptor)
    libc.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _program(architecture: int, column: int) -> bytes:
    """Return the seccomp program that allows the calls above, and opening files for reading only."""
    # Offsets into seccomp_data: 0 is the call's number, 4 the architecture, from 16 on its arguments, 8 bytes each.
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _REFUSE)]  # x32's numbers
    for call in sorted({numbers[column] for numbers in _ALLOWED.values()}):
        lines += [(_EQUAL, 0, 1, call), (_RETURN, 0, 0, _ALLOW)]
    # Opening is allowed if the flags (argument 2 of openat, 1 of open) have no bit for writing or creating. A filter
    # sees only numbers, never the path, which is why Landlock is needed for reading.
    for call, flags in [(_OPENAT[column], 2), *([(_OPEN, 1)] if column == 0 else [])]:
        lines += [(_EQUAL, 0, 4, call), (_LOAD, 0, 0, 16 + 8 * flags), (_ANY_BIT, 0, 1, _WRITING)]
        lines += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _filter_calls(libc: ctypes.CDLL, program: bytes) -> None:
    # A variable, as the kernel reads the program by its address.
    buffer = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc.prctl(_SECCOMP, _FILTER, description, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
