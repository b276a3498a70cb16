"""The pods of a run in a Kubernetes cluster: created, watched and deleted through its API."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_rl.errors import ConfigError, ForgeError, InfrastructureError
from forge_rl.jobs.manifests import HOST_LABEL, RUN_LABEL, Manifest
from forge_rl.system.variables import hide

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_CALL_S = 30.0
_WATCH_S = 60
"""Seconds until a watch is renewed, in case it missed a change."""
_RETRY_S = 2.0
_DELETE_GRACE_S = 1
_MOST_WORDS = 300
"""Characters of the API's messages that are shown."""
_HOPELESS = ("InvalidImageName", "CreateContainerConfigError")
"""Reasons for which a container waits that do not go away without a change to the pod."""


@dataclass(frozen=True, kw_only=True)
class PodState:
    """State of a host's pod, according to the API."""

    phase: Literal["waiting", "ready", "ending", "dead", "gone"]
    """ending: the cluster will stop it once its grace period is over; dead: it ended; gone: it does not exist."""
    reason: str = ""
    """Why it waits, or why it is dead."""
    address: str = ""
    """The pod's IP address; "" if it has none yet."""
    wished: bool = False
    """True if it is dead because its command has succeeded, or is ending because someone deletes it."""


def judge(pod: Mapping[str, Any]) -> PodState:
    """Return the state of a pod, given as the API's JSON. Every terminal state is dead."""
    # Judged in this order: ended, ending, ready, and otherwise waiting for a reason.
    status = pod.get("status") or {}
    address = str(status.get("podIP") or "")
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    container_states = [container.get("state") or {} for container in status.get("containerStatuses") or ()]
    # Set by Kubernetes on a pod that it is about to stop, for instance to make room or because its node is lost.
    disruption = conditions.get("DisruptionTarget") or {}
    cause = _words(disruption) if disruption.get("status") == "True" else ""
    phase = str(status.get("phase") or "Pending")
    # Pods have the restart policy Never, so a container that has terminated is not started again.
    if termination := next((state["terminated"] for state in container_states if state.get("terminated")), None):
        code = termination.get("exitCode")
        reason = cause or f"the container exited with status {code}: {_words(termination) or '?'}"
        return PodState(phase="dead", reason=reason, address=address, wished=code == 0)
    if phase not in ("Pending", "Running"):  # Succeeded, Failed, Unknown: its node is lost
        return PodState(phase="dead", reason=cause or f"the pod is {phase}: {_words(status) or '?'}", address=address)
    # It still runs: its grace period has begun.
    if cause or (pod.get("metadata") or {}).get("deletionTimestamp"):
        return PodState(phase="ending", reason=cause or "the pod is being deleted", address=address, wished=not cause)
    if address and (conditions.get("Ready") or {}).get("status") == "True":
        return PodState(phase="ready", address=address)
    obstacles = [state["waiting"] for state in container_states if state.get("waiting")]
    scheduling = conditions.get("PodScheduled") or {}
    if scheduling.get("status") == "False":
        obstacles.insert(0, scheduling)
    reason = _words(obstacles[0]) if obstacles else phase
    hopeless = bool(obstacles) and obstacles[0].get("reason") in _HOPELESS
    return PodState(phase="dead" if hopeless else "waiting", reason=reason, address=address)


def _words(entry: Mapping[str, Any]) -> str:
    """Return the reason and the message of a part of a status, on one line."""
    words = ": ".join(str(entry[key]) for key in ("reason", "message") if entry.get(key))
    return " ".join(words.split())[:_MOST_WORDS]


@contextlib.contextmanager
def api_errors(action: str) -> Iterator[None]:
    """Turn errors of the API in the body into ours: `with api_errors("create the pod grpo-host0"): ...`.

    Raises:
        ConfigError: the API refused.
        InfrastructureError: the API cannot be reached.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = _said(error.body) or str(error.reason)
        hints = {
            401: "check the credentials of the kubeconfig",
            403: "give the service account the role in docs/running/hosts.md",
            404: "check --job kubernetes:namespace",
            409: "another run has this name: set --job kubernetes:name, or delete what is left of it with kubectl",
        }
        hint = hints.get(int(error.status or 0), "see the template and the options of --job kubernetes")
        raise ConfigError(f"Kubernetes refused to {action}: {message}", hint=hint) from error
    except HTTPError as error:
        raise InfrastructureError(
            f"Kubernetes did not answer when asked to {action}: {str(error)[:_MOST_WORDS]}",
            hint="check that the address in the kubeconfig can be reached",
        ) from error


def _said(body: object) -> str:
    """Return the message in the body of the API's refusal."""
    with contextlib.suppress(ValueError, TypeError):
        answer = json.loads(body if isinstance(body, str | bytes) else "null")
        if isinstance(answer, dict):
            return " ".join(str(answer.get("message", "")).split())[:_MOST_WORDS]
    return ""


