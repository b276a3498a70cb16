"""The owner's side of a session's processes: how they start, fork and end, and frames to and from them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge_rl.sandbox.host import Host, SessionStatus, readable, writable
from forge_rl.sandbox.images.image import ContainerImage
from forge_rl.sandbox.inside import frames, kernel
from forge_rl.sandbox.inside.overlays import fork_name
from forge_rl.sandbox.limits import CellError, Limits, SandboxError
from forge_rl.sandbox.network import SessionNetwork
from forge_rl.sandbox.workspaces.changes import FolderDescriptor

_READY_S, _FORK_S, _CAUSE_S = 60.0, 30.0, 2.0
_WORKSPACE = "workspace"
"""Start of the server's message about a workspace; the rest is the reason for copying it, if it is a copy."""
MOST_HARNESS_TEXT = 1 << 18
"""Longest text of a frame, besides what a cell prints."""


@dataclass(frozen=True, eq=False)
class OpenWorkspace:
    """A folder, or the root of an image, that a session sees as its own."""

    bases: tuple[str, ...]
    """The folder; or the layers of the image, the lowest first."""
    changed: FolderDescriptor
    copied: str
    """Why the session works in a copy; "" if it has an overlay, which costs nothing until something changes."""


@dataclass(frozen=True, eq=False)
class Body:
    """The processes of a session at present, reached by a channel."""

    name: str
    host: Host
    channel: socket.socket
    watched: SessionStatus
    workspace: OpenWorkspace | None = None
    network: SessionNetwork | None = None
    image: ContainerImage | None = None
    """The image that its commands see as their root, or None."""
    folder: str = "0"
    """Name of its own folder, next to its workspace."""

    @property
    def alive(self) -> bool:
        """Whether it still answers, as far as is known."""
        return not self.watched.exited.is_set() and self.channel.fileno() >= 0

    async def end(self) -> None:
        """Kill it; return when nothing of it is left. Whoever waits for its answer learns that it has ended."""
        with contextlib.suppress(OSError):
            # Ends a wait for an answer in another task, which closing alone would not.
            self.channel.shutdown(socket.SHUT_RDWR)
        try:
            if self.network is not None:
                await self.network.close()
            await self.host.end(self.name)
            await asyncio.sleep(0)  # lets waiters see the shutdown, as the event loop reports no closed sockets
        finally:
            self.channel.close()


