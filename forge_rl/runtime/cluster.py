"""Named process meshes on the hosts of a run, which services spawn."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import ConfigError
from forge_rl.runtime.isolation import public_ports
from forge_rl.runtime.processes import clean_up_after
from forge_rl.runtime.signals import outlive_stop_signals
from forge_rl.variables import handed_on, hide, kept_back, take

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from monarch.actor import HostMesh, ProcMesh


THIS_HOST = "local"
"""Name of the host of the process that made the cluster."""

_DEFAULTS = {
    # Most bytes of a message. torchstore wants this value, and prints a line where it has to set it.
    "HYPERACTOR_CODEC_MAX_FRAME_LENGTH": "910737418240",
    # Monarch moves an RDMABuffer in chunks of 64 MB. Over TCP chunks of this size take half the time.
    "MONARCH_RDMA_MAX_CHUNK_SIZE_MB": "4",
    # Otherwise a death on another machine is noticed after 10 s.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # Otherwise a process ends that cannot deliver a message for 30 s, as to a controller that is stopped.
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1day",
}
"""Monarch's variables in the environment of every process, unless they are set."""

_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
_CHILDREN_DEFAULTS = {
    # What the processes of one service open for each other, without asking who connects, stays on this machine.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    # By default a folder under /tmp whose name everybody knows, with code that is loaded.
    _COMPILED: "~/.cache/torchinductor",
}
"""Variables in the environment of spawned processes, unless they are set."""


class Cluster:
    """Hosts of a run, as places for process meshes.

        cluster = Cluster(Path("logs"))
        mesh = cluster.spawn("trainer-0", ranks=2)
        await cluster.close()

    Args:
        logs: existing folder for the output of processes, one file for each mesh. Other hosts use the same path.
        hosts: other hosts than THIS_HOST, by name, each a Monarch job's mesh of one host.
        may_be_public: True if Monarch may listen where other machines reach it. It runs what it is sent.

    Processes on this host, and on `local_hosts`, end with this one, however this one ends. Other hosts, such as those
    of a Slurm job, live on: start them with HYPERACTOR_MESH_ORPHAN_TIMEOUT=60s in their environment, and the processes
    on them end that long after this one.

    Raises:
        ConfigError: a host's name is taken, or a mesh has several hosts.
    """

    def __init__(self, logs: Path, hosts: Mapping[str, HostMesh] | None = None, *, may_be_public: bool = False) -> None:
        set_defaults()
        hide()
        self._logs = logs
        self._may_be_public = may_be_public
        self._hosts = dict(hosts or {})
        self._meshes: dict[str, ProcMesh] = {}
        if THIS_HOST in self._hosts:
            raise ConfigError(f"{THIS_HOST!r} is the host of the controller", hint="name the other host otherwise")
        for name, mesh in self._hosts.items():
            if (size := int(mesh.size())) != 1:
                raise ConfigError(f"{name!r} names {size} hosts", hint="give each host of the job a name of its own")
        import monarch.config

        # A process that is stopped ends once its last messages are acknowledged, which otherwise takes half a second.
        settings = {"message_ack_time_interval": "50ms"}
        # A controller that is stopped for longer, by Ctrl-Z or a debugger, would otherwise count its processes as dead.
        # Where Monarch is imported before the environment has the first, it would not take it from there.
        settings |= {"message_delivery_timeout": "1day", "supervision_watchdog_timeout": "1day"}
        if self._hosts:
            settings["mesh_orphan_timeout"] = "60s"  # the hosts' own setting is not enough
        monarch.config.configure(**settings)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts, this one first."""
        return (THIS_HOST, *self._hosts)

    def log_file(self, name: str) -> Path:
        """Return the file that the processes of a mesh print to."""
        return self._logs / f"{name}.log"

    def spawn(
        self,
        name: str,
        *,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        host: str = THIS_HOST,
        secrets: bool = False,
    ) -> ProcMesh:
        """Start a mesh of processes with one axis, `ranks`.

        Args:
            name: unique among the living meshes.
            env: added to the environment of each.
            secrets: tell them the variables that children do not get, such as API keys, for their os.environ alone.
            imports: modules that each imports first. Actors that share a process unpickle side by side, and would
                otherwise find modules half imported.

        Raises:
            ConfigError: there is no such host, or Monarch listens to other machines and must not.
        """
        if host not in self.hosts:
            raise ConfigError(f"there is no host {host!r}", hint=f"choose one of {', '.join(self.hosts)}")
        additions: dict[str, str | None] = {each: os.environ[each] for each in _DEFAULTS}
        additions |= dict.fromkeys(os.environ.keys() - handed_on().keys())
        if os.path.dirname(os.environ.get(_COMPILED, "")) == tempfile.gettempdir():
            additions[_COMPILED] = None  # torch notes its own choice there once it has compiled something
        if host == THIS_HOST:
            # Not in the process itself, where Monarch's threads read the environment already: libc may then crash.
            for each, value in _CHILDREN_DEFAULTS.items():
                if additions.get(each, os.environ.get(each)) is None:
                    additions[each] = os.path.expanduser(value)
        # Monarch announces its log on stderr, in the middle of the display.
        with quiet_stderr(), _scratch_as_temporary() as scratch:
            from monarch.actor import default_bootstrap_cmd, this_host

            # They inherit the rest. Monarch logs what stands here, if its log's level is info.
            temporary = {"TMPDIR": scratch} if host == THIS_HOST else {}
            command = default_bootstrap_cmd().with_env({**additions, **temporary, **(env or {})})
            place = this_host() if host == THIS_HOST else self._hosts[host].slice(hosts=0)
            # Only before the first: later this process may itself listen there, as a gateway.
            if not self._may_be_public and (ports := public_ports(psutil.Process())):
                raise ConfigError(
                    f"Monarch listens on {', '.join(ports)}, where other machines reach it, and runs what it is sent",
                    hint="keep it on this machine, or give --public-ports where nobody else is in the network",
                )
            self._may_be_public = True
            mesh = place.spawn_procs(
                per_host={"ranks": ranks},
                bootstrap=functools.partial(
                    _start_child,
                    str(self.log_file(name)),
                    tuple(imports),
                    tuple(sys.path),
                    kept_back() if secrets else {},
                ),
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
        await asyncio.gather(*map(self.stop, list(self._meshes)))


def visible_gpu(index: int) -> str:
    """Return the name by which a child process asks for the GPU that this process knows by an index.

    Where CUDA_VISIBLE_DEVICES lists some of the machine's GPUs, by number or id, indices count along that list.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[index].strip() if visible else str(index)


