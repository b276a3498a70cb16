"""Manifests of pods, what their states mean, and how they are followed, without a cluster."""

import contextlib
import subprocess
import sys
import threading
import time
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
from forge_rl.runtime.job_flag import build_job
from tests.kubernetes_server import unknown_fields
from tests.processes import below


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
    assert [variable["name"] for variable in container["env"]] == ["NCCL_DEBUG", "POD_IP", "MONARCH_PORT", "HOME"]
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert spec["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Gi"}}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["terminationGracePeriodSeconds"] == 600
    selector = {"podSelector": {"matchLabels": {"forge-rl-run": "grpo"}}}
    assert policy["spec"] == {**selector, "policyTypes": ["Ingress"], "ingress": [{"from": [selector]}]}
    assert pods[1]["metadata"]["labels"]["forge-rl-run"] == "grpo"


def test_dry_run_prints_the_manifests_as_yaml():
    import yaml

    command = [sys.executable, "-m", "recipes.grpo", "--job", "kubernetes:image=x,hosts=2", "--dry-run"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")
    assert [manifest["kind"] for manifest in yaml.safe_load_all(process.stdout)] == ["NetworkPolicy", "Pod", "Pod"]


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
        state = judge(pod)
        assert (state.phase, state.reason) == (phase, reason), pod
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


def test_no_other_process_sees_the_secrets_of_the_process_that_deletes_pods(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLOUD_API_KEY", "a secret of a cloud")
    with pods_module.deleted_with_this_process(None, namespace="default", run="grpo"):
        [guard] = below(psutil.Process(), "forge_rl.jobs.pods")
        until = time.monotonic() + 60
        with contextlib.suppress(psutil.AccessDenied):  # root alone sees its environment
            while guard.environ()["CLOUD_API_KEY"].strip("*"):  # until it has started
                assert time.monotonic() < until
                time.sleep(0.05)


def test_a_controller_in_a_pod_owns_the_others_and_carries_the_runs_label():
    job = KubernetesHosts(image="x", name="grpo")
    policy, pods = job.manifests()
    controller = {"metadata": {"name": "controller", "uid": "u", "labels": {"forge-rl-run": "grpo"}}}
    job._adopt(controller, policy, *pods)
    for model, manifest in (("V1NetworkPolicy", policy), ("V1Pod", pods[0])):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["name"], owner["uid"]) == ("controller", "u")
        assert unknown_fields(manifest, model) == []
    job._adopt(None, policy, *pods)  # it may not ask
    with pytest.raises(ConfigError, match="lacks the label forge-rl-run=grpo"):
        job._adopt({"metadata": {"name": "controller", "uid": "u"}}, policy, *pods)
