"""Sandboxes of E2B for tasks with images, by its package: `pip install "forge_rl[e2b]"`, with the key in E2B_API_KEY.

E2B builds a template of each image on first use. Tested against a stand-in of its HTTP and Connect APIs, never against
the service itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import shlex
from collections.abc import Sequence
from typing import Any

from forge_rl.sandbox.limits import Limits, Result, SandboxError, Usage
from forge_rl.sandbox.providers.base import ContainerEndedError, TransferError
from forge_rl.sandbox.providers.owners import this_owner
from forge_rl.sandbox.providers.sdk import (
    OWNER,
    REQUEST_S,
    START_S,
    Sweeper,
    asking,
    bounded,
    provider_package,
    run_within,
)
from forge_rl.system.variables import api_key

_IDLE_S = 3600
"""The longest that E2B allows everybody."""
_USER = "root"


class E2BContainers:
    """Starts sandboxes of E2B from templates of images, without a network; they cost money while they run.

    Raises:
        ConfigError: the package is not installed, or the key is not set.
    """

    def __init__(self) -> None:
        self._sdk = provider_package("e2b")
        self._key = api_key("provider=e2b", "E2B_API_KEY", option="")
        self._sweeper = Sweeper()
        self._templates = dict[str, asyncio.Lock]()
        self._ready = set[str]()

    async def start(self, image: str, limits: Limits) -> E2BContainer:
        """Start a sandbox; see `ContainerProvider`."""
        await self._sweeper.sweep(self._listed, self._end)
        template = await self._template(image, math.ceil(limits.cpus), math.ceil(limits.memory_bytes / (1 << 20)))
        async with asking("E2B", START_S):
            sandbox = await self._sdk.AsyncSandbox.create(
                template,
                timeout=_IDLE_S,
                metadata={OWNER: this_owner()},
                allow_internet_access=False,
                api_key=self._key,
            )
        return E2BContainer(self._sdk, sandbox)

    async def _template(self, image: str, cpus: int, memory_mib: int) -> str:
        """Return the name of an image's template; build the template if it does not exist."""
        # CPUs and memory belong to a template, so that each combination needs its own.
        about = hashlib.sha256(f"{image} {cpus} {memory_mib}".encode()).hexdigest()[:24]
        name = f"forge-rl-{about}"
        # Sessions that start together build one template once.
        async with self._templates.setdefault(name, asyncio.Lock()), asking("E2B", START_S):
            if name not in self._ready and not await self._sdk.AsyncTemplate.exists(name, api_key=self._key):
                template = self._sdk.AsyncTemplate().from_image(image)
                await self._sdk.AsyncTemplate.build(
                    template, name, cpu_count=cpus, memory_mb=memory_mib, api_key=self._key
                )
            self._ready.add(name)
        return name

    async def _listed(self) -> list[tuple[str, str]]:
        sandboxes = list[tuple[str, str]]()
        pages = self._sdk.AsyncSandbox.list(api_key=self._key)
        async with asking("E2B", REQUEST_S):
            while pages.has_next:
                items = await pages.next_items()
                sandboxes += [(item.sandbox_id, (item.metadata or {}).get(OWNER, "")) for item in items]
        return sandboxes

    async def _end(self, name: str) -> None:
        async with asking("E2B", REQUEST_S):
            await self._sdk.AsyncSandbox.kill(name, api_key=self._key)

    async def close(self) -> None:
        """Do nothing: its package keeps its connections."""


class E2BContainer:
    """A sandbox of E2B as a `ProviderContainer`."""

    def __init__(self, sdk: Any, sandbox: Any) -> None:
        self._sdk, self._sandbox = sdk, sandbox

    async def execute(self, command: Sequence[str], *, wall_s: float, output_bytes: int) -> Result:
        """Run a program."""
        return await run_within("E2B", wall_s, self._run(command, output_bytes), self.close)

    async def _run(self, command: Sequence[str], output_bytes: int) -> Result:
        texts, status = {"stdout": "", "stderr": ""}, 0

        def collect(stream: str, text: str) -> None:
            texts[stream] += text[: max(0, output_bytes - len(texts[stream]))]

        try:
            await self._sandbox.commands.run(
                shlex.join(command),
                user=_USER,
                timeout=0,
                on_stdout=lambda text: collect("stdout", text),
                on_stderr=lambda text: collect("stderr", text),
                retain_output=False,
            )
        except self._sdk.CommandExitException as ended:
            status = ended.exit_code
        except self._sdk.NotFoundException as error:
            raise ContainerEndedError(f"E2B has no such sandbox any more: {str(error)[:200]}") from None
        if not isinstance(status, int):
            raise SandboxError("E2B's answer has no exit status")
        is_cut = any(len(text) >= output_bytes for text in texts.values())
        return Result(stdout=texts["stdout"], stderr=texts["stderr"], status=status, cut=is_cut, usage=Usage(wall_s=0))

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        async with asking("E2B", REQUEST_S):
            try:
                await self._sandbox.files.write(path, data, user=_USER, request_timeout=REQUEST_S)
            except (self._sdk.InvalidArgumentException, self._sdk.NotEnoughSpaceException) as error:
                raise TransferError(f"E2B cannot write {path}: {str(error)[:200]}") from None

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Read a file."""
        async with asking("E2B", REQUEST_S):
            try:
                chunks = await self._sandbox.files.read(path, format="stream", user=_USER, request_timeout=REQUEST_S)
                return await bounded(chunks, max_bytes)
            except (self._sdk.NotFoundException, self._sdk.InvalidArgumentException) as error:
                raise TransferError(f"E2B cannot read {path}: {str(error)[:200]}") from None

    async def close(self) -> None:
        """End the sandbox; E2B does it after a time if it cannot be reached."""
        with contextlib.suppress(SandboxError):
            async with asking("E2B", REQUEST_S):
                await self._sandbox.kill()
