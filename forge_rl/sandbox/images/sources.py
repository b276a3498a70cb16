"""The parts of an image, wherever it comes from: its manifest, its configuration, and the places of its layers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_rl.sandbox.images.image import MAX_LAYERS, ImageError, check_digest

MAX_MANIFEST, MAX_CONFIG = 4 << 20, 8 << 20
"""Bytes."""
_MAX_DEPTH = 64
INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_MACHINES = {"x86_64": ("amd64", ""), "aarch64": ("arm64", "v8"), "armv7l": ("arm", "v7"), "i686": ("386", "")}


@dataclass(frozen=True, kw_only=True)
class LayerBlob:
    """A layer in a registry, an archive or a folder."""

    diff_id: str
    """Digest of its uncompressed bytes, which names the layer here."""
    digest: str
    """Digest of its stored bytes; "" where nothing names them."""
    size: int
    """Number of stored bytes."""


@dataclass(frozen=True, kw_only=True)
class ImageContent:
    """The content of an image: its configuration and layers."""

    digest: str
    config: Mapping[str, object]
    layers: Sequence[LayerBlob]


@dataclass(frozen=True)
class BlobPlace:
    """The place of a layer's bytes in an open file."""

    fd: int
    start: int
    size: int


class LayerJob(Protocol):
    """The work on a layer, as a source sees it."""

    @property
    def partial_fd(self) -> int:
        """An open file with the bytes fetched so far; it outlives this process."""

    def check_wanted(self) -> None:
        """Raise ImageError if nobody waits for the layer any more."""

    def wait(self, seconds: float) -> None:
        """Wait before another try, as long as somebody waits for the layer."""

    def tell(self, done_bytes: int) -> None:
        """Report how many bytes are there."""


class ImageSource(Protocol):
    """An image somewhere: in a registry, a folder or an archive."""

    def content(self) -> ImageContent:
        """Look up the image's content.

        Raises:
            ImageError: it does not exist, or cannot be read.
        """

    def fetch(self, layer: LayerBlob, job: LayerJob) -> BlobPlace:
        """Return a layer's bytes, checked against its digest; the file is open as long as the source lives.

        Raises:
            ImageError: they cannot be fetched, or have another digest.
        """


def content_of(manifest: Mapping[str, object], digest: str, read_config: Callable[[str, int], bytes]) -> ImageContent:
    """Read a manifest for one platform, and its configuration.

    Args:
        digest: digest of the manifest.
        read_config: returns the checked blob of a digest and size.

    Raises:
        ImageError: it does not follow the specification.
    """
    config_blob = _object(manifest.get("config"), f"the config of the manifest {digest}")
    config_digest = check_digest(config_blob.get("digest"), "the configuration")
    config = json_object(read_config(config_digest, _size(config_blob, MAX_CONFIG)), f"configuration {config_digest}")
    layers = [_object(layer, "a layer") for layer in _list(manifest.get("layers"), "layers")]
    diff_ids = diff_ids_of(config)
    if len(layers) != len(diff_ids):
        raise ImageError(f"the manifest {digest} has {len(layers)} layers, its configuration {len(diff_ids)}")
    return ImageContent(
        digest=digest,
        config=config,
        layers=[
            LayerBlob(diff_id=diff_id, digest=check_digest(layer.get("digest"), "a layer"), size=_size(layer))
            for layer, diff_id in zip(layers, diff_ids, strict=True)
        ],
    )


def diff_ids_of(config: Mapping[str, object]) -> list[str]:
    """Return the digests of an image's uncompressed layers.

    Raises:
        ImageError: the configuration lacks them, or they are too many for an overlay.
    """
    root = _object(config.get("rootfs"), "the configuration's rootfs")
    diff_ids = [check_digest(diff_id, "a layer's diff_id") for diff_id in _list(root.get("diff_ids"), "diff_ids")]
    if not 0 < len(diff_ids) <= MAX_LAYERS:
        raise ImageError(f"the image has {len(diff_ids)} layers", hint=f"an overlay can have 1 to {MAX_LAYERS}")
    return diff_ids


def choose_manifest(index: Mapping[str, object], name: str) -> str:
    """Return the digest of the manifest for this machine's processor.

    Raises:
        ImageError: the index has none.
    """
    machine = platform.machine()
    architecture, variant = _MACHINES.get(machine, (machine, ""))
    matches, platforms = [], []
    for entry in (_object(entry, "a manifest") for entry in _list(index.get("manifests"), "manifests")):
        values = _object(entry.get("platform") or {}, "a platform")
        platforms.append(f"{values.get('os')}/{values.get('architecture')}")
        if values.get("os") == "linux" and values.get("architecture") == architecture:
            # True sorts above False: an entry with another variant is taken only if there is no better one.
            matches.append((values.get("variant") in (None, "", variant), check_digest(entry.get("digest"), name)))
    if not matches:
        raise ImageError(f"{name} has nothing for linux/{architecture}: {', '.join(platforms)[:300]}")
    return max(matches, key=lambda match: match[0])[1]


def json_object(data: bytes, title: str) -> dict[str, object]:
    """Return a JSON object.

    Raises:
        ImageError: it is something else.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    # Level by level, without recursion, which a deep document would exhaust.
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):  # what is deeper could be neither shown nor written
        level = [inner for item in level for inner in _inside(item)]
    if level:
        raise ImageError(f"{title} is nested more than {_MAX_DEPTH} deep")
    return _object(value, title)


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def read_place(place: BlobPlace, max_bytes: int, title: str) -> bytes:
    """Return a small blob.

    Raises:
        ImageError: it is larger than `max_bytes`, or cut off.
    """
    if place.size > max_bytes:
        raise ImageError(f"{title} has {place.size} bytes, more than {max_bytes}")
    data = os.pread(place.fd, place.size, place.start)
    if len(data) != place.size:
        raise ImageError(f"{title} is cut off")
    return data


def _object(value: object, title: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ImageError(f"{title} is not a JSON object: {value!r:.100}")
    return value


def _list(value: object, title: str) -> list[object]:
    if not isinstance(value, list) or len(value) > 10_000:
        raise ImageError(f"{title} is not a list: {value!r:.100}")
    return value


def _size(blob: Mapping[str, object], max_bytes: int = 1 << 40) -> int:
    size = blob.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= max_bytes:
        raise ImageError(f"a blob's size is {size!r:.40}", hint=f"0 to {max_bytes} bytes can be fetched")
    return size
