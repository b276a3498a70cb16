"""Places where tasks' containers run: sessions of this machine, with images from a store, or a provider."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Protocol

from forge_rl.sandbox import DurableSession, DurableSessions, Limits, Pool, PoolSession, shared_pool
from forge_rl.sandbox.images import ContainerImage
from forge_rl.sandbox.providers.containers import ContainerProvider, RentedSession, container_provider
from forge_rl.sandbox.providers.roots import RootListing
from forge_rl.sandbox.workspaces.image_programs import LayerNames, RootNames
from forge_rl.worlds.image_lookahead import image_lookahead


class ContainerPlace(Protocol):
    """The sessions of one episode's image."""

    async def hold(self) -> None:
        """Fetch the image, and keep it until the place is closed.

        Raises:
            SandboxError: it cannot be fetched.
        """

    async def open(self) -> DurableSession | RentedSession:
        """Open the model's session, which the caller closes."""

    def session(self) -> contextlib.AbstractAsyncContextManager[PoolSession | RentedSession]:
        """Open a fresh session for tests."""

    def root(self) -> RootNames:
        """Return the names in the image's root; with a provider, none before the model's session is open."""

    async def close(self) -> None:
        """Release the image."""


def place_of(reference: str, limits: Limits, *, store: str, provider: str) -> ContainerPlace:
    """Return the place where containers of an image run.

    Args:
        store: folder of images, for sessions of this machine.
        provider: name of a provider; "" for this machine.
    """
    return ProviderPlace(reference, limits, provider) if provider else LocalPlace(reference, limits, store)


class LocalPlace:
    """Sessions of an image on this machine."""

    def __init__(self, reference: str, limits: Limits, store: str) -> None:
        self._reference, self._limits, self._store = reference, limits, store
        # Empty until `hold`; closing it releases the image.
        self._held = contextlib.AsyncExitStack()
        self._image: ContainerImage | None = None

    async def hold(self) -> None:
        """Fetch the image, which the store keeps until the place is closed; further calls do nothing."""
        if self._image is not None:
            return
        self._image = await self._held.enter_async_context(image_lookahead(self._store).use(self._reference))

    async def open(self) -> DurableSession:
        """Return the model's session."""
        await self.hold()
        # Durable: if the sandbox's server dies, the episode's commands are rerun in another session.
        return DurableSessions(await self._pool()).open(limits=self._limits, image=self._image)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[PoolSession]:
        """Open a fresh session of the image, which must be held."""
        assert self._image is not None
        async with (await self._pool()).session(limits=self._limits, image=self._image) as session:
            yield session

    async def _pool(self) -> Pool:
        return await shared_pool(profile="process", images=str(image_lookahead(self._store).store.folder))

    def root(self) -> RootNames:
        """Return the names in the image's layers."""
        assert self._image is not None
        return LayerNames(self._image)

    async def close(self) -> None:
        """Release the image."""
        self._image = None
        await self._held.aclose()


class ProviderPlace:
    """Containers of an image at a provider."""

    def __init__(self, reference: str, limits: Limits, provider: str) -> None:
        self._reference, self._limits, self._provider = reference, limits, provider
        self._before = RootListing.of(b"", ())

    async def hold(self) -> None:
        """Do nothing: the provider keeps images."""

    async def open(self) -> RentedSession:
        """Start the model's container, and list its root."""
        provider, _ = _provider(asyncio.get_running_loop(), self._provider)
        # Watched: the root is listed before the first command, so that the model's changes can be told from the image.
        session = await RentedSession.open(provider, self._reference, self._limits, watched=True)
        self._before = session.before or self._before
        return session

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[RentedSession]:
        """Start a fresh container."""
        provider, _ = _provider(asyncio.get_running_loop(), self._provider)
        # Nobody asks what tests change, so nothing is listed.
        async with await RentedSession.open(provider, self._reference, self._limits, watched=False) as session:
            yield session

    def root(self) -> RootNames:
        """Return the names that the model's container had before its first command."""
        return self._before

    async def close(self) -> None:
        """Do nothing."""


@functools.lru_cache(maxsize=8)
def _provider(loop: asyncio.AbstractEventLoop, name: str) -> tuple[ContainerProvider, asyncio.Task[None]]:
    """Return the provider that all episodes of an event loop share, and the task that closes it when the loop ends."""
    # One for each event loop, as its connections belong to the loop that opened them.
    provider = container_provider(name)
    return provider, loop.create_task(_closed_at_end(provider))


async def _closed_at_end(provider: ContainerProvider) -> None:
    try:
        # Never resolved; asyncio.run cancels all tasks at its end, and with them this wait.
        await asyncio.get_running_loop().create_future()
    finally:
        await provider.close()
