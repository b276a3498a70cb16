"""Counts of the gateway, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST


class GatewayMetrics:
    """Counts what one gateway does, in a registry of its own.

    Args:
        in_flight: number of completions that are being decoded.
        sessions: number of open sessions.
    """

    def __init__(self, in_flight: Callable[[], float], sessions: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"namespace": "forge_rl_gateway", "registry": self._registry}
        timer = partial(
            Histogram, labelnames=["endpoint"], buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
        )
        self._requests = Counter("requests", "Requests that ended", ["endpoint", "status"], **own)
        self._seconds = timer("request_seconds", "From a request to the end of its response", **own)
        self._first = timer("first_event_seconds", "From a request to the first event of its stream", **own)
        self._tokens = Counter("tokens", "Tokens of answered requests", ["kind"], **own)
        self._settings = Counter(
            "settings_replaced", "Sampling settings of agents replaced by a run's", ["name"], **own
        )
        Gauge("completions_in_flight", "Completions that are being decoded", **own).set_function(in_flight)
        Gauge("sessions_open", "Sessions whose key is accepted", **own).set_function(sessions)

    def request(self, endpoint: str, status: int, seconds: float, first_event_s: float | None = None) -> None:
        """Count a request that ended."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)
        if first_event_s is not None:
            self._first.labels(endpoint).observe(first_event_s)

    def tokens(self, prompt: int, completion: int) -> None:
        """Count the tokens of a request that was answered."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("completion").inc(completion)

    def replaced(self, name: str) -> None:
        """Count a sampling setting of an agent's that was replaced by the run's."""
        self._settings.labels(name).inc()

    def text(self) -> bytes:
        """Return all counts in Prometheus' format."""
        return generate_latest(self._registry)
