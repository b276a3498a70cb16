"""How the executor has episodes scored: groups, judges that fail, rewards that are broken, replaced or rolled back."""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from forge_rl.errors import (
    CheckpointError,
    DeadlineError,
    ForgeError,
    JudgeError,
    ServiceError,
    SpendingError,
    TaskError,
    UngradedError,
    UnscoredError,
)
from forge_rl.rewards.protocol import Form
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.state import ScheduleConfig
from forge_rl.types import Episode, Outcome, Sampling, Score, Task
from tests.staged_rollouts import (
    CountingSource,
    StagedGenerator,
    StagedReward,
    rollouts,
    run_until_idle,
)


async def test_a_judge_that_fails_once_is_asked_again_without_decoding() -> None:
    failed: set[str] = set()
    warnings: list[str] = []

    def fail_once(task: Task, text: str) -> float:
        if text not in failed:
            failed.add(text)
            raise DeadlineError("no answer within 1 s", service="reward", replica=0)
        return float(int(text) % 7)

    generator, ended = StagedGenerator(), list[Episode]()
    reward = StagedReward(fail_once)
    executor = rollouts(generator=generator, reward=reward, warn=warnings.append, on_episode=ended.append)
    batch = await executor.next_batch()
    assert len(generator.seen) == 12
    assert len(ended) == 12
    assert {episode.outcome for episode in batch.episodes} == {Outcome.COMPLETED}
    assert executor.metrics()["outcomes/completed"] == 12
    assert len(warnings) == 12
    assert "scored again after: reward replica 0: no answer within 1 s" in warnings[0]


def ranks(task: Task, episodes: Sequence[Episode]) -> list[float]:
    """Scores by place among the group's answers."""
    texts = sorted(episode.text for episode in episodes)
    return [float(texts.index(episode.text)) for episode in episodes]


async def test_a_group_reward_gets_all_episodes_once_they_have_ended() -> None:
    group_sizes: list[int] = []
    ended: list[Episode] = []

    def counting(task: Task, episodes: Sequence[Episode]) -> list[float]:
        group_sizes.append(len(episodes))
        assert all(episode.score is None for episode in episodes)
        return ranks(task, episodes)

    executor = rollouts(reward=StagedReward(counting, "group"), on_episode=ended.append)
    batch = await executor.next_batch()
    assert group_sizes == [4, 4, 4]
    assert [sorted(group.rewards) for group in batch.groups] == [[0, 1, 2, 3]] * 3
    assert sorted(episode.reward for episode in ended) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


async def test_a_group_that_cannot_be_ranked_is_replaced_and_not_decoded_again() -> None:
    def fail_odd(task: Task, episodes: Sequence[Episode]) -> list[float]:
        if int(task.id) % 2:
            raise ServiceError("ValueError: no", service="reward", replica=0)
        return ranks(task, episodes)

    generator, warnings = StagedGenerator(), list[str]()
    executor = rollouts(reward=StagedReward(fail_odd, "group"), generator=generator, warn=warnings.append)
    batch = await executor.next_batch()
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]
    assert executor.metrics()["groups/replaced_failed"] == 3
    assert len(generator.seen) == 24
    assert "judge_error: reward replica 0: ValueError: no" in warnings[0]


async def test_what_cannot_be_scored_is_replaced_and_not_decoded_again() -> None:
    def fail_odd(task: Task, text: str) -> float:
        if int(task.id) % 2:
            raise ServiceError("ValueError: no", service="reward", replica=0)
        return float(int(text) % 7)

    generator = StagedGenerator()
    executor = rollouts(generator=generator, reward=StagedReward(fail_odd))
    batch = await executor.next_batch()
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]
    assert executor.metrics()["groups/replaced_failed"] == 3
    prompts = Counter(prompt for prompt, _ in generator.seen)
    assert max(prompts.values()) == 4


