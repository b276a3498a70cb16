"""Sandboxes rented from Modal, by its package: `pip install "forge_rl[modal]"`, with MODAL_TOKEN_ID and _SECRET set.

Modal speaks gRPC: tested against a stand-in of the package's own classes, whose calls are held to the real signatures,
never against the service itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

from forge_rl.sandbox.limits import Limits, Result, SandboxError, Usage
from forge_rl.sandbox.providers.base import ContainerEndedError, TransferError
from forge_rl.sandbox.providers.owners import this_owner
from forge_rl.sandbox.providers.sdk import (
    IDLE_S,
    OWNER,
    REQUEST_S,
    START_S,
    Sweeper,
    asking,
    provider_package,
    run_within,
)
from forge_rl.system.variables import api_key

_APP = "forge-rl"
_PYTHON = "3.12"
"""Python that Modal adds to images, as its builder needs one; at /usr/local, where images without one have none."""


class ModalContainers:
    """Starts sandboxes of Modal from images, without a network; they cost money while they run.

    Raises:
        ConfigError: the package is not installed, or the token is not set.
    """

    def __init__(self) -> None:
        self._sdk = provider_package("modal")
        for variable in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
            api_key("provider=modal", variable, option="")  # which the package reads itself
        self._sweeper = Sweeper()
        self._app: Any = None

    async def start(self, image: str, limits: Limits) -> ModalContainer:
        """Start a sandbox; see `ContainerProvider`."""
        async with asking("Modal", REQUEST_S):
            self._app = self._app or await self._sdk.App.lookup.aio(_APP, create_if_missing=True)
        await self._sweeper.sweep(self._listed, self._end)
        async with asking("Modal", START_S):
            sandbox = await self._sdk.Sandbox.create.aio(
                "sleep",
                str(IDLE_S),
                app=self._app,
                image=self._sdk.Image.from_registry(image, add_python=_PYTHON).entrypoint([]),
                tags={OWNER: this_owner()},
                timeout=IDLE_S,
                cpu=(limits.cpus, limits.cpus),
                memory=(math.ceil(limits.memory_bytes / (1 << 20)),) * 2,
                block_network=True,
            )
        return ModalContainer(self._sdk, sandbox)

    async def _listed(self) -> list[tuple[str, str]]:
        sandboxes = list[tuple[str, str]]()
        async with asking("Modal", REQUEST_S):
            async for sandbox in self._sdk.Sandbox.list.aio(app_id=self._app.app_id):
                with contextlib.suppress(self._sdk.exception.NotFoundError):  # it has just ended
                    sandboxes.append((sandbox.object_id, (await sandbox.get_tags.aio()).get(OWNER, "")))
        return sandboxes

    async def _end(self, name: str) -> None:
        async with asking("Modal", REQUEST_S):
            await (await self._sdk.Sandbox.from_id.aio(name)).terminate.aio()

    async def close(self) -> None:
        """Do nothing: its package keeps its connections."""


class ModalContainer:
    """A sandbox of Modal as a `ProviderContainer`."""

    def __init__(self, sdk: Any, sandbox: Any) -> None:
        self._sdk, self._sandbox = sdk, sandbox

    async def execute(self, command: Sequence[str], *, wall_s: float, output_bytes: int) -> Result:
        """Run a program."""
        return await run_within("Modal", wall_s, self._run(command, output_bytes), self.close)

    async def _run(self, command: Sequence[str], output_bytes: int) -> Result:
        try:
            process = await self._sandbox.exec.aio(*command, text=False)
            streams = (process.stdout, process.stderr)
            outputs = await asyncio.gather(*(_start_of(stream, output_bytes) for stream in streams))
            status = await process.wait.aio()
        except (self._sdk.exception.NotFoundError, self._sdk.exception.ConflictError) as error:
            raise ContainerEndedError(f"Modal has no such sandbox any more: {str(error)[:200]}") from None
        if not isinstance(status, int):
            raise SandboxError("Modal's answer has no exit status")
        stdout, stderr = (output.decode("utf-8", "replace") for output in outputs)
        is_cut = any(len(output) >= output_bytes for output in outputs)
        return Result(stdout=stdout, stderr=stderr, status=status, cut=is_cut, usage=Usage(wall_s=0))

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        async with asking("Modal", REQUEST_S):
            try:
                await self._sandbox.filesystem.write_bytes.aio(data, path)
            except self._sdk.exception.SandboxFilesystemError as error:
                raise TransferError(f"Modal cannot write {path}: {str(error)[:200]}") from None

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Read a file."""
        async with asking("Modal", REQUEST_S):
            try:
                # Before the content, whose reading has no bound of its own.
                size = (await self._sandbox.filesystem.stat.aio(path)).size
                data = b"" if size > max_bytes else await self._sandbox.filesystem.read_bytes.aio(path)
            except self._sdk.exception.SandboxFilesystemError as error:
                raise TransferError(f"Modal cannot read {path}: {str(error)[:200]}") from None
        if max(size, len(data)) > max_bytes:
            raise TransferError(f"{path} has {max(size, len(data))} bytes")
        return bytes(data)

    async def close(self) -> None:
        """End the sandbox; Modal does it after a time if it cannot be reached."""
        with contextlib.suppress(SandboxError):
            async with asking("Modal", REQUEST_S):
                await self._sandbox.terminate.aio()


async def _start_of(stream: Any, max_bytes: int) -> bytes:
    """Read a stream to its end; return at most its first `max_bytes`."""
    data = bytearray()
    async for part in stream:
        data += bytes(part)[: max(0, max_bytes - len(data))]
    return bytes(data)
