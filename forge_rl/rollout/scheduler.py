"""The schedule: which episode starts next, which one decodes where, and when a batch is complete. It only decides.

Pure logic on a clock that is passed in: rollouts drive it for real, tests and the simulator on virtual time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping

from forge_rl.rollout.batch_planner import BatchPlanner
from forge_rl.rollout.capacity import EngineCapacity
from forge_rl.rollout.state import EVALUATION, GroupState, InflightEpisode, ScheduleConfig, State, Tasks
from forge_rl.types import Episode, Task

_MEMORY = 0.95
"""Weight of the past in a source's expected length."""


class Scheduler(BatchPlanner):
    """Decides for one run.

    Args:
        config: the policy.
        groups: P.
        episodes: G.
        tasks: where tasks come from.
        clock: seconds, only for the share of time that engines were busy.
        first: number of the first batch, which is the trainer's version.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        groups: int,
        episodes: int,
        tasks: Tasks,
        clock: Callable[[], float],
        first: int = 0,
    ) -> None:
        super().__init__(config, groups=groups, episodes=episodes, tasks=tasks, first=first)
        self.outcomes: Counter[str] = Counter()
        """Of all attempts, also of those that were not used."""
        self._budgets = EngineCapacity(clock)
        self._waiting: list[tuple[float, int, InflightEpisode]] = []
        self._tickets = 0

    # What happens.

    def set_engines(self, budgets: Mapping[int, int]) -> None:
        """Which engines serve, and how many requests each takes at a time."""
        self._budgets.set(budgets)

    def pause(self) -> None:
        """From now on no episode of a batch begins or gets an engine, and time does not count as idle."""
        self._budgets.pause(True)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._budgets.pause(False)

    def outside(self, task: Task) -> InflightEpisode:
        """An episode that is of no batch, such as one of an evaluation: it has begun, and goes before all others."""
        group = GroupState(task=task, batch=EVALUATION, place=(EVALUATION, 0, 0), order=0)
        plan = InflightEpisode(group=group, index=0, state="in_env")
        self._states["in_env"] += 1
        return plan

    def wants(self, plan: InflightEpisode) -> None:
        """An episode has a turn to decode."""
        if plan.group.dropped:
            return
        assert plan.state == "in_env", f"an episode that is {plan.state} wants to decode"
        self._set(plan, "waiting")
        if not plan.ticket:  # a later turn keeps its place before those that began later
            self._tickets += 1
            plan.ticket = self._tickets
        rank = min(plan.group.batch, EVALUATION + 0.5) if plan.interrupted else plan.group.batch
        heapq.heappush(self._waiting, (rank, plan.ticket, plan))

    def leaves(self, plan: InflightEpisode, *, interrupted: bool = False) -> None:
        """An episode's turn is decoded; or it was interrupted, and will want to go on."""
        if plan.group.dropped:
            return
        plan.interrupted = interrupted
        self._set(plan, "in_env")

    def ends(self, plan: InflightEpisode, result: Episode) -> None:
        """An episode is over. One that says nothing of the policy starts again, or its group is replaced.

        Raises:
            TaskError: a source gives nothing but groups that cannot be used.
        """
        group = plan.group
        self.outcomes[result.outcome] += 1
        if group.dropped:
            return
        if not result.outcome.scored and group.batch != EVALUATION:
            self._set(plan, "new")
            plan.tries += 1
            plan.engine = None
            if plan.tries <= self.config.retries:
                self._queue(plan)
            else:
                self._replace(group, "failed", f"the last one ended with {result.outcome}: {result.problem}")
            return
        plan.result = result
        self._set(plan, "done")
        if group.batch == EVALUATION:
            return
        before = self.expected.get(group.task.source, float(result.response_tokens))
        self.expected[group.task.source] = before * _MEMORY + result.response_tokens * (1 - _MEMORY)
        if any(each.result is None for each in group.episodes):
            return
        self._complete(group)

    def gives_up(self, plan: InflightEpisode) -> None:
        """An episode outside of all batches ends without a result."""
        self._set(plan, "done")

    # What to do.

    def starts(self) -> list[InflightEpisode]:
        """Episodes to begin now, so that engines find work waiting; they are "in_env" from then on."""
        found: list[InflightEpisode] = []
        slots = self._budgets.slots
        wanted = slots + 1 + slots // 8  # a little more than engines take: a world needs time to open
        while (
            not self._budgets.paused
            and slots
            and self._states["waiting"] + self._states["decoding"] + len(found) < wanted
            and self.under_way < self.config.max_episodes
            and (plan := self._next_episode()) is not None
        ):
            if plan.group.since is None:
                plan.group.since = self.version
            self._set(plan, "in_env")
            found.append(plan)
        return found

    def grants(self) -> list[InflightEpisode]:
        """Episodes that decode from now on, each on its `engine`."""
        found: list[InflightEpisode] = []
        while self._waiting:
            rank, _, plan = self._waiting[0]
            if self._budgets.paused and rank != EVALUATION:
                break
            if plan.state != "waiting":
                heapq.heappop(self._waiting)
                continue
            # Where its prompt may be in the cache, if there is room.
            engine = self._budgets.choose((plan.engine, plan.group.home))
            if engine is None:
                break
            heapq.heappop(self._waiting)
            plan.engine = engine
            plan.interrupted = False
            if plan.group.home is None:
                plan.group.home = engine
            self._set(plan, "decoding")
            found.append(plan)
        return found

    def cancels(self) -> list[InflightEpisode]:
        """Episodes under way whose group was replaced: whatever they do is to be ended."""
        found, self._cancelled = self._cancelled, []
        return found

    # What is seen.

    @property
    def engines(self) -> dict[int, int]:
        """Those that serve, with the number of requests that each takes at a time."""
        return self._budgets.engines

    @property
    def under_way(self) -> int:
        """Episodes that began and did not end."""
        return self._states["in_env"] + self._states["waiting"] + self._states["decoding"]

    def count(self, state: State) -> int:
        """Episodes in a state."""
        return self._states[state]

    def missing(self) -> str:
        """What the next batch waits for, in words."""
        batch = self._batches.get(self.next)
        groups = batch.groups if batch else []
        states = Counter(each.state for group in groups if group.ended is None for each in group.episodes)
        del states["done"]
        words = {"new": "not begun", "in_env": "with tools or judges", "waiting": "wait for an engine"}
        shown = ", ".join(f"{states[state]} {words.get(state, state)}" for state in sorted(states))
        return f"batch {self.next} lacks {sum(states.values())} episodes" + (f": {shown}" if shown else "")

    def take_busy(self) -> tuple[float, float]:
        """See EngineCapacity.take_busy."""
        return self._budgets.take_busy()

    def _set(self, plan: InflightEpisode, state: State) -> None:
        if "decoding" in (plan.state, state) and plan.state != state:
            assert plan.engine is not None, "whoever decodes does so on an engine"
            if state == "decoding":
                self._budgets.take(plan.engine)
            else:
                self._budgets.leave(plan.engine)
        super()._set(plan, state)
