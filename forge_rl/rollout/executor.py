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
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.data.tokenizer import Tokenizer
from forge_rl.errors import ForgeError, TaskError
from forge_rl.metrics import RolloutStatus
from forge_rl.rollout.dispatcher import Decoder, Dispatcher, PolicyClient
from forge_rl.rollout.placement import DeviceHandover
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.state import InflightEpisode, ScheduleConfig
from forge_rl.runtime.tasks import task_group
from forge_rl.types import Batch, Episode, Group, Outcome, Sampling, Task


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a batch is."""

    groups: int
    """P."""
    episodes: int
    """G."""


class Attempt(Protocol):
    """Makes an episode of a task; asks the policy at `client`."""

    async def __call__(self, task: Task, client: PolicyClient, /) -> Episode: ...


class RolloutExecutor:
    """Makes batches.

    Args:
        mixture: where tasks come from.
        shape: of a batch.
        schedule: which episodes run when.
        tokenizer: of the policy.
        generator: decodes.
        attempt: makes an episode of a task.
        devices: handed to the engines and back.
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
        attempt: Attempt,
        devices: DeviceHandover,
        seed: int,
        version: Callable[[], int],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = schedule
        self.last: Batch | None = None
        """The batch that was delivered last."""
        self._tasks = ResumableTaskStream(mixture)
        self._shape = shape
        self._tokenizer = tokenizer
        self._generator = generator
        self._attempt = attempt
        self._devices = devices
        self._seed = seed
        self._version = version
        self._warn = warn
        self._clock = clock
        self._schedule: Scheduler
        self._dispatcher: Dispatcher
        self._begin_at(0)
        generator.listeners.append(self._on_engines)
        self._running: dict[InflightEpisode, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._stirred = asyncio.Event()
        self._most_engines = 0

    async def next_batch(self) -> Batch:
        """The next batch, complete: P groups in the mixture's proportions, in which not all rewards are equal.

        What is under way for later batches then stops at a token boundary, unless the schedule lets engines go on,
        and goes on with the next call.

        Raises:
            TaskError: a source gives nothing but groups that cannot be used.
        """
        await self._devices.to_engines()
        self._schedule.resume()
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
        self._tasks.batch_delivered()
        if not self.config.decodes_while_training:
            self._schedule.pause()
            await self._devices.to_trainer(idle=not self._schedule.count("decoding"))
        self._pump()
        self.last = Batch(
            groups=tuple(Group(task=group.task, episodes=group.results) for group in groups), version=self._version()
        )
        return self.last

    async def evaluate(self, tasks: Sequence[Task]) -> list[Episode]:
        """One greedy episode of each task, in order; they go before all others."""
        greedy = Sampling(max_tokens=self._generator.sampling.max_tokens, temperature=0)
        await self._devices.to_engines()
        async with task_group() as running:
            episodes = [running.create_task(self._outside(task, greedy)) for task in tasks]
        return [episode.result() for episode in episodes]

    async def episode(self, task: Task, sampling: Sampling) -> Episode:
        """One attempt at a task, of no batch: as many turns as its world wants, then the score."""
        return await self._outside(task, sampling)

    async def close(self) -> None:
        """End all that is under way."""
        self._generator.listeners.remove(self._on_engines)
        await self._end_all()

    async def _end_all(self) -> None:
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
        """See Scheduler.take_busy."""
        return self._schedule.take_busy()

    def status(self) -> RolloutStatus:
        """How far the next batch is, and what is under way."""
        schedule = self._schedule
        done, groups = schedule.progress()
        self._most_engines = max(self._most_engines, len(schedule.engines))
        return RolloutStatus(
            batch=schedule.next,
            groups_done=done,
            groups=groups,
            episodes_running=schedule.count("decoding"),
            episodes_waiting=schedule.count("in_env"),
            queue=schedule.count("waiting"),
            engines_serving=len(schedule.engines),
            engines=self._most_engines,
            lag_max=schedule.next - schedule.since(),
        )

    def waiting_for(self) -> str:
        """What the next batch waits for, in words."""
        return self._schedule.missing()

    def state(self) -> dict[str, object]:
        """Where the mixture and the batches stand, as JSON: what is not delivered is drawn again."""
        return {
            "mixture": self._tasks.state(),
            "used": self._tasks.consumed([group.task for group in self._schedule.planned()]),
            "batches": self._schedule.next,
        }

    async def restore(self, state: dict[str, object]) -> None:
        """Go on from a saved state; what is under way is ended."""
        mixture, used, batches = state.get("mixture"), state.get("used"), state.get("batches")
        if not isinstance(mixture, dict) or not isinstance(used, list) or not isinstance(batches, int):
            raise TaskError(f"the saved state of the rollouts holds {sorted(state)}", hint="start a new run")
        await self._end_all()
        self._failure = None
        self._tasks.restore(mixture, used)
        self._begin_at(batches)

    def __repr__(self) -> str:
        done, groups = self._schedule.progress()
        return f"Rollouts  {self.config.kind}  {done} of {groups} groups; {self._schedule.missing()}"

    def _begin_at(self, batch: int) -> None:
        self._schedule = Scheduler(
            self.config,
            groups=self._shape.groups,
            episodes=self._shape.episodes,
            tasks=self._tasks,
            clock=self._clock,
            first=batch,
        )
        self._dispatcher = Dispatcher(self._schedule, self._generator, self._tokenizer)

    def _on_engines(self) -> None:
        self._dispatcher.see_engines()
        self._dispatcher.grant()
        self._stirred.set()

    def _pump(self) -> None:
        """Do what the schedule says now."""
        schedule = self._schedule
        self._dispatcher.see_engines()
        schedule.version = self._generator.version or 0
        try:
            for plan in schedule.starts():
                self._running[plan] = asyncio.get_running_loop().create_task(self._run(plan))
            for plan in schedule.cancels():
                if plan in self._running and self._running[plan] is not asyncio.current_task():
                    self._running[plan].cancel()
        except ForgeError as error:
            self._fail(error)
        self._dispatcher.grant()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stirred.set()

    async def _run(self, plan: InflightEpisode) -> None:
        """An episode of a batch, to its end; whatever goes wrong that is not of its own fails the next batch."""
        group = plan.group
        sampling = replace(self._generator.sampling, seed=self._seed_of(plan))
        try:
            result = await self._attempt(group.task, self._dispatcher.client(plan, sampling))
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
        self._dispatcher.see_engines()
        for _ in range(1 + self.config.retries):
            plan = self._schedule.outside(task)
            try:
                result = await self._attempt(task, self._dispatcher.client(plan, sampling))
            finally:
                self._schedule.gives_up(plan)
                self._dispatcher.grant()
            if result.outcome.scored:
                return result
        raise ForgeError(
            f"an evaluation of {task.source} {task.id} ended with {result.outcome}: {result.problem}",
            hint="see the services' logs in the run folder",
        )

    def _seed_of(self, plan: InflightEpisode) -> int:
        return zlib.crc32("/".join(map(str, (self._seed, *plan.place))).encode())
