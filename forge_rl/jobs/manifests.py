"""Kubernetes manifests of a run's hosts: pods, and the network policy between them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_rl.errors import ConfigError

RUN_LABEL = "forge-rl-run"
"""Label of everything that belongs to a run; its value is the run's name."""
HOST_LABEL = "forge-rl-host"
RANK_LABEL = "forge-rl-rank"
"""Rank of a pod in its Monarch mesh, for KubernetesJob; always 0, as each mesh has one pod."""
CONTAINER = "worker"
"""Name of the container in which a host runs; a template's container with this name is completed."""

Manifest = dict[str, Any]

_UNREACHABLE_S = 30
"""Seconds after which Kubernetes evicts pods of a node that it cannot reach, instead of its default of 300."""
_START_S = 600


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """What the pods of a run have in common."""

    run: str
    namespace: str
    image: str
    resources: Mapping[str, str]
    """Requests and limits of cpu, memory and nvidia.com/gpu."""
    shm: str
    """Size of /dev/shm, such as 8Gi; counts as memory."""
    command: Sequence[str]
    grace_s: int
    user: int
    """User and group id of the processes, and group of the volumes."""
    template: Mapping[str, Any]
    """A pod template, as `metadata` and `spec`, to which everything else is added."""


def network_policy(run: str, namespace: str) -> Manifest:
    """Return the policy that lets only the run's own pods connect to the run's pods, on any port."""

    def own() -> Manifest:
        return {"matchLabels": {RUN_LABEL: run}}

    return {
        "apiVersion": "networking.k8s.io/v1",
        # Monarch executes whatever reaches its port.
        "kind": "NetworkPolicy",
        "metadata": {"name": run, "namespace": namespace, "labels": {RUN_LABEL: run}},
        "spec": {"podSelector": own(), "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own()}]}]},
    }


def pod(spec: PodSpec, host: str, *, port: int = 0, claim: str = "", mount: str = "") -> Manifest:
    """Return the pod of a host.

    Args:
        port: port on which the host serves Monarch; 0 if it chooses one.
        claim: a persistent volume claim to mount, or "".
        mount: path at which it is mounted.
    """
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shm}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "shared", "mountPath": mount})
    manifest: Manifest = {
        "metadata": {
            "name": f"{spec.run}-{host}",
            "namespace": spec.namespace,
            "labels": {RUN_LABEL: spec.run, HOST_LABEL: host, RANK_LABEL: "0"},
        },
        "spec": {
            # A host ends with its container.
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": spec.grace_s,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": spec.user,
                "runAsGroup": spec.user,
                "fsGroup": spec.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "tolerations": [
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNREACHABLE_S}
                for key in ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
            ],
            "containers": [{**_container(spec, port), "volumeMounts": mounts}],
            "volumes": volumes,
        },
    }
    merged = merge(spec.template, manifest)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": merged["metadata"], "spec": merged["spec"]}


def _container(spec: PodSpec, port: int) -> Manifest:
    container: Manifest = {
        "name": CONTAINER,
        "image": spec.image,
        "command": list(spec.command),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "MONARCH_PORT", "value": str(port)},  # read by Monarch's KubernetesJob
            {"name": "HOME", "value": "/tmp"},  # the image need not know the user
        ],
        "resources": {"requests": dict(spec.resources), "limits": dict(spec.resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    if port:
        container["ports"] = [{"name": "monarch", "containerPort": port}]
        # Only until the port is open: Monarch would log every later connection without a message.
        container["startupProbe"] = {"tcpSocket": {"port": port}, "periodSeconds": 1, "failureThreshold": _START_S}
    return container


def merge(template: Any, ours: Any) -> Any:
    """Merge our values into a template; ours take precedence.

    Mappings are merged by key, and lists of named things, such as containers and volumes, by name; other lists are
    joined.
    """
    if isinstance(template, Mapping) and isinstance(ours, Mapping):
        return {
            key: merge(template.get(key), ours[key]) if key in ours else copy.deepcopy(template[key])
            for key in (*template, *(key for key in ours if key not in template))
        }
    if isinstance(template, list) and isinstance(ours, list):
        ours_by_name = {entry["name"]: entry for entry in ours if isinstance(entry, Mapping) and "name" in entry}
        template_names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in template]
        merged = [
            merge(entry, ours_by_name[name]) if name in ours_by_name else copy.deepcopy(entry)
            for entry, name in zip(template, template_names, strict=True)
        ]
        # The template's entries, completed, and then ours that it does not name.
        return merged + [
            entry
            for entry in ours
            if not (isinstance(entry, Mapping) and "name" in entry and entry["name"] in template_names)
        ]
    return copy.deepcopy(ours)


_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{unit}i": 1024 ** (power + 1) for power, unit in enumerate("KMGT")
}


def quantity_bytes(text: str, flag: str) -> int:
    """Return the bytes of a Kubernetes quantity: `quantity_bytes("8Gi", "--job kubernetes:shm")`.

    Raises:
        ConfigError: it is not a whole number of bytes with a usual unit; names the flag.
    """
    digits = text.rstrip("kKMGTi")
    unit = text[len(digits) :]
    if not (digits.isascii() and digits.isdigit()) or unit not in _UNITS:
        raise ConfigError(f"{flag} is {text!r}", hint="write a whole number of bytes with a unit, such as 64Gi")
    return int(digits) * int(_UNITS[unit])
