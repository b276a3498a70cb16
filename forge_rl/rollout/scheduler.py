"""Scheduler: decides which episode starts next, and which one decodes on which engine.

Pure logic with an injected clock: real rollouts drive it, and tests and the simulator in virtual time.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import get_args

from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.errors import ContextError, InfrastructureError, PoisonError, TaskError, UnscoredError
from forge_rl.rollout.batch_planner import BatchPlanner, Reason
from forge_rl.rollout.capacity import EngineCapacity
from forge_rl.rollout.state import EVALUATION, EpisodeState, GroupState, InflightEpisode, ScheduleConfig
from forge_rl.types import Episode, Outcome, Task

_MEMORY = 0.95
"""Weight of the past in the moving average of a source's episode length."""
_NO_EPISODES: dict[EpisodeState, int] = dict.fromkeys(get_args(EpisodeState), 0)
"""Initial number of episodes by state; looking up missing keys in a Counter is slower."""
_LEAST_ATTEMPTS = 64
"""Least number of attempts over which failures of infrastructure are counted."""
_FIRST, _INTERRUPTED = -2, -1
"""Ranks ahead of every batch's: of awaited evaluations, and of episodes whose engine died."""


class Scheduler:
    """Decides which episodes start and decode, for the planner's batches and for evaluations.

    Episodes of an evaluation use the capacity that the awaited batch leaves free, take precedence over
    later batches, and pause with them. While the evaluation itself is awaited, they go first, and no episode of a batch
    starts.

        for episode in scheduler.pop_starts():
            ...  # open its environment, then scheduler.request_decode(episode)
        for episode in scheduler.pop_grants():
            ...  # decode a turn on episode.engine, then scheduler.finish_turn(episode)
        scheduler.record_result(episode, result)
        groups = scheduler.planner.pop_batch()  # None until the batch is complete

    With `leaves` L, the G episodes of a group are the leaves of trees. Each tree has L neighbours, of which the first
    starts and the others are reserved for its branches; those left over when it has ended start another tree.

    Args:
        ahead_requests: requests per engine below which episodes of batches after the awaited one start, too.

    See EngineCapacity and BatchPlanner for the other arguments.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        groups: int,
        episodes: int,
        tasks: ResumableTaskStream,
        leaves: int = 1,
        ahead_requests: int = sys.maxsize,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tasks = tasks
        self.config = config
        """The current config; `reconfigure` changes it."""
        self.capacity = EngineCapacity(clock)
        self._groups, self._episodes = groups, episodes
        self.leaves = leaves
        """Maximum episodes of a tree; 1 if episodes have no branches."""
        self._ahead_requests = ahead_requests
        self._clock = clock
        self.reset(0)

    def reset(self, batch: int) -> None:
        """Plan from a batch on; everything before has ended or was cancelled."""
        self.planner = BatchPlanner(
            self.config,
            groups=self._groups,
            episodes=self._episodes,
            tasks=self.tasks,
            on_planned=self._add_group,
            on_dropped=self._end_group,
            first=batch,
        )
        self.outcomes: Counter[str] = Counter()
        """Outcomes of all attempts, including unused ones."""
        self.states: Counter[EpisodeState] = Counter(_NO_EPISODES)
        """Number of batch episodes by state."""
        self.evaluation_states: Counter[EpisodeState] = Counter(_NO_EPISODES)
        """Number of evaluation episodes by state."""
        self._expected_tokens: dict[str, float] = {}
        """Expected episode length by source, once known."""
        self._new: list[tuple[int, float, int, int, InflightEpisode]] = []
        """Heap of episodes to start."""
        self._waiting: list[tuple[int, int, InflightEpisode]] = []
        """Heap of episodes waiting for an engine."""
        self._to_evaluate: deque[InflightEpisode] = deque()
        """Evaluation episodes to start."""
        self._riding: list[tuple[int, int, InflightEpisode]] = []
        """Heap of evaluation episodes waiting for an engine."""
        self._cancelled: list[InflightEpisode] = []
        self._attempts: deque[bool] = deque()
        """For each of the latest attempts, whether it ended in an infrastructure error."""
        self._failures = 0
        self._tickets = 0

    # Events.

    def reconfigure(self, config: ScheduleConfig) -> None:
        """Apply a new config from now on; groups that it rules out are dropped and replaced."""
        if config != self.config:
            self.config = config
            self.planner.reconfigure(config)

    def add_evaluation(self, groups: Iterable[GroupState]) -> None:
        """Add an evaluation's episodes, in this order; the groups' batch is EVALUATION."""
        for group in groups:
            self.evaluation_states["new"] += len(group.episodes)
            self._to_evaluate += group.episodes

    def await_evaluation(self, awaited: bool) -> None:
        """Record whether evaluations are awaited; if so, their episodes that wait for an engine go first."""
        self.capacity.set_evaluating(awaited)
        if not awaited:
            return
        # Interrupted episodes of evaluations wait in the batches' heap, where a pause would hold them. Tickets stay, so
        # that among evaluations those that began first still decode first.
        entries, self._riding = [*self._waiting, *self._riding], []
        self._waiting = [
            (_FIRST if episode.group.batch == EVALUATION else rank, ticket, episode)
            for rank, ticket, episode in entries
        ]
        heapq.heapify(self._waiting)

    def decode_at_once(self, episode: InflightEpisode) -> bool:
        """Let an episode with a turn to decode do so without queueing, if none waits and an engine is free."""
        # Whoever waits comes first, also if an engine is free: only the queues know who is next.
        if self._waiting or self._riding or self.capacity.paused or episode.group.dropped:
            return False
        assert episode.state == "in_env", f"an episode that is {episode.state} requests an engine"
        engine = self._engine_for(episode)
        if engine is None:
            return False
        self._take_ticket(episode)
        self._grant(episode, engine)
        return True

    def request_decode(self, episode: InflightEpisode) -> None:
        """Queue an episode with a turn to decode."""
        if episode.group.dropped:
            return
        assert episode.state == "in_env", f"an episode that is {episode.state} requests an engine"
        self._set_state(episode, "waiting")
        self._take_ticket(episode)
        # Heaps are ordered by batch, so the awaited batch decodes before work ahead; the two ranks below every batch
        # number go before both.
        rank, heap = episode.group.batch, self._waiting
        if rank == EVALUATION and self.capacity.evaluating:
            rank = _FIRST
        elif episode.interrupted:
            rank = _INTERRUPTED
        elif rank == EVALUATION:
            heap = self._riding
        heapq.heappush(heap, (rank, episode.ticket, episode))

    def finish_turn(self, episode: InflightEpisode, *, interrupted: bool = False) -> None:
        """Release the engine of an episode whose turn is decoded, or was interrupted and will be requested again."""
        if episode.group.dropped:
            return
        episode.interrupted = interrupted
        self._set_state(episode, "in_env")

    def restart(self, episode: InflightEpisode) -> None:
        """Restart an episode of a batch or an evaluation from the beginning."""
        if episode.group.dropped:
            return
        self._set_state(episode, "new")
        episode.engine = None
        if episode.group.batch == EVALUATION:
            self._to_evaluate.appendleft(episode)
        else:
            self._queue(episode)

    def branches(self, episode: InflightEpisode, max_branches: int) -> list[InflightEpisode]:
        """Return up to `max_branches` reserved episodes of a running episode's tree as its branches; their state
        becomes "in_env".

        They prefer its engine, which has their prompt in its KV cache.
        """
        branches = [] if episode.group.dropped else self._reserved(episode)[: max(0, max_branches)]
        for branch in branches:
            branch.engine = episode.engine
            self._set_state(branch, "in_env")
        return branches

    def _tree(self, episode: InflightEpisode) -> list[InflightEpisode]:
        first = episode.index - episode.index % self.leaves
        return episode.group.episodes[first : first + self.leaves]

    def _reserved(self, episode: InflightEpisode) -> list[InflightEpisode]:
        return [leaf for leaf in self._tree(episode) if leaf.state == "reserved"]

    def skip(self, episode: InflightEpisode, error: ContextError | PoisonError) -> None:
        """End an episode whose task is too long for the context, or kills engines. In a batch, its group is replaced.

        Raises TaskError like BatchPlanner.
        """
        if episode.group.batch == EVALUATION:
            self._set_state(episode, "done")
            return
        if isinstance(error, PoisonError):
            self.outcomes[Outcome.INFRASTRUCTURE_ERROR] += 1
        if not episode.group.dropped:
            self._set_state(episode, "new")
            reason: Reason = "too_long" if isinstance(error, ContextError) else "failed"
            self.planner.replace(episode.group, reason, f"the last one: {error.message}", error.hint)

    def record_result(self, episode: InflightEpisode, result: Episode) -> None:
        """End an episode, unless it failed through no fault of the policy and restarts.

        In a batch, one that still fails after its retries, or could not be scored, has its group replaced. In an
        evaluation, only infrastructure errors are retried, as others would recur if decoding is greedy.

        Raises TaskError like BatchPlanner, and InfrastructureError if too many of the latest attempts have failed.
        """
        self._record(episode, result)
        self._look_at_infrastructure(result)

    def _look_at_infrastructure(self, result: Episode) -> None:
        """Raise an InfrastructureError, and start counting again, if too many of the latest attempts have failed."""
        config = self.config
        batches = math.ceil((config.lag + 1) * config.over_sampling)
        # Twice what can be in flight: losing everything in flight once is half of the window, which the default of
        # --schedule.max-infrastructure-failures still allows.
        window = max(_LEAST_ATTEMPTS, 2 * batches * self._groups * self._episodes)
        failed = result.outcome is Outcome.INFRASTRUCTURE_ERROR
        self._attempts.append(failed)
        self._failures += failed
        while len(self._attempts) > window:
            self._failures -= self._attempts.popleft()
        if len(self._attempts) < window or self._failures <= config.max_infrastructure_failures * window:
            return
        # Counting starts again, so that a run that is continued after this error is not stopped by the same failures.
        failures, self._failures = self._failures, 0
        self._attempts.clear()
        raise InfrastructureError(
            f"{failures} of the latest {window} attempts at episodes ended in an infrastructure error"
            + (f"; the last: {result.problem}" if failed else ""),
            hint=f"{Outcome.INFRASTRUCTURE_ERROR.hint}; --schedule.max-infrastructure-failures is "
            f"{config.max_infrastructure_failures:g}",
        )

    def _record(self, episode: InflightEpisode, result: Episode) -> None:
        group, failed = episode.group, not result.outcome.scored
        if group.batch == EVALUATION:
            failed = result.outcome is Outcome.INFRASTRUCTURE_ERROR
        else:
            self.outcomes[result.outcome] += 1
        if group.batch != EVALUATION and (failed or group.dropped):
            self.discard(episode, group.dropped or "failed", result.seconds)
        if group.dropped:
            return
        # A judge's error does not restart the episode: its score was retried already, and only the group is replaced.
        if failed and episode.tries < self.config.retries and result.outcome is not Outcome.JUDGE_ERROR:
            episode.tries += 1
            self.restart(episode)
        elif group.batch == EVALUATION:
            self._set_state(episode, "done")
        elif failed:
            self._set_state(episode, "new")
            problem = f"the last one ended with {result.outcome}: {result.problem}"
            kind = UnscoredError if result.outcome is Outcome.JUDGE_ERROR else TaskError
            self.planner.replace(group, "failed", problem, result.outcome.hint, kind)
        else:
            episode.result = result
            self._set_state(episode, "done")
            # The moving average orders the starts of the source's later episodes, longest first.
            tokens = float(result.response_tokens)
            old_length = self._expected_tokens.get(group.task.source, tokens)
            self._expected_tokens[group.task.source] = old_length * _MEMORY + tokens * (1 - _MEMORY)
            # The tree has ended with leaves to spare; the next of them is the root of another tree, so that the group
            # still gets its G episodes.
            if all(leaf.state in ("done", "reserved") for leaf in self._tree(episode)):
                for next_root in self._reserved(episode)[:1]:
                    self.restart(next_root)
            if all(sibling.result is not None for sibling in group.episodes):
                self.planner.complete(group)

    def discard(self, episode: InflightEpisode, reason: str, seconds: float) -> None:
        """Count the work of an attempt that ended without a result to train on."""
        self.planner.tally.discard(reason, tokens=episode.decoded_tokens, seconds=seconds)
        episode.decoded_tokens = 0

    def own_s(self, episode: InflightEpisode) -> float:
        """Return a time in seconds that advances while an episode is neither waiting for an engine nor paused.

        Episodes that continue while others are paused keep advancing.
        """
        now_s = self._clock_of(episode)()
        waits_s = now_s - episode.waiting_since if episode.state == "waiting" else 0.0
        return now_s - episode.waited_s - waits_s

    # Decisions.

    def pop_starts(self, *, max_starts: int = sys.maxsize) -> list[InflightEpisode]:
        """Return up to `max_starts` episodes to start now, so that engines have work waiting; their state becomes
        "in_env".

        Raises TaskError if a source yields no task, after returning the episodes found before that.
        """
        episodes: list[InflightEpisode] = []
        slots = self.capacity.slots
        target_running = slots + 1 + slots // 8  # slightly more than the slots: opening an environment takes time
        # Paused episodes must not hold back an awaited evaluation.
        state_counts = (self.evaluation_states,) if self.capacity.evaluating else (self.states, self.evaluation_states)
        # What is in flight at a publish is prefilled again. On a CPU that serves a few requests already, another one is
        # no cheaper now than later, so working ahead only costs.
        max_ahead = min(target_running, self._ahead_requests * len(self.capacity.engines))
        while (
            slots
            and len(episodes) < max_starts
            and (requests := sum(states["waiting"] + states["decoding"] for states in state_counts) + len(episodes))
            < target_running
            and sum(map(_in_flight, state_counts)) < self.config.max_episodes
        ):
            try:
                episode = self._next_episode(works_ahead=requests < max_ahead)
            except TaskError:
                # Episodes that were taken before the error are in_env already, and only the caller can run them.
                if not episodes:
                    raise
                break
            if episode is None:
                break
            if episode.group.batch != EVALUATION:
                self.planner.start(episode.group)
            self._set_state(episode, "in_env")
            episodes.append(episode)
        return episodes

    def pop_grants(self) -> list[InflightEpisode]:
        """Return the episodes that decode from now on, each on its `engine`; while paused, only an awaited
        evaluation's."""
        episodes: list[InflightEpisode] = []
        while heap := self._first_waiting():
            rank, _, episode = heap[0]
            if self.capacity.paused and (rank != _FIRST or not self.capacity.evaluating):
                break
            # Entries stay in the heap when their group is dropped or their episode stops waiting; they are skipped
            # here.
            if episode.state != "waiting":
                heapq.heappop(heap)
                continue
            engine = self._engine_for(episode)
            if engine is None:
                break
            heapq.heappop(heap)
            self._grant(episode, engine)
            episodes.append(episode)
        return episodes

    def pop_cancelled(self) -> list[InflightEpisode]:
        """Return the episodes in flight whose group was replaced; the caller must cancel them."""
        episodes, self._cancelled = self._cancelled, []
        return episodes

    # State.

    def coming_tasks(self, batches: int = 1) -> list[Task]:
        """Return the tasks of planned groups in order, then those that the batches after them will probably draw."""
        groups = sorted(self.planner.groups(), key=lambda group: (group.batch, group.order))
        return [*(group.task for group in groups), *self.tasks.coming(batches * self._groups)]

    @property
    def in_flight(self) -> int:
        """Number of episodes that have started but not ended."""
        return _in_flight(self.states) + _in_flight(self.evaluation_states)

    def describe_missing(self) -> str:
        """Describe in words what the next batch is waiting for."""
        states = Counter(episode.state for group in self.planner.incomplete_groups() for episode in group.episodes)
        del states["done"]
        words = {"new": "not started", "in_env": "with tools or judges", "waiting": "wait for an engine"}
        words["reserved"] = "reserved for branches"
        counts = ", ".join(f"{states[state]} {words.get(state, state)}" for state in sorted(states))
        planner = self.planner
        missing = f"batch {planner.next_batch} lacks {sum(states.values())} episodes" + (
            f": {counts}" if counts else ""
        )
        # With so old a version, nothing that starts now could be delivered in time.
        if planner.published - planner.served > self.config.lag:
            missing += (
                f"; none can start, as the engines serve version {planner.served} but the latest is "
                f"{planner.published}: load it"
            )
        return missing

    def _take_ticket(self, episode: InflightEpisode) -> None:
        """Number an episode by its first turn: later ones keep its place before episodes that started later."""
        if not episode.ticket:
            self._tickets += 1
            episode.ticket = self._tickets

    def _engine_for(self, episode: InflightEpisode) -> int | None:
        """Return a free engine, preferably one that may have the prompt in its KV cache; None if all are full."""
        return self.capacity.choose((episode.engine, episode.group.home))

    def _grant(self, episode: InflightEpisode, engine: int) -> None:
        episode.engine = engine
        episode.interrupted = False
        if episode.group.home is None:
            episode.group.home = engine
        self._set_state(episode, "decoding")

    def _next_episode(self, *, works_ahead: bool) -> InflightEpisode | None:
        """Return the next episode to start: from the awaited batch, then evaluations, then, if `works_ahead`, the
        earliest other batch.

        While an evaluation is awaited, only evaluation episodes start.
        """
        if self.capacity.evaluating:
            return self._pop_evaluation()
        if self.capacity.paused:
            return None
        # The awaited batch first, then evaluations, then later batches in order, as long as engines may work ahead.
        for number in self.planner.open_batches():
            is_ahead = number > self.planner.next_batch
            if is_ahead and ((episode := self._pop_evaluation()) is not None or not works_ahead):
                return episode
            self.planner.fill(number, idle=not self.states["new"])
            episode = self._pop_new(number)
            # Over-sampling starts one surplus group at a time, only when every planned episode of the awaited batch has
            # started.
            if episode is None and number == self.planner.next_batch and self.planner.add_surplus():
                episode = self._pop_new(number)
            if episode is not None:
                return episode
        return self._pop_evaluation()

    def _pop_evaluation(self) -> InflightEpisode | None:
        return self._to_evaluate.popleft() if self._to_evaluate else None

    def _first_waiting(self) -> list[tuple[int, int, InflightEpisode]]:
        """Return the heap with the next episode."""
        awaited = bool(self._waiting) and self._waiting[0][0] <= self.planner.next_batch
        return self._waiting if awaited or not self._riding else self._riding

    def _pop_new(self, last: int) -> InflightEpisode | None:
        while self._new and self._new[0][0] <= last:
            episode = heapq.heappop(self._new)[-1]
            if episode.state == "new" and not episode.group.dropped:
                return episode
        return None

    def _queue(self, episode: InflightEpisode) -> None:
        group = episode.group
        # Started last, the longest would be the batch's stragglers.
        longest_first = -self._expected_tokens.get(group.task.source, 0.0)
        heapq.heappush(self._new, (group.batch, longest_first, group.order, episode.index, episode))

    def _add_group(self, group: GroupState) -> None:
        self.states["new"] += len(group.episodes)
        for episode in group.episodes:
            # Only the first of each tree's neighbours starts; the others are reserved for its branches.
            if episode.index % self.leaves:
                self._set_state(episode, "reserved")
            else:
                self._queue(episode)

    def _end_group(self, group: GroupState) -> None:
        for episode in group.episodes:
            if episode.state in ("in_env", "waiting", "decoding"):
                self._cancelled.append(episode)
            # The caller cancels the asyncio task; the engine's slot counts as free from here on.
            self._set_state(episode, "done")

    def _clock_of(self, episode: InflightEpisode) -> Callable[[], float]:
        if episode.group.batch >= 0:
            return self.capacity.running_s
        return self.capacity.evaluation_s

    def _set_state(self, episode: InflightEpisode, state: EpisodeState) -> None:
        old_state, episode.state = episode.state, state
        if state == "waiting":
            episode.waiting_since = self._clock_of(episode)()
        elif old_state == "waiting":
            episode.waited_s += self._clock_of(episode)() - episode.waiting_since
        # The only place that changes an engine's load, so that it always equals the number of episodes in this state.
        if old_state != state and "decoding" in (old_state, state):
            assert episode.engine is not None, "a decoding episode has an engine"
            self.capacity.add_requests(episode.engine, 1 if state == "decoding" else -1)
        states = self.states if episode.group.batch >= 0 else self.evaluation_states
        states[old_state] -= 1
        states[state] += 1


def _in_flight(states: Counter[EpisodeState]) -> int:
    return states["in_env"] + states["waiting"] + states["decoding"]
