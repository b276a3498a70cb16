"""Lets the environment service's processes on several hosts share the files that they fetched for tasks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TypeVar

from forge_rl.runtime.addresses import HostNetwork, meeting_address
from forge_rl.runtime.replica import Replica

T = TypeVar("T")


class FilePeers:
    """Has one process on each host serve the files fetched there, and all processes ask the other hosts' servers.

    Args:
        deadline_s: timeout of one call.
        may_be_public: allow ports on addresses that the whole internet can reach.
    """

    def __init__(self, deadline_s: float, *, may_be_public: bool) -> None:
        self._deadline_s, self._may_be_public = deadline_s, may_be_public
        self._key = secrets.token_urlsafe(32)
        """Secret that processes send with each request to one another."""
        self._connected: set[Replica] = set()
        self._lock = asyncio.Lock()

    async def connect(self, replicas: Sequence[Replica]) -> None:
        """Give each process the addresses at which other hosts serve, unless it has them.

        Raises:
            ConfigError: hosts could reach each other only over public addresses.
            ForgeError: a process did not answer.
        """
        async with self._lock:
            # Reversed, so that the first replica of each host is the one that serves.
            by_host = {replica.host: replica for replica in reversed(replicas)}
            is_alone = len(by_host) < 2 and not self._connected  # else it must not ask hosts that are gone
            if is_alone or set(replicas) == self._connected:
                return
            networks: dict[str, HostNetwork] = {
                host: await replica.ask("network", deadline_s=self._deadline_s) for host, replica in by_host.items()
            }
            urls: dict[str, Sequence[str]] = {}
            for host, replica in by_host.items():
                other_networks = [network for other, network in networks.items() if other != host]
                address = meeting_address([networks[host], *other_networks], may_be_public=self._may_be_public)
                urls[host] = await replica.ask("serve_files", address, self._key, deadline_s=self._deadline_s)
            for replica in replicas:
                peers = [url for host in urls if host != replica.host for url in urls[host]]
                await replica.ask("ask_peers", peers, self._key, deadline_s=self._deadline_s)
            self._connected = set(replicas)


def order_on_host(items: Sequence[T], host: int, hosts: int) -> list[T]:
    """Return items in nearly the same order, changed so that hosts that start together are at different items.

        order_on_host([1, 2, 3, 4], 1, 2)  # [2, 1, 4, 3]

    By the time a host needs an item, another one may have fetched it.
    """
    blocks = (items[first : first + hosts] for first in range(0, len(items), hosts))
    return [block[(host + place) % len(block)] for block in blocks for place in range(len(block))]
