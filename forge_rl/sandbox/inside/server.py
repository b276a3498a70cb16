"""The fork server: a clean process that forks one confined process for each session.

It runs as `python -s -P -S` and imports nothing of this library but its own neighbours. The first process, the keeper,
makes new namespaces and the cgroups; it forks the server, which is PID 1 there, and removes the cgroups when the server
or the owner has ended. Whoever kills the server kills its sessions with it, and their mounts.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from forge_rl.sandbox.inside import (
    cells,
    cgroups,
    commands,
    frames,
    kernel,
    overlays,
    seccomp,
    session_folders,
    surroundings,
)
from forge_rl.sandbox.inside.confinement import MOST_FILES, Confinement, Lineage

_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "sandbox", "LOGNAME": "sandbox"}
# User ids of sessions are far above any that a system hands out: those of all servers lie in 2^30 to 2^31, 65,536 for
# each server.
_LEAST_UID, _UIDS = 0x40000000, 0x10000
_CREDENTIALS = struct.Struct("3i")  # struct ucred
# Bytes of a request, descriptors that may come with it, and sessions that are prepared together.
_MOST_MESSAGE, _MOST_GIVEN, _MOST_AT_ONCE = 1 << 16, 4, 16


def missing_layers(profile: str) -> dict[str, str]:
    """Return the layers of a profile that this machine lacks, each with the reason."""
    missing, machine = {}, os.uname().machine
    rootless = os.geteuid() != 0
    if rootless and profile == "standard":
        # The profile `standard` has one process namespace for all sessions: only different users keep them from
        # signalling each other.
        missing["uid"] = "only root can give each session a user of its own"
    if profile == "process" and commands.bubblewrap() is None:
        missing["bubblewrap"] = "there is no bwrap in /usr/local/bin, /usr/bin or /bin"
    if lacking := cgroups.lacking(cgroups.here()):
        missing["cgroup"] = f"no cgroups can be made for {lacking}"
    if profile != "process" and kernel.landlock_version() < 1:  # bubblewrap could not mount anything under Landlock
        missing["landlock"] = "the kernel has no Landlock (5.13 and later, if enabled)"
    if machine not in seccomp.ARCHITECTURES:
        missing["seccomp"] = f"there is no table of system calls for {machine}"
    elif not kernel.has_seccomp():
        missing["seccomp"] = "the kernel filters no system calls"
    # The second switch is Debian's, and binds only users without privileges.
    for setting in (
        "user/max_user_namespaces",
        *(["kernel/unprivileged_userns_clone"] if profile != "strict" or rootless else []),
    ):
        with contextlib.suppress(OSError), open(f"/proc/sys/{setting}") as file:
            if int(file.read()) == 0 and profile != "standard":
                missing["user-namespace"] = f"/proc/sys/{setting} is 0"
    return missing


def main(channel_fd: int, lifeline_fd: int) -> None:
    """Run the keeper until the owner closes its end of the lifeline, or the server ends.

    Args:
        channel_fd: socket for requests and answers; the server takes it over.
        lifeline_fd: read end of a pipe whose write end only the owner has.
    """
    # Interrupts are the owner's to handle; this process ends by the lifeline.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel, lifeline = socket.socket(fileno=channel_fd), lifeline_fd
    config = json.loads(channel.recv(_MOST_MESSAGE))
    if config["profile"] != "process":
        # Whatever the interpreter writes on first use is written here once, and stays shared between all sessions.
        cells.rehearse()
        if config["images"]:
            cells.load_extensions()
    for name in config["preload"]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            # A refusal that names the module, instead of a server that just ends.
            channel.send(json.dumps({"refused": f"a session cannot import {name}: {error}"}).encode())
            return
    hierarchies = [] if "cgroup" in config["missing"] else cgroups.here()
    # An owner, keeper and server that were killed together left their cgroups, which the kernel keeps.
    cgroups.remove_abandoned(hierarchies)
    # A server holds more sessions than the owner's soft limit has files.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    tree = cgroups.CgroupTree(cgroups.name_of(os.getpid()), hierarchies)
    keeper = os.getpid()
    try:
        tree.bound(memory_bytes=config["memory_bytes"], processes=config["processes"])
        config["rootless"] = os.geteuid() != 0
        if config["rootless"]:
            surroundings.enter_namespaces()
        else:
            kernel.unshare(surroundings.NAMESPACES)
        surroundings.build_root(
            [sys.base_prefix, *config["packages"]], config["profile"], config["rootless"], config["images"]
        )
        # The first child of a process that has unshared its process namespace is PID 1 there: when it ends, the kernel
        # kills all sessions.
        server = os.fork()
        if server == 0:
            config["number"] = keeper
            # A keeper that is killed takes the server with it: nobody would be left to remove its cgroups.
            kernel.end_with_parent()
            os.close(lifeline)
            _serve(channel, tree, config)
        channel.close()
        ended = os.pidfd_open(server)
        waiting = select.poll()
        # Poll reports the hang-up of the write end without being asked for any event.
        waiting.register(lifeline, 0)
        waiting.register(ended, select.POLLIN)
        waiting.poll()
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    except OSError as error:
        with contextlib.suppress(OSError):
            channel.send(json.dumps({"refused": str(error)}).encode())
    finally:
        tree.remove_all()


def _serve(channel: socket.socket, tree: cgroups.CgroupTree, config: dict[str, Any]) -> NoReturn:
    """Run the server until the owner closes the channel."""
    try:
        # Not earlier: only a process inside of the new process namespace can mount a /proc that shows it.
        surroundings.mount_proc(show_all=config["profile"] == "process")
        kernel.mount("none", "/", flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SETUID)
        socket.sethostname("sandbox")
        # No descendant can regain a capability by executing a program, not even one that escaped its user.
        kernel.drop_bounding_capabilities()
        server = _SessionServer(channel, tree, config)
        channel.send(json.dumps({"serving": True}).encode())
        server.run()
    except BaseException as error:
        with contextlib.suppress(OSError):
            channel.send(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os._exit(0)


class _SessionServer:
    """Starts and ends sessions on request; one thread, so that it can fork."""

    def __init__(self, channel: socket.socket, tree: cgroups.CgroupTree, config: dict[str, Any]) -> None:
        self.channel = channel
        self.tree = tree
        self.confinement = Confinement(config, has_cgroups=bool(tree.folders))
        self.strict, self.process, self.rootless = (
            self.confinement.strict,
            self.confinement.process,
            self.confinement.rootless,
        )
        self.roots = session_folders.ImageRoots(self.confinement, copied=config["copies_images"])
        self.sessions: dict[str, Lineage] = {}
        self.ending: set[str] = set()
        self.births: dict[int, tuple[socket.socket, str, bool]] = {}
        """By descriptor: birth channels of processes that have not reported yet, their session, and if it is a fork."""
        self.pids: dict[int, str] = {}
        self.inits: dict[int, Lineage] = {}
        self.removers: dict[int, str] = {}
        """Processes that delete the folders of an ended session, by PID, with the session's name."""
        self.lives: dict[int, str] = {}
        """By pidfd: sessions whose first process is the child of an init, so that `waitpid` here never returns it."""
        self.first_uid, self.uids = (0, 1) if self.rootless else _uids(config["number"])
        self.live_uids = set[int]()
        """User ids of the live sessions, one for a session and its forks."""
        # Every session inherits this process: its variables, import path and modules must hold nothing of the owner's.
        os.environ.clear()
        os.environ.update(_ENVIRONMENT)
        sys.path[:] = [path for path in sys.path if path != config["root"]] + list(config["packages"])
        sys.argv[:] = [""]
        # Cells import their own `forge_rl` or none: this one's modules stay reachable only by the code that already
        # holds them.
        for name in [name for name in sys.modules if name.partition(".")[0] == "forge_rl"]:
            del sys.modules[name]
        self.waiting = select.epoll()
        # select.select rejects descriptors of 1024 and above, and the channel's number is the owner's.
        self.requests = select.poll()
        self.requests.register(channel, select.POLLIN)
        # SIGCHLD writes a byte into this pipe, so that one epoll waits for requests, births and deaths alike.
        self.woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        self.wake = wake
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # Sessions inherit these three, and nothing of theirs may reach the owner's terminal or logs.
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        if self.process:
            self.confinement.check_bubblewrap(self.first_uid)
        # Frozen objects are never visited by a collection, whose marks would copy the pages that all sessions share.
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        self.waiting.register(self.channel, select.EPOLLIN)
        self.waiting.register(self.woken, select.EPOLLIN)
        while True:
            # The end of a killed process wakes this loop; the timeout is for a cgroup that empties a moment later.
            ready = dict(self.waiting.poll(0.02 if self.ending else None))
            # These come before anything that opens descriptors, which could get the number of one that was ready.
            born, dead = ready.keys() & self.births.keys(), ready.keys() & self.lives.keys()
            for fd in dead:
                self.waiting.unregister(fd)
                self._ended(self.lives.pop(fd), None)
            for fd in born:
                self._let_in(fd)
            for fd in dead:
                os.close(fd)
            if self.woken in ready:
                os.read(self.woken, 4096)
                self._reap()  # only now: the kernel looks at every child
            for name in list(self.ending):
                self._finish(name)
            if self.channel.fileno() in ready and not self._answer_all():
                return

    def _answer_all(self) -> bool:
        """Answer the pending requests; return False if the owner has closed the channel.

        All sessions that are to start are prepared before the first is forked, as each page that this process writes
        after a fork is copied: 200 for each session if they were prepared one by one.
        """
        prepared: list[Iterator[None]] = []
        while len(prepared) < _MOST_AT_ONCE and self.requests.poll(0):
            text, fds, _, _ = socket.recv_fds(self.channel, _MOST_MESSAGE, _MOST_GIVEN)  # ignores its flags
            if not text:
                return False
            answer = self._answer(json.loads(text), fds)
            # A generator that yields has prepared a session. Any other request is done by now, and `next` returned the
            # default.
            if next(answer, self) is None:
                prepared.append(answer)
        for answer in prepared:
            next(answer, None)
        return True

    def _tell(self, **message: object) -> None:
        self.channel.send(json.dumps(message).encode())

    def _answer(self, message: dict[str, Any], fds: list[int]) -> Iterator[None]:
        """Carry out a request; a start yields once, between its preparation and its fork."""
        name, do = str(message["session"]), message["do"]
        try:
            if do == "start":
                yield from self._start(name, message["limits"], message["layers"], *fds)
            elif do == "fork":
                # Kept until the fork reports, while the descriptors of the request are closed below.
                birth = socket.socket(fileno=os.dup(fds[0]))
                self._prepare_fork(name, message, birth, fds[1:])
            elif do == "end" and name in self.sessions:
                self._finish(name)
        except OSError as error:
            if do in ("start", "fork"):
                self._tell(session=name, failed=str(error))
                if name in self.sessions:
                    self._finish(name)
                else:  # it failed before it had a process
                    self.tree.remove(name)
        finally:
            for fd in fds:
                os.close(fd)

    def _start(
        self, name: str, limits: dict[str, Any], layers: list[str], control: int, *workspace: int
    ) -> Iterator[None]:
        """Start a session.

        Args:
            layers: paths of its image's layers below LAYERS; empty without an image.
            workspace: descriptors of the owner's channel and of the base folder; only the channel if it has an image.
        """
        self._add(name, limits)
        if self.process:
            self.tree.find_meters(name)
        uid = self._free_uid(int(name))
        lineage = self.sessions[name] = Lineage(
            folder="/tmp" if self.strict or layers else f"/tmp/{name}",
            uid=uid,
            has_workspace=bool(workspace),
            layers=layers,
        )
        self.live_uids.add(uid)
        lineage.members[name] = ["0", overlays.NAME] if workspace else ["0"]
        group = self.tree.open_group(name)
        try:
            if not (self.strict or layers):
                os.mkdir(lineage.folder, 0o700)
                session_folders.mount_scratch(lineage, limits)
                if workspace:
                    session_folders.show_workspace(lineage, limits, *workspace)
            yield
            # Others were prepared meanwhile, and a request to end this one may have come with theirs.
            if name not in self.sessions or name in self.ending:
                raise OSError("it was ended before it began")
            if self.strict:
                # The init forks the session's process, so that its PID is unknown here until it reports.
                ours, birth = frames.birth_channel()
                self._expect(name, ours, fork=False)
                lineage.init = kernel.fork_into(None, surroundings.NAMESPACES)
                if lineage.init == 0:
                    shows = functools.partial(session_folders.show_workspace, lineage, limits, *workspace)
                    if layers:
                        shows = functools.partial(self.roots.enter, lineage, limits, group, control, *workspace)
                    self._become_init(lineage, limits, control, group, birth, shows if workspace else None)
                birth.close()
                self.inits[lineage.init] = lineage
            else:
                # A session of an image has mounts of its own: those of a thousand others would slow down its commands.
                pid = kernel.fork_into(group.unified, kernel.NEW_MOUNTS if layers else 0)
                if pid == 0:
                    if layers:
                        kernel.unmount("/tmp")
                        self.roots.enter(lineage, limits, group, control, *workspace)
                    meters = self.tree.meters(name) if self.process else []
                    self.confinement.become_session(lineage, limits, control, group.doors, group.last_doors, meters)
                self.pids[pid] = name
                if layers:
                    # Held open, as removing a fork's folder needs these mounts after the first process has ended.
                    lineage.space = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            group.close()

    def _free_uid(self, number: int) -> int:
        """Return the user id of a session's number, or the next that no live session has.

        Raises:
            OSError: live sessions have all of them.
        """
        if self.rootless:  # its namespaces have one user
            return self.first_uid
        if len(self.live_uids) == self.uids:
            raise OSError(f"all {self.uids} user ids are taken by live sessions")
        while (uid := self.first_uid + number % self.uids) in self.live_uids:
            number += 1
        return uid

    def _become_init(
        self,
        lineage: Lineage,
        limits: dict[str, Any],
        control: int,
        group: cgroups.GroupFds,
        birth: socket.socket,
        show_workspace: Callable[[], None] | None,
    ) -> NoReturn:
        """Run PID 1 of the namespaces of one session and its forks.

        It stays outside of their cgroups: killing the session's would end it and, with it, the forks that live on.
        """
        try:
            kernel.unmount("/proc")
            kernel.unmount("/tmp")
            surroundings.mount_proc()
            session_folders.mount_scratch(lineage, limits)
            if show_workspace is not None:
                show_workspace()
            signal.set_wakeup_fd(-1)
            if kernel.fork_into(group.unified) == 0:
                birth.send(b"?")  # the server learns which process this is, before anything untrusted runs
                birth.recv(1)
                if not lineage.layers:
                    self.confinement.show_proc()
                self.confinement.become_session(lineage, limits, control, group.doors, group.last_doors)
            # From here on this process only reaps: what untrusted processes of its namespace could reach through it is
            # given up.
            os.closerange(3, MOST_FILES)
            self.confinement.become_user(lineage.uid)
            kernel.forbid_privileges()
            kernel.drop_capabilities()
            while True:
                try:
                    os.wait()
                except ChildProcessError:
                    signal.pause()  # until the server ends the last of them
        finally:
            os._exit(1)

    def _add(self, name: str, limits: dict[str, Any]) -> None:
        self.tree.add(
            name,
            memory_bytes=limits["memory_bytes"],
            processes=limits["processes"] + self.process * commands.OWN_PROCESSES,
            cpus=limits["cpus"],
            as_one=not self.process,
        )

    def _prepare_fork(self, name: str, message: dict[str, Any], birth: socket.socket, workspace: Sequence[int]) -> None:
        """Make a fork's cgroups and workspace before its session forks; the fork waits on its birth channel meanwhile.

        Args:
            workspace: descriptors of the owner's channel, of the changes to copy, and of the base folder; an image
                has no base.
        """
        try:
            if message["of"] not in self.sessions:
                raise OSError("the session has ended")
            self._add(name, message["limits"])
        except OSError:
            birth.close()
            raise
        # A fork shares the user, scratch folder and namespaces of its session, and has cgroups of its own.
        lineage = self.sessions[name] = self.sessions[message["of"]]
        lineage.members[name] = [name]
        self._expect(name, birth, fork=True)
        if workspace:
            lineage.members[name].append(overlays.fork_name(name))
            with contextlib.closing(self.tree.open_group(name)) as group:
                session_folders.copy_workspace(lineage, name, message, group, workspace)

    def _expect(self, name: str, birth: socket.socket, *, fork: bool) -> None:
        """Watch a birth channel, on which a new process reports that it exists."""
        self.births[birth.fileno()] = birth, name, fork
        self.waiting.register(birth, select.EPOLLIN)

    def _let_in(self, fd: int) -> None:
        """Move a new process into its cgroups, by the PID that the kernel attests, never one that the process names."""
        channel, name, fork = self.births.pop(fd)
        self.waiting.unregister(fd)
        with channel:
            _, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            lineage = self.sessions.get(name)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and lineage is not None:
                    pid, uid, _ = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
                    # Another session that got hold of the channel cannot be let in: its messages carry its own user.
                    if uid in (0, lineage.uid):
                        with contextlib.suppress(OSError):  # it has ended, or does not listen
                            if self.strict:
                                # A pidfd cannot come to mean another process, as a PID can that somebody else reaps.
                                life = os.pidfd_open(pid)
                                self.lives[life] = name
                                self.waiting.register(life, select.EPOLLIN)
                            else:
                                self.pids[pid] = name
                            if self.process:
                                self._let_in_commands(channel, pid, name)
                                continue
                            channel.send(b"!")
                            # The answer comes first because moving takes some ms, in which the fork already works.
                            # Until then, it counts against its parent session's limits.
                            if fork:  # first processes were forked into theirs
                                self.tree.move(pid, name)

    def _let_in_commands(self, channel: socket.socket, pid: int, name: str) -> None:
        """Move a fork that runs commands, and give it the meters of its own cgroups.

        The move comes first here: a command that started before it would stay in the parent session's cgroups.
        """
        self.tree.move(pid, name)
        meters = self.tree.meters(name)
        socket.send_fds(channel, [b"!"], [meter.fd for meter in meters])
        for meter in meters:
            os.close(meter.fd)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # `_finish` must not kill this PID from here on, as the kernel may give it to another process.
            if (lineage := self.inits.pop(pid, None)) is not None:
                lineage.init = 0
            if pid in self.removers:
                self._tell(session=self.removers.pop(pid), ended=True)
            self._ended(self.pids.pop(pid, ""), os.waitstatus_to_exitcode(status))

    def _ended(self, name: str, status: int | None) -> None:
        """Report the unexpected end of a session's first process, and start to end the processes that it left."""
        if name in self.sessions and name not in self.ending:
            self.ending.add(name)
            self._tell(session=name, exit=status, memory=self.tree.kills_for_memory(name))

    def _kill(self, name: str) -> bool:
        """Kill a session's processes; return True once none is left and its cgroups are removed."""
        if self.tree.folders:
            self.tree.kill(name)
            return self.tree.remove(name)
        # Without cgroups: the first process now. Programs that it started cannot be told from its forks' programs, as
        # all have the lineage's user: they end with the last session of the lineage.
        lineage = self.sessions[name]
        lives = [life for life, session in self.lives.items() if session == name]
        with contextlib.suppress(ProcessLookupError):
            for pid in [pid for pid, session in self.pids.items() if session == name]:
                os.kill(pid, signal.SIGKILL)
            for life in lives:
                signal.pidfd_send_signal(life, signal.SIGKILL)
        is_last = lineage.members.keys() == {name}
        if is_last and lineage.init:
            os.kill(lineage.init, signal.SIGKILL)
        elif is_last and not (self.strict or self.rootless):
            _kill_all_of(lineage.uid)
        self._reap()
        return not lives and name not in self.pids.values() and not (is_last and lineage.init)

    def _finish(self, name: str) -> None:
        """Kill a session's remaining processes; once all have ended, remove its cgroups and folder.

        Called again, by the loop in `run`, until that is so.
        """
        self.ending.add(name)
        if not self._kill(name):
            return
        self.ending.discard(name)
        for fd in [fd for fd, (_, child, _) in self.births.items() if child == name]:  # it never reported
            self.waiting.unregister(fd)
            self.births.pop(fd)[0].close()
        lineage = self.sessions.pop(name)
        folders = lineage.members.pop(name)
        if lineage.members:
            self._remove(name, lineage, folders)
            return
        self.live_uids.discard(lineage.uid)
        if lineage.init:
            os.kill(lineage.init, signal.SIGKILL)
        elif lineage.space >= 0:
            os.close(lineage.space)  # the last hold on its mounts
        elif not (self.strict or lineage.layers):
            with contextlib.suppress(OSError):  # it may have failed to be mounted
                kernel.unmount(lineage.folder)
            with contextlib.suppress(OSError):
                os.rmdir(lineage.folder)
        self._tell(session=name, ended=True)

    def _remove(self, name: str, lineage: Lineage, folders: list[str]) -> None:
        """Delete the folders of a session whose forks live on, in a process of its own: they may hold many files."""
        with contextlib.suppress(OSError):
            if not self.strict and len(folders) == 1:
                # An empty folder needs no process.
                os.rmdir(os.path.join(lineage.folder, folders[0]))
                self._tell(session=name, ended=True)
                return
        remover = os.fork()
        self.removers[remover] = name
        if remover == 0:
            try:
                signal.set_wakeup_fd(-1)
                kernel.enter_mounts(lineage.open_space())
                overlays.remove(lineage.folder, folders)
            finally:
                os._exit(0)


def _kill_all_of(uid: int) -> None:
    """Kill all processes of a user in this process's namespace.

    A child does it as that user, as `kill(-1)` reaches all that the caller may signal.
    """
    killer = os.fork()
    if killer == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(killer, 0)


def _uids(number: int) -> tuple[int, int]:
    """Return the first of the user ids for a server's sessions, and how many there are.

    Args:
        number: the keeper's PID, which gives servers of one machine ranges of their own.

    Raises:
        OSError: the user namespace of this container maps too few ids.
    """
    with open("/proc/self/uid_map") as file:
        # Inside of a container with mapped users, only ids of its own mapping exist.
        first_uid, _, size = max((tuple(map(int, line.split())) for line in file), key=lambda mapping: mapping[2])
    if first_uid + size >= 2 * _LEAST_UID:
        return _LEAST_UID + number % (_LEAST_UID // _UIDS) * _UIDS, _UIDS
    if size < 4096:
        raise OSError(f"this container has only {size} user ids, too few for sessions of their own")
    return first_uid + size // 2, size // 2 - 1  # other servers have the same ones, but see none of our processes
