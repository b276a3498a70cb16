"""Runs the cells of one session, inside of it. Imports nothing of this library but its neighbours.

This code shares its process with what the model wrote: nothing outside may trust it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ast
import builtins
import contextlib
import fcntl
import importlib
import io
import linecache
import os
import resource
import signal
import socket
import stat
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from forge_rl.sandbox.inside import dialing, frames, images, kernel

_MOST_TRACEBACK = 8192
_MOST_GIVEN = 8
_NO_MATTER = ("_tkinter", "readline", "nis", "ossaudiodev", "audioop", "spwd", "_crypt")
"""Extensions that expect a terminal or a window, or that Python is about to drop."""
_TOOK_TOO_LONG = {signal.SIGALRM: "wall-clock", signal.SIGPROF: "CPU"}


class CellOverrun(BaseException):
    """The cell ran longer than it may; its effects so far stay."""


class _OutputFile(io.RawIOBase):
    """A stream into a file in memory, which drops what exceeds a limit.

    It replaces a descriptor, so that what programs of a cell print is in the same file.
    """

    def __init__(self, fd: int, max_bytes: int) -> None:
        file = os.memfd_create(f"output {fd}", 0)
        os.dup2(file, fd)
        os.close(file)
        # Programs share the file, and `take` empties it: each write must go to its current end.
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        self._fd, self._max_bytes, self._left = fd, max_bytes, max_bytes
        self.text = io.TextIOWrapper(self, encoding="utf-8", errors="replace", write_through=True)  # type: ignore[type-var]

    def write(self, data: Any) -> int:
        if self._left > 0:
            chunk = bytes(data[: self._left + 1])  # one byte beyond the limit shows that output was cut
            self._left -= len(chunk)
            while chunk:
                chunk = chunk[os.write(self._fd, chunk) :]
        return len(data)

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def take(self) -> tuple[str, bool]:
        """Return the output written since the last call, and whether it was cut."""
        data = os.pread(self._fd, self._max_bytes + 1, 0)
        os.ftruncate(self._fd, 0)
        self._left = self._max_bytes
        return data[: self._max_bytes].decode("utf-8", "replace"), len(data) > self._max_bytes


class Cells:
    """State and streams of a session; `serve` answers its owner until the channel closes."""

    def __init__(self, channel: socket.socket, output_bytes: int, image_bytes: int, workspace: str = "") -> None:
        self.channel = channel
        self.has_image = False
        """Whether an image is this process's root."""
        self.home = os.environ.get("HOME", "")
        self.workspace = workspace
        self.output_bytes = output_bytes
        self.image_bytes = image_bytes
        # Cells run in a module of their own, so that this file's names are not theirs.
        self.module = types.ModuleType("__main__")
        self.module.__dict__["__builtins__"] = builtins
        self.count = 0
        self.running = False
        self.pid = os.getpid()

    def serve(self) -> NoReturn:
        # pickle and inspect look up what cells define in `__main__`.
        sys.modules["__main__"] = self.module
        self._open_streams()
        for number in _TOOK_TOO_LONG:
            _signal.signal(number, self._overrun)
        answers = {"run": self._run, "put": self._put, "get": self._get, "fork": self._fork, "network": self._network}
        serve(self, answers | ({"image": self._begin_in_image, "apply": self._apply} if self.has_image else {}))

    def _begin_in_image(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        """Move to an image's working folder, and take over its variables."""
        folder = str(message["folder"])
        # Hostile variables reach only this confined process and its programs: the loader and Python have read theirs.
        os.environ.update({"PATH": images.PATH, "HOME": "/", "TMPDIR": "/tmp", **message["env"]})
        try:
            # An image may lack both.
            for path in ("/tmp", folder):
                os.makedirs(path, exist_ok=True)
            enter_workspace(folder)
        except OSError as error:
            return frames.encode({"failed": str(error)})
        return frames.encode({})

    def _apply(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        try:
            images.Root("/").apply(data, str(message["folder"]))
        except (OSError, ValueError) as error:
            return frames.encode({"failed": str(error)})
        return frames.encode({})

    def _open_streams(self) -> None:
        """Give both output streams a file of their own, which the session's memory limit bounds."""
        self.out, self.err = _OutputFile(1, self.output_bytes), _OutputFile(2, self.output_bytes)
        sys.stdout, sys.stderr = self.out.text, self.err.text

    def _overrun(self, number: int, frame: object) -> None:
        # A signal that arrives between cells, or while an answer is made, must not break the session's own code.
        if self.running:
            self.running = False
            raise CellOverrun(f"the cell exceeded its {_TOOK_TOO_LONG[signal.Signals(number)]} limit")

    def _run(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        # Tracebacks show lines of cells from linecache, where each cell has a file name of its own.
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(data), None, data.decode("utf-8", "replace").splitlines(True), name)
        value: str | None = None
        image = "", b""
        error: list[str] | None = None
        start_cpu_s = _cpu_s()
        self._start_clocks(float(message["wall_s"]), message["cpu_s"])
        try:
            try:
                self.running = True
                value, image = self._execute(data.decode("utf-8"), name)
            except BaseException as raised:  # SystemExit and KeyboardInterrupt too: the session survives them
                self.running = False
                error = _described(raised)
            finally:
                self.running = False
        except CellOverrun as raised:  # the time ran out while the error was described
            error = ["CellOverrun", str(raised), ""]
        # The cell has called os.fork, and this is the child: two processes would answer on one channel.
        if os.getpid() != self.pid:
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for stream in (sys.stdout, sys.stderr):  # the cell may have put others there
            with contextlib.suppress(Exception):
                stream.flush()
        sys.stdout, sys.stderr = self.out.text, self.err.text
        (out, out_cut), (err, err_cut) = self.out.take(), self.err.take()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        if image_cut := len(image[1]) > self.image_bytes:
            image = "", b""
        return frames.encode(
            {
                "stdout": out,
                "stderr": err,
                "cut": out_cut or err_cut or image_cut,
                "value": value,
                "image": image[0],
                "error": error,
                "cpu_s": _cpu_s() - start_cpu_s,
                "memory_bytes": usage.ru_maxrss * 1024,
            },
            image[1],
        )

    def _start_clocks(self, wall_s: float, cpu_s: float | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = hard  # without a limit, the one of an earlier cell ends
        if cpu_s is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            # SIGPROF only reaches code that returns to the interpreter. For other code, the kernel's own limit ends the
            # process a second later.
            soft = int(_cpu_s() + cpu_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))

    def _execute(self, source: str, name: str) -> tuple[str | None, tuple[str, bytes]]:
        """Run statements; return the last one's value if it is an expression: its `repr`, and its bytes as an image."""
        tree = ast.parse(source, name)
        space = self.module.__dict__
        last_statement = tree.body[-1] if tree.body else None
        if not isinstance(last_statement, ast.Expr):
            exec(compile(tree, name, "exec"), space)
            return None, ("", b"")
        exec(compile(ast.Module(tree.body[:-1], []), name, "exec"), space)
        value = eval(compile(ast.Expression(last_statement.value), name, "eval"), space)
        if value is None:
            return None, ("", b"")
        space["_"] = value
        return str(repr(value))[: self.output_bytes], _image(value)

    def _put(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        """Write a file with this session's own rights: a link leads nowhere that its code could not go."""
        path = str(message["path"])
        try:
            if folder := os.path.dirname(path):
                os.makedirs(folder, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            return frames.encode({"failed": str(error)})
        return frames.encode({})

    def _get(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        try:
            # A pipe that nobody writes to would block a plain open, and so the owner's transfer.
            fd = os.open(str(message["path"]), os.O_RDONLY | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return frames.encode({"failed": "not a regular file"})
            max_bytes = int(message["most"])
            with open(fd, "rb") as file:
                content = file.read(max_bytes + 1)
        except (OSError, ValueError) as error:
            return frames.encode({"failed": str(error)})
        if len(content) > max_bytes:
            return frames.encode({"failed": f"more than {max_bytes} bytes"})
        return frames.encode({}, content)

    def _network(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        """Take the channel by which this session reaches its named addresses."""
        dialing.give(descriptors[0], message["names"])
        return frames.encode({})

    def _fork(self, message: dict[str, Any], data: bytes, descriptors: list[int]) -> bytes:
        def settle(server_fds: list[int]) -> None:
            self.pid = os.getpid()
            # Without streams of its own, the fork would write into the files of its session's output.
            self._open_streams()
            fresh_random()

        return become_two(self, message, descriptors, settle)


class ChannelServer(Protocol):
    """Answers a session's owner on a channel: `Cells`, or `commands.Commands`."""

    channel: socket.socket
    home: str
    """The session's own folder."""
    workspace: str
    """Its workspace; "" for none."""


Answer = Callable[[dict[str, Any], bytes, list[int]], bytes]


def serve(serving: ChannelServer, answers: Mapping[str, Answer]) -> NoReturn:
    """Report that the session is ready, and answer its owner until the channel closes."""
    serving.channel.sendall(frames.encode({"ready": True}))
    try:
        while True:
            message, data, descriptors = frames.receive(serving.channel)
            answer = answers[str(message["do"])](message, data, descriptors)
            serving.channel.sendall(answer)
    except (EOFError, OSError):
        os._exit(0)


def become_two(
    serving: ChannelServer, message: dict[str, Any], descriptors: list[int], settle: Callable[[list[int]], None]
) -> bytes:
    """Fork a session; the child answers on a channel of its own, in cgroups and a folder of its own.

    Args:
        settle: called in the child with the descriptors that the server gave it.
    """
    try:
        # A sibling, whose parent is the server or the init: it outlives its session, and is reaped there.
        pid = kernel.fork_sibling()
    except OSError as error:
        return frames.encode({"failed": str(error)})
    if pid:
        for fd in descriptors:
            os.close(fd)
        return frames.encode({})
    for fd in descriptors:
        os.set_inheritable(fd, False)
    channel, birth = descriptors
    # The fork gets a network channel of its own later; its session's answers must not reach it.
    dialing.forget()
    serving.channel.close()
    serving.channel = socket.socket(fileno=channel)
    try:
        with socket.socket(fileno=birth) as server:  # learns from the kernel who this is, and moves it
            server.send(b"?")
            # Nothing is copied before this answer, so that the copy counts against the fork's own limits.
            let_in, server_fds, _, _ = socket.recv_fds(server, 1, _MOST_GIVEN)
            for fd in server_fds:
                os.set_inheritable(fd, False)
            if not let_in:
                raise OSError("the server did not let the fork in")
        _move(serving, str(message["folder"]), str(message["workspace"]), is_copied=bool(message["copies"]))
        settle(server_fds)
    except OSError as error:
        serving.channel.sendall(frames.encode({"failed": str(error)}))
        os._exit(1)
    return frames.encode({"ready": True})


def _move(serving: ChannelServer, folder: str, workspace: str, *, is_copied: bool) -> None:
    """Move this process to copies of the session's folder and workspace, and to the same current folder in there."""
    scratch, current_folder = os.path.dirname(serving.home), _current_folder(serving.workspace or serving.home)
    new_paths = {serving.home: os.path.join(scratch, folder)}
    _copy_folder(serving.home, new_paths[serving.home])
    enter_folder(new_paths[serving.home])
    if serving.workspace:
        new_paths[serving.workspace] = os.path.join(scratch, workspace)
        if is_copied:
            _copy_folder(serving.workspace, new_paths[serving.workspace])
        os.environ["PWD"] = new_paths[serving.workspace]
        _import_from(serving.workspace, new_paths[serving.workspace])
    for old_path, new_path in new_paths.items():
        if current_folder == old_path or current_folder.startswith(f"{old_path}/"):
            with contextlib.suppress(OSError):  # it was deleted
                os.chdir(new_path)
                os.chdir(new_path + current_folder[len(old_path) :])
    serving.home, serving.workspace = new_paths[serving.home], new_paths.get(serving.workspace, "")


def _current_folder(otherwise: str) -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return otherwise


def _import_from(old_path: str, new_path: str) -> None:
    """Import further modules from another folder, including submodules of packages that are already imported."""
    sys.path[:] = [
        new_path + path[len(old_path) :] if f"{path}/".startswith(f"{old_path}/") else path for path in sys.path
    ]
    for module in list(sys.modules.values()):
        paths = getattr(module, "__path__", None)
        # Cells can put any object into sys.modules: only a plain list is written to.
        if type(paths) is list:
            paths[:] = [new_path + path[len(old_path) :] if path.startswith(f"{old_path}/") else path for path in paths]


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def _described(raised: BaseException) -> list[str]:
    """Return the class, message and traceback of an error, which may be the cell's own class and raise itself."""
    try:
        frame = raised.__traceback__
        while frame is not None and not frame.tb_frame.f_code.co_filename.startswith("<cell "):
            frame = frame.tb_next
        lines = traceback.format_exception(type(raised), raised, frame)
        if isinstance(raised, CellOverrun):  # leave out the signal handler's own frame
            lines = [*lines[:-2], lines[-1]]
        return [type(raised).__name__, str(raised)[:_MOST_TRACEBACK], "".join(lines)[-_MOST_TRACEBACK:]]
    except Exception as second:
        return [type(raised).__name__, f"its description raised {type(second).__name__}", ""]


def _image(value: object) -> tuple[str, bytes]:
    """Return the media type and bytes of a value that is an image or can be shown as one; "" and b"" of any other."""
    if isinstance(value, bytes):
        starts = (("image/png", b"\x89PNG\r\n\x1a\n"), ("image/jpeg", b"\xff\xd8\xff"))
        return next(((kind, value) for kind, start in starts if value.startswith(start)), ("", b""))
    # By name: importing matplotlib to compare classes would cost each session that never draws.
    kind = type(value)
    if kind.__module__ == "matplotlib.figure" and kind.__name__ == "Figure":
        file = io.BytesIO()
        value.savefig(file, format="png")  # type: ignore[attr-defined]
        return "image/png", file.getvalue()
    for name, media_type in (("_repr_png_", "image/png"), ("_repr_jpeg_", "image/jpeg")):
        if hasattr(kind, name):
            image_bytes = getattr(value, name)()
            if isinstance(image_bytes, bytes):
                return media_type, image_bytes
    return "", b""


def enter_folder(folder: str) -> None:
    """Make a folder this session's own, also for its temporary files."""
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = os.environ["PWD"] = folder
    if (tempfile := sys.modules.get("tempfile")) is not None:
        # It keeps the folder that it found first, which in a fork is the parent session's.
        tempfile.tempdir = None  # type: ignore[attr-defined]


def enter_workspace(folder: str) -> None:
    """Move to a workspace, whose modules can be imported from here on."""
    os.chdir(folder)
    os.environ["PWD"] = folder
    sys.path.insert(0, folder)


def enter_image(folders: Mapping[str, str]) -> None:
    """Make imports work inside of an image's root: modules of this machine's Python have other paths there.

    Args:
        folders: path of each folder of modules in the image's root, by its path outside.
    """
    for old_path, new_path in folders.items():
        _import_from(old_path, new_path)
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if type(path) is str and path.startswith(f"{old_path}/"):
                # Tracebacks and inspect read sources by this name.
                module.__file__ = new_path + path[len(old_path) :]
    sys.path[:] = [path for path in sys.path if path.startswith(tuple(folders.values()))]
    # Its finders have cached listings of folders that this root does not have.
    sys.path_importer_cache.clear()
    sys.executable = ""  # programs are the image's
    enter_folder("/")


def load_extensions() -> None:
    """Import the standard library's C extensions now, as their libraries would be looked up in the image later."""
    folder = next((path for path in sys.path if path.endswith("lib-dynload")), "")
    for name in sorted({file.partition(".")[0] for file in os.listdir(folder)} if folder else ()):
        if not (name.startswith("xx") or "test" in name or name in _NO_MATTER):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _copy_folder(source: str, target: str) -> None:
    """Copy files, folders and links with modes and times. Special files, such as pipes, are not copied."""
    os.makedirs(target, 0o700, exist_ok=True)
    with _readable(source, 0o500) as folder_status, os.scandir(source) as entries:
        for entry in entries:
            copy = os.path.join(target, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), copy)
            elif entry.is_dir():
                _copy_folder(entry.path, copy)
            elif entry.is_file():
                with (
                    _readable(entry.path, 0o400) as file_status,
                    open(entry.path, "rb") as file,
                    open(copy, "wb") as target_file,
                ):
                    while part := file.read(1 << 20):
                        target_file.write(part)
                _give_mode(copy, file_status)
    _give_mode(target, folder_status)


@contextlib.contextmanager
def _readable(path: str, rights: int) -> Iterator[os.stat_result]:
    """Give the owner of a file these rights while the body runs, as the session's code may have removed them."""
    status = os.stat(path)
    mode = stat.S_IMODE(status.st_mode)
    if mode & rights != rights:
        os.chmod(path, mode | rights)
    try:
        yield status
    finally:
        if mode & rights != rights:
            os.chmod(path, mode)


def _give_mode(path: str, status: os.stat_result) -> None:
    os.chmod(path, stat.S_IMODE(status.st_mode))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def rehearse() -> None:
    """Run some cells in the process that sessions are forked from, so that they share what a first use writes."""
    ours, theirs = socket.socketpair()
    saved_fds = [os.dup(fd) for fd in (1, 2)]
    streams = sys.stdout, sys.stderr
    cells = Cells(ours, 1024, 0)
    cells._open_streams()
    for _ in range(16):  # the interpreter specializes functions after several calls, by writing into them
        for code in (b"x = [1]", b"print(x)", b"x[2]"):
            cells._run({"wall_s": 60, "cpu_s": None}, code, [])
    sys.stdout, sys.stderr = streams
    for fd, original in zip((1, 2), saved_fds, strict=True):
        os.dup2(original, fd)
        os.close(original)
    # The first cell of a session must not show a rehearsed line.
    linecache.clearcache()
    ours.close()
    theirs.close()


def fresh_random() -> None:
    """Give this process random state of its own, as Python's own module does at each fork."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
