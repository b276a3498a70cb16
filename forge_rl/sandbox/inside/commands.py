"""Runs the command lines of one session under bubblewrap. Imports nothing of this library but its neighbours.

Unlike `cells`, this process stays outside: a command sees neither it nor its channel, so that its reports
can be trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from forge_rl.sandbox.inside import cells, cgroups, frames, gates, images, kernel

HOME, WORKSPACE = "/home/sandbox", "/workspace"
INSIDE_UID = 1000
"""User that commands are, as they see it."""
OWN_PROCESSES = 3
"""Processes of a session besides the commands: this one, bubblewrap, and the first of a command's namespace."""
_SEARCHED = "/usr/local/bin:/usr/bin:/bin"
_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "HOME": HOME,
    "TMPDIR": "/tmp",
}
_CONFINED = (
    *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--hostname", "sandbox", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--clearenv"),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = (
    ("/proc/self/fd", "/dev/fd"),
    *((f"/proc/self/fd/{n}", f"/dev/std{s}") for n, s in enumerate(("in", "out", "err"))),
)
_FILE_S, _LAST_WORDS_S = 30.0, 10.0
_TICK_S = 0.1
_MOST_FILES = 1 << 20
_SAYS = "bwrap: "
_PUT = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_GET = """[ -e "$1" ] || { echo "no such file" >&2; exit 1; }
[ -f "$1" ] || { echo "not a regular file" >&2; exit 1; }
exec head -c "$2" -- "$1" """


def bubblewrap() -> str | None:
    """Return the path of bubblewrap, or None if this machine lacks it."""
    return _found("bwrap")


def _found(name: str) -> str | None:
    paths = (os.path.join(folder, name) for folder in _SEARCHED.split(":"))
    return next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), None)


@dataclass
class _RunningCommand:
    """A command that runs."""

    pid: int
    """PID of bubblewrap."""
    streams: dict[int, tuple[bytearray, int]]
    """By descriptor: the bytes that came from it, and the most that are kept."""
    status: int
    """The descriptor by which bubblewrap reports."""
    began: float
    first: int | None = None
    """Pidfd of the first process of the command's namespace, whose end ends all; None until bubblewrap names it."""
    overran: str = ""

    def kill(self) -> None:
        """Kill the command with all that it has started."""
        # Not reported yet: killing bubblewrap ends what it has started, by `--die-with-parent`.
        if self.first is None:
            os.kill(self.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.first, signal.SIGKILL)


@dataclass(kw_only=True)
class _Command:
    """A command to run, and its limits."""

    argv: list[str]
    stdin: bytes = b""
    wall_s: float
    output_bytes: int
    """Maximum bytes of each output to keep; one byte more is kept of a longer output."""
    cpu_s: float | None = None
    env: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    """Current folder at its start, relative to the workspace or the home."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders of the session to mount: the name of each, by the path at which the command sees it."""
    user: str = ""
    """Name of the image's user that it runs as."""


@dataclass
class _CommandEnd:
    """How a command ended."""

    status: int | None
    """Exit status; 128 and the number of the signal that killed it; None if it never started."""
    out: bytes
    err: bytes
    overran: str
    out_of_memory: bool
    cpu_s: float
    memory_bytes: int


