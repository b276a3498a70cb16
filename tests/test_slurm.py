"""`--job slurm` and `--job allocation` on a real Slurm of three nodes on this machine."""

import asyncio
import dataclasses
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from forge_rl.errors import ConfigError, InfrastructureError
from forge_rl.jobs import launched, slurm, slurm_queue
from forge_rl.jobs.allocation import AllocationJob
from forge_rl.jobs.slurm import SlurmJob
from forge_rl.jobs.slurm_queue import JobState
from forge_rl.jobs.slurm_script import host_script, hosts_name
from forge_rl.run.live.attach import attach
from forge_rl.runtime.addresses import is_trusted, own_address, url
from forge_rl.runtime.job_flag import build_job
from forge_rl.runtime.job_protocol import JobListener
from tests.commands import Command, tiny_run
from tests.conftest import started_processes
from tests.slurm.cluster import SlurmCluster, missing, slurm_cluster

WHY_NOT = missing()


def on_slurm(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs Slurm."""
    return pytest.mark.long(pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)(test))


def test_hosts_are_reached_by_name_over_ipv6_through_a_launcher(commands: list[Command], tmp_path: Path):
    job = "allocation:hosts=::1,launcher=env SLURMD_NODENAME={host}"
    assert own_address(["::1"]) == "::1"
    run = patient(commands, tmp_path, "--seconds", "0.1", job=job)
    run.wait_for("goes on from 0 on ::1")
    assert run.end() == 0
    assert not run.strays()


def test_addresses_that_are_public_or_not_addresses_are_refused():
    for text in (
        "tcp://8.8.8.8:1",
        "tcp://[2001:4860:4860::8888]:1",
        "tcp://node1:1",
        "ipc://x",
        "x@tcp://10.0.0.1:1\n",
    ):
        assert not is_trusted(text), text
    for text in ("tcp://10.0.0.1:1", "service<2Mu>@tcp://[fd00::2]:26600", url("::1", 5), url("127.0.0.1", 5)):
        assert is_trusted(text), text


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    before = started_processes()
    with slurm_cluster() as started:
        yield started
    left = started_processes() - before
    assert not left, f"processes are left: {sorted(left)}"


@pytest.fixture(name="slurm")
def cleared(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, cleared after a test."""
    yield cluster
    cluster.clear()


def patient(
    commands: list[Command], out: Path, *flags: str, job: str = "slurm:nodes=2", variables: Sequence[str] = ()
) -> Command:
    program = ("env", *variables, sys.executable, "-m")
    command = Command("tests.slurm.patient", "--out", str(out), "--job", job, *flags, program=program)
    commands.append(command)
    return command


@pytest.mark.parametrize("ended", [False, True])
async def test_a_host_that_does_not_listen_is_named(ended: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launched, "_START_S", 0.01)
    hosts = [launched.LaunchedHost(name, cast(Any, None), asyncio.get_running_loop().create_future()) for name in "abc"]
    hosts[0].address.set_result("tcp://[::1]:1")
    hosts[1].last_lines.append("still importing")
    if ended:
        hosts[2].address.set_exception(InfrastructureError("host c did not start"))
    problem = "host c did not start" if ended else "host b does not listen after 0 s: still importing"
    with pytest.raises(InfrastructureError, match=problem):
        await launched._addresses(hosts, JobListener(say=lambda _: None))
    if not ended:
        for host in hosts[1:]:
            host.address.set_result("tcp://[::1]:2")
        addresses = await launched._addresses(hosts, JobListener(say=lambda _: None))
        assert addresses == {"a": "tcp://[::1]:1", "b": "tcp://[::1]:2", "c": "tcp://[::1]:2"}


def test_the_batch_script_quotes_what_it_is_given(tmp_path: Path):
    job = SlurmJob(nodes=2, partition="a+b", time="1:00:00", gpus=8, setup="source env.sh", image="x/y:1", grace_s=60)
    job = dataclasses.replace(job, constraint="(a100|h100)&ib")
    command = ["/bin/python", "-m", "mine", "--model", "it's; $(rm -rf /)"]
    script = job.describe(command, tmp_path)
    for line in (
        "--partition=a,b",
        "--gpus-per-node=8",
        "--constraint=(a100|h100)&ib",
        "--signal=B:USR1@60",
        "--requeue",
        "--no-kill",
    ):
        assert f"#SBATCH {line}\n" in script
    ran = script[script.index("set -e") :].replace("/bin/python -m mine", "printf '%s\\n'")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    shown = subprocess.run(["bash"], input=ran.replace("source env.sh", ":"), text=True, capture_output=True)
    assert shown.stdout.splitlines()[:4] == ["--model", "it's; $(rm -rf /)", "--job", 'allocation:image="x/y:1"']


def test_variables_of_the_user_change_neither_a_job_nor_what_slurm_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in for Slurm's programs writes its arguments and its environment down."""
    for name in ("sbatch", "squeue"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/args\nenv > {tmp_path}/env\necho 7\n")
        program.chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SBATCH_JOB_NAME": "mine",
        "SQUEUE_PARTITION": "other",
        "SLURM_CONF": "/etc/here.conf",
        "SLURM_JOB_ID": "3",
        "SLURM_MEM_PER_CPU": "100",
        "FORGE_RL_MARK": "x",
    }.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "a run"
    job = SlurmJob(partition="a+b", setup="#SBATCH --hold\n:", options="--reservation=r[1-2]")
    job_7 = JobState(id="7", state="PENDING")
    assert slurm_queue.submit(job.describe(["python", "-m", "mine"], folder)) == job_7
    arguments = (tmp_path / "args").read_text().splitlines()
    assert arguments[0] == "--parsable"
    assert {f"--output={folder}/logs/slurm.log", "--partition=a,b", "--reservation=r[1-2]"} <= set(arguments)
    assert any(argument.startswith("--job-name=forge_rl-a-run-") for argument in arguments)
    assert "--hold" not in arguments, "sbatch reads no directive after the first command"
    variables = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
    assert (variables["SLURM_CONF"], variables["FORGE_RL_MARK"]) == ("/etc/here.conf", "x")
    assert not {"SQUEUE_PARTITION", "SLURM_JOB_ID", "SLURM_MEM_PER_CPU"} & variables.keys()
    slurm_queue.find_job("x")
    assert "SQUEUE_PARTITION" not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("options", "interrupted"),
    [("--clusters=far", False), ("-Mfar", True), ("--clusters=near,far", True), ("--hold", False)],
)
def test_a_job_of_another_cluster_is_followed_there(
    options: str, interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A stand-in for Slurm's programs knows the job on one cluster only, which sbatch has chosen."""
    program = f"""#!/bin/sh
echo "${{0##*/}}" "$@" >> {tmp_path}/asked
case "${{0##*/}} $*" in
  sbatch*) touch {tmp_path}/submitted; echo "7;far" ;;
  squeue*--states=PENDING*--clusters=far*) printf 'CLUSTER: far\n5\n7\n' ;;
  squeue*--clusters=far*) [ ! -e {tmp_path}/submitted ] || echo "7|$(cat {tmp_path}/state)|p|n1|N/A|" ;;
  scontrol*--clusters=far*) echo ExitCode=3:0 ;;
esac
"""
    for name in ("sbatch", "squeue", "scontrol", "scancel"):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("_LOOK_S", "_ASK_S", "_ASK_LESS_S"):
        monkeypatch.setattr(slurm, name, 0.0)
    messages = list[str]()

    def say(message: str) -> None:
        messages.append(message)
        (tmp_path / "state").write_text("FAILED" if "place 2 of 2" in message else "PENDING")

    (tmp_path / "state").write_text("PENDING")
    job, folder = SlurmJob(options=options), tmp_path / "run"
    assert job.submit(["python"], folder, say) == 3
    assert "Slurm job 7: place 2 of 2 in the queue of p ()" in messages
    # Another terminal, also if sbatch was interrupted before its answer was kept.
    if interrupted:
        (folder / "job.json").unlink()
    (tmp_path / "state").write_text("PENDING")
    state = job._job("x", folder)
    assert state is not None
    assert (state.id, state.cluster) == ("7", "far")
    slurm_queue.cancel(state, gently=False)
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "scancel --clusters=far 7"


def test_a_controller_of_slurm_that_restarts_ends_no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(*_: object) -> str:
        raise ConfigError("squeue refused: Unable to contact slurm controller", hint="")

    def followed(*states: str) -> int:
        jobs = iter([JobState(id="7", state=state) for state in states])
        monkeypatch.setattr(slurm_queue, "find_job", lambda name, cluster: next(jobs))
        return SlurmJob()._follow(
            "x", JobState(id="7", state="PENDING"), slurm._JobLog(tmp_path / "log"), messages.append
        )

    messages = list[str]()
    for name in ("_LOOK_S", "_ASK_S", "_ASK_LESS_S"):
        monkeypatch.setattr(slurm, name, 0.0)
    monkeypatch.setattr(slurm_queue, "ask_slurm", refuse)
    assert followed("PENDING", "PENDING", "RUNNING", "COMPLETED") == 0
    assert messages == ["Slurm job 7 runs on ", "Slurm job 7 ended (COMPLETED)"]
    assert followed("FAILED") == 1, "nobody tells its exit status"


def test_a_host_file_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("SLURM_JOB_NODELIST", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "gone"))
    assert f"the scheduler's host file {tmp_path}/gone cannot be read: No such file" in AllocationJob().describe([])
    (tmp_path / "gone").write_text("\n")
    assert "the scheduler's host file names no host" in AllocationJob().describe([])
    (tmp_path / "gone").write_text("a slots=2\na\nb\n")
    assert AllocationJob().describe([]).startswith("2 hosts, each started by\n  ssh -o BatchMode=yes a ")


