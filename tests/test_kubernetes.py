"""Hosts that are pods: runs against a stand-in for an API server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("kubernetes")

from forge_rl.errors import ConfigError, InfrastructureError
from forge_rl.jobs import pods as pods_module
from forge_rl.jobs.kubernetes import KubernetesHosts
from forge_rl.run.live.attach import attach
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.job_protocol import JobListener
from forge_rl.runtime.service import Service
from tests.commands import Command, metrics, tiny_run, wait_for_engines, wait_for_step
from tests.fake_actors import FakeActor, new_service_name, pid_of
from tests.kubernetes_server import ApiServer, serving, unknown_fields


@pytest.fixture
def cluster() -> ApiServer:
    return ApiServer()


@pytest.fixture
def kubeconfig(cluster: ApiServer, tmp_path: Path) -> Iterator[Path]:
    with serving(cluster, tmp_path) as path:
        yield path


def job_of(kubeconfig: Path, **options: Any) -> KubernetesHosts:
    defaults: dict[str, Any] = {"image": "forge-rl:1", "hosts": 2, "route": "direct", "kubeconfig": kubeconfig}
    return KubernetesHosts(**defaults | options)


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_left")
def test_a_run_that_waits_says_why_and_ctrl_c_deletes_what_was_made(cluster: ApiServer, kubeconfig: Path):
    cluster.room = 1
    cluster.broken_images = ("broken",)
    texts: list[str] = []

    async def wait(job: KubernetesHosts, words: str) -> None:
        enough = asyncio.Event()

        def say(text: str) -> None:
            texts.append(text)
            if words in text:
                enough.set()

        async def opened() -> None:
            async with job.open(JobListener(say=say)):
                raise AssertionError("it cannot start")

        opening = asyncio.create_task(opened())
        heard = asyncio.create_task(enough.wait())
        await asyncio.wait((opening, heard), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        heard.cancel()
        opening.cancel()
        await opening

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wait(job_of(kubeconfig), "1 of 2 pods are ready; host1: Unschedulable: 0/1 nodes"))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(wait(job_of(kubeconfig, hosts=1, image="broken"), "host0: ImagePullBackOff: Back-off"))
    assert (cluster.pods, cluster.policies) == ({}, {})
    assert any("1 of 2 pods are ready; host1: Unschedulable: 0/1 nodes" in text for text in texts), texts
    assert any("host0: ImagePullBackOff: Back-off" in text for text in texts), texts
    labels = {"forge-rl-run": "forgerl", "forge-rl-host": "host0"}
    broken = {"spec": {"containers": [{"image": "broken", "command": []}]}}
    cluster.create({"metadata": {"name": "left", "labels": labels}} | broken)
    with pytest.raises(InfrastructureError, match=r"not ready in 0.5 s.*ImagePullBackOff"):
        asyncio.run(wait(job_of(kubeconfig, hosts=1, name="other", image="broken", wait_s=0.5), "never"))
    with pytest.raises(ConfigError, match="pods of a run 'forgerl' exist"):
        asyncio.run(wait(job_of(kubeconfig), "never"))


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_left")
def test_a_run_that_starts_at_the_same_time_under_one_name_loses_nothing_to_the_other(
    cluster: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster.broken_images = ("broken",)
    labels = {"forge-rl-run": "forgerl", "forge-rl-host": "host0"}
    exists = pods_module.Pods.exists

    def exists_before_another_run_creates(pods: pods_module.Pods) -> bool:
        is_there = exists(pods)
        cluster.policies["forgerl"] = {"metadata": {"name": "forgerl", "labels": labels}}
        spec = {"containers": [{"image": "broken", "command": []}]}
        cluster.create({"metadata": {"name": "forgerl-host0", "labels": labels}, "spec": spec})
        return is_there

    async def opened() -> None:
        async with job_of(kubeconfig, hosts=1).open(JobListener()):
            raise AssertionError("it cannot start")

    monkeypatch.setattr(pods_module.Pods, "exists", exists_before_another_run_creates)
    with pytest.raises(ConfigError, match=r"create the network policy forgerl: .*already exists"):
        asyncio.run(opened())
    assert ([*cluster.pods], [*cluster.policies]) == (["forgerl-host0"], ["forgerl"])


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_left")
def test_pods_that_may_be_left_are_named_with_the_command_that_deletes_them(
    cluster: ApiServer, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster.broken_images = ("broken",)

    def refuse(pods: pods_module.Pods) -> None:
        raise InfrastructureError("Kubernetes did not answer")

    async def opened() -> None:
        async with job_of(kubeconfig, hosts=1, image="broken", wait_s=0.5).open(JobListener()):
            raise AssertionError("it cannot start")

    monkeypatch.setattr(pods_module.Pods, "delete", refuse)
    with pytest.raises(InfrastructureError, match="did not answer") as error:
        asyncio.run(opened())
    [note] = error.value.__notes__
    assert "kubectl -n default delete pod,networkpolicy -l forge-rl-run=forgerl" in note


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
async def test_pods_are_hosts_that_run_code_and_one_that_ends_is_lost_by_name(
    cluster: ApiServer, kubeconfig: Path, tmp_path: Path
):
    losses: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listener = JobListener(on_lost=lambda *loss: losses.put_nowait(loss))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, losses.put_nowait, ("all", "save"))
    async with job_of(kubeconfig, hosts=3).open(listener) as hosts:
        assert list(cluster.policies) == ["forgerl"]
        faults = Faults()
        faults.install()
        meshes = Cluster(tmp_path, hosts=hosts)
        service = Service(new_service_name(), meshes, faults)
        for host in hosts:
            await service.watch(service.spawn(FakeActor, host, host=host), deadline_s=60)
        for number in range(3):
            pid = await pid_of(service, replica=number)
            assert psutil.Process(pid).environ()["POD_IP"] == f"127.0.1.{number + 1}"
        faults.closing = True
        await service.stop()
        cluster.kill("forgerl-host1")
        ended_hosts = [await asyncio.wait_for(losses.get(), 60)]
        cluster.delete("forgerl-host2", grace_s=0.5, cause="PreemptionByScheduler")
        ended_hosts += [await asyncio.wait_for(losses.get(), 60), await asyncio.wait_for(losses.get(), 60)]
        await meshes.close()
    assert losses.empty(), "hosts that are given back are not lost"
    assert ended_hosts == [
        ("host1", "the container exited with status 137: OOMKilled"),
        ("all", "save"),
        ("host2", "PreemptionByScheduler"),
    ]
    assert (cluster.pods, cluster.policies) == ({}, {})


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a pod a /dev/shm of its own")
def test_the_doctor_names_what_is_wrong_with_pods(cluster: ApiServer, kubeconfig: Path, tmp_path: Path):
    """Pods with another version of torch, as far as its metadata say, and with a small /dev/shm."""
    metadata = tmp_path / "site" / "torch-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    template = tmp_path / "pod.yaml"
    container = {"name": "worker", "env": [{"name": "PYTHONPATH", "value": str(metadata.parent.parent)}]}
    template.write_text(json.dumps({"spec": {"containers": [container]}}))
    job = f"kubernetes:image=x,hosts=1,shm=64Mi,route=direct,kubeconfig={kubeconfig},template={template}"
    command = [sys.executable, "-m", "apps.doctor", "--quick", "--job", job, "--folder", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 1, done.stderr
    assert "error: 2 of 11 checks failed, on host0" in done.stderr
    rows = {tuple(line.split()[:3]) for line in done.stdout.splitlines()}
    assert {("versions", "local", "ok"), ("versions", "host0", "fail"), ("/dev/shm", "host0", "fail")} <= rows
    assert "torch 0.0.1 instead of 2." in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []
    assert (cluster.pods, cluster.policies) == ({}, {})


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_left")
def test_pods_are_deleted_when_the_controller_is_killed(cluster: ApiServer, kubeconfig: Path):
    cluster.broken_images = ("broken",)
    code = (
        "import asyncio, pathlib\n"
        "from forge_rl.jobs.kubernetes import *\n"
        f"job = KubernetesHosts(image='broken', kubeconfig=pathlib.Path({str(kubeconfig)!r}), route='direct')\n"
        "async def main():\n"
        "    async with job.open(JobListener(say=lambda text: print(text, flush=True))): pass\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        for line in controller.stdout:
            if "ImagePullBackOff" in line:
                break
        guard = psutil.Process(controller.pid).children()
        controller.kill()
    with cluster.changed:
        assert cluster.changed.wait_for(lambda: not cluster.pods and not cluster.policies, timeout=60)
    psutil.wait_procs(guard, timeout=60)


@pytest.mark.nightly
@pytest.mark.usefixtures("nothing_left")
def test_a_run_trains_and_decodes_on_pods_and_replaces_a_dead_one(
    cluster: ApiServer, kubeconfig: Path, commands: list[Command], tiny_model: Path, tmp_path: Path
):
    """Each pod has a /dev/shm of its own, if the tests run as root: weights travel between them."""
    out = tmp_path / "a run"
    job = f"image=x,hosts=2,name=tiny,shm=4Gi,route=direct,claim=c,mount={tmp_path},most_replaced=1"
    command = tiny_run(
        commands,
        tiny_model,
        out,
        *("--job", f"kubernetes:{job},kubeconfig={kubeconfig}"),
        *("--placement", "trainer=host0;generator=host0+host1;environment=local;reward=local"),
        *("--generator.replicas", "2", "--generator.min-replicas", "1"),
        *("--steps", "1000", "--evaluation.every", "0"),
    )
    command.wait_for(r"step +2/1000")
    services = json.loads((out / "hosts.json").read_text())["services"]
    assert (services["trainer"], services["generator"]) == (["host0"], ["host0", "host1"])
    cluster.kill("tiny-host1")
    command.wait_for(r"asking for host host1\.1 in the place of host1, 1 of at most 1")
    command.wait_for(r"host host1\.1 has joined: generator")
    run = attach(out)
    wait_for_engines(command, run, "2")
    wait_for_step(command, run, run.step + 3)
    assert run.hosts["host1.1"] == "serves"
    assert sorted(cluster.pods) == ["tiny-host0", "tiny-host1", "tiny-host1.1"]
    command.process.send_signal(signal.SIGINT)
    assert command.end(120) == 130, command.output
    rows = [row for row in metrics(out) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row.get("logprob_gap", 0) < 1e-4 for row in rows), "the engines have the trainer's weights"
    assert (cluster.pods, cluster.policies) == ({}, {})


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_left")
async def test_a_pod_that_joins_is_followed_to_its_end_and_deleted(
    cluster: ApiServer, kubeconfig: Path, tmp_path: Path
):
    """The run folder is empty, so that the pods' command fails after some seconds, unless it is ended before."""
    folder = tmp_path / "a run; touch injected"
    (folder / "logs").mkdir(parents=True)
    job = job_of(kubeconfig, claim="c", mount=str(tmp_path), most_replaced=3)

    async def ended_by(name: str, end: Callable[[asyncio.Task[str]], object]) -> str:
        runs = asyncio.Event()
        ending = asyncio.create_task(job.replace(name, folder, lambda text: runs.set() if "runs" in text else None))
        await asyncio.wait_for(runs.wait(), 60)
        await asyncio.to_thread(end, ending)
        await asyncio.wait([ending], timeout=60)
        return "cancelled" if ending.cancelled() else ending.result()

    failed = await ended_by("host1.1", lambda _: None)
    assert failed.startswith("the container exited with status 1: Error: error: ")
    evicted = await ended_by("host1.2", lambda _: cluster.delete("forgerl-host1.2", 5.0, cause="Preempted"))
    assert evicted.startswith("Preempted")
    assert await ended_by("host1.3", lambda _: cluster.delete("forgerl-host1.3", 5.0)) == "", "someone wished it"
    loop = asyncio.get_running_loop()
    assert await ended_by("host1.4", lambda task: loop.call_soon_threadsafe(task.cancel)) == "cancelled"
    with pytest.raises(ConfigError, match=r"run folder / is not below .* where the pods mount the claim c"):
        await job.replace("host1.5", Path("/"), print)
    with cluster.changed:
        assert cluster.changed.wait_for(lambda: not cluster.pods, timeout=60)
    assert list(folder.iterdir()) == [folder / "logs"], "a folder's name is no code"
    assert unknown_fields(job._joining("host1.6", folder), "V1Pod") == []
