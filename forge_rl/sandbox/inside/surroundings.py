"""Builds what sessions of a fork server can see: namespaces, and a root folder with the system's programs and Python.

Runs in the keeper and the server, and imports nothing of this library but its neighbours.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from forge_rl.sandbox.inside import commands, kernel, overlays
from forge_rl.sandbox.inside.images import HOSTS

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders that a session can read and execute, besides Python's."""
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "alternatives",
    "mime.types",
    "ssl/certs",
    "ssl/openssl.cnf",
)
_PASSWD = "root:x:0:0:root:/:/bin/false\nsandbox:x:{uid}:{uid}:session:{home}:/bin/sh\n"
DEVICES = ("null", "zero", "full", "random", "urandom")
NAMESPACES = kernel.NEW_MOUNTS | kernel.NEW_HOST_NAME | kernel.NEW_IPC | kernel.NEW_PIDS | kernel.NEW_NETWORK
CARRIED = "/dev/python"
"""Where sessions of an image find this machine's Python: /dev is a mount of their own, which hides no file."""
HIDDEN = kernel.NO_SETUID | kernel.NO_DEVICES


def enter_namespaces() -> None:
    """Become root of new namespaces without being root.

    Raises:
        OSError: this machine does not let its users; says what to do.
    """
    try:
        kernel.enter_user_namespace(0, NAMESPACES)
        kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)  # some systems refuse only what comes next
    except OSError as error:
        raise OSError(
            f"this machine gives its users no namespaces of their own ({error}), without which only root can isolate "
            "sessions: allow them (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu), or run as root"
        ) from None


def build_root(folders: list[str], profile: str, rootless: bool, images: str = "") -> None:
    """Make a root that shows only the system's programs, Python and empty folders, in this mount namespace.

    Args:
        images: the store of images, for `overlays.mount_image`; "" for none.
    """
    # Private first: systemd shares mounts by default, so that those made below would appear on the machine too.
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.PRIVATE)
    root = "/tmp"  # exists everywhere; the tmpfs hides what it holds
    # Java does not start without its folders in /etc.
    etc_names = [*_ETC, *(name for name in os.listdir("/etc") if name.startswith("java"))]
    etc = {name: os.path.join("/etc", name) for name in etc_names if os.path.exists(os.path.join("/etc", name))}
    # Opened before /tmp is hidden, as Python or the store may lie below it.
    opened = {path: os.open(path, os.O_PATH) for path in folders if os.path.isdir(path)}
    store = os.open(images, os.O_PATH) if images else -1
    kernel.mount("tmpfs", root, "tmpfs", kernel.NO_SETUID, "size=16m,mode=755")
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _show(path, root + path)
    for name, path in etc.items():
        _show(os.path.realpath(path), f"{root}/etc/{name}")
    for name in DEVICES:
        _show(f"/dev/{name}", f"{root}/dev/{name}", device=True)
    for path, fd in opened.items():
        if not is_system(path):
            _show(f"/proc/self/fd/{fd}", root + path)
        os.close(fd)
    process = profile == "process"
    # One /etc/passwd for all sessions, whose own numbers differ: 65534 is nobody's.
    uid, home = (commands.INSIDE_UID, commands.HOME) if process else (65534, "/tmp")
    passwd = _PASSWD.format(uid=uid, home=home)
    for name, text in (("passwd", passwd), ("group", f"sandbox:x:{uid}:\n"), ("hosts", HOSTS)):
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)
    for name in ("/proc", "/tmp"):
        # Sessions may pass through /tmp to their own folder, whose name they know, and cannot list the others.
        os.mkdir(root + name, 0o711)
    for name in overlays.HIDDEN:
        # Only root enters these, so that no session sees an overlay of another while it is made.
        os.mkdir(root + name, 0o700)
    if images:
        os.mkdir(root + overlays.LAYERS, 0o700)
        kernel.bind_read_only(f"/proc/self/fd/{store}", root + overlays.LAYERS)
        os.close(store)
    if rootless:  # the kernel lets it mount /proc only where it sees one
        kernel.mount("/proc", f"{root}/proc", flags=kernel.BIND | kernel.RECURSIVE)
    # Holds only mount points: each session's folder is a file system of its own, with its own bound.
    kernel.mount("tmpfs", f"{root}/tmp", "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, "size=1m,mode=711")
    kernel.pivot_root(root)


def enter_image(root: str, scratch: str, uid: int, folders: Sequence[str]) -> int:
    """Make an image's mounted files the root of this mount namespace, with a new /proc and /dev; unmount the old one.

    Nothing of the image runs here yet, or ever did. What sessions read of the machine is below CARRIED.

    Args:
        folders: folders of Python's modules, each shown at its number below CARRIED.

    Returns:
        A descriptor of /proc, which is read-only by its path from here on.

    Raises:
        OSError: the image has something else in the place of a folder, or this cannot be mounted here.
    """
    for name in ("proc", "dev"):
        # These two write to the session's own changes: the root is an overlay by now, or a copy.
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{root}/{name}", 0o755)
        # A link of the image here would lead the mount below to a place of this machine.
        if not stat.S_ISDIR(os.lstat(f"{root}/{name}").st_mode):
            raise OSError(f"its /{name} is not a folder")
    # Before it is confined, the session writes its oom_score_adj and its user maps: this /proc stays writable.
    proc = kernel.detached("/proc")
    kernel.mount("/proc", f"{root}/proc", flags=kernel.BIND)
    kernel.mount("none", f"{root}/proc", flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | HIDDEN)
    kernel.mount("tmpfs", f"{root}/dev", "tmpfs", kernel.NO_SETUID, "size=64k,mode=755")
    for name in DEVICES:
        _show(f"/dev/{name}", f"{root}/dev/{name}", device=True)
    # /dev/fd and /dev/stdin to /dev/stderr, which shells of the image use.
    for target, place in commands.LINKS:
        os.symlink(target, root + place)
    # POSIX shared memory counts against the session's scratch quota instead of a tmpfs of its own.
    os.mkdir(f"{scratch}/shm", 0o700)
    os.chown(f"{scratch}/shm", uid, uid)
    os.mkdir(f"{root}/dev/shm")
    kernel.mount(f"{scratch}/shm", f"{root}/dev/shm", flags=kernel.BIND)
    for number, folder in enumerate(folders):
        _show(folder, f"{root}{CARRIED}/{number}")
    kernel.mount("none", f"{root}/dev", flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SETUID)
    kernel.pivot_root(root)
    return proc


def is_system(path: str) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in SYSTEM)


def _show(source: str, target: str, *, device: bool = False) -> None:
    # A bind mount needs something of the same kind to be mounted on: a folder, or an empty file.
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if os.path.isdir(source):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    if device:
        kernel.mount(source, target, flags=kernel.BIND)
    else:
        kernel.bind_read_only(source, target)


def mount_proc(*, show_all: bool = False) -> None:
    """Mount a /proc that hides other users' processes.

    Args:
        show_all: also show what the kernel says of itself, as bubblewrap and language runtimes need.
    """
    try:
        if show_all:
            kernel.mount("proc", "/proc", "proc", HIDDEN, "hidepid=2")
            return
        kernel.mount("proc", "/proc", "proc", HIDDEN, "hidepid=2,subset=pid")
    except OSError:  # before Linux 5.8 a mount of proc cannot be cut down to processes
        kernel.mount("proc", "/proc", "proc", HIDDEN, "hidepid=2")
