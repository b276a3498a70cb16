"""Shows a folder of the owner's, or an image's layers, to one session as its own, writable, while they never change.

Runs in the fork server, in a session's init or in its first process, and imports nothing of this library but its
neighbour.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from forge_rl.sandbox.inside import kernel

HIDDEN = ("/base", "/changes", "/links", "/merged")
"""Empty folders of the server's root, only root's, where parts of an overlay are mounted while it is made."""
LAYERS = "/layers"
"""The store of images in the server's root, only root's."""
NAME = "workspace"
"""The folder inside of a session's scratch folder."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Renaming a folder fails as between disks, so that programs copy it: all changes are then plain files in one place.
_OPTIONS = "index=off"
# Owners of the base may have set-user-id programs and devices: both are inert in a session's mount.
_FLAGS = kernel.NO_SETUID | kernel.NO_DEVICES
_CHANGES = ".changes"
"""The folder inside of an image's scratch folder with what its first session changes."""
_MOST_OPTIONS = 3500
"""Bytes of the names of layers in the options of a mount, of which the kernel takes a page."""
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


class Lower(NamedTuple):
    """The lower part of an overlay, which shows wherever nothing has changed."""

    tree: int
    """Descriptor from `kernel.detached` of the folder, or of the store that has the layers."""
    users: int | None
    """Descriptor of the user namespace that maps the folder's owner to the session; None if they are the same user."""
    layers: Sequence[str] = ()
    """Paths of an image's layers below `tree`, the lowest first; empty if the tree itself is shown."""


class ForkFolder(NamedTuple):
    """Place of a fork's workspace, which does not exist yet."""

    scratch: str
    """The scratch folder, in which sessions run and may do anything."""
    name: str
    uid: int


def mount(base: int, scratch: str, uid: int, *, most_bytes: int, most_files: int) -> int:
    """Mount an overlay at the empty NAME in a session's scratch folder; return a descriptor of the folder of changes.

    Args:
        base: descriptor from `kernel.detached`. Files of the owner of this folder appear as the session's.
        most_bytes, most_files: limits on what changes, copies of changed files included.

    Raises:
        OSError: this kernel, or the base's file system, cannot do it.
    """
    place, lower = os.path.join(scratch, NAME), Lower(base, _user_namespace(base, uid))
    return _mounted(lower, place, uid, None, most_bytes=most_bytes, most_files=most_files)


def mount_image(layers: Sequence[str], scratch: str, uid: int) -> int:
    """Mount an image's layers at the empty NAME in a session's scratch folder; return a descriptor of its changes.

    These are in the scratch folder, and share its limits.

    Args:
        layers: paths below LAYERS, the lowest first.

    Raises:
        OSError: a layer is missing, or this kernel, or the file system of the store, cannot do it.
    """
    lower, mounted = image_lower(layers, uid), list[str]()
    changes = os.path.join(scratch, _CHANGES)
    os.mkdir(changes, 0o700)  # the server's own, so that no session reaches the parts of its overlay
    try:
        kernel.attach(lower.tree, "/base", lower.users)
        mounted.append("/base")
        return _overlaid(lower, os.path.join(scratch, NAME), uid, mounted, changes=changes, mode=0o755)
    finally:
        _let_go(lower, mounted)


def image_lower(layers: Sequence[str], uid: int) -> Lower:
    """Open the store of images for one overlay of layers."""
    tree = kernel.detached(LAYERS)
    is_own = os.stat(tree).st_uid == uid  # without root, this user's number is that of all its sessions
    return Lower(tree, None if is_own else _user_namespace(tree, uid), tuple(layers))


