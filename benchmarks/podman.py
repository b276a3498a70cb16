"""Podman and crun from the machine's package registry, in a root that ends with the process: nothing is installed."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import BenchmarkError

_PACKAGES = """podman crun conmon netavark golang-github-containers-common golang-github-containers-image libyajl2
libgpgme11 libassuan0 libdevmapper1.02.1 libseccomp2 libsubid4 libglib2.0-0 libcap2 libsystemd0"""
_OPTIONS = "--network=none --pull=never --cgroups=disabled --log-driver=none"
_AT_A_TIME = 4
_ENTER = """set -e
mount -t tmpfs tmpfs "$1/podman"
cd "$1/podman"
mkdir top work all
mount -t overlay overlay -o "lowerdir=/,upperdir=$PWD/top,workdir=$PWD/work" all
for package in "$1"/podman-packages/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C all
done
rm -rf all/etc/cni
mkdir -p all/var/lib/containers
mount --bind "$1/podman-state" all/var/lib/containers
for folder in sys dev; do mount --rbind "/$folder" "all/$folder"; done
mount -t tmpfs tmpfs all/dev/shm  # podman leaves locks there
mount --bind "$2" all/sys/fs/cgroup
mount -t proc proc all/proc
exec chroot all /bin/bash -c 'ldconfig; export TMPDIR=/var/lib/containers; exec bash'
"""
"""The root is this machine's with podman's files above it; crun refuses cgroups of two versions side by side."""


@dataclass(frozen=True)
class Podman:
    """A shell that knows podman."""

    shell: subprocess.Popen[str]
    log: Path

    def run(self, command: str) -> float:
        """Run a command line; return the seconds that it took.

        Raises:
            BenchmarkError: it failed.
        """
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        start_time = time.perf_counter()
        # The shell answers with one line, the status, which also says that the command has ended.
        self.shell.stdin.write(f"( {command} ) </dev/null >/dev/null; echo $?\n")
        self.shell.stdin.flush()
        status = self.shell.stdout.readline().strip()
        if status != "0":
            lines = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise BenchmarkError(f"podman failed ({status or 'it ended'}): {lines}", hint="leave it out: --no-podman")
        return time.perf_counter() - start_time

    def pull(self, reference: str) -> None:
        """Pull an image of a registry on loopback."""
        self.run(f"podman pull --quiet --tls-verify=false {shlex.quote(reference)}")

    def start(self, references: Sequence[str]) -> float:
        """Start a container of each image; return the seconds until all run."""
        command = f"podman run --detach {_OPTIONS} {{}} /bin/sh -c 'while :; do sleep 1000; done'"
        lines = " ".join(map(shlex.quote, references))
        return self.run(f"printf '%s\\n' {lines} | xargs -P {_AT_A_TIME} -I {{}} {command}")


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[Podman]:
    """Yield podman; all of its processes and mounts end with the block.

    Args:
        folder: for its packages and images.

    Raises:
        BenchmarkError: this machine has no apt, or it does not start.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BenchmarkError("podman is measured by root, on Debian or Ubuntu", hint="leave it out: --no-podman")
    packages = folder / "podman-packages"
    for path in (packages, folder / "podman", folder / "podman-state"):
        path.mkdir()
    download = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *_PACKAGES.split()]
    result = subprocess.run(download, cwd=packages, capture_output=True, text=True)
    if result.returncode:
        raise BenchmarkError(f"apt-get download failed: {result.stderr[-500:]}", hint="apt-get update, or --no-podman")
    unified = Path("/sys/fs/cgroup/unified")
    cgroups = unified if unified.is_dir() else unified.parent
    log = folder / "podman.log"
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/bash", "-c", _ENTER, "-"]
    with log.open("w") as errors:
        shell = subprocess.Popen(
            [*command, str(folder), str(cgroups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        peer = Podman(shell, log)
        peer.run("podman version")
        yield peer
    finally:
        with contextlib.suppress(BrokenPipeError):
            assert shell.stdin is not None
            shell.stdin.close()
        shell.wait()
