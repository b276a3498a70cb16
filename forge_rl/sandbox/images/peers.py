"""Passes layers between the hosts of a job, so that each image crosses the network to a registry once.

A peer sends a layer as the uncompressed archive that it was unpacked from, whose digest the image names: what a peer
sends is trusted no more than what a registry does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from forge_rl.sandbox.images.layer_headers import archive_parts, has_archive
from forge_rl.sandbox.images.sources import BlobPlace, LayerBlob, LayerJob
from forge_rl.sandbox.images.unpack import FILES

_PATH = re.compile(r"/layers/([0-9a-f]{64})")
_SENDERS = 8
"""Layers sent at a time; further requests are refused, to be made again later or elsewhere."""
_IDLE_S = 30.0
_MIN_BYTES_S = 1 << 20
"""Slower peers are left for another."""


@dataclass(frozen=True, kw_only=True)
class LayerPeers:
    """Other hosts that may have layers.

    Peers(addresses=["http://node-2:8700", "http://node-3:8700"], key=key)
    """

    addresses: Sequence[str]
    key: str = field(repr=False)
    """Shared by all of them."""

    @functools.cached_property
    def _client(self) -> httpx.Client:
        """Connections, never through a proxy that variables name: it would learn the key."""
        return httpx.Client(timeout=httpx.Timeout(_IDLE_S, connect=3.0), trust_env=False)

    def fetch(self, layer: LayerBlob, job: LayerJob, max_bytes: int) -> BlobPlace | None:
        """Return a layer's bytes from the first peer that has them; None if none has, or it sends others.

        Args:
            max_bytes: largest uncompressed layer to accept.
        """
        digest = layer.diff_id.removeprefix("sha256:")
        # Each layer has an order of its own, so that hosts share the work.
        for address in sorted(self.addresses, key=lambda peer: hashlib.sha256((digest + peer).encode()).digest()):
            size = 0
            with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
                size = self._receive(f"{address.rstrip('/')}/layers/{digest}", digest, job, max_bytes)
            if size:
                return BlobPlace(job.partial_fd, 0, size)
            os.ftruncate(job.partial_fd, 0)
        return None

    def _receive(self, url: str, digest: str, job: LayerJob, max_bytes: int) -> int:
        """Write a layer into the job's file; return its size, 0 if the peer lacks it, is slow or sent other bytes."""
        headers = {"authorization": f"Bearer {self.key}", "accept-encoding": "identity"}
        received, size, began_s = hashlib.sha256(), 0, time.monotonic()
        with self._client.stream("GET", url, headers=headers) as response:
            if response.status_code != 200:
                return 0
            for part in response.iter_raw():
                job.check_wanted()
                # A peer saves time or is of no use: the registry has the same layer.
                is_slow = time.monotonic() - began_s > _IDLE_S + size / _MIN_BYTES_S
                if is_slow or size + len(part) > max_bytes:
                    return 0
                received.update(part)
                size += os.pwrite(job.partial_fd, part, size)
        return size if received.hexdigest() == digest else 0


@contextlib.contextmanager
def serve_layers(
    folder: Path, hold: Callable[[str], contextlib.AbstractContextManager[bool]], address: tuple[str, int], key: str
) -> Iterator[int]:
    """Serve the layers of a folder to peers for a block of code; yields the port.

    Args:
        folder: folder of layers, named by their digest's digits.
        hold: keeps a layer, by its digest, from being evicted; its context is False if the layer is not there.
        address: host and port to listen at; port 0 for any.
        key: secret that peers must send.
    """

    class BoundLayerHandler(_LayerHandler):
        layers = _SharedLayers(folder, hold, key)

    server = _LayerServer(address, BoundLayerHandler)
    thread = threading.Thread(target=server.serve_forever, name="image-peers", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True, repr=False)
class _SharedLayers:
    folder: Path
    hold: Callable[[str], contextlib.AbstractContextManager[bool]]
    key: str
    senders: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_SENDERS))


class _LayerServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print no traceback for a peer that went away."""


class _LayerHandler(BaseHTTPRequestHandler):
    layers: _SharedLayers
    timeout = _IDLE_S

    def log_message(self, format: str, *_: object) -> None:
        """Log nothing: requests are not the user's."""

    def do_GET(self) -> None:
        """Send a layer."""
        match = _PATH.fullmatch(self.path)
        authorization = self.headers.get("authorization", "").encode()
        # Checked before the path, so that nobody without the key learns which layers are here; in constant time, so
        # that nobody finds out the key.
        if not hmac.compare_digest(authorization, f"Bearer {self.layers.key}".encode()):
            self.send_error(401)
        elif match is None or not has_archive(str(self.layers.folder / match[1])):
            self.send_error(404)
        elif not self.layers.senders.acquire(blocking=False):
            self.send_error(503)
        else:
            try:
                self._send(match[1])
            except OSError:
                self.close_connection = True  # the peer is gone, or sees that the layer is cut off
            finally:
                self.layers.senders.release()

    def _send(self, digest: str) -> None:
        with self.layers.hold(f"sha256:{digest}") as is_there:
            if not is_there:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            for part in archive_parts(str(self.layers.folder / digest), FILES):
                self.wfile.write(part)
