"""`--job slurm`: a batch job in which the whole run happens, while this terminal follows it."""

from __future__ import annotations

import codecs
import contextlib
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_rl.errors import CheckpointError, ConfigError, InfrastructureError, check_flags
from forge_rl.flags.texts import written
from forge_rl.jobs import slurm_queue
from forge_rl.jobs.allocation import IN_CONTAINER
from forge_rl.jobs.slurm_queue import JobState
from forge_rl.jobs.slurm_script import check_option, check_options, hosts_name, job_name, script_path
from forge_rl.system.folders import make_private, write_whole
from forge_rl.system.terminal import visible

_LOG = Path("logs") / "slurm.log"
_JOB = "job.json"
"""Name of the file in a run folder with the id and the cluster of its last job."""
_CHUNK_BYTES = 1 << 16
_LOOK_S = 1.0
_REQUEUED = ("NODE_FAIL", "PREEMPTED", "TIMEOUT", "BOOT_FAIL")
"""Ends after which Slurm may start a job again."""
_ASK_S, _ASK_LESS_S = 1.0, 10.0
"""Seconds between questions to Slurm: at first, and at most."""
_SCRIPT = """\
#!/bin/bash
{directives}
set -e
{setup}
set +e
{cleanup}
# Slurm's notices: USR1 before the time limit, TERM before a preemption. The run saves, and the job is requeued; HUP
# (Ctrl-C in the terminal) ends it.
trap 'kill -USR1 "$run" 2> /dev/null' USR1
trap 'kill -TERM "$run" 2> /dev/null' TERM
trap 'kill -HUP "$run" 2> /dev/null' HUP
{command} &
run=$!
wait "$run"
while kill -0 "$run" 2> /dev/null; do wait "$run"; done
wait "$run"
status=$?
{cleanup}
# 138 and 143: stopped by a notice. A failure after a node was lost is no fault of the run.
read -r state nodes < <(squeue --noheader --jobs="$SLURM_JOB_ID" --format='%T %D')
if [ "$state" = RUNNING ] && {{ [ $status = 138 ] || [ $status = 143 ] ||
    {{ [ $status != 0 ] && [ "$nodes" -lt "$SLURM_JOB_NUM_NODES" ]; }}; }}; then
    scontrol requeue "$SLURM_JOB_ID" && exec sleep 60
fi
exit $status
"""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A batch job of Slurm.

    The same command, given again, follows the job that still runs.
    """

    nodes: int = 1
    """Number of nodes, each of which becomes a host."""
    partition: str = ""
    """Partitions, as a+b; by default the cluster's."""
    account: str = ""
    """Account to charge."""
    qos: str = ""
    """Quality of service."""
    time: str = ""
    """Time limit, such as 1-12:00:00; by default the partition's. The run is saved and requeued when it is over."""
    gpus: int = 0
    """GPUs per node."""
    cpus: int = 0
    """CPUs per node; by default all, with exclusive."""
    memory: str = ""
    """Memory per node, such as 200G."""
    exclusive: bool = True
    """Whether nodes are shared with no other job."""
    constraint: str = ""
    """Features that the nodes must have, such as a100|h100."""
    most_replaced: int = 0
    """Number of further jobs, of one node each, that the run may submit in all, in the place of nodes that die; see
    `AllocationJob.most_replaced`."""
    grace_s: int = 120
    """Seconds before the time limit at which the run saves and stops; more for a large model."""
    setup: str = ""
    """Shell commands that set the environment up on the first node, such as source env.sh; other nodes inherit it."""
    options: str = ""
    """More options of sbatch, separated by spaces, such as --reservation=NAME."""
    image: str = ""
    """Container image of the hosts' processes; see `AllocationJob.image`."""
    python: str = ""
    """Python interpreter on the nodes; by default the path of this one."""
    interface: str = ""
    """Network interface on which Monarch listens; see `AllocationJob.interface`."""
    public: bool = False
    """Accept public addresses; see `AllocationJob.public`."""

    def __post_init__(self) -> None:
        check_flags(self, "--job slurm:", minimum={"nodes": 1, "gpus": 0, "cpus": 0, "grace_s": 1, "most_replaced": 0})
        for name in ("partition", "account", "qos", "time", "memory", "constraint"):
            check_option(f"slurm:{name}", getattr(self, name))
        check_options("slurm:options", self.options)
        if self.image and self.most_replaced:
            raise ConfigError("--job slurm has image and most_replaced", hint=IN_CONTAINER)

    def describe(self, command: Sequence[str], folder: Path) -> str:
        """Return the batch script."""
        return self._script(command, folder)

    def submit(self, command: Sequence[str], folder: Path, say: Callable[[str], None]) -> int:
        """Submit the batch script, or find the job that an earlier call submitted; show its log until it ends.

        The first Ctrl-C lets the run save and end; the second one cancels the job at once.
        """
        name, log = job_name(folder), _JobLog(folder / _LOG)
        try:
            job = self._job(name, folder)
            make_private(folder, CheckpointError, hint="free space there, or choose another --out")
            (folder / _LOG.parent).mkdir(exist_ok=True)
            if job is not None and not job.end:
                say(f"Slurm job {job.id} runs this command already; following it. Ctrl-C cancels it")
            else:
                # The output of an earlier job is not shown again.
                log.skip()
                job = self._submit(command, folder)
                say(f"Slurm job {job.id} is submitted; its output: {folder / _LOG}. Ctrl-C cancels it")
            return self._follow(name, job, log, say)
        except KeyboardInterrupt:
            job = self._job(name, folder)  # sbatch may just have been interrupted
            if job is None or job.end:
                raise
            self._cancel(name, job, log, say)
            raise

    def _submit(self, command: Sequence[str], folder: Path) -> JobState:
        """Submit the script; keep the job's id and cluster in the folder."""
        job = slurm_queue.submit(self._script(command, folder))
        write_whole(folder / _JOB, json.dumps({"kind": "slurm", "id": job.id, "cluster": job.cluster}) + "\n")
        return job

    def _job(self, name: str, folder: Path) -> JobState | None:
        """Return the state of the run's job, on the cluster of its last one and on those that `options` name."""
        options = (option for option in shlex.split(self.options) if option.startswith(("--clusters=", "-M")))
        names = ",".join(option.removeprefix("--clusters=").removeprefix("-M") for option in options)
        clusters = dict.fromkeys(filter(None, [_last_cluster(folder), *names.split(",")]))
        jobs = [slurm_queue.find_job(name, cluster=cluster) for cluster in clusters or [""]]
        return max(filter(None, jobs), key=lambda job: not job.end, default=None)

    def _follow(self, name: str, job: JobState, log: _JobLog, say: Callable[[str], None]) -> int:
        """Show a job's place in the queue, then its log; return its exit status."""
        last_message, every_s, ask_at, ends = "", _ASK_S, 0.0, 0
        while ends < 2:  # Slurm may requeue a job that it has just counted as dead
            log.show()
            if time.monotonic() >= ask_at:
                last_job, job = job, _again(name, job)
                # After a state from which Slurm may requeue the job, the end counts once it has been seen twice.
                ends = 0 if not job.end else ends + 1 if job.state in _REQUEUED else 2
                with contextlib.suppress(ConfigError):  # slurmctld restarts; it is asked again
                    message = slurm_queue.describe_wait(job) if job.waits else _describe(job)
                    if message != last_message:
                        say(last_message := message)
                # Asks less and less often while nothing changes.
                every_s = _ASK_S if job.state != last_job.state else min(_ASK_LESS_S, every_s * 1.2)
                ask_at = time.monotonic() + every_s
            time.sleep(_LOOK_S)
        log.show()
        if job.state in ("COMPLETED", "FAILED"):
            return 0 if job.state == "COMPLETED" else slurm_queue.exit_status(job)
        raise InfrastructureError(
            f"Slurm job {job.id} {job.end} ({job.state})",
            hint=f"its output is in {log.path}; the same command continues from the last checkpoint",
        )

    def _cancel(self, name: str, job: JobState, log: _JobLog, say: Callable[[str], None]) -> None:
        saves = "" if job.waits else " once the run has saved; Ctrl-C again does not wait"
        say(f"cancelling Slurm job {job.id}{saves}")
        try:
            slurm_queue.cancel(job, gently=True)
            while not job.end:
                time.sleep(_LOOK_S)
                log.show()
                job = _again(name, job)
        except KeyboardInterrupt:
            slurm_queue.cancel(job, gently=False)

    def _script(self, command: Sequence[str], folder: Path) -> str:
        """Return the batch script, in which the command runs with the hosts of its own allocation."""
        path = folder.resolve()
        # The last --job and --out count; earlier ones may be among the command's own flags.
        inner = [self.python or command[0], *command[1:], "--job", self._allocation, "--out", str(path)]
        return _SCRIPT.format(
            directives="\n".join(f"{slurm_queue.DIRECTIVE}{directive}" for directive in self._directives(path)),
            setup=self.setup or ":",
            command=shlex.join(inner),
            # A controller that was killed has left the hosts that it asked for.
            cleanup=f"scancel --me --name={hosts_name(folder)}" if self.most_replaced else ":",
        )

    def _directives(self, folder: Path) -> Iterator[str]:
        yield f"--job-name={job_name(folder)}"
        yield f"--nodes={self.nodes}"
        yield "--ntasks-per-node=1"
        yield from self._options()
        yield "--dependency=singleton"  # two terminals that submit the same run: one job waits for the other
        yield "--requeue"
        # The job keeps its other nodes when one of them dies.
        yield "--no-kill"
        # B: only the batch script gets the signal, and passes it on to the run.
        yield f"--signal=B:USR1@{self.grace_s}"
        yield "--open-mode=append"
        yield f"--chdir={script_path(Path.cwd())}"
        # sbatch expands % in file names.
        yield f"--output={script_path(folder / _LOG).replace('%', '%%')}"
        yield from shlex.split(self.options)

    def _options(self) -> Iterator[str]:
        """Yield the sbatch options with which nodes are requested, except the user's own."""
        options = {
            "partition": self.partition.replace("+", ","),
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "gpus-per-node": self.gpus or "",
            "cpus-per-task": self.cpus or "",
            "mem": self.memory,
            "constraint": self.constraint,
        }
        yield from (f"--{name}={value}" for name, value in options.items() if value)
        if self.exclusive:
            yield "--exclusive"

    @property
    def _allocation(self) -> str:
        """The inner command's --job."""
        options = {"interface": self.interface, "image": self.image, "python": self.python, "public": self.public}
        if self.most_replaced:
            options["most_replaced"] = self.most_replaced
            options["sbatch"] = shlex.join([*self._options(), *shlex.split(self.options)])
        return written("allocation", {name: value for name, value in options.items() if value})


