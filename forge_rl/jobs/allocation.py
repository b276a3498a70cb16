"""`--job allocation`: machines that the user already has, from Slurm or another scheduler, or by name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_rl.errors import ConfigError, check_flags
from forge_rl.jobs import slurm_queue
from forge_rl.jobs.launched import Notice, launched_hosts, save_at_notice
from forge_rl.jobs.slurm_queue import JobState, dead_nodes, node_addresses, node_names
from forge_rl.jobs.slurm_script import check_options, host_script, hosts_name
from forge_rl.runtime.addresses import own_address
from forge_rl.runtime.job_protocol import JobListener
from forge_rl.runtime.joining import host_log, join_command, last_line
from forge_rl.system.variables import handed_on

if TYPE_CHECKING:
    from monarch.actor import HostMesh

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}|[0-9a-fA-F:.]{2,45}")
_SCHEDULER = ("SLURM", "PBS_", "LSB_", "OMPI_", "PMIX_", "PMI_", "PRTE_")
"""Prefixes of schedulers' variables, which their launchers read."""
_LOGIN = ("SSH_AUTH_SOCK", "KRB5CCNAME")
"""Variables by which ssh finds its agent, and Kerberos tickets."""
_HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
"""Variables of PBS, LSF and Grid Engine that name a file with a host's name first in each line."""
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which launchers give each process its rank; the first that is set counts."""
_SSH = "ssh -o BatchMode=yes {host}"
# --overlap: next to the job's other steps. --no-kill: also when another node dies. --cpu-bind=none: on all cores of the
# node. --export=ALL: also in a job that was submitted without its user's variables. --unbuffered: its lines arrive at
# once.
_SRUN = (
    "srun --overlap --nodes=1 --ntasks=1 --nodelist={host} --no-kill --cpu-bind=none --export=ALL --input=all "
    "--unbuffered"
)
_FILE_BYTES = 1 << 20
_CHECK_S = 30.0
_ASK_S = 10.0
"""Seconds between queries about a requested host."""
_WISHED = ("COMPLETED", "CANCELLED")
"""States of a host's job that has ended on purpose."""
IN_CONTAINER = "leave one out: a host that joins later is in no container"


