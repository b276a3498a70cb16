"""A run of an agent that is worked with line by line, as in IPython: each line is a task of its own in one loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from forge_rl import Task, attach, start
from forge_rl.algorithms.loss_flag import build_loss
from forge_rl.gateway import Session
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.run.records.run_dir import is_finished
from forge_rl.services.generator import Generator
from recipes.agent_openai import Config, solve, step
from tests.commands import metrics
from tests.tiny import share_of_vowels


def test_a_run_is_opened_stepped_asked_given_a_new_reward_and_closed(
    tiny_model: Path, tmp_path: Path, nothing_left: None
) -> None:
    config = Config(
        model=str(tiny_model),
        tasks=("chain_sum:min_terms=2,max_terms=2", "leg_counting"),
        groups_per_batch=2,
        group_size=4,
        evaluation=EvalConfig(tasks=4),
        out=tmp_path / "run",
        display="none",
        checkpoint_every=0,
        generator=Generator.Config(max_model_len=512, kv_cache_gib=0.25),
    )
    sources, reward = config.data.build(config.tasks, seed=config.seed), build_reward(config.rewards)

    async def agent(task: Task, session: Session) -> str:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
            return await solve(client, task.messages[-1]["content"])

    with asyncio.Runner() as line:
        run = line.run(
            start(
                config,
                loss=build_loss(config.loss),
                sources=sources,
                reward=reward,
                agent=agent,
                gateway=config.gateway,
            ).open()
        )
        try:
            line.run(run.reward.replace(share_of_vowels))
            run.mixture["leg_counting"] = 0
            line.run(step(run))
            assert repr(run).startswith("Run  step 1 of 10")
            assert run.last_batch is not None
            assert run.last_batch.rewards.max() > 0, "of the new reward"
            assert {group.task.source for group in run.last_batch.groups} == {"chain_sum"}
            attached = line.run(asyncio.to_thread(lambda: attach(tmp_path / "run").last_batch))
            assert attached is not None
            assert repr(attached) == repr(run.last_batch)
            assert [episode.turns for episode in attached.episodes] == [
                episode.turns for episode in run.last_batch.episodes
            ]
            assert [episode.score for episode in attached.episodes] == [
                episode.score for episode in run.last_batch.episodes
            ]
            first = attached.episodes[0].turns[0]
            assert first.seconds > 0
            assert first.messages[-1]["content"] == attached.groups[0].task.messages[-1]["content"]
            assert isinstance(line.run(run.generator.chat("What is 2 + 3?", max_tokens=4)), str)
            line.run(step(run))
            assert run.last_batch is not None
            assert {len(episode.turns) for episode in run.last_batch.episodes} <= {1, 2}
            before, version = metrics(tmp_path / "run"), run.trainer.version
            line.run(run.reset())
            assert (run.step, run.trainer.updates, run.trainer.version, run.last_batch) == (0, 0, version + 1, None)
            assert metrics(tmp_path / "run") == []
            line.run(step(run))
            run.stop()
            run.pause()
            assert not run.paused, "a pause would hold up the end"
        finally:
            line.run(run.close())
        line.run(run.close())  # again: nothing happens
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in before] == [1, 2]
    assert all(row["grad_norm"] > 0 for row in before)
    assert before[0]["logprob_gap"] < 1e-3
    assert [row["step"] for row in rows] == [1]
    for name in ("reward/mean", "grad_norm"):  # of the same tasks, answers and weights, up to rounding
        assert rows[0][name] == pytest.approx(before[0][name], rel=1e-3)
        assert rows[0][name] != pytest.approx(before[1][name], rel=1e-3)
    assert not is_finished(tmp_path / "run"), "the same settings continue it"
