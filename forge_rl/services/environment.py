"""The Environment service: environments that send messages to the model and respond to its turns."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forge_rl.envs.protocol import (
    Env,
    EnvFactory,
    Exchange,
    Given,
    Observation,
    Parsed,
    SharesFiles,
    Step,
    fork_env,
    leaves_of,
    make_env_beside,
    reset_env,
    sees_thoughts,
    step_env,
)
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError, ForgeError, ReplayError, ReplicaError, check_flags
from forge_rl.flags.categories import Operational
from forge_rl.runtime.seats import Seats, ServiceHosts, check_bounds
from forge_rl.runtime.service import Replica, Service
from forge_rl.runtime.supervision import Restart
from forge_rl.runtime.supervisor import Supervisor
from forge_rl.services.environment_actor import CONSTRUCTOR_STUCK, EnvironmentActor
from forge_rl.services.file_peers import FilePeers, order_on_host
from forge_rl.services.service_start import ServiceStart
from forge_rl.types import Task


class Environment:
    """Typed handle of the Environment service. It has no processes if the factory sets `in_process`.

    session, observation = await environment.open(task)
    step = await session.step("the answer is 5")
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The environment service: its processes."""

        replicas: Operational[int] = 1
        """Number of processes that run environments."""
        min_replicas: int = 0
        """Minimum number of processes, to which leaving hosts may reduce it; by default as many as replicas."""
        max_replicas: int = 0
        """Maximum number of processes, to which joining hosts may raise it; by default as many as replicas."""
        deadline_s: Operational[float] = 600.0
        """Timeout of one environment step; a process that an environment blocks for longer is killed, with all its
        environments."""
        restart: Restart = field(default_factory=Restart)
        """Policy for processes that die."""

        def __post_init__(self) -> None:
            minimums = {"replicas": 1, "min_replicas": 0, "max_replicas": 0}
            check_flags(self, "--environment.", minimum=minimums, above={"deadline_s": 0})
            check_bounds(self, "--environment.")

    def __init__(
        self,
        config: Config,
        factory: EnvFactory,
        service: Service | None = None,
        supervisor: Supervisor | None = None,
        seats: Seats | None = None,
    ) -> None:
        self.config = config
        self._service = service
        self._supervisor = supervisor
        self._seats = seats
        self._factory = factory
        self._opened = 0
        self.replays: Counter[str] = Counter()
        """Sessions whose replica died since the last `pop_metrics`: "replayed", "refused" by their environment, or
        "differed" when they were replayed."""
        self._file_peers: FilePeers | None = None
        if service is not None:
            self._file_peers = FilePeers(config.deadline_s, may_be_public=service.cluster.may_be_public)
        self._prepared: Counter[str] = Counter()
        """Sums of what the factory's `prepare` counted since the last `pop_metrics`."""
        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that close abandoned sessions."""

    @classmethod
    async def start(cls, config: Config, start: ServiceStart, *, factory: EnvFactory) -> Environment:
        """Spawn the service with a factory of environments."""
        if getattr(factory, "in_process", False):
            return cls(config, factory)
        # An environment's child processes may run model-written code and exit: no reason to end the replica.
        meanings = {CONSTRUCTOR_STUCK: "the constructor of an environment did not come back within its deadline"}
        service = Service(
            "environment", start.cluster, start.faults, descendants=False, blames=True, exit_meanings=meanings
        )
        seats = Seats(
            start.cluster,
            start.hosts or ServiceHosts(),
            replicas=config.replicas,
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
        )

        async def start_one(index: int) -> None:
            # The user's environment may need API keys.
            env, host = {"OMP_NUM_THREADS": "1"}, seats.take(index).host
            replica = service.spawn(
                EnvironmentActor, factory, config.deadline_s, env=env, secrets=True, host=host, index=index
            )
            replica.may_block_s = config.deadline_s  # else one blocking environment would end its whole process early
            await service.watch(replica, deadline_s=start.deadline_s)

        supervisor = Supervisor(service, start_one, config.restart, seats=seats)
        await supervisor.start(config.replicas)
        return cls(config, factory, service, supervisor, seats)

    @property
    def replicas(self) -> int:
        """Target number of processes on the present hosts; 0 if environments run in this process."""
        return 0 if self._seats is None else self._seats.wanted

    def scale(self, replicas: int) -> None:
        """Start or stop processes in the background until this many run on the present hosts.

        Environments of a process that is stopped have half a minute to end, and are then made again elsewhere.

        Raises:
            ConfigError: environments run in this process, or the number is out of range.
        """
        if self._supervisor is None or self._seats is None:
            raise ConfigError("environments run in the controller's process", hint="they need no others")
        self._seats.scale(replicas)
        self._supervisor.rescale()

    def join(self, host: str, cores: int) -> None:
        """Add a host, which gets processes if more are allowed than there are."""
        if self._supervisor is not None and self._seats is not None:
            self._seats.add(host, cores=cores)
            self._supervisor.rescale()

    async def leave(self, host: str) -> None:
        """Stop the processes on a host that is about to go; see `Supervisor.leave`."""
        if self._supervisor is not None:
            await self._supervisor.leave(host)

    @property
    def leaves(self) -> int:
        """Maximum episodes of a tree; see `leaves_of`."""
        return leaves_of(self._factory)

    @property
    def thoughts(self) -> bool:
        """Whether environments see the model's thoughts."""
        return sees_thoughts(self._factory)

    async def open(self, task: Task) -> tuple[EnvSession | LocalSession, Observation]:
        """Open a session and reset its environment, on another replica if one dies meanwhile.

        Raises:
            DeadlineError: it took longer than the config's deadline_s.
            PoisonError: it killed several replicas, one after another.
            ServiceError: the environment raised an error, or no replica is left.
        """
        if self._service is None:
            self._opened += 1
            make = functools.partial(_make_local, self._factory, task)
            session = LocalSession(await make(), make)
            return session, await reset_env(session.env)
        about = f"the environment of {task.source} {task.id}"
        return await self._service.try_on(lambda replica: self._open(replica, task, about), about=about, refuses=True)

    async def _open(self, replica: Replica, task: Task, about: str) -> tuple[EnvSession, Observation]:
        assert self._service is not None
        session = EnvSession(self, self._service, replica, task, about)
        return session, await session.reset()

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Tell all processes which tasks come next, in the background, if the factory has a `prepare`.

        A process that dies meanwhile, or starts later, gets the next call.
        """
        if self._service is None or not hasattr(self._factory, "prepare") or not tasks:
            return
        living = [replica for replica in self._service.replicas if replica.alive]
        # Each host begins with other tasks than its peers, so that most files are fetched by one host and passed on.
        hosts = list(dict.fromkeys(replica.host for replica in living))
        for replica in living:
            ordered_tasks = order_on_host(tasks, hosts.index(replica.host), len(hosts))
            self.close_later(self._prepare(replica, ordered_tasks))
        if isinstance(self._factory, SharesFiles) and self._file_peers is not None:
            self.close_later(self._connect(self._file_peers, living))

    async def _connect(self, file_peers: FilePeers, replicas: Sequence[Replica]) -> None:
        try:
            await file_peers.connect(replicas)
        except ForgeError:  # files come from their source
            self._prepared["peers_failed"] += 1

    async def _prepare(self, replica: Replica, tasks: Sequence[Task]) -> None:
        try:
            self._prepared.update(await replica.ask("prepare", tasks, deadline_s=self.config.deadline_s))
        except ForgeError:  # episodes raise what remains wrong
            self._prepared["prepare_failed"] += 1

    def new_key(self) -> int:
        """Return the key of a new session."""
        self._opened += 1
        return self._opened

    def pop_metrics(self) -> dict[str, float]:
        """Return metrics since the last call: the number of sessions that lost their replica, by outcome, and what the
        factory's `prepare` counted; {} if there are none."""
        metrics = {f"environment/{outcome}": float(count) for outcome, count in self.replays.items()}
        metrics |= {f"environment/{name}": float(count) for name, count in self._prepared.items()}
        self.replays.clear()
        self._prepared.clear()
        return metrics

    def close_later(self, closing: Coroutine[Any, Any, None]) -> None:
        """Run an abandoned session's close in the background; `stop` waits for it."""
        task = asyncio.get_running_loop().create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def stop(self) -> None:
        """Stop the service."""
        if self._service is not None:
            await self._service.stop()
        if self._closing:
            await asyncio.wait(self._closing)

    def __repr__(self) -> str:
        where = "in process" if self._service is None else f"{len(self._service.replicas)} replica(s)"
        return f"Environment  {where}  {self._opened} sessions opened"


