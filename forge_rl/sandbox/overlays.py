"""Shows a folder of the owner's to one session as its own, writable, while the folder itself never changes.

Runs in the fork server, or in a session's init, and imports nothing of this library but its neighbour.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat

from forge_rl.sandbox import kernel

HIDDEN = ("/base", "/changes")
"""Empty folders of the server's root, only root's, where parts of an overlay are mounted while it is made."""
NAME = "workspace"
"""The folder inside of a session's scratch folder."""
# A renamed folder is copied by programs, as between disks: all changes are then plain files in one place.
_OPTIONS = "lowerdir=/base,upperdir=/changes/upper,workdir=/changes/work,redirect_dir=off,metacopy=off,index=off"


def mount(base: int, scratch: str, uid: int, *, most_bytes: int, most_files: int) -> int:
    """Mount an overlay at the empty NAME in a session's scratch folder; return a descriptor of the folder of changes.

    Args:
        base: descriptor from `kernel.detached`. Files of the owner of this folder appear as the session's.
        most_bytes, most_files: limits on what changes, copies of changed files included.

    Raises:
        OSError: this kernel, or the base's file system, cannot do it.
    """
    hidden = kernel.NO_SETUID | kernel.NO_DEVICES
    place = os.path.join(scratch, NAME)
    about = os.stat(base)
    users = _user_namespace(about.st_uid, about.st_gid, uid)
    mounted = []
    try:
        kernel.attach(base, "/base", users)
        mounted.append("/base")
        kernel.mount("tmpfs", "/changes", "tmpfs", hidden, f"size={most_bytes},nr_inodes={most_files},mode=700")
        mounted.append("/changes")
        for name in ("upper", "work"):
            os.mkdir(f"/changes/{name}", 0o700)
        os.chown("/changes/upper", uid, uid)
        os.chmod("/changes/upper", stat.S_IMODE(about.st_mode) | 0o700)
        kernel.mount("overlay", place, "overlay", hidden, _OPTIONS)
        return os.open("/changes/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:  # the overlay keeps its own hold of both
        os.close(users)
        for path in mounted:
            kernel.unmount(path)


def _user_namespace(uid: int, gid: int, session: int) -> int:
    """Return a descriptor of a user namespace in which files of one user and group are a session's."""
    child = kernel.fork_into(None, kernel.NEW_USER)
    if child == 0:
        while True:
            signal.pause()
    try:
        for name, own in (("uid_map", uid), ("gid_map", gid)):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"{own} {session} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(child, signal.SIGKILL)  # it is reaped with the sessions' processes


def copy(base: int, scratch: str, uid: int) -> None:
    """Copy a folder to the empty NAME in a session's scratch folder, before anything untrusted runs there.

    Raises:
        OSError: it has more bytes or files than the scratch folder may have, or cannot be read.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY
    _copy_folder(os.open(".", flags, dir_fd=base), os.open(os.path.join(scratch, NAME), flags), uid)


def _copy_folder(source: int, target: int, uid: int) -> None:
    """Copy the content and mode of an open folder to another; closes both."""
    try:
        for name in os.listdir(source):
            about = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(about.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                _copy_folder(os.open(name, flags, dir_fd=source), os.open(name, flags, dir_fd=target), uid)
            elif stat.S_ISLNK(about.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                os.chown(name, uid, uid, dir_fd=target, follow_symlinks=False)
            elif stat.S_ISREG(about.st_mode):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with (
                    open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source), "rb") as reading,
                    open(os.open(name, flags, 0o600, dir_fd=target), "wb") as writing,
                ):
                    shutil.copyfileobj(reading, writing)
                    os.fchown(writing.fileno(), uid, uid)
                    os.fchmod(writing.fileno(), about.st_mode & 0o777)
        os.fchown(target, uid, uid)
        os.fchmod(target, (os.fstat(source).st_mode & 0o777) | 0o700)
    finally:
        for fd in (source, target):
            with contextlib.suppress(OSError):
                os.close(fd)
