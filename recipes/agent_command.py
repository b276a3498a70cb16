"""Train an agent that is a command in any language, as one file to copy and edit.

python -m recipes.agent_command --command "python my_agent.py"

The command finds the policy through OPENAI_BASE_URL and OPENAI_API_KEY, or Anthropic's equivalents, and reads the task
as JSON from stdin; what it prints is scored, or the "answer" of a JSON object in its last line. See agents/ask_twice.py
for an example. With --env harbor:FOLDER it works in the container of each task, whose tests are the reward: see
agents/mini_swe.py.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import forge_rl as rl

EXAMPLE = shlex.join([sys.executable, str(Path(__file__).parent / "agents" / "ask_twice.py")])


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train an agent command with group-relative advantages."""

    UNUSED = ("environment",)
    command: str = EXAMPLE
    """The agent's program and arguments, split as by a shell. Each episode runs it once."""
    loss: rl.LossTexts = ("clipped",)
    gateway: rl.GatewayConfig = field(default_factory=lambda: rl.GatewayConfig(aliases=("gpt-4o-mini",)))
    """Address at which the agent finds the policy, model names that it may request, and limits on its processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rl.check_group_size(self.group_size)


async def step(run: rl.Run[Config]) -> None:
    """Run one step: let the agent work, train, publish."""
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    await run.train_on(batch, rl.batch_advantages(batch))


async def main(config: Config) -> None:
    """Run all remaining steps."""
    environment = rl.build_environment(config.env)
    # With --env harbor:..., each task brings a container to work in, and its tests are the reward.
    containers = rl.ContainerAgents(environment) if config.env else None
    async with rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.sources(environment),
        reward=containers.reward if containers else rl.build_reward(config.rewards),
        agent=rl.AgentCommand(config.command, config.gateway.agent_limits, workplaces=containers),
        gateway=config.gateway,
        recipe="agent_command",
    ) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
