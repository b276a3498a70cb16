"""Images for chaos: their pulls break off, are killed and evict each other while episodes use them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl.sandbox.images import ContainerImage, ImageStore
from tests.container_images import host_layer
from tests.images import Registry, folder, image, layer, link, member, registry

_PROGRAMS = ("bash", "sleep", "tail", "tee", "wc")
_FILES, _FILE_BYTES = 60, 8192
_ROOM = 40
"""Images whose own layers fit into the store; more than episodes use at once."""
_PULLER_S = 2.0
_PULLER = """import asyncio, sys
from pathlib import Path
from forge_rl.sandbox.images import ImageStore
asyncio.run(ImageStore(Path(sys.argv[1])).get(sys.argv[2]))"""


@dataclass
class ChaosImages:
    """Images in a registry on loopback, of which a store has room for a part."""

    folder: Path
    server: Registry
    references: list[str]
    own_layers: list[str]
    pullers: list[asyncio.Task[None]] = field(default_factory=list)
    cut: int = 0

    def __post_init__(self) -> None:
        self.store = ImageStore(self.folder, max_bytes=(64 << 20) + _ROOM * _FILES * _FILE_BYTES)

    @contextlib.asynccontextmanager
    async def use(self, number: int) -> AsyncIterator[ContainerImage]:
        """Keep the image of an episode in place."""
        async with self.store.use(self.references[number % len(self.references)]) as chosen_image:
            yield chosen_image

    def cut_a_pull(self, rng: random.Random) -> None:
        """Let downloads break off, kill what unpacks, or kill another process that pulls."""
        match rng.randrange(3):
            case 0:
                # The registry's next answer for these layers ends after so many bytes.
                for digest in rng.sample(self.own_layers, len(self.own_layers) // 4):
                    self.server.breaks[digest] = rng.randrange(1, _FILES * _FILE_BYTES // 2)
            case 1:
                for pid in unpackers():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                        self.cut += 1
                return
            case _:
                reference = rng.choice(self.references)
                self.pullers.append(asyncio.create_task(self._killed_puller(reference, rng.uniform(0, _PULLER_S))))
        self.cut += 1

    async def _killed_puller(self, reference: str, seconds: float) -> None:
        command = [sys.executable, "-c", _PULLER, str(self.folder), reference]
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def left(self) -> int:
        """Count the files and processes that are left once everything is evicted."""
        await asyncio.gather(*self.pullers)
        await self.store.prune(0)
        paths = [path for name in ("layers", "partial", "images") for path in (self.folder / name).iterdir()]
        return len(paths) + len(list(unpackers()))


def unpackers() -> Iterator[int]:
    """Yield the processes of this machine that unpack a layer for this process."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = path.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"images.unpack" in path.joinpath("cmdline").read_bytes():
                yield int(path.name)


@contextlib.contextmanager
def chaos_images(count: int, seed: int) -> Iterator[ChaosImages | None]:
    """Serve images of this machine's shell, each with a layer of its own; None for a count of 0."""
    if not count:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="forge_rl-chaos-") as scratch, registry() as server:
        base_files, rng = host_layer(Path(scratch, "base"), _PROGRAMS), random.Random(seed)
        # One base of this machine's own shell for all images, so that nothing is downloaded.
        entries = []
        for path in sorted(base_files.rglob("*")):
            name = str(path.relative_to(base_files))
            if path.is_symlink():
                entries.append(link(name, os.readlink(path)))
            elif path.is_dir():
                entries.append(folder(name))
            else:
                entries.append(member(name, path.read_bytes(), mode=0o755))
        base = layer(*entries)
        references, own_layers = [], []
        for number in range(count):
            files = [member(f"opt/{number}/{name}", rng.randbytes(_FILE_BYTES)) for name in range(_FILES)]
            task_image = image([base, layer(*files)], {"WorkingDir": "/root"})
            references.append(server.add(task_image, f"chaos-{number}:1"))
            own_layers.append(task_image.layers[-1])
        yield ChaosImages(Path(scratch, "store"), server, references, own_layers)
