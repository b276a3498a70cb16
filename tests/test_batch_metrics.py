"""Metrics of a batch, against numbers worked by hand."""

from __future__ import annotations

import pytest

from forge_rl.metrics import batch_metrics, rewards_by_source
from forge_rl.types import Batch, Episode, Group, Outcome, Score, Task, Turn


def episode(source: str, reward: float, *versions: int, outcome: Outcome = Outcome.COMPLETED) -> Episode:
    count = len(versions)
    turn = Turn(
        prompt_ids=(1, 2),
        token_ids=(3,) * count,
        logprobs=(-0.5,) * count,
        versions=versions,
        text="a",
        truncated=False,
    )
    return Episode(
        task=Task(id=source, source=source, messages=()), turns=(turn,), score=Score(total=reward), outcome=outcome
    )


def group(*episodes: Episode) -> Group:
    return Group(task=episodes[0].task, episodes=episodes)


BATCH = Batch(
    groups=(
        group(episode("sums", 1.0, 3, 4), episode("sums", 0.0, 4)),
        group(episode("legs", 0.5, 4, 4, 4), episode("legs", 0.5, 2, 4, outcome=Outcome.TRUNCATED)),
    ),
    version=4,
)


def test_a_batch_is_measured_over_its_episodes_and_its_tokens():
    values = batch_metrics(BATCH)
    histogram = values.pop("lag/hist")
    assert getattr(histogram, "counts") == {0: 6, 1: 1, 2: 1}  # noqa: B009
    assert values == {
        "reward/mean": 0.5,
        "reward/max": 1.0,
        "reward/min": 0.0,
        "reward/std": 0.25,
        "reward/sums": 0.5,
        "reward/legs": 0.5,
        "tokens/completion_mean": 2.0,
        "tokens/completion_p50": 2.0,
        "tokens/completion_p95": 3.0,
        "tokens/completion_max": 3.0,
        "episodes/truncated": 0.25,
        "episodes/repeated": 0.0,
        "episodes/turns": 1.0,
        "episodes/segments": 1.0,
        "lag/mean": pytest.approx(3 / 8),
        "lag/max": 2.0,
    }


def test_one_source_has_no_mean_beside_that_of_all():
    assert rewards_by_source("held_out", BATCH.groups[0].episodes) == {}
    assert rewards_by_source("held_out", (episode("a", 1.0, 1), episode("b", 0.25, 1), episode("b", 0.75, 1))) == {
        "held_out/a": 1.0,
        "held_out/b": 0.5,
    }
