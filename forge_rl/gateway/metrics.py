"""Prometheus metrics of the gateway."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST


class GatewayMetrics:
    """Metrics of one gateway, in their own registry.

    Args:
        in_flight: returns the number of completions in flight.
        sessions: returns the number of open sessions.
    """

    def __init__(self, in_flight: Callable[[], float], sessions: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        options: dict[str, Any] = {"namespace": "forge_rl_gateway", "registry": self._registry}
        timer = partial(
            Histogram, labelnames=["endpoint"], buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
        )
        self._requests = Counter("requests", "Finished requests", ["endpoint", "status"], **options)
        self._seconds = timer("request_seconds", "Seconds from a request to the end of its response", **options)
        self._first = timer("first_event_seconds", "Seconds from a request to the first event of its stream", **options)
        self._tokens = Counter("tokens", "Tokens of answered requests", ["kind"], **options)
        self._settings = Counter(
            "settings_replaced", "Sampling settings of agents replaced by a run's", ["name"], **options
        )
        Gauge("completions_in_flight", "Completions in flight", **options).set_function(in_flight)
        Gauge("sessions_open", "Open sessions", **options).set_function(sessions)

    def request(self, endpoint: str, status: int, seconds: float, first_event_s: float | None = None) -> None:
        """Count a finished request."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)
        if first_event_s is not None:
            self._first.labels(endpoint).observe(first_event_s)

    def tokens(self, prompt: int, completion: int) -> None:
        """Count the tokens of an answered request."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("completion").inc(completion)

    def replaced(self, name: str) -> None:
        """Count a sampling setting of an agent that the run's replaced."""
        self._settings.labels(name).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
