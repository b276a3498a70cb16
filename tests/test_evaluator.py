"""Evaluations of a run: what is logged of them by set and source, by which name, and which are of one version."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from forge_rl import RunConfig
from forge_rl.errors import ConfigError
from forge_rl.rollout.evaluation import EvalConfig, Evaluation, score_set
from forge_rl.rollout.executor import RolloutExecutor
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.run.evaluation.evaluator import EvaluationResult, Evaluator, RolloutEvaluations
from forge_rl.services.generator import Generator
from forge_rl.types import Episode, Outcome, Sampling, Score, Task, Turn


class Rollouts:
    """Takes evaluations, and ends their episodes at once when they are awaited."""

    def __init__(self, results: dict[tuple[str, str], list[tuple[float, str]]]) -> None:
        self.config = ScheduleConfig()
        self.started: list[Evaluation] = []
        self.results = results
        """Reward and answer of each episode, by source and id of the task."""

    def start_evaluation(self, evaluation: Evaluation) -> None:
        self.started.append(evaluation)

    async def finish_evaluation(self) -> None:
        for groups in self.started[-1].groups.values():
            for group in groups:
                given = self.results[group.task.source, group.task.id]
                for episode, (reward, answer) in zip(group.episodes, given, strict=True):
                    self.started[-1].record(episode, episode_of(group.task, reward, answer))


def episode_of(task: Task, reward: float, answer: str = "") -> Episode:
    """An episode of four tokens, one of which is of version 2; with a reward of NaN one that failed."""
    turn = Turn(prompt_ids=(1,), token_ids=(1,) * 4, logprobs=(0.0,) * 4, versions=(3, 3, 2, 3), text=answer)
    outcome = Outcome.JUDGE_ERROR if math.isnan(reward) else Outcome.COMPLETED
    return Episode(
        task=task, turns=(turn,), score=Score(total=reward, answer=answer), outcome=outcome, problem="no judge"
    )


def tasks(source: str, *ids: str) -> list[Task]:
    return [Task(id=id_, source=source, messages=()) for id_ in ids]


def evaluator_of(
    rollouts: Rollouts,
    sets: dict[str, list[Task]],
    *,
    warnings: list[str] | None = None,
    **config: Any,
) -> Evaluator:
    warn = (warnings if warnings is not None else []).append
    executor = cast(RolloutExecutor, rollouts)
    return Evaluator(sets, RolloutEvaluations(EvalConfig(**config), executor, max_tokens=16, warn=warn))


def evaluated(evaluator: Evaluator, *, step: int = 4, version: int = 3) -> EvaluationResult:
    async def run() -> EvaluationResult:
        evaluator.start(step, version)
        assert evaluator.step == step
        assert evaluator.pop() is None, "it is not complete"
        await evaluator.finish()
        result = evaluator.pop()
        assert (evaluator.step, evaluator.pop()) == (None, None), "it is counted once"
        assert result is not None
        assert evaluator.scores == {step: result.score}
        return result

    return asyncio.run(run())


def test_the_one_default_set_keeps_its_short_name() -> None:
    rollouts = Rollouts({("a", "1"): [(1.0, "")], ("a", "2"): [(0.0, "")], ("b", "1"): [(0.5, "")]})
    sets = {"held_out": [*tasks("a", "1", "2"), *tasks("b", "1")]}
    result = evaluated(evaluator_of(rollouts, sets))
    assert (result.step, result.score, result.tokens) == (4, 0.5, 12)
    assert result.metrics == {
        "held_out": 0.5,
        "held_out/a": 0.5,
        "held_out/b": 0.5,
        "eval/held_out/avg@1": 0.5,
        "eval/held_out/avg@1_stderr": pytest.approx(0.5 / math.sqrt(3)),
        "eval/held_out/a/avg@1": 0.5,
        "eval/held_out/a/avg@1_stderr": pytest.approx(0.5),
        "eval/held_out/b/avg@1": 0.5,
        "eval/held_out/other_versions": 0.25,
    }


def test_several_sets_have_names_and_the_first_ones_score_counts() -> None:
    answers = [(1.0, "5"), (0.0, "6"), (0.0, "6"), (1.0, "5"), (0.0, "")]
    rollouts = Rollouts({("a", "1"): answers, ("b", "1"): [(1.0, "")] * 5})
    sets = {"maths": tasks("a", "1"), "words": tasks("b", "1"), "none": []}
    result = evaluated(evaluator_of(rollouts, sets, episodes=5, temperature=1.0))
    assert result.score == pytest.approx(0.4)
    assert result.metrics == {
        "eval/maths/avg@5": pytest.approx(0.4),
        "eval/maths/pass@2": pytest.approx(1 - 3 / 10),
        "eval/maths/pass@4": 1.0,
        "eval/maths/pass@5": 1.0,
        "eval/maths/maj@5": 0.5,
        "eval/maths/other_versions": 0.25,
        "eval/words/avg@5": 1.0,
        "eval/words/pass@2": 1.0,
        "eval/words/pass@4": 1.0,
        "eval/words/pass@5": 1.0,
        "eval/words/other_versions": 0.25,
    }


def test_episodes_that_failed_are_left_out_and_told_of_by_set() -> None:
    rollouts = Rollouts({("a", "1"): [(math.nan, "")], ("a", "2"): [(1.0, "")]})
    warnings: list[str] = []
    result = evaluated(evaluator_of(rollouts, {"maths": tasks("a", "1", "2")}, warnings=warnings))
    assert result.metrics["eval/maths/avg@1"] == 1.0
    assert warnings == [
        "1 of 2 evaluations failed and are left out of the score of maths; a 1 ended with judge_error: no judge"
    ]


def test_the_user_is_told_where_most_tokens_are_of_other_weights() -> None:
    warnings: list[str] = []
    evaluator = evaluator_of(Rollouts({("a", "1"): [(1.0, "")]}), {"maths": tasks("a", "1")}, warnings=warnings)
    assert evaluated(evaluator, version=2).metrics["eval/maths/other_versions"] == 0.75
    (warning,) = warnings
    assert warning.startswith("75% of the tokens in the evaluation of step 4 on maths come from other weights")
    assert "--evaluation.blocking" in warning


def test_only_first_evaluations_or_runs_in_rounds_have_one_version() -> None:
    for step, in_rounds, expected in ((0, False, True), (5, False, False), (5, True, True)):
        rollouts = Rollouts({})
        rollouts.config = ScheduleConfig(max_lag=0 if in_rounds else 1)
        evaluator = evaluator_of(rollouts, {"held_out": tasks("a", "1")}, max_tokens=7)
        evaluator.start(step, version=3)
        [evaluation] = rollouts.started
        assert evaluation.one_version is expected
        assert (evaluation.version, evaluation.sampling) == (3, Sampling(max_tokens=7, temperature=0.0))
        evaluator.rollback(step)
        evaluator.restart(step, version=4)
        assert (evaluator.step, rollouts.started[1].version) == (step, 4), "the weights are the same"
        evaluator.rollback(step)
        evaluator.restart(step + 1, version=9)
        assert (evaluator.step, rollouts.started[2].version) == (step, 4), "the weights are of a later step"
        evaluator.rollback(step - 1)
        evaluator.restart(step - 1, version=5)
        assert (evaluator.step, len(rollouts.started)) == (None, 3)


def test_a_task_may_be_in_two_sets_and_pass_at_k_uses_the_threshold() -> None:
    (task,) = tasks("a", "1")
    evaluation = Evaluation({"x": [task], "y": [task]}, episodes=2, sampling=Sampling(max_tokens=1), version=0)
    assert (evaluation.total, evaluation.left) == (4, 4)
    places = {episode.place for groups in evaluation.groups.values() for group in groups for episode in group.episodes}
    assert len(places) == 4
    results = [[episode_of(task, 0.5), episode_of(task, 0.2)]]
    assert score_set("x", results, k=2)["pass@2"] == 0.0
    assert score_set("x", results, k=2, success=0.5)["pass@2"] == 1.0


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"every": -1}, "--evaluation.every"),
        ({"episodes": 0}, "--evaluation.episodes"),
        ({"episodes": 4}, "4 greedy episodes of a task are equal"),
        ({"temperature": -0.5}, "--evaluation.temperature"),
        ({"max_tokens": 0}, "--evaluation.max-tokens"),
        ({"max_tokens": 512}, "--evaluation.max-tokens is 512"),
    ],
)
def test_settings_that_cannot_be_name_their_flag(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        RunConfig(evaluation=EvalConfig(**changes), generator=Generator.Config(max_model_len=512))
    assert caught.value.hint


def test_scores_by_another_reward_are_kept_and_not_compared() -> None:
    rewards = ["exact"]
    rollouts = Rollouts({("sums", "1"): [(0.25, "")]})
    evaluations = RolloutEvaluations(EvalConfig(episodes=1), cast(RolloutExecutor, rollouts), max_tokens=16, warn=print)
    evaluator = Evaluator({"held_out": tasks("sums", "1")}, evaluations, lambda: rewards[-1])
    evaluated(evaluator, step=4)
    rewards.append("brief")
    assert (evaluator.scores, evaluator.comparable) == ({4: 0.25}, {})
    again = Evaluator({}, evaluations, lambda: rewards[-1])
    again.restore(evaluator.state())
    assert (again.scores, again.comparable) == ({4: 0.25}, {})
    again.restore({"scores": {"4": 0.25}, "evaluation": None})  # of a run that did not record it
    assert again.comparable == {4: 0.25}
