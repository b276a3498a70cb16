"""Images of containers and sessions of them: pulls next to tar, starts and live sessions next to podman's.

python -m benchmarks.containers --json out.json

Builds three images: a Debian of packages that apt downloads, one of busybox and musl, and a large one of 12 layers,
which are that Debian and Python packages of this environment. A registry on loopback serves them. Each is pulled into
an empty store, in turn with the limit: the same compressed layers, already on disk, unpacked one after another by tar;
and by podman.

For sessions, 20 images add layers of their own to those three. A start is from the request until the session has
answered that it is ready. For the storm, all sessions are requested at once, over all images; it ends when the last is
ready, and then each answers with its own state. Memory is the drop of the machine's MemAvailable by session. Podman
(with crun, without cgroups and without a network) starts containers of the same images, fewer as it takes longer, and
bubblewrap one command whose root is a layer, and not writable.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.container_images import PACKAGES, BuiltImage, Layer, build_images, build_variants, serve
from benchmarks.container_sessions import available_mib, measure_bubblewrap, measure_sessions
from benchmarks.podman import Podman, podman
from benchmarks.report import BenchmarkConfig, BenchmarkError, Report, check_repeats, median, run_benchmark
from forge_rl.errors import check_flags
from forge_rl.sandbox.images import ContainerImage, ImageStore


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure images of containers, and sessions of them."""

    gb: float = 2.0
    """Unpacked size of the large image in 10^9 bytes."""
    images: tuple[str, ...] = ("debian", "musl", "large")
    """Which images to build and measure."""
    repeats: int = 5
    """Repeats of each pull, after one warm-up, and of diffs and podman's starts."""
    large_repeats: int = 3
    """Repeats of pulls of the large image, without a warm-up."""
    sessions: int = 1000
    """Live sessions."""
    variants: int = 20
    """Images that they are of."""
    starts: int = 300
    """Sessions that are started one after another."""
    changed_files: int = 1000
    """Files that a session adds, whose diff is taken."""
    podman: bool = True
    """Measure podman, which apt downloads; only root can."""
    podman_sessions: int = 40
    """Podman's live containers."""
    folder: Path | None = None
    """Folder for images and stores; a temporary one by default."""

    def __post_init__(self) -> None:
        if not self.images or not {*self.images} <= {"large", *PACKAGES}:
            raise BenchmarkError(f"the images are {self.images}", hint=f"choose of large, {', '.join(PACKAGES)}")
        counts = dict.fromkeys(("large_repeats", "sessions", "variants", "starts", "changed_files"), 1)
        check_flags(self, "--", minimum=counts | {"podman_sessions": 1}, above={"gb": 0})
        check_repeats(self.repeats)


def measure(config: Config, report: Report) -> None:
    """Build the images, and measure pulls and sessions."""
    with tempfile.TemporaryDirectory(dir=config.folder, prefix="forge_rl-containers-") as scratch:
        folder = Path(scratch)
        images = build_images(folder / "registry", config.images, config.gb)
        variants = build_variants(folder / "registry", images, config.variants)
        with contextlib.ExitStack() as stack:
            host = stack.enter_context(serve(folder / "registry"))
            peer = stack.enter_context(podman(folder)) if config.podman else None
            sizes = _measure_pulls(config, report, folder, images, _Pullers(host, peer))
            store = folder / "store"
            pulled = _measure_store(report, store, [f"{host}/{image.name}:1" for image in variants])
            for layer in {layer.path: layer for image in variants for layer in image.layers}.values():
                if layer.path not in sizes:
                    _untar(folder / "small", [layer])
                    sizes |= _sizes(folder / "small", [layer])
            report.measure("disk_over_layers", [_disk_bytes(store) / sum(sizes.values())])
            measure_bubblewrap(report, pulled[0], config.repeats)
            if peer is not None:
                _measure_podman(config, report, peer, [f"{host}/{image.name}:1" for image in variants])
        asyncio.run(measure_sessions(config, report, store, pulled))


@dataclass(frozen=True)
class _Pullers:
    """Who fetches or unpacks images."""

    host: str
    peer: Podman | None


