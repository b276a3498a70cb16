"""Containers of a Docker daemon behind the protocol of pools, for machines that have one: commands in an image.

Written from the public description of Docker's Engine API and tested against a stand-in of it. Whoever may use the
daemon is root of its machine. Sessions get no privileges, but Docker confines them, not this library.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import re
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import ClassVar

import httpx

from forge_rl.errors import check_flags
from forge_rl.sandbox.limits import CellError, Limits, Result, SandboxError, Usage
from forge_rl.sandbox.providers.base import (
    ContainerEndedError,
    ProviderPool,
    ProviderSession,
    TransferError,
    start_or_end,
)
from forge_rl.sandbox.providers.owners import has_ended, this_owner
from forge_rl.sandbox.providers.web import HttpError, HttpRequest, LargeAnswerError, WebClient, json_object

_API = "http://docker/v1.41"
_OWNER = "forge-rl.owner"
_ID = re.compile(r"[0-9a-f]{12,64}")
_START_S, _PULL_S, _REQUEST_S, _GRACE_S = 60.0, 1800.0, 60.0, 10.0
_MOST_SMALL, _MOST_PULL = 4 << 20, 64 << 20
_GONE = (404, 409)
"""Statuses of answers about a container that no longer exists, or has ended."""
_STREAM_HEADER = 8
_STDOUT, _STDERR = 1, 2
_TAR_SLACK = 1 << 16


@dataclass(kw_only=True, eq=False, repr=False)
class DockerPool(ProviderPool["DockerSession"]):
    """Sessions in containers of a Docker daemon, with the methods of `Pool`; a cell is a command line of its shell.

        async with DockerPool(image="debian:12") as pool, pool.session() as session:
            print((await session.run("cat /etc/os-release")).stdout)

    Files stay between cells, and processes that a cell leaves may stay. Sessions cannot be forked or undone. A
    container has no network, no capabilities, and the memory, CPUs and processes of `Limits`; its files are on the
    daemon's disk. Containers end with the pool. Those of a program that was killed end with the next pool of this
    machine, and in any case after `idle_s`.
    """

    UNITS: ClassVar[str] = "Docker's containers"
    image: str
    """Image of sessions; pulled by the daemon if it does not have it. It needs `sh` and `sleep`."""
    limits: Limits = field(default_factory=Limits)
    """Limits of sessions that are opened without limits of their own."""
    sessions: int = 20
    """How many may be open."""
    idle_s: float = 7200.0
    """Seconds after which a container ends, even if this program is gone."""
    socket: str = "/var/run/docker.sock"
    """The daemon's Unix socket."""
    runtime: str = ""
    """Runtime of containers, such as "runsc" or "crun"; the daemon's default by default."""
    user: str = ""
    """User of commands; the image's by default."""

    def __post_init__(self) -> None:
        check_flags(self, "DockerPool:", minimum={"sessions": 1, "idle_s": 1})
        # A client's limits are not its transport's. An idle connection would stay for as long as the pool, of which a
        # data set has one for each image.
        limits = httpx.Limits(max_connections=2 * self.sessions, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=self.socket, limits=limits)
        self._start(WebClient("Docker", most_requests=2 * self.sessions, transport=transport))
        self._pulling = asyncio.Lock()
        self._is_ready = False

    async def _opened(self, limits: Limits | None) -> DockerSession:
        await self._prepare()
        name = await start_or_end(self._created(limits or self.limits), self._remove)
        try:
            await self.api("POST", f"/containers/{name}/start", limit_s=_START_S)
        except BaseException:
            await asyncio.shield(self._remove(name))
            raise
        return DockerSession(self, name, limits or self.limits)

    async def _end(self, session: DockerSession) -> None:
        await self._remove(session.name)

    async def api(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        most_bytes: int = _MOST_SMALL,
        limit_s: float = _REQUEST_S,
    ) -> bytes:
        """Send a request to the daemon.

        Raises:
            SandboxError: there is none, it refuses, or it does not answer properly.
        """
        request = HttpRequest(method=method, url=_API + path, headers={}, body=body, params=params)
        try:
            return await self.client.ask(request, most_bytes=most_bytes, limit_s=limit_s)
        except HttpError as error:
            raise self.refusal(error) from None
        except SandboxError as error:
            if not os.access(self.socket, os.W_OK):
                cause = "may not be used" if os.access(self.socket, os.F_OK) else "does not exist"
                raise SandboxError(
                    f"Docker's socket {self.socket} {cause}", hint="start the daemon, or set DockerPool(socket=...)"
                ) from error
            raise

    def refusal(self, error: HttpError) -> SandboxError:
        """Return the error of an answer."""
        kind = ContainerEndedError if error.status in _GONE else SandboxError
        return kind(f"Docker refused ({error.status}): {error.text[:500]}")

    async def _prepare(self) -> None:
        """Pull the image if it is missing, and remove the containers of killed programs; once in a pool's life."""
        async with self._pulling:
            if self._is_ready:
                return
            await self._sweep()
            request = HttpRequest(method="GET", url=f"{_API}/images/{self.image}/json", headers={})
            try:
                await self.client.ask(request, most_bytes=_MOST_SMALL, limit_s=_REQUEST_S)
            except HttpError as error:
                if error.status != 404:
                    raise self.refusal(error) from None
                await self._pull()
            self._is_ready = True

    async def _pull(self) -> None:
        tag = {} if "@" in self.image or ":" in self.image.rpartition("/")[2] else {"tag": "latest"}
        params = {"fromImage": self.image, **tag}
        lines = await self.api("POST", "/images/create", params=params, most_bytes=_MOST_PULL, limit_s=_PULL_S)
        for line in lines.splitlines():
            if line.strip() and "error" in (message := json_object(line, "Docker")):  # its status was sent before
                raise SandboxError(f"Docker cannot pull {self.image}: {str(message['error'])[:500]}")

    async def _created(self, limits: Limits) -> str:
        host = {
            "Memory": limits.memory_bytes,
            # Memory and swap together, so that there is no swap.
            "MemorySwap": limits.memory_bytes,
            "NanoCpus": int(limits.cpus * 1e9),
            "PidsLimit": limits.processes,
            "NetworkMode": "none",
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "AutoRemove": True,
            # A first process that reaps what commands leave; `sleep` would not.
            "Init": True,
            **({"Runtime": self.runtime} if self.runtime else {}),
        }
        body = {
            "Image": self.image,
            "Entrypoint": ["sleep"],
            "Cmd": [str(math.ceil(self.idle_s))],
            "Labels": {_OWNER: this_owner()},
            "HostConfig": host,
            **({"User": self.user} if self.user else {}),
        }
        name = json_object(await self.api("POST", "/containers/create", body, limit_s=_START_S), "Docker").get("Id")
        if not (isinstance(name, str) and _ID.fullmatch(name)):
            raise SandboxError("Docker's answer names no container")
        return name

    async def _remove(self, name: str) -> None:
        with contextlib.suppress(SandboxError):
            await self.api("DELETE", f"/containers/{name}", params={"force": "true", "v": "true"})

    async def _sweep(self) -> None:
        params = {"all": "true", "filters": json.dumps({"label": [_OWNER]})}
        try:
            containers = json.loads(await self.api("GET", "/containers/json", params=params))
        except (ValueError, RecursionError):
            containers = None
        if not isinstance(containers, list):
            raise SandboxError("Docker answered with something else than a list of containers")
        for container in containers:
            labels = container.get("Labels") if isinstance(container, dict) else None
            owner = labels.get(_OWNER) if isinstance(labels, dict) else None
            name = container.get("Id") if isinstance(container, dict) else None
            if isinstance(owner, str) and isinstance(name, str) and _ID.fullmatch(name) and has_ended(owner):
                await self._remove(name)


