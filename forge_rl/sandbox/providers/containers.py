"""Sessions of images in containers that others run: of a Docker daemon, or rented from Daytona, E2B or Modal.

A provider is one file: it starts a container of an image, runs a program in it, writes and reads files, and ends it.
All of them share this file: shells, time limits, variables, bounded outputs, changes and their application.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, Self

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import CellError, Limits, Result, SandboxError, Usage
from forge_rl.sandbox.providers import roots
from forge_rl.sandbox.providers.base import ContainerEndedError, TransferError, start_or_end
from forge_rl.sandbox.providers.roots import RootListing, UnreadableRootError
from forge_rl.sandbox.workspaces.changes import Change, Changes

PROVIDERS = {
    "docker": "forge_rl.sandbox.providers.docker_containers:DockerContainers",
    "daytona": "forge_rl.sandbox.providers.daytona:DaytonaContainers",
    "e2b": "forge_rl.sandbox.providers.e2b_containers:E2BContainers",
    "modal": "forge_rl.sandbox.providers.modal:ModalContainers",
}
"""By name, the class of each provider."""
_SHELL = 'if command -v bash > /dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'
_BOUNDED = (
    'o=$1 n=$2 d=$3; shift 3; [ -z "$d" ] || cd "$d" || exit 125; "$@" > "$o" 2> "$o.e" < /dev/null; s=$?;'
    ' PATH=/usr/bin:/bin:$PATH; head -c "$n" "$o"; head -c "$n" "$o.e" >&2; rm -f "$o" "$o.e"; exit $s'
)
"""Runs a program with its output in files, as processes that it leaves running would keep a pipe open."""
_GRACE_S = 15.0
"""Time beyond a command's limit before its container is ended."""
_FILES_S = 300.0
"""Time to list, pack or apply the files of a root."""
_LIST_BYTES = 256 << 20
_SIGKILL = 137


