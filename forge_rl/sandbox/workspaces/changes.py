"""Reads what a session has changed in its workspace: outside of the session, from folders with hostile content.

Nothing is executed, no link is followed, only regular files are opened, and reads are bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

LEFT_OUT = (".git", "__pycache__", ".pytest_cache")
"""Names of files and folders whose changes are left out by default."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_DEPTH = 100
_CHUNK = 1 << 20
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_MOUNTED = ("proc", "dev", "etc/hosts")
"""Paths at which an image's commands see the session's files instead of the image's."""


class FolderDescriptor:
    """A descriptor of a folder, closed with the last reference to this object.

    Args:
        fd: the descriptor.
        is_overlay: whether it holds only what differs from the base, as the kernel's overlays keep it.
    """

    def __init__(self, fd: int, *, is_overlay: bool) -> None:
        self.fd = fd
        self.is_overlay = is_overlay
        weakref.finalize(self, os.close, fd)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file, link, folder or special file."""

    mode: int
    """Mode as in git: 0o100644 or 0o100755 for a file, 0o120000 for a link, 0o040000 for a folder. A special file has
    the number of its kind, such as 0o010000 for a FIFO."""
    data: bytes | None = field(default=None, repr=False)
    """Content of a file, or target of a link; None if it has none, or was too large to be read."""


_WHITEOUT = Entry(mode=stat.S_IFCHR)
"""The mark of a deletion in overlays and layers. Sessions cannot make a device in an overlay."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A path that a session has changed. Path and content were chosen by the session: they may be anything."""

    path: str
    """Relative to the workspace; bytes that are not UTF-8 are lone surrogates."""
    before: Entry | None
    """In the base; None if the session added it."""
    after: Entry | None
    """None if the session deleted it."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Changes of a session, a folder before its content. A renamed file is deleted and added."""

    changes: Sequence[Change]
    left_out: Sequence[str] = ()
    """Paths that are missing above, each with the reason."""


def without_mounts(changes: Changes) -> Changes:
    """Return the changes of an image's root without the places where something is mounted for its commands."""
    kept_changes = [
        change
        for change in changes.changes
        if not any(change.path == place or change.path.startswith(f"{place}/") for place in _MOUNTED)
    ]
    return Changes(changes=kept_changes, left_out=changes.left_out)


def read_changes(
    bases: Sequence[str],
    session_folder: FolderDescriptor,
    *,
    leave_out: Collection[str] = LEFT_OUT,
    most_file_bytes: int = 16 << 20,
    most_bytes: int = 64 << 20,
    most_changes: int = 10_000,
) -> Changes:
    """Compare a workspace with its base.

    Args:
        bases: the base folder; or the layers of an image, the lowest first.
        session_folder: the folder with the session's changes, or with its whole workspace.
        leave_out: names of files and folders to leave out, in any folder.
        most_file_bytes: the content of larger files is left out.
        most_bytes: bytes of the changed files' new content, all together, and of their content in the base.
        most_changes: number of paths that are listed.
    """
    reader = _ChangeReader(
        session_folder.is_overlay, frozenset(leave_out), most_file_bytes, most_bytes, most_bytes, most_changes
    )
    with contextlib.ExitStack() as stack:
        roots = [os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for base in reversed(bases)]
        for root in roots:
            stack.callback(os.close, root)
        changes = list(reader.folder("", roots, session_folder.fd, merged=session_folder.is_overlay, depth=0))
    return Changes(changes=changes, left_out=reader.left_out)


