"""Train an agent that is a command in any language, as one file to copy and edit.

python -m recipes.agent_command --command "python my_agent.py"

The command finds the policy through OPENAI_BASE_URL and OPENAI_API_KEY, or Anthropic's equivalents, and reads the task
as JSON from stdin; the last line that it prints is scored. See recipes/agents/ask_twice.py for an example.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from forge_rl import ClippedSurrogate, Run, RunConfig, batch_advantages, launch, pack, start
from forge_rl.algorithms.advantages import check_group_size
from forge_rl.data.data_config import ONE_DIGIT_ADDITION, DataConfig
from forge_rl.gateway import GatewayConfig
from forge_rl.rewards.reward_flag import RewardTexts, build_reward
from forge_rl.rollout.agent_command import AgentCommand

EXAMPLE = shlex.join([sys.executable, str(Path(__file__).parent / "agents" / "ask_twice.py")])


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """Train an agent command with group-relative advantages."""

    command: str = EXAMPLE
    """The agent's program and arguments, split as by a shell. Each episode runs it once."""
    tasks: tuple[str, ...] = (ONE_DIGIT_ADDITION,)
    """The mixture, as NAME[:KEY=VALUE,...][*WEIGHT]: files, folders, hub ids, reasoning-gym data sets, or FILE.py:NAME.
    Keys of files name columns: data/*.jsonl:question=problem,answer=solution*0.7"""
    eval_tasks: tuple[str, ...] = ()
    """Tasks for evaluation only, as [NAME=]TASKS; by default a share of --tasks is held out."""
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardTexts = ("auto",)
    """Rewards, as NAME[:KEY=VALUE,...][*WEIGHT], or your own as MODULE:FUNCTION[=WEIGHT] or FILE.py:FUNCTION[=WEIGHT];
    several are summed. auto compares with the task's answer; other names: diversity, exact, format, json_schema, judge,
    length, match, math, model, number, overlong, reasoning_gym, regex."""
    loss: ClippedSurrogate = field(default_factory=ClippedSurrogate)
    gateway: GatewayConfig = field(default_factory=lambda: GatewayConfig(aliases=("gpt-4o-mini",)))
    """Address at which the agent finds the policy, model names that it may request, and limits on its processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_size(self.group_size)


async def step(run: Run[Config]) -> None:
    """Run one step: let the agent work, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    with run.phase("train"):
        advantages = batch_advantages(batch)
        keep_uniform = run.config.loss.needs_reference
        packed = await asyncio.to_thread(pack, batch, advantages, run.trainer.layout, drop_uniform=not keep_uniform)
        stats = await run.trainer.step(packed, run.config.loss, temperature=run.generator.sampling.temperature)
    with run.phase("publish"):
        version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
        await run.generator.load(run.weights, version)
    run.log(stats, batch, packed)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(
        config,
        loss=config.loss,
        sources=config.data.build(config.tasks, seed=config.seed, eval_tasks=config.eval_tasks),
        reward=build_reward(config.rewards),
        agent=AgentCommand(config.command, config.gateway.agent_limits),
        gateway=config.gateway,
        recipe="agent_command",
    ) as run:
        if not run.scores:
            await run.evaluate()
        while run.step < config.steps:
            async with run.recovering():
                await step(run)
                if run.due(config.evaluation.every):
                    await run.evaluate()
                if run.due(config.checkpoint_every):
                    await run.checkpoint()


if __name__ == "__main__":
    launch(Config, main)
