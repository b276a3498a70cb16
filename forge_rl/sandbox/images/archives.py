"""Images in folders and archives: OCI layouts, what `docker save` and `podman save` write, and results of builds."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import posixpath
import shutil
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from forge_rl.sandbox.images import tar_entries
from forge_rl.sandbox.images.image import ImageError, check_digest
from forge_rl.sandbox.images.layer_stream import GZIP, ZSTD, CompressionError, layer_chunks
from forge_rl.sandbox.images.references import LocalReference
from forge_rl.sandbox.images.sources import (
    INDEX_TYPES,
    MAX_CONFIG,
    MAX_MANIFEST,
    BlobPlace,
    ImageContent,
    LayerBlob,
    LayerJob,
    choose_manifest,
    content_of,
    diff_ids_of,
    json_object,
    read_place,
)
from forge_rl.system.variables import handed_on

_MAX_MEMBERS = 100_000
_MAX_NAMES = 1 << 12
_MAX_RATIO, _FREE_BYTES = 200, 1 << 30
"""Uncompressed bytes of an archive by compressed ones, past the first."""
_BUILD_S = 3600.0
_NAME_KEYS = ("org.opencontainers.image.ref.name", "io.containerd.image.name")


class _Files(Protocol):
    """The files of an image, in a folder or an archive."""

    def find(self, name: str) -> BlobPlace | None:
        """Return the place of a file's bytes, open as long as this object lives; None if the file is missing."""


