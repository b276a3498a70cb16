"""Asks Slurm about a job, by fixed formats of squeue and scontrol (22.05 and later)."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forge_rl.errors import ConfigError, InfrastructureError
from forge_rl.system.variables import environment, value_of

DIRECTIVE = "#SBATCH "
_OPTIONS = ("SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
"""Prefixes of variables with which a user changes what the programs answer, such as SQUEUE_PARTITION."""
_OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables of Slurm that describe no job."""
_ANSWER_S = 60.0
_ANSWER_BYTES = 1 << 20
_MOST_TOLD = 200
"""Maximum characters of Slurm's answers in a message."""
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_ENDS = {
    "COMPLETED": "ended",
    "CANCELLED": "was cancelled",
    "FAILED": "failed",
    "TIMEOUT": "reached its time limit",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "was preempted",
    "BOOT_FAIL": "got a node that did not boot",
    "OUT_OF_MEMORY": "ran out of memory",
    "DEADLINE": "could not end before its deadline",
    "REVOKED": "was revoked by a federated cluster",
    "LAUNCH_FAILED": "could not be launched",
    "RECONFIG_FAIL": "could not configure its nodes",
}
"""Terminal states of Slurm, and their meaning for the job."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of a job, as squeue shows it."""

    id: str
    state: str
    """Slurm's long name, such as PENDING."""
    partition: str = ""
    nodes: str = ""
    """Its nodes, as node[1-2]; "" until it runs."""
    start: str = ""
    """When it is expected to start, in local time, or ""."""
    reason: str = ""
    """Why it waits."""
    cluster: str = ""
    """Name of its cluster; "" for the one that this machine belongs to."""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes: it has not started, or is to start again."""
        return self.state in _WAITING

    @property
    def end(self) -> str:
        """How it ended, in words; "" while it has not."""
        return _ENDS.get(self.state, "")


def ask_slurm(*command: str, script: str = "", env: Mapping[str, str] | None = None) -> str:
    """Return the output of one of Slurm's programs, at most 1 MiB.

    Args:
        script: text for its stdin.
        env: its environment; by default this process's. The user's own options for the programs are left out.

    Raises:
        ConfigError: it is not installed, fails, or does not answer.
    """
    variables = environment() if env is None else env
    try:
        result = subprocess.run(
            command,
            input=script.encode(),
            capture_output=True,
            timeout=_ANSWER_S,
            start_new_session=True,
            env={name: value for name, value in variables.items() if not name.startswith(_OPTIONS)},
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not installed", hint="run the command on a login node of the Slurm cluster"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{command[0]} does not answer within {_ANSWER_S:.0f} s", hint="ask sinfo whether slurmctld is up"
        ) from None
    if result.returncode:
        message = result.stderr[:_ANSWER_BYTES].decode(errors="replace").strip() or f"status {result.returncode}"
        raise ConfigError(
            f"{command[0]} refused: {message}", hint="change the options of --job, or ask sinfo and squeue"
        )
    return result.stdout[:_ANSWER_BYTES].decode(errors="replace")


def submit(script: str, env: Mapping[str, str] | None = None) -> JobState:
    """Submit a batch script; returns its job.

    Args:
        env: environment that the job inherits; by default this process's.

    Raises:
        ConfigError: Slurm refused.
        InfrastructureError: it gave no id.
    """
    if env is None and value_of("SLURM_JOB_ID"):
        # The sizes of the job from which this one is submitted would be taken for its own.
        variables = environment().items()
        env = {name: value for name, value in variables if name in _OF_CLUSTER or not name.startswith("SLURM_")}
    # On the command line too: variables such as SBATCH_JOB_NAME override a script's directives.
    answer = ask_slurm("sbatch", "--parsable", *_directives(script), script=script, env=env).strip()
    id, _, cluster = answer.splitlines()[-1].partition(";") if answer else ("", "", "")
    if not id.isdecimal():
        raise InfrastructureError(f"sbatch answered {answer[:_MOST_TOLD]!r}, not a job's id", hint="see squeue --me")
    return JobState(id=id, state="PENDING", cluster=cluster)


def _directives(script: str) -> list[str]:
    """Return the options in the directives of a batch script."""
    comments = itertools.takewhile(lambda line: line.startswith("#"), script.splitlines())
    lines = [line.removeprefix(DIRECTIVE) for line in comments if line.startswith(DIRECTIVE)]
    return [word for line in lines for word in shlex.split(line)]


def find_job(name: str, id: str = "", cluster: str = "") -> JobState | None:
    """Return the state of this user's latest job with a name, or of the job with an id; None once Slurm forgot it.

    Args:
        cluster: as in `JobState`.
    """
    # --states=all: by default squeue leaves out jobs that have ended.
    command = ["squeue", "--noheader", "--me", "--states=all", f"--name={name}", "--format=%i|%T|%P|%N|%S|%r"]
    answer = ask_slurm(*command, *_on(cluster))
    jobs = []
    for line in answer.splitlines():
        number, state, partition, nodes, start, reason = [*line.strip().split("|", 5), *[""] * 6][:6]
        if number.isdecimal() and id in ("", number):
            start = "" if start in ("N/A", "(null)") else start
            job = JobState(id=number, state=state, partition=partition, nodes=nodes, start=start, reason=reason)
            jobs.append(replace(job, cluster=cluster))
    # An earlier job that has ended is not the one that waits or runs.
    return max(jobs, key=lambda job: (not job.end, int(job.id)), default=None)


def describe_wait(job: JobState) -> str:
    """Return a line that says where a job stands in the queue."""
    # By priority, the highest first, then by id.
    command = ["squeue", "--noheader", "--states=PENDING", "--sort=-p,i", "--format=%i"]
    command += [f"--partition={job.partition}"] if job.partition else []
    # Of another cluster, squeue may name it in a line of its own.
    lines = ask_slurm(*command, *_on(job.cluster)).splitlines()
    queue = [line.strip() for line in lines if not line.startswith("CLUSTER:")]
    place = f"place {queue.index(job.id) + 1} of {len(queue)} in the queue" if job.id in queue else "waiting"
    start = f", expected to start at {job.start}" if job.start else ""
    return f"Slurm job {job.id}: {place} of {job.partition} ({job.reason[:_MOST_TOLD]}){start}"


def exit_status(job: JobState) -> int:
    """Return the exit status of a job's script, 1 if a signal ended it or Slurm does not tell it."""
    answer = ""
    with contextlib.suppress(ConfigError):  # slurmctld has forgotten the job, or restarts
        answer = ask_slurm("scontrol", *_on(job.cluster), "show", "--oneliner", "job", job.id)
    # Exit status and signal; a signal other than 0 has ended the script.
    match = re.search(r"\bExitCode=([0-9]{1,3}):0\b", answer)
    return int(match[1]) if match else 1


