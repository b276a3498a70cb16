"""Images for benchmarks, built of packages, and the process of a registry that serves them on loopback."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import BenchmarkError
from tests.images import OCI_MANIFEST, digest_of

_DEBIAN = """base-files base-passwd bash coreutils dash debianutils diffutils findutils grep gzip hostname libacl1
libattr1 libbz2-1.0 libc-bin libc6 libgcc-s1 libgmp10 liblzma5 libpcre2-8-0 libselinux1 libssl3 libstdc++6 libtinfo6
libuuid1 libsqlite3-0 libffi8 libreadline8 libncursesw6 libdb5.3 libexpat1 libnsl2 libtirpc3 libgssapi-krb5-2 libkrb5-3
libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1 media-types mawk ncurses-base ncurses-bin perl-base
python3-minimal python3.11-minimal libpython3.11-minimal libpython3.11-stdlib python3.11 python3 git sed tar zlib1g"""
PACKAGES = {"debian": _DEBIAN, "musl": "musl busybox-static"}
LAYERS, OWN_LAYERS = 12, 5
"""Layers of the large image, and the layers that a variant adds to its image."""
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


@dataclass(frozen=True)
class Layer:
    """A compressed layer."""

    path: Path
    diff_id: str
    """Digest of its uncompressed bytes."""


@dataclass(frozen=True)
class BuiltImage:
    """An image in a folder of blobs."""

    name: str
    layers: Sequence[Layer]


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
    """Build images as blobs and tags in a folder: "large" has Debian's packages below its other layers.

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
                _packages(roots / name, PACKAGES["debian"].split())
                _python_layers(roots / name, gb)
            else:
                _packages(roots / name, PACKAGES[name].split())
            images.append(_image(folder, name, _blobs(folder, sorted((roots / name).iterdir()))))
            print(
                f"built {name}: {sum(layer.path.stat().st_size for layer in images[-1].layers) / 1e6:.0f} MB",
                flush=True,
            )
    return images


def _packages(folder: Path, names: Sequence[str]) -> None:
    """Unpack Debian packages into the folder of one layer."""
    if shutil.which("apt-get") is None:
        raise BenchmarkError("images of Debian packages need apt-get", hint="run the benchmark on Debian or Ubuntu")
    layer, downloads = folder / "00", folder.with_suffix(".downloads")
    layer.mkdir(parents=True)
    downloads.mkdir()
    # As root: apt's own user could not write to a private folder.
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
    left, layer_bytes, index, filled = gb * 1e9, gb * 1e9 / (LAYERS - 1), 1, 0.0
    for path in paths:
        size = path.stat().st_size
        # Files of half a layer or more would make layers of very different sizes.
        if size > layer_bytes / 2 or left < size:
            continue
        target = folder / f"{index:02}/opt/packages" / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        left -= size
        filled += size
        if filled > layer_bytes and index < LAYERS - 1:
            index, filled = index + 1, 0.0
    if left > gb * 0.1e9:
        raise BenchmarkError(f"this environment has only {gb - left / 1e9:.2f} GB of packages", hint="lower --gb")


def build_variants(folder: Path, images: Sequence[BuiltImage], count: int) -> list[BuiltImage]:
    """Build images that add small layers of their own to others in turn."""
    variants = []
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        for number in range(count):
            layers = [Path(scratch, f"{number}-{place}") for place in range(OWN_LAYERS)]
            for layer in layers:
                (layer / "opt" / layer.name).mkdir(parents=True)
                for file in range(20):
                    (layer / "opt" / layer.name / str(file)).write_text(f"{layer.name} {file}\n")
            base = images[number % len(images)]
            variants.append(_image(folder, f"{base.name}-{number}", [*base.layers, *_blobs(folder, layers)]))
    return variants


def _blobs(folder: Path, layers: Sequence[Path]) -> list[Layer]:
    """Move folders into blobs, as compressed layers."""
    with ThreadPoolExecutor() as threads:
        return [*threads.map(functools.partial(_blob, folder), layers)]


def _blob(folder: Path, layer: Path) -> Layer:
    archive = layer.with_name(f"{layer.name}.tar")
    # The same names, times and owners give the same digests in every run.
    owner = ["--owner=0", "--group=0", "--numeric-owner", "--sort=name", "--mtime=@0"]
    subprocess.run(["tar", "-cf", str(archive), *owner, "-C", str(layer), "."], check=True)
    with archive.open("rb") as file:
        diff_id = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    subprocess.run(["gzip", "-n", "-6", str(archive)], check=True)
    compressed = archive.with_name(f"{archive.name}.gz")
    with compressed.open("rb") as file:
        path = folder / "blobs" / hashlib.file_digest(file, "sha256").hexdigest()
    shutil.move(compressed, path)
    shutil.rmtree(layer)
    return Layer(path, diff_id)


def _image(folder: Path, name: str, layers: Sequence[Layer]) -> BuiltImage:
    diff_ids = [layer.diff_id for layer in layers]
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    ).encode()
    entries = [
        {
            "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
            "digest": f"sha256:{layer.path.name}",
            "size": layer.path.stat().st_size,
        }
        for layer in layers
    ]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest_of(config),
                "size": len(config),
            },
            "layers": entries,
        }
    ).encode()
    for data in (config, manifest):
        (folder / "blobs" / digest_of(data).removeprefix("sha256:")).write_bytes(data)
    (folder / "tags" / name).write_text(digest_of(manifest))
    return BuiltImage(name, layers)
