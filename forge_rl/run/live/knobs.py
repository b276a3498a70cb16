"""Knobs: numbers of a run that clients and code may change while it runs, with their bounds. Imports nothing heavy.

A live change overrides an unchanged flag when the run is resumed; a flag that the resuming command changes overrides
the live change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from forge_rl.errors import ConfigError, ForgeError
from forge_rl.system.terminal import visible


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Type and limits of a number in a live run; its own settings class may limit it further."""

    kind: type[int] | type[float] = int
    """Type of the value. Whole numbers count as floats; booleans do not count as numbers."""
    above: float = -math.inf
    at_most: float = math.inf
    label: str = ""
    """Name in events and errors."""
    advice: str = ""
    """Further hint if a value is refused."""

    def accepts_type(self, value: object) -> bool:
        """Return whether a value, such as one from a file, is a number of this type."""
        # `type` and not `isinstance`, as a bool is an int.
        return type(value) is int or (self.kind is float and type(value) is float)

    def checked(self, value: Any) -> int | float:
        """Return a new value, as a number that JSON can hold.

        Raises:
            ConfigError: it is not a number of this type within the limits.
        """
        if isinstance(value, Real) and not isinstance(value, bool):  # NumPy's numbers too
            number = operator.index(value) if isinstance(value, Integral) else float(value)
        else:
            number = math.nan
        # Written so that NaN, which fails each comparison, is refused.
        if not self.accepts_type(number) or not self.above < number <= self.at_most:
            hint = "set it to a whole number" if self.kind is int else "set it to a number"
            hint += f" above {self.above:g}" * (self.above > -math.inf)
            hint += f", at most {self.at_most:.9g}" * (self.at_most < math.inf)
            raise ConfigError(f"{self.label} is set to {value!r}", hint=hint + self.advice)
        return number


BOUNDS: Mapping[str, Mapping[str, Bounds]] = {
    "schedule": {
        "max_lag": Bounds(at_most=1000, label="schedule max_lag"),
        "over_sampling": Bounds(kind=float, label="schedule over_sampling"),
        "max_episodes": Bounds(at_most=1_000_000, label="schedule max_episodes"),
    },
    "optimizer": {
        "lr": Bounds(
            kind=float,
            above=0,
            at_most=0.1,
            label="learning rate",
            advice="; to stop for a while, pause the run instead",
        ),
    },
    "replicas": {"engines": Bounds(label="engines"), "environments": Bounds(label="environments")},
}
"""Bounds of each number that a knob has, by the names with which clients set it."""


