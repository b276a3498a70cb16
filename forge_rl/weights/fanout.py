"""Places hosts in chains and trees along which they copy a version's buckets. Pure; the store's index uses it.

A host passes buckets on while later ones still arrive, so at most two copies leave the host that wrote them. A host
that fails is skipped: hosts that copied from it are placed elsewhere when they ask again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence

from forge_rl.errors import WeightsError
from forge_rl.weights.manifest import Bucket, written_by


def most_children(hosts: int, buckets: int) -> int:
    """Return how many hosts may copy from one: 1 makes a chain, 2 a binary tree, whichever ends sooner.

    With one bucket leaving a host at a time, a chain takes one step per bucket and host, and a tree two per bucket and
    level. Chains suit large versions, trees many hosts.

    Args:
        hosts: number of hosts that copy.
        buckets: number of buckets that each copies.
    """
    # Steps until the last host has the last bucket: buckets + hosts - 1 in a chain; in a tree, each host sends every
    # bucket twice, so 2 (buckets + levels - 1).
    levels = math.ceil(math.log2(hosts + 2)) - 1
    return 1 if buckets + hosts - 1 <= 2 * (buckets + levels - 1) else 2


class Fanout:
    """Places hosts in the trees along which buckets are copied, one tree for each version and writing host.

    fanout = Fanout(hosts=3)
    fanout.join("b", manifest.buckets)  # {"7/0": "a", "7/1": "a"}
    fanout.join("c", manifest.buckets)  # {"7/0": "b", "7/1": "b"}

    Args:
        hosts: number of the store's hosts.
    """

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._trees: dict[tuple[str, str], _CopyTree] = {}
        """Trees by the version that wrote the buckets and the host that has them."""

    def join(self, host: str, buckets: Sequence[Bucket], *, failed: Collection[str] = ()) -> dict[str, str]:
        """Return the host to copy each bucket from, by key.

        Args:
            host: the host that copies.
            buckets: buckets to copy, none of which it wrote.
            failed: hosts that it could not copy these from; nobody is sent to them from now on, except to the writer.

        Raises:
            WeightsError: all hosts with a bucket have failed.
        """
        keys_by_home: dict[tuple[str, str], list[str]] = defaultdict(list)
        for bucket in buckets:
            keys_by_home[written_by(bucket.key), bucket.host].append(bucket.key)
        parents: dict[str, str] = {}
        for home, keys in keys_by_home.items():
            if home not in self._trees:
                self._trees[home] = _CopyTree(home[1], most_children(max(1, self._hosts - 1), len(keys)))
            self._trees[home].keys.update(keys)
            parents |= dict.fromkeys(keys, self._trees[home].place(host, failed))
        return parents

    def stale(self, host: str, needed: Collection[str]) -> tuple[str, ...]:
        """Remove a host from the trees whose buckets are all unneeded; return the keys of its copies, which it may
        free."""
        stale_trees = [tree for tree in self._trees.values() if host in tree.parents and tree.keys.isdisjoint(needed)]
        for tree in stale_trees:
            tree.remove(host)
        return tuple(key for tree in stale_trees for key in tree.keys)

    def leave(self, host: str) -> None:
        """Forget a host's copies, which it has lost."""
        for tree in self._trees.values():
            tree.remove(host)

    def forget(self, keys: Collection[str]) -> None:
        """Forget buckets that were freed on all hosts."""
        for tree in self._trees.values():
            tree.keys.difference_update(keys)
        self._trees = {home: tree for home, tree in self._trees.items() if tree.keys}


class _CopyTree:
    """Hosts that copy one version's buckets, below the host that wrote them."""

    def __init__(self, writer: str, max_children: int) -> None:
        self.keys: set[str] = set()
        self.parents: dict[str, str] = {}
        """Host that each host copies from."""
        self._writer = writer
        self._max_children = max_children
        self._failed: set[str] = set()

    def place(self, host: str, failed: Collection[str]) -> str:
        """Return a host's parent: the current one unless it failed, else the host with room that is nearest the
        writer."""
        # Taken out first, so that the host does not count as a child while its place is chosen.
        parent = self.parents.pop(host, "")
        if not parent or parent in failed:
            # A host that asks is alive, whatever others said of it; and without the writer nobody could get the
            # buckets.
            self._failed = (self._failed | {*failed}) - {host, self._writer}
            parent = self._choose(host, failed)
        self.parents[host] = parent
        return parent

    def remove(self, host: str) -> None:
        """Remove a host; hosts that copied from it then copy from its parent."""
        if parent := self.parents.pop(host, ""):
            self.parents |= {child: parent for child, old_parent in self.parents.items() if old_parent == host}

    def _choose(self, host: str, failed: Collection[str]) -> str:
        depths = self._depths(self._writer)
        descendants = self._depths(host)  # they wait for this host themselves
        num_children = Counter(parent for child, parent in self.parents.items() if child not in self._failed)
        candidates = [
            candidate
            for candidate in (self._writer, *self.parents)
            if candidate not in failed and candidate not in self._failed and candidate not in descendants
        ]
        if not candidates:
            raise WeightsError(f"no other host than {', '.join(map(repr, failed))} has these weights")
        # Nearest the writer first, as depth is delay. If all are full, one more child is slower, but better than an
        # error.
        free_candidates = [candidate for candidate in candidates if num_children[candidate] < self._max_children]
        return min(
            free_candidates or candidates,
            key=lambda candidate: (depths.get(candidate, math.inf), num_children[candidate]),
        )

    def _depths(self, top: str) -> dict[str, int]:
        """Return the number of steps from a host to each host below it, except hosts that a failure cuts off."""
        children: dict[str, list[str]] = defaultdict(list)
        for child, parent in self.parents.items():
            if child not in self._failed:
                children[parent].append(child)
        depths, queue = {top: 0}, [top]
        for parent in queue:
            depths |= dict.fromkeys(children[parent], depths[parent] + 1)
            queue += children[parent]
        return depths
