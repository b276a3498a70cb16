"""Advisories: conditions in a run's metrics that mean something is wrong, since when, and which flag to change."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from forge_rl.metrics.divergence import Divergence
from forge_rl.metrics.effects import Settings, effects_of

_FIRST = 5
"""Steps at the start of a run, whose median is what later steps are compared with."""
_RECENT = 5
_KEPT = 100
"""Latest values of each metric that are kept."""
_FAILURES = ("environment_error", "infrastructure_error", "judge_error")


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """A condition that holds since a step.

    Advisory(kind="truncated", since=12, text="61% of the episodes are truncated: raise --generator.max-tokens")
    """

    kind: str
    since: int
    """First of the steps in a row for which it holds."""
    text: str
    """The problem, and what to change."""

    def __str__(self) -> str:
        return f"since step {self.since}: {self.text}"


class Advisories:
    """Looks for advisories in the metrics of a run, step by step. Each is returned once while it lasts.

        advisories = Advisories(max_lag=1)
        for advisory in advisories.look_at(step, values):
            log.warn(str(advisory))

    Args:
        max_lag: the schedule's bound on the lag; 0 for none.
        settings: the run's settings by flag, whose effects are watched; see `effects`.
    """

    def __init__(self, *, max_lag: int = 0, settings: Settings | None = None) -> None:
        self._history = _History(max_lag)
        self._settings = settings or {}
        self._held: dict[str, list[int]] = {}
        """First step and number of steps in a row for which a condition holds, by its kind."""
        self.current: dict[str, Advisory] = {}
        """Advisories that hold now, by kind."""

    def rollback(self) -> None:
        """Forget all metrics, since a run takes another course after a rollback."""
        self._history, self._held, self.current = _History(self._history.max_lag), {}, {}

    def look_at(self, step: int, values: Mapping[str, object]) -> list[Advisory]:
        """Add the metrics of a step; returns the advisories that begin to hold.

        A condition keeps its state if the step lacks its metric.
        """
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._history.add(numbers)
        advisories = []
        for kind, (metric, patience, check) in _CONDITIONS.items():
            if any(name.startswith(metric) for name in numbers):
                # Divergence is checked first, and hides the conditions that follow from it.
                text = "" if "diverged" in self.current and kind in _EFFECTS_OF_DIVERGENCE else check(self._history)
                advisories += self._hold(kind, step, patience, text) if text else self._end(kind)
        for kind, effect, has_effect in effects_of(numbers, self._settings):
            # The streak with this step, for the text; `_hold` counts it below.
            steps = self._held.get(kind, [step, 0])[1] + 1
            advisories += self._end(kind) if has_effect else self._hold(kind, step, effect.steps, effect.text(steps))
        return advisories

    def _hold(self, kind: str, step: int, patience: int, text: str) -> list[Advisory]:
        """Count a step for which a condition holds; returns its advisory if it has just begun."""
        streak = self._held.setdefault(kind, [step, 0])
        streak[1] += 1
        if streak[1] < patience:
            return []
        advisory = Advisory(kind=kind, since=streak[0], text=text)
        begins, self.current[kind] = kind not in self.current, advisory
        return [advisory] if begins else []

    def _end(self, kind: str) -> list[Advisory]:
        """Note that a condition does not hold."""
        self._held.pop(kind, None)
        self.current.pop(kind, None)
        return []


def advisories_of(
    rows: Iterable[Mapping[str, object]], *, max_lag: int = 0, settings: Settings | None = None
) -> list[tuple[Advisory, int | None]]:
    """Return the advisories of a run, and the step at which each ended; None if it still holds at the end of the run.

    Args:
        rows: metrics of each step, with its "step", in order.
        max_lag, settings: as for `Advisories`.
    """
    advisories: list[tuple[Advisory, int | None]] = []
    watch = Advisories(max_lag=max_lag, settings=settings)
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        new_advisories = watch.look_at(step, {name: value for name, value in row.items() if name != "step"})
        advisories = [
            # The latest text of an advisory that still holds, as its numbers change.
            (watch.current.get(advisory.kind, advisory), None)
            if end is None and advisory.kind in watch.current
            else (advisory, step if end is None else end)
            for advisory, end in advisories
        ]
        advisories += [(advisory, None) for advisory in new_advisories]
    return advisories


class _History:
    """The first and the latest values of each metric."""

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag
        self._first: dict[str, list[float]] = {}
        self._latest: dict[str, deque[float]] = {}
        self.divergence = Divergence()

    def add(self, values: Mapping[str, float]) -> None:
        self.divergence.add(values)
        for name, value in values.items():
            first = self._first.setdefault(name, [])
            if len(first) < _FIRST:
                first.append(value)
            self._latest.setdefault(name, deque(maxlen=_KEPT)).append(value)

    @property
    def names(self) -> Iterable[str]:
        """All metrics so far."""
        return self._first

    def last(self, name: str) -> float | None:
        """Return the last value; None if there is none."""
        return self._latest[name][-1] if name in self._latest else None

    def first(self, name: str) -> float | None:
        """Return the run's first value; None if there is none."""
        return self._first[name][0] if name in self._first else None

    def above(self, name: str, bound: float) -> bool:
        """Return whether the last value is above a bound."""
        value = self.last(name)
        return value is not None and value > bound

    def start(self, name: str) -> float | None:
        """Return the median of the run's first values; None while there are too few to compare with."""
        first = self._first.get(name, [])
        # More values than those compared with: until then there is nothing to compare.
        return median(first) if len(first) == _FIRST and len(self._latest[name]) > _FIRST else None

    def recent(self, name: str) -> float | None:
        """Return the median of the last values."""
        return median([*self._latest[name]][-_RECENT:]) if name in self._latest else None

    def latest(self, name: str, steps: int) -> list[float]:
        """Return the values of the last steps, up to `steps` of them."""
        return [*self._latest.get(name, ())][-steps:]

    def before(self, name: str) -> float | None:
        """Return the median of the values before the last one; None if there are few."""
        values = [*self._latest.get(name, ())][:-1]
        return median(values) if len(values) >= _FIRST else None

    def starting_with(self, prefix: str) -> dict[str, float]:
        """Return the last value of each metric with this prefix, by the rest of its name."""
        return {
            name.removeprefix(prefix): values[-1] for name, values in self._latest.items() if name.startswith(prefix)
        }


