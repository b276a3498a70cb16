"""Linux system calls that Python does not offer, through ctypes. Imports nothing of this library."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable

NEW_MOUNTS, NEW_HOST_NAME, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
"""CLONE_NEW flags of namespaces."""
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18
"""Flags of `mount`."""
_INTO_CGROUP, _PARENT, _CHILD_SETTID, _CHILD_CLEARTID = 0x200000000, 0x8000, 0x01000000, 0x00200000
_MOUNT_SETATTR, _CLONE3, _OPEN_TREE, _MOVE_MOUNT = 442, 435, 428, 429  # the same everywhere, as are Landlock's
_OPENAT2 = 437
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CLONE = {"x86_64": 56, "aarch64": 220}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _BOUNDING_DROP, _NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 1, 4, 24, 38, 22, 2

# Landlock's file rights: linux/landlock.h.
EXECUTE, WRITE_FILE, READ_FILE, READ_FOLDER = 1, 1 << 1, 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of file access rights by Landlock version; 16 from version 5 on."""

_libc = ctypes.CDLL(None, use_errno=True)
_held = ctypes.PyDLL(None, use_errno=True)
"""The same library, called without releasing the interpreter's lock, as a fork must be."""


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Give this process new namespaces."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or change a mount."""
    _checked(
        _libc.mount(source.encode(), target.encode(), kind.encode() or None, flags, options.encode()), f"mount {target}"
    )


def bind_read_only(source: str, target: str) -> None:
    """Show a file or folder, with all that is mounted below it, at another place: read-only, no devices, no setuid."""
    mount(source, target, flags=BIND | RECURSIVE)
    # struct mount_attr: attributes to set, to clear, propagation, descriptor of a user namespace. MOUNT_ATTR_RDONLY,
    # NOSUID and NODEV have the values of mount(2)'s flags.
    attributes = struct.pack("QQQQ", READ_ONLY | NO_SETUID | NO_DEVICES, 0, 0, 0)
    recursive = 0x8000
    # A bind mount ignores READ_ONLY when it is made, and a remount changes one mount: file systems below would stay
    # writable. -100 is AT_FDCWD, 0x8000 is AT_RECURSIVE.
    if _libc.syscall(_MOUNT_SETATTR, -100, target.encode(), recursive, attributes, len(attributes)) < 0:
        # Before Linux 5.12 only the topmost mount can be changed at once.
        mount("none", target, flags=REMOUNT | BIND | READ_ONLY | NO_SETUID | NO_DEVICES)


def detached(folder: str) -> int:
    """Return a descriptor of a folder's file system that is mounted nowhere, for `attach` in any mount namespace."""
    # OPEN_TREE_CLONE and OPEN_TREE_CLOEXEC.
    clone, close_on_exec = 1, os.O_CLOEXEC
    return _checked(_libc.syscall(_OPEN_TREE, -100, os.fsencode(folder), clone | close_on_exec), "open_tree")


def attach(tree: int, target: str, users: int | None) -> None:
    """Mount a detached folder read-only, with its files' owners as a user namespace maps them.

    Args:
        tree: from `detached`; attached only once.
        users: descriptor of the user namespace, whose own ids are those on the disk; None to leave them.
    """
    # AT_EMPTY_PATH, MOUNT_ATTR_IDMAP and MOVE_MOUNT_F_EMPTY_PATH: the tree is named by its descriptor alone.
    at_itself, owners_mapped, from_itself = 0x1000, 0x100000, 4
    flags = READ_ONLY | NO_SETUID | NO_DEVICES | (0 if users is None else owners_mapped)
    attributes = struct.pack("QQQQ", flags, 0, 0, users or 0)
    _checked(_libc.syscall(_MOUNT_SETATTR, tree, b"", at_itself, attributes, len(attributes)), "mount_setattr")
    _checked(_libc.syscall(_MOVE_MOUNT, tree, b"", -100, target.encode(), from_itself), "move_mount")