def mount_fork(
    base: int | Sequence[str], changes: int, place: ForkFolder, space: int, *, most_bytes: int, most_files: int
) -> int:
    """Mount an overlay with a copy of another's changes; return a descriptor of its own folder of changes.

    Sessions run in the scratch folder meanwhile, and may do anything there. Leaves this process in their namespace.

    Args:
        base: another descriptor from `kernel.detached`; or the layers of an image, as for `mount_image`.
        changes: the descriptor that `mount` returned for the other session.
        space: descriptor of the mount namespace in which the scratch folder is seen.

    Raises:
        OSError: the changes do not fit, or the folder exists.
    """
    # Before this process enters the session's mounts: mapping users needs a /proc that shows its own children.
    lower = Lower(base, _user_namespace(base, place.uid)) if isinstance(base, int) else image_lower(base, place.uid)
    kernel.enter_mounts(space)
    folder = make_folder(*place)
    kernel.unshare(kernel.NEW_MOUNTS)  # others make overlays by the same hidden folders
    changes_fd = _mounted(lower, "/merged", place.uid, changes, most_bytes=most_bytes, most_files=most_files)
    # Mounted out of the session's sight, then attached at an open descriptor: no path in the scratch folder is
    # followed.
    overlay = kernel.detached("/merged")
    kernel.enter_mounts(space)
    kernel.attach_at(overlay, folder)
    return changes_fd


def fork_name(session: str) -> str:
    """Return the name of a fork's workspace in the scratch folder, where the first session's is NAME."""
    return f"{NAME}-{session}"


def make_folder(scratch: str, name: str, uid: int) -> int:
    """Make a session's folder in its scratch folder, and return a descriptor of it.

    Raises:
        OSError: there is something of that name.
    """
    parent = os.open(scratch, _FOLDER)
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
        folder = os.open(name, _FOLDER, dir_fd=parent)
        # By descriptor: the session may have put a link in the folder's place since.
        os.fchown(folder, uid, uid)
        return folder
    finally:
        os.close(parent)


def remove(scratch: str, names: Sequence[str]) -> None:
    """Unmount and delete folders that an ended session has left in a scratch folder which others use."""
    import shutil  # not in what sessions are forked from: its libraries would be a fifth of the mappings to copy

    for name in names:
        with contextlib.suppress(OSError):
            kernel.unmount(os.path.join(scratch, name))
        shutil.rmtree(os.path.join(scratch, name), ignore_errors=True)  # follows no link


def _mounted(lower: Lower, place: str, uid: int, changes: int | None, *, most_bytes: int, most_files: int) -> int:
    base_mode = 0o755 if lower.layers else stat.S_IMODE(os.stat(lower.tree).st_mode)
    mounted = []
    try:
        kernel.attach(lower.tree, "/base", lower.users)
        mounted.append("/base")
        kernel.mount("tmpfs", "/changes", "tmpfs", _FLAGS, f"size={most_bytes},nr_inodes={most_files},mode=700")
        mounted.append("/changes")
        return _overlaid(lower, place, uid, mounted, changes="/changes", mode=base_mode, copied=changes)
    finally:
        _let_go(lower, mounted)


def _overlaid(
    lower: Lower, place: str, uid: int, mounted: list[str], *, changes: str, mode: int, copied: int | None = None
) -> int:
    """Mount an overlay above /base; return a descriptor of its changes, which begin with a copy of those in a folder.

    Args:
        mounted: receives the paths of further mounts.
        changes: an empty folder.
    """
    for name in ("upper", "work"):
        os.mkdir(f"{changes}/{name}", 0o700)
    # The overlay's root has the owner and mode of this folder.
    os.chown(f"{changes}/upper", uid, uid)
    os.chmod(f"{changes}/upper", mode | 0o700)
    upper = os.open(f"{changes}/upper", _FOLDER)
    if copied is not None:
        _copy_changes(copied, upper, uid)
    options = f"upperdir={changes}/upper,workdir={changes}/work,{_OPTIONS}"
    kernel.mount("overlay", place, "overlay", _FLAGS, f"{_lower_option(lower.layers, mounted)},{options}")
    return upper


def _let_go(lower: Lower, mounted: Sequence[str]) -> None:
    """Unmount the parts of an overlay from the hidden folders; the overlay itself keeps them alive."""
    if lower.users is not None:
        os.close(lower.users)
    # `_lower_option` may have left the current folder in one of these.
    os.chdir("/")
    for path in mounted:
        kernel.unmount(path)


