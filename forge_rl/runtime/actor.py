"""The base of every service's actor."""

from __future__ import annotations

import os

from monarch.actor import Actor, concurrent_endpoint

from forge_rl.runtime.link import LinkEnd
from forge_rl.runtime.processes import process_space


class ServiceActor(Actor):
    """Base of every service's actor. All endpoints are concurrent: Monarch cannot mix them with plain ones.

    Endpoints are for `Service.call`; plain methods and async generators for `ask`, `stream` and `route`.
    """

    @concurrent_endpoint
    async def process_id(self) -> int:
        """Of the process that the actor lives in."""
        return os.getpid()

    @concurrent_endpoint
    async def process_space(self) -> str:
        """Where that number means this process."""
        return process_space()

    @concurrent_endpoint
    async def link_post(self, messages: bytes) -> None:
        """See LinkEnd.post."""
        self._link_end().post(messages)

    @concurrent_endpoint
    async def link_collect(self, wait_s: float) -> bytes:
        """See LinkEnd.collect."""
        return await self._link_end().collect(wait_s)

    def _link_end(self) -> LinkEnd:
        end: LinkEnd | None = vars(self).get("_link")
        if end is None:
            end = self._link = LinkEnd(self)
        return end
