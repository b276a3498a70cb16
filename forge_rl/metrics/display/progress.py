"""What the console knows of a run: frozen, so that the display's thread reads it while the controller goes on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from forge_rl.metrics.sinks import Level, RunInfo
from forge_rl.metrics.status import RolloutStatus

REWARD, LOSS, GAP, GRAD = "reward/mean", "loss", "logprob_gap", "grad_norm"
"""Metrics that the console shows by name, when a step has them."""
HELD_OUT = "held_out"
"""`held_out`, or `held_out/<source>`: the score on tasks that are never trained on."""

State = Literal["starting", "ready", "failed"]


@dataclass(frozen=True, kw_only=True)
class Startup:
    """A service that starts, or has started."""

    state: State
    detail: str
    begun: float
    ended: float | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, at a reading of the clock."""

    text: str
    level: Level
    at: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """All that is shown. Times are readings of one monotonic clock."""

    info: RunInfo | None = None
    begun: float = 0.0
    step: int = 0
    training: bool = False
    """Whether a phase has begun; from then on only services that are not ready are shown."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each step."""
    held_out: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """By name: the scores so far."""
    last: Mapping[str, float] = field(default_factory=dict)
    """The values of the last step that had a duration."""
    step_seconds: tuple[float, ...] = ()
    """Durations of the last few steps."""
    services: Mapping[str, Startup] = field(default_factory=dict)
    jobs: Mapping[str, float] = field(default_factory=dict)
    """Long jobs that are under way, with the fraction done."""
    waiting: tuple[str, float] | None = None
    stalled: tuple[str, float] | None = None
    """What is waited for while nothing moves, and since when nothing has."""
    rollout: RolloutStatus | None = None
    looked: float | None = None
    """When the controller last looked at itself; None if it does not."""
    events: tuple[Event, ...] = ()
    """The last few."""
    warnings: int = 0
    faults: int = 0

    def logged(self, step: int, values: Mapping[str, float]) -> Progress:
        """What is known after a step's values; a step may be logged in parts."""
        held_out = dict(self.held_out)
        for name, score in held_out_scores(values).items():
            held_out[name] = (*held_out.get(name, ()), score)
        seconds = values.get("seconds/step")
        rewards = (*self.rewards, values[REWARD]) if REWARD in values else self.rewards
        whole = step > 0 and seconds is not None
        return replace(
            self,
            step=step,
            rewards=rewards,
            held_out=held_out,
            last=dict(values) if whole or not self.last else {**self.last, **values},
            step_seconds=(*self.step_seconds, seconds)[-10:] if whole and seconds is not None else self.step_seconds,
            waiting=None,
            stalled=None,
        )

    def happened(self, event: Event) -> Progress:
        return replace(
            self,
            events=(*self.events, event)[-5:],
            warnings=self.warnings + (event.level == "warning"),
            faults=self.faults + (event.level == "fault"),
        )

    def service(self, name: str, state: State, detail: str, now: float) -> Progress:
        before = self.services.get(name)
        begun = before.begun if before is not None and before.ended is None else now
        row = Startup(state=state, detail=detail, begun=begun, ended=None if state == "starting" else now)
        return replace(self, services={**self.services, name: row})

    def job(self, name: str, fraction: float) -> Progress:
        jobs = {other: done for other, done in self.jobs.items() if other != name}
        return replace(self, jobs=jobs if fraction >= 1.0 else {**jobs, name: fraction})

    def eta_s(self, elapsed: float = 0.0) -> float | None:
        """Seconds to the last step, by the median of recent steps, or None while nothing is known.

        Args:
            elapsed: seconds already spent in the step under way.
        """
        if self.info is None or not self.step_seconds:
            return None
        left = max(self.info.steps - self.step, 0)
        median = statistics.median(self.step_seconds)
        return median * left - min(elapsed, median) if left else 0.0


def held_out_scores(values: Mapping[str, float]) -> dict[str, float]:
    """The held-out scores among a step's values, by the name that the console gives them: "" for the only one."""
    return {
        name.removeprefix(HELD_OUT).removeprefix("/"): value
        for name, value in values.items()
        if (name == HELD_OUT or name.startswith(f"{HELD_OUT}/")) and not math.isnan(value)
    }


def phases(values: Mapping[str, float]) -> dict[str, tuple[float, float | None]]:
    """By phase, in the order measured: seconds, and tokens a second where tokens were counted."""
    prefix = "seconds/"
    names = [name.removeprefix(prefix) for name in values if name.startswith(prefix) and name != "seconds/step"]
    return {name: (values[prefix + name], values.get(f"tokens_per_s/{name}")) for name in names}


def busy(values: Mapping[str, float], phase: str = "") -> dict[str, dict[str, float]]:
    """Busy share of each device in the step, or in a phase of it, grouped by service:
    {"generator": {"generator/0": 0.8, ...}, ...}."""
    prefix = f"busy_{phase}/" if phase else "busy/"
    services: dict[str, dict[str, float]] = {}
    for name, share in values.items():
        if name.startswith(prefix):
            device = name.removeprefix(prefix)
            services.setdefault(device.split("/")[0], {})[device] = share
    return services