def attach_at(tree: int, place: int) -> None:
    """Mount a detached folder at an open folder, which may have been renamed since it was opened."""
    # MOVE_MOUNT_F_EMPTY_PATH and MOVE_MOUNT_T_EMPTY_PATH: no path is looked up, so that no link that the session plants
    # meanwhile can lead the mount elsewhere.
    from_itself, at_itself = 4, 0x40
    _checked(_libc.syscall(_MOVE_MOUNT, tree, b"", place, b"", from_itself | at_itself), "move_mount")


def open_within(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Open a path as if an open folder was the root, for links and `..` too, also while they are changed."""
    # RESOLVE_IN_ROOT. Python's own checks of a path could be outrun by a session that swaps a folder for a link.
    in_root = 0x10
    # struct open_how: flags, mode, resolve.
    options = struct.pack("QQQ", flags | os.O_CLOEXEC, mode, in_root)
    return _checked(_libc.syscall(_OPENAT2, root, os.fsencode(path), options, len(options)), path)


def enter_mounts(space: int) -> None:
    """Make an open mount namespace this process's own, and its root the root folder."""
    _checked(_libc.setns(space, NEW_MOUNTS), "setns")


def enter_network(users: int, network: int) -> None:
    """Enter an open network namespace and the open user namespace that owns it, both made by this user."""
    # In this order: capabilities in the owning user namespace are what allows the second step.
    _checked(_libc.setns(users, NEW_USER), "setns")
    _checked(_libc.setns(network, NEW_NETWORK), "setns")


def unmount(target: str) -> None:
    """Detach a mount; files in use stay until they are closed. A link at the end of the path is not followed."""
    # MNT_DETACH and UMOUNT_NOFOLLOW.
    detach, no_follow = 2, 8
    _checked(_libc.umount2(target.encode(), detach | no_follow), "umount")


def pivot_root(folder: str) -> None:
    """Make a mounted folder the root of this mount namespace, and detach the old one."""
    os.chdir(folder)
    # Both arguments are the same folder: the old root ends up mounted over the new one, and unmounting "." reveals it.
    # See pivot_root(2), "pivot_root(".", ".")".
    _checked(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent's thread exits. A change of user undoes it."""
    _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def forbid_privileges() -> None:
    """Forbid this process and its children to gain privileges by executing a program."""
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def drop_bounding_capabilities() -> None:
    """Keep this process's children from ever having capabilities that the process does not hold already."""
    for capability in range(64):
        # The kernel refuses numbers above its last capability, which differs between kernels.
        if _libc.prctl(_BOUNDING_DROP, capability, 0, 0, 0) < 0:
            return


def drop_capabilities() -> None:
    """Give up all capabilities of this process, for good."""
    drop_bounding_capabilities()
    # _LINUX_CAPABILITY_VERSION_3, of this process; all three sets are empty.
    version_3 = struct.pack("Ii", 0x20080522, 0)
    _checked(_libc.syscall(_CAPSET[os.uname().machine], version_3, bytes(24)), "capset")


def enter_user_namespace(inside: int, namespaces: int = 0, proc: str = "/proc") -> None:
    """Give this process a user namespace that knows only its own user, with all capabilities in it.

    Args:
        inside: number of the user and of its group in there.
        namespaces: flags of further namespaces to create, which belong to it.
        proc: path of a /proc that can be written.
    """
    uid, gid = os.getuid(), os.getgid()
    unshare(NEW_USER | namespaces)
    # The change of user made this process undumpable, which gives its files in /proc, these maps among them, to root.
    open_to_own_user(True)
    # Without privileges, the kernel takes a gid_map only after setgroups was denied.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        with open(f"{proc}/self/{name}", "w") as file:
            file.write(text)


def open_to_own_user(is_open: bool) -> None:
    """Open or close this process's files in /proc to its user, also to itself. A change of user closes them."""
    _libc.prctl(_SET_DUMPABLE, int(is_open), 0, 0, 0)


def has_seccomp() -> bool:
    """Return True if the kernel filters system calls."""
    bad_address = 14  # a null filter is looked at only where filters exist
    return _libc.prctl(_SECCOMP, _FILTER, None, 0, 0) == -1 and ctypes.get_errno() == bad_address


def filter_calls(program: bytes) -> None:
    """Apply a seccomp filter to this process for good."""
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions of 8 bytes each, padding, a pointer. `buffer` must live until the
    # call returns.
    program_header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_SECCOMP, _FILTER, program_header, 0, 0), "seccomp")


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if there is none."""
    # LANDLOCK_CREATE_RULESET_VERSION.
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, 1)))


def restrict_files(rules: Iterable[tuple[int, int]], version: int) -> None:
    """Restrict this process for good to paths below open ones, with Landlock.

    TCP is refused from version 4 on; abstract sockets and signals outside of this process's descendants from 6 on.

    Args:
        rules: descriptors opened with O_PATH, and the access granted below them; -1 grants all.
        version: version of Landlock, 1 or more.
    """
    # Everything that this version can handle is handled, and so refused unless a rule grants it.
    all_rights = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    # struct landlock_ruleset_attr: file rights, bind and connect of TCP, scopes (abstract sockets, signals). Older
    # kernels refuse a longer struct than they know.
    attributes = struct.pack("QQQ", all_rights, 3, 3)[: 8 * (1 + (version >= 4) + (version >= 6))]
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    for path, rights in rules:
        rule = struct.pack("=Qi", rights & all_rights, path)
        _checked(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), "landlock_add_rule")
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def _thread_id_address() -> int:
    """Return the address at which the C library keeps this thread's id; 0 if it is not found.

    The library's own fork has the kernel write the child's id there. A bare `clone` would leave the parent's.
    """
    _libc.pthread_self.restype = ctypes.c_void_p
    # The C library's `struct pthread`, whose layout is private: its first 2 KiB are searched for the id.
    start = int(_libc.pthread_self())
    words = (ctypes.c_int * 512).from_address(start)
    tid = _libc.gettid()
    for index, word in enumerate(words):
        if word == tid:
            return start + 4 * index
    return 0


def _forked(result: int) -> int:
    """Run the interpreter's hooks on both sides of a fork; return its result.

    Raises:
        OSError: it failed.
    """
    if result == 0:
        _held.PyOS_AfterFork_Child()
        return 0
    # Read before the hook, which may change it.
    number = ctypes.get_errno()
    _held.PyOS_AfterFork_Parent()
    if result < 0:
        raise OSError(number, f"fork: {os.strerror(number)}")
    return result


def fork_into(cgroup: int | None, namespaces: int = 0) -> int:
    """Fork like `os.fork`, with the child in a cgroup of version 2 and in new namespaces from its start.

    Moving a process afterwards takes a lock that all forks of the machine need, and leaves a moment outside.

    Args:
        cgroup: descriptor of the cgroup's folder; None for the parent's.
    """
    address = _thread_id_address()
    flags = (
        namespaces | (_CHILD_SETTID | _CHILD_CLEARTID if address else 0) | (_INTO_CGROUP if cgroup is not None else 0)
    )
    # struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid,
    # set_tid_size, cgroup. Without a stack, the child continues on its copy of this one, as after fork(2).
    arguments = struct.pack("11Q", flags, 0, address, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, cgroup or 0)
    buffer = ctypes.create_string_buffer(arguments, len(arguments))
    _held.PyOS_BeforeFork()
    return _forked(_held.syscall(_CLONE3, buffer, len(arguments)))


def fork_sibling() -> int:
    """Fork like `os.fork`, but make the child one of this process's own parent, which learns of its end."""
    address = _thread_id_address()
    flags = _PARENT | (_CHILD_SETTID | _CHILD_CLEARTID if address else 0)
    machine = os.uname().machine
    # The child's id and its TLS swap places on ARM.
    last_arguments = (address, 0) if machine == "x86_64" else (0, address)
    _held.PyOS_BeforeFork()
    return _forked(
        _held.syscall(_CLONE[machine], ctypes.c_long(flags), None, None, *map(ctypes.c_void_p, last_arguments))
    )
