"""Fetch, list and evict images of containers on this machine.

forge-rl images pull debian:12 oci:build/layout
forge-rl images list
forge-rl images prune --max-gb 50
forge-rl images serve --key-file key
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from forge_rl.errors import ConfigError, check_flags
from forge_rl.flags.fields import check_idle
from forge_rl.gateway.keys import read_key
from forge_rl.models.bundled import default_cache
from forge_rl.run.launch import launch
from forge_rl.sandbox.images import ImageStore, LayerPeers
from forge_rl.sandbox.images.layers import LayerProgress
from forge_rl.system.terminal import clipped

_FLAGS_BY_ACTION: Mapping[str, tuple[str, ...]] = {
    "pull": ("max_gb", "mirror", "peer", "key_file"),
    "list": (),
    "prune": ("max_gb",),
    "serve": ("key_file", "address", "port"),
}
"""Flags that each action reads, besides --store."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Fetch, list or evict images of containers."""

    action: tyro.conf.Positional[Literal["pull", "list", "prune", "serve"]]
    """pull: fetch and unpack; list: show the images; prune: evict unused layers; serve: send layers to other hosts'
    `pull --peer`."""
    images: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of images to pull: REGISTRY/NAME:TAG@DIGEST, oci:FOLDER, docker-archive:FILE, oci-archive:FILE or
    dockerfile:FOLDER."""
    store: Path = field(default_factory=lambda: default_cache() / "images")
    """Folder of the images."""
    max_gb: float | None = None
    """Space for layers in 10^9 bytes: pull evicts the least recently used layers past it, prune down to it (0 by
    default)."""
    mirror: tuple[str, ...] = ()
    """REGISTRY=ADDRESS pairs: addresses to ask before a registry, such as docker.io=https://mirror.example."""
    peer: tuple[str, ...] = ()
    """Hosts to ask for layers before a registry, such as http://node-2:8700."""
    key_file: Path | None = None
    """File with the key of peers, which no other user may have access to (chmod 600)."""
    address: str = "127.0.0.1"
    """Address at which serve listens: one of a network that is the job's alone, as layers are not encrypted."""
    port: int = 8700
    """Port at which serve listens."""

    def __post_init__(self) -> None:
        if (self.action == "pull") != bool(self.images):
            problem = "no image" if self.action == "pull" else f"{len(self.images)} images"
            raise ConfigError(f"{self.action} is given {problem}", hint="name images for pull, and for nothing else")
        check_flags(self, "--", minimum={"port": 0}, below={"port": 65536})
        if self.max_gb is not None and not 0 <= self.max_gb < float("inf"):
            raise ConfigError(f"--max-gb is {self.max_gb}", hint="set it to 0 or more")
        for pair in self.mirror:
            if not all(pair.partition("=")):
                raise ConfigError(f"--mirror is {pair!r}", hint="write REGISTRY=ADDRESS")
        if (self.action == "serve" or self.peer) and self.key_file is None:
            raise ConfigError("peers need a key", hint="set --key-file to a file with the same key on all hosts")

    def check_effects(self) -> None:
        """Refuse flags that the action does not read.

        Raises:
            ConfigError: names the first of them.
        """
        other_flags = {flag for flags in _FLAGS_BY_ACTION.values() for flag in flags} - {*_FLAGS_BY_ACTION[self.action]}
        idle_groups = {
            f"{self.action} does not read it": sorted(other_flags),
            "no --peer is asked": () if self.peer or self.action == "serve" else ("key_file",),
        }
        check_idle(self, idle_groups)


async def main(config: Config) -> None:
    """Do what the action says."""
    console = Console(highlight=False)
    max_bytes = None if config.max_gb is None else round(config.max_gb * 1e9)
    mirrors: dict[str, list[str]] = {}
    for registry, _, address in (pair.partition("=") for pair in config.mirror):
        mirrors.setdefault(registry, []).append(address)
    key = read_key(config.key_file) if config.key_file is not None else ""
    if config.action == "serve":
        try:
            with ImageStore(config.store).serve(config.address, config.port, key) as port:
                console.print(escape(f"serving the layers of {config.store} at http://{config.address}:{port}"))
                await asyncio.Event().wait()
        except OSError as error:  # of listening, as nothing else happens here
            raise ConfigError(
                f"cannot listen on {config.address}:{config.port}: {error.strerror or error}",
                hint="set another --address or --port (0 picks a free one)",
            ) from None
    if config.action == "pull":
        peers = LayerPeers(addresses=config.peer, key=key) if config.peer else None
        with _layers_progress(console) as (progress, show):
            store = ImageStore(config.store, max_bytes, mirrors=mirrors or None, progress=show, peers=peers)
            for name in config.images:
                image = await store.get(name)
                progress.console.print(escape(f"{name}: {image.digest}, {len(image.layers)} layers"), soft_wrap=True)
        return
    store = ImageStore(config.store)
    if config.action == "prune":
        freed = await store.prune(max_bytes or 0)
        remainder = f"{store.disk_bytes() / 1e9:.2f} GB are left in {config.store}"
        console.print(escape(f"freed {freed / 1e9:.2f} GB; {remainder}"))
        return
    table = Table(box=None, header_style="bold")
    for column in ("image", "digest", "GB", "state"):
        table.add_column(column, justify="right" if column == "GB" else "left")
    for stored in store.images():
        names = Text(clipped(", ".join(stored.references), lines=1, width=70), no_wrap=True)
        state = "complete" if stored.is_complete else "layers evicted"
        table.add_row(names, stored.digest[7:19], f"{stored.disk_bytes / 1e9:.2f}", state)
    console.print(table)
    size = f"{store.disk_bytes() / 1e9:.2f} GB in {config.store}"
    console.print(escape(f"{size}; layers that images share count once here"))


@contextlib.contextmanager
def _layers_progress(console: Console) -> Iterator[tuple[Progress, Callable[[LayerProgress], None]]]:
    """Show a line for each layer on the way; yields the function to report progress to."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    # Layers are fetched by several threads, which all report here.
    guard = threading.Lock()
    with Progress(*columns, console=console, transient=True) as progress:

        def show(layer: LayerProgress) -> None:
            with guard:
                if layer.digest not in tasks:
                    tasks[layer.digest] = progress.add_task(layer.digest[7:19], total=layer.size)
                progress.update(tasks[layer.digest], completed=layer.done_bytes)

        yield progress, show


if __name__ == "__main__":
    launch(Config, main)
