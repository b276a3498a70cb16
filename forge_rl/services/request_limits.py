"""Limits each engine's concurrent requests to what its KV cache holds without preempting any."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from forge_rl.runtime.replica import Replica
from forge_rl.token_arrays import FULL, CacheUse

_GROWTH = 1 / 16
"""Relative growth of the limit over as many completed requests as it allows at a time."""


class RequestLimit:
    """Limit of one engine, which drops to what fits once requests wait for room, and then grows slowly again.

    A preempted request loses its keys and values, and computes them again later: with too many requests, an engine
    mostly repeats itself.

    Args:
        max_requests: the limit with room for all.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._limit = float(max_requests)

    @property
    def limit(self) -> int:
        """Maximum concurrent requests, at least 1."""
        return int(self._limit)

    def note(self, use: CacheUse) -> None:
        """Adapt to an engine's report, which comes when a completion ends and when requests wait for room."""
        if use.fitting:
            self._limit = min(self._limit, float(use.fitting))
        elif use.usage < FULL:
            # A report comes for each completion that ends: `limit` of them add up to a sixteenth, or to 1.
            self._limit = min(self._max_requests, self._limit + max(1.0, _GROWTH * self._limit) / self._limit)


class RequestLimits:
    """Limits of all engines, and metrics of their caches."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        # By replica, not index: the engine that replaces a dead one starts with the highest limit.
        self._limits: WeakKeyDictionary[Replica, RequestLimit] = WeakKeyDictionary()
        self._preemptions = self._waiting = 0
        self._prompt_tokens = self._cached_tokens = self._prefilled_again = self._transferred_tokens = 0
        self._usage: float | None = None
        self._lowest = max_requests

    def of(self, engine: Replica) -> int:
        """Return an engine's limit; a new engine starts with the highest."""
        return self._limits[engine].limit if engine in self._limits else self._max_requests

    def note(self, engine: Replica, use: CacheUse) -> bool:
        """Take an engine's report; return whether its limit has changed."""
        old_limit = self.of(engine)
        self._limits.setdefault(engine, RequestLimit(self._max_requests)).note(use)
        new_limit = self.of(engine)
        self._preemptions += use.preemptions
        self._waiting = max(self._waiting, use.waiting)
        self._prompt_tokens += use.prompt_tokens
        self._cached_tokens += use.cached_tokens
        self._prefilled_again += use.prefilled_again
        self._transferred_tokens += use.transferred_tokens
        self._usage = max(self._usage or 0.0, use.usage)
        self._lowest = min(self._lowest, new_limit)
        return new_limit != old_limit

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics since the last call; empty without reports.

        `generator/kv_cache_usage`: the highest share of a cache in use. `generator/preemptions`: how often requests had
        to give up their place in one. `generator/waiting`: most requests that waited inside an engine at once.
        `generator/request_limit`: the lowest limit of an engine. `generator/prefix_hits`: the share of prompts' tokens
        that were in a cache. `generator/prefilled_again`: tokens computed again as weights were loaded, or for lack of
        room. `generator/transferred_tokens`: tokens whose keys and values a connector brought back, if any.
        """
        if self._usage is None:
            return {}
        metrics = {
            "generator/kv_cache_usage": self._usage,
            "generator/preemptions": float(self._preemptions),
            "generator/waiting": float(self._waiting),
            "generator/request_limit": float(self._lowest),
            "generator/prefilled_again": float(self._prefilled_again),
        }
        if self._transferred_tokens:
            metrics["generator/transferred_tokens"] = float(self._transferred_tokens)
        if self._prompt_tokens:
            metrics["generator/prefix_hits"] = self._cached_tokens / self._prompt_tokens
        self._preemptions = self._waiting = 0
        self._prompt_tokens = self._cached_tokens = self._prefilled_again = self._transferred_tokens = 0
        self._usage = None
        self._lowest = min((limit.limit for limit in self._limits.values()), default=self._max_requests)
        return metrics