class EnvSession:
    """One episode's environment, in the replica that holds its state; rebuilt in another one if that dies.

    A session is over once its environment is done, closed, or failed.
    """

    def __init__(self, environment: Environment, service: Service, replica: Replica, task: Task, about: str) -> None:
        self._environment = environment
        self._service = service
        self._task = task
        self._about = about
        self._over = False
        self._replayable = self._forks = False
        self._observation: Observation | None = None
        self._log: list[Exchange] = []
        """All turns so far."""
        self._move(replica)

    async def reset(self) -> Observation:
        """Create the environment and return its first observation; raises as `step` does."""
        try:
            self._observation, self._replayable, self._forks = await self._ask("reset", self._task)
        except BaseException:
            self.abandon()
            raise
        return self._observation

    async def step(self, answer: str, *, truncated: bool = False, parsed: Parsed | None = None) -> Step:
        """Respond to one turn of the model; `truncated` if a token limit cut it off.

        If the replica dies, the environment is rebuilt in another one by replaying the turns so far.

        Args:
            parsed: content and tool calls of the answer, for environments that take calls.

        Raises:
            DeadlineError: it took longer than the config's deadline_s.
            ReplicaError: its replica died, and the environment cannot be replayed; a ReplayError if it was, and gave
                something else.
            PoisonError: it killed several replicas, one after another.
            ServiceError: the environment raised an error.
        """
        arguments = answer, truncated, parsed
        try:
            try:
                deadline_s = self._environment.config.deadline_s
                step: Step = await self._replica.ask("step", self._key, *arguments, deadline_s=deadline_s)
            except ReplicaError as error:
                # The call itself killed its process, so the task may be poison: `try_on` gives up after several such
                # deaths.
                if error.blamed:
                    self._service.blame(self._about)
                if self._replica.alive:
                    raise
                if not self._replayable:
                    self._environment.replays["refused"] += 1
                    raise
                step = await self._step_elsewhere(arguments)
        except BaseException:
            self.abandon()
            raise
        # With its answer, so that a replay can tell whether the rebuilt environment behaves the same.
        self._log.append((*arguments, step))
        if step.done:
            # The task has reached its end without killing its process, so deaths on the way were not its fault.
            self._service.forgive(self._about)
            self._end()
        return step

    async def _step_elsewhere(self, arguments: Given) -> Step:
        """Rebuild the environment in another replica, and let it respond."""

        async def attempt(replica: Replica) -> Step:
            await self._rebuild(replica)
            step: Step = await self._ask("step", *arguments)
            return step

        step = await self._service.try_on(attempt, about=self._about, refuses=True)
        self._environment.replays["replayed"] += 1
        return step

    async def fork(self, *, undo_last: bool = False) -> EnvSession:
        """Return another session in the same state: by the environment's `fork`, or by replaying the turns so far.

        Args:
            undo_last: return one in the state before the last step, always by replaying.

        Raises:
            ForgeError: the environment has no `fork` and must not be replayed; otherwise as `step`.
        """
        fork = EnvSession(self._environment, self._service, self._replica, self._task, self._about)
        fork._observation, fork._replayable, fork._forks = self._observation, self._replayable, self._forks
        fork._log = self._log[:-1] if undo_last else list(self._log)
        try:
            # A copy of the present state cannot undo the last step: that takes a replay.
            if self._forks and not undo_last and await self._copied(fork._key):
                return fork
            if not self._replayable:
                raise ForgeError(
                    "the environment asked for branches, but has no `fork`, and `replayable = False`"
                    if not undo_last
                    else "the environment asked for `forks`, but `replayable = False`",
                    hint="define `fork`, which returns an independent copy, and ask for `branches`",
                )
            await self._service.try_on(fork._rebuild, about=self._about, refuses=True)
        except BaseException:
            fork.abandon()
            raise
        return fork

    async def _copied(self, key: int) -> bool:
        """Let the environment copy itself; False if its replica has died and it can be replayed instead."""
        try:
            await self._ask("fork", key)
        except ReplicaError:
            if self._replica.alive or not self._replayable:
                raise
            return False
        return True

    async def _rebuild(self, replica: Replica) -> None:
        """Rebuild the environment in a replica by replaying the turns so far."""
        self._replica.held -= 1
        self._move(replica)
        # The replay may take as long as all of its turns together.
        difference = await self._ask("replay", self._task, self._observation, self._log, turns=len(self._log) + 1)
        if difference:
            self._environment.replays["differed"] += 1
            message = (
                f"an environment of {self._task.source} {self._task.id} was made again, and replayed: {difference}"
            )
            hint = "set `replayable = False` on the environment, or make it depend on its task and turns only"
            raise ReplayError(message, service="environment", replica=replica.index, hint=hint)

    def _move(self, replica: Replica) -> None:
        self._replica, self._key = replica, self._environment.new_key()
        replica.held += 1

    async def close(self) -> None:
        """Close an environment that is not done."""
        if not self._over:
            # Ended first, so that a second close or `abandon` meanwhile does nothing.
            self._end()
            with contextlib.suppress(ReplicaError):  # the environment died with it
                await self._ask("close")

    def abandon(self) -> None:
        """Close the environment in a background task, if it is not over."""
        if self._over:
            return

        async def close() -> None:
            with contextlib.suppress(ForgeError):  # the caller has seen the session's first error
                await self.close()

        self._environment.close_later(close())

    async def _ask(self, method: str, *arguments: object, turns: int = 1) -> Any:
        deadline_s = turns * self._environment.config.deadline_s
        return await self._replica.ask(method, self._key, *arguments, deadline_s=deadline_s)

    def _end(self) -> None:
        self._over = True
        self._replica.held -= 1