def _measure_pulls(
    config: Config, report: Report, folder: Path, images: Sequence[BuiltImage], pullers: _Pullers
) -> dict[Path, int]:
    """Pull each image into an empty store, unpack the same layers with tar, and pull it with podman.

    Returns:
        The space that each layer takes, unpacked by tar.
    """
    totals, sizes = dict.fromkeys(("pull", "tar", "podman"), 0.0), dict[Path, int]()
    for image in images:
        reference = f"{pullers.host}/{image.name}:1"
        seconds: dict[str, list[float]] = {"pull": [], "tar": [], "podman": []}
        warm_ups, repeats = (0, config.large_repeats) if image.name == "large" else (1, config.repeats)
        for repeat in range(warm_ups + repeats):
            runs: dict[str, Callable[[], object]] = {
                "pull": partial(_pull, folder / "pull", reference),
                "tar": partial(_untar, folder / "tar", image.layers),
            }
            if (peer := pullers.peer) is not None:
                peer.run("podman rmi --all --force")
                runs["podman"] = partial(peer.pull, reference)
            for kind, run in runs.items():
                # Writes of the one before must not slow the next.
                os.sync()
                start_time = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start_time
                print(f"{image.name}, {kind}: {elapsed:.2f} s", flush=True)
                report.rows.append(
                    {"image": image.name, "kind": kind, "warm_up": repeat < warm_ups, "seconds": elapsed}
                )
                if repeat >= warm_ups:
                    seconds[kind].append(elapsed)
                if kind == "tar":
                    sizes |= _sizes(folder / "tar", image.layers)
                for name in ("pull", "tar"):
                    shutil.rmtree(folder / name, ignore_errors=True)
        for kind, durations in seconds.items():
            if durations:
                totals[kind] += report.measure(f"{image.name}_{kind}_s", durations)
        report.measure(f"{image.name}_pull_over_limit", [median(seconds["pull"]) / median(seconds["tar"])])
    report.measure("pull_over_limit", [totals["pull"] / totals["tar"]])
    if pullers.peer is not None:
        report.measure("pull_over_podman", [totals["pull"] / totals["podman"]])
    return sizes


def _pull(folder: Path, reference: str) -> None:
    asyncio.run(ImageStore(folder).get(reference))


def _untar(folder: Path, layers: Sequence[Layer]) -> None:
    for layer in layers:
        target = folder / layer.path.name
        target.mkdir(parents=True)
        subprocess.run(["tar", "-xzf", str(layer.path), "-C", str(target)], check=True)


def _sizes(folder: Path, layers: Sequence[Layer]) -> dict[Path, int]:
    """Return the space that each layer takes, unpacked by `_untar`."""
    return {layer.path: _disk_bytes(folder / layer.path.name) for layer in layers}


def _disk_bytes(folder: Path) -> int:
    output = subprocess.run(["du", "-s", "--block-size=1", str(folder)], capture_output=True, check=True).stdout
    return int(output.split()[0])


def _measure_store(report: Report, folder: Path, references: Sequence[str]) -> list[ContainerImage]:
    """Pull all images into one store at once."""

    async def pull_all() -> list[ContainerImage]:
        store = ImageStore(folder)
        return await asyncio.gather(*(store.get(reference) for reference in references))

    start_time = time.perf_counter()
    images = asyncio.run(pull_all())
    report.results[f"pull_{len(references)}_images_s"] = time.perf_counter() - start_time
    return images


def _measure_podman(config: Config, report: Report, peer: Podman, references: Sequence[str]) -> None:
    """Start podman's containers one after another, and several at a time."""
    count, names = config.podman_sessions, [references[n % len(references)] for n in range(config.podman_sessions)]
    for reference in dict.fromkeys(names):
        peer.pull(reference)
    starts = [1000 * peer.start([reference]) for reference in names[: max(config.repeats, count // 2)]]
    report.measure("podman_start_ms", starts)
    peer.run("podman rm --all --force --time 0")
    before = available_mib()
    report.results[f"podman_sessions_{count}_s"] = peer.start(names)
    report.results["podman_mib_a_session"] = (before - available_mib()) / count
    peer.run("podman rm --all --force --time 0")


if __name__ == "__main__":
    run_benchmark("containers", Config, measure)
