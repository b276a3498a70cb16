"""The owner's end of one fork server: starts it, passes requests on, and cleans up after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forge_rl.sandbox.inside import cgroups
from forge_rl.sandbox.inside.server import missing_layers
from forge_rl.sandbox.limits import Limits, SandboxError

_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = """import sys
sys.path.insert(0, sys.argv[1])
from forge_rl.sandbox.inside.server import main
main(*map(int, sys.argv[2:]))"""
_MOST_MESSAGE = 1 << 16
_START_S, _END_S = 60.0, 20.0


@dataclass(eq=False)
class SessionStatus:
    """The server's reports about a session."""

    exited: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its first process has ended, or it failed to start."""
    cause: str = ""
    out_of_memory: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when nothing of it is left."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings that a fork server is started with; see `Pool`."""

    profile: str
    packages: Sequence[str]
    preload: Sequence[str]
    without: Sequence[str]
    memory_bytes: int
    """Memory of all its sessions together."""
    processes: int
    """Processes and threads of all its sessions together."""
    images: str = ""
    """Folder with the layers of images; "" for none."""
    copies_images: bool = False
    """Give each session a copy of its image, as where the kernel has no overlay for it; for tests."""


class Host:
    """A running fork server. `await Host.start(...)`, then `close`."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, lifeline: int, tree: str) -> None:
        self.process = process
        self.sessions: dict[str, SessionStatus] = {}
        self.lost = ""
        """Why the server is gone; "" while it serves."""
        self.missing: dict[str, str] = {}
        self.profile = ""
        self._channel = channel
        self._lifeline = lifeline
        self.tree = tree
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    @classmethod
    async def start(cls, settings: ServerSettings) -> Host:
        """Start a fork server from a clean interpreter.

        Raises:
            SandboxError: this machine lacks a layer that `settings.without` does not name, or the server failed.
        """
        missing = check_layers(settings.profile, settings.without)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        # Closed by the kernel however this process ends: the keeper then ends the server and removes its cgroups.
        lifeline_reader, lifeline = os.pipe()
        # Not the environment's interpreter: its packages are the owner's, and a session sees only what it is given.
        python = getattr(sys, "_base_executable", None) or sys.executable
        try:
            process = subprocess.Popen(  # noqa: ASYNC220  a millisecond, and no event loop watches it
                [python, "-s", "-P", "-S", "-c", _PROGRAM, _ROOT, str(theirs.fileno()), str(lifeline_reader)],
                pass_fds=[theirs.fileno(), lifeline_reader],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # A fixed order of sets, so that another server repeats a session's cells exactly.
                env={"LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONHASHSEED": "0"},
                start_new_session=True,  # Ctrl-C is the owner's
            )
        except OSError as error:
            os.close(lifeline)
            ours.close()
            raise SandboxError(f"the sandbox server did not start: {error}") from None
        finally:
            theirs.close()
            os.close(lifeline_reader)
        host = cls(process, ours, lifeline, cgroups.name_of(process.pid))
        host.profile = settings.profile
        config = {**asdict(settings), "missing": missing, "root": _ROOT}
        try:
            async with asyncio.timeout(_START_S):
                await host._send(config)
                answer = json.loads(await host._loop.sock_recv(ours, _MOST_MESSAGE) or b"{}")
        except TimeoutError:
            answer = {"refused": f"it did not answer within {_START_S:.0f} s"}
        except (OSError, ValueError) as error:
            answer = {"refused": str(error)}
        except BaseException:
            await asyncio.shield(host.close())
            raise
        if "serving" not in answer:
            await host.close()
            cause = answer.get("refused", "it ended without a word")
            raise SandboxError(f"the sandbox server did not start: {cause}")
        host.missing = missing
        host._loop.add_reader(ours, host._receive)
        return host

    async def begin(
        self, name: str, limits: Limits, control: socket.socket, *workspace: int, layers: Sequence[str] = ()
    ) -> SessionStatus:
        """Ask for a session that answers on a channel; its descriptor, and the others, may be closed afterwards.

        Args:
            workspace: descriptors of a channel by which the server sends the folder of changes, and of the base folder,
                from `kernel.detached`. None for a session without a workspace, only the channel for an image.
            layers: paths of its image's layers, relative to the settings' folder, the lowest first.
        """
        watched = self.sessions[name] = SessionStatus()
        message = {"do": "start", "session": name, "limits": _as_json(limits), "layers": list(layers)}
        await self._send(message, [control.fileno(), *workspace])
        return watched

    async def prepare_fork(
        self, name: str, parent: str, limits: Limits, birth: socket.socket, *workspace: int, is_overlay: bool = False
    ) -> SessionStatus:
        """Ask for the cgroups of a fork, which reports at the other end of a birth channel; close this end.

        Args:
            workspace: descriptors of the owner's channel, of the folder with the parent's changes, and of the base
                folder if there is one; none without a workspace.
            is_overlay: True if the server copies the changes, False if the fork copies its whole workspace.
        """
        watched = self.sessions[name] = SessionStatus()
        with birth:
            message = {
                "do": "fork",
                "session": name,
                "of": parent,
                "limits": _as_json(limits),
                "is_overlay": is_overlay,
            }
            await self._send(message, [birth.fileno(), *workspace])
        return watched

    async def end(self, name: str) -> None:
        """Kill a session; return once nothing of it is left, the server is gone, or 20 s have passed."""
        watched = self.sessions.get(name)
        if watched is None:
            return
        if not self.lost and not watched.ended.is_set():
            with contextlib.suppress(SandboxError, TimeoutError):
                await self._send({"do": "end", "session": name})
                async with asyncio.timeout(_END_S):
                    await watched.ended.wait()
        self.sessions.pop(name, None)

    async def close(self) -> None:
        """End the server and all of its sessions; return when no process, mount or cgroup is left."""
        self._lose("the pool was closed")
        await asyncio.to_thread(self._clean_up)

    def _clean_up(self) -> None:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.returncode:  # the keeper was killed: the kernel has ended its server, the cgroups stay
            self._remove_tree()

    def _remove_tree(self) -> None:
        hierarchies = [
            hierarchy for hierarchy in cgroups.here() if os.path.isdir(os.path.join(hierarchy.folder, self.tree))
        ]
        if hierarchies:
            cgroups.CgroupTree(self.tree, hierarchies).remove_all()

    def _lose(self, cause: str) -> None:
        if self.lost:
            return
        self.lost = cause
        self._loop.remove_reader(self._channel)
        self._channel.close()
        os.close(self._lifeline)
        # The server's end is the end of its sessions: whoever waits for one of them must not wait for its timeout.
        for watched in self.sessions.values():
            watched.cause = watched.cause or cause
            watched.exited.set()
            watched.ended.set()

    async def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        data = json.dumps(message).encode()
        async with self._sending:
            while True:
                if self.lost:
                    raise SandboxError(f"the sandbox server is gone: {self.lost}")
                try:
                    # A packet socket: a message and its descriptors arrive whole, or not at all.
                    socket.send_fds(self._channel, [data], list(fds))
                    return
                except BlockingIOError:
                    await writable(self._loop, self._channel)
                except OSError as error:
                    self._lose(f"its channel broke ({error.strerror})")

    def _receive(self) -> None:
        for _ in range(64):  # then others have their turn
            try:
                data = self._channel.recv(_MOST_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose("the sandbox server was killed")
                return
            self._hear(json.loads(data))

    def _hear(self, message: dict[str, object]) -> None:
        watched = self.sessions.get(str(message.get("session")))
        if watched is None:
            return
        if "ended" in message:
            watched.exited.set()
            watched.ended.set()
        elif "failed" in message:
            watched.cause = f"the machine refused to start it: {message['failed']}"
            watched.exited.set()
        elif "exit" in message:
            status = message["exit"]
            watched.out_of_memory = bool(message["memory"])
            watched.cause = "its process ended" + (f" with status {status}" if isinstance(status, int) else "")
            if isinstance(status, int) and status < 0:
                watched.cause = f"killed by signal {-status}"
            watched.exited.set()


def check_layers(profile: str, without: Collection[str] = ()) -> dict[str, str]:
    """Return the layers that this machine lacks, each with the reason.

    Raises:
        SandboxError: it lacks some that `without` does not name.
    """
    missing = missing_layers(profile)
    # A weaker sandbox is never chosen silently: each missing layer has to be named by the caller.
    if not missing.keys() <= set(without):
        reasons = "; ".join(f"{layer}: {reason}" for layer, reason in missing.items())
        if "uid" in missing:
            hint = 'run as root, or use Pool(profile="strict") or "process"'
        elif "bubblewrap" in missing:
            hint = "install bubblewrap: apt-get install bubblewrap"
        elif "user-namespace" in missing:
            hint = 'allow user namespaces, or run as root with Pool(profile="standard")'
        else:
            hint = f"allow it by name: Pool(without={sorted(missing)})"
        raise SandboxError(f"this machine cannot isolate sandboxes fully: {reasons}", hint=hint)
    return missing


async def readable(loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
    """Wait until a non-blocking socket has something to read, or has ended."""
    ready = loop.create_future()
    loop.add_reader(channel, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(channel)


async def writable(loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
    """Wait until a non-blocking socket takes more."""
    ready = loop.create_future()
    loop.add_writer(channel, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_writer(channel)


def _as_json(limits: Limits) -> dict[str, object]:
    names = (
        *("memory_bytes", "processes", "cpus", "output_bytes", "scratch_bytes", "scratch_files"),
        "transfer_bytes",
    )
    return {name: getattr(limits, name) for name in names}
