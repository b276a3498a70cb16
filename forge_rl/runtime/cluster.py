"""Hosts, and the named process meshes that services spawn on them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError

if TYPE_CHECKING:
    from monarch.actor import HostMesh, ProcMesh


THIS_HOST = "local"
"""The host of the process that made the cluster."""

_DEFAULTS = {
    # Bytes of a message at most. torchstore wants this one, and sets it aloud where it is not set.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240",
    # Monarch moves an RDMABuffer in chunks of 64 MB. Over TCP chunks of this size take half the time.
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "4",
    # Otherwise a death on another machine is noticed after 10 s.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
}
"""Of Monarch, in the environment of every process, unless they are set."""


_ORPHANED_AFTER = "60s"


class Cluster:
    """The hosts of a run, as places for process meshes.

    Args:
        logs: folder for what the processes print, one file for each; it exists. Other hosts use the same path.
        hosts: by name, others than THIS_HOST, on which this process runs; what a Monarch job gives, one host each.

    Processes on this host, and on `local_hosts`, end with this one, however this one ends. Other hosts, such as those
    of a Slurm job, live on: start them with HYPERACTOR_MESH_ORPHAN_TIMEOUT=60s in their environment, and the processes
    on them end that long after this one.

    Raises:
        ConfigError: a host's name is taken, or a mesh has several hosts.
    """

    def __init__(self, logs: Path, hosts: Mapping[str, HostMesh] | None = None) -> None:
        _set_defaults()
        self._logs = logs
        self._hosts = dict(hosts or {})
        self._meshes: dict[str, ProcMesh] = {}
        if THIS_HOST in self._hosts:
            raise ConfigError(f"{THIS_HOST!r} is the host of the controller", hint="name the other host otherwise")
        for name, mesh in self._hosts.items():
            if (size := _size(mesh)) != 1:
                raise ConfigError(f"{name!r} names {size} hosts", hint="give each host of the job a name of its own")
        if self._hosts:
            import monarch.config

            monarch.config.configure(mesh_orphan_timeout=_ORPHANED_AFTER)  # the hosts' own setting is not enough

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts, this one first."""
        return (THIS_HOST, *self._hosts)

    def log_file(self, name: str) -> Path:
        """Where the processes of a mesh print to."""
        return self._logs / f"{name}.log"

    def spawn(
        self,
        name: str,
        *,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        host: str = THIS_HOST,
    ) -> ProcMesh:
        """A mesh of processes with one axis, `ranks`.

        Args:
            name: unique among the living meshes.
            ranks: how many processes.
            env: added to the environment of each.
            imports: modules that each imports first. Actors that share a process unpickle side by side, and would
                otherwise find modules half imported.
            host: where.

        Raises:
            ConfigError: there is no such host.
        """
        if host not in self.hosts:
            raise ConfigError(f"there is no host {host!r}", hint=f"choose one of {', '.join(self.hosts)}")
        with _quiet_stderr():  # Monarch announces its log file there, in the middle of the display
            from monarch.actor import default_bootstrap_cmd, this_host

            command = default_bootstrap_cmd().with_env({**os.environ, **(env or {})})
            place = this_host() if host == THIS_HOST else self._hosts[host].slice(hosts=0)
            mesh = place.spawn_procs(
                per_host={"ranks": ranks},
                bootstrap=functools.partial(_start_child, str(self.log_file(name)), tuple(imports)),
                bootstrap_command=lambda _: command,
                name=name.replace("/", "_"),
            )
        self._meshes[name] = mesh
        return mesh

    async def stop(self, name: str, *, deadline_s: float = 10.0) -> None:
        """End a mesh's processes. One that does not end in time ends with the controller."""
        mesh = self._meshes.pop(name, None)
        if mesh is not None:
            with contextlib.suppress(Exception):  # a mesh that has failed already cannot be stopped again
                await asyncio.wait_for(mesh.stop(), deadline_s)

    async def close(self) -> None:
        """End all meshes."""
        async with asyncio.TaskGroup() as group:
            for name in list(self._meshes):
                group.create_task(self.stop(name))


@contextlib.asynccontextmanager
async def local_hosts(names: Sequence[str]) -> AsyncIterator[dict[str, HostMesh]]:
    """Hosts that are processes of this machine, for `Cluster`: what runs on several hosts can be tried on one.

    They end with the body, or with this process, however it ends.

    Args:
        names: of the hosts; may be empty.
    """
    if not names:
        yield {}
        return
    _set_defaults()
    from monarch.job import ProcessJob

    scratch = tempfile.mkdtemp(prefix="hosts-")  # they leave folders behind; short, for names of sockets
    job = ProcessJob(dict.fromkeys(names, 1), env={"TMPDIR": scratch})
    guard = None
    try:
        with _quiet_stderr():
            job.apply()
            guard = _guard([host.pid for host in job._host_to_pid.values()], [str(job._tmpdir), scratch])
            state = job.state(cached_path=None)
        yield {name: getattr(state, name) for name in names}
    finally:
        await asyncio.to_thread(job.kill)
        if guard is not None:
            guard.kill()
            guard.communicate()
        shutil.rmtree(scratch, ignore_errors=True)


def _guard(pids: Sequence[int], folders: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that notices the end of this one, by its pipe, and then ends others and removes their folders.

    Monarch gives its hosts sessions of their own and lets them live on. Their children end with them.
    """
    script = f"cat; kill -9 {' '.join(map(str, pids))}; rm -rf {shlex.join(folders)}"
    return subprocess.Popen(
        ["/bin/sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _size(mesh: HostMesh) -> int:
    return int(mesh.size())


def _set_defaults() -> None:
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def _start_child(log_file: str, imports: Sequence[str]) -> None:
    """First thing in every process: its output, and that of its own children, goes to its log file."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for module in imports:
        importlib.import_module(module)


@contextlib.contextmanager
def _quiet_stderr():  # type: ignore[no-untyped-def]
    """Drop what native code prints to stderr meanwhile."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
