"""Seccomp filter of a session: an allow-list of system calls for one user's programs without a network."""

from __future__ import annotations

import errno
import platform
import socket
import struct
from collections.abc import Iterator

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's number of each architecture, and its column in the tables."""
_ALLOWED: dict[str, tuple[int, int]] = {
    # Not here on purpose: whatever reaches much of the kernel (ptrace, bpf, io_uring, keyrings, mounts, namespaces),
    # makes sockets, or watches files (inotify shows a session what happens to the machine's own).
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "close": (3, 57), "close_range": (436, 436), "open": (2, -1), "openat": (257, 56), "openat2": (437, 437),
    "creat": (85, -1), "lseek": (8, 62), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24), "fcntl": (72, 25),
    "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "truncate": (76, 45),
    "fallocate": (285, 47), "fadvise64": (221, 223), "fstat": (5, 80), "newfstatat": (262, 79), "stat": (4, -1),
    "lstat": (6, -1), "statx": (332, 291), "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, -1), "readlinkat": (267, 78), "getdents": (78, -1), "getdents64": (217, 61), "getcwd": (79, 17),
    "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, -1), "mkdirat": (258, 34), "mknod": (133, -1),
    "mknodat": (259, 33), "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, -1), "linkat": (265, 37), "symlink": (88, -1),
    "symlinkat": (266, 36), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "umask": (95, 166),
    "utime": (132, -1), "utimes": (235, -1), "utimensat": (280, 88), "futimesat": (261, -1), "statfs": (137, 43),
    "fstatfs": (138, 44), "sendfile": (40, 71), "copy_file_range": (326, 285), "getxattr": (191, 8),
    "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13), "pipe": (22, -1), "pipe2": (293, 59), "poll": (7, -1), "ppoll": (271, 73),
    "select": (23, -1), "pselect6": (270, 72), "epoll_create": (213, -1), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd": (284, -1), "eventfd2": (290, 19), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "signalfd": (282, -1), "signalfd4": (289, 74),
    "memfd_create": (319, 279), "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214), "msync": (26, 227), "mincore": (27, 232), "membarrier": (324, 283),
    "futex": (202, 98), "futex_waitv": (449, 449), "set_robust_list": (273, 99), "rseq": (334, 293),
    "set_tid_address": (218, 96), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_setaffinity": (203, 122), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getpriority": (140, 141),
    "setpriority": (141, 140), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    "wait4": (61, 260), "waitid": (247, 95), "exit": (60, 93), "exit_group": (231, 94), "kill": (62, 129),
    "tgkill": (234, 131), "tkill": (200, 130), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "rt_sigqueueinfo": (129, 138), "sigaltstack": (131, 132), "pause": (34, -1), "alarm": (37, -1),
    "setitimer": (38, 103), "getitimer": (36, 102), "timer_create": (222, 107), "timer_settime": (223, 110),
    "timer_gettime": (224, 108), "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, -1), "times": (100, 153), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getpgid": (121, 155), "getpgrp": (111, -1), "setpgid": (109, 154), "getsid": (124, 156), "setsid": (112, 157),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "getrandom": (318, 278), "getcpu": (309, 168),
    "restart_syscall": (219, 128), "arch_prctl": (158, -1), "recvfrom": (45, 207), "sendmsg": (46, 211),
    "recvmsg": (47, 212), "shutdown": (48, 210), "getsockopt": (55, 209), "getsockname": (51, 204),
    "getpeername": (52, 205),
}  # fmt: skip
"""Calls that are allowed with any arguments; numbers on x86-64 and 64-bit ARM, -1 where it does not exist."""
_NEWEST = 462
"""Calls above this number are unknown here and don't exist for a session: programs fall back."""
# Calls that are allowed with some arguments only, below in `session_filter`.
_CLONE, _CLONE3, _PRLIMIT, _PRCTL, _IOCTL = (56, 220), (435, 435), (302, 261), (157, 167), (16, 29)
_SOCKETPAIR, _SENDTO = (53, 199), (44, 206)
_SOCKET = (41, 198)
_NETWORK = ((42, 203), (43, 202), (49, 200), (50, 201), (54, 208), (288, 242), (299, 243), (307, 269))
"""connect, accept, bind, listen, setsockopt, accept4, recvmmsg and sendmmsg."""
_CHANGE_ATTRIBUTES = ((188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16))
"""setxattr and removexattr, which sed, cp and mv expect to be missing on many file systems, but not to be refused."""
_NAMESPACES = 0x7E020000
"""All CLONE_NEW flags of clone; its CLONE_NEWTIME is part of the exit signal there."""
# PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, CAPBSET_READ, SET and GET_NO_NEW_PRIVS, SET_THP_DISABLE, SET_VMA.
_PRCTLS = (1, 3, 15, 16, 23, 38, 39, 41, 0x53564D41)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

# Classic BPF: linux/filter.h and linux/seccomp.h.
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x45, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_Line = tuple[int, int, int, int]


