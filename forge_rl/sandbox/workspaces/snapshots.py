"""Packs the changes of an image's session as a layer of an image, kept by its digest and fetched like any other."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Sequence

from forge_rl.sandbox.limits import SandboxError
from forge_rl.sandbox.workspaces.changes import Change, Changes

_DELETED = ".wh."
"""Prefix for names of deleted files in layers: OCI's image specification, "Whiteouts"."""


def layer_of(changes: Changes) -> bytes:
    """Return changes as an uncompressed layer of an OCI image, which goes above the session's image.

        layer = layer_of(await session.changes(leave_out=()))

    The same changes give the same bytes, and so the same digest.

    Raises:
        SandboxError: a file's content is missing, see `changes.left_out`, it has a socket or pipe, or a name that means
            a deletion in layers.
    """
    if changes.left_out:
        raise SandboxError(
            f"the changes are not whole: {changes.left_out[0]:.300}",
            hint="raise Limits:transfer_bytes or scratch_bytes",
        )
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for change in _without_inner_deletions(changes.changes):
            _add(archive, change)
    return file.getvalue()


def _without_inner_deletions(changes: Sequence[Change]) -> list[Change]:
    """Return the changes without deletions below folders that are deleted themselves."""
    remaining, deleted = list[Change](), ""
    for change in changes:
        if change.after is None and deleted and change.path.startswith(deleted):
            continue
        is_folder = change.before is not None and stat.S_ISDIR(change.before.mode)
        if is_folder and (change.after is None or not stat.S_ISDIR(change.after.mode)):
            deleted = f"{change.path}/"
        remaining.append(change)
    return remaining


def _add(archive: tarfile.TarFile, change: Change) -> None:
    folder, slash, name = change.path.rpartition("/")
    if change.after is None:
        archive.addfile(tarfile.TarInfo(f"{folder}{slash}{_DELETED}{name}"))
        return
    # Unpacked, it would delete a file of the image instead.
    if name.startswith(_DELETED):
        raise SandboxError(
            f"no layer can have a file named {change.path!r:.200}", hint="delete or rename it before the snapshot"
        )
    # Times and owners stay 0, so that equal changes have equal bytes.
    member, kind = tarfile.TarInfo(change.path), stat.S_IFMT(change.after.mode)
    if kind == stat.S_IFDIR:
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(member)
    elif change.after.data is None or kind not in (stat.S_IFREG, stat.S_IFLNK):
        raise SandboxError(
            f"{change.path!r:.200} is neither file, link nor folder", hint="delete it before the snapshot"
        )
    elif kind == stat.S_IFLNK:
        member.type, member.linkname = tarfile.SYMTYPE, change.after.data.decode("utf-8", "surrogateescape")
        archive.addfile(member)
    else:
        member.mode, member.size = change.after.mode & 0o777, len(change.after.data)
        archive.addfile(member, io.BytesIO(change.after.data))