def _lower_option(layers: Sequence[str], mounted: list[str]) -> str:
    """Return the part of an overlay's options that names the lower folders; appends the paths it mounts for them."""
    if not layers:
        return "redirect_dir=off,metacopy=off,lowerdir=/base"
    names = list(layers)
    # Relative names, as the options of a mount must fit into one page and an image may have hundreds of layers.
    os.chdir("/base")
    if sum(len(name) + 1 for name in names) > _MOST_OPTIONS:
        kernel.mount("tmpfs", "/links", "tmpfs", _FLAGS, "mode=700")
        mounted.append("/links")
        os.chdir("/links")
        for place, name in enumerate(names):
            # Too long even so: links with short names stand for the layers.
            os.symlink(f"/base/{name}", str(place))
        names = [str(place) for place in range(len(names))]
    # With marks in attributes of users, the kernel neither redirects folders nor copies metadata alone.
    return f"userxattr,lowerdir={':'.join(reversed(names))}"


def _copy_changes(source: int, target: int, uid: int) -> None:
    """Copy an overlay's changes from one open folder to another, with its marks of deleted files.

    The session whose changes these are runs meanwhile: names may come to mean something else at any time.
    """
    for name in os.listdir(source):
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            os.mkdir(name, 0o700, dir_fd=target)
            # By descriptors, and no link is followed: a folder may become a link between the two calls.
            with _opened(name, source) as inner_source, _opened(name, target) as inner_target:
                _copy_changes(inner_source, inner_target, uid)
                os.fchmod(inner_target, status.st_mode & 0o777)
                for mark in _OPAQUE:
                    with contextlib.suppress(OSError):  # no such mark
                        os.setxattr(inner_target, mark, os.getxattr(inner_source, mark))
        elif not _copy_entry(name, status, source, target):
            continue
        _give(name, target, status, uid)


def copy_image(layers: Sequence[str], scratch: str, uid: int) -> None:
    """Copy what an image's layers show together to the empty NAME in a session's scratch folder.

    Raises:
        OSError: a layer is missing, or it does not fit.
    """
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_opened(f"{LAYERS}/{layer}")) for layer in reversed(layers)]
        target = stack.enter_context(_opened(os.path.join(scratch, NAME)))
        _copy_merged(sources, target, uid)
        os.fchown(target, uid, uid)
        os.fchmod(target, 0o755)


def _copy_merged(sources: Sequence[int], target: int, uid: int) -> None:
    """Copy what open folders show when they are stacked, the uppermost first."""
    names = set[str]()
    for place, source in enumerate(sources):
        for name in set(os.listdir(source)) - names:
            # A name counts as seen whatever it is here, a deletion too: it hides the same name in all folders below.
            names.add(name)
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode):
                continue  # the mark of a deletion, the only device that layers have
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                with contextlib.ExitStack() as stack:
                    folders = [stack.enter_context(_opened(name, source))]
                    for below in sources[place + 1 :]:
                        # Layers below a hiding folder, or below a file of this name, contribute nothing to it.
                        if _is_opaque(folders[-1]) or ((mode := _mode(name, below)) and not stat.S_ISDIR(mode)):
                            break
                        if mode:
                            folders.append(stack.enter_context(_opened(name, below)))
                    inner = stack.enter_context(_opened(name, target))
                    _copy_merged(folders, inner, uid)
                    os.fchmod(inner, status.st_mode & 0o777)
            elif not _copy_entry(name, status, source, target):
                continue
            _give(name, target, status, uid)


