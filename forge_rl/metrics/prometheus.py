"""Serves a live run's latest metrics in Prometheus' text format."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from forge_rl.metrics.advisories import Advisory
from forge_rl.metrics.sinks import Level, Metric, RunInfo, Sink
from forge_rl.metrics.values import Histogram
from forge_rl.types import Batch

_MOST_METRICS = 5000
"""Most names of metrics to serve; further ones are left out."""
_MOST_CONNECTIONS = 16
_CLIENT_S = 5.0
"""Seconds for which a client may neither send nor read."""


class PrometheusSink(Sink):
    """Answers every GET on a listening socket with the run's latest metrics, from a thread.

    `forge_rl_metric{name="reward/mean"}` has a gauge for each metric of the last steps, next to the run's step, phase,
    faults, warnings and current advisories. At most 16 clients are served at a time, and a slow one is dropped.

    Args:
        listener: listening socket, which this closes.
        phase: returns the current phase, or "".
        paused: returns whether the run is paused on request.
    """

    def __init__(
        self, listener: socket.socket, *, phase: Callable[[], str] = str, paused: Callable[[], bool] = bool
    ) -> None:
        self._phase = phase
        self._paused = paused
        self._info: RunInfo | None = None
        self._step = 0
        self._step_at: float | None = None
        self._values: dict[str, float] = {}
        self._advisories: dict[str, Advisory] = {}
        self._events = {"warning": 0, "fault": 0}
        self._lock = threading.Lock()
        registry = CollectorRegistry()
        registry.register(_Collector(self._families))
        self._server = _MetricsServer(listener, make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def start(self, info: RunInfo) -> None:
        with self._lock:
            self._info = info
        super().start(info)

    def rollback(self, step: int) -> None:
        with self._lock:
            self._step = step
            self._advisories.clear()

    def log(self, step: int, values: Mapping[str, Metric], batch: Batch | None = None) -> None:
        with self._lock:
            self._step = max(self._step, step)
            self._step_at = time.time()
            for name, value in values.items():
                if not isinstance(value, Histogram) and (name in self._values or len(self._values) < _MOST_METRICS):
                    self._values[name] = float(value)

    def event(self, text: str, level: Level) -> None:
        if level in self._events:
            with self._lock:
                self._events[level] += 1

    def advisory(self, advisory: Advisory, *, ended: bool) -> None:
        with self._lock:
            if ended:
                self._advisories.pop(advisory.kind, None)
            else:
                self._advisories[advisory.kind] = advisory

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _families(self) -> Iterator[Family]:
        # A scrape formats copies, so that it never holds up a step.
        with self._lock:
            info, values, step, step_time = self._info, dict(self._values), self._step, self._step_at
            advisories, events = dict(self._advisories), dict(self._events)
        if info is not None:
            info_gauge = GaugeMetricFamily("forge_rl_info", "The run", labels=["recipe", "model", "folder"])
            info_gauge.add_metric([info.recipe, info.model, str(info.folder)], 1)
            yield info_gauge
            yield GaugeMetricFamily("forge_rl_steps", "Steps of the complete run", value=info.steps)
        yield GaugeMetricFamily("forge_rl_step", "Finished steps", value=step)
        if step_time is not None:
            yield GaugeMetricFamily(
                "forge_rl_step_timestamp_seconds", "Time of the last finished step", value=step_time
            )
        phase_gauge = GaugeMetricFamily("forge_rl_phase", "Current phase", labels=["phase"])
        phase_gauge.add_metric([self._phase() or "none"], 1)
        yield phase_gauge
        yield GaugeMetricFamily("forge_rl_paused", "1 while the run is paused on request", value=self._paused())
        yield CounterMetricFamily("forge_rl_warnings", "Warnings in the events", value=events["warning"])
        yield CounterMetricFamily("forge_rl_faults", "Faults in the events", value=events["fault"])
        advisory_gauge = GaugeMetricFamily("forge_rl_advisory", "Step since which an advisory holds", labels=["kind"])
        for kind, advisory in advisories.items():
            advisory_gauge.add_metric([kind], advisory.since)
        yield advisory_gauge
        metric_gauge = GaugeMetricFamily("forge_rl_metric", "Latest value of each metric of a step", labels=["name"])
        for name, value in values.items():
            if not math.isnan(value):
                metric_gauge.add_metric([name], value)
        yield metric_gauge


class _Collector(Collector):
    def __init__(self, families: Callable[[], Iterator[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        return self._families()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves an application on a socket that listens already, to a bounded number of clients."""

    # A slow client delays neither the end of the process nor a shutdown.
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, app: Any) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        # The base class has made a socket even without binding it; the listening one takes its place.
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.server_name, self.server_port = "forge_rl", listener.getsockname()[1]
        self.setup_environ()
        self.set_app(app)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Beyond the bound clients are refused; waiting ones would each hold a thread.
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that are gone."""
