"""Curriculum: draws a source's tasks by difficulty, which it learns from their solve rates. Pure logic."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from forge_rl.data.solve_rates import SolveRates
from forge_rl.data.sources.order import key_of
from forge_rl.errors import ConfigError, TaskError, check_flags
from forge_rl.types import Group, Task

Pool = Literal["easy", "normal", "hard"]
_MOST_PASSED = 100
"""Maximum tasks that are passed over to find one of the wanted pool."""
_MOMENTUM = 0.5
"""Momentum of a task's running solve rate, updated by each of its groups. A task comes again after an epoch, when the
policy is another: its last few groups say more than a long mean."""
_MAX_TASKS = 1_000_000
"""Maximum tasks whose solve rates are kept, in memory (150 bytes each) and in checkpoints (16 bytes); beyond it, those
first seen are new again."""
_REST = 10
"""Draws from a source for which a pool is not wanted after none of its tasks was found."""


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Difficulty pools: which shares of a source's tasks are easy, normal and hard for the policy."""

    pools: Literal["off", "solve_rate"] = "off"
    """off: take a source's tasks as they come. solve_rate: pass over tasks so that easy and hard ones have their shares
    of those taken, within each source; the mixture stays exact. New tasks are always taken, so pools take effect when
    tasks come again, such as in the second epoch of a file. A source with too few tasks of a pool gives others."""
    easy_share: float = 0.1
    """Share of easy tasks; 0 leaves them out while there are others."""
    hard_share: float = 0.1
    """Share of hard tasks; 0 leaves them out while there are others. The rest is normal."""
    easy_from: float = 0.8
    """Minimum solve rate of an easy task."""
    hard_to: float = 0.2
    """Maximum solve rate of a hard task."""
    part: str = ""
    """Part of the reward whose mean over a group, clipped to 0 to 1, is its solve rate; by default the total. Set it if
    the total also has penalties, such as for length."""

    def __post_init__(self) -> None:
        check_flags(
            self,
            "--curriculum.",
            minimum={"easy_share": 0, "hard_share": 0, "hard_to": 0},
            maximum={"easy_from": 1},
        )
        if not self.easy_share + self.hard_share <= 1:
            raise ConfigError(
                f"--curriculum.easy-share {self.easy_share:g} and --curriculum.hard-share {self.hard_share:g} are more "
                "than 1 together",
                hint="lower one of them; the rest is normal",
            )
        if not self.hard_to < self.easy_from:
            raise ConfigError(
                f"--curriculum.hard-to is {self.hard_to:g}, not below --curriculum.easy-from {self.easy_from:g}",
                hint="lower --curriculum.hard-to",
            )

    @property
    def shares(self) -> dict[Pool, float]:
        """Share of each pool; they sum to 1."""
        normal = max(0.0, 1 - self.easy_share - self.hard_share)
        return {"normal": normal, "hard": self.hard_share, "easy": self.easy_share}