@dataclass
class _ChangeReader:
    is_overlay: bool
    leave_out: frozenset[str]
    most_file_bytes: int
    left_bytes: int
    left_base_bytes: int
    left_changes: int
    left_out: list[str] = field(default_factory=list)

    def folder(
        self, path: str, bases: Sequence[int], session_fd: int | None, *, merged: bool, depth: int
    ) -> Iterator[Change]:
        """Compare two open folders, either of which may not exist.

        Args:
            bases: the folder in each layer of the base that has it, the uppermost first; empty if none has.
            merged: True if entries that `session_fd` lacks are unchanged, False if they are deleted.
        """
        # A session can nest folders far deeper than Python may recurse.
        if depth > _MOST_DEPTH:
            self.left_out.append(f"{path}: below {_MOST_DEPTH} folders")
            return
        names = set() if session_fd is None else set(os.listdir(session_fd))
        if not merged:
            names |= {name for base in bases for name in os.listdir(base)}
        for name in sorted(names - self.leave_out):
            before, after = self._base_entry(name, bases), self._entry(name, session_fd)
            if self.is_overlay and after == _WHITEOUT:
                after = None
            unread = [entry for entry in (before, after) if entry and stat.S_ISREG(entry.mode) and entry.data is None]
            # Two entries without content look equal: the files themselves are compared.
            if len(unread) == 2 and before == after and not self.is_overlay and _is_same(name, bases, session_fd):
                continue  # a copy, in which large files are those of the base
            # An overlay has a copy of each file that was opened for writing, even if nothing was written.
            if before != after or unread:
                if self.left_changes == 0:
                    self.left_out.append(f"{path}{name} and what follows: more changes than are listed")
                    return
                self.left_changes -= 1
                if unread:
                    self.left_out.append(f"content of {path}{name}: too large, or not readable")
                yield Change(
                    path=path + name, before=self._bounded_base(before), after=self._within_bounds(path + name, after)
                )
            below_bases = bases if _is_folder(before) else ()
            yield from self._below(
                path, name, below_bases, session_fd if _is_folder(after) else None, merged=merged, depth=depth
            )

    def _below(
        self, path: str, name: str, bases: Sequence[int], session_fd: int | None, *, merged: bool, depth: int
    ) -> Iterator[Change]:
        if not bases and session_fd is None:
            return
        with contextlib.ExitStack() as stack:
            base_folders = _base_folders(name, bases, stack)
            folder = None if session_fd is None else _open_folder(name, session_fd)
            if folder is not None:
                stack.callback(os.close, folder)
            elif session_fd is not None:
                self.left_out.append(f"{path}{name}: a folder that cannot be read")
                return
            # What is in a folder that hides the base's is no longer compared with it, and has no mark of its own.
            merged = merged and folder is not None and not _is_opaque(folder)
            yield from self.folder(f"{path}{name}/", base_folders, folder, merged=merged, depth=depth + 1)

    def _base_entry(self, name: str, bases: Sequence[int]) -> Entry | None:
        """Read the entry of this name in the uppermost layer that has one."""
        for base in bases:
            if (entry := self._entry(name, base)) is not None:
                return None if entry == _WHITEOUT else entry
        return None

    def _entry(self, name: str, folder: int | None) -> Entry | None:
        """Read a file or link, or the kind of anything else; None if nothing has this name."""
        if folder is None:
            return None
        kind = 0
        try:
            kind = stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
            if stat.S_ISLNK(kind):
                return Entry(mode=kind, data=os.fsencode(os.readlink(name, dir_fd=folder)))
            if not stat.S_ISREG(kind):
                return Entry(mode=kind)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(name, flags, dir_fd=folder), "rb", buffering=0) as file:
                # Looked at again once it is open: the session may have put a pipe or device in its place.
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    return None
                # A file may grow while it is read: no more than the limit and one byte, whatever its size was.
                data = b"" if status.st_size > self.most_file_bytes else _read(file.fileno(), self.most_file_bytes + 1)
                too_large = status.st_size > self.most_file_bytes or len(data) > self.most_file_bytes
                mode = 0o100755 if status.st_mode & stat.S_IXUSR else 0o100644
                return Entry(mode=mode, data=None if too_large else data)
        except OSError as error:  # it changes while we look, or its mode keeps even its owner out
            return Entry(mode=0o100644) if kind and isinstance(error, PermissionError) else None

    def _within_bounds(self, path: str, entry: Entry | None) -> Entry | None:
        if entry is None or entry.data is None:
            return entry
        if len(entry.data) > self.left_bytes:
            self.left_out.append(f"content of {path}: more bytes than are read of all files")
            return Entry(mode=entry.mode)
        self.left_bytes -= len(entry.data)
        return entry

    def _bounded_base(self, entry: Entry | None) -> Entry | None:
        # Not listed as left out: only a diff needs it, and would be cut long before.
        if entry is None or entry.data is None:
            return entry
        if len(entry.data) > self.left_base_bytes:
            return Entry(mode=entry.mode)
        self.left_base_bytes -= len(entry.data)
        return entry