def connect(kubeconfig: Path | None) -> tuple[ApiClient, bool]:
    """Return a client of the cluster's API, and whether this process is in the cluster.

    Args:
        kubeconfig: a file; None means the cluster that this process is in, else kubectl's own choice.

    Raises:
        ConfigError: the file or the cluster does not exist.
    """
    from kubernetes import client, config

    settings = client.Configuration()
    try:
        if kubeconfig is None:
            # Raises outside of a cluster, where no service account is mounted.
            with contextlib.suppress(config.ConfigException):
                config.load_incluster_config(client_configuration=settings)
                return client.ApiClient(settings), True
        place = str(kubeconfig.expanduser()) if kubeconfig is not None else None
        config.load_kube_config(config_file=place, client_configuration=settings)
    except (config.ConfigException, OSError, ValueError) as error:
        raise ConfigError(
            f"the Kubernetes configuration cannot be used: {str(error)[:_MOST_WORDS]}",
            hint="set --job kubernetes:kubeconfig to a file with which kubectl works",
        ) from error
    return client.ApiClient(settings), False


class Pods:
    """The pods of a run, by host.

        pods = Pods(api, namespace="default", run="grpo")
        pods.create(network_policy("grpo", "default"), [pod_a, pod_b])
        pods.delete()

    Its methods block; call them in threads.
    """

    def __init__(self, api: ApiClient, *, namespace: str, run: str) -> None:
        from kubernetes import client

        self._core = client.CoreV1Api(api)
        self._networking = client.NetworkingV1Api(api)
        self._namespace = namespace
        self._run = run
        self._selector = f"{RUN_LABEL}={run}"
        self.has_other_owner = False
        """Whether `create` found the policy of another run with this name, whose pods must not be deleted."""

    def own_pod(self) -> Manifest | None:
        """Return the pod of this process, if it runs in the cluster and may ask; None otherwise."""
        from kubernetes.client import ApiException

        with contextlib.suppress(ApiException):
            # By default, the host name in a pod is the pod's name.
            response = self._core.read_namespaced_pod(
                socket.gethostname(), self._namespace, _preload_content=False, _request_timeout=_CALL_S
            )
            pod: Manifest = json.loads(response.data)
            return pod
        return None

    def create(self, policy: Manifest, pods: Sequence[Manifest]) -> None:
        """Create the policy and then the pods. After an error, call `delete`, unless the run `has_other_owner`.

        Raises:
            ForgeError: the API refused, for instance because of an unknown field, or does not answer.
        """
        from kubernetes.client import ApiException

        with api_errors(f"create the network policy {policy['metadata']['name']}"):
            try:
                self._networking.create_namespaced_network_policy(
                    self._namespace, policy, field_validation="Strict", _request_timeout=_CALL_S
                )
            except ApiException as error:
                self.has_other_owner = error.status == 409
                raise
        for pod in pods:
            self.create_pod(pod)

    def create_pod(self, pod: Manifest) -> None:
        """Create one pod. After an error, call `delete_host`.

        Raises:
            ForgeError: as `create`.
        """
        with api_errors(f"create the pod {pod['metadata']['name']}"):
            self._core.create_namespaced_pod(self._namespace, pod, field_validation="Strict", _request_timeout=_CALL_S)

    def delete_host(self, host: str) -> None:
        """Delete the pod of one host, if it still exists.

        Raises:
            ForgeError: the API refused, or does not answer.
        """
        with api_errors(f"delete the pod of {host}"):
            self._delete_pods(f"{HOST_LABEL}={host}")

    def delete(self) -> None:
        """Delete the run's hosts and its policy, if they still exist.

        Raises:
            ForgeError: the API refused, or does not answer.
        """
        from kubernetes.client import ApiException

        with api_errors(f"delete the pods of {self._run}"):
            self._delete_pods(HOST_LABEL)
            try:
                self._networking.delete_namespaced_network_policy(self._run, self._namespace, _request_timeout=_CALL_S)
            except ApiException as error:
                if error.status != 404:
                    raise

    def _delete_pods(self, label: str) -> None:
        self._core.delete_collection_namespaced_pod(
            self._namespace,
            label_selector=f"{self._selector},{label}",
            grace_period_seconds=_DELETE_GRACE_S,
            _request_timeout=_CALL_S,
        )

    def exists(self) -> bool:
        """Return True if the run already has hosts.

        Raises:
            ForgeError: the API refused, or does not answer.
        """
        return bool(self._list()[0])

    def _list(self) -> tuple[dict[str, Manifest], str]:
        """Return the pods by host, and the version of this list."""
        with api_errors(f"list the pods of {self._run}"):
            response = self._core.list_namespaced_pod(
                self._namespace,
                label_selector=f"{self._selector},{HOST_LABEL}",
                _preload_content=False,
                _request_timeout=_CALL_S,
            )
        pod_list = json.loads(response.data)
        pods = {pod["metadata"]["labels"][HOST_LABEL]: pod for pod in pod_list["items"]}
        return pods, str(pod_list["metadata"]["resourceVersion"])

    def _changes(self, **query: Any) -> object:
        # No docstring, by which Watch would choose a model that has to fit every field of every version of the API.
        selector = f"{self._selector},{HOST_LABEL}"
        limit_s = _WATCH_S + _CALL_S
        return self._core.list_namespaced_pod(
            self._namespace, label_selector=selector, _request_timeout=limit_s, **query
        )

    def follow(self, tell: Callable[[str, PodState], None], trouble: Callable[[str], None]) -> Callable[[], None]:
        """Call `tell` in a thread with each host's state now and whenever it changes.

        Args:
            trouble: called with the problem if the API does not answer, or not as documented; it is then asked again.

        Returns:
            A function that stops it.
        """
        from kubernetes import watch

        stop_event = threading.Event()
        stream = watch.Watch()
        states: dict[str, PodState] = {}

        def note(host: str, state: PodState) -> None:
            if states.get(host) != state:
                states[host] = state
                tell(host, state)

        def once() -> None:
            # The watch continues from the list's version, so that no change falls between the two.
            pods, version = self._list()
            for host in states.keys() - pods.keys():
                note(host, PodState(phase="gone", reason="the pod does not exist any more"))
            for host, pod in pods.items():
                note(host, judge(pod))
            with api_errors(f"watch the pods of {self._run}"):
                for event in stream.stream(self._changes, resource_version=version, timeout_seconds=_WATCH_S):
                    if stop_event.is_set():
                        return
                    pod = event["raw_object"]
                    gone_state = PodState(phase="gone", reason="the pod was deleted")
                    note(
                        pod["metadata"]["labels"][HOST_LABEL], gone_state if event["type"] == "DELETED" else judge(pod)
                    )

        def run() -> None:
            while not stop_event.is_set():
                try:
                    once()
                except (
                    Exception
                ) as error:  # answers that are not as documented too: without this thread, no end is seen
                    if not stop_event.is_set():
                        trouble(error.message if isinstance(error, ForgeError) else repr(error)[:_MOST_WORDS])
                        # A pause that `end` cuts short.
                        stop_event.wait(_RETRY_S)

        def end() -> None:
            stop_event.set()
            stream.stop()

        threading.Thread(target=run, name=f"pods-{self._run}", daemon=True).start()
        return end


@contextlib.contextmanager
def deleted_with_this_process(kubeconfig: Path | None, *, namespace: str, run: str) -> Iterator[None]:
    """Delete the pods of a run if this process is killed while the body runs."""
    words = [namespace, run, *([str(kubeconfig)] if kubeconfig is not None else [])]
    guard = subprocess.Popen(
        [sys.executable, "-m", "forge_rl.jobs.pods", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C in the terminal must not end the guard.
        start_new_session=True,
    )
    try:
        yield
    finally:
        # A line ends the guard; if its stdin closes without one, it deletes the pods.
        guard.communicate(b"done\n")


def _guard(namespace: str, run: str, kubeconfig: str = "") -> None:
    """Delete the pods of a run if stdin closes before a line arrives, that is, if the parent was killed."""
    hide()  # it has the secrets that kubectl's configuration may need, and lives as long as the run
    if not sys.stdin.readline():
        api, _ = connect(Path(kubeconfig) if kubeconfig else None)
        Pods(api, namespace=namespace, run=run).delete()


if __name__ == "__main__":
    _guard(*sys.argv[1:])
