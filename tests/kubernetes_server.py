"""A stand-in for a Kubernetes API server: pods are processes of this machine, each with an address of 127.0.0.0/8.

It knows the few requests of `forge_rl.jobs.pods` and of Monarch's KubernetesJob. It schedules onto one node
with room for so many pods; checks fields by the models of the official client, as a real server does by its schema;
and enforces no network policy, no limits, no security context, and no volumes but /dev/shm (as root).
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

from forge_rl.jobs.manifests import quantity_bytes

_ROOT = Path(__file__).parent.parent
_CONTAINER = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
_POLICY_GROUP = "/apis/networking.k8s.io/v1"


def unknown_fields(manifest: dict[str, Any], model: str) -> list[str]:
    """Paths of fields that the model does not have; raises ValueError for values that it refuses."""
    api = client.ApiClient()
    known = api.sanitize_for_serialization(api._ApiClient__deserialize(manifest, model))

    def compare(given: Any, read: Any, path: str) -> Iterator[str]:
        if isinstance(given, dict):
            for key, value in given.items():
                if not isinstance(read, dict) or key not in read:
                    yield f"{path}.{key}"
                else:
                    yield from compare(value, read[key], f"{path}.{key}")
        elif isinstance(given, list):
            for index, value in enumerate(given):
                yield from compare(value, read[index], f"{path}[{index}]")
        elif given != read:
            yield f"{path} ({given!r})"

    return list(compare(manifest, known, model))


@dataclass
class Pod:
    """A pod, and its process once it is scheduled."""

    manifest: dict[str, Any]
    number: int
    folder: str = ""
    process: subprocess.Popen[bytes] | None = None

    @property
    def status(self) -> dict[str, Any]:
        return self.manifest["status"]


@dataclass
class ApiServer:
    """Pods and policies by name, and all that happened, as watches tell it."""

    room: int = 8
    """Pods that the node has room for."""
    broken_images: tuple[str, ...] = ()
    pods: dict[str, Pod] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    started: int = 0

    def note(self, kind: str, pod: Pod) -> None:
        with self.changed:
            pod.manifest["metadata"]["resourceVersion"] = str(len(self.events) + 1)
            self.events.append({"type": kind, "object": json.loads(json.dumps(pod.manifest))})
            self.changed.notify_all()

    def create(self, manifest: dict[str, Any]) -> None:
        self.started += 1
        manifest["metadata"]["uid"] = f"uid-{self.started}"
        manifest["status"] = {"phase": "Pending", "conditions": []}
        pod = self.pods[manifest["metadata"]["name"]] = Pod(manifest, self.started)
        self.note("ADDED", pod)
        image = manifest["spec"]["containers"][0]["image"]
        if sum(each.process is not None for each in self.pods.values()) >= self.room:
            message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
            pod.status["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            ]
        elif image in self.broken_images:
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
            pod.status["containerStatuses"] = [{**_CONTAINER, "state": {"waiting": waiting}}]
        else:
            self.run(pod)
        self.note("MODIFIED", pod)

    def run(self, pod: Pod) -> None:
        container = pod.manifest["spec"]["containers"][0]
        address = f"127.0.1.{pod.number}"
        pod.folder = tempfile.mkdtemp(prefix="pod-")
        env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        for each in container.get("env", ()):
            env[each["name"]] = address if "valueFrom" in each else each["value"]
        env |= {"HOME": pod.folder, "TMPDIR": pod.folder}  # a real pod has a /tmp of its own
        words = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in container["command"]]
        if os.geteuid() == 0:  # in a mount namespace of its own, /dev/shm has the size of the pod's volume
            size = quantity_bytes(pod.manifest["spec"]["volumes"][0]["emptyDir"]["sizeLimit"], "")
            mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
            words = ["unshare", "--mount", "sh", "-c", f"{mount} && exec {shlex.join(words)}"]
        with open(f"{pod.folder}/log", "wb") as log:
            pod.process = subprocess.Popen(words, env=env, cwd=_ROOT, stdout=log, stderr=log, start_new_session=True)
        pod.status.update({"phase": "Running", "podIP": address})
        if "startupProbe" in container:
            port = container["startupProbe"]["tcpSocket"]["port"]
            threading.Thread(target=self.probe, args=(pod, address, port), daemon=True).start()
        else:
            pod.status["conditions"] = [{"type": "Ready", "status": "True"}]
        threading.Thread(target=self.wait, args=(pod,), daemon=True).start()

    def probe(self, pod: Pod, address: str, port: int) -> None:
        while pod.process is not None and pod.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
                pod.status["conditions"] = [{"type": "Ready", "status": "True"}]
                self.note("MODIFIED", pod)
                return
            time.sleep(0.1)

    def wait(self, pod: Pod) -> None:
        assert pod.process is not None
        code = pod.process.wait()
        status = 128 - code if code < 0 else code
        ended = {"exitCode": status, "reason": "OOMKilled" if code == -9 else "Error"}
        pod.status["phase"] = "Failed"
        pod.status["conditions"] = [{"type": "Ready", "status": "False"}]
        pod.status["containerStatuses"] = [{**_CONTAINER, "state": {"terminated": ended}}]
        if not pod.manifest["metadata"].get("deletionTimestamp"):
            self.note("MODIFIED", pod)

    def delete(self, name: str, grace_s: float, *, cause: str = "") -> None:
        """Delete a pod as a kubelet does: a notice, SIGTERM, and SIGKILL once the grace is over."""
        pod = self.pods[name]
        pod.manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        if cause:
            pod.status["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": cause})
        self.note("MODIFIED", pod)
        threading.Thread(target=self.end, args=(name, grace_s), daemon=True).start()

    def end(self, name: str, grace_s: float) -> None:
        pod = self.pods[name]
        if pod.process is not None:
            pod.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.process.wait(grace_s)
            pod.process.kill()
            pod.process.wait()
            shutil.rmtree(pod.folder, ignore_errors=True)
        if self.pods.pop(name, None) is not None:
            self.note("DELETED", pod)

    def kill(self, name: str) -> None:
        """Kill a pod's process, as the kernel does when memory is short."""
        process = self.pods[name].process
        assert process is not None
        process.send_signal(signal.SIGKILL)


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: ApiServer

    def log_message(self, *_: object) -> None:
        pass

    def send(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, code: int, message: str) -> None:
        self.send(code, {"kind": "Status", "status": "Failure", "code": code, "message": message})

    def body(self) -> dict[str, Any]:
        found = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        assert isinstance(found, dict)
        return found

    def parts(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        self.cluster.requests.append(f"{self.command} {url.path}")
        return url.path, {key: values[0] for key, values in parse_qs(url.query).items()}

    def do_POST(self) -> None:
        path, query = self.parts()
        body = self.body()
        model, known = (
            ("V1Pod", self.cluster.pods) if path.endswith("/pods") else ("V1NetworkPolicy", self.cluster.policies)
        )
        if query.get("fieldValidation") == "Strict" and (unknown := unknown_fields(body, model)):
            return self.refuse(400, f"strict decoding error: unknown field {', '.join(unknown)}")
        if body["metadata"]["name"] in known:
            return self.refuse(409, f"{path.rpartition('/')[2]} {body['metadata']['name']!r} already exists")
        self.send(201, body)
        if model == "V1Pod":
            return self.cluster.create(body)
        self.cluster.policies[body["metadata"]["name"]] = body
        return None

    def do_DELETE(self) -> None:
        path, query = self.parts()
        self.body()
        if path.startswith(_POLICY_GROUP):
            with self.cluster.changed:
                found = self.cluster.policies.pop(path.rpartition("/")[2], None)
                self.cluster.changed.notify_all()
            return self.send(200, {}) if found else self.refuse(404, "not found")
        for name in self.selected(query.get("labelSelector", "")):
            self.cluster.delete(name, float(query.get("gracePeriodSeconds", "30")))
        return self.send(200, {})

    def selected(self, selector: str) -> list[str]:
        return [name for name, pod in list(self.cluster.pods.items()) if _matches(pod.manifest, selector)]

    def do_GET(self) -> None:
        path, query = self.parts()
        selector = query.get("labelSelector", "")
        if query.get("watch") != "true" and not path.endswith("/pods"):
            return self.refuse(404, "not found")
        with self.cluster.changed:
            version = len(self.cluster.events)
            items = [self.cluster.pods[name].manifest for name in self.selected(selector)]
            listed = json.loads(json.dumps(items))
        if query.get("watch") != "true":
            metadata = {"resourceVersion": str(version)}
            return self.send(200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": listed})
        return self.watch(query, selector, version, listed)

    def watch(self, query: dict[str, str], selector: str, version: int, listed: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")  # without it the client waits for more
        self.end_headers()
        if "resourceVersion" not in query:
            for item in listed:
                self.tell({"type": "ADDED", "object": item})
        position = int(query.get("resourceVersion", version))
        until = time.monotonic() + float(query.get("timeoutSeconds", "600"))
        with contextlib.suppress(OSError):
            while (left := until - time.monotonic()) > 0:
                with self.cluster.changed:
                    if len(self.cluster.events) == position:
                        self.cluster.changed.wait(min(left, 1))
                    fresh = self.cluster.events[position:]
                for event in fresh:
                    if _matches(event["object"], selector):
                        self.tell(event)
                position += len(fresh)
            self.wfile.write(b"0\r\n\r\n")

    def tell(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()


def _matches(manifest: dict[str, Any], selector: str) -> bool:
    labels = manifest["metadata"].get("labels", {})
    wanted = [each.partition("=") for each in selector.split(",") if each]
    return all(labels.get(key) == value if equals else key in labels for key, equals, value in wanted)


@contextlib.contextmanager
def serving(cluster: ApiServer, folder: Path) -> Iterator[Path]:
    """Serve a cluster; yields a kubeconfig for it. All of its pods end with the body."""
    handler = type("Handler", (_Requests,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kubeconfig = folder / "kubeconfig"
    settings = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    kubeconfig.write_text(json.dumps(settings))  # JSON is YAML
    try:
        yield kubeconfig
    finally:
        for name in list(cluster.pods):
            with contextlib.suppress(KeyError):  # it ends by itself
                cluster.end(name, 0)
        server.shutdown()
        server.server_close()
        thread.join()