@dataclass
class Commands:
    """Runs a session's commands; `serve` answers its owner until the channel closes."""

    channel: socket.socket
    output_bytes: int
    filter: bytes
    """Seccomp program for commands; b"" for none."""
    network_filter: bytes
    """Seccomp program for commands of a session with named addresses, or of an image."""
    folders: list[str]
    """Folders that commands can read besides the system's; programs in their `bin` are found."""
    meters: dict[str, cgroups.Meter] = field(default_factory=dict)
    workspace: str = ""
    """The folder in which commands start instead of their home; "" for none."""
    home: str = field(default_factory=os.getcwd)
    """The folder that holds the commands' home and /tmp."""
    has_image: bool = False
    """Whether the workspace is what commands see as their root."""

    def __post_init__(self) -> None:
        self._users: dict[str, images.User] = {}
        self._gates: list[gates.Gate] = []
        self._owner: socket.socket | None = None
        """Channel to the owner, who takes the connections that commands make to named addresses."""
        self._hosts = images.HOSTS
        if self.has_image:
            self.filter = self.network_filter
        for name in ("home", "tmp"):
            os.mkdir(name, 0o700)
        self._bwrap = bubblewrap()
        self._shell = _found("bash") or "/bin/sh"
        self._programs = [path for folder in self.folders if os.path.isdir(path := os.path.join(folder, "bin"))]

    def serve(self) -> NoReturn:
        answers: dict[str, cells.Answer] = {"run": self._run, "put": self._put, "get": self._get, "fork": self._fork}
        answers["network"] = self._network
        if self.has_image:
            answers |= {"put": self._put_in_image, "get": self._get_of_image, "apply": self._apply}
        cells.serve(self, answers)

    def check(self) -> str:
        """Run a command; return why bubblewrap cannot, or ""."""
        ended = self._execute(_Command(argv=["true"], wall_s=_FILE_S, output_bytes=1 << 12))
        return "" if ended.status == 0 else ended.err.decode("utf-8", "replace").strip() or f"status {ended.status}"

    def _run(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        line = message["command"]
        error: list[str] | None = None
        try:
            shell = images.shell(self._root()) if self.has_image and isinstance(line, str) else self._shell
            argv = [shell, "-c", line] if isinstance(line, str) else list(map(str, line))
            command = _Command(
                argv=argv,
                stdin=data,
                wall_s=float(message["wall_s"]),
                cpu_s=message["cpu_s"],
                output_bytes=self.output_bytes,
                env=message["env"] or {},
                folder=str(message["folder"]),
                folders=message["folders"],
                user=str(message.get("user") or ""),
            )
            ended = self._execute(command)
        except (OSError, ValueError) as raised:
            ended = _CommandEnd(None, b"", b"", "", False, 0.0, 0)
            error = ["NotStarted", str(raised), ""]
        if ended.overran:
            error = ["CellOverrun", f"the command exceeded its {ended.overran} limit: killed", ""]
        elif ended.out_of_memory:
            error = ["OutOfMemory", "a process of the command exceeded the session's memory limit: killed", ""]
        elif ended.status is None and error is None:
            stderr_text = ended.err.decode("utf-8", "replace").strip()
            error = ["Ended", "bubblewrap was killed", ""]
            # Bubblewrap's own complaint, such as a missing program. With a status, the same text would be the
            # command's.
            if stderr_text.startswith(_SAYS):
                error, ended.err = ["NotStarted", stderr_text.removeprefix(_SAYS), ""], b""
        max_bytes = self.output_bytes
        return frames.encode(
            {
                "stdout": ended.out[:max_bytes].decode("utf-8", "replace"),
                "stderr": ended.err[:max_bytes].decode("utf-8", "replace"),
                "cut": len(ended.out) > max_bytes or len(ended.err) > max_bytes,
                "value": None,
                "error": error,
                "status": ended.status,
                "cpu_s": ended.cpu_s,
                "memory_bytes": ended.memory_bytes,
            }
        )

    def _put(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        """Write a file by a command, with the rights of commands: a link leads nowhere that they could not go."""
        argv = ["/bin/sh", "-c", _PUT, "sh", str(message["path"])]
        ended = self._execute(_Command(argv=argv, stdin=data, wall_s=_FILE_S, output_bytes=1 << 12))
        return frames.encode({} if ended.status == 0 else {"failed": _complaint(ended)})

    def _get(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        max_bytes = int(message["most"])
        argv = ["/bin/sh", "-c", _GET, "sh", str(message["path"]), str(max_bytes + 1)]
        ended = self._execute(_Command(argv=argv, wall_s=_FILE_S, output_bytes=max_bytes))
        if ended.status != 0:
            return frames.encode({"failed": _complaint(ended)})
        if len(ended.out) > max_bytes:
            return frames.encode({"failed": f"more than {max_bytes} bytes"})
        return frames.encode({}, ended.out)

    def _root(self) -> images.Root:
        return images.Root(self.workspace)

    def _put_in_image(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        """Write a file of the image's root from this process, as the image may have no program that could."""
        try:
            self._root().write(str(message["path"]), data)
        except (OSError, ValueError) as error:
            return frames.encode({"failed": str(error)})
        return frames.encode({})

    def _get_of_image(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        try:
            return frames.encode({}, self._root().read(str(message["path"]), int(message["most"])))
        except (OSError, ValueError) as error:
            return frames.encode({"failed": str(error)})

    def _apply(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        try:
            self._root().apply(data, str(message["folder"]))
        except (OSError, ValueError) as error:
            return frames.encode({"failed": str(error)})
        return frames.encode({})

    def _fork(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        def settle(fds: list[int]) -> None:
            if self._owner is not None:
                self._owner.close()
            self._owner, self._gates = None, []
            old = list(self.meters.values())
            # Meters of the fork's own cgroups, so that it does not report its session's use as its own.
            self.meters = {
                meter.kind: cgroups.Meter(fd, meter.kind, meter.key, meter.unit)
                for fd, meter in zip(fds, old, strict=True)
            }
            for meter in old:
                os.close(meter.fd)

        return cells.become_two(self, message, descriptors, settle)

    def _network(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        """Take the channel to the owner, who connects to named addresses; check that a network for them can be made."""
        os.set_inheritable(descriptors[0], False)
        self._owner = socket.socket(fileno=descriptors[0])
        self._gates, lines = gates.gates_of(message["names"])
        self._hosts, self.filter = images.HOSTS + lines, self.network_filter
        try:
            gates.opened(self._gates).close()
        except OSError as error:
            return frames.encode({"failed": str(error)})
        return frames.encode({})

    def _execute(self, command: _Command) -> _CommandEnd:
        """Run a command, and return when it and all that it has started have ended.

        Raises:
            OSError: no process can be started.
            ValueError: an argument or variable contains a NUL.
        """
        start_cpu_s, start_kills = self._cpu_s(), self._count("kills")
        confinement = (
            self._image_confinement(command)
            if self.has_image
            else self._confinement(command.env, command.folder, command.folders)
        )
        arguments = [*confinement, "--", *command.argv]
        if any("\0" in argument for argument in arguments):
            raise ValueError("a command contains a NUL")
        passage = gates.opened(self._gates) if self._gates else None
        try:
            running, stdin = self._start(arguments, command.output_bytes, command.cpu_s, passage)
            # The session's meter counts earlier commands too: the limit is where it stands plus this command's share.
            end_cpu_s = None if command.cpu_s is None else start_cpu_s + command.cpu_s
            listeners = passage.listeners if passage is not None else {}
            try:
                self._attend(running, stdin, command, end_cpu_s, listeners)
            finally:
                _end(running)
        finally:
            if passage is not None:
                passage.close()
        out, err, report = (bytes(buffer) for buffer, _ in running.streams.values())
        # Without a cgroup's meter: the largest child so far, in KiB.
        memory = self._count("memory_bytes") or resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return _CommandEnd(
            status=_told(report, "exit-code"),
            out=out,
            err=err,
            overran=running.overran,
            out_of_memory=self._count("kills") > start_kills,
            cpu_s=max(0.0, self._cpu_s() - start_cpu_s),
            memory_bytes=int(memory),
        )

    def _image_confinement(self, command: _Command) -> list[str]:
        """Return bubblewrap's arguments for a command of an image: its root with other /proc, /dev and /etc/hosts.

        Raises:
            OSError: the image does not know its user.
        """
        # Looked up once for each name: commands may write to /etc/passwd afterwards.
        if command.user not in self._users:
            self._users[command.user] = images.user(self._root(), command.user)
        user = self._users[command.user]
        arguments = ["bwrap", *_CONFINED, "--uid", str(user.uid), "--gid", str(user.gid)]
        for name, value in {"PATH": images.PATH, "HOME": user.home, **command.env}.items():
            arguments += ["--setenv", name, value]
        arguments += ["--bind", self.workspace, "/", "--proc", "/proc", "--tmpfs", "/dev"]
        for name in _DEVICES:
            arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for target, place in LINKS:
            arguments += ["--symlink", target, place]
        arguments += ["--bind", f"{self.home}/tmp", "/dev/shm", *self._hosts_arguments()]
        # An image may lack them.
        arguments += ["--dir", "/tmp", "--dir", command.folder]
        return [*arguments, "--remount-ro", "/proc", "--remount-ro", "/dev", "--chdir", command.folder]

    def _hosts_arguments(self) -> list[str]:
        path = f"{self.home}/hosts"
        if not os.path.exists(path) or os.path.getsize(path) != len(self._hosts):
            with open(path, "w") as file:
                file.write(self._hosts)
            os.chmod(path, 0o644)
        return ["--ro-bind", path, "/etc/hosts"]

    def _confinement(self, env: dict[str, str], folder: str, folders: Mapping[str, str]) -> list[str]:
        """Return bubblewrap's arguments without an image: all that a command sees."""
        arguments = ["bwrap", *_CONFINED, "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
        path = ":".join([_SEARCHED, *self._programs])
        for name, value in {**_ENVIRONMENT, "PATH": path, **env}.items():
            arguments += ["--setenv", name, value]
        # This process's root is the fork server's, which has nothing else of the machine to begin with.
        for entry in sorted(os.listdir("/")):
            if os.path.islink(f"/{entry}"):
                arguments += ["--symlink", os.readlink(f"/{entry}"), f"/{entry}"]
            elif entry in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc"):
                arguments += ["--ro-bind", f"/{entry}", f"/{entry}"]
        if self._gates:
            arguments += self._hosts_arguments()
        for path in self.folders:
            arguments += ["--ro-bind", path, path]
        arguments += ["--proc", "/proc", "--dir", "/dev"]
        for name in _DEVICES:
            arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for target, place in LINKS:
            arguments += ["--symlink", target, place]
        home = self.home
        arguments += ["--bind", f"{home}/home", HOME, "--bind", f"{home}/tmp", "/tmp"]
        arguments += ["--bind", f"{home}/tmp", "/dev/shm"]
        if self.workspace:
            arguments += ["--bind", self.workspace, WORKSPACE]
        for place, name in folders.items():
            # In the session's folder, where no command sees it unless it names it.
            os.makedirs(f"{home}/folders/{name}", 0o700, exist_ok=True)
            arguments += ["--bind", f"{home}/folders/{name}", place]
        # A command that lowered its oom_score_adj there would outlive others on a machine without memory.
        arguments += ["--remount-ro", "/proc", "--remount-ro", "/"]
        return [*arguments, "--chdir", os.path.join(WORKSPACE if self.workspace else HOME, folder)]

    def _start(
        self, arguments: list[str], output_bytes: int, cpu_s: float | None, passage: gates.Passage | None
    ) -> tuple[_RunningCommand, int]:
        """Start bubblewrap; return the running command and the write end of its standard input."""
        pipes = [os.pipe() for _ in range(4)]
        their_ends = [pipes[0][0], *(writer for _, writer in pipes[1:])]
        our_ends = [pipes[0][1], *(reader for reader, _ in pipes[1:])]
        program = None
        try:
            if self.filter:
                # A file in memory: bubblewrap reads its filter from a descriptor to the end.
                program = os.memfd_create("filter", os.MFD_CLOEXEC)
                os.write(program, self.filter)
                os.lseek(program, 0, os.SEEK_SET)
            pid = os.fork()
            if pid == 0:
                self._become_bubblewrap(arguments, their_ends, program, cpu_s, passage)
        except BaseException:
            for fd in our_ends:
                os.close(fd)
            raise
        finally:
            for fd in their_ends:
                os.close(fd)
            if program is not None:
                os.close(program)
        for fd in our_ends:
            os.set_blocking(fd, False)
        stdin, out, err, status = our_ends
        max_sizes = {out: output_bytes, err: output_bytes, status: 1 << 12}
        return _RunningCommand(
            pid, {fd: (bytearray(), limit) for fd, limit in max_sizes.items()}, status, time.monotonic()
        ), stdin

    def _become_bubblewrap(
        self,
        arguments: list[str],
        streams: list[int],
        program: int | None,
        cpu_s: float | None,
        passage: gates.Passage | None,
    ) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and programs inherit that
            for place, fd in enumerate(streams[:3]):
                os.dup2(fd, place)
            # Since the change of user, this process's files in /proc are root's, one of which the next line writes.
            kernel.open_to_own_user(True)
            with open("/proc/self/oom_score_adj", "w") as file:  # commands are killed before this session's own process
                file.write("1000")
            if self.has_image:
                os.umask(0o022)  # programs of images are used to it, and nobody else gets into the session's folder
            if cpu_s is not None:
                seconds = int(cpu_s) + 2
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            extra = ["--json-status-fd", str(streams[3])]
            if passage is None:
                # Without named addresses, bubblewrap makes an empty network. Otherwise the one with the listeners is
                # entered here.
                extra.append("--unshare-net")
            else:
                passage.enter()
            os.set_inheritable(streams[3], True)
            if program is not None:
                os.set_inheritable(program, True)
                extra += ["--seccomp", str(program)]
            inherited_fds = sorted({2, streams[3], *([] if program is None else [program])})
            for low, high in zip(
                inherited_fds, [*inherited_fds[1:], _MOST_FILES], strict=True
            ):  # nothing else of this process's
                os.closerange(low + 1, high)
            assert self._bwrap is not None
            os.execve(self._bwrap, [arguments[0], *extra, *arguments[1:]], {})
        except BaseException as error:
            os.write(2, f"{_SAYS}{error}".encode("utf-8", "replace")[:4096])
        finally:
            os._exit(127)

    def _attend(
        self,
        running: _RunningCommand,
        stdin: int,
        command: _Command,
        cpu_end: float | None,
        listeners: Mapping[int, gates.Gate],
    ) -> None:
        """Feed and read a command until it and all that it started have closed their outputs, or it exceeds a limit.

        Connections that it makes to named addresses are handed to the owner meanwhile.
        """
        waiting, data = select.poll(), command.stdin
        for fd in (*running.streams, *listeners):
            waiting.register(fd, select.POLLIN)
        if data:
            waiting.register(stdin, select.POLLOUT)
        else:
            os.close(stdin)
        remaining, deadline = memoryview(data), running.began + command.wall_s
        open_streams = set(running.streams)
        try:
            while open_streams:
                current_time = time.monotonic()
                if current_time >= deadline:
                    # The second deadline: even killed, something keeps an output open. `_end` kills the rest.
                    if running.overran:
                        return
                    running.overran, deadline = "wall-clock", current_time + _LAST_WORDS_S
                    running.kill()
                elif cpu_end is not None and not running.overran and self._cpu_s() > cpu_end:
                    running.overran, deadline = "CPU", current_time + _LAST_WORDS_S
                    running.kill()
                # CPU time wakes nobody, and is looked at every tick.
                pause = deadline - current_time
                for fd, _ in waiting.poll(1000 * max(0.001, pause if cpu_end is None else min(pause, _TICK_S))):
                    if fd in listeners:
                        assert self._owner is not None
                        gates.pass_on(fd, listeners[fd], self._owner)
                        continue
                    if fd != stdin or not data:
                        if not self._take(running, fd):
                            waiting.unregister(fd)
                            open_streams.discard(fd)
                        continue
                    try:
                        remaining = remaining[os.write(fd, remaining[: 1 << 16]) :]
                    except BlockingIOError:
                        continue
                    except OSError:  # it reads no more
                        remaining = remaining[:0]
                    if not remaining:
                        waiting.unregister(fd)
                        os.close(fd)
                        data = b""
        finally:
            if data:
                os.close(stdin)

    def _take(self, running: _RunningCommand, fd: int) -> bool:
        """Read the available output; return False at its end."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        buffer, max_bytes = running.streams[fd]
        # What exceeds the limit is read and dropped: a command whose output nobody reads would hang.
        buffer += data[: max_bytes + 1 - len(buffer)]
        if fd == running.status and running.first is None and (pid := _told(bytes(buffer), "child-pid")):
            with contextlib.suppress(OSError):
                running.first = os.pidfd_open(pid)
        return bool(data)

    def _cpu_s(self) -> float:
        if "cpu_s" in self.meters:
            return self._count("cpu_s")
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def _count(self, kind: str) -> float:
        meter = self.meters.get(kind)
        with contextlib.suppress(OSError, ValueError):
            return meter.read() if meter is not None else 0
        return 0


def _end(running: _RunningCommand) -> None:
    """Kill the rest of a command and wait for its end."""
    running.kill()
    os.kill(running.pid, signal.SIGKILL)
    os.waitpid(running.pid, 0)
    if running.first is not None:
        # The first process ends last in its namespace: after it, nothing of the command is left to write to the
        # session's files.
        poll = select.poll()
        poll.register(running.first, select.POLLIN)
        poll.poll(1000 * _LAST_WORDS_S)
        os.close(running.first)
    for fd in running.streams:
        os.close(fd)


def _told(text: bytes, name: str) -> int | None:
    """Return a number that bubblewrap has reported, one JSON object a line; None if it has not."""
    for line in text.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict) and isinstance(message.get(name), int):
                return int(message[name])
    return None


def _complaint(ended: _CommandEnd) -> str:
    if ended.overran:
        return f"it took longer than {_FILE_S:.0f} s"
    return ended.err.decode("utf-8", "replace").strip() or f"status {ended.status}"
