"""The last stage of a start: puts a run together from its services."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

from forge_rl.data.curriculum import DifficultyPools
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.engines.platform import resolve_dtype
from forge_rl.envs.protocol import EnvFactory
from forge_rl.errors import ConfigError
from forge_rl.metrics.recorder import FOLDER as EPISODES
from forge_rl.metrics.vocabulary import write_vocabulary
from forge_rl.rollout.agent_runner import GATEWAY, AgentRunner
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.examples import ExampleMaker, Examples
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.interfaces import RunEpisode
from forge_rl.rollout.reward_outage import EpisodeScoring
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.rollout.version_probes import VersionProbes
from forge_rl.run.checkpoints.checkpointing import Checkpointer
from forge_rl.run.checkpoints.mirror import MirrorTask
from forge_rl.run.checkpoints.parts import RunParts
from forge_rl.run.endpoints import check_reachable, listen
from forge_rl.run.evaluation.evaluator import Evaluations, Evaluator, RolloutEvaluations
from forge_rl.run.evaluation.example_evaluation import AnswerEvaluations, ExampleEvaluations
from forge_rl.run.live.control import Control
from forge_rl.run.live.control_server import serving_control
from forge_rl.run.live.policy_gateway import PolicyGateway
from forge_rl.run.live.settings import LiveSettings, Scalable
from forge_rl.run.records.monitor import RunMonitor
from forge_rl.run.run import Run
from forge_rl.run.run_config import RunConfig
from forge_rl.run.service_set import RolloutServices, Services
from forge_rl.run.start.checks import CheckedRun, longest_example
from forge_rl.run.start.elastic import ElasticHosts
from forge_rl.run.start.ending import Ending
from forge_rl.run.start.hosts import RunHosts
from forge_rl.run.start.preparation import PreparedRun
from forge_rl.run.start.services import gpus_taken
from forge_rl.run.start.setup import AgentPlayer, RunSetup
from forge_rl.runtime.joining import controller_address
from forge_rl.services.generator import Generator
from forge_rl.services.policy_backend import GeneratorBackend
from forge_rl.services.trainer import Trainer
from forge_rl.tokens.template_args import read_template_args
from forge_rl.tokens.tokenizer import Tokenizer
from forge_rl.tokens.tool_parsers import ToolParser
from forge_rl.weights.effects import VersionEffects

C = TypeVar("C", bound=RunConfig)


@contextlib.asynccontextmanager
async def assemble(
    prepared: PreparedRun,
    checked: CheckedRun[C],
    hosts: RunHosts,
    services: Services,
    setup: RunSetup,
    *,
    close: Callable[[], Awaitable[object]],
) -> AsyncIterator[tuple[Run[C], Ending]]:
    """Resume from the checkpoint, publish the first weights, and let clients attach while the body runs.

    Args:
        setup: what the run trains on.
        close: closes the whole run.
    """
    config, monitor, log = checked.config, prepared.monitor, prepared.monitor.log
    tokenizer = Tokenizer(
        checked.models.policy,
        parse_control_tokens=config.parse_control_tokens,
        template_args=read_template_args(config.template_args),
    )
    if config.recording.share:
        await asyncio.to_thread(_write_vocabulary, prepared.folder / EPISODES, tokenizer, log.warn)
    async with contextlib.AsyncExitStack() as stack:
        # All three stay None in a run on given examples without a reward, which generates nothing.
        rollouts = reward = policy = None
        if services.rollout is not None:
            assert setup.rollouts is not None, "services of rollouts have started"
            backend, reward = GeneratorBackend(services.rollout.generator, config.model), services.rollout.reward
            player = setup.rollouts.player
            running = _running_episodes(prepared, config, services.rollout, backend, tokenizer, player)
            run_episode = await stack.enter_async_context(running)
            rollouts = _rollouts(monitor, config, services, services.rollout, setup.mixture, tokenizer, run_episode)
            # Registered after `run_episode` was entered, so episodes are cancelled before the agents' gateway closes.
            stack.push_async_callback(rollouts.close)
            policy = PolicyGateway(backend, tokenizer, log.warn)
            stack.push_async_callback(policy.close)
        batches, evaluations = _batches(checked, services, setup, rollouts, tokenizer, log.warn)
        # Live settings exist before the state is restored: `Checkpointer.resume` reapplies earlier changes to them.
        settings = LiveSettings(
            rollouts,
            setup.mixture,
            config.mixture,
            reward,
            services.trainer,
            log.event,
            scalable=_scalable(services.rollout),
        )
        parts = RunParts(
            services=services,
            batches=batches,
            # Each score is kept with its reward's description, since scores by different rewards are not compared.
            evaluator=Evaluator(checked.sets, evaluations, lambda: reward.description if reward is not None else ""),
            live=stack.enter_context(contextlib.closing(settings)),
        )
        checkpointer = await stack.enter_async_context(_checkpointing(prepared, checked, parts))
        await _resume(prepared, checkpointer, generates=rollouts is not None)
        monitor.follow_training(lambda: services.trainer.progress)
        run = Run(config, parts, checkpointer, monitor, setup.loss, close=close)
        reserved_gpus = gpus_taken(checked, hosts, engines=False)
        elastic = ElasticHosts(config, prepared, hosts, checked.models.policy, services, reserved_gpus)
        control = Control(run, settings, policy, elastic)
        # A host that replaces a dead one joins over the network, so a run that asks for hosts listens in any case.
        attach_address = config.attach_on or _address_for_hosts(hosts)
        tcp_socket = stack.enter_context(_listening(config, attach_address)) if attach_address else None
        await stack.enter_async_context(serving_control(prepared.folder, control, log.warn, tcp_socket))
        # Last: a host can only join once the control server takes its request.
        elastic.replace()
        # Modules that were imported since the loop was set up are left out of collections too; see `responsive_loop`.
        gc.freeze()
        yield run, Ending(run, services, checkpointer, monitor)


@contextlib.asynccontextmanager
async def _checkpointing(prepared: PreparedRun, checked: CheckedRun[C], parts: RunParts) -> AsyncIterator[Checkpointer]:
    """Provide the checkpointer while the body runs; then finish its saves, and their copies to the mirror if any."""
    log = prepared.monitor.log
    mirror = MirrorTask(prepared.mirror, prepared.checkpoints, log) if prepared.mirror else None
    checkpointer = Checkpointer(
        prepared.checkpoints,
        parts,
        models=(checked.models.policy, checked.models.critic_folder),
        choices=checked.choices,
        warn=log.warn,
        saved=mirror.follow if mirror else None,
    )
    # The stack unwinds in reverse: the last checkpoint is written first, and then copied.
    async with contextlib.AsyncExitStack() as stack:
        if mirror is not None:
            stack.push_async_callback(mirror.close)
        stack.push_async_callback(checkpointer.close)
        yield checkpointer


async def _resume(prepared: PreparedRun, checkpointer: Checkpointer, *, generates: bool) -> None:
    """Resume from the checkpoint, if there is one, and publish the first weights, if there are engines."""
    display = prepared.monitor.display
    # Engines start with the model's files: a resumed run's weights reach them by this first publish.
    await checkpointer.resume(prepared.checkpoint)
    if prepared.checkpoint is not None:
        prepared.monitor.log.event(f"continued from {prepared.checkpoint.folder}")
    if generates:
        display.startup("first weights", "starting", "trainer to engines")
    version = await checkpointer.publish()
    if generates:
        display.startup("first weights", "ready", f"version {version}, attested")


def _listening(config: RunConfig, address: str) -> socket.socket:
    """Listen for clients from elsewhere.

    Raises:
        ConfigError: the address is public, or cannot be used.
    """
    tcp_socket = listen(address, "--attach-on")
    # Checked again by number: the flag may hold a name, which may stand for a public address.
    host, port = tcp_socket.getsockname()[:2]
    try:
        check_reachable(f"{host}:{port}", "--attach-on", may_be_public=config.isolation.public_ports)
    except ConfigError:
        tcp_socket.close()
        raise
    return tcp_socket


def _address_for_hosts(hosts: RunHosts) -> str:
    """Return the address to listen on for replacement hosts; "" if the run asks for none, or only on this machine."""
    ip = controller_address() if hosts.replacements.asks else ""
    return f"[{ip}]:0" if ip else ""


def _scalable(services: RolloutServices | None) -> dict[str, Scalable]:
    """Return the services whose number of replicas can change in a live run."""
    if services is None:
        return {}
    scalable: dict[str, Scalable] = {"engines": services.generator}
    if services.environment is not None and services.environment.replicas:
        scalable["environments"] = services.environment
    return scalable


def _batches(
    checked: CheckedRun[C],
    services: Services,
    setup: RunSetup,
    rollouts: RolloutExecutor | None,
    tokenizer: Tokenizer,
    warn: Callable[[str], None],
) -> tuple[RolloutExecutor | Examples, Evaluations]:
    """Return the source of batches (rollouts or given examples) and the evaluations: of answers, the loss or both."""
    config, mixture = checked.config, setup.mixture
    answers = None
    if rollouts is not None:
        answers = RolloutEvaluations(config.evaluation, rollouts, max_tokens=config.generator.max_tokens, warn=warn)
    if setup.examples is None:
        assert rollouts is not None, "a run without examples generates episodes"
        assert answers is not None
        return rollouts, answers
    maker = ExampleMaker(setup.examples, tokenizer, longest=longest_example(config, checked.models.policy))
    tasks = ResumableTaskStream(mixture)
    batches = Examples(tasks, mixture.sources, maker, groups=config.groups_per_batch)
    losses = ExampleEvaluations(services.trainer, setup.loss, maker, warn=warn)
    if services.rollout is None or rollouts is None or answers is None:
        return batches, losses
    # Engines of a run on examples get the weights only when answers are to be evaluated.
    publish = partial(services.rollout.publish, services.trainer)
    return batches, AnswerEvaluations(losses, answers, rollouts, services.rollout.devices, publish)


@contextlib.asynccontextmanager
async def _running_episodes(
    prepared: PreparedRun,
    config: RunConfig,
    services: RolloutServices,
    backend: GeneratorBackend,
    tokenizer: Tokenizer,
    player: EnvFactory | AgentPlayer,
) -> AsyncIterator[RunEpisode]:
    """Provide the function that runs an episode: by an agent at a gateway, or in the environments."""
    warn = prepared.monitor.log.warn
    if isinstance(player, AgentPlayer):
        gateway = (player.gateway or GATEWAY["GatewayConfig"]()).with_parser(config.tool_parser)
        serving: AbstractAsyncContextManager[AgentRunner] = GATEWAY["serving_agents"](
            player.agent, gateway, backend, tokenizer, services.reward, warn=warn, logs=prepared.folder / "logs"
        )
        async with serving as run_episode:
            yield run_episode
    else:
        assert services.environment is not None, "somebody plays the episodes"
        parser = ToolParser(config.tool_parser, tokenizer, warn=warn)
        yield EpisodeRunner(tokenizer, services.environment, services.reward, parser.parse)


def _write_vocabulary(episodes: Path, tokenizer: Tokenizer, warn: Callable[[str], None]) -> None:
    """Keep the texts of tokens with the episodes, for `forge-rl report`."""
    try:
        write_vocabulary(episodes, tokenizer.pieces())
    except OSError as error:
        warn(f"the texts of tokens are not kept with the episodes: {error.strerror or error}")


def _probes(config: RunConfig, trainer: Trainer, generator: Generator, tokenizer: Tokenizer) -> VersionProbes | None:
    # Servers that others run have a dtype of their own; the coarser one is assumed.
    engines = "bfloat16" if config.generator.urls else generator.dtype
    trained_in = str(resolve_dtype(config.trainer.dtype)).removeprefix("torch.")
    # Roundings of float32 are so small that a third of the tokens tells as much.
    is_exact = "bfloat16" not in (engines, trained_in)
    count = config.weights.probes
    if count is None:
        count = 0 if config.generator.urls else 1 if is_exact else 3
    if not count:
        return None
    effects = VersionEffects(
        engines=engines,
        trainer=trained_in,
        rounded=config.generator.quantization != "none" or bool(config.generator.urls),
        changed=f"adapters of {' '.join(config.lora.targets)}" if config.lora.rank else "weights",
    )
    return VersionProbes(trainer, generator, tokenizer, effects, count=count)


def _rollouts(
    monitor: RunMonitor,
    config: RunConfig,
    services: Services,
    rollout: RolloutServices,
    mixture: Mixture,
    tokenizer: Tokenizer,
    run_episode: RunEpisode,
) -> RolloutExecutor:
    pools = None if config.curriculum.pools == "off" else DifficultyPools(config.curriculum)
    scheduler = Scheduler(
        config.schedule,
        groups=config.groups_per_batch,
        episodes=config.group_size,
        tasks=ResumableTaskStream(mixture, pools),
        leaves=rollout.environment.leaves if rollout.environment else 1,
        ahead_requests=config.generator.ahead_requests,
    )
    dispatcher = Dispatcher(
        scheduler,
        rollout.generator,
        tokenizer,
        # Asked each time, as the number changes in a live run.
        wanted_engines=lambda: len(config.generator.urls) + rollout.generator.replicas,
        hold=monitor.faults.hold,
        probes=_probes(config, services.trainer, rollout.generator, tokenizer),
    )
    rollouts = RolloutExecutor(
        dispatcher,
        run_episode,
        devices=rollout.devices,
        version=lambda: services.trainer.version,
        seed=config.seed,
        scoring=EpisodeScoring(reward=rollout.reward, wait_s=config.reward.wait_for_another_s),
        listener=monitor.log,
    )
    # A run that waits for a working reward goes on with a new one, which is tried on the last batch first.
    rollout.reward.replaced.add(rollouts.reward_replaced)
    rollout.reward.try_on(rollouts.samples)
    monitor.follow(rollouts.status, rollouts.waiting_for)
    return rollouts
