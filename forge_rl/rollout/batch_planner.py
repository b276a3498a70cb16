"""What batches are made of: which groups each one gets, and which episode begins next. Pure logic.

Batch b is trained when the policy's version is b. A group that begins while the engines serve version v is for a batch
up to v + lag: that is its deadline, and so no token's lag passes the bound. A batch waits for what would miss it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from forge_rl.errors import TaskError
from forge_rl.rollout.state import GroupState, InflightEpisode, ScheduleConfig, State, Tasks

_ANY = "*"


@dataclass(kw_only=True)
class _Batch:
    """What one batch is to be made of."""

    number: int
    sources: list[str]
    """By place."""
    needed: Counter[str]
    groups: list[GroupState] = field(default_factory=list)
    """Meant for it, under way or complete."""
    ended: int = 0
    """How many of them are complete."""
    filled: set[int] = field(default_factory=set)
    """Places for which a group was planned."""
    changed: bool = True
    """Whether groups may be missing."""


class BatchPlanner:
    """Of one run; the schedule's base.

    Args:
        config: the policy.
        groups: P.
        episodes: G.
        tasks: where tasks come from.
        first: number of the first batch, which is the trainer's version.
    """

    def __init__(self, config: ScheduleConfig, *, groups: int, episodes: int, tasks: Tasks, first: int) -> None:
        self.config = config
        self.next = first
        """Number of the batch that is delivered next."""
        self.version = first
        """Version that the engines serve."""
        self.replaced: Counter[str] = Counter()
        """Groups that were not used, by why: uniform, failed, aged."""
        self.expected: dict[str, float] = {}
        """Tokens of an episode, by source, as far as known."""
        self._groups, self._size = groups, episodes
        self._tasks = tasks
        self._batches: dict[int, _Batch] = {}
        self._source_order: deque[str] = deque()
        self._unused: Counter[str] = Counter()
        """Groups in a row that could not be used, by source."""
        self._planned = self._ended = 0
        self._begin: list[tuple[int, float, int, int, InflightEpisode]] = []
        self._cancelled: list[InflightEpisode] = []
        self._states: Counter[State] = Counter()

    def take(self) -> list[GroupState] | None:
        """The next batch's groups in the order in which they were planned, once it is complete; None before.

        Raises:
            TaskError: a source gives nothing but groups that cannot be used.
        """
        batch = self._batch(self.next)
        chosen = self._chosen(batch)
        if chosen is None:
            return None
        del self._batches[self.next]
        self.next += 1
        taken = set(chosen)
        for group in batch.groups:
            if group not in taken:
                self._carry(group)
        for group in chosen:
            self._unused[group.task.source] = 0
        return sorted(chosen, key=lambda group: group.place)

    def progress(self) -> tuple[int, int]:
        """Groups of the next batch that are complete, and how many it needs."""
        batch = self._batches.get(self.next)
        done = sum(group.ended is not None for group in batch.groups) if batch else 0
        return min(done, self._groups), self._groups

    def since(self) -> int:
        """The oldest version that a group under way, or waiting for its batch, may have tokens of."""
        return min((group.since for group in self.planned() if group.since is not None), default=self.version)

    def planned(self) -> Iterator[GroupState]:
        """All groups that are not delivered."""
        for batch in self._batches.values():
            yield from batch.groups

    def _complete(self, group: GroupState) -> None:
        """All episodes of a group have a result."""
        group.ended = self._ended
        self._ended += 1
        self._batches[group.batch].ended += 1
        if not group.is_uniform:
            self._unused[group.task.source] = 0
        elif self.config.replace_uniform and not self.config.in_rounds:
            self._replace_uniform(group)

    def _set(self, plan: InflightEpisode, state: State) -> None:
        self._states[plan.state] -= 1
        self._states[state] += 1
        plan.state = state

    def _batch(self, number: int) -> _Batch:
        if number not in self._batches:
            for earlier in range(self.next, number):
                self._batch(earlier)
            sources = self._tasks.source_order(self._groups) if self.config.exact else []
            needed = Counter(sources) if self.config.exact else Counter({_ANY: self._groups})
            self._batches[number] = _Batch(number=number, sources=sources, needed=needed)
        return self._batches[number]

    def _last(self) -> int:
        """The last batch for which work may begin."""
        last = self.version + self.config.lag
        return last if self.config.kind == "pipelined" else min(last, self.next)

    def _pool(self, source: str) -> str:
        """Groups of one pool may stand for one another."""
        return source if self.config.exact else _ANY

    def _deadline(self, group: GroupState) -> int:
        """The last batch that it may be part of."""
        return (self.version if group.since is None else group.since) + self.config.lag

    def _chosen(self, batch: _Batch) -> list[GroupState] | None:
        """The groups that make the batch, or None while it is not complete."""
        if batch.ended < self._groups or (self.config.in_rounds and not self._settled(batch)):
            return None
        done = [group for group in batch.groups if group.ended is not None]
        if any(g.ended is None and g.since is not None and self._deadline(g) <= batch.number for g in batch.groups):
            return None
        room, chosen = Counter(batch.needed), []
        for group in sorted(done, key=lambda group: (self._deadline(group), group.ended)):
            pool = self._pool(group.task.source)
            if room[pool] > 0:
                room[pool] -= 1
                chosen.append(group)
        if len(chosen) < self._groups or not self._others_fit(batch, set(chosen)):
            return None
        if all(group.is_uniform for group in chosen):
            for group in sorted(chosen, key=lambda group: group.place):
                self._replace_uniform(group)
            return None
        return chosen

    def _others_fit(self, batch: _Batch, chosen: set[GroupState]) -> bool:
        """Whether what this choice leaves can be part of later batches in time. If not, better wait for
        what is older; where nothing is left to wait for, it cannot be helped."""
        if (self.config.exact and self.config.over_sampling == 1) or batch.ended == len(batch.groups):
            return True
        groups = [group for group in self.planned() if group.since is not None and group not in chosen]
        left = Counter((self._pool(group.task.source), self._deadline(group)) for group in groups)
        for pool in batch.needed:
            due = room = 0
            for number in range(batch.number + 1, batch.number + self.config.lag + 1):
                due += left[pool, number]
                room += self._batch(number).needed[pool]
                if due > room:
                    return False
        return True

    def _settled(self, batch: _Batch) -> bool:
        """Whether all of the batch have ended and may stay; where all have ended, what may not is replaced."""
        if batch.ended < len(batch.groups):
            return False
        bad = [group for group in batch.groups if self.config.replace_uniform and group.is_uniform]
        for group in sorted(bad, key=lambda group: group.place):
            self._replace_uniform(group)
        return not bad

    def _carry(self, group: GroupState) -> None:
        """A group that its batch did not need moves on to the next one."""
        following = self._batch(self.next)
        if group.since is not None and self._deadline(group) < self.next:
            self._drop(group, "aged")
            following.changed = True
            return
        group.batch = self.next
        following.groups.append(group)
        following.ended += group.ended is not None

    def _replace_uniform(self, group: GroupState) -> None:
        self._replace(group, "uniform", f"all rewards of the last one were {group.results[0].reward:g}")

    def _replace(self, group: GroupState, why: str, last: str) -> None:
        source = group.task.source
        self._unused[source] += 1
        if self._unused[source] > self.config.most_replaced:
            raise TaskError(
                f"source {source} gave {self.config.most_replaced} groups in a row that could not be used; {last}",
                hint="its tasks may be too easy or too hard for this model, its answers not recognised, or its world "
                "or judge broken: look at episodes.jsonl and events.jsonl; choose other --tasks, or raise "
                "--group-size or --schedule.most-replaced",
            )
        self._drop(group, why)
        batch = self._batches[group.batch]
        batch.groups.remove(group)
        batch.ended -= group.ended is not None
        planned_for, place, before = group.place
        self._plan_group(source, batch, (planned_for, place, before + 1))

    def _drop(self, group: GroupState, why: str) -> None:
        self.replaced[why] += 1
        for each in group.episodes:
            if each.state in ("in_env", "waiting", "decoding"):
                self._cancelled.append(each)
            self._set(each, "done")
        group.dropped = True

    # Episodes.

    def _next_episode(self) -> InflightEpisode | None:
        """The next one to begin, of the earliest batch that has one."""
        for number in range(self.next, self._last() + 1):
            self._fill(number)
            plan = self._pop(number)
            if plan is None and number == self.next and self._add_surplus():
                plan = self._pop(number)
            if plan is not None:
                return plan
        return None

    def _pop(self, last: int) -> InflightEpisode | None:
        while self._begin and self._begin[0][0] <= last:
            plan = heapq.heappop(self._begin)[-1]
            if plan.state == "new" and not plan.group.dropped:
                return plan
        return None

    def _fill(self, number: int) -> None:
        """Plan the groups that a batch needs beyond those that are carried on to it."""
        batch = self._batch(number)
        if not self.config.exact:
            self._fill_any(batch)
            return
        if not batch.changed:
            return
        batch.changed = False
        lacking: Counter[str] = Counter()
        for earlier in range(self.next, number + 1):
            lacking.update(self._batches[earlier].needed)
            lacking.subtract(Counter(group.task.source for group in self._batches[earlier].groups))
        for place, source in enumerate(batch.sources):
            if lacking[source] > 0 and place not in batch.filled:
                lacking[source] -= 1
                batch.filled.add(place)
                self._plan_group(source, batch, (number, place, 0))
        for source, count in lacking.items():  # what was carried on and is gone again
            for _ in range(max(0, count)):
                self._plan_extra(source, batch)

    def _fill_any(self, batch: _Batch) -> None:
        """First come, first served: one more group, while fewer are under way than batches may take in time."""
        room = (self.version + self.config.lag - self.next + 1) * self._groups - len(batch.groups)
        if room <= 0 or self._states["new"]:
            return
        if not self._source_order:
            self._source_order.extend(self._tasks.source_order(self._groups))
        self._plan_group(self._source_order.popleft(), batch, (batch.number, self._planned, 0))

    def _add_surplus(self) -> bool:
        """Plan one group more than the next batch needs, if it may be carried on to a later one in time."""
        batch = self._batch(self.next)
        if self.config.over_sampling == 1 or self.version < self.next:
            return False
        meant = Counter(group.task.source for group in batch.groups)
        for source, needed in batch.needed.items():
            if meant[source] >= math.ceil(needed * self.config.over_sampling):
                continue
            batches = [self._batch(number) for number in range(self.next, self._last() + 1)]
            room = sum(each.needed[source] for each in batches)
            if sum(group.task.source == source for group in self.planned()) < room:
                self._plan_extra(source, batch)
                return True
        return False

    def _plan_extra(self, source: str, batch: _Batch) -> None:
        place = max(len(batch.sources), 1 + max(batch.filled, default=0))
        batch.filled.add(place)
        self._plan_group(source, batch, (batch.number, place, 0))

    def _plan_group(self, source: str, batch: _Batch, place: tuple[int, int, int]) -> None:
        task = self._tasks.draw_from(source)
        group = GroupState(task=task, batch=batch.number, place=place, order=self._planned)
        self._planned += 1
        group.episodes = [InflightEpisode(group=group, index=index) for index in range(self._size)]
        batch.groups.append(group)
        self._states["new"] += self._size
        for each in group.episodes:
            self._queue(each)

    def _queue(self, plan: InflightEpisode) -> None:
        group = plan.group
        longest_first = -self.expected.get(group.task.source, 0.0)
        heapq.heappush(self._begin, (group.batch, longest_first, group.order, plan.index, plan))
