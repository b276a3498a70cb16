"""Starts or resumes a run, and shuts it down in every case."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from forge_rl.algorithms.protocol import Loss
from forge_rl.algorithms.user_loss import try_loss
from forge_rl.data.adaptive import AdaptiveShares
from forge_rl.data.mixture import AnySources, as_mixture
from forge_rl.envs.compaction import check_compaction
from forge_rl.envs.protocol import AgentEnvironment, EnvFactory
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ConfigError, ForgeError, RunStopped
from forge_rl.flags.fields import changed_flags
from forge_rl.rollout.agent_runner import Agent, AgentGateway
from forge_rl.rollout.examples import ExampleFn
from forge_rl.run.example_config import ExampleConfig
from forge_rl.run.records.run_dir import code_digests
from forge_rl.run.run import Run
from forge_rl.run.run_config import RunConfig
from forge_rl.run.start.assembly import assemble
from forge_rl.run.start.checks import check
from forge_rl.run.start.hosts import open_hosts
from forge_rl.run.start.preparation import prepare
from forge_rl.run.start.services import running_services
from forge_rl.run.start.setup import AgentPlayer, Rollouts, RunSetup
from forge_rl.services.reward import RewardFunction
from forge_rl.services.teachers_config import TeachersConfig
from forge_rl.services.trainer_config import CriticConfig
from forge_rl.system.tasks import interrupted_by
from forge_rl.system.terminal import TRACE_LETTERS, shortened
from forge_rl.types import Task

C = TypeVar("C", bound=RunConfig)
E = TypeVar("E", bound=ExampleConfig)


class Starting(Generic[C]):
    """Starts everything that a run needs, or resumes where the same command stopped; made by `start`.

        async with start(config, loss=build_loss(["clipped"]), sources=sources, reward=score) as run:
            batch = await run.rollouts.next_batch()

    Args:
        config: settings of the recipe.
        setup: what the run trains on.
        recipe: name of the recipe, for the run folder.

    Raises:
        ConfigError: settings contradict each other, the machine, or the run being resumed.
        LossError: the loss does not work, see `try_loss`.
        ForgeError: something did not start; says what and why.
    """

    def __init__(self, config: C, setup: RunSetup, recipe: str) -> None:
        self.config = config
        self.setup = setup
        self.recipe = recipe
        self._check()
        # Made here and entered later: `open` and `close` of an interactive session use the same context manager.
        self._running = self._run()

    def _check(self) -> None:
        """Refuse settings that contradict what the run is made of, or have no effect on it.

        Raises:
            ConfigError: names the flags.
        """
        config, setup = self.config, self.setup
        if isinstance(config, ExampleConfig) != (setup.examples is not None):
            raise ConfigError(
                f"{type(config).__name__} has settings of a run on generated episodes, and start() got examples"
                if setup.examples is not None
                else f"{type(config).__name__} has settings of a run on examples, and start() got none",
                hint="derive the settings from ExampleConfig exactly if start() is given examples",
            )
        if config.starts_engines != (setup.rollouts is not None):
            raise ConfigError(
                "the settings name rewards, and start() got none"
                if setup.rollouts is None
                else "start() has a reward, and the settings name none, so that no engines are planned",
                hint="pass reward=build_reward(config.rewards) exactly if config.rewards is set",
            )
        if setup.examples is not None and setup.rollouts is not None and "values" in setup.loss.needs:
            raise ConfigError(
                "a value model gives no answers that a reward could score",
                hint="leave out --reward: evaluations measure the loss",
            )
        config.check_effects()
        if setup.teachers is not None:
            setup.teachers.check_sources(setup.mixture.sources)
        if len(setup.mixture.sources) == 1 and config.mixture.adapt != "off":
            raise ConfigError(
                f"--mixture.adapt {config.mixture.adapt} shifts weight between sources, and there is only "
                f"{next(iter(setup.mixture.sources))!r}",
                hint="leave it out, or name several sources with --tasks",
            )
        if config.mixture.adapt != "off":
            AdaptiveShares(config.mixture, {name: setup.mixture[name] for name in setup.mixture})  # refuses its bounds
        if config.curriculum.pools != "off" and setup.mixture.is_endless:
            raise ConfigError(
                f"--curriculum.pools {config.curriculum.pools} chooses among tasks that come again, but "
                f"{', '.join(map(repr, setup.mixture.sources))} generates new ones each time",
                hint="leave it out, or name files of tasks with --tasks",
            )
        rollouts = setup.rollouts
        world = rollouts.world if rollouts is not None else SingleTurn
        # An AgentEnvironment is no factory: it plays and scores whole episodes.
        scores_itself = world is not None and (not callable(world) or getattr(world, "scores_itself", False))
        if rollouts is not None and isinstance(rollouts.player, AgentPlayer):
            # The task's own tests score the work of an agent in a container.
            scores_itself = scores_itself or getattr(rollouts.player.agent, "workplaces", None) is not None
        if scores_itself and (changed := changed_flags(config, ("rewards", "reward"))):
            raise ConfigError(
                f"{changed[0]} has no effect, as the environment scores its episodes itself",
                hint=f"leave out {changed[0]}, or choose another --env",
            )
        if config.starts_engines:
            check_compaction(world, config.generator.max_model_len)
        if changed := changed_flags(config, ("environment",)):
            by_agent = rollouts is not None and isinstance(rollouts.player, AgentPlayer)
            if by_agent or getattr(world, "in_process", False):
                plays = "the agent plays the episodes" if by_agent else "the environment has none"
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
        """Prepare, acquire hosts, check, start the services, assemble; save the progress of an interrupted run."""
        setup = self.setup
        # A loss that fails is found on a small row, before minutes of starting.
        try_loss(setup.loss, setup.mixture.sources)
        async with contextlib.AsyncExitStack() as stack:
            prepared = await stack.enter_async_context(prepare(self.config, self.recipe, self._code()))
            monitor, ending = prepared.monitor, None
            with monitor.watching():
                for name, part in setup.rewards.items():
                    if peer := getattr(part, "peer", ""):
                        monitor.log.event(f"reward {name}: called as {peer} calls it, with the columns of each row")
                try:
                    hosts = await stack.enter_async_context(open_hosts(self.config, prepared))
                    # Defaults that depend on the device follow the hosts' devices, which may differ from the
                    # controller's.
                    config = hosts.adapted(self.config)
                    if setup.critic is not None and setup.critic is getattr(self.config, "critic", None):
                        setup = replace(setup, critic=getattr(config, "critic", None))
                    checked = await check(config, prepared, setup, hosts.placed)
                    reward = environment = None
                    if (rollouts := setup.rollouts) is not None:
                        reward, environment = rollouts.reward, rollouts.environment
                        if isinstance(player := rollouts.player, AgentPlayer) and player.environment is not None:
                            await stack.enter_async_context(player.environment.serving(prepared.folder / "logs"))
                    starting = running_services(prepared, checked, hosts, reward=reward, environment=environment)
                    services = await stack.enter_async_context(starting)
                    close = partial(self.__aexit__, None, None, None)
                    assembling = assemble(prepared, checked, hosts, services, setup, close=close)
                    run, ending = await stack.enter_async_context(assembling)
                    # A fault that no service can recover from ends the body with its own error, wherever the body
                    # waits.
                    with interrupted_by(monitor.faults.raise_fatal):
                        yield run
                        await ending.finish()
                except RunStopped:  # `Run.stop` asked for this end: the error stops here, and the program goes on
                    assert ending is not None, "a run was stopped"
                    await ending.stop(show=True)
                # Ctrl-C and the stop signals arrive as a cancellation, which goes on to `launch` once the run is saved.
                except asyncio.CancelledError:
                    monitor.log.event("stopping: a second signal stops immediately, without saving")
                    if ending is not None:
                        try:
                            await ending.stop()
                        # It may not replace the cancellation, on which the program's exit status depends.
                        except Exception as error:
                            monitor.log.warn(f"step {run.step} could not be saved: {error}")
                    else:
                        prepared.fail("stopped")
                    raise
                except Exception as error:
                    # An error from another process carries that process's trace, which says more than this one's.
                    trace = getattr(error, "trace", "") or "".join(traceback.format_exception(error))
                    cause = str(error) if isinstance(error, ForgeError) else f"{type(error).__name__}: {error}"
                    # The text of a user's exception may have any length.
                    cause, trace = shortened(cause), shortened(trace, TRACE_LETTERS)
                    monitor.log.keep(f"ended by {cause}\n{trace}", "fault")
                    if ending is not None:  # else the start failed, and there is no step to save
                        await ending.fail(error, cause)
                    else:
                        prepared.fail("failed", cause)
                    raise

    def _code(self) -> dict[str, str]:
        """Return digests of the files that define this run."""
        setup, rollouts = self.setup, self.setup.rollouts
        generators = [getattr(source, "items", None) for source in setup.mixture.sources.values()]
        world, player = (None, None) if rollouts is None else (rollouts.world, rollouts.player)
        user_objects = *setup.rewards.values(), setup.examples, world, player, setup.loss
        return code_digests(self.config, *user_objects, *generators)


def start_rollouts(
    config: C,
    rollouts: Rollouts,
    *,
    loss: Loss,
    sources: AnySources,
    evaluation: Mapping[str, Sequence[Task]] | None = None,
    critic: CriticConfig | None = None,
    recipe: str = "run",
) -> Starting[C]:
    """Start a run that trains on episodes that it generates.

        async with start_rollouts(config, Rollouts(reward=score), loss=loss, sources=sources) as run:
            batch = await run.rollouts.next_batch()

    Args:
        rollouts: how episodes are played and scored.
        sources: sources of tasks, see `Start`.
        evaluation: sets of tasks to evaluate on, see `Start`.
        critic: settings of a critic, see `Start`.
        recipe: name of the recipe, for the run folder.

    Raises:
        ConfigError: settings contradict each other.
    """
    mixture = as_mixture(sources, seed=config.seed)
    setup = RunSetup(loss=loss, mixture=mixture, rollouts=rollouts, evaluation=evaluation, critic=critic)
    return Starting(config, setup, recipe)


def start_examples(
    config: E,
    examples: ExampleFn,
    *,
    loss: Loss,
    sources: AnySources,
    evaluation: Mapping[str, Sequence[Task]] | None = None,
    critic: CriticConfig | None = None,
    recipe: str = "run",
) -> Starting[E]:
    """Start a run that trains on given examples: the trainer alone or, with `--reward`, also engines for evaluations.

        async with start_examples(config, conversation_episodes, loss=CrossEntropy(), sources=sources) as run:
            batch = await run.examples.next_batch()

    Args:
        examples: makes examples of the tasks.
        sources: sources of tasks, see `Start`.
        evaluation: sets of tasks to evaluate on, see `Start`.
        critic: settings of a critic, see `Start`.
        recipe: name of the recipe, for the run folder.

    Raises:
        ConfigError: settings contradict each other.
    """
    reward = config.answer_reward()
    setup = RunSetup(
        loss=loss,
        mixture=as_mixture(sources, seed=config.seed),
        rollouts=Rollouts(reward=reward) if reward is not None else None,
        examples=examples,
        evaluation=evaluation,
        critic=critic,
    )
    return Starting(config, setup, recipe)


@dataclass(eq=False)
class Start(Starting[C]):
    """Starts a run on generated episodes or on given examples, by the arguments that it gets; called `start`.

    Raises:
        ConfigError: arguments or settings contradict each other, the machine, or the run being resumed.
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
    """Settings of the gateway for the agent, a `GatewayConfig`; None for the defaults."""
    critic: CriticConfig | None = None
    """Settings of a critic, a value model in a trainer service of its own: `Run.critic`. By default there is none."""
    teachers: TeachersConfig | None = None
    """Settings of teachers that score the policy's tokens, for distillation: `Run.teachers`. By default there are
    none."""
    recipe: str = "run"
    """Name of the recipe, for the run folder."""

    def __post_init__(self) -> None:
        rollouts = self._rollouts()
        if self.examples is None and rollouts is None:
            raise ConfigError("start() has nothing to train on", hint="give it a reward, or examples")
        if self.examples is not None and self.teachers is not None:
            raise ConfigError(
                "start() has examples, and teachers for generated episodes", hint="give it one or the other"
            )
        setup = RunSetup(
            loss=self.loss,
            mixture=as_mixture(self.sources, seed=self.config.seed),
            rollouts=rollouts,
            examples=self.examples,
            evaluation=self.evaluation,
            critic=self.critic,
        )
        super().__init__(self.config, setup, self.recipe)

    def _rollouts(self) -> Rollouts | None:
        """Return how episodes are generated, if they are."""
        if not callable(self.environment):
            return Rollouts.played_by(self.environment, gateway=self.gateway, teachers=self.teachers)
        if self.reward is None:
            return None
        if self.agent is not None:
            player = AgentPlayer(agent=self.agent, gateway=self.gateway)
            return Rollouts(reward=self.reward, player=player, teachers=self.teachers)
        return Rollouts(reward=self.reward, player=self.environment, teachers=self.teachers)


start = Start  # the name that recipes use: `async with start(...) as run`
