"""A real Slurm on one machine: munged, slurmctld and a slurmd for each node, in a folder, ended by PID.

python -m tests.slurm.cluster COMMAND...    # runs a command, such as a shell, in which Slurm's programs use it
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.ports import unused_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_CPUS = 2
_CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=4
MessageTimeout=3
TCPTimeout=1
KillWait=20
MinJobAge=300
GresTypes=gpu
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
"""GraceTime: seconds that a preempted job has. cred_expire: seconds before a requeued job may start, else 120."""


def missing() -> str:
    """Return why Slurm cannot run here, or ""."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge" if absent else ""


@dataclass
class SlurmCluster:
    """A running cluster; `kill_node` is a machine that loses power."""

    folder: Path
    nodes: tuple[str, ...]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By name: munged, slurmctld, and the nodes' names."""

    def start(self, name: str) -> None:
        """Start a daemon, or a node again."""
        command = {
            "munged": [
                *("/usr/sbin/munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key"),
                *(f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid"),
                *(f"--seed-file={self.folder}/munged.seed", f"--log-file={self.folder}/munged.log"),
            ],
            "slurmctld": ["/usr/sbin/slurmctld", "-D"],
        }.get(name, ["/usr/sbin/slurmd", "-D", "-N", name])
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command,
                env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def run(self, *command: str) -> str:
        """Return the output of one of Slurm's programs."""
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    def submit(self, line: str, *options: str) -> str:
        """Submit a line of shell as a job; return its id."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", f"--wrap={line}", *options)

    def state(self, run: Path) -> str:
        """Return the state of the job of a run, by its folder."""
        job = json.loads((run / "job.json").read_text())["id"]
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def states(self, name: str) -> set[str]:
        """Return the states of the jobs of a name."""
        return set(self.run("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%T").split())

    def processes(self, node: str) -> list[psutil.Process]:
        """Return a node's processes: its daemon, and what Slurm started on it."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.Error):
                environment, command = process.environ(), process.info["cmdline"]
                ours = environment.get("SLURM_CONF") == str(self.folder / "slurm.conf")
                if ours and (environment.get("SLURMD_NODENAME") == node or command[-2:] == ["-N", node]):
                    found.append(process)
        return found

    def kill_node(self, node: str) -> None:
        """Kill every process of a node at once."""
        found = set(self.processes(node))
        for step in self._steps(node):
            found |= {step, *step.children(recursive=True)}
        for number in (signal.SIGSTOP, signal.SIGKILL):  # first none of them can still act
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.daemons.pop(node).wait()

    def _steps(self, node: str) -> list[psutil.Process]:
        """Return the parents of a node's processes that are slurmstepd's, which have no environment of their own."""
        found = []
        for process in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if (parent := process.parent()) is not None and parent.name().startswith("slurmstepd"):
                    found.append(parent)
        return found

    def clear(self) -> None:
        """Cancel all jobs, wait until nothing of them is left, and start the nodes that were killed."""
        self.run("scancel", "--user=root")
        for number in ("--signal=KILL", "--signal=KILL --batch"):
            self.run("scancel", "--user=root", *number.split())
        end = time.monotonic() + 60
        for node in self.nodes:
            if node not in self.daemons:
                self.start(node)
        while _idle(self) < len(self.nodes) or self.run("squeue", "--noheader"):
            assert time.monotonic() < end, self.run("squeue") + self.run("sinfo", "--Node")
            time.sleep(0.2)

    def stop(self) -> None:
        """Cancel all jobs and end all daemons."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.clear()
        left = [process for node in self.nodes for process in self.processes(node)]
        for name in ("slurmctld", *self.nodes, "munged"):
            if daemon := self.daemons.pop(name, None):
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def slurm_cluster(nodes: int = 3) -> Iterator[SlurmCluster]:
    """Start a cluster of so many nodes of two CPUs and two pretended GPUs, with the partitions batch and urgent.

    While the body runs, SLURM_CONF names it for this process and its children. urgent preempts batch.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    names = tuple(f"node{number}" for number in range(1, nodes + 1))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        drawn: set[int] = set()
        while len(drawn) < nodes + 1:
            drawn.add(unused_port())
        ports = list(drawn)
        host = socket.gethostname()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS} Gres=gpu:2"
            for name, port in zip(names, ports[1:], strict=True)
        ]
        (folder / "slurm.conf").write_text(
            _CONF.format(host=host, port=ports[0], folder=folder, nodes="\n".join(lines))
        )
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "state").mkdir()
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        stack.callback(_restore, before)
        cluster = SlurmCluster(folder, names)
        stack.callback(cluster.stop)
        cluster.start("munged")
        _wait_for(folder / "munge.socket")
        cluster.start("slurmctld")
        for name in names:
            (folder / f"spool-{name}").mkdir()
            cluster.start(name)
        end = time.monotonic() + 60
        while _idle(cluster) < nodes:
            assert time.monotonic() < end, "\n".join(path.read_text() for path in folder.glob("*.out"))
            time.sleep(0.2)
        yield cluster


def _idle(cluster: SlurmCluster) -> int:
    try:
        return cluster.run("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%T").split().count("idle")
    except subprocess.SubprocessError:  # slurmctld does not listen yet
        return 0


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop("SLURM_CONF", None)
    else:
        os.environ["SLURM_CONF"] = before


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.05)


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"error: {reason}")
    with slurm_cluster() as started:
        sys.exit(subprocess.run(sys.argv[1:] or ["bash"]).returncode)
