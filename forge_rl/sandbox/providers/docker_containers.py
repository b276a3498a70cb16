"""Containers of a Docker daemon for tasks with images: of the socket that DOCKER_HOST names, or the usual one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from forge_rl.errors import ConfigError
from forge_rl.sandbox.limits import Limits, Result
from forge_rl.sandbox.providers.docker import DockerPool, DockerSession
from forge_rl.system.variables import value_of

_UNIX = "unix://"
_MOST_SESSIONS = 4096
"""More than episodes at once: these are bounded elsewhere."""


class DockerContainers:
    """Starts containers of a Docker daemon, each with no network and the limits of `DockerPool`; its commands are root.

    Raises:
        ConfigError: DOCKER_HOST names something else than a Unix socket.
    """

    def __init__(self) -> None:
        host = value_of("DOCKER_HOST")
        if host and not host.startswith(_UNIX):
            raise ConfigError(f"DOCKER_HOST is {host!r:.80}", hint="only unix:// sockets are supported")
        self._socket = host.removeprefix(_UNIX) or DockerPool.socket
        self._pools = dict[str, DockerPool]()

    async def start(self, image: str, limits: Limits) -> DockerContainer:
        """Start a container; see `ContainerProvider`."""
        # A pool has one image; providers start containers of any.
        if image not in self._pools:
            self._pools[image] = DockerPool(image=image, sessions=_MOST_SESSIONS, user="0:0", socket=self._socket)
        return DockerContainer(await self._pools[image].open(limits=limits))

    async def close(self) -> None:
        """End all containers, and close the connections."""
        await asyncio.gather(*(pool.__aexit__() for pool in self._pools.values()))


class DockerContainer:
    """A container of a Docker daemon as a `ProviderContainer`."""

    def __init__(self, session: DockerSession) -> None:
        self._session = session

    async def execute(self, command: Sequence[str], *, wall_s: float, output_bytes: int) -> Result:
        """Run a program."""
        return await self._session.execute(command, wall_s=wall_s, output_bytes=output_bytes)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        await self._session.write(path, data)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Read a file."""
        return await self._session.get(path, max_bytes=max_bytes)

    async def close(self) -> None:
        """End the container."""
        await self._session.close()
