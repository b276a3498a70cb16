"""A session: cells of Python that keep state, files, forks, and the way back to the cell before."""

from __future__ import annotations

import asyncio
import contextlib
import math
import posixpath
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from forge_rl.errors import ConfigError
from forge_rl.sandbox.bodies import MOST_HARNESS_TEXT, Body, receive, send, why_ended
from forge_rl.sandbox.images.image import ContainerImage
from forge_rl.sandbox.inside import frames
from forge_rl.sandbox.inside.commands import HOME
from forge_rl.sandbox.limits import MEDIA_TYPES, CellError, Image, Limits, Result, SandboxError, Usage
from forge_rl.sandbox.workspaces.changes import APPLY, LEFT_OUT, Change, Changes, packed, read_changes, without_mounts
from forge_rl.sandbox.workspaces.diffs import diff_text
from forge_rl.system.tasks import TaskGroup

_GRACE_S = 2.0
"""Time beyond a cell's limit in which the session may still interrupt it and keep its state."""
_COMMAND_GRACE_S = 15.0
"""Time beyond a command's limit, in which its processes are killed and end."""
_FILE_S = 60.0
# JSON's longest escape of one byte of output, as "\u0000".
_BYTES_PER_ESCAPE = 6
_TAKEN = ("/proc", "/dev", "/tmp", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", HOME)
"""Places of the system, or of a session's own folders, where a command sees nothing else."""


class PoolSession:
    """Runs cells one at a time; made by `Pool.session`.

        async with pool.session() as session:
            await session.run("x = 6")
            assert (await session.run("x * 7")).value == "42"

    Args:
        body: the started processes.
        limits: limits of the session and its cells.
        fork_body: forks a body, within the pool's bounds.
        release: gives back a body's place in the pool.
        undo: keep the state before each cell for `restore`.
    """

    def __init__(
        self,
        body: Body,
        limits: Limits,
        *,
        fork_body: Callable[[Body, Limits], Awaitable[Body]],
        release: Callable[[], None],
        undo: bool = False,
    ) -> None:
        self.limits = limits
        self._body = body
        self._before: Body | None = None
        self._fork_body = fork_body
        self._release = release
        self._undo = undo
        self._lock = asyncio.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether the session takes another cell; False once it was killed or closed."""
        return not self._closed and self._body.alive

    @property
    def lost(self) -> str:
        """Why the sandbox itself has failed; "" if it has not. A session that its own code ended is not lost."""
        return self._body.host.lost

    async def run(
        self,
        code: str | Sequence[str],
        *,
        wall_s: float | None = None,
        cpu_s: float | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        folder: str = "",
        folders: Mapping[str, str] | None = None,
    ) -> Result:
        """Run a cell of Python and return its result. A cell that fails is a result, not an exception.

        A cell that runs too long is interrupted and the session keeps its state; if it resists, or exceeds another
        limit, the session is killed: `alive` is False then, and only `restore` brings it back.

        In the profile `process`, a cell is a command: files stay for the next, but no process of it does. A command
        that exceeds a limit is killed with all that it has started; the session lives on.

        Args:
            code: statements; the value of a last expression is returned as its `repr`. In the profile `process`, a
                line for the shell, or a program with its arguments.
            wall_s: seconds for this cell instead of `limits.wall_s`.
            cpu_s: CPU seconds for this cell instead of `limits.cpu_s`.
            stdin: a command's standard input.
            env: variables of a command, besides PATH, HOME, TMPDIR, LANG, USER and LOGNAME, or besides its image's
                own; nothing is inherited.
            folder: where a command starts, relative to the session's folder, or to the image's working folder.
            folders: more folders of the session that a command sees, such as {"/app": "app"}: where, and a name, by
                which files stay for commands that see it at the same place or another. Those that are not named are
                out of a command's reach.

        Raises:
            SandboxError: the session has ended before, or the server is gone.
            ConfigError: an argument does not fit the profile.
        """
        wall_s = self.limits.wall_s if wall_s is None else wall_s
        if not (0 < wall_s < math.inf):
            raise SandboxError(f"wall_s is {wall_s}", hint="give a cell a positive number of seconds")
        cpu_s = self.limits.cpu_s if cpu_s is None else cpu_s
        message: dict[str, object] = {"do": "run", "wall_s": wall_s, "cpu_s": cpu_s}
        if self._body.host.profile == "process":
            message |= {"command": _command(code), "env": _variables(env or {}), "folder": folder}
            message["folders"] = check_folders(folders or {})
            if (image := self._body.image) is not None:
                message |= _in_image(image, env or {}, folder, folders)
            data = stdin
        elif isinstance(code, str) and not (stdin or env or folder or folders):
            data = code.encode("utf-8", "replace")
        else:
            raise ConfigError(
                "sessions of Python run code, without stdin, env and folders", hint='use Pool(profile="process")'
            )
        async with self._lock:
            self._check_alive()
            if not self._undo:
                return await self._run(message, data, wall_s)
            # The fork is the way back: a process cannot return to an earlier state, but another can stay in it.
            snapshot, old_snapshot = await self._fork_body(self._body, self.limits), self._before
            self._before = snapshot
            async with TaskGroup() as group:
                if old_snapshot is not None:
                    # Ending takes a while, and happens next to the cell. Each cell can be undone once.
                    group.create_task(self._end(old_snapshot))
                return await self._run(message, data, wall_s)

    async def _run(self, message: dict[str, object], data: bytes, wall_s: float) -> Result:
        body, start_time = self._body, time.perf_counter()
        try:
            grace_s = _COMMAND_GRACE_S if body.host.profile == "process" else _GRACE_S
            # The session's own clocks can be disarmed by its code: this deadline is the one that holds.
            async with self._ending_on_cancel(body), asyncio.timeout(wall_s + grace_s):
                await send(body.channel, message, data)
                answer, image = await receive(
                    body.channel, most_text=self._most_text, most_data=self.limits.transfer_bytes
                )
            return _result(answer, image, self.limits.output_bytes, time.perf_counter() - start_time)
        except TimeoutError:
            error = CellError(name="CellOverrun", message=f"the cell exceeded {wall_s:g} s and did not stop: killed")
        except (EOFError, OSError):
            error = await why_ended(body)
        except frames.FrameError as raised:
            error = CellError(name="BadFrame", message=f"the session broke the protocol ({raised}): killed")
        # Timed out, ended or out of protocol: whatever state the session is in, no later answer could be believed.
        wall = time.perf_counter() - start_time
        body.watched.cause = body.watched.cause or error.message
        body.watched.exited.set()
        await body.end()
        if body.host.lost:
            raise SandboxError(f"the sandbox server is gone: {body.host.lost}", hint="run the cells again elsewhere")
        return Result(error=error, usage=Usage(wall_s=wall))

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, relative to the session's folder. It is written by the session, with its own rights.

        Raises:
            SandboxError: the file is too large or the session cannot write it.
        """
        if len(data) > self.limits.transfer_bytes:
            raise SandboxError(
                f"{path} has {len(data)} bytes", hint=f"Limits:transfer_bytes is {self.limits.transfer_bytes}"
            )
        await self._ask({"do": "put", "path": self._path(path)}, data)

    async def get(self, path: str) -> bytes:
        """Read a file, relative to the session's folder, with the session's own rights.

        Raises:
            SandboxError: the file does not exist, is not regular, or is too large.
        """
        return await self._ask({"do": "get", "path": self._path(path), "most": self.limits.transfer_bytes})

    async def changes(self, *, leave_out: Collection[str] = LEFT_OUT) -> Changes:
        """Return what differs in the workspace from its base, also after the session was killed, until it is closed.

        Read by this process from the file system, without the session's help. Special files have no content.

        Args:
            leave_out: names of files and folders to leave out, in any folder.

        Raises:
            SandboxError: the session has no workspace, or is closed.
        """
        if self._closed or (workspace := self._body.workspace) is None:
            state = "is closed" if self._closed else "has no workspace"
            raise SandboxError(f"the session {state}", hint="open it with pool.session(workspace=FOLDER)")
        async with self._lock:
            changes = await asyncio.to_thread(
                read_changes,
                workspace.bases,
                workspace.changed,
                leave_out=leave_out,
                most_file_bytes=self.limits.transfer_bytes,
                most_bytes=self.limits.scratch_bytes,
                most_changes=self.limits.scratch_files,
            )
        return changes if self._body.image is None else without_mounts(changes)

    async def diff(self, *, leave_out: Collection[str] = LEFT_OUT) -> str:
        """Return what differs in the workspace from its base as a unified diff of at most 1 MiB; see `changes`.

        Binary and special files are named without content.
        """
        return await asyncio.to_thread(diff_text, await self.changes(leave_out=leave_out))

    async def apply(self, changes: Sequence[Change]) -> None:
        """Make another session's changes in this one, which should be a new one with the same base.

        They are made by this session, with its own rights. Special files, and files without content, are left out.

        Raises:
            SandboxError: they do not fit, or something else is where they belong.
        """
        if self._body.image is not None:
            # An image may have neither Python nor a shell: its session's own process makes the changes.
            await self._ask({"do": "apply", "path": "changes", "folder": "/"}, packed(changes))
            return
        runs_python = self._body.host.profile != "process"
        path = f"{'../' + self._body.folder if runs_python else '/tmp'}/.changes-{uuid.uuid4().hex}"
        # By a cell, with the session's own rights and limits. Changes may be too large for one line of code.
        code = APPLY.format(path=path)
        await self.put(path, packed(changes))
        result = await self.run(code if runs_python else [getattr(sys, "_base_executable", ""), "-I", "-c", code])
        if result.error is not None or result.status:
            cause = (
                f"{result.error.name}: {result.error.message}"
                if result.error
                else result.stderr.strip().rpartition("\n")[2]
            )
            raise SandboxError(f"the changes do not apply: {cause[-500:]}")

    async def fork(self) -> PoolSession:
        """Return an independent copy of the session: its variables, and its folder and workspace under other names.

        Threads and programs that the session has started are not copied. Both have the same limits, each its own;
        files count against the same space. The caller closes the copy.

        Raises:
            SandboxError: the pool is full, or the session cannot fork.
        """
        if self._body.image is not None and self._body.host.profile != "process":
            raise SandboxError("a session of Python in an image cannot fork", hint='use Pool(profile="process")')
        async with self._lock:
            self._check_alive()
            body = await self._fork_body(self._body, self.limits)
        return PoolSession(body, self.limits, fork_body=self._fork_body, release=self._release, undo=self._undo)

    async def restore(self) -> None:
        """Go back to the state before the latest cell, also if it has killed the session.

        Raises:
            SandboxError: the session was not opened with `undo=True`, or has no cell to go back from.
        """
        async with self._lock:
            if self._closed or self._before is None or not self._before.alive:
                hint = "open it with pool.session(undo=True)" if not self._undo else "each cell can be undone once"
                raise SandboxError("the session has no earlier state", hint=hint)
            body, self._body, self._before = self._body, self._before, None
            await self._end(body)

    async def close(self) -> None:
        """Kill the session; return when nothing of it is left."""
        if self._closed:
            return
        self._closed = True
        self._body.watched.cause = self._body.watched.cause or "the session was closed"
        await self._drop_before()
        # Without the workspace, its descriptors close, and the session's memory is freed.
        body, self._body = self._body, replace(self._body, workspace=None)
        await self._end(body)

    async def __aenter__(self) -> PoolSession:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.shield(self.close())

    def _path(self, path: str) -> str:
        """Return the path of a file in the session: relative to an image's working folder if it has an image."""
        image = self._body.image
        return path if image is None else posixpath.join("/", image.settings.working_folder, path)

    @property
    def _most_text(self) -> int:
        # stdout, stderr and value, each byte of which may be escaped.
        return MOST_HARNESS_TEXT + 3 * _BYTES_PER_ESCAPE * self.limits.output_bytes

    def _check_alive(self) -> None:
        if self._closed:
            raise SandboxError("the session is closed")
        if not self._body.alive:
            raise SandboxError(
                f"the session has ended: {self._body.watched.cause or 'its process is gone'}",
                hint="restore() it if it was opened with undo=True, or open another",
            )

    async def _drop_before(self) -> None:
        if self._before is not None:
            snapshot, self._before = self._before, None
            await self._end(snapshot)

    async def _end(self, body: Body) -> None:
        try:
            await body.end()
        finally:
            self._release()

    @contextlib.asynccontextmanager
    async def _ending_on_cancel(self, body: Body) -> AsyncIterator[None]:
        """Kill the session if its caller is cancelled: its late answer would be taken for the next request's."""
        try:
            yield
        except asyncio.CancelledError:
            body.watched.cause = body.watched.cause or "its caller was cancelled"
            body.watched.exited.set()
            await asyncio.shield(body.end())
            raise

    async def _ask(self, message: dict[str, object], data: bytes = b"") -> bytes:
        async with self._lock:
            self._check_alive()
            body = self._body
            try:
                async with self._ending_on_cancel(body), asyncio.timeout(_FILE_S):
                    await send(body.channel, message, data)
                    answer, content = await receive(
                        body.channel, most_text=MOST_HARNESS_TEXT, most_data=self.limits.transfer_bytes
                    )
            except (TimeoutError, EOFError, OSError, frames.FrameError) as error:
                # Its channel may be in the middle of a frame: no further answer could be read from it.
                body.watched.cause = body.watched.cause or f"it did not transfer a file ({error})"
                body.watched.exited.set()
                await body.end()
                raise SandboxError(f"the session did not transfer {message['path']}: killed") from None
        if "failed" in answer:
            raise SandboxError(f"the session could not transfer {message['path']}: {str(answer['failed'])[:500]}")
        return content


def _command(code: str | Sequence[str]) -> str | list[str]:
    """Check a line for the shell, or a program with its arguments.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(code, str):
        return code
    argv = list(code)
    if not argv or not all(isinstance(part, str) for part in argv):
        raise ConfigError(f"a command is {argv!r:.80}", hint="give a program and its arguments, all strings")
    return argv


def _in_image(
    image: ContainerImage, env: Mapping[str, str], folder: str, folders: Mapping[str, str] | None
) -> dict[str, object]:
    """Return what a request to run a command in an image says besides the command.

    Raises:
        ConfigError: folders are named; an image has its own.
    """
    if folders:
        raise ConfigError("a session of an image has no further folders", hint="use the image's folders")
    settings = image.settings
    # An image's author may have written a NUL, which no variable can hold.
    variables = {name: value for name, value in {**settings.env, **env}.items() if "\0" not in name + value}
    return {
        "env": _variables(variables),
        "folder": posixpath.normpath(posixpath.join("/", settings.working_folder, folder)),
        "user": settings.user,
    }


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    """Check a command's variables.

    Raises:
        ConfigError: a name or value cannot be one.
    """
    for name, value in env.items():
        if not name or "=" in name or not isinstance(value, str):
            raise ConfigError(f"a variable is {name!r:.80}", hint="names have no =, and values are strings")
    return dict(env)


def check_folders(folders: Mapping[str, str]) -> dict[str, str]:
    """Check and return the paths at which a command sees further folders of its session, with their names.

    Raises:
        ConfigError: a place is the system's, or a name is not one.
    """
    for place, name in folders.items():
        is_reserved = any(place == folder or place.startswith(f"{folder}/") for folder in _TAKEN)
        if not place.startswith("/") or place != posixpath.normpath(place) or place in ("/", "//") or is_reserved:
            raise ConfigError(f"a folder is to be seen at {place!r:.80}", hint="choose another absolute path: /app")
        if not name.isidentifier():
            raise ConfigError(f"the name of a folder is {name!r:.80}", hint="use letters, digits and _")
    return dict(folders)


def _result(message: dict[str, object], image: bytes, max_chars: int, wall_s: float) -> Result:
    """Check a message of a session, which is not trusted in any part, and make a result of it.

    Raises:
        FrameError: a part is missing, or of another type or size.
    """
    error = message.get("error")
    if error is not None and not (
        isinstance(error, list) and len(error) == 3 and all(isinstance(text, str) for text in error)
    ):
        raise frames.FrameError("its error is not three strings")
    texts = {}
    for name in ("stdout", "stderr", "value"):
        text = message.get(name)
        if not (isinstance(text, str) or (text is None and name == "value")):
            raise frames.FrameError(f"its {name} is not a string")
        texts[name] = None if text is None else text[:max_chars]
    numbers = []
    for name in ("cpu_s", "memory_bytes"):
        number = message.get(name)
        # NaN fails both comparisons, infinity the second.
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e18:
            raise frames.FrameError(f"its {name} is not a size")
        numbers.append(number)
    kind = message.get("image")
    # The type is believed only if the bytes begin like it: a session must not pass HTML off as a PNG.
    if image and not (isinstance(kind, str) and kind in MEDIA_TYPES and image.startswith(MEDIA_TYPES[kind])):
        raise frames.FrameError("its image is not of its type")
    status = message.get("status")
    if status is not None and (isinstance(status, bool) or not isinstance(status, int) or not 0 <= status < 256):
        raise frames.FrameError("its status is not a byte")
    return Result(
        image=Image(media_type=str(kind), data=image) if image else None,
        stdout=texts["stdout"] or "",
        stderr=texts["stderr"] or "",
        value=texts["value"],
        error=None if error is None else CellError(name=error[0][:200], message=error[1], traceback=error[2]),
        usage=Usage(wall_s=wall_s, cpu_s=float(numbers[0]), memory_bytes=int(numbers[1])),
        cut=message.get("cut") is True,
        status=status,
    )