def _length(history: _History, factor: float) -> tuple[float, float] | None:
    """Return the medians of `_compared` for the episodes' lengths; None in a run without rewards."""
    if history.last("reward/mean") is None:
        return None
    return _compared(history, "tokens/completion_mean", factor=factor, min_value=32)


def _compared(history: _History, name: str, *, factor: float, min_value: float = 0.0) -> tuple[float, float] | None:
    """Return the start and the recent median of a metric if it has grown by a factor, or shrunk if that is below 1."""
    start, recent = history.start(name), history.recent(name)
    if start is None or recent is None or start <= 0:
        return None
    changed = recent > factor * start if factor > 1 else recent < factor * start
    return (start, recent) if changed and max(recent, start) > min_value else None


def _uniform(history: _History) -> str:
    if not history.above("groups/uniform", 0.999):
        return ""
    return (
        "all advantages are 0, as those of equal rewards in a group are, and nothing is learned: choose tasks of "
        "another difficulty, raise --group-size, or set --curriculum.pools"
    )


def _truncated(history: _History) -> str:
    share = history.last("episodes/truncated")
    return f"{share:.0%} of the episodes are truncated: raise --generator.max-tokens" if share and share > 0.5 else ""


def _gap(history: _History) -> str:
    if (medians := _compared(history, "logprob_gap", factor=3, min_value=1e-3)) is None:
        return ""
    return (
        f"the gap between trainer and engines has grown from {medians[0]:.2g} to {medians[1]:.2g}, though both have "
        "the same weights: see run.explain_gap(), and set --trainer.dtype to the engines' dtype"
    )


def _drift(history: _History) -> str:
    # Logprobs of two versions of the weights, unlike the gap: staleness, not numerics.
    drift = history.recent("logprob_drift")
    if drift is None or drift < 0.3:
        return ""
    return (
        f"logprobs change by {drift:.2g} on average before tokens are trained on: lower --schedule.max-lag or "
        "--trainer.optimizer.lr"
    )