class ProviderContainer(Protocol):
    """A running container of an image. All methods but `close` raise `SandboxError` where the provider fails."""

    async def execute(self, command: Sequence[str], *, wall_s: float, output_bytes: int) -> Result:
        """Run a program in the image's working folder with its variables; end the container if it takes longer.

        Raises:
            ContainerEndedError: the container has ended.
            SandboxError: the provider cannot be reached or refuses.
        """

    async def put(self, path: str, data: bytes) -> None:
        """Write a file at an absolute path, whose folder exists.

        Raises:
            TransferError: the container cannot take it.
        """

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Read a file at an absolute path.

        Raises:
            TransferError: there is none, or it is larger.
        """

    async def close(self) -> None:
        """End the container; raise nothing if the provider is gone."""


class ContainerProvider(Protocol):
    """Starts containers; keys come from the environment, and appear in no message."""

    async def start(self, image: str, limits: Limits) -> ProviderContainer:
        """Start a new container of a registry's image.

        On first use, it ends the containers of processes of this machine that were killed, by their label.

        Raises:
            SandboxError: the provider cannot be reached, has no such image, or refuses.
        """

    async def close(self) -> None:
        """Close its connections, once all containers are closed."""


def check_provider(name: str, flag: str) -> None:
    """Check the name of a provider, or "" for none.

    Args:
        flag: for errors.

    Raises:
        ConfigError: there is none of this name.
    """
    if name and name not in PROVIDERS:
        raise ConfigError(f"{flag}provider={name:.80} is not a provider", hint=f"providers are {', '.join(PROVIDERS)}")


def container_provider(name: str) -> ContainerProvider:
    """Make a provider, for one event loop.

    Raises:
        ConfigError: its package is not installed, or its key is not set.
    """
    module, _, class_name = PROVIDERS[name].partition(":")
    provider: ContainerProvider = getattr(importlib.import_module(module), class_name)()
    return provider


class RentedSession:
    """A session of an image in a provider's container, with the methods of `PoolSession` that tasks with images use.

    The image needs sh, find, xargs, stat, tar and head, as Debian's and Alpine's have them. Programs that a command
    leaves running stay. A command that exceeds its time is killed where the image has `timeout`, and ends the container
    where it has not. Sessions cannot be forked.

    Args:
        programs: paths of `timeout` and `env` in the image; "" for one that it lacks.
        before: the root before any command; None for a session whose changes are not asked for.
    """

    def __init__(
        self, container: ProviderContainer, limits: Limits, programs: Sequence[str], before: RootListing | None
    ) -> None:
        self.limits, self.before = limits, before
        self.alive = True
        self.lost = ""
        """Why the provider failed; "" if it did not."""
        self._container, (self._timeout, self._env) = container, programs
        self._lock = asyncio.Lock()
        # Scripts write next to this path. `roots.LIST` leaves out its prefix, so that forge_rl's own files are no
        # changes.
        self._place = f"/tmp/.forge-rl-{uuid.uuid4().hex}"

    @classmethod
    async def open(cls, provider: ContainerProvider, image: str, limits: Limits, *, watched: bool) -> Self:
        """Start a container, which the caller closes.

        Args:
            watched: list its root, so that `changes` can say what commands have changed.

        Raises:
            SandboxError: it does not start, or lacks the programs that are needed.
        """
        container = await start_or_end(provider.start(image, limits), lambda container: container.close())
        try:
            session = cls(container, limits, ("", ""), None)
            lines = (await session._script(roots.DESCRIBE)).stdout.split("\n")
            # Looked up before any command ran, and kept as full paths: a command may put others before them in PATH.
            session._timeout, session._env = [*lines, ""][:2]
            if watched:
                listed = await session._listed()
                session.before = await asyncio.to_thread(RootListing.of, listed, lines[2:])
        except UnreadableRootError as error:
            await asyncio.shield(container.close())
            raise SandboxError(
                f"the root of {image} cannot be listed: {error.message}",
                hint="images of a provider need sh, find, xargs, stat, tar and head",
            ) from None
        except BaseException:
            await asyncio.shield(container.close())
            raise
        return session

    async def run(
        self,
        code: str | Sequence[str],
        *,
        wall_s: float | None = None,
        env: Mapping[str, str] | None = None,
        folder: str = "",
    ) -> Result:
        """Run a line for the shell, or a program with its arguments; see `PoolSession.run`.

        Raises:
            SandboxError: the session has ended before, or the provider failed.
        """
        wall_s = self.limits.wall_s if wall_s is None else wall_s
        command = ["/bin/sh", "-c", _SHELL, code] if isinstance(code, str) else list(code)
        if env:
            command = [self._env or "env", *(f"{name}={value}" for name, value in env.items()), *command]
        if self._timeout:
            # Inside of the container, so that one slow command does not cost the session its container.
            command = [self._timeout, "-s", "KILL", str(math.ceil(wall_s)), *command]
        max_bytes = self.limits.output_bytes
        bounded = ["/bin/sh", "-c", _BOUNDED, "sh", self._place, str(max_bytes + 1), folder, *command]
        began_s = time.monotonic()
        result = await self._execute(bounded, wall_s + (_GRACE_S if self._timeout else 0))
        # 137 is also the status of a command that was killed otherwise: only one that took its whole time was killed
        # for that.
        if self._timeout and result.status == _SIGKILL and time.monotonic() - began_s >= wall_s:
            message = f"the cell exceeded {wall_s:g} s: killed"
            result = replace(result, status=None, error=CellError(name="CellOverrun", message=message))
        texts = (result.stdout, result.stderr)
        is_cut = result.cut or any(len(text.encode("utf-8", "replace")) > max_bytes for text in texts)
        return replace(result, stdout=texts[0][:max_bytes], stderr=texts[1][:max_bytes], cut=is_cut)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file at an absolute path, whose folder exists."""
        if len(data) > self.limits.transfer_bytes:
            hint = f"Limits:transfer_bytes is {self.limits.transfer_bytes}"
            raise SandboxError(f"{path} has {len(data)} bytes", hint=hint)
        async with self._using():
            await self._container.put(path, data)

    async def get(self, path: str) -> bytes:
        """Read a file at an absolute path."""
        async with self._using():
            return await self._container.get(path, max_bytes=self.limits.transfer_bytes)

    async def changes(self) -> Changes:
        """Return the files that differ from the image, without their earlier content.

        Raises:
            UnreadableRootError: commands removed programs that reading needs.
            SandboxError: the session was not opened to be watched, or the provider failed.
        """
        if self.before is None:
            raise SandboxError("the session's root was not listed", hint="open it with watched=True")
        most_changes = self.limits.scratch_files
        listed = await self._listed()
        changed = await asyncio.to_thread(self.before.changed_to, listed)
        paths = roots.to_fetch(changed, most_bytes=self.limits.scratch_bytes, most_changes=most_changes)
        contents = dict[str, bytes]()
        if paths:
            await self._put_part("list", roots.listed_paths(paths))
            await self._script(roots.ARCHIVE)
            # A tar has 512 bytes a header, as many to fill up, and more for long names.
            max_bytes = self.limits.scratch_bytes + len(paths) * 4096 + (1 << 16)
            archive = await self._part(max_bytes)
            contents = await asyncio.to_thread(roots.unpacked, archive, paths)
        return roots.changes_of(changed, contents, most_changes)

    async def apply(self, changes: Sequence[Change]) -> None:
        """Make another session's changes in this one, which should be a new one of the same image.

        Raises:
            SandboxError: they do not fit, or something else is where they belong.
        """
        archive, files, folders = await asyncio.to_thread(roots.packed_changes, changes)
        for name, data in (("", archive), ("files", files), ("folders", folders)):
            await self._put_part(name, data)
        result = await self._execute(["/bin/sh", "-c", roots.APPLY, self._place], _FILES_S)
        if result.error is not None or result.status:
            cause = result.error.message if result.error else result.stderr.strip()
            raise SandboxError(f"the changes do not apply: {cause[-500:]}")

    async def fork(self) -> RentedSession:
        """Refuse: containers of providers cannot be forked.

        Raises:
            SandboxError: always.
        """
        raise SandboxError("containers of providers cannot be forked", hint="leave out provider=...")

    async def close(self) -> None:
        """End the container."""
        self.alive = False
        await self._container.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.shield(self.close())

    @contextlib.asynccontextmanager
    async def _using(self) -> AsyncIterator[None]:
        """Use the container alone; note whether it or its provider is gone afterwards."""
        async with self._lock:
            if not self.alive:
                raise SandboxError(f"the session has ended: {self.lost or 'it is closed'}", hint="open another")
            try:
                yield
            except TransferError:
                raise
            except ContainerEndedError:
                self.alive = False
                raise
            except SandboxError as error:
                self.alive, self.lost = False, error.message
                raise
            except BaseException:
                await asyncio.shield(self.close())  # the caller was cancelled, and its command still runs
                raise

    async def _execute(self, command: Sequence[str], wall_s: float) -> Result:
        try:
            async with self._using():
                result = await self._container.execute(
                    command, wall_s=wall_s, output_bytes=self.limits.output_bytes + 1
                )
        except ContainerEndedError as error:  # its own processes did it, as nothing else runs in a container
            return Result(error=CellError(name="OutOfMemory", message=error.message), usage=Usage(wall_s=0.0))
        self.alive = self.alive and (result.error is None or result.error.name != "CellOverrun")
        return result

    async def _script(self, script: str) -> Result:
        """Run one of forge_rl's scripts, with a path in forge_rl's folder as its name.

        Raises:
            UnreadableRootError: it failed.
        """
        result = await self._execute(["/bin/sh", "-c", script, self._place], _FILES_S)
        if result.error is not None or result.status:
            cause = result.error.message if result.error else result.stderr.strip()[-300:]
            raise UnreadableRootError(f"it ended with {result.status}: {cause}")
        return result

    async def _listed(self) -> bytes:
        await self._script(roots.LIST)
        return await self._part(_LIST_BYTES)

    async def _put_part(self, name: str, data: bytes) -> None:
        try:
            async with self._using():
                await self._container.put(f"{self._place}.{name}" if name else self._place, data)
        except (TransferError, ContainerEndedError) as error:
            raise UnreadableRootError(error.message) from None

    async def _part(self, max_bytes: int) -> bytes:
        try:
            async with self._using():
                return await self._container.get(self._place, max_bytes=max_bytes)
        except (TransferError, ContainerEndedError) as error:
            raise UnreadableRootError(error.message) from None
