"""Images made for tests, and a small registry over loopback that can be told to misbehave."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """An entry of a layer; `fields` are of TarInfo."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, **{"type": tarfile.DIRTYPE, "mode": 0o755, **fields})


def link(name: str, target: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, linkname=target, **{"type": tarfile.SYMTYPE, **fields})


def layer(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    """An uncompressed layer."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Made:
    """An image as blobs."""

    blobs: dict[str, bytes]
    manifest: str
    config: str
    layers: list[str]
    diff_ids: list[str]


def image(
    layers: Sequence[bytes],
    settings: Mapping[str, object] | None = None,
    compress: Any = lambda data: gzip.compress(data, 1, mtime=0),
    diff_ids: Sequence[str] | None = None,
) -> Made:
    """An image of uncompressed layers."""
    stored = [compress(data) for data in layers]
    diff_ids = list(diff_ids or map(digest_of, layers))
    config = json.dumps({"config": dict(settings or {}), "rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": {"digest": digest_of(config), "size": len(config)},
            "layers": [{"digest": digest_of(data), "size": len(data)} for data in stored],
        }
    ).encode()
    blobs = {digest_of(data): data for data in (*stored, config, manifest)}
    return Made(blobs, digest_of(manifest), digest_of(config), [digest_of(data) for data in stored], diff_ids)


def write_layout(path: Path, made: Made, tags: Sequence[str] = ("latest",)) -> None:
    """Write an OCI layout."""
    (path / "blobs/sha256").mkdir(parents=True)
    for digest, data in made.blobs.items():
        (path / "blobs/sha256" / digest.removeprefix("sha256:")).write_bytes(data)
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    entries = [
        {
            "mediaType": OCI_MANIFEST,
            "digest": made.manifest,
            "size": len(made.blobs[made.manifest]),
            "annotations": {"org.opencontainers.image.ref.name": tag},
        }
        for tag in tags
    ]
    (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))


def write_docker_archive(path: Path, layers: Sequence[bytes], tag: str = "it:latest") -> None:
    """Write what `docker save` wrote for years: equal layers are links."""
    made = image(layers, {"Cmd": ["sh"]}, compress=lambda data: data)
    names: dict[str, str] = {}
    entries = [member(f"{made.config[7:]}.json", made.blobs[made.config])]
    for index, diff_id in enumerate(made.diff_ids):
        name = f"{index:064x}/layer.tar"
        if diff_id in names:
            entries.append(link(name, f"../{names[diff_id]}"))
        else:
            entries.append(member(name, made.blobs[diff_id]))
        names[diff_id] = names.get(diff_id, name)
    paths = [f"{index:064x}/layer.tar" for index in range(len(layers))]
    manifest = [{"Config": f"{made.config[7:]}.json", "RepoTags": [tag], "Layers": paths}]
    entries.append(member("manifest.json", json.dumps(manifest).encode()))
    path.write_bytes(layer(*entries))


@dataclass
class Registry:
    """A registry's content, and how it misbehaves."""

    address: str = ""
    blobs: dict[str, bytes | Path] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    """Digest by "repository:tag"."""
    password: str = ""
    """Of the user "me"; "" for none."""
    breaks: dict[str, int] = field(default_factory=dict)
    """Blobs whose connection ends after so many bytes, once each time."""
    lies: dict[str, bytes] = field(default_factory=dict)
    """Blobs that are sent as others, once."""
    refusals: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    ranges: bool = True
    requests: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    dribble_s: float = 0.0
    """How long a blob takes, sent in eight parts."""
    held: set[str] = field(default_factory=set)
    """Blobs that wait for `go_on`."""
    go_on: threading.Event = field(default_factory=threading.Event)

    @property
    def host(self) -> str:
        return self.address.removeprefix("http://")

    def add(self, made: Made, name: str) -> str:
        """Put an image here, and return its reference."""
        self.blobs |= made.blobs
        self.tags[name] = made.manifest
        return f"{self.host}/{name}"


@contextmanager
def registry(**settings: Any) -> Iterator[Registry]:
    """Serve a registry for a block of code."""
    content = Registry(**settings)

    class Handler(_Handler):
        registry = content

    server = _Server(("127.0.0.1", 0), Handler)
    content.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield content
    finally:
        content.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that was killed."""


class _Handler(BaseHTTPRequestHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"
    wbufsize = 0
    disable_nagle_algorithm = True  # else a client waits 40 ms for the body of an answer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        own, path = self.registry, self.path.partition("?")[0]
        own.requests[path] += 1
        if path == "/token":
            self._token()
            return
        if own.refusals:
            self._answer(own.refusals.pop(0), b"", {"retry-after": "0"})
            return
        if own.password and self.headers.get("authorization") != f"Bearer token-of-{own.password}":
            challenge = f'Bearer realm="{own.address}/token",service="here",scope="repository:x:pull"'
            self._answer(401, b"", {"www-authenticate": challenge})
            return
        if path == "/v2/":
            self._answer(200, b"{}")
            return
        _, _, rest = path.partition("/v2/")
        if "/manifests/" in rest:
            repository, _, wanted = rest.partition("/manifests/")
            digest = wanted if wanted.startswith("sha256:") else own.tags.get(f"{repository}:{wanted}", "")
            data = own.blobs.get(digest)
            kind = json.loads(data).get("mediaType", OCI_MANIFEST) if isinstance(data, bytes) else ""
            body = data if isinstance(data, bytes) else b""
            self._answer(200 if body else 404, body, {"content-type": kind})
        else:
            self._blob(rest.partition("/blobs/")[2])

    def _token(self) -> None:
        given = base64.b64decode(self.headers.get("authorization", "").removeprefix("Basic ")).decode()
        right = given == f"me:{self.registry.password}"
        self._answer(200 if right else 401, json.dumps({"token": f"token-of-{self.registry.password}"}).encode())

    def _blob(self, digest: str) -> None:
        own = self.registry
        data = own.lies.pop(digest, None) or own.blobs.get(digest)
        if data is None:
            self._answer(404, b"")
            return
        start, status, headers = 0, 200, {}
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        if own.ranges and (wanted := self.headers.get("range")):
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            status, headers = 206, {"content-range": f"bytes {start}-{size - 1}/{size}"}
        self._head(status, size - start, headers)
        end = start + own.breaks.pop(digest) if digest in own.breaks else size
        own.bytes_sent += min(end, size) - start
        if isinstance(data, bytes):
            if digest in own.held:
                own.go_on.wait()
            part = max(1, -(-(end - start) // 8)) if own.dribble_s else max(1, end - start)
            for place in range(start, end, part):
                time.sleep(own.dribble_s / 8)
                self.wfile.write(data[place : min(end, place + part)])
        else:
            with data.open("rb") as file:
                self.connection.sendfile(file, start)
        if end < size:
            self.close_connection = True

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._head(status, len(data), headers or {})
        self.wfile.write(data)

    def _head(self, status: int, size: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("content-length", str(size))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