def _entropy(history: _History) -> str:
    if (medians := _compared(history, "entropy", factor=0.2)) is None:
        return ""
    return (
        f"entropy has collapsed from {medians[0]:.2g} to {medians[1]:.2g}, so answers hardly differ: lower "
        "--trainer.optimizer.lr, or add a bonus, --loss NAME:entropy_coef=0.001"
    )


def _ratio(history: _History) -> str:
    tail = history.last("ratio/p99")
    if tail is None or tail < 5:
        return ""
    return (
        f"1% of the tokens have ratios beyond {tail:.2g} (or its inverse), which a loss clips or blows up: lower "
        "--schedule.max-lag or --trainer.minibatches, or correct for it with --loss NAME:correction=PRESET"
    )


def _clipped(history: _History) -> str:
    share = history.last("loss/clipped")
    if share is None or share < 0.3:
        return ""
    return f"{share:.0%} of the tokens are clipped and teach nothing: lower --trainer.optimizer.lr or --trainer.epochs"


def _lag(history: _History) -> str:
    lag = history.last("lag/mean")
    if lag is None or history.max_lag < 2 or lag < 0.9 * history.max_lag:
        return ""
    return (
        f"the lag is {lag:.2g} on average, at its bound of {history.max_lag}, so engines wait for the trainer: give "
        "the trainer more devices, or lower --schedule.max-lag"
    )


def _stall(history: _History) -> str:
    seconds, usual = history.last("seconds/step"), history.before("seconds/step")
    if seconds is None or usual is None or seconds < 3 * usual or seconds < 1:
        return ""
    phases = {name: value for name, value in history.starting_with("seconds/").items() if name != "step"}
    slowest = f", most of it in phase {max(phases, key=lambda name: phases[name])}" if phases else ""
    return (
        f"a step took {seconds:.0f} s, usual are {usual:.0f} s{slowest}: see faults and stragglers in forge-rl report"
    )


def _queued(history: _History) -> str:
    waiting, decoding = history.last("queue/engine/mean"), history.last("queue/decoding/mean")
    if waiting is None or decoding is None or waiting < 4 or waiting < 2 * decoding:
        return ""
    return (
        f"{waiting:.0f} episodes wait for an engine while {decoding:.0f} decode: raise --generator.max-num-seqs, "
        "--generator.kv-cache-gib or --generator.replicas"
    )


def _cache(history: _History) -> str:
    usage, preemptions = history.last("generator/kv_cache_usage"), history.last("generator/preemptions")
    if usage is None or (usage < 0.99 and not preemptions):
        return ""
    preemption_note = (
        f", {preemptions:.0f} times a request lost its place and was computed again" if preemptions else ""
    )
    limit = history.last("generator/request_limit")
    limit_note = f"; an engine gets {limit:.0f} requests at a time" if limit is not None else ""
    return (
        f"the KV caches are full ({usage:.0%} in use{preemption_note}{limit_note}): raise "
        "--generator.gpu-memory-utilization (on CPU --generator.kv-cache-gib) or --generator.replicas, or lower "
        "--generator.max-num-seqs"
    )


def _part(history: _History) -> str:
    parts = history.starting_with("reward_parts/")
    total = sum(map(abs, parts.values()))
    name = max(parts, key=lambda name: abs(parts[name]), default="")
    if len(parts) < 2 or total <= 0 or abs(parts[name]) < 0.95 * total:
        return ""
    return f"{name} is {abs(parts[name]) / total:.0%} of the reward, the other parts do not matter: see --reward"


def _longer(history: _History) -> str:
    if (medians := _length(history, 2)) is None:
        return ""
    return (
        f"episodes have grown from {medians[0]:.0f} to {medians[1]:.0f} tokens: if the reward has not, add a part for "
        "length, such as --reward with overlong, or lower --generator.max-tokens"
    )


def _shorter(history: _History) -> str:
    if (medians := _length(history, 0.5)) is None:
        return ""
    return (
        f"episodes have shrunk from {medians[0]:.0f} to {medians[1]:.0f} tokens: read some, and check whether --reward "
        "pays for giving up early"
    )


