"""Images of containers: pulls compared with tar, and space on disk compared with the layers'.

python -m benchmarks.containers --json out.json

Builds three images: a Debian of packages that apt downloads, one of busybox and musl, and a large one whose layers hold
Python packages of this environment. A registry on loopback serves them. Each is pulled into an empty store, in turn
with the limit: the same compressed layers, already on disk, unpacked one after another by tar.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import LEAST_REPEATS, BenchmarkConfig, BenchmarkError, Report, median, run_benchmark
from forge_rl.sandbox.images import ImageStore
from tests.images import digest_of

_DEBIAN = """base-files base-passwd bash coreutils dash debianutils diffutils findutils grep gzip hostname libacl1
libattr1 libbz2-1.0 libc-bin libc6 libgcc-s1 libgmp10 liblzma5 libpcre2-8-0 libselinux1 libssl3 libstdc++6 libtinfo6
libuuid1 libsqlite3-0 libffi8 libreadline8 libncursesw6 libdb5.3 libexpat1 libnsl2 libtirpc3 libgssapi-krb5-2 libkrb5-3
libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1 media-types mawk ncurses-base ncurses-bin perl-base
python3-minimal python3.11-minimal libpython3.11-minimal libpython3.11-stdlib python3.11 python3 git sed tar zlib1g"""
_PACKAGES = {"debian": _DEBIAN, "musl": "musl busybox-static"}
_LAYERS = 12
_SERVER = """
import sys
from pathlib import Path
from tests.images import Registry, registry
with registry() as server:
    for path in (Path(sys.argv[1]) / "blobs").iterdir():
        small = path.stat().st_size < 1 << 20
        server.blobs["sha256:" + path.name] = path.read_bytes() if small else path
    for path in (Path(sys.argv[1]) / "tags").iterdir():
        server.tags[f"{path.name}:1"] = path.read_text()
    print(server.host, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True, kw_only=True)
class Config(BenchmarkConfig):
    """Measure pulls of images."""

    gb: float = 2.0
    """Unpacked size of the large image in 10^9 bytes."""
    images: tuple[str, ...] = ("debian", "musl", "large")
    """Which images to build and measure."""
    repeats: int = 5
    """Repeats of each, after one warm-up."""
    folder: Path | None = None
    """Folder for images and stores; a temporary one by default."""

    def __post_init__(self) -> None:
        if not self.images or not {*self.images} <= {"large", *_PACKAGES}:
            raise BenchmarkError(f"the images are {self.images}", hint=f"choose of large, {', '.join(_PACKAGES)}")
        if self.repeats < LEAST_REPEATS or self.gb <= 0:
            raise BenchmarkError(
                f"too little to measure: {self.repeats} repeats of {self.gb} GB",
                hint=f"set --repeats to {LEAST_REPEATS} or more, --gb above 0",
            )


@dataclass(frozen=True)
class BuiltImage:
    """An image in a folder of blobs."""

    name: str
    layers: Sequence[Path]
    """Compressed."""


def measure(config: Config, report: Report) -> None:
    """Build the images, and pull them in turn with the limit."""
    with tempfile.TemporaryDirectory(dir=config.folder, prefix="forge_rl-containers-") as scratch:
        folder = Path(scratch)
        images = build_images(folder / "registry", config.images, config.gb)
        with serve(folder / "registry") as host:
            measure_pulls(host, images, folder, config.repeats, report)


def measure_pulls(host: str, images: Sequence[BuiltImage], folder: Path, repeats: int, report: Report) -> None:
    """Pull each image into an empty store, and unpack the same layers with tar."""
    totals = dict.fromkeys(("pull_s", "tar_s", "pull_bytes", "tar_bytes"), 0.0)
    for built in images:
        seconds: dict[str, list[float]] = {"pull": [], "tar": []}
        cpu_seconds: dict[str, list[float]] = {"pull": [], "tar": []}
        sizes: dict[str, int] = {}
        for repeat in range(1 + repeats):
            for kind, run in (
                ("pull", lambda store, built=built: _pull(store, f"{host}/{built.name}:1")),
                ("tar", lambda store, built=built: _untar(store, built.layers)),
            ):
                elapsed, cpu, sizes[kind] = _timed(folder / "store", run)
                row = {"image": built.name, "kind": kind, "warm_up": repeat == 0, "seconds": elapsed, "cpu_s": cpu}
                report.rows.append(row)
                print(
                    f"{built.name}, {kind}: {elapsed:.2f} s, {cpu:.2f} s of CPU, {sizes[kind] / 1e6:.0f} MB", flush=True
                )
                if repeat:
                    seconds[kind].append(elapsed)
                    cpu_seconds[kind].append(cpu)
        report.measure(f"{built.name}_pull_s", seconds["pull"])
        report.measure(f"{built.name}_tar_s", seconds["tar"])
        report.measure(f"{built.name}_pull_over_limit", [median(seconds["pull"]) / median(seconds["tar"])])
        ratio = median(cpu_seconds["pull"]) / median(cpu_seconds["tar"])
        report.measure(f"{built.name}_pull_cpu_over_limit", [ratio])
        report.measure(f"{built.name}_disk_over_layers", [sizes["pull"] / sizes["tar"]])
        for kind in ("pull", "tar"):
            totals[f"{kind}_s"] += median(seconds[kind])
            totals[f"{kind}_bytes"] += sizes[kind]
    report.measure("pull_over_limit", [totals["pull_s"] / totals["tar_s"]])
    report.measure("disk_over_layers", [totals["pull_bytes"] / totals["tar_bytes"]])


