"""Rollouts: carries out what the schedule decides, from tasks to scored groups.

Each episode is a task of its own: worlds and rewards overlap decoding, and an episode is scored as it ends.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from forge_rl.data.mixture import Mixture
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.envs.protocol import Observation
from forge_rl.errors import DeadlineError, ForgeError, ReplicaError, TaskError
from forge_rl.pipeline.plans import EpisodePlan, ScheduleConfig
from forge_rl.pipeline.schedule import Schedule
from forge_rl.runtime.tasks import task_group
from forge_rl.services.environment import World
from forge_rl.types import Batch, Episode, Group, Outcome, Sampling, Task, Turn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a batch is."""

    groups: int
    """P."""
    episodes: int
    """G."""


class Decoder(Protocol):
    """What rollouts need of the Generator."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def version(self) -> int | None: ...

    def engines(self) -> dict[int, int]: ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling | None = None, *, engine: int | None = None
    ) -> Turn: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


class Worlds(Protocol):
    """What rollouts need of the Environment."""

    async def open(self, task: Task) -> tuple[World, Observation]: ...


class Judge(Protocol):
    """What rollouts need of the Reward."""

    async def score(self, task: Task, text: str) -> float: ...


class Rollouts:
    """Makes batches.

    Args:
        mixture: where tasks come from.
        shape: of a batch.
        schedule: which episodes run when.
        tokenizer: of the policy.
        generator: decodes.
        environment: makes each episode's world.
        reward: scores episodes whose world does not.
        seed: of the sampling. The same seed gives the same batches where the schedule has no lag.
        version: of the trainer's weights, as of now.
        warn: takes a line for the user.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        mixture: Mixture,
        shape: Shape,
        schedule: ScheduleConfig,
        tokenizer: Tokenizer,
        generator: Decoder,
        environment: Worlds,
        reward: Judge,
        seed: int,
        version: Callable[[], int],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = schedule
        self._tasks = _Tasks(mixture)
        self._shape = shape
        self._tokenizer = tokenizer
        self._generator = generator
        self._environment = environment
        self._reward = reward
        self._seed = seed
        self._version = version
        self._warn = warn
        self._clock = clock
        self._schedule = self._new_schedule(0)
        self._running: dict[EpisodePlan, asyncio.Task[None]] = {}
        self._granted: dict[EpisodePlan, asyncio.Future[None]] = {}
        self._failure: BaseException | None = None
        self._stirred = asyncio.Event()
        self._paused = False

    async def next_batch(self) -> Batch:
        """The next batch, complete: P groups in the mixture's proportions, in which not all rewards are equal.

        What is under way for later batches then stops at a token boundary, unless the schedule lets engines go on,
        and goes on with the next call.

        Raises:
            TaskError: a source gives nothing but groups that cannot be used.
        """
        await self._go_on()
        while True:
            self._stirred.clear()
            self._pump()
            if self._failure is not None:
                raise self._failure
            groups = self._schedule.take()
            if groups is not None:
                break
            self._pump()  # groups that take() replaced have episodes to begin
            await self._stirred.wait()
        self._tasks.delivered()
        if not self.config.decodes_while_training:
            self._schedule.pause()
            if self._schedule.count("decoding"):
                await self._generator.pause()
                self._paused = True
        self._pump()
        return Batch(
            groups=tuple(Group(task=group.task, episodes=group.results) for group in groups), version=self._version()
        )

    async def evaluate(self, tasks: Sequence[Task]) -> list[Episode]:
        """One greedy episode of each task, in order; they go before all others."""
        greedy = Sampling(max_tokens=self._generator.sampling.max_tokens, temperature=0)
        if self._paused:
            await self._generator.resume()
            self._paused = False
        async with task_group() as running:
            episodes = [running.create_task(self._outside(task, greedy)) for task in tasks]
        return [episode.result() for episode in episodes]

    async def episode(self, task: Task, sampling: Sampling) -> Episode:
        """One attempt at a task, of no batch: as many turns as its world wants, then the score."""
        return await self._outside(task, sampling)

    async def close(self) -> None:
        """End all that is under way."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def metrics(self) -> dict[str, float]:
        """Since this was last asked: the share of the engines' budgets that was used in rollouts, attempts by outcome,
        and groups that were not used, by why; and what is under way now."""
        schedule = self._schedule
        busy, offered = self.take_busy()
        values = {f"outcomes/{outcome}": float(schedule.outcomes[outcome]) for outcome in Outcome}
        values |= {f"groups/replaced_{why}": float(count) for why, count in schedule.replaced.items()}
        values["rollouts/under_way"] = float(schedule.under_way)
        if offered:
            values["rollouts/slots_busy"] = busy / offered
        schedule.outcomes.clear()
        schedule.replaced.clear()
        return values

    def take_busy(self) -> tuple[float, float]:
        """See Schedule.take_busy."""
        return self._schedule.take_busy()

    def waiting_for(self) -> str:
        """What the next batch waits for, in words."""
        return self._schedule.missing()

    def state(self) -> dict[str, object]:
        """Where the mixture and the batches stand, as JSON: what is not delivered is drawn again."""
        return {
            "mixture": self._tasks.state(),
            "used": self._tasks.used([group.task for group in self._schedule.planned()]),
            "batches": self._schedule.next,
        }

    def restore(self, state: dict[str, object]) -> None:
        """Go on from a saved state, before the first batch."""
        mixture, used, batches = state.get("mixture"), state.get("used"), state.get("batches")
        if not isinstance(mixture, dict) or not isinstance(used, list) or not isinstance(batches, int):
            raise TaskError(f"the saved state of the rollouts holds {sorted(state)}", mend="start a new run")
        self._tasks.restore(mixture, used)
        self._schedule = self._new_schedule(batches)

    def __repr__(self) -> str:
        done, groups = self._schedule.progress()
        return f"Rollouts  {self.config.kind}  {done} of {groups} groups; {self._schedule.missing()}"

    def _new_schedule(self, first: int) -> Schedule:
        return Schedule(
            self.config,
            groups=self._shape.groups,
            episodes=self._shape.episodes,
            tasks=self._tasks,
            clock=self._clock,
            first=first,
        )

    async def _go_on(self) -> None:
        if self._paused:
            await self._generator.resume()
            self._paused = False
        self._schedule.resume()

    def _pump(self) -> None:
        """Do what the schedule says now."""
        schedule = self._schedule
        self._see_engines()
        schedule.version = self._generator.version or 0
        try:
            for plan in schedule.starts():
                self._running[plan] = asyncio.get_running_loop().create_task(self._run(plan))
            for plan in schedule.cancels():
                if plan in self._running and self._running[plan] is not asyncio.current_task():
                    self._running[plan].cancel()
        except ForgeError as error:
            self._fail(error)
        self._grant()

    def _see_engines(self) -> None:
        engines = self._generator.engines()
        if engines != self._schedule.engines:
            self._schedule.set_engines(engines)

    def _grant(self) -> None:
        for plan in self._schedule.grants():
            granted = self._granted.pop(plan)
            if not granted.done():
                granted.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stirred.set()

    async def _run(self, plan: EpisodePlan) -> None:
        """An episode of a batch, to its end; whatever goes wrong that is not of its own fails the next batch."""
        group = plan.group
        sampling = replace(self._generator.sampling, seed=self._seed_of(plan))
        try:
            result = await self._attempt(plan, group.task, sampling)
            self._running.pop(plan, None)
            if result.problem:
                self._warn(f"{group.task.source} {group.task.id}: {result.outcome}: {result.problem}")
            self._schedule.ends(plan, result)
        except asyncio.CancelledError:
            self._running.pop(plan, None)
            raise
        except BaseException as error:
            self._running.pop(plan, None)
            self._fail(error)
            return
        self._pump()
        self._stirred.set()

    async def _outside(self, task: Task, sampling: Sampling) -> Episode:
        self._see_engines()
        plan = self._schedule.outside(task)
        try:
            result = await self._attempt(plan, task, sampling)
        finally:
            self._schedule.gives_up(plan)
            self._grant()
        if not result.outcome.scored:
            raise ForgeError(
                f"an evaluation of {task.source} {task.id} ended with {result.outcome}: {result.problem}",
                mend="see the services' logs in the run folder",
            )
        return result

    async def _attempt(self, plan: EpisodePlan, task: Task, sampling: Sampling) -> Episode:
        """As many turns as the world wants, then the score; an error of the world's or the judge's own is an outcome.

        Raises:
            ReplicaError: a process died.
        """
        began = self._clock()
        turns: list[Turn] = []

        def ended(outcome: Outcome, reward: float = 0.0, problem: str = "") -> Episode:
            return Episode(
                task=task,
                turns=tuple(turns),
                reward=reward,
                outcome=outcome,
                problem=problem,
                seconds=self._clock() - began,
            )

        outcome, reward = Outcome.COMPLETED, None
        try:
            world, observation = await self._environment.open(task)
            prompt_ids = self._tokenizer.render(observation.messages)
        except Exception as error:
            return ended(_outcome_of(error, Outcome.ENVIRONMENT_ERROR), problem=str(error))
        while True:
            turn = await self._decode(plan, prompt_ids, sampling)
            turns.append(turn)
            try:
                step = await world.step(turn.text)
                if not step.done and turn.truncated:
                    await world.close()
            except Exception as error:
                return ended(_outcome_of(error, Outcome.ENVIRONMENT_ERROR), problem=str(error))
            if turn.truncated:
                outcome = Outcome.TRUNCATED
            if step.model_error:
                outcome = Outcome.MODEL_ERROR
            if step.done or turn.truncated:
                break
            prompt_ids = self._tokenizer.extend(turn.prompt_ids + turn.token_ids, step.messages)
        reward = step.reward
        if reward is None:
            try:
                reward = await self._reward.score(task, turn.text)
            except Exception as error:
                return ended(_outcome_of(error, Outcome.JUDGE_ERROR), problem=str(error))
        return ended(outcome, reward)

    async def _decode(self, plan: EpisodePlan, prompt_ids: Sequence[int], sampling: Sampling) -> Turn:
        """One turn, on the engine that the schedule grants."""
        granted = self._granted[plan] = asyncio.get_running_loop().create_future()
        self._schedule.wants(plan)
        self._grant()
        try:
            await granted
            return await self._generator.generate(prompt_ids, sampling, engine=plan.engine)
        finally:
            self._granted.pop(plan, None)
            self._schedule.leaves(plan)
            self._grant()

    def _seed_of(self, plan: EpisodePlan) -> int:
        return zlib.crc32("/".join(map(str, (self._seed, *plan.place))).encode())


def _outcome_of(error: Exception, own: Outcome) -> Outcome:
    """What an error of a service makes of an episode.

    Raises:
        ReplicaError: that one; it is not the episode's.
    """
    if isinstance(error, ReplicaError):
        raise error
    return Outcome.INFRASTRUCTURE_ERROR if isinstance(error, DeadlineError) else own


class _Tasks:
    """A mixture, and where it stood before each batch that is not delivered, so that such can be drawn again."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture
        self._before: list[tuple[dict[str, object], int]] = []
        self._drawn: list[tuple[str, str]] = []
        self._skip: set[tuple[str, str]] = set()

    def turns(self, groups: int) -> list[str]:
        self._before.append((self._mixture.state(), len(self._drawn)))
        return self._mixture.turns(groups)

    def draw_from(self, source: str) -> Task:
        while True:
            task = self._mixture.draw_from(source)
            self._drawn.append((task.source, task.id))
            if (task.source, task.id) not in self._skip:
                return task
            self._skip.discard((task.source, task.id))

    def delivered(self) -> None:
        """A batch was delivered: the oldest."""
        if self._before:
            self._before.pop(0)
        kept = self._before[0][1] if self._before else len(self._drawn)
        self._drawn = self._drawn[kept:]
        self._before = [(state, count - kept) for state, count in self._before]

    def state(self) -> dict[str, object]:
        """Of the mixture, before the oldest batch that is not delivered; with the weights of now."""
        now = self._mixture.state()
        return {**self._before[0][0], "weights": now["weights"]} if self._before else now

    def used(self, planned: Sequence[Task]) -> list[list[str]]:
        """Tasks drawn since then that are not to be drawn again: source and id of each."""
        open_ones = {(task.source, task.id) for task in planned}
        return [list(drawn) for drawn in dict.fromkeys(self._drawn) if drawn not in open_ones] + [
            list(drawn) for drawn in sorted(self._skip)
        ]

    def restore(self, state: dict[str, object], used: Sequence[Sequence[str]]) -> None:
        self._mixture.restore(state)
        self._before, self._drawn = [], []
        self._skip = {(source, id_) for source, id_ in used}