class BrokenReward:
    """A reward that fails until it is mended."""

    broken = True

    def score(self, task: Task, text: str) -> float:
        if self.broken:
            raise ServiceError("KeyError: 'answer'", service="reward", replica=0, call="score")
        return float(int(text) % 7)


async def test_a_broken_reward_is_named_and_a_fix_resumes_the_rollout() -> None:
    warnings: list[str] = []
    reward = BrokenReward()
    executor = rollouts(
        reward=StagedReward(reward.score),
        schedule=ScheduleConfig(max_lag=1),
        warn=warnings.append,
        reward_wait_s=0.0,
    )
    for _ in range(2):  # also a second time
        with pytest.raises(
            TaskError, match=r"counting yielded 13 unusable groups in a row.*KeyError: 'answer'"
        ) as caught:
            await executor.next_batch()
        assert "run.reward.replace" in caught.value.hint
    assert any("KeyError" in warning for warning in warnings)
    reward.broken = False
    batch = await executor.next_batch()
    assert len(batch.groups) == 3
    assert {episode.outcome for episode in batch.episodes} == {Outcome.COMPLETED}
    await executor.close()


async def test_a_rollout_whose_reward_is_broken_waits_for_another_and_tells_so() -> None:
    warnings: list[str] = []
    reward = BrokenReward()
    executor = rollouts(reward=StagedReward(reward.score), warn=warnings.append, reward_wait_s=600.0)
    coming = asyncio.create_task(executor.next_batch())
    await run_until_idle()
    assert not coming.done()
    assert not executor._running
    assert executor.waiting_for() == "the reward to work again, or another one, as all scores fail"
    (warning,) = [warning for warning in warnings if "waits 10 minutes for another reward" in warning]
    assert "KeyError: 'answer'" in warning
    (unscored,) = executor.samples()
    assert unscored[-1].outcome is Outcome.JUDGE_ERROR
    reward.broken = False
    executor.reward_replaced()
    batch = await coming
    assert {episode.outcome for episode in batch.episodes} == {Outcome.COMPLETED}
    assert executor.samples() == [batch.groups[0].episodes]
    await executor.close()


class AwayReward(StagedReward):
    """A reward that fails for a while, or on one task."""

    def __init__(self, error: type[ForgeError], fails_on: str = "", form: Form = "text") -> None:
        super().__init__(lambda task, text: float(len(str(text)) % 2), form)
        self.away, self.error, self.fails_on = 0, error, fails_on
        """How often it fails before it is back, and on which task it always does."""

    async def score(self, episodes: Sequence[Episode]) -> list[Score]:
        if self.away or episodes[0].task.id == self.fails_on:
            self.away = max(0, self.away - 1)
            raise self.error("503")
        return [Score(total=float(place % 2)) for place, _ in enumerate(episodes)]


def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_rl.rollout.reward_outage._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("forge_rl.rollout.reward_outage._LONGEST_PAUSE_S", 0.001)