def set_defaults() -> None:
    """Set the variables that Monarch reads in this process's environment, which its children get too."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


@functools.cache
def _scratch() -> str:
    """Make a folder for sockets and temporary files of this process's children, which goes when this process ends."""
    folder = tempfile.mkdtemp(prefix="forge_rl-")  # nobody else may look into it; short, for names of sockets
    clean_up_after([folder])
    return folder


@contextlib.contextmanager
def _scratch_as_temporary() -> Iterator[str]:
    """Have Monarch make its own folder, which it does once in a process, in the scratch folder."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = scratch = _scratch()
    try:
        yield scratch
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


class _Log(io.FileIO):
    """A log that drops what cannot be written, as on a full disk, where `print` would raise in the middle of work."""

    def write(self, data: ReadableBuffer) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return memoryview(data).nbytes


def _start_child(log_file: str, imports: Sequence[str], path: Sequence[str], secrets: Mapping[str, str]) -> None:
    """Send a new process's output, and that of its own children, to its log file; then import modules.

    Modules are looked for where the parent looks for them, too. Secrets come here, since /proc shows what a process is
    started with. From here on only the controller ends the process.
    """
    take(secrets)
    for name, value in _CHILDREN_DEFAULTS.items():
        os.environ.setdefault(name, os.path.expanduser(value))
    outlive_stop_signals()
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(_Log(number, "w", closefd=False)), "utf-8", "replace", line_buffering=True)
        for number in (1, 2)
    )
    # Handlers run from the last to the first. What native code prints once Python has ended, such as nanobind's lists
    # of leaks, would stand where one looks for the last error.
    atexit.register(_silence)
    # At its end Python searches all objects for cycles, which takes seconds of a processor where torch is loaded.
    atexit.register(gc.freeze)
    sys.path += [place for place in path if place not in sys.path]
    for module in imports:
        importlib.import_module(module)


def _silence() -> None:
    """Drop what is printed to stderr from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop what native code prints to stderr while the body runs."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
