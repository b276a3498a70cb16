"""Plans batches: which groups each one gets, and which groups are replaced. Pure logic.

Batches and published weight versions are counted separately. A group that starts while the engines serve version v may
be in a batch delivered up to version v + lag, so no token's lag exceeds the bound. Batches are planned ahead at the
observed pace, in versions per batch. A batch waits for groups that would be too old for the next one; a group that has
become too old is replaced.
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
from forge_rl.rollout.tally import RolloutTally
from forge_rl.types import Group

_ANY = "*"
_REMEMBERED = 16
"""Number of recent batches that determine the pace."""
_MOST_FAILED = 4
"""Maximum consecutive failed groups of a source, in batches' worth of groups."""

Reason = Literal["uniform", "weak", "failed", "too_long"]
"""Why a group cannot be used: equal or almost equal rewards, failed episodes, or a prompt too long for the context."""


@dataclass(kw_only=True)
class _BatchPlan:
    """The plan of one batch."""

    number: int
    sources: list[str]
    """Source of each place in the batch."""
    needed: Counter[str]
    groups: list[GroupState] = field(default_factory=list)
    """Groups planned for this batch, in flight or complete."""
    completed: int = 0
    """Number of complete groups."""
    filled: set[int] = field(default_factory=set)
    """Places with a planned group."""
    changed: bool = True
    """True if groups may be missing."""