def test_ssh_finds_its_agent_and_srun_the_job(monkeypatch: pytest.MonkeyPatch):
    for name in ("SSH_AUTH_SOCK", "KRB5CCNAME", "SLURM_JOB_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "1")
    names = {"SSH_AUTH_SOCK", "KRB5CCNAME", "SLURM_JOB_ID"}
    assert AllocationJob(hosts="a")._variables.keys() & {*names, "AWS_SECRET_ACCESS_KEY"} == names
    assert AllocationJob()._variables.keys() & names == {"SLURM_JOB_ID"}, "of no use on the nodes"


def test_a_host_script_has_its_runs_options_and_quotes_its_folder(tmp_path: Path):
    options = {"partition": "a+b", "account": "me", "time": "1:00:00", "gpus": 8, "options": "--reservation=r[1-2]"}
    job = SlurmJob(nodes=2, most_replaced=3, public=True, constraint="a100|h100", **options)
    script = job.describe(["python", "-m", "mine"], tmp_path / "run")
    assert script.count(f"scancel --me --name={hosts_name(tmp_path / 'run')}") == 2
    (line,) = (line for line in script.splitlines() if "-m mine" in line)
    inner = build_job(shlex.split(line)[4])
    assert isinstance(inner, AllocationJob)
    assert (inner.most_replaced, inner.public) == (3, True)
    folder = tmp_path / "$(touch injected); touch injected\nit's"
    joined = ["printf", "%s\n", str(folder), "--name", "node1.1"]
    script = host_script(joined, folder, tmp_path / "host.log", inner.sbatch)
    directives = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"--partition=a,b", "--account=me", "--time=1:00:00", "--gpus-per-node=8", "--exclusive"} <= directives
    assert {"--reservation=r[1-2]", "--nodes=1", f"--job-name={hosts_name(folder)}"} <= directives
    assert "--constraint=a100|h100" in directives
    shown = subprocess.run(["bash"], input=script, text=True, capture_output=True, cwd=tmp_path)
    assert shown.stdout == f"{folder}\n--name\nnode1.1\n"
    assert not list(tmp_path.iterdir())
    assert re.fullmatch(r"[\w.-]+", hosts_name(folder))


