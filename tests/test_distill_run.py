"""A run of `recipes.distill` on real engines: a second model teaches one source, the policy itself the other."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_rl.algorithms.hints import hint_of, with_hint
from forge_rl.rollout.evaluation import EvalConfig
from forge_rl.services.generator import Generator
from forge_rl.services.teachers import TeacherScores
from forge_rl.services.teachers_config import TeachersConfig
from forge_rl.tokens.tokenizer import Tokenizer
from recipes.distill import Config, start, step
from tests.commands import metrics
from tests.tiny import bundled_folder, make_tiny_model

TEMPERATURE = 0.8
TOP = 4


def by_transformers(folder: Path, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """Logprobs of all tokens in place of each of `ids`, [T, V] in float64, at the temperature."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def check_scores(scores: TeacherScores, batch: Any, source: str, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Compares a source's scores with transformers'; with a tokenizer, of prompts with the solution."""
    for p, group in enumerate(batch.groups):
        for g, episode in enumerate(group.episodes if group.task.source == source else ()):
            (turn,) = episode.turns
            prompt = turn.prompt_ids.tolist()
            if tokenizer is not None:
                hint = hint_of(group, g, "solution")
                assert hint is not None
                messages = with_hint(group.task.messages, hint)
                assert messages is not None
                prompt = tokenizer.render(messages)
            expected = by_transformers(folder, prompt, turn.token_ids.tolist())
            logprobs = expected[torch.arange(len(expected)), torch.tensor(turn.token_ids).long()]
            np.testing.assert_allclose(scores.logprobs[p][g], logprobs, atol=1e-4)
            np.testing.assert_allclose(scores.top_logprobs[p][g], expected.topk(TOP).values, atol=1e-4)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_teachers_score_as_transformers_does_even_after_a_kill(
    tiny_model: Path, tmp_path: Path, nothing_left: None
) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", bundled_folder(), hidden_size=96, num_hidden_layers=3)
    out = tmp_path / "run"
    config = Config(
        model=str(tiny_model),
        tasks=("chain_sum:min_terms=2,max_terms=2", "leg_counting"),
        loss=(f"chain_sum=distill:k={TOP}", f"leg_counting=distill:k={TOP},beta=0"),
        groups_per_batch=2,
        group_size=2,
        steps=3,
        evaluation=EvalConfig(tasks=0),
        out=out,
        display="none",
        checkpoint_every=0,
        generator=Generator.Config(max_model_len=512, kv_cache_gib=0.25, temperature=TEMPERATURE),
        teachers=TeachersConfig(models=(f"chain_sum={teacher}", "policy"), kv_cache_gib=0.25),
    )

    async with start(config) as run:
        await step(run)
        batch = run.last_batch
        assert batch is not None
        assert {group.task.source for group in batch.groups} == {"chain_sum", "leg_counting"}
        tokenizer = Tokenizer(tiny_model)
        scores = await run.teachers.score(batch, temperature=TEMPERATURE, top_k=TOP)
        check_scores(scores, batch, "chain_sum", teacher, None)
        with_solution = await run.teachers.score(batch, temperature=TEMPERATURE, top_k=TOP, hint="solution")
        check_scores(with_solution, batch, "chain_sum", teacher, tokenizer)
        assert with_solution.unhinted == 0

        service = run.teachers.generators[str(teacher)]._service
        os.kill(await service.replicas[0].call("process_id", deadline_s=60), signal.SIGKILL)
        second_scores = await run.teachers.score(batch, temperature=TEMPERATURE, top_k=TOP)  # waits for another engine
        check_scores(second_scores, batch, "chain_sum", teacher, None)
        assert second_scores.failed == 0
        assert "Teachers  chain_sum: " in repr(run)
        while run.step < config.steps:
            await step(run)
    rows = metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert abs(rows[0]["teacher/kl/leg_counting"]) < 1e-4, "the policy itself is the teacher"
    assert abs(rows[0]["teacher/kl/chain_sum"]) > 1e-3
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["teacher/failed"] == row["teacher/unscored"] == 0 for row in rows)
    assert "teacher/0 has recovered" in (out / "events.jsonl").read_text()