async def start_body(name: str, host: Host, limits: Limits, *workspace: int, layers: Sequence[str] = ()) -> Body:
    """Start a session on a server.

    Args:
        workspace, layers: as for `Host.begin`.

    Raises:
        SandboxError: the machine is full, or the server is gone.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with theirs:
            body = Body(name, host, ours, await host.begin(name, limits, theirs, *workspace, layers=layers))
    except BaseException:
        ours.close()
        raise
    await _ready(body, _READY_S)
    return body


async def start_body_in(
    name: str, host: Host, limits: Limits, folder: str | ContainerImage, layers: Sequence[str] = ()
) -> Body:
    """Start a session on a server with a folder as its workspace, or an image as the root of its commands.

    Args:
        layers: layers of the image, as for `Host.begin`.

    Raises:
        SandboxError: the folder does not exist, the machine is full or cannot mount images, or the server is gone.
    """
    image = folder if isinstance(folder, ContainerImage) else None
    bases = tuple(map(str, image.layers)) if image else (str(folder),)
    base = [] if image else [_detached(str(folder))]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        try:
            with theirs:
                body = await start_body(name, host, limits, theirs.fileno(), *base, layers=layers)
        finally:
            for fd in base:
                os.close(fd)
        try:
            reason, changes = _given_workspace(ours)  # sent before the session was ready
        except BaseException:
            await asyncio.shield(body.end())
            raise
    changed = FolderDescriptor(changes, is_overlay=not reason)
    body = replace(body, workspace=OpenWorkspace(bases, changed, reason), image=image)
    if image is not None and host.profile != "process":
        await _begin_in(image, body)
    return body


async def _begin_in(image: ContainerImage, body: Body) -> None:
    """Have a session's Python begin in an image's working folder, with its variables.

    Raises:
        SandboxError: the image has no such folder, and none can be made.
    """
    settings = image.settings
    folder = posixpath.normpath(posixpath.join("/", settings.working_folder))
    # Names and values that no environment can hold are the image's mistake, not a reason to refuse it.
    env = {name: value for name, value in settings.env.items() if name and "=" not in name and "\0" not in name + value}
    try:
        async with asyncio.timeout(_FORK_S):
            await send(body.channel, {"do": "image", "env": env, "folder": folder})
            answer, _ = await receive(body.channel, most_text=MOST_HARNESS_TEXT, most_data=0)
    except (TimeoutError, EOFError, OSError, frames.FrameError) as error:
        answer = {"failed": f"it broke the protocol ({error})"}
    except BaseException:
        await asyncio.shield(body.end())
        raise
    if "failed" in answer:
        await body.end()
        raise SandboxError(
            f"a session of the image {image.reference} cannot work in {folder}: {str(answer['failed'])[:500]}"
        )


def _given_workspace(channel: socket.socket) -> tuple[str, int]:
    """Return why the server copied a workspace, "" if it did not, and a descriptor of the folder with the changes.

    Raises:
        SandboxError: the server could not make the workspace.
    """
    channel.setblocking(False)
    message, fds, _, _ = socket.recv_fds(channel, 4096, 1)
    text = message.decode("utf-8", "replace")
    # The server sent a descriptor, which the kernel dropped: this process has no room for another.
    if not fds and text.startswith(_WORKSPACE):
        raise SandboxError("too many files are open", hint="raise `ulimit -n`, or open fewer sessions")
    if not fds:
        raise SandboxError(
            f"the workspace could not be copied: {text or 'the machine is full'}", hint="raise its Limits"
        )
    return text.removeprefix(_WORKSPACE).strip(), fds[0]


def _detached(folder: str) -> int:
    if not os.path.isdir(folder):
        raise SandboxError(f"{folder} is not a folder", hint="a workspace is a folder")
    try:
        return kernel.detached(folder)
    except OSError:  # no root, or an old kernel: each session gets a copy
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


async def _ready(body: Body, limit_s: float) -> None:
    """Wait for a body's first frame; end the body if it does not come.

    Raises:
        SandboxError: the session did not start; says why.
    """
    try:
        async with asyncio.timeout(limit_s):
            hello, _ = await receive(body.channel, most_text=MOST_HARNESS_TEXT, most_data=0)
        if "ready" in hello:
            return
        cause = str(hello.get("failed") or body.watched.cause or "it spoke out of turn")
    except (TimeoutError, EOFError, OSError, frames.FrameError) as error:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CAUSE_S):
                await body.watched.exited.wait()
        cause = body.watched.cause or str(error) or f"no answer within {limit_s:.0f} s"
    except BaseException:
        await asyncio.shield(body.end())
        raise
    await body.end()
    raise SandboxError(f"a session did not start: {cause}", hint="the machine is full, or Limits are too tight")


async def fork_body(name: str, parent: Body, limits: Limits) -> Body:
    """Fork the process of a session, on whose channel no request may be pending.

    Raises:
        SandboxError: the machine is full or the session refuses; it continues unless it has broken the protocol.
    """
    # Three parties: the server makes cgroups and workspace, the session forks, and the fork reports to the server.
    our_birth, birth = frames.birth_channel()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        body = await _prepared(Body(name, parent.host, ours, SessionStatus(), folder=name), parent, limits, our_birth)
    except BaseException:
        for endpoint in (ours, theirs, birth):
            endpoint.close()
        raise
    try:
        async with asyncio.timeout(_FORK_S):
            copies = parent.workspace is not None and bool(parent.workspace.copied)
            message: dict[str, object] = {"do": "fork", "folder": name, "workspace": fork_name(name), "copies": copies}
            await send(parent.channel, message, fds=[theirs.fileno(), birth.fileno()])
            answer, _ = await receive(parent.channel, most_text=MOST_HARNESS_TEXT, most_data=0)
        failure = answer.get("failed")
    except (TimeoutError, EOFError, OSError, frames.FrameError) as error:
        # No later answer of such a session could be matched with its request.
        failure = f"it broke the protocol ({error}) and was killed"
        parent.watched.cause = failure
        parent.watched.exited.set()
        await parent.end()
    except BaseException:
        await asyncio.shield(asyncio.gather(parent.end(), body.end()))
        raise
    finally:
        theirs.close()
        birth.close()
    if failure is not None:
        await body.end()
        raise SandboxError(f"the session could not fork: {str(failure)[:500]}", hint="Limits:processes may be too low")
    await _ready(body, _FORK_S)
    return body if parent.network is None else await with_network(body, parent.network.addresses)


async def _prepared(fork: Body, parent: Body, limits: Limits, birth: socket.socket) -> Body:
    """Have the server make a fork's cgroups and workspace before its process starts; return the fork with them.

    Raises:
        SandboxError: the machine is full, or the server is gone.
    """
    if (workspace := parent.workspace) is None:
        return replace(fork, watched=await parent.host.prepare_fork(fork.name, parent.name, limits, birth))
    base = [] if parent.image else [_detached(*workspace.bases)]
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine:
        try:
            with theirs:
                descriptors = (theirs.fileno(), workspace.changed.fd, *base)
                is_overlay = workspace.changed.is_overlay
                prepared = parent.host.prepare_fork(
                    fork.name, parent.name, limits, birth, *descriptors, is_overlay=is_overlay
                )
                fork = replace(fork, watched=await prepared, image=parent.image)
        finally:
            for fd in base:
                os.close(fd)
        try:
            async with asyncio.timeout(_FORK_S):
                await readable(asyncio.get_running_loop(), mine)
            _, changes = _given_workspace(mine)
        except BaseException as error:
            await asyncio.shield(fork.end())
            if isinstance(error, TimeoutError):
                raise SandboxError(f"a workspace was not copied within {_FORK_S:.0f} s") from None
            raise
    return replace(fork, workspace=replace(workspace, changed=FolderDescriptor(changes, is_overlay=is_overlay)))


async def with_network(body: Body, addresses: frozenset[str]) -> Body:
    """Give a session access to named addresses; no request of it may be pending.

    Raises:
        SandboxError: it did not take its channel, and was killed.
    """
    network = SessionNetwork(addresses)
    new_body = replace(body, network=network)
    try:
        with network.theirs as theirs:
            async with asyncio.timeout(_FORK_S):
                message: dict[str, object] = {"do": "network", "names": sorted(addresses)}
                await send(body.channel, message, fds=[theirs.fileno()])
                answer, _ = await receive(body.channel, most_text=MOST_HARNESS_TEXT, most_data=0)
        if "failed" in answer:
            raise OSError(str(answer["failed"])[:500])
    except (TimeoutError, EOFError, OSError, frames.FrameError) as error:
        await new_body.end()
        raise SandboxError(f"a session did not take its network: {error}") from None
    except BaseException:
        await asyncio.shield(new_body.end())
        raise
    return new_body


async def why_ended(body: Body) -> CellError:
    """Return why a session ended in the middle of a cell, as an error of that cell."""
    # The channel closes a moment before the server reports the end and its cause.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CAUSE_S):
            await body.watched.exited.wait()
    if body.watched.out_of_memory:
        return CellError(name="OutOfMemory", message="the session exceeded its memory limit: killed")
    return CellError(
        name="Ended", message=f"the cell ended its session: {body.watched.cause or 'it closed its channel'}"
    )


async def send(
    channel: socket.socket, message: dict[str, object], data: bytes = b"", fds: list[int] | None = None
) -> None:
    loop = asyncio.get_running_loop()
    frame = memoryview(frames.encode(message, data))
    if fds:
        while True:
            try:
                # asyncio sends no descriptors: they go with the first bytes, and the rest follows as usual.
                frame = frame[socket.send_fds(channel, [frame], fds) :]
                break
            except BlockingIOError:
                await writable(loop, channel)
    await loop.sock_sendall(channel, frame)


async def receive(channel: socket.socket, *, most_text: int, most_data: int) -> tuple[dict[str, object], bytes]:
    """Wait for a frame from a session, which may be hostile.

    Raises:
        EOFError: the session has closed its channel.
        frames.FrameError: the frame exceeds a limit or is not a JSON object.
    """
    head = await _exactly(channel, frames.HEAD.size)
    # Checked before anything is read or allocated: a hostile head may claim 8 GiB.
    text, data = frames.sizes(head, most_text=most_text, most_data=most_data)
    return frames.decode(await _exactly(channel, text)), await _exactly(channel, data)


async def _exactly(channel: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    parts = bytearray()
    while len(parts) < size:
        part = await loop.sock_recv(channel, min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("it closed its channel")
        parts += part
    return bytes(parts)
