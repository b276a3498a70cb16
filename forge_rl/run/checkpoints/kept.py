"""Objects of a recipe whose state goes with the run's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from forge_rl.errors import ConfigError


class Stateful(Protocol):
    """An object that a recipe keeps from step to step, such as `AdaptiveEntropy` or `RoleBaselines`."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state, as JSON."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Replace the state with one of `state_dict`."""
        ...


class KeptObjects:
    """Saves and restores a recipe's objects by name.

    An object may be added after a checkpoint was loaded: its state waits for it.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._first: dict[str, Any] = {}
        """State of each object when it was added."""
        self._waiting: dict[str, Any] = {}
        """Restored states of objects that have not been added yet."""

    def add(self, name: str, thing: Stateful) -> None:
        """Add an object, and load its state if there is one.

        Raises:
            ConfigError: its state is not JSON.
        """
        self._first[name] = _copied(name, thing)
        self._objects[name] = thing
        if name in self._waiting:
            thing.load_state_dict(self._waiting.pop(name))

    def state(self) -> dict[str, Any]:
        """Return the states of all objects by name.

        Raises:
            ConfigError: one is not JSON.
        """
        # States that still wait are saved again, or a run that never adds their objects would lose them.
        return self._waiting | {name: _copied(name, thing) for name, thing in self._objects.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load states returned by `state`; an object without one returns to the state that it was added with."""
        for name, thing in self._objects.items():
            thing.load_state_dict(states.get(name, self._first[name]))
        self._waiting = {name: state for name, state in states.items() if name not in self._objects}


def _copied(name: str, thing: Stateful) -> Any:
    """Return a copy of an object's state in the form that a resumed run loads.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(thing.state_dict()))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the state of {name} is not JSON: {error}",
            hint="return numbers, strings, lists and dicts, such as float(x) for a NumPy number",
        ) from error