def _timed(store: Path, run: Callable[[Path], None]) -> tuple[float, float, int]:
    """Return the seconds that filling a folder takes, those of processors, and the space it has then."""
    store.mkdir()
    os.sync()
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    run(store)
    elapsed, cpu = time.perf_counter() - start, sum(os.times()[:4]) - cpu_start
    output = subprocess.run(["du", "-s", "--block-size=1", str(store)], capture_output=True, check=True).stdout
    shutil.rmtree(store)
    return elapsed, cpu, int(output.split()[0])


def _pull(store: Path, reference: str) -> None:
    asyncio.run(ImageStore(store).get(reference))


def _untar(store: Path, layers: Sequence[Path]) -> None:
    for index, layer in enumerate(layers):
        target = store / str(index)
        target.mkdir()
        subprocess.run(["tar", "-xzf", str(layer), "-C", str(target)], check=True)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder of blobs and tags in a process of its own; yields the registry's host and port."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate("")


def build_images(folder: Path, names: Sequence[str], gb: float) -> list[BuiltImage]:
    """Build the images as blobs and tags in a folder.

    Raises:
        BenchmarkError: this machine has no apt.
    """
    for name in ("blobs", "tags"):
        (folder / name).mkdir(parents=True)
    images = []
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        roots = Path(scratch)
        for name in names:
            if name == "large":
                _python_layers(roots / name, gb)
            else:
                _packages(roots / name, _PACKAGES[name].split())
            layers = sorted((roots / name).iterdir())
            images.append(_image(folder, name, layers))
            print(f"built {name}: {sum(path.stat().st_size for path in images[-1].layers) / 1e6:.0f} MB", flush=True)
    return images


def _packages(folder: Path, names: Sequence[str]) -> None:
    """Unpack Debian packages into the folder of one layer."""
    if shutil.which("apt-get") is None:
        raise BenchmarkError("images of Debian packages need apt-get", hint="run the benchmark on Debian or Ubuntu")
    layer, downloads = folder / "00", folder.with_suffix(".downloads")
    layer.mkdir(parents=True)
    downloads.mkdir()
    command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *names]
    result = subprocess.run(command, cwd=downloads, capture_output=True, text=True)
    if result.returncode:
        raise BenchmarkError(f"apt-get download failed: {result.stderr[-500:]}", hint="run apt-get update")
    for package in sorted(downloads.iterdir()):
        subprocess.run(["dpkg-deb", "-x", str(package), str(layer)], check=True)
    if (busybox := layer / "bin/busybox").exists():
        listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for name in listed:
            with contextlib.suppress(FileExistsError):
                (layer / "bin" / name).symlink_to("busybox")


def _python_layers(folder: Path, gb: float) -> None:
    """Copy Python packages of this environment into folders of equal size, as layers."""
    source = Path(sysconfig.get_paths()["purelib"])
    paths = sorted(path for path in source.rglob("*") if path.is_file() and not path.is_symlink())
    left, layer_bytes, index, filled = gb * 1e9, gb * 1e9 / _LAYERS, 0, 0.0
    for path in paths:
        size = path.stat().st_size
        if size > layer_bytes / 2 or left < size:
            continue
        target = folder / f"{index:02}/opt/packages" / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        left -= size
        filled += size
        if filled > layer_bytes and index < _LAYERS - 1:
            index, filled = index + 1, 0.0
    if left > gb * 0.1e9:
        raise BenchmarkError(f"this environment has only {gb - left / 1e9:.2f} GB of packages", hint="lower --gb")


def _image(folder: Path, name: str, layers: Sequence[Path]) -> BuiltImage:
    blobs, diff_ids = [], []
    for layer in layers:
        archive = layer.with_suffix(".tar")
        owner = ["--owner=0", "--group=0", "--numeric-owner", "--sort=name"]
        subprocess.run(["tar", "-cf", str(archive), *owner, "-C", str(layer), "."], check=True)
        with archive.open("rb") as file:
            diff_ids.append(f"sha256:{_file_digest(file)}")
        subprocess.run(["gzip", "-n", "-6", str(archive)], check=True)
        compressed = archive.with_suffix(".tar.gz")
        with compressed.open("rb") as file:
            blob = folder / "blobs" / _file_digest(file)
        shutil.move(compressed, blob)
        blobs.append(blob)
        shutil.rmtree(layer)
    config = json.dumps({"config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()
    entries = [{"digest": f"sha256:{path.name}", "size": path.stat().st_size} for path in blobs]
    manifest = json.dumps({"config": {"digest": digest_of(config), "size": len(config)}, "layers": entries}).encode()
    for data in (config, manifest):
        (folder / "blobs" / digest_of(data).removeprefix("sha256:")).write_bytes(data)
    (folder / "tags" / name).write_text(digest_of(manifest))
    return BuiltImage(name, blobs)


def _file_digest(file: object) -> str:
    import hashlib

    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


if __name__ == "__main__":
    run_benchmark("containers", Config, measure)