@pytest.mark.parametrize("form", ["text", "group"])
@pytest.mark.parametrize("error", [JudgeError, ForgeError])
async def test_an_unavailable_reward_is_retried_in_runs_and_evaluations(
    error: type[ForgeError], form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pauses(monkeypatch)
    warnings, reward = list[str](), AwayReward(error, form=form)
    executor = rollouts(reward=reward, warn=warnings.append)
    await executor.next_batch()
    evaluation = Evaluation({"one": [CountingSource().draw()]}, episodes=4, sampling=Sampling(max_tokens=4), version=0)
    for work in (executor.next_batch, executor.next_batch, executor.finish_evaluation):
        if work == executor.finish_evaluation:
            executor.start_evaluation(evaluation)
        reward.away = 200
        async with asyncio.timeout(60):
            await work()
        assert not reward.away
    assert any(re.search("all scores fail, so the run waits 30 minutes .*503", warning) for warning in warnings)
    assert "scores come again, so the run goes on" in warnings
    assert any(
        re.search("evaluation fail, and are asked for again for up to 30 minutes.*503", text) for text in warnings
    )
    assert {episode.outcome for (*episodes,) in evaluation.results("one") for episode in episodes} == {
        Outcome.COMPLETED
    }
    await executor.close()


@pytest.mark.parametrize("error", [UngradedError, ForgeError])
async def test_an_evaluation_waits_for_no_score_that_fails_while_others_come(
    error: type[ForgeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pauses(monkeypatch)
    source = CountingSource()
    tasks = [source.draw() for _ in range(3)]
    executor = rollouts(reward=AwayReward(error, fails_on="3"))
    await executor.next_batch() if error is ForgeError else None
    evaluation = Evaluation({"one": tasks}, episodes=1, sampling=Sampling(max_tokens=4), version=0)
    executor.start_evaluation(evaluation)
    async with asyncio.timeout(60):
        await executor.finish_evaluation()
    outcomes = [episode.outcome for (episode,) in evaluation.results("one")]
    assert outcomes == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.JUDGE_ERROR]
    await executor.close()


@pytest.mark.parametrize("error", [JudgeError, SpendingError])
async def test_a_reward_that_stays_away_ends_the_run_when_its_time_is_up(
    error: type[ForgeError], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pauses(monkeypatch)
    reward = AwayReward(JudgeError)
    reward.away = sys.maxsize

    def warn(text: str) -> None:
        if "all scores fail" in text:
            reward.error = error

    executor = rollouts(reward=reward, warn=warn, reward_wait_s=0.05 if error is JudgeError else 600.0)
    async with asyncio.timeout(60):
        with pytest.raises(UnscoredError if error is JudgeError else SpendingError, match="503"):
            await executor.next_batch()
    await executor.close()


@pytest.mark.parametrize("form", ["text", "group"])
async def test_a_listener_that_raises_fails_the_batch_and_loses_no_episode(form: Form) -> None:
    ended: list[Episode] = []

    def on_episode(episode: Episode) -> None:
        ended.append(episode)
        if len(ended) in (5, 6):
            raise CheckpointError("no space left")

    scores = ranks if form == "group" else lambda task, text: float(int(text) % 7)
    executor = rollouts(reward=StagedReward(scores, form), on_episode=on_episode)
    with pytest.raises(CheckpointError, match="no space left"):
        await executor.next_batch()
    async with asyncio.timeout(60):
        batch = await executor.next_batch()
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert len(ended) == 12, "nothing was run again"
    await executor.close()


async def test_a_rollback_ends_episodes_that_are_being_scored_as_a_group() -> None:
    gate, ended = asyncio.Event(), list[str]()

    class Slow(StagedReward):
        async def score(self, episodes: Sequence[Episode]) -> list[Score]:
            if not gate.is_set():
                try:
                    await gate.wait()
                finally:
                    ended.append(episodes[0].task.id)
                raise JudgeError("the judge said nothing")
            return await super().score(episodes)

    executor = rollouts(reward=Slow(ranks, "group"))
    saved = executor.state()
    coming = asyncio.create_task(executor.next_batch())
    await run_until_idle()
    coming.cancel()
    await asyncio.gather(coming, return_exceptions=True)
    await executor.restore(saved)
    assert sorted(ended) == ["1", "2", "3"]
    gate.set()
    async with asyncio.timeout(60):
        batch = await executor.next_batch()
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    await executor.close()


async def test_scores_of_a_replaced_reward_are_told_of() -> None:
    warnings: list[str] = []
    executor = rollouts(schedule=ScheduleConfig(max_lag=2), warn=warnings.append)
    await executor.next_batch()
    await run_until_idle()
    executor.reward_replaced()
    (warning,) = warnings
    assert re.match(r"\d+ episodes of coming batches keep the scores of the replaced reward", warning)
    await executor.close()