class DifficultyPools:
    """Knows each task's solve rate, and chooses among a source's next tasks.

        pools = DifficultyPools(Curriculum(pools="solve_rate", easy_share=0.0))
        task = pools.choose("math", source.draw)
        pools.observe(batch.groups)

    Which pool the next task of a source should come from is decided by largest remainder, so the shares among the tasks
    chosen are exact up to rounding if the source has enough of each. prime-rl's pools instead weight a random choice.
    """

    def __init__(self, config: Curriculum) -> None:
        self.config = config
        self._rates = SolveRates(_MAX_TASKS)
        self._easy_from, self._hard_to = np.array([config.easy_from, config.hard_to], np.float32).tolist()
        """Bounds, rounded like the solve rates."""
        self._owed: dict[str, dict[Pool, float]] = {}
        """Rounding remainders of each source's pools."""
        self._resting: dict[str, dict[Pool, int]] = {}
        """Draws from a source until a pool that was not found is wanted again."""
        self._counts: Counter[str] = Counter()
        """Tasks chosen by pool, and tasks passed over, since the last call of `metrics`."""

    def observe(self, groups: Iterable[Group]) -> None:
        """Update the solve rates of the tasks of scored groups.

        Raises:
            ConfigError: no reward of a group has the configured part.
        """
        for group in groups:
            # A task's first rate is taken whole, as there is no mean yet to average it with.
            rate, key = self._rate_of(group), _key(group.task)
            old_rate = self._rates.get(key)
            self._rates[key] = rate if old_rate is None else _MOMENTUM * old_rate + (1 - _MOMENTUM) * rate

    def pool_of(self, task: Task) -> Pool | None:
        """Return a task's pool; None for a new task."""
        rate = self._rates.get(_key(task))
        if rate is None:
            return None
        return "easy" if rate >= self._easy_from else "hard" if rate <= self._hard_to else "normal"

    def choose(
        self, source: str, draw: Callable[[], Task], *, chosen_before: Callable[[Task], bool] = lambda task: False
    ) -> Task:
        """Return one of a source's next tasks.

        Args:
            draw: returns the next task; tasks passed over do not come back before the source repeats them.
            chosen_before: whether a task was chosen before a restart that rewound the source, and is chosen again.
        """
        preferred_pool, alternative = self._wanted(source), None
        for num_passed in range(_MOST_PASSED):
            task = draw()
            pool = self.pool_of(task)
            # New tasks have no rate yet and are always taken: only then can they get one.
            if pool in (preferred_pool, None) or preferred_pool is None or chosen_before(task):
                return self._count(pool, task, num_passed)
            # The first task of another pool is the fallback, but one of a pool with a share above 0 is preferred.
            if alternative is None or (self.config.shares[alternative[0]] == 0 < self.config.shares[pool]):
                alternative = pool, task
        assert preferred_pool is not None
        assert alternative is not None
        # Without a rest, each draw from a source without such tasks would pass over as many as allowed for nothing.
        self._resting.setdefault(source, {})[preferred_pool] = _REST
        return self._count(*alternative, _MOST_PASSED - 1)

    def metrics(self) -> dict[str, float]:
        """Return the number of tasks in each pool, and of tasks chosen and passed over since the last call."""
        sizes = dict(zip(("hard", "normal", "easy"), self._sizes(), strict=True))
        values = {f"curriculum/{pool}_tasks": float(size) for pool, size in sizes.items()}
        values |= {
            f"curriculum/{counter}": float(self._counts[counter]) for counter in (*get_args(Pool), "new", "passed_over")
        }
        self._counts.clear()
        return values

    def position(self) -> dict[str, object]:
        """Return what chooses the next tasks, without the solve rates, as JSON."""
        return {
            "owed": {source: dict(owed) for source, owed in self._owed.items()},
            "resting": {source: dict(resting) for source, resting in self._resting.items()},
        }

    def rates(self) -> dict[str, object]:
        """Return the solve rates of all tasks, as JSON."""
        return self._rates.state()

    def restored(self, position: object, rates: object) -> DifficultyPools:
        """Return pools with these settings that resume from results of `position` and `rates`.

        Raises:
            TaskError: they are malformed.
        """
        pools = DifficultyPools(self.config)
        try:
            if not isinstance(position, Mapping):
                raise ValueError("the pools are not a mapping")
            pools._owed = _checked(position.get("owed"), float, max_value=len(get_args(Pool)))
            pools._resting = _checked(position.get("resting"), int, max_value=_REST)
            pools._rates = SolveRates.restored(rates, _MAX_TASKS)
        except ValueError as error:
            raise TaskError(
                f"the saved state of the curriculum is malformed: {error}",
                hint="resume from an earlier checkpoint, or start a new run",
            ) from error
        return pools

    def __repr__(self) -> str:
        hard, normal, easy = self._sizes()
        return f"DifficultyPools  {easy} easy, {normal} normal, {hard} hard"

    def _sizes(self) -> tuple[int, int, int]:
        return self._rates.count(self._hard_to, self._easy_from)

    def _wanted(self, source: str) -> Pool | None:
        """Choose the pool of a source's next task; None if all rest."""
        resting = self._resting.get(source, {})
        self._resting[source] = {pool: num_left - 1 for pool, num_left in resting.items() if num_left > 1}
        active = {pool: share for pool, share in self.config.shares.items() if share > 0 and pool not in resting}
        if not active:
            return None
        # Pools that rest leave their shares to the others.
        owed, total = self._owed.setdefault(source, {}), math.fsum(active.values())
        for pool, share in active.items():
            owed[pool] = owed.get(pool, 0.0) + share / total
        # Rounded, so that float error does not decide between pools that are owed the same.
        next_pool = max(active, key=lambda pool: round(owed[pool], 9))
        owed[next_pool] -= 1
        return next_pool

    def _rate_of(self, group: Group) -> float:
        name, scores = self.config.part, [episode.score for episode in group.episodes if episode.score is not None]
        if not name:
            values = [score.total for score in scores]
        else:
            values = [score.parts[name] for score in scores if name in score.parts]
        if not values:
            raise ConfigError(
                f"--curriculum.part is {name}, which is not a part of the reward of {group.task.source}",
                hint=f"its parts: {', '.join(sorted({part for score in scores for part in score.parts})) or 'none'}",
            )
        return math.fsum(min(max(value, 0.0), 1.0) for value in values) / len(values)

    def _count(self, pool: Pool | None, task: Task, num_passed: int) -> Task:
        self._counts[pool or "new"] += 1
        self._counts["passed_over"] += num_passed
        return task


def _key(task: Task) -> int:
    return key_of(task.source, task.id)


def _checked(state: object, kind: type[float], *, max_value: float) -> dict[str, dict[Pool, Any]]:
    """Check a mapping of sources to numbers by pool.

    Raises:
        ValueError: it has another form, or a number is beyond `max_value`.
    """
    if not isinstance(state, Mapping) or not all(isinstance(by_pool, Mapping) for by_pool in state.values()):
        raise ValueError("the pools are not mappings by source")
    for pool, number in (item for by_pool in state.values() for item in by_pool.items()):
        if pool not in get_args(Pool) or type(number) is not kind or not -max_value <= number <= max_value:
            raise ValueError(f"a pool is {str(pool)!r:.40} with {number!r:.40}")
    return {str(source): dict(by_pool) for source, by_pool in state.items()}