class BatchPlanner:
    """Plans the groups of each batch and decides when a batch is complete.

    Methods raise TaskError if a source yields only unusable groups.

    Args:
        groups: P.
        episodes: G.
        on_planned: called with each new group, whose episodes it must start.
        on_dropped: called with each group that is dropped, whose episodes it must cancel.
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
        """Number of the next batch to deliver."""
        self.served = self.published = 0
        """Version that the engines serve, and the latest published one; see `set_versions`."""
        self.replaced: Counter[str] = Counter()
        """Number of unused groups by reason: uniform, weak, failed, too_long, aged."""
        self.overtaken = 0
        """Number of groups that had not ended when their batch was delivered with groups planned after them."""
        self.tally = RolloutTally()
        self._config = config
        self._groups, self._episodes = groups, episodes
        self._tasks = tasks
        self._on_planned, self._on_dropped = on_planned, on_dropped
        self._batches: dict[int, _BatchPlan] = {}
        self._source_order: deque[str] = deque()
        self._unused: Counter[tuple[str, str]] = Counter()
        """Consecutive unusable groups, by source and reason."""
        self._delivered_at: int | None = None
        """Latest published version when the last batch was delivered; None before the first."""
        self._due = 0
        """Version at which the next batch is expected to be delivered."""
        self._paces: deque[int] = deque(maxlen=_REMEMBERED)
        self._pace = 1
        """Maximum versions between two batches among those remembered; at least 1."""
        self._planned = self._completed = 0

    def set_versions(self, served: int, published: int) -> None:
        """Record the version that the engines serve and the latest published one.

        Drops groups, in flight or complete, that are now too old.
        """
        self.served = served
        if published == self.published:
            return
        self.published = published
        if self._delivered_at is not None:
            # The batch under way already takes this many versions, whatever the earlier ones took.
            self._pace = max(1, published - self._delivered_at, *self._paces)
        # A batch cannot be delivered at a version that has passed.
        self._due = max(self._due, published)
        self._drop_aged()

    def reconfigure(self, config: ScheduleConfig) -> None:
        """Plan with a new config from now on. Drops groups that a lower lag bound makes too old.

        Also drops groups that could be delivered now but are planned for a batch that comes too late for them: they
        would only keep engines busy until they are too old.
        """
        self._config = config
        self._drop_aged()
        for batch in self._batches.values():
            started = [group for group in batch.groups if group.first_version is not None]
            self._age(batch, [group for group in started if self._last_batch(group) < batch.number])

    def await_batch(self) -> None:
        """Record that the next batch is awaited: it will be delivered at the current published version."""
        self._due = self.published

    def pop_batch(self) -> list[GroupState] | None:
        """Return the next batch's groups in planning order once it is complete, else None."""
        batch = self._batch(self.next_batch)
        batch_groups = self._choose(batch)
        if batch_groups is None:
            return None
        del self._batches[self.next_batch]
        self.next_batch += 1
        if self._delivered_at is not None:
            self._paces.append(self.published - self._delivered_at)
            self._pace = max(1, *self._paces)
        self._delivered_at = self.published
        self._due = self.published + self._pace
        # Groups of the batch that were overtaken: planned before one that is delivered, and still under way.
        last = max(group.order for group in batch_groups)
        self.overtaken += sum(group.completed is None and group.order < last for group in batch.groups)
        for group in batch.groups:
            # What over-sampling left over moves on to the next batch, or is dropped if it would be too old there.
            if group in batch_groups:
                self.tally.complete(group)
                continue
            next_plan = self._batch(self.next_batch)
            if group.first_version is not None and self._last_batch(group) < self.next_batch:
                self._drop(group, "aged")
            else:
                group.batch = self.next_batch
                next_plan.groups.append(group)
                next_plan.completed += group.completed is not None
        return sorted(batch_groups, key=lambda group: group.place)

    def progress(self) -> tuple[int, int]:
        """Return the number of complete groups in the next batch, and the number it needs."""
        batch = self._batches.get(self.next_batch)
        return min(batch.completed if batch else 0, self._groups), self._groups

    def oldest_version(self) -> int:
        """Return the oldest version that may have produced tokens of an undelivered group."""
        return min((g.first_version for g in self.groups() if g.first_version is not None), default=self.served)

    def groups(self) -> Iterator[GroupState]:
        """Iterate over all undelivered groups."""
        for batch in self._batches.values():
            yield from batch.groups

    def incomplete_groups(self) -> list[GroupState]:
        """Return the groups that the next batch is waiting for."""
        batch = self._batches.get(self.next_batch)
        return [group for group in batch.groups if group.completed is None] if batch else []

    def open_batches(self) -> range:
        """Return the numbers of the batches for which episodes may start."""
        last = self._last_batch()
        if self._config.kind != "pipelined":
            last = min(last, self.next_batch)
        elif self._config.over_sampling > 1 and last > self.next_batch:
            last -= 1  # groups started for the last batch would be too old to be carried over: it would wait for them
        return range(self.next_batch, 1 + last)

    def fill(self, number: int, *, idle: bool) -> None:
        """Plan the groups that a batch needs beyond those carried over to it.

        The asynchronous schedule plans one more group if `idle`: no planned episode is waiting to start.
        """
        batch = self._batch(number)
        if not self._config.exact:
            room = (self._last_batch() - self.next_batch + 1) * self._groups  # in batches that are in time
            if idle and len(batch.groups) < room:
                self._source_order = self._source_order or deque(self._tasks.source_order(self._groups))
                self._plan(self._source_order.popleft(), batch, (number, self._planned, 0))
            return
        # This is asked before each start of an episode, and mostly nothing has changed.
        if not batch.changed:
            return
        # Surplus groups that moved on may be of other sources than the batch needs, so needs and groups are summed over
        # all batches up to this one.
        num_missing: Counter[str] = Counter()
        for earlier in range(self.next_batch, number + 1):
            num_missing.update(self._batches[earlier].needed)
            num_missing.subtract(Counter(group.task.source for group in self._batches[earlier].groups))
        for place, source in enumerate(batch.sources):
            # A place is filled once; if its group is dropped, `replace` or the loop below fills the gap.
            if num_missing[source] > 0 and place not in batch.filled:
                self._plan(source, batch, (number, place, 0))
                batch.filled.add(place)
                num_missing[source] -= 1
        for source, count in num_missing.items():  # to replace groups that were carried over, then dropped
            for _ in range(max(0, count)):
                self._plan_extra(source, batch)
        batch.changed = False

    def add_surplus(self) -> bool:
        """Plan one surplus group for the next batch if it can be carried over to a later batch in time."""
        batch = self._batch(self.next_batch)
        # A surplus group ages from the version that it starts with; with an older one it has less time to be carried
        # over.
        if self._config.over_sampling == 1 or self.served < self._due:
            return False
        planned = Counter(group.task.source for group in batch.groups)
        for source, needed in batch.needed.items():
            if planned[source] >= math.ceil(needed * self._config.over_sampling):
                continue
            # All groups of the source must find a place in time, or the surplus would be dropped as too old.
            in_time = range(self.next_batch, 1 + self._last_batch())
            room = sum(self._batch(number).needed[source] for number in in_time)
            if sum(group.task.source == source for group in self.groups()) < room:
                self._plan_extra(source, batch)
                return True
        return False

    def start(self, group: GroupState) -> None:
        """Record that an episode of a group starts; the first one determines how long the group is usable."""
        if group.first_version is None:
            group.first_version = self.served

    def complete(self, group: GroupState) -> None:
        """Record that all episodes of a group have a result."""
        group.completed = self._completed
        self._completed += 1
        self._batches[group.batch].completed += 1
        # The limits are on consecutive groups, so one that completes starts the counts again.
        self._unused[group.task.source, "failed"] = self._unused[group.task.source, "too_long"] = 0
        if not self._teaches_little(group):
            self._unused[group.task.source, "uniform"] = self._unused[group.task.source, "weak"] = 0
        elif self._config.dynamic_sampling and not self._config.in_rounds:
            self._resample([group])

    def replace(
        self, group: GroupState, reason: Reason, problem: str, hint: str, error: type[TaskError] = TaskError
    ) -> None:
        """Replace an unusable group by another one of the same source.

        Args:
            group: the group to drop.
            reason: category to count it in.
            problem: problem of the group, in words.
            hint: what to do if the source yields nothing else.
            error: class of the error raised in that case.

        Raises:
            TaskError: the source yielded too many unusable groups in a row. The replacement is planned anyway and the
                count restarts, so the run can continue once the cause is fixed.
        """
        source = group.task.source
        batch = self._batches[group.batch]
        planned_for, place, before = group.place
        # First, as it raises if the source has no task left, and then nothing else has changed.
        self._plan(source, batch, (planned_for, place, before + 1))
        batch.groups.remove(group)
        batch.completed -= group.completed is not None
        self._drop(group, reason)
        self._unused[source, reason] += 1
        batches = self._config.max_replaced if reason in ("uniform", "weak") else _MOST_FAILED
        if (count := self._unused[source, reason]) > batches * self._groups:
            self._unused[source, reason] = 0
            raise error(f"source {source} yielded {count} unusable groups in a row; {problem}", hint=hint)

    def _batch(self, number: int) -> _BatchPlan:
        for batch_number in range(self.next_batch, number + 1):
            if batch_number not in self._batches:
                sources = self._tasks.source_order(self._groups) if self._config.exact else []
                needed = Counter(sources) if self._config.exact else Counter({_ANY: self._groups})
                self._batches[batch_number] = _BatchPlan(number=batch_number, sources=sources, needed=needed)
        return self._batches[number]

    def _quota_of(self, group: GroupState) -> str:
        """Return the quota that a group counts towards: its source's, or the common one."""
        return group.task.source if self._config.exact else _ANY

    def _newest(self, group: GroupState | None = None) -> int:
        """Return the latest version at which a group (by default one starting now) may be delivered."""
        first = self.served if group is None or group.first_version is None else group.first_version
        return first + self._config.lag

    def _last_batch(self, group: GroupState | None = None) -> int:
        """Return the number of the last batch that a group (by default one starting now) may be in."""
        # The next batch is due at `_due`, each later one a pace after it. Rounding down keeps the bound: a group is
        # never planned for a batch that may come after its newest version.
        return self.next_batch + (self._newest(group) - self._due) // self._pace

    def _choose(self, batch: _BatchPlan) -> set[GroupState] | None:
        """Choose the groups of the batch; None while it is incomplete."""
        # In rounds, the whole batch ends before any group is chosen or replaced, so the outcome does not depend on
        # timing.
        if batch.completed < (len(batch.groups) if self._config.in_rounds else self._groups):
            return None
        if self._config.in_rounds and self._config.dynamic_sampling:
            weak_groups = [group for group in batch.groups if self._teaches_little(group)]
            self._resample(weak_groups)
            if weak_groups:
                return None
        complete_groups = [group for group in batch.groups if group.completed is not None]
        for group in batch.groups:
            # A group in flight that would be too old for the next batch is waited for, not wasted.
            if group.completed is None and group.first_version is not None and self._last_batch(group) <= batch.number:
                return None
        room, batch_groups = Counter(batch.needed), set()
        # Nearest deadline first, then in order of completion; the others are carried over.
        for group in sorted(complete_groups, key=lambda group: (self._last_batch(group), group.completed)):
            quota = self._quota_of(group)
            if room[quota] > 0:
                room[quota] -= 1
                batch_groups.add(group)
        if len(batch_groups) < self._groups or not self._others_fit(batch, batch_groups):
            return None
        return batch_groups

    def _others_fit(self, batch: _BatchPlan, batch_groups: set[GroupState]) -> bool:
        """Check that all groups outside `batch_groups` fit into later batches in time.

        If not, it is better to wait for older groups, unless there are none to wait for.
        """
        if (self._config.exact and self._config.over_sampling == 1) or batch.completed == len(batch.groups):
            return True
        groups = [group for group in self.groups() if group.first_version is not None and group not in batch_groups]
        leftovers = Counter((self._quota_of(group), self._last_batch(group)) for group in groups)
        for quota in batch.needed:
            num_due = room = 0
            for number in range(batch.number + 1, batch.number + self._config.lag + 1):
                num_due += leftovers[quota, number]
                room += self._batch(number).needed[quota]
                # By each deadline, the batches up to it need places for all groups that are due by then.
                if num_due > room:
                    return False
        return True

    def _teaches_little(self, group: GroupState) -> bool:
        return group.is_uniform or group.is_weak(self._config.least_advantage)

    def _resample(self, groups: Iterable[GroupState]) -> None:
        """Replace groups because of their rewards, which still count as observations of their tasks' difficulty."""
        # In planned order: replacements draw from the sources, so any other order would change the tasks for the same
        # seed.
        ordered = sorted(groups, key=lambda group: group.place)
        self._tasks.observe([Group(task=group.task, episodes=group.results) for group in ordered])
        errors: list[TaskError] = []
        for group in ordered:
            rewards = [result.reward for result in group.results]
            problem = f"all rewards of the last one were {rewards[0]:g}"
            if not group.is_uniform:
                problem = (
                    f"the rewards of the last one, from {min(rewards):g} to {max(rewards):g}, are within "
                    f"--schedule.least-advantage {self._config.least_advantage:g} of their mean"
                )
            try:
                self.replace(
                    group,
                    "uniform" if group.is_uniform else "weak",
                    problem,
                    "its tasks may be too easy or too hard for this model, or its answers not recognised: see "
                    "episodes.jsonl; choose other --tasks, raise --group-size or --schedule.max-replaced, or drop "
                    "--schedule.dynamic-sampling",
                )
            except TaskError as error:
                errors.append(error)
        # Only once all are replaced: if the run goes on, groups left in the batch would be observed again.
        if errors:
            raise errors[0]

    def _drop_aged(self) -> None:
        """Drop the groups that are too old to be delivered."""
        for batch in self._batches.values():
            started = [group for group in batch.groups if group.first_version is not None]
            self._age(batch, [group for group in started if self._newest(group) < self.published])

    def _age(self, batch: _BatchPlan, groups: Iterable[GroupState]) -> None:
        for group in groups:
            batch.groups.remove(group)
            batch.completed -= group.completed is not None
            self._drop(group, "aged")

    def _drop(self, group: GroupState, reason: str) -> None:
        self.replaced[reason] += 1
        group.dropped = reason
        if group.completed is not None:
            self.tally.complete(group)
        self.tally.discard_episodes(reason, group.results)
        if reason == "aged":  # later batches may count on it as surplus
            for batch in self._batches.values():
                batch.changed = True
        self._on_dropped(group)

    def _plan_extra(self, source: str, batch: _BatchPlan) -> None:
        # Beyond the batch's own places: two groups of the same task at one place would sample with the same seeds.
        place = max(len(batch.sources), 1 + max(batch.filled, default=0))
        batch.filled.add(place)
        self._plan(source, batch, (batch.number, place, 0))

    def _plan(self, source: str, batch: _BatchPlan, place: tuple[int, int, int]) -> None:
        group = GroupState(self._tasks.draw_from(source), batch.number, place, order=self._planned)
        self._planned += 1
        group.episodes = [InflightEpisode(group, index) for index in range(self._episodes)]
        batch.groups.append(group)
        self._on_planned(group)
