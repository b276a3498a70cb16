"""Named process meshes, spawned by services on the hosts of a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import secrets as random_secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from forge_rl.errors import ConfigError
from forge_rl.runtime.children import changed_variables, quiet_stderr, set_defaults, start_child
from forge_rl.runtime.fork_client import (
    FORK_MODULES,
    FORK_SERVER,
    NO_FORK,
    PATIENCE,
    await_server,
    server_variable,
    start_server,
)
from forge_rl.runtime.host_logs import GatheredLogs
from forge_rl.runtime.host_watcher import HostWatcher
from forge_rl.runtime.isolation import public_ports
from forge_rl.runtime.processes import clean_up_after
from forge_rl.runtime.scratch import make_scratch
from forge_rl.system.listeners import Listeners
from forge_rl.system.variables import hide, kept_back, value_of

if TYPE_CHECKING:
    from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
    from monarch.actor import HostMesh, ProcMesh


THIS_HOST = "local"
"""Name of the controller's host."""

_FORK_PATIENCE_S = "15"
"""Seconds for which a process waits for its fork server, less than the 30 s for which Monarch waits for the process."""
_OTHER_HOSTS: Mapping[str, Any] = {"mesh_orphan_timeout": "60s"}
"""Monarch settings that this process needs once there are other hosts; those hosts' own settings do not suffice."""


@dataclass(frozen=True, kw_only=True)
class SpawnedMesh:
    """Processes that a cluster started together."""

    name: str
    procs: ProcMesh
    host: str
    ranks: int
    """Number of processes."""
    log: Path
    """Log file of the processes."""


