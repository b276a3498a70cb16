"""Images for tests: of this machine's programs, of Debian's packages, and of a static busybox in a musl-like root."""

import compileall
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from forge_rl.sandbox.images import ContainerImage, ImageSettings
from tests.images import image, write_layout

PROGRAMS = (
    *("bash", "cat", "chmod", "cp", "env", "grep", "head", "id", "ln", "ls", "mkdir", "mkfifo", "mv", "od", "pwd"),
    *("rm", "rmdir", "sed", "seq", "sleep", "sort", "stat", "tail", "touch", "true", "uname", "wc", "yes"),
)
DEBIAN = (
    *("libc6", "libgcc-s1", "libcrypt1", "bash", "dash", "coreutils", "libtinfo6", "libselinux1", "libpcre2-8-0"),
    *("libacl1", "libattr1", "libgmp10", "zlib1g", "libexpat1", "libffi8", "libssl3", "libaudit1", "libcap-ng0"),
    *("libpam0g", "libpam-modules", "util-linux", "grep", "sed", "base-files", "base-passwd"),
)
PYTHON = ("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib")
"""Packages of Debian 12."""


def image_of(*layers: Path, **settings: object) -> ContainerImage:
    """An image of layers in a store, `STORE/NAME/files`."""
    digest = hashlib.sha256("".join(map(str, layers)).encode()).hexdigest()
    return ContainerImage(
        reference="/".join(layer.parent.name for layer in layers),
        digest=f"sha256:{digest}",
        layers=layers,
        settings=ImageSettings(**settings),  # type: ignore[arg-type]
    )


def layer(store: Path, name: str, files: Mapping[str, str | bytes | None]) -> Path:
    """A layer with files; None deletes one of a lower layer, and text that begins with `-> ` is a link."""
    folder = store / name / "files"
    folder.mkdir(parents=True)
    for path, content in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            os.mknod(place, 0o020600, 0)
        elif isinstance(content, str) and content.startswith("-> "):
            place.symlink_to(content[3:])
        else:
            place.write_bytes(content if isinstance(content, bytes) else content.encode())
            place.chmod(0o755)
    return folder


def host_layer(store: Path, programs: Sequence[str] = PROGRAMS) -> Path:
    """A layer with a shell and small programs of this machine, and the libraries that they need."""
    folder = layer(store, "host", {"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nbob:x:1001:1002::/home/bob:/bin/sh\n"})
    paths = [str(path) for name in programs if (path := shutil.which(name, path="/usr/bin:/bin"))]
    listed = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=True).stdout
    for path in {*paths, *re.findall(r"(/\S+) \(0x", listed)}:
        place = folder / path[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    for name in ("bin", "lib64"):
        (folder / name).mkdir(exist_ok=True)
    if not (folder / "bin" / "bash").exists():
        (folder / "bin" / "bash").symlink_to("/usr/bin/bash")
    (folder / "bin" / "sh").symlink_to("bash")
    for name in ("root", "home/bob", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return folder


def packages_layer(store: Path, name: str, packages: Sequence[str]) -> Path:
    """A layer of Debian's packages, from the machine's registry; skips where there is none."""
    downloads, folder = store / f"{name}-packages", store / name / "files"
    downloads.mkdir(parents=True)
    folder.mkdir(parents=True)
    if shutil.which("apt-get") is None:
        pytest.skip("this machine has no apt-get")
    done = subprocess.run(["apt-get", "download", *packages], cwd=downloads, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no packages of Debian can be fetched: {done.stderr[-300:]}")
    for package in downloads.iterdir():
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
    shutil.rmtree(downloads)
    if sys.version_info[:2] == (3, 11) and (library := folder / "usr" / "lib" / "python3.11").is_dir():
        compileall.compile_dir(library, quiet=2, stripdir=folder)
    return folder


def debian_image(store: Path, **settings: object) -> ContainerImage:
    """Debian's shell, programs and Python, in two layers."""
    base = packages_layer(store, "debian", DEBIAN)
    passwd = "root:x:0:0:root:/root:/bin/bash\nbob:x:1001:1002::/home/bob:/bin/sh\n"
    (base / "etc" / "passwd").write_text(passwd)
    (base / "bin" / "sh").unlink(missing_ok=True)
    (base / "bin" / "sh").symlink_to("dash")
    (base / "tmp").mkdir(exist_ok=True)
    python = packages_layer(store, "debian-python", PYTHON)
    (python / "usr" / "bin" / "python3").symlink_to("python3.11")
    return image_of(base, python, **settings)


def busybox_layer(store: Path) -> Path:
    """A layer with a static busybox as its only program, and musl's C library."""
    folder = packages_layer(store, "busybox", ("busybox-static", "musl"))
    program = folder / "bin" / "busybox"
    for name in subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (folder / "bin" / name).symlink_to("/bin/busybox")
    (folder / "etc").mkdir(exist_ok=True)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return folder


def carried_python(store: Path) -> tuple[Path, list[str]]:
    """A layer with a Python and its own C library in a folder that no program of an image looks at, and its command."""
    folder = packages_layer(store, "carried", (*DEBIAN, *PYTHON))
    (store / "carried-whole" / "files").mkdir(parents=True)
    place = store / "carried-whole" / "files" / "carried"
    folder.rename(place)
    for name in ("bin", "sbin"):
        shutil.rmtree(place / name, ignore_errors=True)
    machine = os.uname().machine
    libraries = f"/carried/lib/{machine}-linux-gnu:/carried/usr/lib/{machine}-linux-gnu"
    [loader] = [path.name for path in (place / "lib" / f"{machine}-linux-gnu").glob("ld-linux*")]
    command = [f"/carried/lib/{machine}-linux-gnu/{loader}", "--library-path", libraries, "/carried/usr/bin/python3.11"]
    return place.parent, command


def written_layout(path: Path, layers: Sequence[Path], **settings: object) -> str:
    """Write an OCI layout of folders, with settings as images have them; return its reference."""
    write_layout(path, image(list(map(packed_folder, layers)), settings, compress=bytes))
    return f"oci:{path}"


def packed_folder(folder: Path) -> bytes:
    """Return a folder as an uncompressed layer."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(folder, arcname=".")
    return file.getvalue()
