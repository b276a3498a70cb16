"""`--job kubernetes:image=...`: each host a pod of a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_rl.errors import ConfigError, ForgeError, InfrastructureError, check_flags, check_installed
from forge_rl.jobs.launched import listen_on, save_at_notice
from forge_rl.jobs.manifests import (
    HOST_LABEL,
    RANK_LABEL,
    RUN_LABEL,
    Manifest,
    PodSpec,
    network_policy,
    pod,
    quantity_bytes,
)
from forge_rl.jobs.pods import Pods, PodState, connect, deleted_with_this_process
from forge_rl.runtime.addresses import own_address, url
from forge_rl.runtime.children import quiet_stderr, set_defaults
from forge_rl.runtime.job_protocol import JobListener
from forge_rl.runtime.joining import host_log, join_command, last_line
from forge_rl.system.tasks import ended

if TYPE_CHECKING:
    from monarch.actor import HostMesh

_FLAG = "--job kubernetes:"
_NAME = re.compile(r"[a-z][a-z0-9]{0,39}")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_ATTACH_S = 60
_GONE_S = 30.0
"""Seconds to wait at the end for the pods to be gone, so that the next run may have the same name."""


@dataclass(frozen=True, kw_only=True)
class KubernetesHosts:
    """Hosts that are pods, created for the run and deleted with it, and joined by Monarch's KubernetesJob.

    KubernetesHosts(image="registry.example/forge-rl:1", hosts=4, gpus=8, memory="512Gi", shm="128Gi")
    """

    image: str
    """Image with this version of forge_rl, in which `python` finds it."""
    hosts: int = 1
    """Number of pods, named host0, host1 and so on."""
    name: str = "forgerl"
    """Name of the run, unique in the namespace: lower-case letters and digits."""
    namespace: str = "default"
    """Namespace of the pods."""
    gpus: int = 0
    """GPUs of each pod, as nvidia.com/gpu."""
    cpus: str = ""
    """CPUs of each pod, such as 16; no limit by default."""
    memory: str = ""
    """Memory of each pod, such as 256Gi, /dev/shm included; no limit by default."""
    shm: str = "16Gi"
    """Size of /dev/shm, which holds two versions of the weights, and what NCCL needs."""
    claim: str = ""
    """Persistent volume claim that all pods mount, for the run folder and models."""
    mount: str = "/shared"
    """Where the claim is mounted."""
    user: int = 1000
    """User and group id of the processes; not 0."""
    grace_s: int = 600
    """Seconds between the notice that a pod will be stopped and its end: longer than a checkpoint takes to save."""
    evicted: Literal["save", "lose"] = "save"
    """What a run does when the cluster announces that it will stop a pod, for instance to make room: save, and end, so
    that the same command continues it; or lose the host, and go on with the others."""
    wait_s: float = 3600.0
    """Seconds to wait until all pods are ready."""
    port: int = 26600
    """Port of the pods' address on which Monarch listens."""
    template: Path | None = None
    """YAML file with a pod template (metadata, spec) that the pods complete, for instance with node selectors."""
    kubeconfig: Path | None = None
    """kubectl's file; by default the cluster in which this process runs, else kubectl's own choice."""
    route: Literal["auto", "direct", "forward"] = "auto"
    """How this process reaches the pods: direct, by their addresses; forward, through kubectl port-forward to one of
    them; auto is direct within the cluster."""
    public: bool = False
    """Let the pods listen on public addresses. Monarch executes any code that reaches it."""
    most_replaced: int = 0
    """Number of further pods that the run may create in all, in the place of those that die; needs a claim with the run
    folder, and pods and controller that reach each other directly."""

    def __post_init__(self) -> None:
        minimums = {"hosts": 1, "gpus": 0, "user": 1, "grace_s": 1, "port": 1024, "most_replaced": 0}
        check_flags(self, _FLAG, minimum=minimums, above={"wait_s": 0})
        check_flags(self, _FLAG, maximum={"hosts": 4096, "port": 65535})
        for field, pattern, form in (
            ("name", _NAME, "at most 40 lower-case letters and digits, a letter first"),
            ("namespace", _NAMESPACE, "at most 63 lower-case letters, digits and inner hyphens"),
        ):
            if not pattern.fullmatch(value := str(getattr(self, field))):
                raise ConfigError(f"{_FLAG}{field} is {value!r}", hint=f"use {form}")
        if not self.image.strip():
            raise ConfigError(f"{_FLAG}image is empty", hint="name an image that contains forge_rl")
        if self.most_replaced and (not self.claim or self.route == "forward"):
            raise ConfigError(
                f"{_FLAG}most_replaced needs a claim, and pods that this process reaches directly",
                hint="a pod that joins a run finds it by the run folder: set claim, and leave out route=forward",
            )
        shm = quantity_bytes(self.shm, f"{_FLAG}shm")
        if self.memory and quantity_bytes(self.memory, f"{_FLAG}memory") <= shm:
            raise ConfigError(
                f"/dev/shm of {self.shm} leaves nothing of {self.memory}, as it counts as memory",
                hint=f"raise {_FLAG}memory, or lower {_FLAG}shm",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the hosts."""
        return tuple(f"host{number}" for number in range(self.hosts))

    def manifests(self) -> tuple[Manifest, tuple[Manifest, ...]]:
        """Return the network policy and the pods.

        Raises:
            ConfigError: the template is not a pod template.
        """
        public = ["--public"] if self.public else []
        spec = self._pods(["python", "-m", "forge_rl.jobs.worker", "$(POD_IP)", str(self.port), *public])
        pods = tuple(pod(spec, name, port=self.port, claim=self.claim, mount=self.mount) for name in self.names)
        return network_policy(self.name, self.namespace), pods

    def _pods(self, command: Sequence[str]) -> PodSpec:
        limits = {"cpu": self.cpus, "memory": self.memory, "nvidia.com/gpu": str(self.gpus or "")}
        return PodSpec(
            run=self.name,
            namespace=self.namespace,
            image=self.image,
            resources={name: limit for name, limit in limits.items() if limit},
            shm=self.shm,
            command=command,
            grace_s=self.grace_s,
            user=self.user,
            template=_template(self.template),
        )

    def describe(self, command: Sequence[str]) -> str:
        """Return the manifests as YAML, which `kubectl apply --dry-run=server -f -` can check."""
        import yaml  # type: ignore[import-untyped]

        policy, pods = self.manifests()
        return str(yaml.safe_dump_all([policy, *pods], sort_keys=False)).rstrip()

    @contextlib.asynccontextmanager
    async def open(self, listener: JobListener) -> AsyncIterator[Mapping[str, HostMesh]]:
        """Create the pods, wait until they serve, and delete them after the body, or if this process is killed.

        Raises:
            ConfigError: the cluster refused the pods, or this process may not reach them.
            InfrastructureError: the pods were not ready in time, or one ended; says why each waits.
        """
        check_installed("--job kubernetes", "kubernetes", "kubernetes")
        set_defaults()
        policy, manifests = self.manifests()
        api, is_inside = await asyncio.to_thread(connect, self.kubeconfig)
        if self.most_replaced and not self._is_direct(is_inside):
            raise ConfigError(
                f"{_FLAG}most_replaced is set, and this process reaches the pods only through kubectl",
                hint="start it in a pod, or set route=direct if pods reach this machine's address",
            )
        pods = Pods(api, namespace=self.namespace, run=self.name)
        # Pods are selected by the run's name: another run's would be followed and deleted like this one's.
        if await asyncio.to_thread(pods.exists):
            raise ConfigError(
                f"pods of a run {self.name!r} exist in the namespace {self.namespace!r}",
                hint=f"set {_FLAG}name to another name, or, if that run has ended, delete them: {self._deletion}",
            )
        if is_inside:
            self._adopt(await asyncio.to_thread(pods.own_pod), policy, *manifests)
        # The guard comes first: whatever is created from here on is deleted even if this process is killed.
        with deleted_with_this_process(self.kubeconfig, namespace=self.namespace, run=self.name):
            watched = _PodTracker(self.names, listener, saves=self.evicted == "save")
            unfollow = pods.follow(watched.tell, watched.trouble)
            create_task = asyncio.ensure_future(asyncio.to_thread(pods.create, policy, manifests))
            try:
                await asyncio.shield(create_task)
                addresses = await watched.ready(self.wait_s)
                yield await asyncio.to_thread(self._attach, addresses, is_inside)
            finally:
                watched.closing = True
                await ended(create_task)  # what it still creates must be deleted too
                try:
                    if not pods.has_other_owner:
                        await asyncio.to_thread(pods.delete)
                        await watched.gone(_GONE_S)
                except ForgeError as error:
                    error.add_note(f"pods may be left, which cost what they hold: {self._deletion}")
                    raise
                finally:
                    unfollow()

    async def replace(self, name: str, folder: Path, say: Callable[[str], None]) -> str:
        """Create a pod that joins a run, and wait until it ends; see `ReplacingJob`."""
        manifest = self._joining(name, folder)
        api, is_inside = await asyncio.to_thread(connect, self.kubeconfig)
        pods = Pods(api, namespace=self.namespace, run=self.name)
        if is_inside:
            self._adopt(await asyncio.to_thread(pods.own_pod), manifest)
        loop, states = asyncio.get_running_loop(), asyncio.Queue[PodState]()

        def tell(host: str, state: PodState) -> None:
            if host == name:
                loop.call_soon_threadsafe(states.put_nowait, state)

        def trouble(problem: str) -> None:
            loop.call_soon_threadsafe(say, problem)

        create_task = asyncio.ensure_future(asyncio.to_thread(pods.create_pod, manifest))
        unfollow = pods.follow(tell, trouble)
        try:
            await asyncio.shield(create_task)
            notice: PodState | None = None
            while (state := await states.get()).phase not in ("dead", "gone"):
                notice = state if state.phase == "ending" else None
                say(f"pod {self.name}-{name} {state.reason or 'runs'}")
            # The notice says why the pod ends, whereas its last state says only that it has.
            end = notice or state
            return "" if end.wished else f"{end.reason}{last_line(host_log(folder, name))}"
        finally:
            await asyncio.wait([create_task])
            unfollow()
            if create_task.exception() is None:
                with contextlib.suppress(ForgeError):  # the end of the run deletes what is left
                    await asyncio.to_thread(pods.delete_host, name)

    def _joining(self, name: str, folder: Path) -> Manifest:
        """Return the pod of a host that joins the run in a folder.

        Raises:
            ConfigError: the folder is not on the claim.
        """
        if not folder.resolve().is_relative_to(self.mount):
            raise ConfigError(
                f"the run folder {folder} is not below {self.mount}, where the pods mount the claim {self.claim}",
                hint=f"set --out to a folder below it, or {_FLAG}mount",
            )
        join_line = shlex.join(join_command(folder, name, python="python", public=self.public))
        # The pod's output goes to the run folder, where `replace` reads why it ended.
        output = shlex.quote(str(host_log(folder, name)))
        spec = self._pods(["sh", "-c", f"exec {join_line} >> {output} 2>&1"])
        return pod(spec, name, claim=self.claim, mount=self.mount)

    @property
    def _deletion(self) -> str:
        """The command that deletes the remains of a run with this name."""
        return f"kubectl -n {self.namespace} delete pod,networkpolicy -l {RUN_LABEL}={self.name}"

    def _is_direct(self, is_inside: bool) -> bool:
        return self.route == "direct" or (self.route == "auto" and is_inside)

    def _adopt(self, controller_pod: Manifest | None, *manifests: Manifest) -> None:
        """Make this process's pod the owner of the others, so that Kubernetes deletes them with it.

        Raises:
            ConfigError: the policy would keep this process's pod from the others.
        """
        if controller_pod is None:
            return
        if (controller_pod["metadata"].get("labels") or {}).get(RUN_LABEL) != self.name:
            raise ConfigError(
                f"the network policy would keep the controller's pod {controller_pod['metadata']['name']} from the "
                f"others, as it lacks the label {RUN_LABEL}={self.name}",
                hint=f"add the label to its manifest, or set {_FLAG}name to the label's value",
            )
        owner = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": controller_pod["metadata"]["name"],
            "uid": controller_pod["metadata"]["uid"],
        }
        for manifest in manifests:
            manifest["metadata"]["ownerReferences"] = [owner]

    def _attach(self, addresses: Mapping[str, str], is_inside: bool) -> dict[str, HostMesh]:
        """Join the pods, which are ready, as Monarch hosts.

        Raises:
            ConfigError: Monarch could not reach them.
        """
        import monarch.config
        from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION
        from monarch.job.kubernetes import KubeConfig, KubernetesJob

        class DirectKubeConfig(KubeConfig):
            """A kubeconfig of a cluster whose pods can be reached by their addresses."""

            # If True, Monarch forwards its port through kubectl.
            out_of_cluster = False

        class IPv6KubernetesJob(KubernetesJob):
            """A job whose pods may have IPv6 addresses."""

            def _wait_for_ready_pods(self, *args: Any, **kwargs: Any) -> list[Any]:
                pods = super()._wait_for_ready_pods(*args, **kwargs)
                # Monarch appends the port after a colon, which an IPv6 address needs brackets for.
                return [replace(pod, ip=f"[{pod.ip}]" if ":" in pod.ip else pod.ip) for pod in pods]

        is_direct = self._is_direct(is_inside)
        kubeconfig = None
        # Without a kubeconfig, Monarch uses the cluster that this process is in.
        if not (is_inside and is_direct):
            path = str((self.kubeconfig or Path(KUBE_CONFIG_DEFAULT_LOCATION)).expanduser())
            kubeconfig = (DirectKubeConfig if is_direct else KubeConfig).from_path(path)
        job = IPv6KubernetesJob(self.namespace, timeout=_ATTACH_S, kubeconfig=kubeconfig)
        if is_direct:
            controller_ip = own_address(list(addresses.values()), may_be_public=self.public)
            listen_on(controller_ip)
            monarch.config.configure(default_transport=url(controller_ip, 0))  # KubernetesJob has set another one
        for name in self.names:
            selector = f"{RUN_LABEL}={self.name},{HOST_LABEL}={name}"
            job.add_mesh(name, 1, label_selector=selector, pod_rank_label=RANK_LABEL, port=self.port)
        try:
            with quiet_stderr():  # Monarch's jobs log what they do
                state = job.state(cached_path=None)
        except RuntimeError as error:
            raise ConfigError(
                f"Monarch could not join the pods: {str(error)[:300]}",
                hint=f"see {_FLAG}route; to forward, kubectl must be installed",
            ) from error
        return {name: getattr(state, name) for name in self.names}


_ENDED = ("ending", "dead", "gone")


class _PodTracker:
    """Tracks the states of a run's pods, and reports changes to the listener."""

    def __init__(self, names: Sequence[str], listener: JobListener, *, saves: bool) -> None:
        self.closing = False
        """True while the pods are being deleted: their ends are not reported."""
        self._states: dict[str, PodState] = {name: PodState(phase="waiting", reason="Pending") for name in names}
        self._listener = listener
        self._saves = saves
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._seen = set[str]()
        self._said = ""
        self._was_ready = False

    def tell(self, host: str, state: PodState) -> None:
        """Record a host's new state; can be called in any thread."""
        self._loop.call_soon_threadsafe(self._note, host, state)

    def trouble(self, problem: str) -> None:
        """Report a problem with the API; can be called in any thread."""
        self._loop.call_soon_threadsafe(self._say, problem)

    async def ready(self, wait_s: float) -> dict[str, str]:
        """Wait until all pods are ready; return their addresses by host.

        Raises:
            InfrastructureError: one ended, or the time is over.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    self._changed.clear()
                    if dead := {host: state for host, state in self._states.items() if state.phase in _ENDED}:
                        raise InfrastructureError(
                            f"pods ended before the run began: {_reasons(dead)}",
                            hint="see kubectl logs and kubectl describe pod",
                        )
                    if all(state.phase == "ready" for state in self._states.values()):
                        break
                    await self._changed.wait()
        except TimeoutError:
            raise InfrastructureError(
                f"the pods were not ready in {wait_s:g} s: {self._waiting()}",
                hint=f"see kubectl describe pod; set {_FLAG}wait_s to wait longer",
            ) from None
        self._was_ready = True
        return {host: state.address for host, state in self._states.items()}

    async def gone(self, wait_s: float) -> None:
        """Wait until none of the pods exists, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while any(self._states[host].phase != "gone" for host in self._seen):
                    self._changed.clear()
                    await self._changed.wait()

    def _note(self, host: str, state: PodState) -> None:
        old_state = self._states.get(host)
        # A pod that was created in the place of another; `replace` follows it itself.
        if old_state is None:
            return
        self._states[host] = state
        self._seen.add(host)
        self._changed.set()
        if self.closing:
            return
        if not self._was_ready:
            self._say(self._waiting())
        elif state.phase == "ending" and self._saves:
            save_at_notice(self._listener, host, state.reason)
        elif state.phase in _ENDED and (old_state.phase not in _ENDED or (old_state.phase == "ending" and self._saves)):
            # A notice at which the run saves is not yet a loss; the pod's end after it is.
            self._listener.on_lost(host, old_state.reason if old_state.phase == "ending" else state.reason)

    def _waiting(self) -> str:
        ready = sum(state.phase == "ready" for state in self._states.values())
        waiting_pods = {host: state for host, state in self._states.items() if state.phase != "ready"}
        return f"{ready} of {len(self._states)} pods are ready" + (
            f"; {_reasons(waiting_pods)}" if waiting_pods else ""
        )

    def _say(self, text: str) -> None:
        if text != self._said and not self.closing:
            self._said = text
            self._listener.say(text)


def _reasons(states: Mapping[str, PodState]) -> str:
    """Describe the hosts in each state, as "host0, host1: Pending"."""
    hosts: dict[str, list[str]] = {}
    for host, state in states.items():
        hosts.setdefault(state.reason, []).append(host)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in hosts.items())


def _template(path: Path | None) -> Mapping[str, Any]:
    """Read a pod template.

    Raises:
        ConfigError: the file does not hold one.
    """
    if path is None:
        return {}
    import yaml

    try:
        template = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{_FLAG}template: {str(error)[:300]}", hint="name a YAML file") from error
    if not isinstance(template, dict) or not {"metadata", "spec"} >= template.keys():
        raise ConfigError(
            f"{_FLAG}template: {path} is not a pod template", hint="write the keys metadata and spec of a pod"
        )
    return template
