"""Turns a process that the fork server has forked into a session, before anything untrusted runs in it.

It enters its cgroups, becomes its user, and gives up all that a session may not do: files by Landlock, system calls by
seccomp, privileges, the server's descriptors.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # enums of signal's own functions cost each session 0.2 MiB
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from forge_rl.sandbox.inside import cells, cgroups, commands, frames, kernel, overlays, seccomp, surroundings

_FILES = 256
"""Open files of a process of a session."""
MOST_FILES = 1 << 20


@dataclass(kw_only=True, eq=False)
class Lineage:
    """State that a session shares with its forks."""

    folder: str
    """The scratch folder."""
    uid: int
    init: int = 0
    """PID 1 of their own namespaces in the profile `strict`; 0 in others."""
    members: dict[str, list[str]] = field(default_factory=dict)
    """By session: the names of its folders in the scratch folder, its own and its workspace if it has one."""
    has_workspace: bool = False
    layers: list[str] = field(default_factory=list)
    """Paths of its image's layers in the server's store, the lowest first; empty without an image."""
    space: int = -1
    """Descriptor of its mount namespace, if it has an image."""
    proc: str = "/proc"
    """Path of a /proc that its first process can write to until it is confined."""
    to_copy: int = -1
    """Descriptor of the workspace's base if its first process has to copy it."""

    def open_space(self) -> int:
        """Open the mount namespace in which its folders are seen."""
        if self.space >= 0:
            return os.dup(self.space)
        return os.open(f"/proc/{self.init or 'self'}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


class Confinement:
    """Confines the sessions of a server.

    Args:
        config: the server's settings.
        has_cgroups: whether cgroups bound the resources of a session.
    """

    def __init__(self, config: dict[str, Any], *, has_cgroups: bool) -> None:
        missing = config["missing"]
        self.filter = b"" if "seccomp" in missing else seccomp.session_filter()
        # Programs of images, and of sessions with named addresses, have a network of their own with a loopback only.
        self.network_filter = b"" if "seccomp" in missing else seccomp.session_filter(has_network=True)
        self.landlock = 0 if "landlock" in missing or config["profile"] == "process" else kernel.landlock_version()
        self.strict = config["profile"] == "strict"
        self.process = config["profile"] == "process"
        self.rootless = config["rootless"]
        self.has_cgroups = has_cgroups
        # Python's own modules, and not the machine's programs beside them.
        # In an image, modules of this machine are found at numbered folders, as their own paths are the image's there.
        self.carried = {
            path: f"{surroundings.CARRIED}/{number}"
            for number, path in enumerate([os.path.dirname(os.__file__), *config["packages"]])
        }
        self.packages = [path for path in [sys.base_prefix, *config["packages"]] if not surroundings.is_system(path)]
        # Opened once, in the server: Landlock takes descriptors, and each session adds the same ones.
        self.rules = [
            (os.open(path, os.O_PATH | os.O_CLOEXEC), rights)
            for path, rights in _readable([sys.base_prefix, *config["packages"]])
        ]

    def show_proc(self) -> None:
        """Let sessions read the /proc of the namespace that this process is in."""
        self.rules.append((os.open("/proc", os.O_PATH | os.O_CLOEXEC), kernel.READ_FILE | kernel.READ_FOLDER))

    def become_session(
        self,
        lineage: Lineage,
        limits: dict[str, Any],
        control: int,
        doors: list[int],
        last: list[int],
        meters: Sequence[cgroups.Meter] = (),
    ) -> NoReturn:
        """Become a session, in the process that was forked for it, and serve its owner until the channel closes.

        Args:
            control: descriptor of the channel to the owner.
            doors: descriptors by which this process enters its cgroups.
            last: descriptors of the cgroups that it enters when all else is done: on a busy machine, a new cpu group
                may wait long for its first turns.
            meters: meters of its cgroups, for commands.
        """
        # This function is not split, as the order of its steps is what confines: each is allowed by those before it.

        # Programs that cells start must not get the channel: what they wrote to it would be read as the session's
        # answers.
        os.set_inheritable(control, False)
        channel, uid, folder = socket.socket(fileno=control), lineage.uid, lineage.folder
        try:
            # Cgroups first, so that all memory and processes from here on count as the session's.
            for door in doors:
                os.write(door, b"0")
            # The server's pipe, to which this process's signals would write.
            signal.set_wakeup_fd(-1)
            _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
            # A machine out of memory kills sessions first. Raising the score needs no privilege, lowering it does.
            score = os.open(f"{lineage.proc}/self/oom_score_adj", os.O_WRONLY)
            os.write(score, b"500" if self.process else b"1000")  # commands get 1000, and end before this process
            os.close(score)
            _limit_resources(limits, memory_too=not self.has_cgroups)
            os.umask(0o077)
            if lineage.to_copy >= 0:
                # Before the change of user: only root can give the copies away. Cgroups and quota bound it already.
                overlays.copy(lineage.to_copy, folder, uid)
            self.become_user(uid)
            runs_in_image = bool(lineage.layers) and not self.process
            workspace = "" if runs_in_image or not lineage.has_workspace else os.path.join(folder, overlays.NAME)
            if runs_in_image:
                folder = "/"
                cells.enter_image(self.carried)
            else:
                home = os.path.join(folder, "0")
                os.mkdir(home, 0o700)
                cells.enter_folder(home)
            if workspace and not self.process:
                cells.enter_workspace(workspace)
            # Without root, all sessions are one user to the kernel: only their namespaces keep them apart.
            if self.strict or self.rootless:
                self._enter_own_users(uid, lineage.proc)
            processes = limits["processes"] + self.process * commands.OWN_PROCESSES
            # Set only here, as a new user namespace counts its own processes.
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
            # Without capabilities, the kernel allows Landlock and seccomp only after this.
            kernel.forbid_privileges()
            if self.landlock:
                # In an image, the folder is the root: all that can be seen below it may be read.
                rules = [*([] if runs_in_image else self.rules), (os.open(folder, os.O_PATH | os.O_CLOEXEC), -1)]
                kernel.restrict_files(rules, self.landlock)
            # The fork has copied the server's random state: all sessions would draw the same numbers.
            cells.fresh_random()
            if self.filter and not self.process:
                # Last of the layers, as it forbids the calls that set the others. Commands get theirs from bubblewrap,
                # which needs mounts and namespaces first.
                kernel.filter_calls(self.filter)
            for door in last:
                os.write(door, b"0")
            # Nothing of the server's stays open: not its channel, its cgroups or its pipe. This closes the ranges
            # between the kept descriptors, from 3 on: 0 to 2 are /dev/null.
            kept_fds = sorted([control, *(meter.fd for meter in meters)])
            for low, high in zip([2, *kept_fds], [*kept_fds, MOST_FILES], strict=True):
                os.closerange(low + 1, high)
            resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))  # not before: the server may have had more
            if self.process:
                # Does not return: commands run in processes of their own, and this one stays outside of them.
                self._serve_commands(channel, workspace, limits, meters, has_image=bool(lineage.layers))
            served = cells.Cells(channel, limits["output_bytes"], limits["transfer_bytes"], workspace)
            served.has_image = runs_in_image
            served.serve()
        except BaseException as error:
            with contextlib.suppress(OSError):
                # Whatever step failed, the process must end: half confined, it may never reach untrusted code.
                channel.sendall(frames.encode({"failed": f"{type(error).__name__}: {error}"}))
        finally:
            os._exit(1)

    def _serve_commands(
        self,
        channel: socket.socket,
        workspace: str,
        limits: dict[str, Any],
        meters: Sequence[cgroups.Meter],
        *,
        has_image: bool,
    ) -> NoReturn:
        served = commands.Commands(
            channel, limits["output_bytes"], self.filter, self.network_filter, self.packages, has_image=has_image
        )
        served.meters = {meter.kind: meter for meter in meters}
        served.workspace = workspace
        served.serve()

    def _enter_own_users(self, uid: int, proc: str = "/proc") -> None:
        """Enter a user namespace in which this process has no capabilities, and which maps no other user."""
        kernel.enter_user_namespace(commands.INSIDE_UID if self.rootless else uid, proc=proc)
        kernel.drop_capabilities()
        if not self.process:  # bubblewrap's files in /proc are its own
            kernel.open_to_own_user(False)

    def become_user(self, uid: int) -> None:
        """Give up the server's user and its groups for good; a server without root has only one user, and keeps it."""
        if not self.rootless:
            # Groups, then the group, then the user: each step needs the privileges that the last one gives up.
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)

    def check_bubblewrap(self, uid: int) -> None:
        """Run a command as a session would, so that a machine where bubblewrap fails is refused before any session.

        Raises:
            OSError: bubblewrap does not work here; says why.
        """
        reader, writer = os.pipe()
        folder = "/tmp/check"
        os.mkdir(folder, 0o700)
        os.chown(folder, uid, uid)
        # In a child, as becoming the user cannot be undone.
        if os.fork() == 0:
            try:
                self.become_user(uid)
                cells.enter_folder(folder)
                if self.rootless:
                    self._enter_own_users(uid)
                kernel.forbid_privileges()
                with socket.socket() as channel:
                    cause = commands.Commands(channel, 4096, self.filter, self.filter, self.packages).check()
            except BaseException as error:
                cause = str(error)
            os.write(writer, cause.encode("utf-8", "replace")[:4096])
            os._exit(0)
        os.close(writer)
        cause = os.read(reader, 4096).decode("utf-8", "replace")
        os.wait()
        os.close(reader)
        for name in ("home", "tmp", ""):
            os.rmdir(os.path.join(folder, name))
        if cause:
            raise OSError(f"bubblewrap does not work on this machine: {cause}")


def _readable(folders: list[str]) -> list[tuple[str, int]]:
    read = kernel.READ_FILE | kernel.READ_FOLDER
    rules = [(path, read | kernel.EXECUTE) for path in (*surroundings.SYSTEM, *folders) if os.path.isdir(path)]
    rules += [("/etc", read), ("/proc", read)]
    return rules + [(f"/dev/{name}", kernel.READ_FILE | kernel.WRITE_FILE) for name in surroundings.DEVICES]


def _limit_resources(limits: dict[str, Any], *, memory_too: bool) -> None:
    """Set limits that the kernel keeps for each process.

    Memory only where no cgroup limits the whole session: this limit counts private memory alone, and each process's
    apart.
    """
    if memory_too:
        resource.setrlimit(resource.RLIMIT_DATA, (limits["memory_bytes"], limits["memory_bytes"]))
    for kind, value in (
        (resource.RLIMIT_CORE, 1),  # unlike 0, it also keeps a program of the machine from being given the core
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_FSIZE, limits["scratch_bytes"]),
    ):
        resource.setrlimit(kind, (value, value))