def _is_same(name: str, bases: Sequence[int], session_fd: int | None) -> bool:
    """Compare the content of two files that are too large to be kept."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        # The uppermost layer with this name, as `_base_entry` found it.
        base = next(base for base in bases if name in os.listdir(base))
        files = [
            stack.enter_context(open(os.open(name, flags, dir_fd=folder), "rb", buffering=0))
            for folder in (base, session_fd)
        ]
        sizes = [os.fstat(file.fileno()).st_size for file in files]
        # No more than the size at first: the session may write meanwhile.
        return sizes[0] == sizes[1] and all(
            _read(files[0].fileno(), _CHUNK) == _read(files[1].fileno(), _CHUNK) for _ in range(0, sizes[0], _CHUNK)
        )
    return False


def _is_folder(entry: Entry | None) -> bool:
    return entry is not None and stat.S_ISDIR(entry.mode)


def _open_folder(name: str, parent: int) -> int | None:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError:  # it is no longer one
        return None


def _base_folders(name: str, bases: Sequence[int], stack: contextlib.ExitStack) -> list[int]:
    """Open what the layers of a base have of a folder, down to the first that hides those below it."""
    folders = list[int]()
    for base in bases:
        try:
            status = os.stat(name, dir_fd=base, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(status.st_mode) or (folder := _open_folder(name, base)) is None:
            break
        stack.callback(os.close, folder)
        folders.append(folder)
        if _is_opaque(folder):
            break
    return folders


def _is_opaque(folder: int) -> bool:
    """Return True if this folder hides the folders of its name below. Only the kernel can write these marks."""
    for mark in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, mark) == b"y":
                return True
    return False


def _read(fd: int, max_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < max_bytes and (part := os.read(fd, max_bytes - len(parts))):
        parts += part
    return bytes(parts)


APPLY = """def _apply():
    import json, os, stat
    with open({path!r}, "rb") as file:
        size = int(file.readline())
        listed = json.loads(file.read(size))
        os.unlink({path!r})
        for path, remove, mode, length in reversed(listed):
            if remove:
                (os.rmdir if stat.S_ISDIR(remove) else os.unlink)(path)
        for path, remove, mode, length in listed:
            if stat.S_ISDIR(mode):
                os.makedirs(path, exist_ok=True)
            elif mode:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                data = file.read(length)
                if stat.S_ISLNK(mode):
                    os.symlink(data, path)
                else:
                    with open(path, "wb") as written:
                        written.write(data)
                    os.chmod(path, mode & 0o777)
_apply(); del _apply
"""
"""A cell that applies the output of `packed`, from the file {path}."""


def packed(changes: Sequence[Change]) -> bytes:
    """Return changes as one file for the cell APPLY. Special files, and files without content, are left out."""
    entries, contents = list[tuple[str, int, int, int]](), list[bytes]()
    for change in changes:
        before, after = change.before, change.after
        if after is not None and not stat.S_ISDIR(after.mode) and after.data is None:
            continue
        kinds = [0 if entry is None else stat.S_IFMT(entry.mode) for entry in (before, after)]
        data = b"" if after is None or after.data is None else after.data
        # A link is replaced as well: writing to it would write to its target.
        is_replaced = kinds[0] and (kinds[0] != kinds[1] or stat.S_ISLNK(kinds[0]))
        entries.append((change.path, kinds[0] if is_replaced else 0, 0 if after is None else after.mode, len(data)))
        contents.append(data)
    head = json.dumps(entries).encode()
    return b"%d\n" % len(head) + head + b"".join(contents)
