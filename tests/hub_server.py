"""A stand-in for the Hugging Face hub's HTTP API, as far as models are downloaded from and uploaded to it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
"""Revisions of each repository, and their commits."""


@dataclass
class Hub:
    """What the hub has and saw."""

    repos: dict[str, Path]
    """Folders of the repositories, by name."""
    token: str = ""
    """Token without which all repositories are gated."""
    status: int = 0
    """Status with which all requests are refused; 0 for none."""
    breaks_after: int | None = None
    """Bytes of the largest file after which the next transfer of it breaks off, once."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Uploaded files, by name."""
    url: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve the hub at `hub.url` while the body runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            _get(self, hub)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            _post(self, hub)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _answer(handler: BaseHTTPRequestHandler, status: int, body: object = None, **headers: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(content))} | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


def _get(handler: BaseHTTPRequestHandler, hub: Hub) -> None:
    path = handler.path.partition("?")[0]
    hub.requests.append(f"{handler.command} {path} {handler.headers.get('Range', '')}".strip())
    if hub.status:
        _answer(handler, hub.status, {"error": "not with this token"})
    elif hub.token and handler.headers.get("Authorization") != f"Bearer {hub.token}":
        _answer(handler, 403, {}, X_Error_Code="GatedRepo", X_Error_Message="ask for access")
    elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/(.+)|/tree/(\w+))?", path):
        folder, commit = hub.repos.get(match[1]), _commit(match[3] or match[4] or "main")
        if folder is None:
            _answer(handler, 404, {}, X_Error_Code="RepoNotFound")
        elif not commit:
            _answer(handler, 404, {}, X_Error_Code="RevisionNotFound")
        elif match[4]:
            _answer(
                handler,
                200,
                [
                    {"type": "file", "oid": _tag(path), "size": path.stat().st_size, "path": name}
                    for name, path in _files(folder).items()
                ],
            )
        else:
            _answer(
                handler, 200, {"id": match[1], "sha": commit, "siblings": [{"rfilename": n} for n in _files(folder)]}
            )
    elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", path):
        _send(handler, hub, hub.repos[match[1]] / match[3], commit=match[2])
    else:
        _answer(handler, 404, {})


def _send(handler: BaseHTTPRequestHandler, hub: Hub, path: Path, commit: str) -> None:
    content, first = path.read_bytes(), 0
    headers = {"ETag": f'"{_tag(path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
    if match := re.match(r"bytes=(\d+)-", handler.headers.get("Range", "")):
        first = int(match[1])
        headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
    if handler.command == "GET" and hub.breaks_after is not None and len(content) > hub.breaks_after:
        handler.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content[: hub.breaks_after])
        handler.wfile.flush()
        hub.breaks_after = None
        handler.close_connection = True
        return
    _answer(handler, 206 if first else 200, content[first:], **{key.replace("-", "_"): v for key, v in headers.items()})


def _post(handler: BaseHTTPRequestHandler, hub: Hub) -> None:
    body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    hub.requests.append(f"POST {handler.path}")
    if hub.status:
        _answer(handler, hub.status, {"error": "not with this token"})
    elif hub.token and handler.headers.get("Authorization") != f"Bearer {hub.token}":
        _answer(handler, 401, {"error": "Invalid credentials"})
    elif handler.path == "/api/repos/create":
        name = json.loads(body)["name"]
        _answer(handler, 200, {"url": f"{hub.url}/me/{name}", "name": name})
    elif "/preupload/" in handler.path:
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
        ]
        _answer(handler, 200, {"files": files})
    elif "/commit/" in handler.path:
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                hub.uploads[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        _answer(handler, 200, {"commitUrl": f"{hub.url}/me/model/commit/1", "commitOid": "c" * 40, "success": True})
    else:
        _answer(handler, 200, {"errors": [], "warnings": []})


def _commit(revision: str) -> str:
    return COMMITS.get(revision) or (revision if revision in COMMITS.values() else "")


def _files(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


def _tag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