def _mode(name: str, folder: int) -> int:
    """Return the kind and mode of a folder's entry; 0 if it has none."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _is_opaque(folder: int) -> bool:
    for mark in _OPAQUE:
        with contextlib.suppress(OSError):  # no such mark
            if os.getxattr(folder, mark) == b"y":
                return True
    return False


def _copy_entry(name: str, status: os.stat_result, source: int, target: int) -> bool:
    """Copy a file, link or device; return False for a socket, which is useless without its listener."""
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFLNK:
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif kind == stat.S_IFREG:
        _copy_file(name, source, target, status.st_mode & 0o777)
    elif kind in (stat.S_IFIFO, stat.S_IFCHR):  # the only device that a session can make is the mark of a deletion
        os.mknod(name, kind | 0o600, 0, dir_fd=target)
    else:
        return False
    return True


def _give(name: str, folder: int, status: os.stat_result, uid: int) -> None:
    """Give a copy to a user, with the times of the original."""
    os.chown(name, uid, uid, dir_fd=folder, follow_symlinks=False)
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=folder, follow_symlinks=False)


def _copy_file(name: str, source: int, target: int, mode: int) -> None:
    source_fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)  # it may be a pipe by now
    # Never through an existing name: the target may already be reachable for the session.
    target_fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
    with open(source_fd, "rb") as source_file, open(target_fd, "wb") as target_file:
        _copy_bytes(source_file, target_file)
        os.fchmod(target_fd, mode)


def _copy_bytes(source: BinaryIO, target: BinaryIO) -> None:
    while part := source.read(1 << 20):
        target.write(part)


@contextlib.contextmanager
def _opened(name: str, parent: int | None = None) -> Iterator[int]:
    folder = os.open(name, _FOLDER, dir_fd=parent)
    try:
        yield folder
    finally:
        os.close(folder)


def _user_namespace(base: int, session: int) -> int:
    """Return a descriptor of a user namespace in which files of a folder's user and group are a session's."""
    base_status = os.stat(base)
    # A user namespace exists only with a process in it: this one sleeps until the descriptor below holds the namespace.
    child = kernel.fork_into(None, kernel.NEW_USER)
    if child == 0:
        while True:
            signal.pause()
    try:
        for name, owner_id in (("uid_map", base_status.st_uid), ("gid_map", base_status.st_gid)):
            with open(f"/proc/{child}/{name}", "w") as file:
                file.write(f"{owner_id} {session} 1")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(child, signal.SIGKILL)  # it is reaped with the sessions' processes


def copy(base: int, scratch: str, uid: int) -> None:
    """Copy a folder to the empty NAME in a session's scratch folder, before anything untrusted runs there.

    As in an overlay, files of its owner become the session's; the rest is root's, with its mode.

    Raises:
        OSError: it has more bytes or files than the scratch folder may have, or cannot be read.
    """
    flags, base_uid = os.O_RDONLY | os.O_DIRECTORY, os.stat(base).st_uid
    _copy_folder(os.open(".", flags, dir_fd=base), os.open(os.path.join(scratch, NAME), flags), {base_uid: uid})


def _copy_folder(source: int, target: int, users: Mapping[int, int]) -> None:
    """Copy the content and mode of an open folder to another; closes both.

    Args:
        users: owner of a copy, by its original's owner; root if not listed.
    """
    try:
        for name in os.listdir(source):
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            owner = users.get(status.st_uid, 0)
            if stat.S_ISDIR(status.st_mode):
                os.mkdir(name, 0o700, dir_fd=target)
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                _copy_folder(os.open(name, flags, dir_fd=source), os.open(name, flags, dir_fd=target), users)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
                os.chown(name, owner, owner, dir_fd=target, follow_symlinks=False)
            elif stat.S_ISREG(status.st_mode):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with (
                    open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source), "rb") as source_file,
                    open(os.open(name, flags, 0o600, dir_fd=target), "wb") as target_file,
                ):
                    _copy_bytes(source_file, target_file)
                    os.fchown(target_file.fileno(), owner, owner)
                    os.fchmod(target_file.fileno(), status.st_mode & 0o777)
        status = os.fstat(source)
        owner = users.get(status.st_uid, 0)
        os.fchown(target, owner, owner)
        os.fchmod(target, (status.st_mode & 0o777) | 0o700)
    finally:
        for fd in (source, target):
            with contextlib.suppress(OSError):
                os.close(fd)
