"""Folders of a session: scratch, workspace, and the root of its image, made in the session's mounts and cgroups.

A workspace's owner gets a descriptor of the folder of its changes, on a channel of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge_rl.sandbox.inside import frames, kernel, overlays, surroundings
from forge_rl.sandbox.inside.cgroups import GroupFds
from forge_rl.sandbox.inside.confinement import Confinement, Lineage


def mount_scratch(lineage: Lineage, limits: dict[str, Any]) -> None:
    """Mount a session's scratch folder: a tmpfs of its own, bounded in bytes and files."""
    options = f"size={limits['scratch_bytes']},nr_inodes={limits['scratch_files']},mode=700"
    kernel.mount(
        "tmpfs", lineage.folder, "tmpfs", surroundings.HIDDEN, f"{options},uid={lineage.uid},gid={lineage.uid}"
    )


def show_workspace(lineage: Lineage, limits: dict[str, Any], owner: int, base: int) -> None:
    """Make a session's workspace; send its owner the folder with the changes, and why it is a copy if it is one."""
    reason = ""
    place = os.path.join(lineage.folder, overlays.NAME)
    os.mkdir(place, 0o700)
    bounds = {"most_bytes": limits["scratch_bytes"], "most_files": limits["scratch_files"]}
    try:
        changes = overlays.mount(base, lineage.folder, lineage.uid, **bounds)
    except OSError as error:
        # Not here: the session's first process copies it, within its own limits.
        lineage.to_copy, reason = base, str(error)
        changes = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    _tell_owner(owner, f"workspace {reason}".encode(), changes)
    os.close(changes)


@dataclass(frozen=True)
class ImageRoots:
    """Makes the roots of the sessions of a server that run in images."""

    confinement: Confinement
    copied: bool
    """True if the files of images are copied even where they could be mounted."""

    def enter(self, lineage: Lineage, limits: dict[str, Any], group: GroupFds, control: int, owner: int) -> None:
        """Make the root of a session in its own mount namespace, and enter it if the session runs Python."""
        try:
            if not self.confinement.strict:
                mount_scratch(lineage, limits)
            place, reason = os.path.join(lineage.folder, overlays.NAME), ""
            os.mkdir(place, 0o700)
            try:
                if self.copied:
                    raise OSError("this pool copies images")
                changes = overlays.mount_image(lineage.layers, lineage.folder, lineage.uid)
            except OSError as error:
                reason = str(error)
                self._copy(lineage, group, reason)
                changes = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            _tell_owner(owner, f"workspace {reason}".encode(), changes)
            os.close(changes)
            if not self.confinement.process:
                folders = list(self.confinement.carried)
                if reason:
                    kernel.mount(place, place, flags=kernel.BIND)  # only a mount can be a root
                proc = surroundings.enter_image(place, lineage.folder, lineage.uid, folders)
                lineage.proc = f"/proc/self/fd/{proc}"
        except OSError as error:
            # This is not the server: the owner hears the reason on the session's own channel.
            with contextlib.suppress(OSError), socket.socket(fileno=control) as channel:
                channel.sendall(frames.encode({"failed": f"its image cannot be mounted here: {error}"}))
            os._exit(1)

    def _copy(self, lineage: Lineage, group: GroupFds, reason: str) -> None:
        """Copy an image's files to a session's scratch folder, by a process in its cgroups.

        Raises:
            OSError: they do not fit; says why it is a copy.
        """
        reader, writer = os.pipe()
        child = kernel.fork_into(group.unified)
        if child == 0:
            cause = ""
            try:
                signal.set_wakeup_fd(-1)
                for door in group.doors:
                    os.write(door, b"0")
                overlays.copy_image(lineage.layers, lineage.folder, lineage.uid)
            except BaseException as error:
                cause = str(error) or type(error).__name__
            os.write(writer, f"!{cause}".encode("utf-8", "replace")[:1024])
            os._exit(0)
        os.close(writer)
        # "!" and a reason, or "!" alone for success. Nothing at all if the process was killed: the write end closed
        # without a word.
        cause = os.read(reader, 1024).decode("utf-8", "replace") or "?killed, as by its memory limit"
        os.close(reader)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        if cause != "!":
            raise OSError(f"{reason}; and its files cannot be copied within the session's Limits: {cause[1:]}")


def copy_workspace(lineage: Lineage, name: str, message: dict[str, Any], group: GroupFds, fds: Sequence[int]) -> None:
    """Copy a workspace for a fork, in a process in the fork's cgroups, which reports to the owner.

    Args:
        name: name of the fork.
        message: the owner's request.
        fds: descriptors of the owner's channel, of the changes to copy, and of the base, if there is one.
    """
    owner, changes, *base = fds
    limits = message["limits"]
    bounds = {"most_bytes": limits["scratch_bytes"], "most_files": limits["scratch_files"]}
    if kernel.fork_into(group.unified) != 0:
        return
    try:
        signal.set_wakeup_fd(-1)
        for door in (*group.doors, *group.last_doors):
            os.write(door, b"0")
        place = overlays.ForkFolder(lineage.folder, overlays.fork_name(name), lineage.uid)
        space = lineage.open_space()
        if message["is_overlay"]:
            lower = lineage.layers or base[0]
            changes_fd = overlays.mount_fork(lower, changes, place, space, **bounds)
        else:  # the fork itself copies it
            kernel.enter_mounts(space)
            changes_fd = overlays.make_folder(*place)
        _tell_owner(owner, b"workspace", changes_fd)
    except BaseException as error:
        _tell_owner(owner, str(error).encode("utf-8", "replace")[:1024])
    finally:
        os._exit(0)


def _tell_owner(owner: int, text: bytes, *changes: int) -> None:
    with socket.socket(fileno=os.dup(owner)) as channel:
        socket.send_fds(channel, [text], list(changes))
