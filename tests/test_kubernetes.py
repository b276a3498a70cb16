"""Hosts that are pods: manifests, states of pods, and runs against a stand-in for an API server."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

pytest.importorskip("kubernetes")

from forge_rl.errors import ConfigError, InfrastructureError
from forge_rl.jobs import pods as pods_module
from forge_rl.jobs.kubernetes import KubernetesHosts
from forge_rl.jobs.manifests import merge, quantity_bytes
from forge_rl.jobs.pods import PodState, judge
from forge_rl.run.live.attach import attach
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.job_flag import build_job
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
    given: dict[str, Any] = {"image": "forge-rl:1", "hosts": 2, "route": "direct", "kubeconfig": kubeconfig}
    return KubernetesHosts(**given | options)


def test_manifests_have_only_known_fields_and_restrict_the_pods(tmp_path: Path):
    template = tmp_path / "pod.yaml"
    template.write_text(
        "metadata: {annotations: {team: a}}\n"
        "spec:\n"
        "  nodeSelector: {gpu: h100}\n"
        "  automountServiceAccountToken: true\n"
        "  containers:\n"
        "  - {name: worker, env: [{name: NCCL_DEBUG, value: WARN}], "
        "securityContext: {capabilities: {add: [IPC_LOCK]}}}\n"
    )
    text = f"kubernetes:image=x,hosts=3,name=grpo,gpus=8,cpus=32,memory=512Gi,shm=128Gi,claim=c,template={template}"
    job = build_job(text)
    assert isinstance(job, KubernetesHosts)
    policy, pods = job.manifests()
    assert unknown_fields(policy, "V1NetworkPolicy") == []
    assert [pod["metadata"]["name"] for pod in pods] == ["grpo-host0", "grpo-host1", "grpo-host2"]
    spec = pods[1]["spec"]
    assert unknown_fields(pods[1], "V1Pod") == []
    assert unknown_fields({**pods[1], "spec": {**spec, "hostnetwork": True}}, "V1Pod") == ["V1Pod.spec.hostnetwork"]
    (container,) = spec["containers"]
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert spec["automountServiceAccountToken"] is False, "options of the job win over the template"
    assert [each["name"] for each in container["env"]] == ["NCCL_DEBUG", "POD_IP", "MONARCH_PORT", "HOME"]
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert spec["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Gi"}}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["terminationGracePeriodSeconds"] == 600
    own = {"podSelector": {"matchLabels": {"forge-rl-run": "grpo"}}}
    assert policy["spec"] == {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]}
    assert pods[1]["metadata"]["labels"]["forge-rl-run"] == "grpo"


def test_dry_run_prints_the_manifests_as_yaml():
    import yaml

    command = [sys.executable, "-m", "recipes.grpo", "--job", "kubernetes:image=x,hosts=2", "--dry-run"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [each["kind"] for each in yaml.safe_load_all(shown.stdout)] == ["NetworkPolicy", "Pod", "Pod"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kubernetes:hosts=2", "needs image"),
        ("kubernetes:image=x,name=Grpo-1", "name is 'Grpo-1'"),
        ("kubernetes:image=x,namespace=-a", "namespace is '-a'"),
        (f"kubernetes:image=x,namespace=2026-{'a' * 50}", None),
        ("kubernetes:image=x,shm=64", None),
        ("kubernetes:image=x,shm=many", "shm is 'many'"),
        ("kubernetes:image=x,shm=64Gi,memory=32Gi", "leaves nothing of 32Gi"),
        ("kubernetes:image=x,user=0", "user is 0"),
        ("kubernetes:image=x,most_replaced=1", "most_replaced needs a claim"),
        ("kubernetes:image=x,most_replaced=1,claim=c,route=forward", "most_replaced needs a claim, and pods that"),
    ],
)
def test_options_are_checked_before_the_cluster_is_asked(text: str, problem: str | None):
    if problem is None:
        build_job(text)
        return
    with pytest.raises(ConfigError, match=problem):
        build_job(text)


def test_quantities_and_templates():
    assert [quantity_bytes(text, "--x") for text in ("7", "2k", "64Mi", "8Gi")] == [7, 2000, 64 << 20, 8 << 30]
    assert merge({"a": [1], "b": 2, "c": {"d": 3}}, {"a": [4], "b": 5, "c": {"e": 6}}) == {
        "a": [1, 4],
        "b": 5,
        "c": {"d": 3, "e": 6},
    }


def pod_of(
    phase: str, *, deleted: bool = False, state: dict[str, Any] | None = None, **condition: str
) -> dict[str, Any]:
    containers = [{"name": "worker", "state": state}] if state else []
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    status = {"phase": phase, "podIP": "10.0.0.1", "conditions": [condition], "containerStatuses": containers}
    return {"metadata": metadata, "status": status}


def test_a_pod_waits_for_a_reason_and_every_end_of_it_is_a_dead_host():
    ready = {"type": "Ready", "status": "True"}
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no\nGPU"}
    preempted = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    oom = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    for pod, phase, reason in (
        ({}, "waiting", "Pending"),
        (pod_of("Running", **ready), "ready", ""),
        (pod_of("Running"), "waiting", "Running"),
        (pod_of("Pending", **unschedulable), "waiting", "Unschedulable: no GPU"),
        (pod_of("Pending", state={"waiting": {"reason": "ErrImagePull"}}), "waiting", "ErrImagePull"),
        (pod_of("Pending", state={"waiting": {"reason": "InvalidImageName"}}), "dead", "InvalidImageName"),
        (pod_of("Running", deleted=True, **ready), "ending", "the pod is being deleted"),
        (pod_of("Running", **preempted), "ending", "PreemptionByScheduler"),
        (pod_of("Running", state=oom, **ready), "dead", "the container exited with status 137: OOMKilled"),
        (pod_of("Succeeded"), "dead", "the pod is Succeeded: ?"),
        (pod_of("Failed", **preempted), "dead", "PreemptionByScheduler"),
        (pod_of("Unknown"), "dead", "the pod is Unknown: ?"),
    ):
        found = judge(pod)
        assert (found.phase, found.reason) == (phase, reason), pod
    assert judge(pod_of("Running", **ready)) == PodState(phase="ready", address="10.0.0.1")


def test_pods_are_followed_further_after_an_answer_that_is_not_as_documented(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pods_module, "_RETRY_S", 0.01)
    followed = pods_module.Pods(cast(Any, None), namespace="default", run="grpo")
    problems, answers, ended = list[str](), iter([{}, {"version": "1"}]), threading.Event()

    def list_pods() -> tuple[dict[str, Any], str]:
        if (answer := next(answers, None)) is None:
            ended.set()
            raise InfrastructureError("the end")
        return {}, answer["version"]

    monkeypatch.setattr(followed, "_list", list_pods)
    monkeypatch.setattr(followed, "_changes", lambda **_: 1 / 0)
    end = followed.follow(lambda *_: None, problems.append)
    try:
        assert ended.wait(30)
    finally:
        end()
    assert problems[:2] == ["KeyError('version')", "ZeroDivisionError('division by zero')"]


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_left")
def test_a_run_that_waits_says_why_and_ctrl_c_deletes_what_was_made(cluster: ApiServer, kubeconfig: Path):
    cluster.room = 1
    cluster.broken_images = ("broken",)
    said: list[str] = []

    async def wait(job: KubernetesHosts, words: str) -> None:
        enough = asyncio.Event()

        def say(text: str) -> None:
            said.append(text)
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
    assert any("1 of 2 pods are ready; host1: Unschedulable: 0/1 nodes" in text for text in said), said
    assert any("host0: ImagePullBackOff: Back-off" in text for text in said), said
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


def test_no_other_process_sees_the_secrets_of_the_process_that_deletes_pods(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLOUD_API_KEY", "a secret of a cloud")
    with pods_module.deleted_with_this_process(None, namespace="default", run="grpo"):
        [guard] = [child for child in psutil.Process().children() if "forge_rl.jobs.pods" in child.cmdline()]
        until = time.monotonic() + 60
        with contextlib.suppress(psutil.AccessDenied):  # root alone sees its environment
            while guard.environ()["CLOUD_API_KEY"].strip("*"):  # until it has started
                assert time.monotonic() < until
                time.sleep(0.05)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
async def test_pods_are_hosts_that_run_code_and_one_that_ends_is_lost_by_name(
    cluster: ApiServer, kubeconfig: Path, tmp_path: Path
):
    lost: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listener = JobListener(on_lost=lambda *told: lost.put_nowait(told))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lost.put_nowait, ("all", "save"))
    async with job_of(kubeconfig, hosts=3).open(listener) as hosts:
        assert list(cluster.policies) == ["forgerl"]
        faults = Faults()
        faults.install()
        made = Cluster(tmp_path, hosts=hosts)
        service = Service(new_service_name(), made, faults)
        for host in hosts:
            await service.watch(service.spawn(FakeActor, host, host=host), deadline_s=60)
        for number in range(3):
            pid = await pid_of(service, replica=number)
            assert psutil.Process(pid).environ()["POD_IP"] == f"127.0.1.{number + 1}"
        faults.closing = True
        await service.stop()
        cluster.kill("forgerl-host1")
        found = [await asyncio.wait_for(lost.get(), 60)]
        cluster.delete("forgerl-host2", grace_s=0.5, cause="PreemptionByScheduler")
        found += [await asyncio.wait_for(lost.get(), 60), await asyncio.wait_for(lost.get(), 60)]
        await made.close()
    assert lost.empty(), "hosts that are given back are not lost"
    assert found == [
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


def test_a_controller_in_a_pod_owns_the_others_and_carries_the_runs_label():
    job = KubernetesHosts(image="x", name="grpo")
    policy, pods = job.manifests()
    own = {"metadata": {"name": "controller", "uid": "u", "labels": {"forge-rl-run": "grpo"}}}
    job._adopt(own, policy, *pods)
    for model, manifest in (("V1NetworkPolicy", policy), ("V1Pod", pods[0])):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["name"], owner["uid"]) == ("controller", "u")
        assert unknown_fields(manifest, model) == []
    job._adopt(None, policy, *pods)  # it may not ask
    with pytest.raises(ConfigError, match="lacks the label forge-rl-run=grpo"):
        job._adopt({"metadata": {"name": "controller", "uid": "u"}}, policy, *pods)


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
