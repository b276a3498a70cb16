"""Watches a run: its log, trace and faults, the rollouts' progress, and the calls that it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from forge_rl.errors import CheckpointError, Fault
from forge_rl.metrics import (
    Display,
    Max,
    Mean,
    PhaseClock,
    RolloutStatus,
    RunLog,
    Trace,
    Value,
    merge_all,
    reduce,
)
from forge_rl.metrics.sinks import RunOutcome
from forge_rl.metrics.status import event_of
from forge_rl.metrics.step_lines import writing
from forge_rl.run.records.json_files import write_json
from forge_rl.runtime.faults import Faults
from forge_rl.system.redaction import without_credentials


# A protocol and not `Checkpoint`, as records may not import checkpoints, which import them.
class SavedStep(Protocol):
    """A step that was saved, as `Checkpoint` is."""

    @property
    def step(self) -> int: ...
    @property
    def folder(self) -> Path: ...
    @property
    def model(self) -> Path: ...


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended, and how far it got."""

    outcome: RunOutcome = "finished"
    cause: str = ""
    """Cause of a failure, as text."""
    step: int
    """Number of finished steps."""
    seconds: float
    scores: Mapping[int, float] = field(default_factory=dict)
    """Score of the first evaluated set, by step."""
    checkpoint: SavedStep | None = None
    """The last checkpoint."""
    best: SavedStep | None = None


