"""Containers for the stand-ins of providers' services: sessions of images of this machine's own sandbox."""

import asyncio
import contextlib
import io
import stat
import tarfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from forge_rl.sandbox import Limits, Pool, PoolSession, SandboxError
from forge_rl.sandbox.images import ContainerImage
from forge_rl.sandbox.workspaces.changes import Change, Entry
from tests.container_images import PROGRAMS, host_layer, image_of, layer

_LIMITS = Limits(
    wall_s=120,
    memory_bytes=256 << 20,
    processes=128,
    scratch_bytes=64 << 20,
    scratch_files=20_000,
    output_bytes=8 << 20,
    transfer_bytes=64 << 20,
)


class ContainerMachine:
    """Containers by name, of images by name."""

    def __init__(self, pool: Pool, images: Mapping[str, ContainerImage]) -> None:
        self.pool, self.images = pool, dict(images)
        self.sessions: dict[str, PoolSession] = {}

    async def start(self, name: str, image: str) -> None:
        self.sessions[name] = await self.pool.open(image=self.images[image], limits=_LIMITS)

    async def run(self, name: str, command: Sequence[str], folder: str = "") -> tuple[int, bytes, bytes]:
        result = await self.sessions[name].run(list(command), folder=folder)
        note = "" if result.error is None else f"{result.error.name}: {result.error.message}"
        status = 137 if result.status is None else result.status
        return status, result.stdout.encode("utf-8", "surrogateescape"), (result.stderr + note).encode()

    async def put(self, name: str, path: str, data: bytes, mode: int = 0o644) -> None:
        entry = Entry(mode=0o100000 | mode, data=data)
        await self.sessions[name].apply([Change(path=path.strip("/"), before=None, after=entry)])

    async def unpack(self, name: str, archive: bytes) -> None:
        changes = []
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            for member in file:
                if member.isdir():
                    entry = Entry(mode=stat.S_IFDIR)
                elif member.issym():
                    entry = Entry(mode=stat.S_IFLNK, data=member.linkname.encode())
                else:
                    entry = Entry(mode=0o100000 | member.mode, data=file.extractfile(member).read())
                changes.append(Change(path=member.name, before=None, after=entry))
        await self.sessions[name].apply(changes)

    async def get(self, name: str, path: str) -> bytes | None:
        try:
            return await self.sessions[name].get(path)
        except SandboxError:
            return None

    async def end(self, name: str) -> None:
        if (session := self.sessions.pop(name, None)) is not None:
            await session.close()


def machine_image(folder: Path, files: Mapping[str, str | bytes | None]) -> ContainerImage:
    """An image of this machine's shell with what providers' sessions need, and these files."""
    programs = (*PROGRAMS, "find", "xargs", "tar", "timeout")
    return image_of(host_layer(folder, programs), layer(folder, "files", files), working_folder="/app")


@contextlib.asynccontextmanager
async def container_machine(store: Path, images: Mapping[str, ContainerImage]) -> AsyncIterator[ContainerMachine]:
    """Open a machine, whose containers end with it."""
    async with Pool(profile="process", images=store, limits=_LIMITS, warm=0, servers=1) as pool:
        machine = ContainerMachine(pool, images)
        try:
            yield machine
        finally:
            await asyncio.gather(*map(machine.end, list(machine.sessions)))