@dataclass(frozen=True)
class LocalSession:
    """An environment in this process, which only returns messages and has nothing to close."""

    env: Env
    make: Callable[[], Awaitable[Env]]
    """Makes the environment again."""
    arguments: list[Given] = field(default_factory=list)
    """Arguments of its steps so far."""

    async def step(self, answer: str, *, truncated: bool = False, parsed: Parsed | None = None) -> Step:
        """Respond to one turn of the model, as `EnvSession.step` does."""
        self.arguments.append((answer, truncated, parsed))
        return await step_env(self.env, answer, truncated, parsed)

    async def fork(self, *, undo_last: bool = False) -> LocalSession:
        """Return another session in the same state, or in that before the last step."""
        if not undo_last:
            return replace(self, env=await fork_env(self.env), arguments=[*self.arguments])
        # Steps cannot be undone, so the environment is made again and takes all of them but the last.
        session = replace(self, env=await self.make(), arguments=[])
        await reset_env(session.env)
        for answer, truncated, parsed in self.arguments[:-1]:
            await session.step(answer, truncated=truncated, parsed=parsed)
        return session

    async def close(self) -> None:
        """Close an environment that is not done."""

    def abandon(self) -> None:
        """Close the environment."""


async def _make_local(factory: EnvFactory, task: Task) -> Env:
    """Make an environment for this process; one that only shows the task takes less time than a thread."""
    return SingleTurn(task) if factory is SingleTurn else await make_env_beside(factory, task)