@dataclass(kw_only=True)
class Knob:
    """Numbers that are set together: all of them, or none if one is refused.

    def set_lr(values: Mapping[str, Any]) -> None:
        trainer.lr = values["lr"]

    knob = Knob(name="optimizer", get=lambda: {"lr": trainer.lr}, set=set_lr, changed=log, tell=log)
    await knob.write({"lr": 1e-5})
    """

    name: str
    """Name in `BOUNDS`."""
    get: Callable[[], Mapping[str, Any]]
    """Returns the current values, as JSON; may include values that cannot be set."""
    set: Callable[[Mapping[str, Any]], None]
    """Sets values within bounds; must change nothing if it raises a ForgeError."""
    changed: Callable[[str], None]
    """Called with a line for the events after each change."""
    tell: Callable[[str], None]
    """Called with a line for the events if a resumed run does not keep a change."""
    from_when: str = ""
    """When a change takes effect, for its line."""
    moves: bool = False
    """Whether the values also change as hosts join or leave: only values that were set then count as changes, and a
    resumed run restores each on its own."""
    _written: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.given: dict[str, Any] = self._numbers()
        """Values by this command's flags."""

    def read(self) -> dict[str, Any]:
        return dict(self.get())

    async def write(self, values: Mapping[str, Any]) -> None:
        self.put(values)

    def put(self, values: Mapping[str, Any]) -> None:
        """Set values and report the change; an empty mapping does nothing.

        Raises:
            ConfigError: a name is unknown, or a value refused; nothing has then changed.
        """
        numbers: dict[str, int | float] = {}
        for name, value in values.items():
            if name not in self.given:
                names = ", ".join(self.given) or "nothing: the run generates no episodes"
                raise ConfigError(
                    f"the run's {self.name} {name!r} cannot change in a live run", hint=f"set one of {names}"
                )
            numbers[name] = self._bounds[name].checked(value)
        if not numbers:
            return
        # All values have passed by now; `set` may still refuse them, and then nothing was written or reported.
        old_values = self._numbers()
        self.set(numbers)
        self._written |= numbers
        lines = (f"{self._bounds[name].label} {old_values[name]:g} -> {value:g}" for name, value in numbers.items())
        self.changed(", ".join(lines) + self.from_when)

    def changes(self) -> dict[str, Any]:
        """Return the live changes to save."""
        values = self._written if self.moves else self._numbers()
        return {name: value for name, value in values.items() if value != self.given[name]}

    async def resume(self, old_flags: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Reapply the live changes of an earlier process.

        Args:
            old_flags: `given` of that process.
        """
        lasting_changes: dict[str, Any] = {}
        for name, live in changes.items():
            # Three values decide: this command's flag, the earlier command's, and the live change to that one.
            flag, label = self.given.get(name, live), self._bounds[name].label
            if flag == live:
                continue
            if flag != old_flags.get(name):
                self.tell(f"the current flags set {label} {flag:g}, which overrides the live change to {live:g}")
            else:
                lasting_changes[name] = live
        # Numbers of replicas are set one by one: other hosts may have room for some of them and not for others.
        if self.moves:
            steps = [{name: value} for name, value in lasting_changes.items()]
        else:
            steps = [lasting_changes] if lasting_changes else []
        for values in steps:
            try:
                self.put(values)
            except ForgeError as error:  # accepted by an earlier version, or there are other hosts now
                settings = ", ".join(f"{self._bounds[name].label} {value:g}" for name, value in values.items())
                self.tell(f"the live change to {settings} no longer applies: {error.message}")

    @property
    def _bounds(self) -> Mapping[str, Bounds]:
        return BOUNDS[self.name]

    def _numbers(self) -> dict[str, Any]:
        values = self.get()
        return {name: values[name] for name in self._bounds if name in values}


class LiveSchedule:
    """The schedule of a live run: settings are readable, and bounds can be set.

        run.schedule.max_lag = 2  # from the next batch on

    A lower bound applies from the next batch on: episodes in flight that are too old for it are replaced.

    Args:
        read: returns the settings by name.
        write: sets bounds by name; raises a ForgeError for a setting that cannot change or a value out of range.
    """

    max_lag: int
    over_sampling: float
    max_episodes: int

    def __init__(self, read: Callable[[], Mapping[str, Any]], write: Callable[[Mapping[str, Any]], None]) -> None:
        # Bypasses __setattr__, which would write a setting of the run.
        vars(self).update(_read=read, _write=write)

    def __getattr__(self, name: str) -> Any:
        # Names that begin with an underscore are asked for by copying, pickling and IPython, and are no settings.
        settings = vars(self)["_read"]() if not name.startswith("_") else {}
        if name not in settings:
            raise AttributeError(f"the schedule has no {name!r}")
        return settings[name]

    def __setattr__(self, name: str, value: object) -> None:
        vars(self)["_write"]({name: value})

    def __repr__(self) -> str:
        settings = vars(self)["_read"]()
        return visible(
            "\n".join([f"Schedule  {settings['kind']}", *(f"  {name} {value}" for name, value in settings.items())])
        )


def is_live_state(state: object) -> bool:
    """Return whether a value from a possibly corrupt file has the form that `LiveSettings.state` returns."""
    match state:
        case {
            "mixture": {"given": {"weights": dict(weights), "adapting": dict()}, "changes": dict()},
            **other_knobs,
        }:
            return _are_numbers(weights) and all(_is_knob_state(name, knob) for name, knob in other_knobs.items())
    return False


def _is_knob_state(name: object, state: object) -> bool:
    match name, state:
        case str(knob), {"given": dict(flag_values), "changes": dict(changes)} if knob in BOUNDS:
            return _are_bounded(knob, flag_values, changes)
        case "reward", {"given": {"reward": str()}, "changes": {"reward": {"name": str(), "texts": [*texts]}}}:
            return all(isinstance(text, str) for text in texts)
        case "reward", {"given": {"reward": str()}, "changes": dict(changes)}:
            return not changes
    return False


def _are_bounded(name: str, flag_values: Mapping[str, object], changes: Mapping[str, object]) -> bool:
    """Return whether values from a possibly corrupt file have the form of a knob's `given` and `changes`."""
    bounds = BOUNDS[name]
    values = [*flag_values.items(), *changes.items()]
    return changes.keys() <= flag_values.keys() and all(
        number in bounds and bounds[number].accepts_type(value) for number, value in values
    )


def _are_numbers(values: Mapping[str, object]) -> bool:
    return all(type(number) in (int, float) for number in values.values())
