"""Collects vLLM's statistics of its KV cache after each step."""

from __future__ import annotations

import uuid

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from forge_rl.token_arrays import FULL, CacheUse


class CacheStats:
    """Collects how full the KV caches of an engine's data-parallel copies are.

    Call `cleared` after clearing the cache, before the engine resumes: vLLM clears it by preempting all running
    requests, and these preemptions say nothing about the cache's size.
    """

    def __init__(self) -> None:
        self.fitting: int | None = None
        """Number of requests that ran while others waited for room, since the last `pop`; None if none waited."""
        self._preemptions = 0
        self._usage = 0.0
        self._waiting = 0
        self._prompt_tokens = self._cached_tokens = self._prefilled_again = self._transferred_tokens = 0
        self._running: dict[int, int] = {}
        """Number of requests in the last step of each copy."""
        self._last_usage: dict[int, float] = {}
        """Share of the cache in use after the last step of each copy."""
        self._clears = 0

    def request_id(self) -> str:
        """Return an id for a new request. It begins with the number of times that the cache has been cleared."""
        return f"{self._clears}-{uuid.uuid4().hex}"

    def cleared(self) -> None:
        """Record that the cache was cleared, which preempted the running requests."""
        self._clears += 1
        self._last_usage.clear()

    def pop(self) -> CacheUse:
        """Return the counts since the last call and reset them."""
        use = CacheUse(
            usage=self._usage,
            preemptions=self._preemptions,
            waiting=self._waiting,
            fitting=self.fitting or 0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            prefilled_again=self._prefilled_again,
            transferred_tokens=self._transferred_tokens,
        )
        self._usage, self._preemptions, self._waiting, self.fitting = 0.0, 0, 0, None
        self._prompt_tokens = self._cached_tokens = self._prefilled_again = self._transferred_tokens = 0
        return use

    def note(self, copy: int, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Add vLLM's statistics of one step of one copy."""
        ended = iteration.finished_requests if iteration is not None else ()
        if scheduler is not None:
            self._running[copy] = scheduler.num_running_reqs
            self._usage = max(self._usage, scheduler.kv_cache_usage)
            self._waiting = max(self._waiting, scheduler.num_waiting_reqs)
            # Preempted requests look up the cache again when they resume; what it does not hold is computed twice.
            prefixes = scheduler.prefix_cache_stats
            self._prompt_tokens += prefixes.queries
            self._cached_tokens += prefixes.hits
            self._prefilled_again += prefixes.preempted_queries - prefixes.preempted_hits
            if (transfers := scheduler.connector_prefix_cache_stats) is not None:
                self._transferred_tokens += transfers.hits + transfers.preempted_hits
            # Requests that ended or were preempted in this step have given their blocks back, so the step before counts
            # too.
            fullest = max(scheduler.kv_cache_usage, self._last_usage.get(copy, 0.0))
            self._last_usage[copy] = scheduler.kv_cache_usage
            # Requests may also wait for a free place among `max_num_seqs`; only a full cache says how many fit.
            if scheduler.num_waiting_reqs and fullest >= FULL:
                self.fitting = sum(self._running.values()) + len(ended)
        for request in ended:
            # Each clear since the request began has preempted it at most once; what is left was for lack of room.
            clears = self._clears - int((request.request_id or "").partition("-")[0])
            self._preemptions += max(0, request.num_preemptions - clears)

    def logger(self) -> type[PrometheusStatLogger]:
        """Return a class of loggers that report here.

        They replace vLLM's Prometheus logger, which would compute hundreds of values at each step.
        """
        # A class rather than an instance: vLLM makes the loggers itself.
        stats = self

        class Logger(PrometheusStatLogger):
            def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
                """Register no metrics."""

            def record(
                self,
                scheduler_stats: SchedulerStats | None,
                iteration_stats: IterationStats | None,
                mm_cache_stats: MultiModalCacheStats | None = None,
                engine_idx: int = 0,
            ) -> None:
                stats.note(engine_idx, scheduler_stats, iteration_stats)

            def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
                """Record nothing."""

            def record_admission_rejection(self, reason: str) -> None:
                """Record nothing."""

            def log_engine_initialized(self) -> None:
                """Log nothing."""

        return Logger
