"""Starts or resumes a run, and shuts it down in every case."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from forge_rl.algorithms.protocol import Loss
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.data.mixture import AnySources, as_mixture
from forge_rl.envs.compaction import check_compaction
from forge_rl.envs.protocol import AgentEnvironment, EnvFactory
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError, ForgeError, RunStopped
from forge_rl.flags.fields import changed_flags
from forge_rl.rewards.peers import as_reward
from forge_rl.rollout.agent_runner import Agent, AgentGateway
from forge_rl.rollout.examples import ExampleFn
from forge_rl.run.assembly import assemble
from forge_rl.run.example_config import ExampleConfig
from forge_rl.run.hosts import open_hosts
from forge_rl.run.preparation import check, prepare
from forge_rl.run.run import Run
from forge_rl.run.run_config import RunConfig
from forge_rl.run.run_dir import code_digests
from forge_rl.run.services import running_services
from forge_rl.services.reward import RewardFunction, parts_of
from forge_rl.services.teachers_config import TeachersConfig
from forge_rl.services.trainer_config import CriticConfig
from forge_rl.system.tasks import interrupted_by
from forge_rl.system.terminal import TRACE_LETTERS, shortened
from forge_rl.types import Task

C = TypeVar("C", bound=RunConfig)


@dataclass(eq=False)
class Starting(Generic[C]):
    """Starts everything that a recipe needs, or resumes where the same command stopped.

        async with start(config, loss=build_loss(["clipped"]), sources=sources, reward=score) as run:
            batch = await run.rollouts.next_batch()

    Raises:
        ConfigError: settings contradict each other, the machine, or the run being resumed.
        LossError: the loss does not work, see `try_loss`.
        ForgeError: something did not start; says what and why.
    """

    config: C
    """Settings of the recipe."""
    _: KW_ONLY
    loss: Loss
    """Loss to train with; determines whether the trainer keeps a reference."""
    sources: AnySources
    """Sources of tasks: a weighted mixture, a source, a list or other iterable of tasks or rows such as {"question":
    "2+3?", "answer": "5"}, a function that returns one, or several by name. A tenth of a list's problems is held
    out."""
    reward: RewardFunction | None = None
    """Scores episodes; see `rewards/protocol.py`. In a run on given examples, it scores the answers that evaluations
    then generate, for which engines start; None evaluates by the loss alone."""
    examples: ExampleFn | None = None
    """Makes examples of the tasks to train on, instead of generating episodes: `Run.examples`. Without a reward,
    nothing but the trainer then starts. The recipe's settings are an `ExampleConfig`."""
    evaluation: Mapping[str, Sequence[Task]] | None = None
    """Sets of tasks to evaluate on, by name; the first set's score is the run's. By default the sources' held-out tasks
    as `held_out`, and the sets of --eval-tasks."""
    environment: EnvFactory | AgentEnvironment = SingleTurn
    """Creates each episode's environment; by default the model answers once. One that plays whole episodes itself
    replaces agent and reward."""
    agent: Agent | str | None = None
    """Plays the episodes instead of environments, calling the policy through a gateway. A string, MODULE:FUNCTION or
    FILE.py:FUNCTION, names one that runs in its own process."""
    gateway: AgentGateway | None = None
    """Settings of the gateway for the agent, a `GatewayConfig`; None for the default ones."""
    critic: CriticConfig | None = None
    """Settings of a critic, a value model in a trainer service of its own: `Run.critic`. By default there is none."""
    teachers: TeachersConfig | None = None
    """Settings of teachers that score the policy's tokens, for distillation: `Run.teachers`. By default there are
    none."""
    recipe: str = "run"
    """Name of the recipe, for the run folder."""

    def __post_init__(self) -> None:
        if not callable(self.environment):
            self.agent, self.reward = self.environment.agent, self.environment.reward
        if self.reward is not None:
            self.reward = as_reward(self.reward)
            scores_code = any(getattr(part, "scores_code", False) for part in parts_of(self.reward).values())
            if scores_code and getattr(self.environment, "runs_blocks", False):
                raise ConfigError(
                    "the environment runs each block of Python as a tool, and the reward scores blocks of Python",
                    hint="set --env python:tool=true, or leave --env out: the reward runs the code",
                )
        if self.examples is None and self.reward is None:
            raise ConfigError("start() has nothing to train on", hint="give it a reward, or examples")
        if self.examples is not None and self.teachers is not None:
            raise ConfigError(
                "start() has examples, and teachers for generated episodes", hint="give it one or the other"
            )
        if isinstance(self.config, ExampleConfig) != (self.examples is not None):
            raise ConfigError(
                f"{type(self.config).__name__} has settings of a run on generated episodes, and start() got examples"
                if self.examples is not None
                else f"{type(self.config).__name__} has settings of a run on examples, and start() got none",
                hint="derive the settings from ExampleConfig exactly if start() is given examples",
            )
        if self.config.starts_engines != (self.reward is not None):
            raise ConfigError(
                "the settings name rewards, and start() got none"
                if self.reward is None
                else "start() has a reward, and the settings name none, so that no engines are planned",
                hint="pass reward=build_reward(config.rewards) exactly if config.rewards is set",
            )
        if self.examples is not None and self.reward is not None and "values" in self.loss.needs:
            raise ConfigError(
                "a value model gives no answers that a reward could score",
                hint="leave out --reward: evaluations measure the loss",
            )
        self.mixture = as_mixture(self.sources, seed=self.config.seed)
        self._check_effects()
        self._running = self._run()

    def _check_effects(self) -> None:
        """Refuse settings that have no effect on what the run is made of.

        Raises:
            ConfigError: names the flags.
        """
        config = self.config
        config.check_effects()
        if len(self.mixture.sources) == 1 and config.mixture.adapt != "off":
            raise ConfigError(
                f"--mixture.adapt {config.mixture.adapt} shifts weight between sources, and there is only "
                f"{next(iter(self.mixture.sources))!r}",
                hint="leave it out, or name several sources with --tasks",
            )
        if config.starts_engines:
            check_compaction(self.environment, config.generator.max_model_len)
        if changed := changed_flags(config, ("environment",)):
            in_process = getattr(self.environment, "in_process", False)
            if self.agent is not None or in_process:
                plays = "the agent plays the episodes" if self.agent is not None else "the environment has none"
                raise ConfigError(
                    f"{changed[0]} is of processes of environments, and {plays}",
                    hint=f"leave out {changed[0]}, or choose an --env that runs in processes",
                )

    async def __aenter__(self) -> Run[C]:
        return await self._running.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._running.__aexit__(*error)

    async def open(self) -> Run[C]:
        """Start for an interactive session: the run stays open until `await run.close()` or until Python exits."""
        return await self._running.__aenter__()

    @contextlib.asynccontextmanager
    async def _run(self) -> AsyncIterator[Run[C]]:
        """Prepare, acquire hosts, check, start the services, assemble; save what a run that is interrupted has done."""
        try_loss(self.loss, self.mixture.sources)
        if self.teachers is not None:
            self.teachers.check_sources(self.mixture.sources)
        async with contextlib.AsyncExitStack() as stack:
            prepared = await stack.enter_async_context(prepare(self.config, self.recipe, self._code()))
            monitor, ending = prepared.monitor, None
            with monitor.watching():
                for name, part in parts_of(self.reward).items() if self.reward is not None else ():
                    if peer := getattr(part, "peer", ""):
                        monitor.log.event(f"reward {name}: called as {peer} calls it, with the columns of each row")
                try:
                    hosts = await stack.enter_async_context(open_hosts(self.config, prepared))
                    checked = await check(
                        hosts.adapted(self.config),
                        prepared,
                        self.mixture,
                        hosts.placed,
                        loss=self.loss,
                        evaluation=self.evaluation,
                        critic=self.critic,
                        teachers=self.teachers,
                        examples=self.examples,
                        uses_tools=self.examples is None and self.environment is not SingleTurn,
                    )
                    environment = self.environment if self.agent is None and callable(self.environment) else None
                    if not callable(self.environment):
                        await stack.enter_async_context(self.environment.serving(prepared.folder / "logs"))
                    starting = running_services(prepared, checked, hosts, reward=self.reward, environment=environment)
                    services = await stack.enter_async_context(starting)
                    assembling = assemble(
                        prepared,
                        checked,
                        hosts,
                        services,
                        self.mixture,
                        loss=self.loss,
                        examples=self.examples,
                        agent=self.agent,
                        gateway=self.gateway,
                        close=partial(self.__aexit__, None, None, None),
                    )
                    run, ending = await stack.enter_async_context(assembling)
                    with interrupted_by(monitor.faults.raise_fatal):
                        yield run
                        await ending.finish()
                except RunStopped:  # the body was asked to end: the program goes on
                    assert ending is not None, "a run was stopped"
                    await ending.stop(show=True)
                except asyncio.CancelledError:
                    monitor.log.event("stopping: a second signal stops immediately, without saving")
                    if ending is not None:
                        await ending.stop()
                    raise
                except Exception as error:
                    trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
                    cause = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
                    cause, trace = shortened(cause), shortened(trace, TRACE_LETTERS)
                    monitor.log.keep(f"ended by {cause}\n{trace}", "fault")
                    if ending is not None:
                        await ending.fail(error, cause)
                    else:
                        monitor.log.end("failed", cause)
                    raise

    def _code(self) -> dict[str, str]:
        """Return digests of the files that define this run."""
        generators = [getattr(source, "items", None) for source in self.mixture.sources.values()]
        rewards = parts_of(self.reward).values() if self.reward is not None else ()
        user_objects = *rewards, self.examples, self.environment, self.agent, self.loss
        return code_digests(self.config, *user_objects, *generators)


start = Starting  # the name that recipes use: `async with start(...) as run`
