"""Counts of the gateway, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class GatewayMetrics:
    """Counts what one gateway does, in a registry of its own.

    Args:
        in_flight: number of completions that are being decoded.
        sessions: number of open sessions.
    """

    def __init__(self, in_flight: Callable[[], float], sessions: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "forge_rl_gateway_requests", "Requests that ended", ["endpoint", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "forge_rl_gateway_request_seconds",
            "From a request to the end of its response",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._first = Histogram(
            "forge_rl_gateway_first_event_seconds",
            "From a request to the first event of its stream",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "forge_rl_gateway_tokens", "Tokens of answered requests", ["kind"], registry=self._registry
        )
        for name, text, value in (
            ("completions_in_flight", "Completions that are being decoded", in_flight),
            ("sessions_open", "Sessions whose key is accepted", sessions),
        ):
            Gauge(f"forge_rl_gateway_{name}", text, registry=self._registry).set_function(value)

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

    def text(self) -> bytes:
        """Return all counts in Prometheus' format."""
        return generate_latest(self._registry)