@dataclass(frozen=True, kw_only=True)
class AllocationJob:
    """Hosts of an allocation that this process is in, each on one node."""

    hosts: str = ""
    """Names or addresses of the machines, as a+b; by default the scheduler's allocation (Slurm, or the host file of
    PBS, LSF or Grid Engine)."""
    launcher: str = ""
    """Command that runs a command on a host, with {host} for its name; by default srun inside Slurm, else ssh with
    keys."""
    interface: str = ""
    """Network interface on which Monarch listens, such as ib0, by that name on all hosts; by default the one that leads
    to the other hosts."""
    public: bool = False
    """Accept public addresses. Monarch executes any code it receives, so only behind a firewall."""
    image: str = ""
    """Container image for the hosts' processes, for clusters whose srun has --container-image (Pyxis). The working
    directory is mounted; this process itself stays outside."""
    python: str = ""
    """Python interpreter on the hosts; by default the path of this one."""
    most_replaced: int = 0
    """Number of further Slurm jobs, of one node each, that the run may submit in all, in the place of nodes that die;
    each lets its node join the run."""
    sbatch: str = ""
    """Options of sbatch for these jobs, separated by spaces, such as --partition=gpu --gpus-per-node=8."""

    def __post_init__(self) -> None:
        check_flags(self, "--job allocation:", minimum={"most_replaced": 0})
        check_options("allocation:sbatch", self.sbatch)
        if self.most_replaced and (self.hosts or self.launcher or self.image):
            option = next(name for name in ("hosts", "launcher", "image") if getattr(self, name))
            hint = IN_CONTAINER if option == "image" else "leave most_replaced out: only Slurm is asked for hosts"
            raise ConfigError(f"--job allocation has {option} and most_replaced", hint=hint)
        if self.image and self.launcher:
            raise ConfigError(
                "--job allocation has image and launcher", hint="put the image's options into the launcher"
            )
        if self.launcher and "{host}" not in self.launcher:
            raise ConfigError(
                f"--job allocation:launcher is {self.launcher!r}, which names no host",
                hint="write {host} where the host's name belongs, as in ssh {host}",
            )
        for name in filter(None, self.hosts.split("+")):
            check_host(name)

    @property
    def leads(self) -> bool:
        """Whether this process is the controller: srun and mpirun start the command once for each rank, and all but
        rank 0 have nothing to do."""
        return next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"

    def describe(self, command: Sequence[str]) -> str:
        """Return the command that starts each host."""
        try:
            names = self._names()
        except ConfigError as error:
            return f"hosts: those of the allocation in which the command runs ({error.message} here)"
        rows = [shlex.join(self._command(name, "CONTROLLER")) for name in names]
        return "\n".join([f"{len(names)} hosts, each started by", *(f"  {row}" for row in rows)])

    @contextlib.asynccontextmanager
    async def open(self, listener: JobListener) -> AsyncIterator[Mapping[str, HostMesh]]:
        """Start a host on each node, the controller's own included, and end them after the body.

        A scheduler's notice to any of them that time is up becomes SIGUSR1 in this process, at which a run saves.
        """
        if self.most_replaced and not self._is_slurm:
            raise ConfigError("--job allocation has most_replaced outside Slurm", hint="leave it out")
        names = await asyncio.to_thread(self._names)
        places = await asyncio.to_thread(node_addresses, ",".join(names)) if self._is_slurm else names
        controller = own_address(places, self.interface, may_be_public=self.public)
        commands = {name: self._command(name, controller) for name in names}
        if self._is_slurm and len(names) > 1:  # if the first node dies, nobody but the others can tell Slurm
            commands[names[-1]] += ["--watch", os.environ["SLURM_JOB_ID"]]
        # A node's death is reported by its launcher and by Slurm.
        on_lost = _once_each(listener.on_lost)
        async with launched_hosts(
            commands,
            JobListener(say=listener.say, on_lost=on_lost),
            ending=functools.partial(save_at_notice, listener),
            controller=controller,
            env=handed_on(self._variables),
            may_be_public=self.public,
        ) as hosts:
            with _watching_nodes(names, on_lost) if self._is_slurm else contextlib.nullcontext():
                yield hosts

    async def replace(self, name: str, folder: Path, say: Callable[[str], None]) -> str:
        """Submit a job whose node joins a run, and wait until it ends; see `ReplacingJob`."""
        log, job_name = host_log(folder, name), hosts_name(folder)
        command = join_command(folder, name, python=self.python, interface=self.interface, public=self.public)
        script = host_script(command, folder, log, self.sbatch)
        # The job inherits the environment as the first nodes do, without what Slurm has set for this job.
        variables = {
            name: value for name, value in os.environ.items() if name == "SLURM_CONF" or name.startswith("SBATCH_")
        }
        submitting = asyncio.ensure_future(asyncio.to_thread(slurm_queue.submit, script, handed_on(variables)))
        try:
            return await _follow(job_name, await asyncio.shield(submitting), log, say)
        finally:
            # A job can be cancelled only once sbatch has given its id.
            await asyncio.wait([submitting])
            if submitting.exception() is None:
                with contextlib.suppress(ConfigError):  # it has ended
                    await asyncio.to_thread(slurm_queue.cancel, submitting.result(), gently=False)

    @property
    def _is_slurm(self) -> bool:
        return not self.hosts and not self.launcher and "SLURM_JOB_ID" in os.environ

    @property
    def _variables(self) -> dict[str, str]:
        """Variables that launchers read, in addition to what every process gets."""
        names = _SCHEDULER if self._is_slurm else (*_SCHEDULER, *_LOGIN)
        return {name: value for name, value in os.environ.items() if name.startswith(names)}

    def _names(self) -> list[str]:
        """Return the hosts' names, each once, in the allocation's order."""
        if self.hosts:
            names = self.hosts.split("+")
        elif nodes := os.environ.get("SLURM_JOB_NODELIST"):
            names = node_names(nodes)
        elif host_file := next((os.environ[name] for name in _HOST_FILES if name in os.environ), None):
            try:
                with Path(host_file).open(errors="replace") as file:
                    names = [line.split()[0] for line in file.read(_FILE_BYTES).splitlines() if line.strip()]
            except OSError as error:
                raise ConfigError(
                    f"the scheduler's host file {host_file} cannot be read: {error.strerror}",
                    hint="name the hosts: --job allocation:hosts=a+b",
                ) from None
        else:
            raise ConfigError(
                "no scheduler has allocated hosts",
                hint="run the command inside sbatch or salloc, or name hosts: --job allocation:hosts=a+b",
            )
        if not names:
            raise ConfigError(
                "the scheduler's host file names no host", hint="name the hosts: --job allocation:hosts=a+b"
            )
        return [check_host(name) for name in dict.fromkeys(names)]

    def _command(self, name: str, controller: str) -> list[str]:
        """Return the command that starts a host."""
        launcher = [word.replace("{host}", name) for word in shlex.split(self.launcher or self._default_launcher)]
        if self.image:
            folder = os.getcwd()
            launcher += [f"--container-image={self.image}", f"--container-mounts={folder}:{folder}"]
            launcher += [f"--container-workdir={folder}"]
        command = [self.python or sys.executable, "-m", "forge_rl.jobs.host", controller]
        command += ["--interface", self.interface] * bool(self.interface) + ["--public"] * self.public
        if os.path.basename(launcher[0]) == "ssh":  # the remote shell starts at home, and reads its arguments as code
            return [*launcher, f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"]
        return [*launcher, *command]

    @property
    def _default_launcher(self) -> str:
        return _SRUN if self._is_slurm else _SSH


async def _follow(job_name: str, job: JobState, log: Path, say: Callable[[str], None]) -> str:
    """Report what a host's job waits for until it ends; return the cause, or "" if someone ended it on purpose.

    Args:
        job_name: name of the host's job.
    """
    last_message = ""
    while True:
        with contextlib.suppress(ConfigError):  # slurmctld restarts; it is asked again
            state = await asyncio.to_thread(slurm_queue.find_job, job_name, job.id, job.cluster)
            if state is None or state.end:
                outcome = f"{state.end} ({state.state}){last_line(log)}" if state else "is unknown to Slurm"
                return "" if state and state.state in _WISHED else f"Slurm job {job.id} {outcome}"
            job = state
            placement = f"Slurm job {job.id} runs on {job.nodes}"
            message = await asyncio.to_thread(slurm_queue.describe_wait, job) if job.waits else placement
            if message != last_message:
                say(last_message := message)
        await asyncio.sleep(_ASK_S)


def check_host(name: str) -> str:
    """Return a host's name or address if it can be one; it becomes a word of a command.

    Raises:
        ConfigError: it is something else.
    """
    if _HOST.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is not the name of a host", hint="write names or addresses, as hosts=a+b")
    return name


def _once_each(tell: Notice) -> Notice:
    """Return a function that passes on its first call for each host."""
    reported_hosts: set[str] = set()

    def first(name: str, cause: str) -> None:
        if name not in reported_hosts:
            reported_hosts.add(name)
            tell(name, cause)

    return first


@contextlib.contextmanager
def _watching_nodes(names: Sequence[str], on_lost: Notice) -> Iterator[None]:
    """Report nodes that Slurm considers down; the connection to them may take long to show it."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            with contextlib.suppress(ConfigError):  # slurmctld restarts; it is asked again
                for name, state in (await asyncio.to_thread(dead_nodes, ",".join(names))).items():
                    on_lost(name, f"Slurm says that the node is {state}")

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
