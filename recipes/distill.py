"""Distillation: a teacher scores what the policy samples, as one file to copy and edit.

python -m recipes.distill --help
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import forge_rl as rl


@dataclass(frozen=True, kw_only=True)
class Config(rl.TaskConfig):
    """Train a policy to be like a teacher on what the policy itself samples: with a policy loss, by the difference of
    their logprobs as advantages (reverse KL); with --loss distill, by a divergence over the teacher's top tokens."""

    USED = (*rl.TaskConfig.USED, "teachers.models")
    loss: rl.LossTexts = ("clipped",)
    teachers: rl.TeachersConfig = field(default_factory=rl.TeachersConfig)
    hint: rl.Hint = "none"
    """Privileged information that the teacher is shown below the task: its solution (OPSD), a demonstration (SDFT), or
    feedback, another episode's correct answer or the scorer's comment (SDPO)."""
    reward_coef: float = 0.0
    """Factor of the rewards' group-relative advantages, added to the teacher's. 0 uses rewards for evaluation only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_coef and isinstance(rl.build_loss(self.loss), rl.Distillation):
            raise rl.ForgeError("--loss distill has no advantages for --reward-coef to add to", hint="leave one out")


def start(config: Config) -> rl.Starting[Config]:
    """Start the services: `async with start(config) as run`, or `run = await start(config).open()`."""
    environment = rl.build_environment(config.env)
    return rl.start(
        config,
        loss=rl.build_loss(config.loss),
        sources=config.sources(environment),
        reward=rl.build_reward(config.rewards),
        environment=environment,
        teachers=config.teachers,
        recipe="distill",
    )


async def step(run: rl.Run[Config]) -> None:
    """Run one step: roll out, have the teacher score, train, publish."""
    # Teacher and policy are compared at the temperature of the samples; k is 0 unless the loss reads top tokens.
    temperature, k = run.generator.sampling.temperature, run.loss.columns.get("top_ids", 0)
    with run.phase("rollout"):
        batch = await run.rollouts.next_batch()
    # The teacher reads what the policy has written; it generates nothing.
    with run.phase("teach"):
        scores = await run.teachers.score(batch, temperature=temperature, top_k=k, hint=run.config.hint)
    with run.phase("train"):
        # For each token, the teacher's logprob minus the policy's, whose policy gradient is that of the reverse
        # KL, plus the rewards' advantages times reward_coef.
        advantages = rl.teacher_advantages(batch, scores.logprobs, reward_coef=run.config.reward_coef)
        columns = scores.columns(run.loss)
        packed = await asyncio.to_thread(rl.pack, batch, advantages, run.trainer.layout, columns=columns)
        stats = await run.trainer.step(packed, run.loss, temperature=temperature)
    with run.phase("publish"):
        version = await run.trainer.publish(run.weights, dtype=run.generator.dtype)
        await run.generator.load(run.weights, version)
    run.log(stats | scores.metrics(batch), batch, packed)


async def main(config: Config) -> None:
    """Run all remaining steps."""
    async with start(config) as run:
        await run.train(step)


if __name__ == "__main__":
    rl.launch(Config, main)
