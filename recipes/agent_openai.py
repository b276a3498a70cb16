"""Train an agent that uses only the openai package, as one file to copy and edit.

python -m recipes.agent_openai --help

Each episode has its own base URL and key for the policy. All requests there are recorded token by token, and trained
on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

import forge_rl as rl


async def solve(client: AsyncOpenAI, question: str, model: str = "gpt-4o-mini") -> str:
    """Ask the question, and ask again if the answer has no number. The agent knows nothing about its training."""
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = ""
    for _ in range(2):
        completion = await client.chat.completions.create(model=model, messages=messages)
        answer = completion.choices[0].message.content or ""
        if re.search(r"\d", answer):
            break
        messages += [
            completion.choices[0].message,
            {"role": "user", "content": "Answer with a number, nothing else."},
        ]
    return answer


@dataclass(frozen=True, kw_only=True)
class Config(rl.RunConfig):
    """Train an agent with group-relative advantages."""

    UNUSED = ("environment",)
    tasks: rl.TaskTexts = (rl.ONE_DIGIT_ADDITION,)
    eval_tasks: rl.Tunable[tuple[str, ...]] = ()
    """Tasks for evaluation only, as [NAME=]TASKS; by default a share of --tasks is held out."""
    data: rl.DataConfig = field(default_factory=rl.DataConfig)
    rewards: rl.RewardTexts = ("auto",)
    loss: rl.LossTexts = ("clipped",)
    gateway: rl.GatewayConfig = field(default_factory=lambda: rl.GatewayConfig(aliases=("gpt-4o-mini",)))
    """Address at which the agent finds the policy, and model names that it may request."""

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
    # A request waits while engines pause for a training step.
    async with AsyncOpenAI(api_key="each episode has its own", timeout=config.phase_deadline_s) as client:

        async def agent(task: rl.Task, session: rl.Session) -> str:
            # All clients share one pool of connections; base URL and key tell the gateway whose episode a request is
            # of.
            episode_client = client.with_options(base_url=session.base_url, api_key=session.key)
            return await solve(episode_client, task.prompt)

        async with rl.start(
            config,
            loss=rl.build_loss(config.loss),
            sources=config.data.build(config.tasks, seed=config.seed, eval_tasks=config.eval_tasks, cache=config.cache),
            reward=rl.build_reward(config.rewards),
            agent=agent,
            gateway=config.gateway,
            recipe="agent_openai",
        ) as run:
            await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