class DockerSession(ProviderSession):
    """A session in a container; made by `DockerPool`."""

    def __init__(self, pool: DockerPool, name: str, limits: Limits) -> None:
        super().__init__(pool, limits)
        self.name = name
        self._pool = pool

    async def run(self, code: str, *, wall_s: float | None = None, cpu_s: float | None = None) -> Result:
        """Run a command line and return its result. One that takes too long ends the session.

        Raises:
            SandboxError: the container is gone, or a limit on CPU time is asked for, which Docker lacks.
        """
        wall_s = self.limits.wall_s if wall_s is None else wall_s
        if cpu_s is not None or self.limits.cpu_s is not None:
            raise SandboxError("Docker cannot limit a cell's CPU time", hint="limit wall_s instead of cpu_s")
        return await self.execute(["/bin/sh", "-c", code], wall_s=wall_s, output_bytes=self.limits.output_bytes)

    async def execute(self, command: Sequence[str], *, wall_s: float, output_bytes: int) -> Result:
        """Run a program; see `ProviderContainer.execute`."""
        if not (0 < wall_s < math.inf):
            raise SandboxError(f"wall_s is {wall_s}", hint="give a cell a positive number of seconds")
        async with self._lock:
            self._check_alive()
            try:
                return await self._run(command, wall_s, output_bytes)
            except HttpError as error:
                await self.close()
                raise self._pool.refusal(error) from None
            except BaseException:  # a cancelled caller too, as its cell still runs
                await asyncio.shield(self.close())
                raise

    async def _run(self, command: Sequence[str], wall_s: float, output_bytes: int) -> Result:
        began = time.perf_counter()
        body = {"Cmd": list(command), "AttachStdout": True, "AttachStderr": True}
        answer = json_object(await self._pool.api("POST", f"/containers/{self.name}/exec", body), "Docker")
        name = answer.get("Id")
        if not (isinstance(name, str) and _ID.fullmatch(name)):
            raise SandboxError("Docker's answer names no command")
        heard = _CommandOutput(output_bytes)
        request = HttpRequest(
            method="POST", url=f"{_API}/exec/{name}/start", headers={}, body={"Detach": False, "Tty": False}
        )
        try:
            async with (
                asyncio.timeout(wall_s),
                self._pool.client.stream(request, limit_s=wall_s + _GRACE_S) as chunks,
            ):
                async for chunk in chunks:
                    heard.take(chunk)
        except TimeoutError:
            await self.close()
            error = CellError(name="CellOverrun", message=f"the cell exceeded {wall_s:g} s: killed")
            return heard.result(time.perf_counter() - began, error=error)
        status = json_object(await self._pool.api("GET", f"/exec/{name}/json"), "Docker").get("ExitCode")
        if not isinstance(status, int) or isinstance(status, bool):
            raise SandboxError("Docker tells no exit status", hint="the container may have run out of memory")
        return heard.result(time.perf_counter() - began, status=status)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file; a relative path is below the root. Its folder is made."""
        self._check_size(path, data)
        await self.write(path, data)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of any size; see `put`."""
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            info = tarfile.TarInfo(str(PurePosixPath("/", path)).lstrip("/"))
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
        await self._archive("PUT", path, "/", file.getvalue())

    async def get(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """Read a file; a relative path is below the root.

        Args:
            max_bytes: instead of the limits' `transfer_bytes`.
        """
        max_bytes = self.limits.transfer_bytes if max_bytes is None else max_bytes
        packed = await self._archive("GET", path, str(PurePosixPath("/", path)), None, most_bytes=max_bytes)
        try:
            with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
                member = archive.next()
                file = archive.extractfile(member) if member is not None and member.isreg() else None
                if file is None:
                    raise TransferError(f"{path} is not a file")
                return file.read()
        except (tarfile.TarError, KeyError, OSError):
            raise SandboxError(f"Docker answered with no archive of {path}") from None

    async def _archive(
        self, method: str, path: str, place: str, data: bytes | None, *, most_bytes: int = _MOST_SMALL
    ) -> bytes:
        async with self._lock:
            self._check_alive()
            request = HttpRequest(
                method=method,
                url=f"{_API}/containers/{self.name}/archive",
                headers={} if data is None else {"content-type": "application/x-tar"},
                params={"path": place},
                content=data,
            )
            try:
                return await self._pool.client.ask(request, most_bytes=most_bytes + _TAR_SLACK, limit_s=_REQUEST_S)
            except LargeAnswerError:
                raise TransferError(f"{path} has more than {most_bytes} bytes") from None
            except HttpError as error:
                raise TransferError(
                    f"the session could not transfer {path} ({error.status}): {error.text[:500]}"
                ) from None


@dataclass(eq=False)
class _CommandOutput:
    """Output of a command so far, cut to its limit. It arrives in frames: stream, three zeros, length, content."""

    max_bytes: int
    buffer: bytearray = field(default_factory=bytearray)
    texts: dict[int, bytearray] = field(default_factory=lambda: {_STDOUT: bytearray(), _STDERR: bytearray()})
    left: int = 0
    stream: int = _STDOUT
    cut: bool = False

    def take(self, chunk: bytes) -> None:
        self.buffer += chunk
        while self.buffer:
            if not self.left:
                # A header may be split between two chunks.
                if len(self.buffer) < _STREAM_HEADER:
                    return
                header = bytes(self.buffer[:_STREAM_HEADER])
                del self.buffer[:_STREAM_HEADER]
                self.stream, self.left = header[0], int.from_bytes(header[4:], "big")
                if self.stream not in self.texts:
                    raise SandboxError("Docker answered with something else than streams")
            part = self.buffer[: self.left]
            del self.buffer[: self.left]
            self.left -= len(part)
            text = self.texts[self.stream]
            self.cut |= len(text) + len(part) > self.max_bytes
            text += part[: max(0, self.max_bytes - len(text))]

    def result(self, seconds: float, *, status: int | None = None, error: CellError | None = None) -> Result:
        stdout, stderr = (self.texts[stream].decode("utf-8", "replace") for stream in (_STDOUT, _STDERR))
        return Result(
            stdout=stdout, stderr=stderr, error=error, usage=Usage(wall_s=seconds), cut=self.cut, status=status
        )
