"""Containers rented from Daytona, by its package: `pip install "forge_rl[daytona]"`, with the key in DAYTONA_API_KEY.

Tested against a stand-in of Daytona's HTTP API, never against the service itself.
"""

from __future__ import annotations

import contextlib
import math
import shlex
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
    bounded,
    provider_package,
    run_within,
)
from forge_rl.system.variables import api_key, value_of

_GIB = 1 << 30


class DaytonaContainers:
    """Starts sandboxes of Daytona from images, without a network; they cost money while they run.

    `DAYTONA_API_URL` names your own installation. Daytona counts whole CPUs and GiB of memory, and returns both streams
    of a command as its stdout.

    Raises:
        ConfigError: the package is not installed, or the key is not set.
    """

    def __init__(self) -> None:
        self._sdk = provider_package("daytona")
        url = value_of("DAYTONA_API_URL") or None
        config = self._sdk.DaytonaConfig(api_key=api_key("provider=daytona", "DAYTONA_API_KEY", option=""), api_url=url)
        self._client: Any = self._sdk.AsyncDaytona(config)
        self._sweeper = Sweeper()

    async def start(self, image: str, limits: Limits) -> DaytonaContainer:
        """Start a sandbox; see `ContainerProvider`."""
        await self._sweeper.sweep(self._listed, self._end)
        params = self._sdk.CreateSandboxFromImageParams(
            image=image,
            labels={OWNER: this_owner()},
            network_block_all=True,
            auto_stop_interval=math.ceil(IDLE_S / 60),
            auto_delete_interval=0,  # once it has stopped
            resources=self._sdk.Resources(cpu=math.ceil(limits.cpus), memory=math.ceil(limits.memory_bytes / _GIB)),
        )
        async with asking("Daytona", START_S):
            sandbox = await self._client.create(params, timeout=START_S)
        return DaytonaContainer(self._sdk, sandbox)

    async def _listed(self) -> list[tuple[str, str]]:
        async with asking("Daytona", REQUEST_S):
            return [(sandbox.id, sandbox.labels.get(OWNER, "")) async for sandbox in self._client.list()]

    async def _end(self, name: str) -> None:
        async with asking("Daytona", REQUEST_S):
            await (await self._client.get(name)).delete()

    async def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(SandboxError):
            async with asking("Daytona", REQUEST_S):
                await self._client.close()


class DaytonaContainer:
    """A sandbox of Daytona as a `ProviderContainer`."""

    def __init__(self, sdk: Any, sandbox: Any) -> None:
        self._sdk, self._sandbox = sdk, sandbox

    async def execute(self, command: Sequence[str], *, wall_s: float, output_bytes: int) -> Result:
        """Run a program."""
        return await run_within("Daytona", wall_s, self._run(command, wall_s, output_bytes), self.close)

    async def _run(self, command: Sequence[str], wall_s: float, output_bytes: int) -> Result:
        try:
            answer = await self._sandbox.process.exec(shlex.join(command), timeout=math.ceil(wall_s) + 5)
        except self._sdk.DaytonaNotFoundError as error:
            raise ContainerEndedError(f"Daytona has no such sandbox any more: {str(error)[:200]}") from None
        status, text = answer.exit_code, answer.result
        if not isinstance(status, int) or not isinstance(text, str):
            raise SandboxError("Daytona's answer is not the result of a command")
        return Result(stdout=text[:output_bytes], status=status, cut=len(text) > output_bytes, usage=Usage(wall_s=0))

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        async with asking("Daytona", REQUEST_S):
            try:
                await self._sandbox.fs.upload_file(data, path)
            except self._sdk.DaytonaBadRequestError as error:
                raise TransferError(f"Daytona cannot write {path}: {str(error)[:200]}") from None

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Read a file."""
        async with asking("Daytona", REQUEST_S):
            try:
                return await bounded(await self._sandbox.fs.download_file_stream(path), max_bytes)
            except (self._sdk.DaytonaNotFoundError, self._sdk.DaytonaBadRequestError) as error:
                raise TransferError(f"Daytona cannot read {path}: {str(error)[:200]}") from None

    async def close(self) -> None:
        """Delete the sandbox; Daytona does it after a time if it cannot be reached."""
        with contextlib.suppress(SandboxError):
            async with asking("Daytona", REQUEST_S):
                await self._sandbox.delete()
