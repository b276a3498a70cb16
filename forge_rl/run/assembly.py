"""The last stage of a start: puts a run together from its services."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from forge_rl.algorithms.protocol import Loss
from forge_rl.data.curriculum import DifficultyPools
from forge_rl.data.mixture import Mixture
from forge_rl.data.task_stream import ResumableTaskStream
from forge_rl.gateway import GatewayConfig, GeneratorBackend
from forge_rl.gateway.tools import ToolParser, parser_for
from forge_rl.rollout.agents import Agent, serving_agents
from forge_rl.rollout.dispatcher import Dispatcher
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.rollout.executor import RolloutExecutor, RunEpisode
from forge_rl.rollout.scheduler import Scheduler
from forge_rl.run.checkpointing import Checkpointer
from forge_rl.run.control import Control, serving_control
from forge_rl.run.evaluator import Evaluator
from forge_rl.run.live import LiveSettings
from forge_rl.run.monitor import RunMonitor
from forge_rl.run.policy_gateway import PolicyGateway
from forge_rl.run.preparation import Checked, Prepared
from forge_rl.run.run import Run
from forge_rl.run.run_config import RunConfig
from forge_rl.run.services import Services
from forge_rl.tokens.tokenizer import Tokenizer

C = TypeVar("C", bound=RunConfig)


@contextlib.asynccontextmanager
async def assemble(
    prepared: Prepared,
    checked: Checked[C],
    services: Services,
    mixture: Mixture,
    *,
    loss: Loss,
    agent: Agent | str | None,
    gateway: GatewayConfig,
    close: Callable[[], Awaitable[object]],
) -> AsyncIterator[Run[C]]:
    """Resume from the checkpoint, publish the first weights, and let clients attach while the body runs.

    Args:
        agent: plays the episodes instead of the environment service.
        gateway: settings of the agent's gateway.
        close: closes the whole run.
    """
    config, monitor, log = checked.config, prepared.monitor, prepared.monitor.log
    tokenizer = Tokenizer(checked.model, parse_control_tokens=config.parse_control_tokens)
    backend = GeneratorBackend(services.generator, config.model)
    async with contextlib.AsyncExitStack() as stack:
        if services.environment is None:
            assert agent is not None, "somebody plays the episodes"
            logs = prepared.folder / "logs"
            serving = serving_agents(agent, gateway, backend, tokenizer, services.reward, warn=log.warn, logs=logs)
            run_episode: RunEpisode = await stack.enter_async_context(serving)
        else:
            parser = ToolParser(config.tool_parser or parser_for(tokenizer), tokenizer, warn=log.warn)
            run_episode = EpisodeRunner(tokenizer, services.environment, services.reward, parser.parse)
        rollouts = _rollouts(monitor, config, services, mixture, tokenizer, run_episode)
        stack.push_async_callback(rollouts.close)
        evaluator = Evaluator(
            config.evaluation, checked.sets, rollouts, max_tokens=config.generator.max_tokens, warn=log.warn
        )
        live = stack.enter_context(
            contextlib.closing(LiveSettings(rollouts, mixture, config.mixture, services.reward, log.event))
        )
        checkpointer = Checkpointer(
            prepared.checkpoints,
            services,
            rollouts,
            evaluator,
            live,
            model=checked.model,
            critic_model=checked.critic_model,
            warn=log.warn,
        )
        stack.push_async_callback(checkpointer.close)
        await checkpointer.resume(prepared.checkpoint)
        if prepared.checkpoint is not None:
            log.event(f"continued from {prepared.checkpoint.folder}")
        monitor.display.startup("first weights", "starting", "trainer to engines")
        version = await checkpointer.publish()
        monitor.display.startup("first weights", "ready", f"version {version}, attested")
        run = Run(config, services, rollouts, evaluator, checkpointer, live, monitor, loss, close=close)
        policy = PolicyGateway(backend, tokenizer, log.warn)
        stack.push_async_callback(policy.close)
        await stack.enter_async_context(serving_control(prepared.folder, Control(run, live, policy), log.warn))
        gc.freeze()  # also modules imported meanwhile: see responsive_loop
        yield run


def _rollouts(
    monitor: RunMonitor,
    config: RunConfig,
    services: Services,
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
    )
    rollouts = RolloutExecutor(
        Dispatcher(scheduler, services.generator, tokenizer),
        run_episode,
        devices=services.devices,
        version=lambda: services.trainer.version,
        seed=config.seed,
        reward=services.reward,
        listener=monitor.log,
        reward_wait_s=config.reward.wait_for_another_s,
    )
    services.reward.replaced.append(rollouts.reward_replaced)
    services.reward.samples = rollouts.samples
    monitor.follow(rollouts.status, rollouts.waiting_for)
    return rollouts