class _JobLog:
    """The job's log, shown as it grows; its text may come from a model, so that control characters are escaped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip(self) -> None:
        """Skip an earlier job's text."""
        self._at = self.path.stat().st_size if self.path.exists() else 0

    def show(self) -> None:
        """Print the new lines."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            while part := file.read(_CHUNK_BYTES):
                self._at += len(part)
                print(visible(self._decoder.decode(part)), end="", flush=True)


def _last_cluster(folder: Path) -> str:
    """Return the cluster of the job that was last submitted for a run; "" for this machine's."""
    try:
        job = json.loads((folder / _JOB).read_text())
    except (FileNotFoundError, ValueError):
        return ""
    cluster = job.get("cluster") if isinstance(job, dict) else ""
    return cluster if isinstance(cluster, str) else ""


def _again(name: str, job: JobState) -> JobState:
    """Return a job's current state, or its last known one while slurmctld does not answer."""
    try:
        new_job = slurm_queue.find_job(name, cluster=job.cluster)
    except ConfigError:
        return job
    if new_job is None:
        raise InfrastructureError(
            f"Slurm does not know job {job.id} any more", hint="ask sacct; the same command submits it again"
        )
    return new_job


def _describe(job: JobState) -> str:
    if job.end:
        return f"Slurm job {job.id} {job.end} ({job.state})"
    return f"Slurm job {job.id} runs on {job.nodes}" if job.state == "RUNNING" else f"Slurm job {job.id}: {job.state}"
