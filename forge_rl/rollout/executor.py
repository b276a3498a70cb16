"""Rollout executor: carries out the scheduler's decisions, from tasks to scored groups.

Each episode is an asyncio task: environments and rewards overlap with decoding, and an episode is scored as it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from forge_rl.errors import ContextError, ForgeError, PoisonError, TaskError, UnscoredError
from forge_rl.metrics import RolloutStatus
from forge_rl.rollout.advice import Advice
from forge_rl.rollout.dispatcher import Dispatcher, PolicyClient
from forge_rl.rollout.evaluation import Evaluation, describe_failure
from forge_rl.rollout.group_scores import GroupScores
from forge_rl.rollout.interfaces import CountsEpisodes, NoListener, PreparesTasks, RolloutListener, RunEpisode
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.reward_outage import EpisodeScoring, RewardOutage
from forge_rl.rollout.state import EVALUATION, InflightEpisode
from forge_rl.system.seeds import derive_seed
from forge_rl.system.tasks import task_group
from forge_rl.system.terminal import shortened
from forge_rl.types import Batch, Episode, Group, Outcome, Sampling, Task

if TYPE_CHECKING:
    import torch

_WAVE = 64
"""Maximum episodes started per event loop iteration, so that others get their turn."""
_MOST_OUTAGES = 3
"""Maximum outages of the reward after which an evaluation repeats an episode."""


class RolloutExecutor:
    """Generates batches of P groups of G episodes.

        batch = await run.rollouts.next_batch()

    Args:
        dispatcher: decodes on the engines that its scheduler grants.
        devices: hands devices to the engines and back.
        seed: sampling seed. The same seed yields the same batches if the schedule has no lag.
        version: returns the latest published version.
        scoring: the reward; by default each episode must come with a score.
        listener: receives warnings and finished episodes.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        run_episode: RunEpisode,
        *,
        devices: DeviceHandover,
        version: Callable[[], int],
        seed: int,
        scoring: EpisodeScoring | None = None,
        listener: RolloutListener | None = None,
    ) -> None:
        self.config = dispatcher.scheduler.config
        """Settings of the schedule. Assign new ones of the same kind to apply them from the next batch on."""
        self.last: Batch | None = None
        """The last delivered batch."""
        self.evaluation: Evaluation | None = None
        """The last started evaluation."""
        self.adapters: Mapping[str, str] = {}
        """Loaded adapter that samples a source's episodes, by source; all other sources are sampled with the policy
        itself."""
        self._dispatcher = dispatcher
        self._scheduler = dispatcher.scheduler
        self._generator = dispatcher.generator
        self._run_episode = run_episode
        scoring = scoring or EpisodeScoring()
        self._scores = GroupScores(scoring.reward, lambda episode: self._tell(self._listener.episode, episode))
        self._devices = devices
        self._seed = seed
        self._version = version
        self._listener = listener or NoListener()
        self._outage = RewardOutage(scoring, warn=self._warn, on_end=self._advance, on_failure=self._fail)
        """While it lasts, no episodes start."""
        self._generator.listeners.add(self._on_engines_changed)
        self._running: dict[InflightEpisode, asyncio.Task[None]] = {}
        self._episodes: dict[asyncio.Task[None], InflightEpisode] = {}
        self._failure: BaseException | None = None
        """Error that the next batch will raise; no episodes start meanwhile."""
        self._raised = False
        """True once that error was raised to a caller."""
        self._advice = Advice()
        self._more: asyncio.Handle | None = None
        """Callback that starts the remaining episodes in the next event loop iteration."""
        self._changed = asyncio.Event()
        # Made once, as each episode in flight would otherwise keep its own.
        self._context = contextvars.copy_context()
        self._start_branch, self._on_done = self._start, self._forget
        self._hold = dispatcher.hold
        self._hold.listeners.add(self._changed.set)

    async def next_batch(self) -> Batch:
        """Return the next complete batch: P groups in the mixture's proportions.

        Work in flight for later batches then pauses at a token boundary, unless the schedule decodes while training,
        and resumes with the next call; so do evaluations, except one of a single version, which the batch waits for.
        After an error, the next call continues where this one stopped.

        Raises:
            TaskError: a source yields only unusable groups.
        """
        self._go_on()
        await self._devices.hand_to_engines()
        self._scheduler.capacity.set_paused(False)
        self._set_versions()
        self._scheduler.planner.await_batch()
        self._scheduler.reconfigure(self.config)
        if isinstance(self._run_episode, PreparesTasks):
            self._advance()
            self._run_episode.prepare(self._scheduler.coming_tasks())  # also after a recovery, or a changed mixture
        # Meanwhile engines are attested, and guests may decode on the devices of trainers that wait.
        async with self._attesting(), self._devices.trainers_wait():
            while True:
                await self._while_paused()
                # Cleared before deciding, so that no change during the decision is lost.
                self._changed.clear()
                self._advance()
                self._raise_failure()
                version, number = self._scheduler.planner.published, self._scheduler.planner.next_batch
                if not self._held and (groups := self._scheduler.planner.pop_batch()) is not None:
                    break
                self._advance()  # start the episodes of groups planned by pop_batch()
                await self._changed.wait()
        batch_groups = tuple(Group(task=group.task, episodes=group.results) for group in groups)
        for group in groups:
            group.episodes.clear()  # the reference cycle would hold tokens until garbage collection
        planner = self._scheduler.planner
        # A group that over-sampling carried over was drawn for an earlier batch, and must be drawn again by a resume.
        is_in_order = self.config.exact and all(group.place[0] >= planner.next_batch for group in planner.groups())
        pending = None if is_in_order else [group.task for group in planner.groups()]
        self._scheduler.tasks.batch_delivered(batch_groups, pending=pending)
        if not self.config.decodes_while_training:
            self._scheduler.capacity.set_paused(True)
            await self._hand_to_trainer()
        if isinstance(self._run_episode, PreparesTasks):  # as early as the next batch, which is not planned yet, would
            self._run_episode.prepare(self._scheduler.coming_tasks(batches=2))
        self._advance()
        self.last = Batch(groups=batch_groups, version=version)
        if text := self._advice.look_at(self.last, max_tokens=self._generator.sampling.max_tokens):
            self._warn(f"batch {number}: {text}")
        return self.last

    def start_evaluation(self, evaluation: Evaluation) -> None:
        """Run an evaluation's episodes alongside the batches', from the next call of `next_batch` on.

        They use the capacity that the awaited batch leaves free and belong to no batch. Infrastructure errors are
        retried. Only one evaluation can run at a time.
        """
        assert self.evaluation is None or self.evaluation.complete, "an evaluation is under way"
        self.evaluation = evaluation
        # Set by set, so that the first set's scores come first.
        for groups in evaluation.groups.values():
            self._scheduler.add_evaluation(groups)

    async def finish_evaluation(self) -> None:
        """Wait for the running evaluation, if any. Its episodes go first, and no episode of a batch starts."""
        if self.evaluation is None or self.evaluation.complete:
            return
        self._go_on()
        await self._devices.hand_to_engines()
        self._scheduler.await_evaluation(True)
        try:
            async with self._attesting():
                while True:
                    await self._while_paused()
                    self._changed.clear()
                    self._advance()
                    self._raise_failure()
                    if self.evaluation.complete:
                        return
                    await self._changed.wait()
        finally:
            self._scheduler.await_evaluation(False)

    @contextlib.asynccontextmanager
    async def _attesting(self) -> AsyncIterator[None]:
        """Attest the engines' version while the body runs; leaving the body waits for the result.

        Raises:
            AttestationError: an engine computes with something else.
        """
        if self._dispatcher.probes is None:
            yield
            return
        async with task_group() as group:
            group.create_task(self._dispatcher.probes.attest())
            yield

    @contextlib.asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Hold all requests at a token boundary while the body runs; requests that were decoding resume after it."""
        capacity = self._scheduler.capacity
        paused, evaluating = capacity.paused, capacity.evaluating
        capacity.set_paused(True)
        # An awaited evaluation would decode despite the pause.
        self._scheduler.await_evaluation(False)
        await self._hand_to_trainer()
        yield
        if evaluating or not paused:
            await self._devices.hand_to_engines()
        self._scheduler.await_evaluation(evaluating)
        capacity.set_paused(paused)

    async def _while_paused(self) -> None:
        """Wait while the run is paused."""
        if self._hold.paused:
            async with self.holding():
                await self._hold.released()

    async def greedy_rewards(self, batch: Batch) -> torch.Tensor:
        """Answer each task of a batch once at temperature 0, with the engines' current weights.

            advantages = remax_advantages(batch.rewards, await run.rollouts.greedy_rewards(batch))

        Episodes of later batches pause meanwhile. A running evaluation is finished first.

        Returns:
            The rewards, [P] float32; NaN for an episode that failed through no fault of the policy.
        """
        import torch

        await self.finish_evaluation()
        sampling = replace(self._generator.sampling, temperature=0.0)
        sets = {"greedy": [group.task for group in batch.groups]}
        # As an evaluation, these episodes come first, and are retried after infrastructure's failures.
        greedy = Evaluation(sets, episodes=1, sampling=sampling, version=self._version())
        self.start_evaluation(greedy)
        await self.finish_evaluation()
        if not self.config.decodes_while_training:
            await self._hand_to_trainer()
        episodes = [episode for (episode,) in greedy.results("greedy")]
        if failed := [episode for episode in episodes if not episode.outcome.scored]:
            self._warn(f"{len(failed)} of {len(episodes)} greedy episodes failed; {describe_failure(failed[-1])}")
        return torch.tensor([episode.reward if episode.outcome.scored else math.nan for episode in episodes])

    def reward_replaced(self) -> None:
        """Resume if the run was waiting for a new reward, and warn about scores of the old one that stay."""
        # What the old reward could or could not score says nothing about the new one.
        self._outage.unscored = self._outage.scored = ()
        if self._outage.lasts:
            self._outage.end()
            self._advance()
        scored = sum(len(group.results) for group in self._scheduler.planner.groups())
        if scored:
            self._warn(f"{scored} episodes of coming batches keep the scores of the replaced reward")

    def samples(self) -> list[tuple[Episode, ...]]:
        """Return a group of the last batch, and the last group that could not be scored, to try a reward on."""
        samples = [self.last.groups[0].episodes] if self.last is not None else []
        return [*samples, self._outage.unscored] if self._outage.unscored else samples

    async def close(self) -> None:
        """Cancel all episodes in flight."""
        self._generator.listeners.discard(self._on_engines_changed)
        self._hold.listeners.discard(self._changed.set)
        await self._cancel_all()

    def metrics(self) -> dict[str, float]:
        """Return metrics since the last call: engine utilisation, attempts by outcome, unused groups by reason, all
        completed groups, discarded work, and the curriculum's; and the current number of episodes in flight."""
        scheduler, replaced = self._scheduler, self._scheduler.planner.replaced
        busy, offered = scheduler.capacity.pop_busy()
        values = {f"outcomes/{outcome}": float(scheduler.outcomes[outcome]) for outcome in Outcome}
        values |= {f"groups/replaced_{reason}": float(count) for reason, count in replaced.items()}
        values |= scheduler.planner.tally.pop_metrics(scheduler.planner.next_batch)
        values["rollouts/in_flight"] = float(scheduler.in_flight)
        if self.config.over_sampling > 1:
            values["groups/overtaken"], scheduler.planner.overtaken = float(scheduler.planner.overtaken), 0
        if offered:
            values["rollouts/slots_busy"] = busy / offered
        if self._dispatcher.probes is not None:
            values |= self._dispatcher.probes.pop_metrics()
        scheduler.outcomes.clear()
        replaced.clear()
        if isinstance(self._run_episode, CountsEpisodes):
            values |= self._run_episode.metrics()
        return values | scheduler.tasks.metrics()

    def status(self) -> RolloutStatus:
        """Return the progress of the next batch and the number of episodes by state."""
        scheduler, planner = self._scheduler, self._scheduler.planner
        done, groups = planner.progress()
        states = scheduler.states + scheduler.evaluation_states
        evaluation = self.evaluation
        return RolloutStatus(
            batch=planner.next_batch,
            groups_done=done,
            groups=groups,
            episodes_running=states["decoding"],
            episodes_waiting=states["in_env"],
            queue=states["waiting"],
            engines_serving=len(scheduler.capacity.engines),
            engines=self._dispatcher.wanted_engines(),
            lag_max=max(0, planner.published - planner.oldest_version()),
            evaluated=evaluation.total - evaluation.left if evaluation else 0,
            to_evaluate=evaluation.total if evaluation else 0,
        )

    def waiting_for(self) -> str:
        """Describe in words what the run is waiting for: the next batch, or an evaluation."""
        done, groups = self._scheduler.planner.progress()
        is_held = done == groups and self._held
        if self._outage.lasts:
            return "the reward to work again, or another one, as all scores fail"
        if self.evaluation is not None and (is_held or self._scheduler.capacity.evaluating):
            return f"the evaluation of version {self.evaluation.version} lacks {self.evaluation.left} episodes"
        return self._scheduler.describe_missing()

    def state(self) -> dict[str, object]:
        """Return the state of the mixture and the batches as JSON; undelivered tasks will be drawn again."""
        planner = self._scheduler.planner
        return {
            "mixture": self._scheduler.tasks.state(),
            "used": self._scheduler.tasks.consumed([group.task for group in planner.groups()]),
            "batches": planner.next_batch,
        }

    async def restore(self, state: dict[str, object]) -> None:
        """Continue from a saved state; cancels episodes in flight, also an evaluation's.

        Raises:
            TaskError: the state was not made by `state`.
        """
        mixture, used, batches = state.get("mixture"), state.get("used"), state.get("batches")
        if not isinstance(mixture, dict) or not isinstance(used, list) or not isinstance(batches, int):
            raise TaskError(f"the saved rollout state has unexpected contents: {sorted(state)}", hint="start a new run")
        await self._cancel_all()
        self._scheduler.tasks.restore(mixture, used)
        self._scheduler.reconfigure(self.config)
        self._scheduler.reset(batches)

    def leave_out(self, sources: Collection[str]) -> None:
        """Generate nothing for some sources from the next batch on, such as those whose adapter has failed.

        Raises:
            TaskError: no other source is left.
        """
        self._scheduler.tasks.leave_out(sources)

    def only_evaluate(self) -> None:
        """Start evaluations' episodes only, and draw no tasks: nobody will ask for a batch."""
        self._scheduler.capacity.set_paused(True)

    async def cancel_evaluation(self) -> None:
        """Cancel the running evaluation, if there is one, after `only_evaluate`."""
        if self.evaluation is not None:
            await self._cancel_all()
            self._scheduler.reset(0)

    async def reset(self, state: dict[str, object], *, seed: int) -> None:
        """Begin again from the state before the first batch, with a seed for sampling and for the order of tasks.

        Raises:
            TaskError: a source cannot begin again, or has no other order.
        """
        await self.restore(state)
        self._scheduler.tasks.reseed(seed)
        self._seed, self.last = seed, None

    def __repr__(self) -> str:
        done, groups = self._scheduler.planner.progress()
        return f"Rollouts  {self.config.kind}  {done} of {groups} groups; {self._scheduler.describe_missing()}"

    async def _cancel_all(self) -> None:
        if self._more is not None:
            self._more.cancel()
        self._more = None
        self._outage.end()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        # Cancelled episodes may have failed as they ended; errors of work that is given up are dropped.
        self._failure = self.evaluation = None
        self._raised = False

    async def _hand_to_trainer(self) -> None:
        states = self._scheduler.states + self._scheduler.evaluation_states
        await self._devices.hand_to_trainer(idle=not states["decoding"])

    @property
    def _held(self) -> bool:
        """True while the next batch waits for an evaluation of a single version."""
        return self.evaluation is not None and self.evaluation.one_version and not self.evaluation.complete

    def _go_on(self) -> None:
        """Raise an error that has occurred since the last batch; resume after one that was already raised."""
        # An error that nobody has seen is raised first; one that was raised is answered by this call, which goes on.
        if not self._raised:
            self._raise_failure()
        failure, self._failure, self._raised = self._failure, None, False
        if failure is not None:
            self._warn(f"rollouts continue after an error: {str(failure).splitlines()[0]}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _on_engines_changed(self) -> None:
        self._dispatcher.update_engines()
        self._dispatcher.grant()
        self._changed.set()

    def _set_versions(self) -> None:
        planner = self._scheduler.planner
        served_version = self._generator.version
        planner.set_versions(planner.served if served_version is None else served_version, self._version())

    def _advance(self) -> None:
        """Carry out the scheduler's current decisions."""
        scheduler, loop = self._scheduler, asyncio.get_running_loop()
        self._set_versions()
        try:
            # Nothing starts while an error waits to be raised, scores fail, or the rest of a wave is due.
            idle = self._failure is not None or self._outage.lasts or self._more is not None
            starts = [] if idle else scheduler.pop_starts(max_starts=_WAVE)
            for episode in starts:
                self._start(episode, self._run_episode)
            if len(starts) == _WAVE:
                self._more = loop.call_soon(self._start_more)
        except ForgeError as error:
            self._fail(error)
        for episode in scheduler.pop_cancelled():
            # The episode whose end led to the replacement is still running this very code; cancelling it would lose its
            # own bookkeeping.
            if episode in self._running and self._running[episode] is not asyncio.current_task():
                self._running[episode].cancel()
        self._dispatcher.grant()

    def _start(self, episode: InflightEpisode, run: RunEpisode) -> asyncio.Task[None]:
        """Run an episode in a task of its own."""
        task = self._running[episode] = asyncio.get_running_loop().create_task(self._run(episode, run))
        self._episodes[task] = episode
        task.add_done_callback(self._on_done, context=self._context)
        return task

    def _start_more(self) -> None:
        self._more = None
        self._advance()

    def _fail(self, error: BaseException) -> None:
        """Make the next batch fail with an error."""
        # The first error is the cause; later ones mostly follow from it.
        self._failure = self._failure or error
        self._changed.set()

    async def _run(self, episode: InflightEpisode, run: RunEpisode) -> None:
        """Run an episode and record its end.

        An error that is not an outcome fails the next batch, or the awaited evaluation.
        """
        task, scheduler = episode.group.task, self._scheduler
        evaluation = self.evaluation if episode.group.batch == EVALUATION else None
        record: Callable[[], None]
        # Its own time, without waits and pauses, is what a dropped attempt has cost.
        began_s = scheduler.own_s(episode)
        try:
            # An episode of an evaluation is repeated after an outage of the reward, as its task cannot be replaced by
            # another.
            for outages in itertools.count():
                try:
                    result = await run(task, self._client(episode, evaluation))
                except asyncio.CancelledError as error:
                    result = _not_cancelled(task, error)
                if result.outcome.scored:
                    result = await self._scores.score(episode, result)
                if evaluation is None or result.outcome is not Outcome.JUDGE_ERROR or outages == _MOST_OUTAGES:
                    break
                if not await self._outage.is_over_for(self._scores.scored_with(episode, result)):
                    break
            if len(problem := shortened(result.problem)) < len(result.problem):
                result = result.updated(problem=problem)
            # Called outside of this try: an error of the scheduler is the run's, not the episode's.
            record = functools.partial(scheduler.record_result, episode, result)
            warning = f"{result.outcome}: {result.problem}" if result.problem else ""
            is_reported = not result.unscored  # else reported once it is scored
        except (ContextError, PoisonError) as error:
            problem = f"{error.message}; {error.hint}"
            result = Episode(task=task, turns=(), outcome=Outcome.ENVIRONMENT_ERROR, problem=problem)
            record = functools.partial(scheduler.skip, episode, error)
            warning, is_reported = f"skipped: {error.message}", False
        except asyncio.CancelledError:
            if episode.group.dropped:
                scheduler.discard(episode, episode.group.dropped, scheduler.own_s(episode) - began_s)
            raise
        except BaseException as error:
            # Not an outcome but a bug or a limit: the batch fails with it, and the episode starts again if the run goes
            # on.
            scheduler.restart(episode)
            self._fail(error)
            return
        if result.score is not None:
            self._outage.scored = self._scores.scored_with(episode, result)
        elif evaluation is None and result.outcome is Outcome.JUDGE_ERROR:
            self._outage.unscored = (*episode.group.results, result)
        try:
            record()
            # While retries are left, the scheduler has restarted the episode instead of ending it.
            if evaluation is not None and episode.state == "done":
                if not result.outcome.scored:  # its mates are scored whichever of them ends last
                    await self._scores.score(episode, result)
                evaluation.record(episode, result)
        except UnscoredError as error:
            self._outage.begin(error)
        except Exception as error:  # such as a source without usable groups
            self._fail(error)
        if evaluation is not None:
            warning, is_reported = "", not result.outcome.scored
        if is_reported:
            self._tell(self._listener.episode, result)
        if warning:
            self._warn(f"{task.source} {task.id}: {warning}")
        self._advance()
        self._changed.set()

    def _client(self, episode: InflightEpisode, evaluation: Evaluation | None) -> PolicyClient:
        """Return an episode's policy client, with a seed that is the same in every run."""
        task, attempt = episode.group.task, (episode.index, episode.tries)
        if evaluation is not None:
            seed = derive_seed(self._seed, "evaluation", task.source, task.id, *attempt)
            return self._dispatcher.client(episode, self._adapted(evaluation.sampling, task), seed)
        seed = derive_seed(self._seed, "episode", episode.group.place, task.source, task.id, *attempt)
        return self._dispatcher.client(episode, self._adapted(self._generator.sampling, task), seed, self._start_branch)

    def _adapted(self, sampling: Sampling, task: Task) -> Sampling:
        """Return sampling settings with the adapter of a task's source, if it has one."""
        adapter = self.adapters.get(task.source)
        return sampling if adapter is None else replace(sampling, adapter=adapter)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Forget a finished asyncio task; its episode may be running in another one by now."""
        episode = self._episodes.pop(task)
        # A restart may already have put the episode's next attempt in this place.
        if self._running.get(episode) is task:
            del self._running[episode]

    def _warn(self, text: str) -> None:
        self._tell(self._listener.warn, text)

    def _tell(self, receive: Callable[..., None], *news: object) -> None:
        """Call the listener, about an episode once it is recorded; if it raises, only the next batch fails."""
        try:
            receive(*news)
        except Exception as error:
            self._fail(error)


def _not_cancelled(task: Task, error: asyncio.CancelledError) -> Episode:
    """Return an environment error if an episode's code raised this without being cancelled; else raise it again."""
    current = asyncio.current_task()
    if current is None or current.cancelling():
        raise error
    problem = "its code raised a CancelledError although it was not cancelled"
    return Episode(task=task, turns=(), outcome=Outcome.ENVIRONMENT_ERROR, problem=problem)