def _refuse(code: int) -> _Line:
    return _RETURN, 0, 0, 0x00050000 | code


def _argument(index: int, *, high: bool = False) -> _Line:
    """Load the low or high half of an argument from seccomp_data (both architectures are little-endian)."""
    return _LOAD, 0, 0, 16 + 8 * index + 4 * high


def _only(call: int, lines: list[_Line]) -> list[_Line]:
    """Run lines for one call only; they must end in a verdict, as they overwrite its number in the accumulator."""
    return [(_EQUAL, 0, len(lines), call), *lines]


def _one_of(values: tuple[int, ...], argument: int, otherwise: int) -> list[_Line]:
    matches: list[_Line] = []
    for value in values:
        matches += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [_argument(argument), *matches, _refuse(otherwise)]


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    start = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield start, last
            start = number
        last = number
    yield start, last


def _search(ranges: list[tuple[int, int]], after: int = 0) -> list[_Line]:
    """Allow the numbers of sorted ranges by binary search.

    The kernel runs each new filter on every call's number when it is set, so that a long chain would slow down starts.

    Args:
        after: number of lines after these to skip if the number is in no range.
    """
    # A line's second and third field are how many lines to jump if its test holds, and if it does not.
    if len(ranges) == 1:
        [(low, high)] = ranges
        return [(_AT_LEAST, 0, 2 + after, low), (_ABOVE, 1 + after, 0, high), (_RETURN, 0, 0, _ALLOW)]
    middle = len(ranges) // 2
    right = _search(ranges[middle:], after)
    left = _search(ranges[:middle], after + len(right))
    return [(_AT_LEAST, len(left), 0, ranges[middle][0]), *left, *right]


def session_filter(machine: str = platform.machine(), *, has_network: bool = False) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    Refused calls fail with EPERM, those that change extended attributes with ENOTSUP; `clone3` and unknown ones with
    ENOSYS, so that C libraries fall back to `clone`, whose flags can be checked. Sockets exist only as connected pairs.
    Another architecture's calls kill the process.

    Args:
        has_network: allow sockets of TCP and UDP, for programs in a network namespace of their own.

    Raises:
        KeyError: this machine's architecture has no table.
    """
    architecture, column = ARCHITECTURES[machine]
    allow: _Line = (_RETURN, 0, 0, _ALLOW)
    deny = _refuse(errno.EPERM)
    # Offsets into seccomp_data: 0 is the call's number, 4 the architecture.
    # First the architecture: 32-bit calls, which any program can make, have other numbers, so that a check of numbers
    # alone would let through what it means to refuse.
    lines: list[_Line] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    # x32 has the architecture of x86-64, and its own numbers for the same calls.
    lines += [(_AT_LEAST, 0, 1, 0x40000000), deny]
    lines += [(_ABOVE, 0, 1, _NEWEST), _refuse(errno.ENOSYS)]
    allowed_calls = [*_ALLOWED.values(), *(_NETWORK if has_network else ())]
    lines += _search(list(_ranges(sorted(numbers[column] for numbers in allowed_calls if numbers[column] >= 0))))
    # Its flags are behind a pointer, which a filter cannot follow.
    lines += _only(_CLONE3[column], [_refuse(errno.ENOSYS)])
    for call in _CHANGE_ATTRIBUTES:
        lines += _only(call[column], [_refuse(errno.ENOTSUP)])
    lines += _only(_CLONE[column], [_argument(0), (_ANY_BIT, 0, 1, _NAMESPACES), deny, allow])
    # setrlimit is allowed; this one would also reach other processes of the user, such as the session's forks.
    lines += _only(_PRLIMIT[column], [_argument(0), (_EQUAL, 0, 1, 0), allow, deny])  # of the caller only
    lines += _only(_PRCTL[column], _one_of(_PRCTLS, 0, errno.EPERM))
    lines += _only(_IOCTL[column], _one_of(_IOCTLS, 1, errno.ENOTTY))
    if has_network:
        families = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
        lines += _only(_SOCKET[column], _one_of(families, 0, errno.EAFNOSUPPORT))
    # A datagram socket could send to any address, also one made as a pair; those of other types stay connected.
    kinds: list[_Line] = [_argument(1), (_AND, 0, 0, 0xF), (_EQUAL, 2, 0, socket.SOCK_STREAM)]
    kinds += [(_EQUAL, 1, 0, socket.SOCK_SEQPACKET), deny, allow]
    lines += _only(_SOCKETPAIR[column], [_argument(0), (_EQUAL, 1, 0, socket.AF_UNIX), deny, *kinds])
    # sendto may name no address: both halves of the pointer must be zero.
    unaddressed: list[_Line] = [(_EQUAL, 1, 0, 0), deny]
    if has_network:
        lines += _only(_SENDTO[column], [allow])
    lines += _only(_SENDTO[column], [_argument(4), *unaddressed, _argument(4, high=True), *unaddressed, allow])
    lines.append(deny)
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
