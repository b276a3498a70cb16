"""The composition of batches: which groups each one gets, and which are replaced. Pure logic.

Batches are counted, and so, apart from them, are the versions of the weights that are published. A group that starts
while the engines serve version v may be part of a batch that is delivered up to version v + lag, so no token's lag
exceeds the bound. Batches are planned ahead at the pace that was seen: the versions from one batch to the next. A batch
waits for groups that would be too old for the next one; one that has become too old is replaced.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import TaskError
from forge_rl.rollout.state import GroupState, InflightEpisode, ScheduleConfig

_ANY = "*"
_REMEMBERED = 16
"""Number of the last batches from which the pace is taken."""
_MOST_FAILED = 4
"""Batches' worth of groups that a source may give in a row of which every one failed."""

Reason = Literal["uniform", "failed", "too_long"]
"""Reason why a group cannot be used: equal rewards, episodes that failed, a prompt longer than the context."""


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
        first: number of the first batch.
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
        self.served = self.published = 0
        """Version that the engines serve, and the latest that is published; see `set_versions`."""
        self.replaced: Counter[str] = Counter()
        """Number of groups that were not used, by reason: uniform, failed, too_long, aged."""
        self._config = config
        self._groups, self._episodes = groups, episodes
        self._tasks = tasks
        self._on_planned, self._on_dropped = on_planned, on_dropped
        self._batches: dict[int, _Batch] = {}
        self._source_order: deque[str] = deque()
        self._unused: Counter[tuple[str, str]] = Counter()
        """Groups in a row that could not be used, by source and reason."""
        self._delivered_at: int | None = None
        """Latest version when the last batch was delivered; None before the first."""
        self._due = 0
        """Version at which the next batch is expected to be delivered."""
        self._paces: deque[int] = deque(maxlen=_REMEMBERED)
        self._pace = 1
        """Most versions from one batch to the next, of those remembered; 1 also where none was published."""
        self._planned = self._completed = 0

    def set_versions(self, served: int, published: int) -> None:
        """Note the version that the engines serve now, and the latest that is published.

        Groups that are too old by now, in flight or complete, are dropped.
        """
        self.served = served
        if published == self.published:
            return
        self.published = published
        if self._delivered_at is not None:
            self._pace = max(1, published - self._delivered_at, *self._paces)
        self._due = max(self._due, published)
        self._drop_aged()

    def reconfigure(self, config: ScheduleConfig) -> None:
        """Plan by other bounds from now on. Groups that a lower bound on the lag makes too old are dropped.

        Those that could still be delivered now, but are planned for a batch that comes too late for them, go too: else
        they would keep engines busy until they are too old.
        """
        self._config = config
        self._drop_aged()
        for batch in self._batches.values():
            late = [group for group in batch.groups if group.first_version is not None]
            self._age(batch, [group for group in late if self._last_batch(group) < batch.number])

    def await_batch(self) -> None:
        """Note that the next batch is waited for: it is delivered at the version that is the latest now."""
        self._due = self.published

    def pop_batch(self) -> list[GroupState] | None:
        """Return the next batch's groups in the order in which they were planned, once it is complete; None before."""
        batch = self._batch(self.next_batch)
        chosen = self._choose(batch)
        if chosen is None:
            return None
        del self._batches[self.next_batch]
        self.next_batch += 1
        if self._delivered_at is not None:
            self._paces.append(self.published - self._delivered_at)
            self._pace = max(1, *self._paces)
        self._delivered_at = self.published
        self._due = self.published + self._pace
        for group in batch.groups:
            if group in chosen:
                continue
            following = self._batch(self.next_batch)
            if group.first_version is not None and self._last_batch(group) < self.next_batch:
                self._drop(group, "aged")
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
        return min((g.first_version for g in self.groups() if g.first_version is not None), default=self.served)

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
        last = self._last_batch()
        return range(self.next_batch, 1 + (last if self._config.kind == "pipelined" else min(last, self.next_batch)))

    def fill(self, number: int, *, idle: bool) -> None:
        """Plan the groups that a batch needs beyond those that are carried on to it.

        The asynchronous schedule plans one group more if it is `idle`: no planned episode waits for its start.
        """
        batch = self._batch(number)
        if not self._config.exact:
            room = (self._last_batch() - self.next_batch + 1) * self._groups  # of batches that are in time
            if idle and len(batch.groups) < room:
                self._source_order = self._source_order or deque(self._tasks.source_order(self._groups))
                self._plan(self._source_order.popleft(), batch, (number, self._planned, 0))
            return
        if not batch.changed:
            return
        lacking: Counter[str] = Counter()
        for earlier in range(self.next_batch, number + 1):
            lacking.update(self._batches[earlier].needed)
            lacking.subtract(Counter(group.task.source for group in self._batches[earlier].groups))
        for place, source in enumerate(batch.sources):
            if lacking[source] > 0 and place not in batch.filled:
                self._plan(source, batch, (number, place, 0))
                batch.filled.add(place)
                lacking[source] -= 1
        for source, count in lacking.items():  # in place of groups that were carried on and then dropped
            for _ in range(max(0, count)):
                self._plan_extra(source, batch)
        batch.changed = False

    def add_surplus(self) -> bool:
        """Plan one group more than the next batch needs, if it may be carried on to a later one in time."""
        batch = self._batch(self.next_batch)
        if self._config.over_sampling == 1 or self.served < self._due:
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
        """Note that an episode of a group starts; the first one fixes how long the group can be used."""
        if group.first_version is None:
            group.first_version = self.served

    def complete(self, group: GroupState) -> None:
        """Note that all episodes of a group have a result."""
        group.completed = self._completed
        self._completed += 1
        self._batches[group.batch].completed += 1
        self._unused[group.task.source, "failed"] = self._unused[group.task.source, "too_long"] = 0
        if not group.is_uniform:
            self._unused[group.task.source, "uniform"] = 0
        elif self._config.replace_uniform and not self._config.in_rounds:
            self._replace_uniform([group])

    def replace(
        self, group: GroupState, reason: Reason, problem: str, hint: str, error: type[TaskError] = TaskError
    ) -> None:
        """Plan another group of the same source in place of one that cannot be used.

        Args:
            group: the one that is dropped.
            reason: why, to count by.
            problem: what was wrong with it, in words.
            hint: what to do about it, where the source gives nothing else.
            error: kind of error to raise then.

        Raises:
            TaskError: the source gave too many of these in a row. The other group is planned all the same, and the
                count begins again: who has mended the cause may go on.
        """
        source = group.task.source
        batch = self._batches[group.batch]
        planned_for, place, before = group.place
        self._plan(source, batch, (planned_for, place, before + 1))
        batch.groups.remove(group)
        batch.completed -= group.completed is not None
        self._drop(group, reason)
        self._unused[source, reason] += 1
        batches = self._config.most_replaced if reason == "uniform" else _MOST_FAILED
        if (found := self._unused[source, reason]) > batches * self._groups:
            self._unused[source, reason] = 0
            raise error(f"source {source} gave {found} groups in a row that could not be used; {problem}", hint=hint)

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

    def _newest(self, group: GroupState | None = None) -> int:
        """Return the latest version at which a group, by default one that starts now, may be delivered."""
        first = self.served if group is None or group.first_version is None else group.first_version
        return first + self._config.lag

    def _last_batch(self, group: GroupState | None = None) -> int:
        """Return the number of the last batch that a group, by default one that starts now, may be part of."""
        return self.next_batch + (self._newest(group) - self._due) // self._pace

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
            if group.completed is None and group.first_version is not None and self._last_batch(group) <= batch.number:
                return None
        room, chosen = Counter(batch.needed), set()
        for group in sorted(done, key=lambda group: (self._last_batch(group), group.completed)):
            quota = self._quota_of(group)
            if room[quota] > 0:
                room[quota] -= 1
                chosen.add(group)
        if len(chosen) < self._groups or not self._others_fit(batch, chosen):
            return None
        return chosen

    def _others_fit(self, batch: _Batch, chosen: set[GroupState]) -> bool:
        """Check that all groups left over by this choice can be part of later batches in time.

        If not, it is better to wait for older groups; where there are none to wait for, it cannot be helped.
        """
        if (self._config.exact and self._config.over_sampling == 1) or batch.completed == len(batch.groups):
            return True
        groups = [group for group in self.groups() if group.first_version is not None and group not in chosen]
        left = Counter((self._quota_of(group), self._last_batch(group)) for group in groups)
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
            self.replace(
                group,
                "uniform",
                f"all rewards of the last one were {group.results[0].reward:g}",
                "its tasks may be too easy or too hard for this model, or its answers not recognised: look at "
                "episodes.jsonl; choose other --tasks, raise --group-size or --schedule.most-replaced, or leave out "
                "--schedule.replace-uniform",
            )

    def _drop_aged(self) -> None:
        """Drop the groups that may not be delivered any more."""
        for batch in self._batches.values():
            started = [group for group in batch.groups if group.first_version is not None]
            self._age(batch, [group for group in started if self._newest(group) < self.published])

    def _age(self, batch: _Batch, groups: Iterable[GroupState]) -> None:
        for group in groups:
            batch.groups.remove(group)
            batch.completed -= group.completed is not None
            self._drop(group, "aged")

    def _drop(self, group: GroupState, reason: str) -> None:
        self.replaced[reason] += 1
        group.dropped = True
        if reason == "aged":  # it may have been a surplus that later batches count on
            for batch in self._batches.values():
                batch.changed = True
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
