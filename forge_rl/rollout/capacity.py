"""Engine capacity: concurrent requests per engine, free slots, and utilisation."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping


class EngineCapacity:
    """Tracks the capacity and load of the serving engines; `clock` (seconds) measures utilisation."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.engines: dict[int, int] = {}
        """Maximum concurrent requests of each serving engine."""
        self.slots = 0
        """Maximum concurrent requests of all engines together."""
        self.paused = False
        self.evaluating = False
        """True while an evaluation is awaited: its episodes then decode even while others are paused."""
        self._clock = clock
        self._load: Counter[int] = Counter()
        self._used = 0
        self._free: list[tuple[int, int]] = []
        """Heap of (load minus budget, engine); may contain stale entries."""
        self._offers: set[tuple[int, int]] = set()
        """Entries in the heap, to keep them unique."""
        self._busy = self._offered = self._unpaused_s = self._evaluated_s = 0.0
        self._counted = clock()

    def set_engines(self, budgets: Mapping[int, int]) -> None:
        """Replace the serving engines and their maximum concurrent requests."""
        self._count()
        self.engines = dict(budgets)
        self.slots = sum(budgets.values())
        self._free = []
        self._offers.clear()
        for engine in budgets:
            self._offer(engine)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume; while paused, no time is counted and no episode of a batch gets an engine."""
        self._count()
        self.paused = paused

    def set_evaluating(self, evaluating: bool) -> None:
        """Record whether an evaluation is awaited from now on."""
        self._count()
        self.evaluating = evaluating

    def choose(self, preferred: Iterable[int | None]) -> int | None:
        """Return the first preferred engine with a free slot, else the engine with the most; None if all are full."""
        for engine in preferred:
            if engine is not None and self._load[engine] < self.engines.get(engine, 0):
                return engine
        while self._free:
            surplus, engine = self._free[0]
            # Entries are not updated when a load changes; one that differs from its engine's load is stale, and a newer
            # one is in the heap.
            if surplus < 0 and engine in self.engines and surplus == self._load[engine] - self.engines[engine]:
                return engine
            self._offers.remove(heapq.heappop(self._free))
        return None

    def add_requests(self, engine: int, requests: int) -> None:
        """Add to the number of requests that an engine decodes; negative to subtract."""
        self._count()
        self._load[engine] += requests
        self._used += requests
        self._offer(engine)

    def running_s(self) -> float:
        """Return the seconds so far, without pauses."""
        return self._unpaused_s if self.paused else self._unpaused_s + self._clock() - self._counted

    def evaluation_s(self) -> float:
        """Return the seconds so far in which evaluations could decode: not paused, or awaiting an evaluation."""
        stopped = self.paused and not self.evaluating
        return self._evaluated_s if stopped else self._evaluated_s + self._clock() - self._counted

    def pop_busy(self) -> tuple[float, float]:
        """Return busy and available request-seconds since the last call, without pauses."""
        self._count()
        request_s = self._busy, self._offered
        self._busy = self._offered = 0.0
        return request_s

    def _offer(self, engine: int) -> None:
        if engine not in self.engines:
            return
        offer = (self._load[engine] - self.engines[engine], engine)
        if offer not in self._offers:
            self._offers.add(offer)
            heapq.heappush(self._free, offer)

    def _count(self) -> None:
        now_s = self._clock()
        if not self.paused or self.evaluating:
            self._evaluated_s += now_s - self._counted
        if not self.paused:
            self._unpaused_s += now_s - self._counted
            self._busy += self._used * (now_s - self._counted)
            # More may be in use than offered, after an engine left or its budget was lowered; the share of busy slots
            # stays within 1.
            self._offered += max(self.slots, self._used) * (now_s - self._counted)
        self._counted = now_s