class LocalSource:
    """An image in a folder or an archive, which is opened, or built, on first use.

    Args:
        folder: where a compressed archive is unpacked, to a file without a name.
    """

    def __init__(self, reference: LocalReference, folder: Path) -> None:
        self._reference, self._folder = reference, folder

    @functools.cached_property
    def _files(self) -> _Files:
        path, folder = self._reference.path, self._folder
        try:
            if self._reference.kind == "dockerfile":
                return _built(path, folder)
            if path.is_dir():
                return _FolderFiles(path)
            return _TarFiles(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path, folder)
        except FileNotFoundError:
            raise ImageError(f"{path} does not exist", hint="check the image's path") from None
        except OSError as error:
            raise ImageError(f"{path} cannot be read: {error.strerror}") from None

    @functools.cached_property
    def _is_docker(self) -> bool:
        # `docker save` may write both forms. The OCI layout is taken where there is one, as it has digests of stored
        # layers.
        return self._reference.kind == "docker-archive" or self._files.find("index.json") is None

    @functools.cached_property
    def _docker_layers(self) -> dict[str, BlobPlace]:
        """Places of layers by diff_id."""
        entry, path = self._docker_entry(), self._reference.path
        names = entry.get("Layers")
        diff_ids = diff_ids_of(json_object(self._docker_config(), f"{path}: the configuration"))
        if not isinstance(names, list) or len(diff_ids) != len(names):
            raise ImageError(f"{path} has {names!r:.100} for {len(diff_ids)} layers of its configuration")
        return {diff_id: self._place(str(name)) for diff_id, name in zip(diff_ids, names, strict=True)}

    def content(self) -> ImageContent:
        """Read what the image is made of. See `ImageSource`."""
        return self._docker_content() if self._is_docker else self._oci_content()

    def fetch(self, layer: LayerBlob, job: LayerJob) -> BlobPlace:
        """Return where a layer is in the file; nothing is copied. See `ImageSource`."""
        place = self._docker_layers[layer.diff_id] if self._is_docker else self._blob(layer.digest)
        if place.size != layer.size:
            raise ImageError(f"{self._reference.path}: {layer.digest} has {place.size} bytes instead of {layer.size}")
        if layer.digest and _digest_of(place, job) != layer.digest:
            raise ImageError(f"{self._reference.path}: the layer {layer.digest} has another digest: it is damaged")
        return place

    def _oci_content(self) -> ImageContent:
        path = self._reference.path
        index = json_object(self._read("index.json", MAX_MANIFEST), f"{path}: index.json")
        digest = self._chosen(index)
        for _ in range(3):
            manifest = json_object(self._checked(digest, MAX_MANIFEST), f"{path}: the manifest {digest}")
            if manifest.get("mediaType") not in INDEX_TYPES and "manifests" not in manifest:
                return content_of(manifest, digest, lambda config_digest, size: self._checked(config_digest, size))
            digest = choose_manifest(manifest, str(path))
        raise ImageError(f"{path} has an index of an index of an index")

    def _chosen(self, index: Mapping[str, object]) -> str:
        tag, path = self._reference.tag, self._reference.path
        manifests = index.get("manifests")
        entries = [entry for entry in manifests if isinstance(entry, dict)] if isinstance(manifests, list) else []
        names = [_names(entry) for entry in entries]
        matches = [entry for entry, entry_names in zip(entries, names, strict=True) if not tag or tag in entry_names]
        digests = {check_digest(entry.get("digest"), f"{path}: a manifest") for entry in matches}
        if len(digests) == 1:
            return digests.pop()
        # Several entries of one name are one image if each is for a platform.
        if digests and all("platform" in entry for entry in matches):
            return choose_manifest({"manifests": matches}, str(path))
        listed = ", ".join(sorted({name for entry_names in names for name in entry_names}))
        problem = f"no image {tag!r}" if tag else f"{len(digests)} images"
        raise ImageError(f"{path} has {problem}: {listed:.300}", hint=f"name one, as {self._reference.kind}:PATH:TAG")

    def _docker_content(self) -> ImageContent:
        data, places = self._docker_config(), self._docker_layers
        config = json_object(data, f"{self._reference.path}: the configuration")
        return ImageContent(
            digest=f"sha256:{hashlib.sha256(data).hexdigest()}",
            config=config,
            layers=[LayerBlob(diff_id=layer, digest="", size=places[layer].size) for layer in diff_ids_of(config)],
        )

    def _docker_config(self) -> bytes:
        name = self._docker_entry().get("Config")
        if not isinstance(name, str):
            raise ImageError(f"{self._reference.path}: manifest.json names no configuration")
        return self._read(name, MAX_CONFIG)

    def _docker_entry(self) -> dict[str, object]:
        path, tag = self._reference.path, self._reference.tag
        data = self._read("manifest.json", MAX_MANIFEST)
        entries = json_object(b'{"images":' + data + b"}", f"{path}: manifest.json")["images"]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ImageError(f"{path}: manifest.json is not a list of objects")
        names = [entry.get("RepoTags") for entry in entries]
        tags = [[tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else [] for tags in names]
        matches: list[dict[str, object]] = [
            entry
            for entry, names in zip(entries, tags, strict=True)
            if not tag or any(tag in (name, name.rpartition(":")[2]) for name in names)
        ]
        if len(matches) != 1:
            listed = ", ".join(name for names in tags for name in names)
            problem = f"no image {tag!r}" if tag and not matches else f"{len(matches)} images"
            raise ImageError(
                f"{path} has {problem}: {listed:.300}", hint=f"name one, as {self._reference.kind}:PATH:TAG"
            )
        return matches[0]

    def _place(self, name: str) -> BlobPlace:
        place = self._files.find(name)
        if place is None:
            raise ImageError(f"{self._reference.path} lacks {name!r:.200}", hint="write it again: it is incomplete")
        return place

    def _blob(self, digest: str) -> BlobPlace:
        return self._place(f"blobs/sha256/{digest.removeprefix('sha256:')}")

    def _read(self, name: str, max_bytes: int) -> bytes:
        return read_place(self._place(name), max_bytes, f"{self._reference.path}: {name:.200}")

    def _checked(self, digest: str, max_bytes: int) -> bytes:
        data = read_place(self._blob(digest), max_bytes, f"{self._reference.path}: {digest}")
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise ImageError(f"{self._reference.path}: {digest} has another digest: it is damaged")
        return data


class _FolderFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}

    def find(self, name: str) -> BlobPlace | None:
        if name not in self._fds:
            # As an absolute path first, so that `..` in a manifest's names leads to the folder itself at most.
            path = self._folder / posixpath.normpath(f"/{name}").lstrip("/")
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            self._fds[name] = fd
            weakref.finalize(self, os.close, fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ImageError(f"{path} is not a file")
        return BlobPlace(self._fds[name], 0, os.fstat(self._fds[name]).st_size)


class _TarFiles:
    """Members of an archive, read at their places in it; owns the descriptor."""

    def __init__(self, fd: int, path: Path, folder: Path) -> None:
        close = weakref.finalize(self, os.close, fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ImageError(f"{path} is neither a file nor a folder")
            # Members are read at their places in the file, and a compressed archive has none.
            if os.pread(fd, 4, 0).startswith((GZIP, ZSTD)):
                fd = _decompressed(fd, folder)
                close()
                close = weakref.finalize(self, os.close, fd)
            self._members = _read_members(fd)
        except BaseException as error:
            close()  # the error's traceback may keep this object
            if isinstance(error, tar_entries.TarError | CompressionError):
                raise ImageError(f"{path} is not an archive of an image: {error}") from None
            raise

    def find(self, name: str) -> BlobPlace | None:
        name = posixpath.normpath(name)
        for _ in range(3):  # old versions of docker save link equal layers
            member = self._members.get(name)
            if not isinstance(member, str):
                return member
            name = posixpath.normpath(posixpath.join(posixpath.dirname(name), member))
        return None


def _read_members(fd: int) -> dict[str, BlobPlace | str]:
    headers = _FileHeaders(fd)
    members: dict[str, BlobPlace | str] = {}
    for entry in tar_entries.read_entries(headers):
        if len(entry.name) + len(entry.target) > _MAX_NAMES:
            raise tar_entries.TarError(f"a member has a name of {len(entry.name) + len(entry.target)} bytes")
        name = posixpath.normpath(entry.name.decode("utf-8", "replace"))
        if entry.kind == tar_entries.FILE:
            # Content is skipped, never read: layers are later read at their place in this file.
            members[name] = BlobPlace(fd, headers.position, entry.size)
            headers.position += entry.size
        elif entry.kind == tar_entries.LINK:
            members[name] = entry.target.decode("utf-8", "replace")
        elif entry.kind == tar_entries.HARD_LINK:
            target = members.get(posixpath.normpath(entry.target.decode("utf-8", "replace")))
            if target is not None:
                members[name] = target
        if len(members) > _MAX_MEMBERS:
            raise tar_entries.TarError(f"it has more than {_MAX_MEMBERS} members")
    return members


class _FileHeaders:
    """An archive of which only the headers are read."""

    def __init__(self, fd: int) -> None:
        self._fd, self.position, self._size = fd, 0, os.fstat(fd).st_size

    def read(self, size: int) -> bytes:
        data = os.pread(self._fd, size, self.position)
        if len(data) < size:
            raise tar_entries.TarError("it is cut off")
        self.position += size
        return data

    def is_at_end(self) -> bool:
        return self.position >= self._size


def _decompressed(fd: int, folder: Path) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        size, compressed_size = 0, os.fstat(fd).st_size
        max_bytes = max(_FREE_BYTES, _MAX_RATIO * compressed_size)
        with contextlib.closing(layer_chunks(fd, 0, compressed_size)) as chunks:
            for chunk in chunks:
                size += len(chunk)
                if size > max_bytes:
                    raise tar_entries.TarError(f"it has more than {max_bytes} bytes")
                file.write(chunk)
        file.flush()
        # The file has no name, and lives as long as this copy of its descriptor.
        return os.dup(file.fileno())


def _built(path: Path, folder: Path) -> _TarFiles:
    """Build an image with buildah or podman, which run the Dockerfile's commands with the network they have."""
    tool = shutil.which("buildah") or shutil.which("podman")
    if tool is None:
        raise ImageError("a Dockerfile needs buildah or podman, and neither is installed", hint="install one of them")
    if not path.exists():
        raise ImageError(f"{path} does not exist", hint="name a folder with a Dockerfile")
    context = path if path.is_dir() else path.parent
    file_flags = [] if path.is_dir() else ["--file", str(path)]
    with tempfile.TemporaryDirectory(dir=folder, suffix=".build") as scratch:
        archive, name = Path(scratch, "image.tar"), f"localhost/forge-rl-{os.urandom(6).hex()}"
        save = ["push", name, f"oci-archive:{archive}"]
        # The builder keeps its own layers for the next build; the name is removed, as nobody else would do it.
        steps = [["build", "--layers", "--tag", name, *file_flags, str(context)], save, ["rmi", name]]
        for step in steps:
            try:
                result = subprocess.run(
                    [tool, *step], capture_output=True, timeout=_BUILD_S, env=handed_on(), stdin=subprocess.DEVNULL
                )
            except subprocess.TimeoutExpired:
                raise ImageError(f"{path} was not built within {_BUILD_S:g} s") from None
            if result.returncode:
                text = result.stderr.decode("utf-8", "replace")[-2000:]
                raise ImageError(f"{Path(tool).name} {step[0]} failed for {path}: {text}")
        return _TarFiles(os.open(archive, os.O_RDONLY | os.O_CLOEXEC), path, folder)


def _names(entry: Mapping[str, object]) -> list[str]:
    annotations = entry.get("annotations")
    values = [annotations.get(key) for key in _NAME_KEYS] if isinstance(annotations, dict) else []
    texts = [value for value in values if isinstance(value, str)]
    return [*texts, *(text.rpartition(":")[2] for text in texts if ":" in text)]


def _digest_of(place: BlobPlace, job: LayerJob) -> str:
    digest, start, end = hashlib.sha256(), place.start, place.start + place.size
    while start < end:
        part = os.pread(place.fd, min(1 << 20, end - start), start)
        if not part:
            raise ImageError("an archive was cut off while it was read")
        job.check_wanted()
        digest.update(part)
        start += len(part)
    return f"sha256:{digest.hexdigest()}"
