"""Images of a store, fetched before the episodes of the next batches need them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from forge_rl.sandbox.images import ContainerImage, ImageError, ImageStore, LayerPeers
from forge_rl.system.variables import api_key, value_of

_MOST_IMAGES = 16
_MOST_BYTES = 64 << 30


class ImageLookahead:
    """Fetches and holds the images of coming tasks, one after another, and counts how long episodes wait for images.

        lookahead.prepare(["debian:12", "ubuntu:24.04"])  # returns at once
        async with lookahead.use("debian:12") as image:
            ...

    A failed fetch is tried again when the image is next named, or when an episode uses it, which then gets the error.

    Args:
        most_images: maximum images held for coming tasks; further ones are left to their episodes, or the next call.
        most_bytes: no further image is fetched once those held take this much of the disk.
        shares: whether other hosts of the run may get layers from this one, and this one from them.
    """

    def __init__(
        self,
        store: ImageStore,
        *,
        most_images: int = _MOST_IMAGES,
        most_bytes: int = _MOST_BYTES,
        shares: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._most_images, self._most_bytes = most_images, most_bytes
        self._clock = clock
        self._held: dict[str, tuple[contextlib.AsyncExitStack, str]] = {}
        """By reference, the stack that holds an image in place, and the image's digest."""
        self._fetching: asyncio.Task[None] | None = None
        self._lists: list[Sequence[str]] = []
        """References of the calls in this turn of the event loop, a list for each."""
        self._turn: asyncio.Handle | None = None
        """Begins to fetch these in the next turn; None if there are none."""
        self._wanted: list[str] = []
        """References named by the latest call, those needed first ahead."""
        self._pulling = ""
        """Reference that is being fetched; "" for none."""
        self._failed: set[str] = set()
        """References of the latest call that could not be fetched."""
        self._foreseen: set[str] = set()
        """References that the call before the latest named, and that were never in place in this process."""
        self._ready: set[str] = set()
        """References that have been in place at some time."""
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._shares = shares
        self._serving, self._port = contextlib.ExitStack(), 0

    def prepare(self, references: Sequence[str]) -> Mapping[str, float]:
        """Begin to fetch images in this order, instead of those named before.

        A pull of an image that is named again continues. Calls in one turn of the event loop count as one, as
        environments that share a folder prepare their tasks one after another; their images take turns.

        Returns:
            Counts since the last call: `image_wait_s`, seconds that episodes waited for images; `image_uses`;
            `image_prefetched`, uses of images that were in place; `image_late`, uses of images that were not, although
            a call before the latest had named them; and `image_prefetch_failed`, prefetches that failed.
        """
        self._lists.append(references)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._begin)
        counts, self._counts = self._counts, defaultdict(float)
        return counts

    def _begin(self) -> None:
        """Begin to fetch what the calls of one turn have named."""
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*self._lists))
        names = dict.fromkeys(name for name in in_turn if name is not None)
        self._lists, self._turn = [], None
        self._foreseen = set(self._wanted) - self._ready
        self._wanted, self._failed = list(names)[: self._most_images], set()
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(None))
        # A pull that is still wanted goes on, and its loop then sees the new list; another one is cut off.
        elif self._pulling not in self._wanted:
            self._fetching.cancel()
            self._fetching = asyncio.get_running_loop().create_task(self._fetch(self._fetching))

    @contextlib.asynccontextmanager
    async def use(self, reference: str) -> AsyncIterator[ContainerImage]:
        """Keep an image in place for a block of code, as `ImageStore.use`."""
        self._counts["image_uses"] += 1
        self._counts["image_prefetched"] += reference in self._held
        self._counts["image_late"] += reference in self._foreseen
        began_s = self._clock()
        async with contextlib.AsyncExitStack() as stack:
            try:
                # The wait counts also if the image cannot be fetched.
                image = await stack.enter_async_context(self.store.use(reference))
            finally:
                self._counts["image_wait_s"] += self._clock() - began_s
            yield image

    def serve_files(self, address: str, key: str) -> list[str]:
        """Serve the store's layers to other hosts; return the URL, none if it has other peers."""
        if not self._port and self._shares:
            self._port = self._serving.enter_context(self.store.serve(address, 0, key))
        return [f"http://{address}:{self._port}"] if self._port else []

    def ask_peers(self, urls: Sequence[str], key: str) -> None:
        """Ask other hosts for layers before their source, unless the store has other peers."""
        if self._shares:
            self.store.peers = LayerPeers(addresses=urls, key=key)

    async def close(self) -> None:
        """Stop fetching and serving, and hold nothing."""
        self._serving.close()
        if self._turn is not None:
            self._turn.cancel()
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
        await self._release(list(self._held))

    async def _fetch(self, cancelled: asyncio.Task[None] | None) -> None:
        if cancelled is not None:
            # Two loops at once would both fetch, and exceed the limits.
            await asyncio.wait([cancelled])
        while True:
            # Until a call no longer names an image: its episodes have opened it by then, and hold it themselves.
            await self._release([reference for reference in self._held if reference not in self._wanted])
            # Measured once unwanted images have been released.
            if await asyncio.to_thread(self._held_bytes) >= self._most_bytes:
                return
            missing = (name for name in self._wanted if name not in self._held and name not in self._failed)
            if not (reference := next(missing, "")):
                return
            stack, self._pulling = contextlib.AsyncExitStack(), reference
            try:
                image = await stack.enter_async_context(self.store.use(reference))
            except ImageError:
                self._counts["image_prefetch_failed"] += 1
                self._failed.add(reference)
            else:
                self._held[reference] = stack, image.digest
                self._ready.add(reference)
                self._foreseen.discard(reference)
            finally:
                self._pulling = ""

    async def _release(self, references: Sequence[str]) -> None:
        for reference in references:
            stack, _ = self._held.pop(reference)
            await stack.aclose()

    def _held_bytes(self) -> int:
        # Two references may name one image.
        digests = {digest for _, digest in self._held.values()}
        return sum(image.disk_bytes for image in self.store.images() if image.digest in digests)


@functools.lru_cache(maxsize=8)
def image_lookahead(folder: str) -> ImageLookahead:
    """Return this process's only lookahead for a folder of images.

    Layers are first requested from the peers in FORGE_RL_IMAGE_PEERS, addresses of `forge-rl images serve` separated by
    spaces, with the key in FORGE_RL_IMAGE_KEY.
    """
    addresses = value_of("FORGE_RL_IMAGE_PEERS").split()
    key = api_key("image peers", "FORGE_RL_IMAGE_KEY", option="") if addresses else ""
    peers = LayerPeers(addresses=addresses, key=key) if addresses else None
    return ImageLookahead(ImageStore(Path(folder).expanduser(), peers=peers), shares=not addresses)
