"""Unpacks one layer, as a process of its own that Landlock confines to the layer's folder.

Every path is resolved part by part below the folder's descriptor, and no link is followed. Imports nothing of this
library but its neighbours and `inside.kernel`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import site
import socket
import stat
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from forge_rl.sandbox.images import tar_entries
from forge_rl.sandbox.images.layer_headers import LayerHeaders
from forge_rl.sandbox.images.layer_stream import ZSTD, CompressionError, layer_chunks
from forge_rl.sandbox.images.tar_entries import ByteStream, TarEntry, TarError, read_entries
from forge_rl.sandbox.inside import kernel

FILES, OWNERS = "files", "owners.json"
"""Names in a layer's folder: the folder for overlays, and what its files are in the image but not here."""
OPAQUE = "user.overlay.opaque"
_WHITEOUT, _RESERVED, _OPAQUE_MARK = ".wh.", ".wh..wh.", ".wh..wh..opq"
_MAX_NAME, _MAX_PATH, _MAX_TARGET = 255, 4095, 4095
# Twice LayerLimits.depth: opening the folders above a hard link's target never closes the link's own folder.
_MAX_DESCRIPTORS = 200
_MAX_OMITTED = 100
_MAX_MARK = 1 << 16
# Bytes of address space: an end to what a hostile stream can make this process allocate.
_MAX_MEMORY = 8 << 30
_PAGE = 4096
_MAX_CHUNK = 1 << 20
_MAX_ORDERS, _MAX_FDS = 1 << 16, 2
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class LayerLimits:
    """Largest layer that is unpacked; a larger one is refused."""

    bytes: int = 64 << 30
    """Unpacked, with headers."""
    entries: int = 2_000_000
    depth: int = 100
    """Folders above an entry."""
    name_bytes: int = 256 << 20
    """All paths together."""
    ratio: int = 200
    """Unpacked bytes by compressed ones, past the first `free_bytes`. Layers of programs have 2 to 10."""
    free_bytes: int = 1 << 30

    def max_bytes(self, size: int) -> int:
        """Return the most unpacked bytes of a layer of `size` compressed ones."""
        return min(self.bytes, max(self.free_bytes, size * self.ratio))


@dataclass(frozen=True, kw_only=True)
class UnpackedLayer:
    """Facts about an unpacked layer."""

    diff_id: str
    """Digest of the uncompressed bytes."""
    disk_bytes: int
    """Space that the files and their records take."""
    entries: int
    omitted: list[str]
    """Devices, which sessions could not open: "PATH: device MAJOR:MINOR", the first 100."""


@dataclass
class _EntryCounts:
    entries: int = 0
    name_bytes: int = 0
    disk_bytes: int = 0
    omitted: list[str] = field(default_factory=list)


