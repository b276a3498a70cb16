"""State of a run for the display: curves, last values, rollouts, and the pending call."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from forge_rl.metrics.display.curve import Curve
from forge_rl.metrics.display.format import duration, number
from forge_rl.metrics.sinks import RunInfo, Steps
from forge_rl.metrics.status import RolloutStatus
from forge_rl.types import Batch

REWARD = "reward/mean"
_REWARD_OF_ALL = "completed/reward_mean"
UPDATE = {"loss": "loss", "gap": "logprob_gap", "grad": "grad_norm"}
"""Metrics of an update that the display shows when a step has them: label and name."""
HELD_OUT = "held_out"
"""`held_out`, or `held_out/<source>`: the score on tasks that are never trained on. With several sets the metric is
`eval/<set>/avg@<k>`."""

_LEAST_RATED_S = 0.1
_ANSWER_LETTERS = 240
_ERRORS = ("outcomes/environment_error", "outcomes/infrastructure_error", "outcomes/judge_error")


class Pause(Protocol):
    """A pause on request, as far as the display shows it."""

    @property
    def paused(self) -> bool: ...

    @property
    def lasts_s(self) -> float: ...


@dataclass(kw_only=True)
class RunState:
    """State of the displayed run.

    The drawing thread reads it concurrently with the controller, so its fields are replaced, never changed in place.
    """

    info: RunInfo | None = None
    step: int = 0
    rewards: Curve = field(default_factory=Curve)
    """Mean reward of each step."""
    held_out: Mapping[str, Curve] = field(default_factory=dict)
    """Scores so far by source; "" for the overall score."""
    last: Mapping[str, float] = field(default_factory=dict)
    """Values of the last step, and those logged since."""
    step_seconds: tuple[float, ...] = ()
    """Durations of the last few steps."""
    rollout: RolloutStatus | None = None
    waiting: tuple[str, float] | None = None
    """Name of a stalled run's pending call, and the time of its last progress."""
    polled_at: float | None = None
    """Time of the controller's last poll; None while it does not poll."""
    pause: Pause | None = None
    """The run's pause; None before the first."""
    sample: tuple[str, str] | None = None
    """An answer of the last batch: source, task and reward, and its shortened text."""
    warnings: int = 0
    faults: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    """Number of failed episodes so far by outcome: `environment error`, `judge error`."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step, which may come in several calls."""
        self.step, self.waiting = max(self.step, step), None  # an evaluation's values come late
        if REWARD in values:
            self.rewards = self.rewards.extended(step, values[REWARD])
        for name, score in held_out_scores(values).items():
            self.held_out = {**self.held_out, name: self.held_out.get(name, Curve()).extended(step, score)}
        # Only the end of a step has its duration; values that come later are added to it.
        if step > 0 and "seconds/step" in values:
            self.step_seconds = (*self.step_seconds, values["seconds/step"])[-10:]
            self.last = dict(values)
        else:
            self.last = {**self.last, **values}
        counts = {name.partition("/")[2].replace("_", " "): round(values[name]) for name in _ERRORS if values.get(name)}
        self.errors = {name: self.errors.get(name, 0) + counts.get(name, 0) for name in {**self.errors, **counts}}

    def show_answer_of(self, step: int, batch: Batch) -> None:
        """Keep one answer of a batch, from another place in the batch at each step."""
        episode = batch.episodes[step * 7 % len(batch.episodes)]
        reward = "" if episode.score is None else f"reward {number(episode.reward)}"
        title = ", ".join(filter(None, (episode.task.source, str(episode.task.id)[:40], reward)))
        text = " ".join(episode.text[:_ANSWER_LETTERS].split()) + ("…" if len(episode.text) > _ANSWER_LETTERS else "")
        self.sample = title, text

    def restore(self, step: int, history: Steps) -> None:
        """Continue an earlier process after a step; `history` holds the entries up to it."""
        self.rewards, self.held_out, self.step_seconds, self.errors = Curve(), {}, (), {}
        self.last, self.sample = {}, None
        for past, values in history:
            self.log(past, values)
        self.step = step

    def rollback(self, step: int) -> None:
        """Return to an earlier step. Episodes that failed after it stay counted."""
        self.rewards = self.rewards.cut(step)
        curves = {name: curve.cut(step) for name, curve in self.held_out.items()}
        self.held_out = {name: curve for name, curve in curves.items() if curve.points}
        self.last, self.sample, self.step = {}, None, step

    def eta_s(self, elapsed_s: float = 0.0) -> float | None:
        """Estimate the remaining seconds from the median of recent steps, less `elapsed_s`; None if unknown."""
        if self.info is None or not self.step_seconds:
            return None
        left = max(self.info.steps - self.step, 0)
        median = statistics.median(self.step_seconds)
        # The current step is among those left; its time so far is deducted, at most a whole step.
        return median * left - min(elapsed_s, median) if left else 0.0


def reward_of_all_groups(values: Mapping[str, float]) -> str:
    """Format the mean reward of all completed groups; "" if the groups trained on have the same."""
    of_all, of_trained = (number(values[name]) if name in values else "" for name in (_REWARD_OF_ALL, REWARD))
    return of_all if of_all != of_trained else ""


def held_out_scores(values: Mapping[str, float]) -> dict[str, float]:
    """Pick the held-out scores out of a step's values, by source or set; "" for the overall score of a single set."""
    scores = {
        name.removeprefix(HELD_OUT).removeprefix("/"): value
        for name, value in values.items()
        if name.partition("/")[0] == HELD_OUT and not math.isnan(value)
    }
    if scores:
        return scores
    sets = {tuple(name.split("/")): value for name, value in values.items() if name.startswith("eval/")}
    return {
        parts[1]: value
        for parts, value in sets.items()
        if len(parts) == 3 and parts[2].startswith("avg@") and not parts[2].endswith("_stderr")
    }


def phases(values: Mapping[str, float]) -> dict[str, str]:
    """Format each phase's time and, where tokens were counted, its tokens per second, in the order measured.

    The rate is omitted for phases under 0.1 s, such as the rollout of a batch that was already complete.
    """
    texts: dict[str, str] = {}
    for name, seconds in values.items():
        kind, _, phase = name.partition("/")
        if kind == "seconds" and phase != "step":
            rate = values.get(f"tokens_per_s/{phase}")
            texts[phase] = duration(seconds) + (
                "" if rate is None or seconds < _LEAST_RATED_S else f" {rate:,.0f} tok/s"
            )
    return texts