class RunMonitor:
    """Watches one run from its start: displays it, logs it, and writes its trace.

    Args:
        folder: folder of the run; gets `trace.json` and `summary.json`.
        clock: monotonic clock in seconds, shared with `phase_clock` and `faults`.
    """

    def __init__(
        self,
        folder: Path,
        display: Display,
        log: RunLog,
        phase_clock: PhaseClock,
        faults: Faults,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self.clock = phase_clock
        self.faults = faults
        self.folder = folder
        self.display = display
        self._begun = clock()
        self._trace: Trace | None = Trace(folder / "trace.json", clock=clock)
        self._depths: dict[str, Value] = {}
        self._status: Callable[[], RolloutStatus] | None = None
        self._missing: Callable[[], str] | None = None
        self._training: Callable[[], tuple[int, int] | None] | None = None
        # A resumed run is not finished, although an earlier end of it may have been written.
        (folder / "summary.json").unlink(missing_ok=True)
        phase_clock.ended.add(self._on_phase)
        faults.spans.add(self.span)
        faults.listeners.add(self._on_fault)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the display up to date while the body runs; processes that exit afterwards are not faults."""
        watch = self.display.watch(
            waiting=self.waiting_for, status=self.poll, training=self._progress, tell=self.log.warn
        )
        watching = asyncio.get_running_loop().create_task(watch)
        try:
            yield
        finally:
            self.faults.closing = True
            watching.cancel()

    def follow_training(self, progress: Callable[[], tuple[int, int] | None]) -> None:
        """Watch training too: `progress` returns the finished and the total microbatches of the current step; None
        between steps."""
        self._training = progress

    def _progress(self) -> tuple[int, int] | None:
        return self._training() if self._training is not None else None

    def follow(self, status: Callable[[], RolloutStatus], missing: Callable[[], str]) -> None:
        """Watch the rollouts too: `status` returns their progress, `missing` what the next batch still needs."""
        self._status, self._missing = status, missing

    def waiting_for(self) -> str:
        """Describe what the controller is waiting for; "" if nothing is in flight."""
        # While episodes are generated, many calls are always in flight: what the batch lacks says more than any of
        # them.
        if self._missing is not None and self.clock.current in ("rollout", "evaluate"):
            return self._missing()
        waiting = self.faults.waiting_for()
        if waiting is None:
            return ""
        call, count = waiting
        replica = "" if call.replica is None else f" replica {call.replica}"
        more_calls = f", and {count - 1} more calls" if count > 1 else ""
        return f"{call.service}{replica}, call {call.method}{more_calls}"

    def poll(self) -> RolloutStatus | None:
        """Sample the queue depths and return the rollouts' status; None before `follow`."""
        if self._status is None:
            return None
        status = self._status()
        depths = {"decoding": status.episodes_running, "engine": status.queue, "tools": status.episodes_waiting}
        for name, depth in depths.items():
            # Mean and maximum merge from poll to poll, so that a step reports both over all of its polls.
            sample: dict[str, Value] = {f"queue/{name}/mean": Mean(depth, 1), f"queue/{name}/max": Max(depth)}
            self._depths = merge_all([self._depths, sample])
            self._draw(functools.partial(Trace.counter, name=f"queue/{name}", value=depth))
        return status

    def pop_depths(self) -> dict[str, float]:
        """Return the mean and maximum depth of each queue since the last call."""
        self.poll()
        depths, self._depths = self._depths, {}
        return reduce(depths)

    def recoveries(self) -> list[Fault]:
        """List all faults so far and their outcomes, with times since the run began."""
        # Monotonic seconds mean nothing outside of this process.
        return [
            replace(
                fault,
                at_s=round(fault.at_s - self._begun, 3),
                recovered_s=None if fault.recovered_s is None else round(fault.recovered_s, 3),
            )
            for fault in self.faults.seen
        ]

    def span(self, lane: str, name: str, begin_s: float, end_s: float, overlapping: bool = False) -> None:
        """Draw a span in the trace."""
        self._draw(lambda trace: trace.span(lane, name, begin_s, end_s, overlapping=overlapping))

    def summarise(self, end: RunEnd, *, show: bool = True) -> None:
        """Write the summary, which says how the run ended, and if `show`, show it with the places of its files."""
        folder, recoveries = self.folder, self.recoveries()
        scores, checkpoint, best = end.scores, end.checkpoint, end.best
        # A cause may quote a URL with its password.
        summary = {
            "outcome": end.outcome,
            **({"cause": without_credentials(end.cause)} if end.cause else {}),
            "score_before": scores[min(scores)] if scores else None,
            "score_after": scores[max(scores)] if scores else None,
            "best": best and {"step": best.step, "score": scores.get(best.step), "checkpoint": str(best.folder)},
            "steps": end.step,
            "seconds": round(end.seconds, 1),
            "faults": [asdict(recovery) for recovery in recoveries],
        }
        try:
            with writing(folder / "summary.json"):
                write_json(folder / "summary.json", summary)
        except CheckpointError as error:
            # A finished run without a summary would be taken for a stopped one; any other end has its own cause.
            if end.outcome == "finished":
                raise
            self.log.warn(f"no summary: {error}")
        self.log.end(end.outcome, end.cause)
        if not show:
            return
        places: dict[str, object] = {
            "run folder": folder,
            "metrics": folder / "metrics.jsonl",
            "timeline": f"{folder / 'trace.json'} (open it in ui.perfetto.dev)",
        }
        if checkpoint is not None:
            places["model"] = checkpoint.model
        if best is not None and best != checkpoint:
            places["best model"] = best.model
        if (folder / "tensorboard").is_dir():
            places["curves"] = f"tensorboard --logdir {folder / 'tensorboard'}"
        self.display.summary(places, recoveries)

    def close(self) -> None:
        """Close the trace."""
        self.clock.ended.discard(self._on_phase)
        self.faults.spans.discard(self.span)
        self.faults.listeners.discard(self._on_fault)
        self._draw(lambda trace: trace.close())

    def _on_phase(self, name: str, begin: float, end: float) -> None:
        self.span("controller", name, begin, end)

    def _on_fault(self, fault: Fault) -> None:
        self.log.event(*event_of(fault))
        if fault.recovered_s is None:
            self._draw(lambda trace: trace.instant(fault.name, "fault", cause=fault.cause))
        else:
            self.span(fault.name, "recovery", fault.at_s, fault.at_s + fault.recovered_s, True)

    def _draw(self, draw: Callable[[Trace], None]) -> None:
        """Draw into the trace; if that fails, the run continues without one."""
        if self._trace is None:
            return
        try:
            draw(self._trace)
        except CheckpointError as error:
            self._trace = None
            self.log.warn(f"the trace ends here: {error}")