def _variance(history: _History) -> str:
    high, low = history.last("reward/max"), history.last("reward/min")
    if high is None or low is None or high > low:
        return ""
    return f"all rewards of a batch are {high:g}: check --reward on answers in forge-rl show, or change the tasks"


def _repeated(history: _History) -> str:
    share = history.last("episodes/repeated")
    if share is None or share < 0.2:
        return ""
    return f"{share:.0%} of the answers end in a loop: lower --trainer.optimizer.lr, or give loops a lower --reward"


def _worse(history: _History) -> str:
    metric = next((name for name in history.names if name == "held_out" or "/avg@" in name), "")
    score, base = history.last(metric), history.first(metric)
    if score is None or base is None or score >= base - max(0.05, 0.15 * abs(base)):
        return ""
    return (
        f"the score {metric} is {score:.3g}, below the base model's {base:.3g}: compare with forge-rl compare, check "
        "--reward, and lower --trainer.optimizer.lr"
    )


def _tools(history: _History) -> str:
    share = history.last("tools/errors")
    if share is None or share < 0.3:
        return ""
    return f"{share:.0%} of the tool calls end in an error: read them in forge-rl show, and fix --env or its prompt"


def _failing(history: _History) -> str:
    # Schedules that work ahead count a batch's failures in the steps before it, so that counts alternate with 0.
    counts = {name: history.latest(f"outcomes/{name}", _RECENT) for name in _FAILURES}
    steps_with_failures = sum(any(step) for step in itertools.zip_longest(*counts.values(), fillvalue=0.0))
    if steps_with_failures < 2:
        return ""
    name = max(counts, key=lambda name: sum(counts[name]))
    return (
        f"episodes fail, {sum(counts[name]):g} in the last {_RECENT} steps by {name.replace('_', ' ')}s: see them with "
        f"forge-rl show RUN --outcome {name}, and faults in events.jsonl"
    )


def _skipped(history: _History) -> str:
    if not history.above("updates/skipped", 0):
        return ""
    return (
        "updates are skipped as gradients are not finite: lower --trainer.optimizer.lr, or set --trainer.dtype float32"
    )


def _gradient(history: _History) -> str:
    norm, usual = history.last("grad_norm"), history.before("grad_norm")
    if norm is None or usual is None or usual <= 0 or norm < 20 * usual:
        return ""
    return f"the gradient's norm is {norm:.2g}, usual is {usual:.2g}: lower --trainer.optimizer.max-grad-norm"


_EFFECTS_OF_DIVERGENCE = {
    *("uniform", "variance", "truncated", "repeated", "longer", "shorter"),
    *("gap", "drift", "entropy", "ratio", "clipped", "gradient"),
}
"""Conditions that a policy that has diverged also meets, whose advice would then mislead."""
_CONDITIONS: dict[str, tuple[str | tuple[str, ...], int, Callable[[_History], str]]] = {
    "diverged": ("grad_norm", 1, lambda history: history.divergence.text),
    "uniform": ("groups/uniform", 3, _uniform),
    "truncated": ("episodes/truncated", 3, _truncated),
    "gap": ("logprob_gap", 3, _gap),
    "drift": ("logprob_drift", 3, _drift),
    "entropy": ("entropy", 3, _entropy),
    "ratio": ("ratio/p99", 3, _ratio),
    "clipped": ("loss/clipped", 3, _clipped),
    "lag": ("lag/mean", 5, _lag),
    "stall": ("seconds/step", 1, _stall),
    "queued": ("queue/engine/mean", 5, _queued),
    "cache": ("generator/kv_cache_usage", 3, _cache),
    "part": ("reward_parts/", 5, _part),
    "longer": ("tokens/completion_mean", 3, _longer),
    "shorter": ("tokens/completion_mean", 3, _shorter),
    "variance": ("reward/max", 3, _variance),
    "repeated": ("episodes/repeated", 3, _repeated),
    "worse": (("held_out", "eval/"), 2, _worse),
    "tools": ("tools/errors", 3, _tools),
    "failing": ("outcomes/", 2, _failing),
    "skipped": ("updates/skipped", 3, _skipped),
    "gradient": ("grad_norm", 1, _gradient),
}
"""Start of each condition's metric names, number of consecutive steps for which it must hold, and its text."""
