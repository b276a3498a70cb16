"""Solve rates of tasks, for a bounded number of tasks; 12 bytes each in a checkpoint."""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Mapping

import numpy as np


class SolveRates:
    """Rates from 0 to 1 by the 64-bit key of a task. Of more than `max_tasks` tasks, the oldest are forgotten.

        rates = SolveRates(max_tasks=1_000_000)
        rates[17] = 0.25
        rates.get(17)  # 0.25, rounded to float32

    Args:
        max_tasks: maximum number of tasks; memory grows with the tasks seen, about 150 bytes for each.
    """

    def __init__(self, max_tasks: int) -> None:
        self._max_tasks = max_tasks
        self._places: dict[int, int] = {}
        """Index of each key in the arrays."""
        self._keys, self._rates = array("Q"), array("f")
        self._oldest = 0
        """Index of the next key to be forgotten, once there are `max_tasks`."""

    def __len__(self) -> int:
        return len(self._keys)

    def get(self, key: int) -> float | None:
        """Return a task's rate, or None if it is unknown."""
        place = self._places.get(key)
        return None if place is None else self._rates[place]

    def __setitem__(self, key: int, rate: float) -> None:
        place = self._places.get(key)
        if place is None and len(self._keys) < self._max_tasks:
            place = len(self._keys)
            self._keys.append(key)
            self._rates.append(rate)
        elif place is None:
            # A ring: the oldest entry's place is used again, so nothing moves.
            place, self._oldest = self._oldest, (self._oldest + 1) % self._max_tasks
            del self._places[self._keys[place]]
            self._keys[place] = key
        self._places[key] = place
        self._rates[place] = rate

    def count(self, low: float, high: float) -> tuple[int, int, int]:
        """Return the number of tasks with rates up to `low`, between, and from `high` on."""
        rates = np.array(self._rates)
        below, above = int((rates <= low).sum()), int((rates >= high).sum())
        return below, len(rates) - below - above, above

    def state(self) -> dict[str, object]:
        """Return all keys and rates as JSON, from the oldest to the newest."""
        # Rolled so that the oldest is first: `restored` can then cut to the newest and start its ring at 0.
        keys, rates = (np.roll(np.array(values), -self._oldest) for values in (self._keys, self._rates))
        return {"keys": _text(keys.astype("<u8")), "rates": _text(rates.astype("<f4"))}

    @classmethod
    def restored(cls, state: object, max_tasks: int) -> SolveRates:
        """Return the rates of a saved state; if it has more than `max_tasks` tasks, the newest ones.

        Raises:
            ValueError: the state is malformed.
        """
        if not isinstance(state, Mapping):
            raise ValueError("the solve rates are not a mapping")
        keys, rates = _array(state.get("keys"), "<u8"), _array(state.get("rates"), "<f4")
        if len(keys) != len(rates):
            raise ValueError(f"there are {len(keys)} keys, but {len(rates)} solve rates")
        if not bool(((rates >= 0) & (rates <= 1)).all()):  # false for NaN, too
            raise ValueError("a solve rate is not from 0 to 1")
        if len(np.unique(keys)) != len(keys):
            raise ValueError("a task has several solve rates")
        solve_rates = cls(max_tasks)
        solve_rates._keys = array("Q", keys[-max_tasks:].tolist())
        solve_rates._rates = array("f", rates[-max_tasks:].tolist())
        solve_rates._places = {key: place for place, key in enumerate(solve_rates._keys)}
        return solve_rates


def _text(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.tobytes()).decode()


def _array(text: object, kind: str) -> np.ndarray:
    try:
        return np.frombuffer(base64.b64decode(str(text), validate=True), kind)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the solve rates cannot be decoded: {error}") from None