def test_what_could_end_a_directive_is_refused():
    for text, problem in (
        ('slurm:partition="a b"', "partition is 'a b'"),
        ('slurm:account="a;rm"', "account is 'a;rm'"),
        ("slurm:options=hold", "options has 'hold'"),
        ("slurm:nodes=0", "nodes is 0"),
        ("slurm:grace_s=0", "grace_s is 0"),
        ('allocation:hosts="a+-oProxyCommand=x"', "'-oProxyCommand=x' is not the name of a host"),
        ("allocation:launcher=ssh", "names no host"),
        ('allocation:sbatch="--partition=$(id)"', "sbatch is '--partition="),
        ("allocation:hosts=a,most_replaced=1", "has hosts and most_replaced"),
        ("slurm:image=x,most_replaced=1", "has image and most_replaced"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_job(text)


@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"])
def test_every_terminal_state_is_an_end(state: str):
    assert JobState(id="1", state=state).end
    assert not JobState(id="1", state=state).waits


@on_slurm
def test_a_job_is_followed_from_two_terminals_and_saves_its_end(
    slurm: SlurmCluster, commands: list[Command], tmp_path: Path
):
    first = slurm.submit("sleep 100", "--nodes=3", "--exclusive")
    slurm.submit("sleep 100", "--nodes=3", "--exclusive")
    # Options of the user's own for Slurm's programs, which the job does not have.
    variables = ["SBATCH_JOB_NAME=mine", "SBATCH_OUTPUT=/dev/null", "SQUEUE_PARTITION=urgent", "SLURM_EXPORT_ENV=NONE"]
    first_terminal = patient(commands, tmp_path / "run", variables=[*variables, "FORGE_RL_MARK=x"])
    first_terminal.wait_for("place 2 of 2 in the queue of batch")
    second_terminal = patient(commands, tmp_path / "run")
    second_terminal.wait_for("runs this command already; following it")
    slurm.run("scancel", "--user=root", "--state=PENDING", "--name=wrap")
    slurm.run("scancel", first)
    for terminal in (first_terminal, second_terminal):
        terminal.wait_for(r"goes on from 0 on node\d node\d")
    processes = [process for node in slurm.nodes for process in slurm.processes(node)]
    hosts = [process for process in processes if process.cmdline()[1:3] == ["-m", "forge_rl.jobs.host"]]
    assert [host.environ()["FORGE_RL_MARK"] for host in hosts] == ["x", "x"]
    first_terminal.process.send_signal(signal.SIGINT)
    assert first_terminal.end() == 130
    assert "saved 1" in first_terminal.lines
    assert second_terminal.end() == 129, "the run's own status after SIGHUP"
    assert "saved 1" in second_terminal.lines
    assert slurm.state(tmp_path / "run") == "FAILED", "not requeued"


@on_slurm
def test_a_whole_run_on_two_nodes_gets_another_node_when_one_dies(
    slurm: SlurmCluster, commands: list[Command], tiny_model: Path, tmp_path: Path
):
    out = tmp_path / "run"
    flags = ("--steps", "1000", "--trainer.ranks", "2", "--generator.replicas", "2", "--generator.min-replicas", "1")
    job = "slurm:nodes=2,partition=batch,time=20,most_replaced=1"
    flags += ("--evaluation.every", "0", "--checkpoint-every", "2", "--job", job)
    run = tiny_run(commands, tiny_model, out, *flags)
    run.wait_for(r"step +4/1000", 400)
    hosts = json.loads((out / "hosts.json").read_text())["services"]
    assert hosts["trainer"] == hosts["generator"] == ["node1", "node2"]
    slurm.kill_node("node2")
    run.wait_for("host node2.1 starting  Slurm job [0-9]+")  # it may have joined before its state is asked for again
    requeued = "resumed" in run.wait_for(r"host node2\.1 has joined: generator, trainer|resumed after step [0-9]+$")
    # Slurm may requeue the job itself, in spite of --no-kill, if the node dies at a certain moment.
    run.wait_for("continued from " if requeued else "the run continues from step [0-9]+$")
    attached, until = attach(out), time.monotonic() + 240
    while attached.ask("status")["engines"] != "2/2":
        assert time.monotonic() < until, run.output
        time.sleep(0.5)
    asked = hosts_name(out)
    assert requeued or slurm.states(asked) == {"RUNNING"}
    attached.stop()
    assert run.end(400) == 0, run.output
    assert slurm.state(out) == "COMPLETED"
    assert requeued or slurm.states(asked) <= {"CANCELLED", "COMPLETED", "COMPLETING"}, "given back"


@on_slurm
def test_a_job_that_is_preempted_or_out_of_time_saves_and_goes_on(
    slurm: SlurmCluster, commands: list[Command], tmp_path: Path
):
    run = patient(commands, tmp_path / "run", job="slurm:nodes=2,time=1,grace_s=45")
    run.wait_for("goes on from 0")
    slurm.submit("sleep 1", "--nodes=3", "--exclusive", "--partition=urgent")
    run.wait_for("is about to end host")
    run.wait_for("goes on from 1")
    run.wait_for("goes on from 2")  # 15 s later, 45 before the limit
    before = run.lines[: next(at for at, line in enumerate(run.lines) if "goes on from 2" in line)]
    assert before.count("stopped by SIGUSR1") >= 2, "one that starts slowly is stopped again before it goes on"
    slurm.run("scancel", "--user=root")
    assert run.end() == 1
    assert "CANCELLED" in run.lines[-2]


@on_slurm
def test_a_job_survives_the_death_of_any_node_even_the_controllers(
    slurm: SlurmCluster, commands: list[Command], tmp_path: Path
):
    run = patient(commands, tmp_path / "run", "--seconds", "1000")
    *_, second = run.wait_for("goes on from 0").split()
    slurm.kill_node(second)
    run.wait_for(f"{second} is lost")
    *_, first, _ = run.wait_for(rf"goes on from 0 on (?!.*{second})").split()
    slurm.start(second)
    slurm.kill_node(first)
    run.wait_for(rf"goes on from 0 on (?!.*{first})")
    slurm.run("scancel", "--user=root", "--signal=HUP", "--batch")
    assert run.end() == 129


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_of_the_ranks_that_a_launcher_starts_the_first_leads(variable: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    job = build_job("allocation:hosts=a+b")
    assert isinstance(job, AllocationJob)
    assert job.leads
    for rank in (0, 1, 10):
        monkeypatch.setenv(variable, str(rank))
        assert job.leads == (rank == 0)


@pytest.mark.long
def test_a_command_that_mpirun_starts_twice_runs_once(tmp_path: Path):
    """By Open MPI's mpirun, or where that is not installed, by a stand-in that sets its variables."""
    if shutil.which("mpirun"):
        launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    else:
        both = 'for r in 0 1; do OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$r "$@" & done; wait'
        launcher = ["sh", "-c", both, "mpirun"]
    job = "allocation:hosts=127.0.0.1+127.0.0.2,launcher=env SLURMD_NODENAME={host}"
    flags = ["-m", "tests.slurm.patient", "--job", job, "--seconds", "0.1", "--out", str(tmp_path)]
    done = subprocess.run([*launcher, sys.executable, *flags], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines().count("goes on from 0 on 127.0.0.1 127.0.0.2") == 1, done.stdout + done.stderr
    assert done.returncode == 0


@on_slurm
def test_inside_an_allocation_one_of_several_ranks_leads(slurm: SlurmCluster, commands: list[Command], tmp_path: Path):
    flags = [
        sys.executable,
        "-m",
        "tests.slurm.patient",
        "--job",
        "allocation",
        "--seconds",
        "1",
        "--out",
        str(tmp_path),
    ]
    inside = subprocess.run(["salloc", "--nodes=2", "srun", *flags], capture_output=True, text=True, timeout=100)
    assert inside.stdout.splitlines().count("goes on from 0 on node1 node2") == 1
    assert inside.returncode == 0
    failing = patient(commands, tmp_path / "run", "--seconds", "1", "--fail", job="slurm:nodes=1,exclusive=false")
    assert failing.end() == 7