class Cluster:
    """Hosts of a run, on which process meshes are spawned.

        cluster = Cluster(Path("logs"))
        mesh = cluster.spawn("trainer-0", ranks=2)
        await cluster.close()

    Args:
        logs: existing folder for process output, one file per mesh. Hosts in `sharing` use the same path; others send
            their output.
        hosts: hosts other than THIS_HOST by name, each a one-host mesh of a Monarch job.
        may_be_public: True if Monarch may listen on addresses that other machines can reach. It executes any code it
            receives.

    Processes on this host and on `local_hosts` exit with this process, however it ends. Other hosts, such as the nodes
    of a Slurm job, outlive it: start them with HYPERACTOR_MESH_ORPHAN_TIMEOUT=60s in their environment, so that their
    processes exit that long after this one.

    Raises:
        ConfigError: a host's name is taken, or a mesh has several hosts.
    """

    def __init__(self, logs: Path, hosts: Mapping[str, HostMesh] | None = None, *, may_be_public: bool = False) -> None:
        set_defaults()
        hide()
        self._logs = logs
        self._may_be_public, self._checked = may_be_public, False
        self._hosts = dict(hosts or {})
        self._meshes: dict[str, SpawnedMesh] = {}
        self._watchers: dict[str, HostWatcher] = {}
        self.lost_hosts: dict[str, str] = {}
        """Hosts that are gone for good, with the cause."""
        self.sharing: set[str] = set()
        """Other hosts that are known to see this machine's folder of logs."""
        self.copies: dict[tuple[str, Path], Path] = {}
        """Copies of this machine's files and folders, by host and original."""
        self._gathered = GatheredLogs(logs)
        self.heard: dict[str, float] = {}
        """Last answer of each watched host, see `Processes`."""
        self.leaving: set[str] = set()
        """Hosts that are about to go: nothing new is placed there."""
        self.awaited: set[str] = set()
        """Lost hosts for which the run has requested replacements that have not joined yet."""
        self._changed = asyncio.Event()
        self.on_lost = Listeners[[str, str]]()
        """Called with the name of a host that is gone, and the cause."""
        for name, mesh in self._hosts.items():
            _check_host(name, mesh)
        import monarch.config

        # A process shuts down once its last messages are acknowledged, which otherwise takes half a second.
        settings = {"message_ack_time_interval": "50ms"}
        # Otherwise a controller paused by Ctrl-Z or a debugger would count its processes as dead. The delivery timeout
        # is set here too, in case Monarch was imported before the environment variable was set.
        settings |= {"message_delivery_timeout": "1day", "supervision_watchdog_timeout": "1day"}
        if self._hosts:
            settings |= _OTHER_HOSTS
        monarch.config.configure(**settings)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts, this one first, without those that are gone."""
        return (THIS_HOST, *(host for host in self._hosts if host not in self.lost_hosts))

    def add(self, name: str, mesh: HostMesh) -> None:
        """Take in a host that joins, under a name that none has had.

        Raises:
            ConfigError: the mesh has several hosts.
        """
        import monarch.config

        assert name not in self._hosts, f"host {name} exists"
        _check_host(name, mesh)
        monarch.config.configure(**_OTHER_HOSTS)
        self._hosts[name] = mesh

    @property
    def may_be_public(self) -> bool:
        """Whether ports may be open to addresses that are not private."""
        return self._may_be_public

    def shares_files(self, host: str) -> bool:
        """Return whether a host sees this machine's files, as far as known."""
        return host == THIS_HOST or host in self.sharing

    def path_on(self, host: str, path: Path) -> Path:
        """Return the path under which a host has a file or folder of this machine, or a copy of it."""
        return self.copies.get((host, path), path)

    def watcher(self, host: str) -> HostWatcher:
        """Return the watcher of another host's processes."""
        if host not in self._watchers:
            self._watchers[host] = HostWatcher(host, self, logs=self._gathered)
        return self._watchers[host]

    def lose(self, host: str, cause: str) -> None:
        """Count a host as gone for good: its processes are dead, and nothing is spawned there any more."""
        if host in self._hosts and host not in self.lost_hosts:
            self.lost_hosts[host] = cause
            self.tell_change()
            self.on_lost.tell(host, cause)

    def tell_change(self) -> None:
        """Wake everyone who waits for a `change`, without saying which."""
        self._changed.set()
        # The event that was set wakes those who wait now; later ones wait for the next change.
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Wait until a host is gone, joins a service, or has been given up."""
        await self._changed.wait()

    async def is_lost(self, host: str, *, within_s: float) -> bool:
        """Wait up to `within_s` seconds for a host to be known as lost; return whether it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while host not in self.lost_hosts:
                    await self.change()
        return host in self.lost_hosts

    def spawn(
        self,
        name: str,
        *,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        host: str = THIS_HOST,
        secrets: bool = False,
    ) -> SpawnedMesh:
        """Start a mesh of processes with one axis, `ranks`.

        Args:
            name: unique among the running meshes.
            env: additional environment variables. FORK_MODULES among them has the processes forked by a process of
                their host that has imported these modules, instead of executed.
            secrets: pass on variables that children do not normally get, such as API keys, in their os.environ only.
            imports: modules that each process imports first. Actors that share a process unpickle concurrently, and
                would otherwise see half-imported modules.

        Raises:
            ConfigError: the host does not exist, or Monarch listens to other machines although it may not.
        """
        if host not in self.hosts:
            message = (
                f"host {host!r} is gone: {self.lost_hosts[host]}"
                if host in self.lost_hosts
                else f"there is no host {host!r}"
            )
            raise ConfigError(message, hint=f"choose one of {', '.join(self.hosts)}")
        log = self._logs / f"{name}.log"
        # Monarch announces its log file on stderr, in the middle of the display.
        with quiet_stderr(), _scratch_as_temporary() as scratch:
            from monarch.actor import default_bootstrap_cmd, this_host

            changes = _environment(env or {}, host, scratch)
            command = default_bootstrap_cmd().with_env(changes)
            if modules := _fork_modules(env or {}):
                command = _forked(command, {**os.environ, **changes}, modules, host)
            host_mesh = this_host() if host == THIS_HOST else self._hosts[host].slice(hosts=0)
            # Checked only before the first spawn: later this process may itself listen publicly, as a gateway.
            is_checked = self._may_be_public or self._checked
            if not is_checked and (ports := public_ports(psutil.Process(), with_hosts=bool(self._hosts))):
                raise ConfigError(
                    f"Monarch listens on {', '.join(ports)}, where other machines can reach it, and executes any "
                    "code it receives",
                    hint="keep it on this machine, or set --public-ports if nobody else is on the network",
                )
            self._checked = True
            if not self.shares_files(host):
                # Expected before the processes start, so that their first output is fetched too.
                self._gathered.expect(host, log.name)
            procs = host_mesh.spawn_procs(
                per_host={"ranks": ranks},
                bootstrap=functools.partial(
                    start_child,
                    str(log),
                    tuple(imports),
                    tuple(sys.path),
                    # An argument of the bootstrap, not a variable, as /proc shows a process's initial environment.
                    kept_back() if secrets else {},
                    "" if self.shares_files(host) else self._gathered.name,
                ),
                bootstrap_command=lambda _: command,
                name=name.replace("/", "_"),
            )
        mesh = self._meshes[name] = SpawnedMesh(name=name, procs=procs, host=host, ranks=ranks, log=log)
        return mesh

    async def import_first(self, env: Mapping[str, str], *, deadline_s: float) -> None:
        """Wait until processes that are spawned here with these variables can be forked, so that Monarch need not wait
        for imports; returns after the deadline too, as they can also be executed."""
        if modules := _fork_modules(env):
            with _scratch_as_temporary() as scratch:
                environment = {**os.environ, **_environment(env, THIS_HOST, scratch)}
            variable = server_variable(f"{_fork_key()} {THIS_HOST}", environment, modules)
            present = {name: value for name, value in environment.items() if value is not None}
            start_server(variable, present, os.getpid())
            await await_server(variable, deadline_s)

    async def stop(self, name: str, *, deadline_s: float = 10.0) -> None:
        """Stop a mesh's processes. One that does not stop in time ends with the controller."""
        mesh = self._meshes.pop(name, None)
        if mesh is None or mesh.host in self.lost_hosts:
            return
        task = asyncio.ensure_future(mesh.procs.stop())
        await asyncio.wait([task], timeout=deadline_s)  # unlike `await`, raises neither its error nor its cancellation
        if not task.cancel() and not task.cancelled():
            task.exception()  # marks it as seen, so that asyncio does not log it

    async def close(self) -> None:
        """Stop all meshes."""
        # Watchers end first: they fetch the last output through their agents, which are meshes too.
        await asyncio.gather(*(watcher.close() for watcher in self._watchers.values()))
        await asyncio.gather(*map(self.stop, list(self._meshes)))


