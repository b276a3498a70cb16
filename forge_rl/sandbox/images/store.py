"""Images of a machine: fetched, unpacked and kept once, for all sessions, processes and runs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from forge_rl.errors import ConfigError
from forge_rl.sandbox.images.archives import LocalSource
from forge_rl.sandbox.images.credentials import credential_files
from forge_rl.sandbox.images.image import ContainerImage, ImageError, ImageSettings, check_digest, settings_of
from forge_rl.sandbox.images.layers import LayerProgress, LayerStore, LayerWork
from forge_rl.sandbox.images.mirrors import mirrors_file, mirrors_of
from forge_rl.sandbox.images.peers import LayerPeers, serve_layers
from forge_rl.sandbox.images.references import LocalReference, RegistryReference, parse_reference
from forge_rl.sandbox.images.registry import RegistryAccess, RegistrySource
from forge_rl.sandbox.images.sources import ImageContent, ImageSource, LayerBlob
from forge_rl.sandbox.images.unpack import LayerLimits
from forge_rl.system.folders import make_private
from forge_rl.system.tasks import task_group

_LAYERS_AT_A_TIME = 4
_MIN_KEY = 16
_SCRATCH, _OLD_S = ".partial-", 3600.0
_OF_INDEX = ".index"
"""Suffix of files, named after an index, with the digest of its manifest for this machine."""
_TRIES = 3
"""Number of tries to hold a layer that other processes keep evicting."""


@dataclass(frozen=True, kw_only=True)
class StoredImage:
    """An image that was fetched, for lists."""

    references: Sequence[str]
    digest: str
    disk_bytes: int
    """Bytes of its layers that are present; other images may share them."""
    is_complete: bool
    """Whether all of its layers are present."""


@dataclass
class _JoinedWork:
    """Work in a thread, and how many wait for it."""

    future: Future[None]
    work: LayerWork
    reference: str
    """Reference of the image whose source is asked for the layer."""
    waiters: int = 0


class ImageStore:
    """Images in a folder, whose layers are fetched on first use and evicted when they take too much space.

        store = ImageStore(Path("~/.cache/forge_rl/images"), max_bytes=200 << 30)
        async with store.use("debian:12") as image:
            print(image.layers)

    Each layer is kept once, whichever images have it. Several processes may use one folder; a killed one leaves only
    partial files, from which the next one resumes. A tag is looked up once in a store's life, a digest never again.

    Args:
        folder: made if it does not exist; only this user may enter it.
        max_bytes: bytes of all unpacked layers. What was used longest ago is evicted, but nothing that is held.
        mirrors: addresses to ask before a registry, by its host, or "*" for all: {"docker.io": ["https://mirror"]};
            None for the mirrors in `registries.conf`, as podman and skopeo find it.
        limits: largest layer that is unpacked.
        credentials: files with passwords for registries; None for the usual ones of docker, podman and skopeo.
        progress: called from threads.
        peers: other hosts to ask for layers before their source; see `serve`.

    Raises:
        ConfigError: somebody else could have written to the folder.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int | None = None,
        *,
        mirrors: Mapping[str, Sequence[str]] | None = None,
        limits: LayerLimits | None = None,
        credentials: Sequence[Path] | None = None,
        progress: Callable[[LayerProgress], None] | None = None,
        peers: LayerPeers | None = None,
    ) -> None:
        self.folder = folder.expanduser().absolute()
        make_private(self.folder, ConfigError, deep=False)
        if mirrors is None and (path := mirrors_file()) is not None:
            mirrors = mirrors_of(path)
        self._images = self.folder / "images"
        self._images.mkdir(exist_ok=True)
        self._layers = LayerStore(self.folder, max_bytes, limits or LayerLimits())
        self._access = RegistryAccess(
            mirrors={host: tuple(addresses) for host, addresses in (mirrors or {}).items()},
            credential_files=credential_files() if credentials is None else tuple(credentials),
        )
        self._progress, self.peers = progress, peers
        self._threads = ThreadPoolExecutor(_LAYERS_AT_A_TIME, thread_name_prefix="images")
        self._lookups: dict[tuple[object, ...], Future[ImageContent]] = {}
        self._lookup_threads = ThreadPoolExecutor(_LAYERS_AT_A_TIME, thread_name_prefix="image-names")
        self._guard = threading.Lock()
        self._work: dict[str, _JoinedWork] = {}
        self._written: set[tuple[str, str]] = set()
        self._contents: dict[tuple[object, ...], ImageContent] = {}

    async def get(self, reference: str) -> ContainerImage:
        """Return an image, fetching its missing layers. Eviction may take them again: `use` keeps them.

        Args:
            reference: REGISTRY/NAME:TAG@DIGEST, oci:FOLDER, docker-archive:FILE, oci-archive:FILE, each with :TAG if
                there are several, or dockerfile:FOLDER, which buildah or podman builds.

        Raises:
            ImageError: it does not exist, cannot be fetched, is refused or does not fit.
        """
        async with self.use(reference) as image:
            return image

    @contextlib.asynccontextmanager
    async def use(self, reference: str) -> AsyncIterator[ContainerImage]:
        """Keep an image in place for a block of code; see `get`."""
        parsed = parse_reference(reference)
        holds: list[str] = []
        try:
            source: ImageSource = (
                RegistrySource(parsed, self._access)
                if isinstance(parsed, RegistryReference)
                else LocalSource(parsed, self._layers.partial)
            )
            try:
                if (content := self._known(reference, parsed)) is None:
                    content = await self._looked_up(_key(reference, parsed), source)
                settings = settings_of(content.config, reference)
                async with task_group() as group:
                    # An image may have the same layer twice; it is fetched once.
                    for blob in {blob.diff_id: blob for blob in content.layers}.values():
                        group.create_task(self._hold_layer(blob, source, reference, holds))
            finally:
                self._layers.dismiss()
            image = self._image(reference, content, settings)
            self._note(reference, parsed, content)
            yield image
        except ImageError:
            # Looked up again next time: its tag may have moved since, or its Dockerfile make other layers.
            self._contents.pop(_key(reference, parsed), None)
            raise
        finally:
            for diff_id in holds:
                self._layers.release(diff_id)

    @contextlib.contextmanager
    def hold(self, image: ContainerImage) -> Iterator[None]:
        """Keep an image in place for a block of code, also from other processes' eviction.

        The lock is the kernel's: it ends with the process, however that ends.

        Raises:
            ImageError: it was evicted since `get`.
        """
        holds: list[str] = []
        try:
            for folder in image.layers:
                diff_id = f"sha256:{folder.parent.name}"
                if not self._layers.hold(diff_id):
                    raise ImageError(f"{image.reference} has been evicted", hint="get it again, or use it in `use`")
                holds.append(diff_id)
            yield
        finally:
            for diff_id in holds:
                self._layers.release(diff_id)

    async def prefetch(self, references: Sequence[str]) -> None:
        """Fetch images that will be needed later, one after another, so that they do not delay those needed now.

        Raises:
            ImageError: the first image that could not be fetched, once the others are there.
        """
        failure: ImageError | None = None
        for reference in dict.fromkeys(references):
            try:
                await self.get(reference)
            except ImageError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def images(self) -> Sequence[StoredImage]:
        """Return the images that were fetched, by name."""
        images = []
        for path in self._images.glob("*.json"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # evicted meanwhile, or cut off by a power failure
                record = json.loads(path.read_bytes())
                sizes = [self._layers.status(diff_id).get("disk_bytes") for diff_id in set(record["diff_ids"])]
                images.append(
                    StoredImage(
                        references=record["references"],
                        digest=record["digest"],
                        disk_bytes=sum(size for size in sizes if isinstance(size, int)),
                        is_complete=None not in sizes,
                    )
                )
        return sorted(images, key=lambda image: list(image.references))

    async def prune(self, max_bytes: int = 0) -> int:
        """Evict layers that nobody uses, those used longest ago first, until all have at most `max_bytes`.

        Returns:
            Number of bytes freed.
        """
        freed = await asyncio.to_thread(self._layers.evict, max_bytes)
        for path in self._images.glob("*.json"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # cut off with the machine's power
                record = json.loads(path.read_bytes())
                if not any(self._layers.status(diff_id) for diff_id in record["diff_ids"]):
                    path.unlink()
                    self._written.clear()
        for path in self._images.glob(f"{_SCRATCH}*"):  # of killed processes
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _OLD_S:
                    path.unlink()
        return freed

    @contextlib.contextmanager
    def serve(self, host: str, port: int, key: str) -> Iterator[int]:
        """Serve the layers to other hosts' stores, whose `peers` name this one, for a block of code.

        Args:
            host: address to listen at, on a network that is the job's alone: layers are not encrypted on the way.
            port: 0 for any; the context is the port.
            key: the peers' secret; anyone who has it can read all layers.
        """
        if len(key) < _MIN_KEY:
            raise ConfigError(f"a key of {len(key)} letters can be guessed", hint=f"take {_MIN_KEY} letters or more")

        @contextlib.contextmanager
        def hold(diff_id: str) -> Iterator[bool]:
            is_there = self._layers.hold(diff_id)
            try:
                yield is_there
            finally:
                if is_there:
                    self._layers.release(diff_id)

        with serve_layers(self._layers.layers, hold, (host, port), key) as served_port:
            yield served_port

    def disk_bytes(self) -> int:
        """Return how much space the layers take."""
        return self._layers.disk_bytes()

    def _known(self, reference: str, parsed: RegistryReference | LocalReference) -> ImageContent | None:
        """Return the content of an image if it was looked up before and cannot have changed; else None."""
        content = self._contents.get(_key(reference, parsed))
        if content is None and isinstance(parsed, RegistryReference) and parsed.digest:
            return self._noted(parsed.digest)
        return content

    async def _looked_up(self, key: tuple[object, ...], source: ImageSource) -> ImageContent:
        """Look up the content of an image; all who ask at the same time wait for one answer."""
        with self._guard:
            future = self._lookups.get(key)
            if future is None or (future.done() and key not in self._contents):
                future = self._lookups[key] = self._lookup_threads.submit(self._look_up, key, source)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        finally:
            if future.done():
                self._lookups.pop(key, None)

    def _look_up(self, key: tuple[object, ...], source: ImageSource) -> ImageContent:
        # A process that unpacks takes a while to start: it does so while the registry is asked.
        self._layers.prepare()
        content = self._contents[key] = source.content()
        return content

    async def _hold_layer(self, blob: LayerBlob, source: ImageSource, reference: str, holds: list[str]) -> None:
        """Hold a layer; fetch it first if it is not there."""
        # Between the end of a fetch and the hold, another process may evict the layer.
        for _ in range(_TRIES):
            if not self._layers.hold(blob.diff_id):
                await self._obtained(blob, source, reference, holds)
            else:
                holds.append(blob.diff_id)
            if blob.diff_id in holds:
                return
        raise ImageError(f"{reference}: others evict its layers, or fail to fetch them", hint="allow more bytes")

    async def _obtained(self, blob: LayerBlob, source: ImageSource, reference: str, holds: list[str]) -> None:
        """Wait for the work on a layer, which all waiters of this process share; it ends with the last of them."""
        with self._guard:
            shared = self._work.get(blob.diff_id)
            if shared is None or shared.work.is_unwanted.is_set() or shared.future.done():
                work = LayerWork(blob, self._progress)
                future = self._threads.submit(self._layers.obtain, work, source, self.peers)
                shared = self._work[blob.diff_id] = _JoinedWork(future, work, reference)
            shared.waiters += 1
        try:
            await asyncio.shield(asyncio.wrap_future(shared.future))
            if self._layers.hold(blob.diff_id):
                holds.append(blob.diff_id)
        except ImageError as error:
            if shared.reference == reference:
                raise ImageError(f"{reference}: {error.message}", hint=error.hint) from None
            # Another image names the same layer, and its source failed, or sent something else.
        finally:
            self._leave(blob.diff_id, shared)

    def _leave(self, diff_id: str, shared: _JoinedWork) -> None:
        with self._guard:
            shared.waiters -= 1
            if shared.waiters:
                return
            shared.work.is_unwanted.set()
            if self._work.get(diff_id) is shared:
                del self._work[diff_id]
        # The work itself holds the layer until its last waiter holds it, or has left.
        shared.future.add_done_callback(functools.partial(self._release_work, diff_id))
        shared.future.cancel()

    def _release_work(self, diff_id: str, future: Future[None]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._layers.release(diff_id)

    def _image(self, reference: str, content: ImageContent, settings: ImageSettings) -> ContainerImage:
        # An overlay takes a folder once. All that a layer does, its last place does again.
        diff_ids = [*dict.fromkeys(blob.diff_id for blob in reversed(content.layers))]
        return ContainerImage(
            reference=reference,
            digest=content.digest,
            layers=tuple(self._layers.files(diff_id) for diff_id in reversed(diff_ids)),
            settings=settings,
        )

    def _note(self, reference: str, parsed: RegistryReference | LocalReference, content: ImageContent) -> None:
        """Record the content of an image, so that the registry need not be asked again."""
        if (reference, content.digest) in self._written:
            return
        path = self._record(content.digest)
        try:
            references = json.loads(path.read_bytes())["references"]
        except (FileNotFoundError, ValueError, KeyError):
            references = []
        if reference in references:
            return
        record = {
            "references": sorted({*references, reference}),
            "digest": content.digest,
            "diff_ids": [blob.diff_id for blob in content.layers],
            "layers": [asdict(blob) for blob in content.layers],
            "config": content.config,
        }
        self._write(path, json.dumps(record))
        if isinstance(parsed, RegistryReference) and parsed.digest not in ("", content.digest):
            self._write(self._record(parsed.digest).with_suffix(_OF_INDEX), content.digest)
        self._written.add((reference, content.digest))

    def _write(self, path: Path, text: str) -> None:
        """Replace a file as a whole, as other processes may write it at the same time."""
        scratch = self._images / f"{_SCRATCH}{os.urandom(8).hex()}"
        try:
            scratch.write_text(text)
            scratch.replace(path)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise ImageError(f"{path} cannot be written: {error.strerror}", hint="free space on the disk") from error

    def _noted(self, digest: str) -> ImageContent | None:
        try:
            with contextlib.suppress(FileNotFoundError):
                digest = check_digest(self._record(digest).with_suffix(_OF_INDEX).read_text(), f"the index {digest}")
            record = json.loads(self._record(digest).read_bytes())
            layers = [LayerBlob(**layer) for layer in record["layers"]]
        # A record that cannot be read counts as missing: the registry is asked again.
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return ImageContent(digest=digest, config=record["config"], layers=layers)

    def _record(self, digest: str) -> Path:
        return self._images / f"{digest.removeprefix('sha256:')}.json"


def _key(reference: str, parsed: RegistryReference | LocalReference) -> tuple[object, ...]:
    """Return the key of an image: its name, and the state of a file on disk, which may change under that name."""
    if isinstance(parsed, RegistryReference) or parsed.kind == "dockerfile":
        return (reference,)
    path = parsed.path
    for file in (path, path / "index.json", path / "manifest.json"):
        with contextlib.suppress(OSError):
            status = file.stat()
            if not stat.S_ISDIR(status.st_mode):
                return reference, status.st_ino, status.st_size, status.st_mtime_ns
    return (reference,)
