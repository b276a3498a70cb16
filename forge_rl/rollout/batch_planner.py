"""The composition of batches: which groups each one gets, and which are replaced. Pure logic.

Batch b is trained when the policy's version is b. A group that starts while the engines serve version v is for a batch
up to v + lag: that is its deadline, so no token's lag exceeds the bound. A batch waits for groups that would
miss theirs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import TaskError
from forge_rl.rollout.state import GroupState, InflightEpisode, ScheduleConfig

_ANY = "*"


@dataclass(kw_only=True)
class _Batch:
    """The plan of one batch."""

    number: int
    sources: list[str]
    """Source of each place."""
    needed: Counter[str]
    groups: list[GroupState] = field(default_factory=list)
    """Groups planned for it, in flight or complete."""
    completed: int = 0
    """Number of these that are complete."""
    filled: set[int] = field(default_factory=set)
    """Places for which a group was planned."""
    changed: bool = True
    """True if groups may be missing."""


class BatchPlanner:
    """Plans the groups of each batch, and says when one is complete.

    Methods raise TaskError where a source gives nothing but groups that cannot be used.

    Args:
        groups: P.
        episodes: G.
        on_planned: called with each new group, whose episodes are to be started.
        on_dropped: called with each group that is not used, whose episodes are to be ended.
        first: number of the first batch, which is the trainer's version.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        groups: int,
        episodes: int,
        tasks: ResumableTaskStream,
        on_planned: Callable[[GroupState], None],
        on_dropped: Callable[[GroupState], None],
        first: int = 0,
    ) -> None:
        self.next_batch = first
        """Number of the batch that is delivered next."""
        self.version = first
        """Version that the engines serve; set by the caller when they load another."""
        self.replaced: Counter[str] = Counter()
        """Number of groups that were not used, by reason: uniform, failed, aged."""
        self._config = config
        self._groups, self._episodes = groups, episodes
        self._tasks = tasks
        self._on_planned, self._on_dropped = on_planned, on_dropped
        self._batches: dict[int, _Batch] = {}
        self._source_order: deque[str] = deque()
        self._unused: Counter[str] = Counter()
        """Groups in a row that could not be used, by source."""
        self._planned = self._completed = 0

    def pop_batch(self) -> list[GroupState] | None:
        """Return the next batch's groups in the order in which they were planned, once it is complete; None before."""
        batch = self._batch(self.next_batch)
        chosen = self._choose(batch)
        if chosen is None:
            return None
        del self._batches[self.next_batch]
        self.next_batch += 1
        for group in batch.groups:
            if group in chosen:
                self._unused[group.task.source] = 0
                continue
            following = self._batch(self.next_batch)
            if group.first_version is not None and self._deadline(group) < self.next_batch:
                self._drop(group, "aged")
                following.changed = True
            else:
                group.batch = self.next_batch
                following.groups.append(group)
                following.completed += group.completed is not None
        return sorted(chosen, key=lambda group: group.place)

    def progress(self) -> tuple[int, int]:
        """Return how many groups of the next batch are complete, and how many it needs."""
        batch = self._batches.get(self.next_batch)
        return min(batch.completed if batch else 0, self._groups), self._groups

    def oldest_version(self) -> int:
        """Return the oldest version that may have produced tokens of a group that is not delivered."""
        return min((g.first_version for g in self.groups() if g.first_version is not None), default=self.version)

    def groups(self) -> Iterator[GroupState]:
        """Iterate over all groups that are not delivered."""
        for batch in self._batches.values():
            yield from batch.groups

    def incomplete_groups(self) -> list[GroupState]:
        """Return the groups that the next batch waits for."""
        batch = self._batches.get(self.next_batch)
        return [group for group in batch.groups if group.completed is None] if batch else []

    def open_batches(self) -> range:
        """Return the numbers of the batches for which episodes may start."""
        last = self.version + self._config.lag
        return range(self.next_batch, 1 + (last if self._config.kind == "pipelined" else min(last, self.next_batch)))

    def fill(self, number: int, *, idle: bool) -> None:
        """Plan the groups that a batch needs beyond those that are carried on to it.

        The asynchronous schedule plans one group more if it is `idle`: no planned episode waits for its start.
        """
        batch = self._batch(number)
        if not self._config.exact:
            room = (self.version + self._config.lag - self.next_batch + 1) * self._groups  # of batches that are in time
            if idle and len(batch.groups) < room:
                self._source_order = self._source_order or deque(self._tasks.source_order(self._groups))
                self._plan(self._source_order.popleft(), batch, (number, self._planned, 0))
            return
        if not batch.changed:
            return
        batch.changed = False
        lacking: Counter[str] = Counter()
        for earlier in range(self.next_batch, number + 1):
            lacking.update(self._batches[earlier].needed)
            lacking.subtract(Counter(group.task.source for group in self._batches[earlier].groups))
        for place, source in enumerate(batch.sources):
            if lacking[source] > 0 and place not in batch.filled:
                lacking[source] -= 1
                batch.filled.add(place)
                self._plan(source, batch, (number, place, 0))
        for source, count in lacking.items():  # in place of groups that were carried on and then dropped
            for _ in range(max(0, count)):
                self._plan_extra(source, batch)

    def add_surplus(self) -> bool:
        """Plan one group more than the next batch needs, if it may be carried on to a later one in time."""
        batch = self._batch(self.next_batch)
        if self._config.over_sampling == 1 or self.version < self.next_batch:
            return False
        planned = Counter(group.task.source for group in batch.groups)
        for source, needed in batch.needed.items():
            if planned[source] >= math.ceil(needed * self._config.over_sampling):
                continue
            room = sum(self._batch(number).needed[source] for number in self.open_batches())
            if sum(group.task.source == source for group in self.groups()) < room:
                self._plan_extra(source, batch)
                return True
        return False

    def start(self, group: GroupState) -> None:
        """Note that an episode of a group starts; the first one fixes the group's deadline."""
        if group.first_version is None:
            group.first_version = self.version

    def complete(self, group: GroupState) -> None:
        """Note that all episodes of a group have a result."""
        group.completed = self._completed
        self._completed += 1
        self._batches[group.batch].completed += 1
        if not group.is_uniform:
            self._unused[group.task.source] = 0
        elif self._config.replace_uniform and not self._config.in_rounds:
            self._replace_uniform([group])

    def replace(self, group: GroupState, reason: str, problem: str) -> None:
        """Plan another group of the same source in place of one that cannot be used.

        Args:
            group: the one that is dropped.
            reason: "uniform" or "failed", to count by.
            problem: what was wrong with it, in words.
        """
        source = group.task.source
        self._unused[source] += 1
        if self._unused[source] > self._config.most_replaced:
            raise TaskError(
                f"source {source} gave {self._config.most_replaced} groups in a row that could not be used; {problem}",
                hint="its tasks may be too easy or too hard for this model, its answers not recognised, or its "
                "environment or judge broken: look at episodes.jsonl and events.jsonl; choose other --tasks, or raise "
                "--group-size or --schedule.most-replaced",
            )
        self._drop(group, reason)
        batch = self._batches[group.batch]
        batch.groups.remove(group)
        batch.completed -= group.completed is not None
        planned_for, place, before = group.place
        self._plan(source, batch, (planned_for, place, before + 1))

    def _batch(self, number: int) -> _Batch:
        for each in range(self.next_batch, number + 1):
            if each not in self._batches:
                sources = self._tasks.source_order(self._groups) if self._config.exact else []
                needed = Counter(sources) if self._config.exact else Counter({_ANY: self._groups})
                self._batches[each] = _Batch(number=each, sources=sources, needed=needed)
        return self._batches[number]

    def _quota_of(self, group: GroupState) -> str:
        """Return the quota that a group counts for: its source's, or the only one."""
        return group.task.source if self._config.exact else _ANY

    def _deadline(self, group: GroupState) -> int:
        """Return the number of the last batch that a group may be part of."""
        return (self.version if group.first_version is None else group.first_version) + self._config.lag

    def _choose(self, batch: _Batch) -> set[GroupState] | None:
        """Choose the groups that make the batch; None while it is not complete."""
        if batch.completed < (len(batch.groups) if self._config.in_rounds else self._groups):
            return None
        if self._config.in_rounds and self._config.replace_uniform:
            uniform = [group for group in batch.groups if group.is_uniform]
            self._replace_uniform(uniform)
            if uniform:
                return None
        done = [group for group in batch.groups if group.completed is not None]
        for group in batch.groups:
            if group.completed is None and group.first_version is not None and self._deadline(group) <= batch.number:
                return None
        room, chosen = Counter(batch.needed), set()
        for group in sorted(done, key=lambda group: (self._deadline(group), group.completed)):
            quota = self._quota_of(group)
            if room[quota] > 0:
                room[quota] -= 1
                chosen.add(group)
        if len(chosen) < self._groups or not self._others_fit(batch, chosen):
            return None
        if all(group.is_uniform for group in chosen):
            self._replace_uniform(chosen)
            return None
        return chosen

    def _others_fit(self, batch: _Batch, chosen: set[GroupState]) -> bool:
        """Check that all groups left over by this choice can be part of later batches in time.

        If not, it is better to wait for older groups; where there are none to wait for, it cannot be helped.
        """
        if (self._config.exact and self._config.over_sampling == 1) or batch.completed == len(batch.groups):
            return True
        groups = [group for group in self.groups() if group.first_version is not None and group not in chosen]
        left = Counter((self._quota_of(group), self._deadline(group)) for group in groups)
        for quota in batch.needed:
            due = room = 0
            for number in range(batch.number + 1, batch.number + self._config.lag + 1):
                due += left[quota, number]
                room += self._batch(number).needed[quota]
                if due > room:
                    return False
        return True

    def _replace_uniform(self, groups: Iterable[GroupState]) -> None:
        for group in sorted(groups, key=lambda group: group.place):
            self.replace(group, "uniform", f"all rewards of the last one were {group.results[0].reward:g}")

    def _drop(self, group: GroupState, reason: str) -> None:
        self.replaced[reason] += 1
        group.dropped = True
        self._on_dropped(group)

    def _plan_extra(self, source: str, batch: _Batch) -> None:
        place = max(len(batch.sources), 1 + max(batch.filled, default=0))
        batch.filled.add(place)
        self._plan(source, batch, (batch.number, place, 0))

    def _plan(self, source: str, batch: _Batch, place: tuple[int, int, int]) -> None:
        group = GroupState(self._tasks.draw_from(source), batch.number, place, order=self._planned)
        self._planned += 1
        group.episodes = [InflightEpisode(group, index) for index in range(self._episodes)]
        batch.groups.append(group)
        self._on_planned(group)