def _environment(env: Mapping[str, str], host: str, scratch: str) -> dict[str, str | None]:
    """Return how the environment of a process with additional variables differs from this one's; None removes one."""
    return {
        **changed_variables(on_this_host=host == THIS_HOST),
        **({"TMPDIR": scratch} if host == THIS_HOST else {}),
        **env,
    }


def _forked(
    command: BootstrapCommand, environment: Mapping[str, str | None], modules: str, host: str
) -> BootstrapCommand:
    """Return the command of a process that a fork server of its host runs, and start this host's server."""
    variable = server_variable(f"{_fork_key()} {host}", environment, modules)
    if host == THIS_HOST:
        start_server(variable, {name: value for name, value in environment.items() if value is not None}, os.getpid())
    command = command.with_env({FORK_SERVER: variable, PATIENCE: _FORK_PATIENCE_S})
    # Monarch starts the client as it would start Python; the client has a server fork the program.
    command.args = ["-m", "forge_rl.runtime.fork_client", *command.args]
    return command


def _fork_modules(env: Mapping[str, str]) -> str:
    """Return the modules that a fork server imports for a process with these variables; "" if it is executed."""
    return "" if value_of(NO_FORK) else env.get(FORK_MODULES, "")


@functools.cache
# Makes the names of this run's fork servers unguessable.
def _fork_key() -> str:
    return random_secrets.token_hex(16)


def _check_host(name: str, mesh: HostMesh) -> None:
    if name == THIS_HOST:
        raise ConfigError(f"{THIS_HOST!r} is the name of the controller's host", hint="rename the other host")
    if (size := int(mesh.size())) != 1:
        raise ConfigError(f"{name!r} names {size} hosts", hint="give each host of the job its own name")


@functools.cache
def _scratch() -> str:
    """Create a folder for the children's sockets and temporary files, removed when this process ends."""
    folder = make_scratch()
    clean_up_after([folder])
    return folder


@contextlib.contextmanager
def _scratch_as_temporary() -> Iterator[str]:
    """Make Monarch create its own folder, which it does once per process, in the scratch folder."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = scratch = _scratch()
    try:
        yield scratch
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