class LayerFolder:
    """Writes entries below an open folder, and nowhere else.

    Args:
        root: descriptor of an empty folder that nobody else writes to.
        headers: records where the content of files belongs in the archive.
    """

    def __init__(self, root: int, limits: LayerLimits, headers: LayerHeaders) -> None:
        self.limits = limits
        self._headers = headers
        self.counts = _EntryCounts()
        self.owners: dict[str, list[int]] = {}
        """User, group and mode of files by path, where those in the image differ from those here."""
        self._root = root
        self._folders: OrderedDict[str, int] = OrderedDict()
        self._folder_status: dict[str, tuple[int, int]] = {}
        self._deleted: dict[str, None] = {}

    def add(self, entry: TarEntry, stream: ByteStream) -> None:
        """Write an entry.

        Raises:
            TarError: it would be outside, or no image needs it.
            OSError: it cannot be written.
        """
        path = self._checked_path(entry)
        parent, _, name = path.rpartition("/")
        if name.startswith(_RESERVED):
            if entry.size > _MAX_MARK:
                raise TarError(f"the mark {path!r} has {entry.size} bytes")
            if name == _OPAQUE_MARK:
                # With `userxattr`, overlays read this mark, which needs no privilege to write.
                os.setxattr(self._folder(parent), OPAQUE, b"y")
            stream.read(entry.size)
        elif name.startswith(_WHITEOUT):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", "..") or entry.size:
                raise TarError(f"{path!r} deletes nothing that can exist")
            self._folder(parent)
            # Kept until the end: a layer deletes only from layers below it, wherever the mark stands among its own
            # entries.
            self._deleted[f"{parent}/{hidden}" if parent else hidden] = None
        elif entry.kind == tar_entries.FOLDER:
            self._add_folder(path)
            # Without set-user-id and set-group-id.
            self._folder_status[path] = (entry.mode & 0o1777, entry.mtime_ns)
            self._note_owner(path, entry)
        elif entry.kind in (tar_entries.CHARACTER_DEVICE, tar_entries.BLOCK_DEVICE):
            if len(self.counts.omitted) < _MAX_OMITTED:
                self.counts.omitted.append(f"{path}: device {entry.device[0]}:{entry.device[1]}")
        elif not name:
            raise TarError(f"the layer's top is not a folder but of kind {entry.kind}")
        else:
            self._add_other(path, entry, stream)

    def finish(self) -> None:
        """Mark what the layer deletes; give folders their modes and times, which writing into them changes."""
        for path in self._deleted:
            parent, _, name = path.rpartition("/")
            try:
                status = os.stat(name, dir_fd=self._folder(parent), follow_symlinks=False)
            except FileNotFoundError:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=self._folder(parent))  # which needs no privilege
            else:  # a layer deletes of those below it only
                if stat.S_ISDIR(status.st_mode):
                    os.setxattr(self._folder(path), OPAQUE, b"y")
        for path in sorted(self._folder_status, reverse=True):  # those inside a folder before it
            mode, mtime_ns = self._folder_status[path]
            folder = self._folder(path)
            os.utime(folder, ns=(mtime_ns, mtime_ns))
            os.fchmod(folder, mode)

    def _add_other(self, path: str, entry: TarEntry, stream: ByteStream) -> None:
        parent, _, name = path.rpartition("/")
        folder = self._folder(parent)
        try:
            self._write(name, folder, path, entry, stream)
        except FileExistsError:
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise TarError(f"{path!r} replaces a folder of the same layer") from None
            os.unlink(name, dir_fd=folder)
            self.owners.pop(path, None)
            self._headers.forget()
            self._write(name, folder, path, entry, stream)
        self._note_owner(path, entry)

    def _write(self, name: str, folder: int, path: str, entry: TarEntry, stream: ByteStream) -> None:
        if entry.kind == tar_entries.FILE:
            # Before anything is written: the bytes that are still allowed, and the chunk that has been counted already.
            if entry.size > stream.left_bytes + _MAX_CHUNK:
                raise TarError(f"{path!r} has {entry.size} bytes, more than a layer may have")
            fd = os.open(name, _NEW_FILE, entry.mode & 0o777, dir_fd=folder)
            try:
                for part in stream.parts(entry.size):
                    while part:
                        part = part[os.write(fd, part) :]
                os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
            finally:
                os.close(fd)
            self._headers.add_content(path, entry.size)
            # Rounded up to whole blocks, as disks keep files.
            self.counts.disk_bytes += -(-entry.size // _PAGE) * _PAGE
            return
        if entry.kind == tar_entries.HARD_LINK:
            self._link(name, folder, path, entry)
            return
        if entry.kind == tar_entries.LINK:
            if not entry.target or len(entry.target) > _MAX_TARGET:
                raise TarError(f"the link {path!r} has a target of {len(entry.target)} bytes")
            os.symlink(entry.target, name, dir_fd=folder)
            self.counts.disk_bytes += _PAGE * (len(entry.target) > 59)  # a shorter one is in its inode
        else:
            os.mkfifo(name, entry.mode & 0o777, dir_fd=folder)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=folder, follow_symlinks=False)

    def _link(self, name: str, folder: int, path: str, entry: TarEntry) -> None:
        target = self._parts(entry.target, f"the target of the hard link {path!r}")
        if target == path:
            raise TarError(f"{path!r} is a hard link to itself")
        parent, _, target_name = target.rpartition("/")
        try:
            # A target that does not exist must be an error, and not make folders on the way.
            target_folder = self._folder(parent, make=False)
            if stat.S_ISDIR(os.stat(target_name, dir_fd=target_folder, follow_symlinks=False).st_mode):
                raise TarError(f"{path!r} is a hard link to the folder {target!r}")
            # follow_symlinks=False: a hard link to a symbolic link is to the link itself, not to a file of this
            # machine.
            os.link(target_name, name, src_dir_fd=target_folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            raise TarError(f"{path!r} is a hard link to {target!r}, which is not in the layer") from None

    def _note_owner(self, path: str, entry: TarEntry) -> None:
        if entry.uid or entry.gid or entry.mode & 0o6000:
            self.owners[path] = [entry.uid, entry.gid, entry.mode]

    def _add_folder(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        # Open, so it exists already, or is the layer's top.
        if not name or path in self._folders:
            return
        folder = self._folder(parent)
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
            self.counts.disk_bytes += _PAGE
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
                self.owners.pop(path, None)
                self._headers.forget()
                os.mkdir(name, 0o700, dir_fd=folder)

    def _folder(self, path: str, *, make: bool = True) -> int:
        """Return a descriptor of a folder of the layer, which is made if it does not exist."""
        if not path:
            return self._root
        if (fd := self._folders.get(path)) is not None:
            self._folders.move_to_end(path)
            return fd
        parent, _, name = path.rpartition("/")
        parent_fd = self._folder(parent, make=make)
        try:
            fd = os.open(name, _FOLDER, dir_fd=parent_fd)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(name, 0o700, dir_fd=parent_fd)
            self.counts.disk_bytes += _PAGE
            self._folder_status.setdefault(path, (0o755, 0))
            fd = os.open(name, _FOLDER, dir_fd=parent_fd)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                # The classic escape: a link to /etc, then an entry below it.
                raise TarError(f"{path!r} is a link or file, and entries are inside of it") from None
            raise
        self._folders[path] = fd
        if len(self._folders) > _MAX_DESCRIPTORS:
            # The least recently used: each use moves a folder to the end.
            os.close(self._folders.popitem(last=False)[1])
        return fd

    def _checked_path(self, entry: TarEntry) -> str:
        counts, limits = self.counts, self.limits
        counts.entries += 1
        counts.name_bytes += len(entry.name)
        if counts.entries > limits.entries:
            raise TarError(f"it has more than {limits.entries} entries")
        if counts.name_bytes > limits.name_bytes:
            raise TarError(f"its names have more than {limits.name_bytes} bytes")
        return self._parts(entry.name, "an entry")

    def _parts(self, name: bytes, title: str) -> str:
        """Return a path below the layer's top, without a slash at its start: "" for the top itself."""
        if len(name) > _MAX_PATH:
            raise TarError(f"{title} has a name of {len(name)} bytes: {name!r:.80}")
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise TarError(f"{title} has a name that is not UTF-8: {name!r:.200}") from None
        if text.startswith("/"):
            raise TarError(f"{title} has an absolute name: {text!r:.200}")
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise TarError(f"{title} leads out of the layer: {text!r:.200}")
        if any(len(part.encode()) > _MAX_NAME for part in parts):
            raise TarError(f"{title} has a name of more than {_MAX_NAME} bytes: {text!r:.80}")
        if len(parts) > self.limits.depth:
            raise TarError(f"{title} is below {len(parts)} folders: {text!r:.80}")
        return "/".join(parts)


def unpack(fd: int, start: int, size: int, folder: str, limits: LayerLimits) -> UnpackedLayer:
    """Unpack the layer at a place of an open file into the empty FILES of a folder, and write OWNERS next to it.

    Raises:
        TarError, CompressionError: it is damaged, or refused.
        OSError: it cannot be written.
    """
    digest = hashlib.sha256()
    with LayerHeaders(folder) as headers, contextlib.closing(layer_chunks(fd, start, size)) as chunks:
        stream = ByteStream(_hashed(chunks, digest), headers.add, max_bytes=limits.max_bytes(size))
        layer = LayerFolder(os.open(os.path.join(folder, FILES), _FOLDER), limits, headers)
        for entry in read_entries(stream):
            layer.add(entry, stream)
        # The digest is of all bytes, also of those after the archive's end.
        stream.drain()
        layer.finish()
    with open(os.path.join(folder, OWNERS), "w") as file:
        json.dump(layer.owners, file)
        os.fchmod(file.fileno(), 0o600)
        beside_bytes = headers.disk_bytes + file.tell()
    counts = layer.counts
    return UnpackedLayer(
        diff_id=f"sha256:{digest.hexdigest()}",
        disk_bytes=counts.disk_bytes + -(-beside_bytes // _PAGE) * _PAGE,
        entries=counts.entries,
        omitted=counts.omitted,
    )


def _hashed(chunks: Iterator[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def main() -> None:
    """Unpack a layer as requested on standard input, a socket; print a JSON object: an UnpackedLayer, or an error.

    The request is a JSON object, with descriptors of the file that has the layer and of others to keep open.
    """
    with socket.socket(fileno=0) as orders:
        message, fds, *_ = socket.recv_fds(orders, _MAX_ORDERS, _MAX_FDS)
    if not message:  # there was nothing to unpack
        return
    arguments = json.loads(message)
    fd, folder = fds[0], arguments["folder"]
    if os.pread(fd, len(ZSTD), arguments["start"]) == ZSTD:
        site.main()  # installed packages, without which Python starts in a third of the time
        import pyarrow  # noqa: F401  before its files are out of reach
    # Modes are the archive's own.
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
    # From here on the process can reach the layer's folder, the open descriptors and nothing else.
    if version := kernel.landlock_version():
        kernel.forbid_privileges()
        kernel.restrict_files([(os.open(folder, os.O_PATH | os.O_DIRECTORY), -1)], version)
    try:
        result = asdict(unpack(fd, arguments["start"], arguments["size"], folder, LayerLimits(**arguments["limits"])))
    except (TarError, CompressionError, MemoryError) as error:
        result = {"refused": str(error) or "it needs too much memory"}
    except OSError as error:
        result = {"failed": f"{error.strerror or error}", "full": error.errno in (errno.ENOSPC, errno.EDQUOT)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # the interpreter's end would wait for the thread that decompresses, and load libraries for it


if __name__ == "__main__":
    main()