def cancel(job: JobState, *, gently: bool) -> None:
    """Cancel a job.

    Args:
        gently: send SIGHUP to its batch script alone, which makes a run save and end.
    """
    options = ["--signal=HUP", "--batch"] if gently and not job.waits else []
    ask_slurm("scancel", *_on(job.cluster), *options, job.id)


def _on(cluster: str) -> list[str]:
    """Return the options with which Slurm's programs ask another cluster than this machine's."""
    return [f"--clusters={cluster}"] if cluster else []


def node_addresses(names: str) -> list[str]:
    """Return the addresses of nodes, which Slurm knows even if no name service does."""
    return re.findall(r"\bNodeAddr=(\S+)", ask_slurm("scontrol", "show", "--oneliner", "nodes", names))


def node_names(nodes: str) -> list[str]:
    """Expand Slurm's notation for nodes, such as node[1-2], to their names."""
    return ask_slurm("scontrol", "show", "hostnames", nodes).split()


def requeue_without_controller(id: str) -> None:
    """Requeue a job whose first node is gone, and with it the batch script.

    Slurm leaves the other nodes to such a job until its time limit, since it was submitted with --no-kill.
    """
    first, _, nodes = ask_slurm("squeue", "--noheader", f"--jobs={id}", "--format=%B|%N").strip().partition("|")
    if nodes and first not in node_names(nodes):
        ask_slurm("scontrol", "requeue", id)


def dead_nodes(names: str) -> dict[str, str]:
    """Return which of the named nodes are down according to Slurm, with their states."""
    answer = ask_slurm(
        "sinfo", "--noheader", "--Node", f"--nodes={names}", "--states=down,powered_down", "--format=%N|%T"
    )
    return dict(line.strip().split("|", 1) for line in answer.splitlines() if "|" in line)
