"""Rollouts over staged services: batches, turns, seeds, outcomes, and the bound on groups that teach nothing."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from forge_rl.data.mixture import Mixture
from forge_rl.engines.protocol import Sampling
from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.envs.task_list import TaskList
from forge_rl.errors import (
    ServiceError,
    SpendingError,
    TaskError,
)
from forge_rl.metrics import PhaseClock
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.rollout.advice import Advice
from forge_rl.rollout.dispatcher import PolicyClient
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.rollout.state import InflightEpisode, ScheduleConfig
from forge_rl.run.records.step_metrics import StepMetrics
from forge_rl.run.run_config import RunConfig
from forge_rl.runtime.hold import Hold
from forge_rl.services.completion import ResumableCompletion
from forge_rl.token_arrays import Chunk
from forge_rl.types import Batch, Episode, Group, Message, Outcome, Score, Task, Turn
from tests.staged_rollouts import (
    CountingSource,
    MortalGenerator,
    StagedEnvironment,
    StagedGenerator,
    StagedReward,
    TwoTurns,
    fail_once,
    play,
    rollouts,
    run_until_idle,
)


async def test_a_batch_has_p_groups_of_g_episodes_of_one_task_each() -> None:
    generator = StagedGenerator()
    generator.version = 5
    batch = await rollouts(generator=generator).next_batch()
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert [len(group.episodes) for group in batch.groups] == [4, 4, 4]
    assert batch.version == 5
    assert batch.rewards.shape == (3, 4)


async def test_the_coming_tasks_are_told_when_a_batch_begins_and_when_it_is_there() -> None:
    messages: tuple[Message, ...] = ({"role": "user", "content": "1"},)
    tasks = [Task(id=str(number), source="list", messages=messages) for number in range(30)]
    environment, coming_ids = StagedEnvironment(SingleTurn), list[list[str]]()
    environment.prepare = lambda tasks: coming_ids.append([task.id for task in tasks])  # type: ignore[method-assign]
    generator = StagedGenerator()
    mixture = Mixture({"list": TaskList("list", tasks, (), seed=0)})
    executor = rollouts(environment=environment, mixture=mixture, generator=generator)
    batches = []
    for generator.version in range(3):
        batch = await executor.next_batch()
        batches.append([group.task.id for group in batch.groups])
    assert len(coming_ids) == 6
    assert coming_ids[0] == batches[0] + batches[1], "the first batch, and the one after it"
    assert coming_ids[1] == coming_ids[2] == batches[1] + batches[2], "while the first batch trains"


async def test_a_source_with_an_adapter_is_written_with_it_in_batches_and_evaluations() -> None:
    generator = StagedGenerator()
    mixture = Mixture({name: CountingSource(name) for name in ("counting", "other")})
    executor = rollouts(generator=generator, mixture=mixture, groups=4)
    executor.adapters = {"counting": "math"}
    await executor.next_batch()
    await play(executor, max_tokens=3)
    assert [sampling.adapter for _, sampling in generator.seen[-1:]] == ["math"]
    assert sorted(sampling.adapter for _, sampling in generator.seen[:-1]) == [""] * 8 + ["math"] * 8


async def test_a_source_that_is_left_out_gets_no_more_episodes() -> None:
    generator = StagedGenerator()
    mixture = Mixture({name: CountingSource(name) for name in ("counting", "other")})
    executor = rollouts(generator=generator, mixture=mixture, groups=4, schedule=ScheduleConfig(kind="synchronous"))
    batch_sources = []
    for generator.version in range(4):
        batch = await executor.next_batch()
        batch_sources.append(sorted(group.task.source for group in batch.groups))
        if generator.version == 1:  # while the second batch trains
            executor.leave_out(["other"])
    assert batch_sources == [["counting"] * 2 + ["other"] * 2] * 2 + [["counting"] * 4] * 2


def test_the_seed_decides_the_batches_and_no_two_episodes_share_one() -> None:
    async def two_batches(seed: int) -> list[str]:
        generator = StagedGenerator()
        executor = rollouts(seed=seed, generator=generator)
        texts = []
        for generator.version in range(2):
            texts += [episode.text for episode in (await executor.next_batch()).episodes]
        return texts

    def texts(seed: int) -> list[str]:
        return asyncio.run(two_batches(seed))

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    assert len(set(texts(0))) == 24


async def test_a_restored_state_goes_on_with_the_same_batches() -> None:
    generator = StagedGenerator()
    whole_rollouts = rollouts(generator=generator)
    await whole_rollouts.next_batch()
    state = json.loads(json.dumps(whole_rollouts.state()))
    generator.version = 1
    expected = await whole_rollouts.next_batch()
    restored = rollouts(generator=generator)
    await restored.restore(state)
    batch = await restored.next_batch()
    assert [group.task.id for group in batch.groups] == ["4", "5", "6"]
    assert batch.rewards.tolist() == expected.rewards.tolist()


async def test_a_resumed_run_draws_a_carried_straggler_again() -> None:
    class Slow:
        def __init__(self, task: Task) -> None:
            self.task = task

        async def reset(self) -> Observation:
            return Observation(messages=self.task.messages)

        async def step(self, completion: str) -> Step:
            await (asyncio.Event().wait() if self.task.id == "1" else asyncio.sleep(0))
            return Step(done=True, reward=1.0)

    schedule = ScheduleConfig(max_lag=2, over_sampling=2.0)
    whole_rollouts = rollouts(environment=StagedEnvironment(Slow), schedule=schedule)
    batch = await whole_rollouts.next_batch()
    assert "1" not in [group.task.id for group in batch.groups]
    state = json.loads(json.dumps(whole_rollouts.state()))
    await whole_rollouts.close()
    restored = rollouts(schedule=schedule)
    await restored.restore(state)
    resumed_batch = await restored.next_batch()
    delivered = {group.task.id for group in (*batch.groups, *resumed_batch.groups)}
    assert "1" in delivered
    assert len(delivered) == 6, "nothing comes twice"


async def test_engines_are_listed_when_they_change_and_not_for_every_episode() -> None:
    class Listed(StagedGenerator):
        listed = 0

        def engines(self) -> dict[int, int]:
            self.listed += 1
            return super().engines()

    generator = Listed()
    executor = rollouts(generator=generator)
    for version in range(3):
        generator.version = version
        await executor.next_batch()
    assert generator.listed == 1
    generator.listeners.tell()
    assert generator.listed == 2


async def test_a_later_turn_is_shown_the_exact_tokens_of_the_earlier_ones() -> None:
    generator = StagedGenerator()
    executor = rollouts(generator=generator, environment=StagedEnvironment(TwoTurns))
    episode = await play(executor, max_tokens=4)
    first, second = episode.turns
    assert second.prompt_ids.tolist() == [*first.context, *map(ord, "again")]
    assert episode.reward == 0.75
    assert len(episode.segments) == 1


async def test_an_answer_that_is_cut_is_the_environments_to_judge() -> None:
    answers: list[tuple[str, bool]] = []

    class Stern(TwoTurns):
        """Ends the episode with a reward of its own when an answer is cut the second time."""

        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            answers.append((answer, truncated))
            return await super().step(answer)

    executor = rollouts(
        generator=StagedGenerator(truncated=True),
        environment=StagedEnvironment(Stern),
        reward=StagedReward(lambda task, text: 1 / 0),  # the environment's own reward counts
    )
    episode = await play(executor, max_tokens=4)
    assert (episode.outcome, episode.reward) == (Outcome.TRUNCATED, 0.75)
    assert answers == [(turn.text, True) for turn in episode.turns]
    assert len(answers) == 2


def test_an_episode_cut_by_the_context_may_still_be_rewarded() -> None:
    class Endless(TwoTurns):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            if truncated and not answer:
                return Step(done=True, reward=-1.0)
            return Step(messages=({"role": "user", "content": "go on"},), done=False)

    generator = StagedGenerator(says="8888")
    generator.max_model_len = 12
    executor = rollouts(generator=generator, environment=StagedEnvironment(Endless))
    episode = asyncio.run(play(executor, max_tokens=10))
    assert (episode.outcome, episode.reward, len(episode.turns)) == (Outcome.TRUNCATED, -1.0, 2)
    assert [len(turn.prompt_ids) for turn in episode.turns] == [1, 10]
    # What fits is decoded.
    assert [sampling.max_tokens for _, sampling in generator.seen] == [10, 2]

    class Deaf(Endless):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            return Step(messages=({"role": "user", "content": "go on"},), done=False)

    environment = StagedEnvironment(Deaf)
    executor = rollouts(generator=generator, environment=environment, reward=StagedReward(lambda task, text: 0.5))
    episode = asyncio.run(play(executor, max_tokens=10))
    assert (episode.outcome, episode.reward) == (Outcome.TRUNCATED, 0.5)
    assert environment.closed == 1


async def test_a_task_too_long_for_the_context_is_skipped_and_counted() -> None:
    class LongPrompts(SingleTurn):
        async def reset(self) -> Observation:
            length = 99 if self._task.id == "2" else 3
            return Observation(messages=({"role": "user", "content": "x" * length},))

    generator = StagedGenerator()
    generator.max_model_len = 20
    warnings: list[str] = []
    executor = rollouts(generator=generator, environment=StagedEnvironment(LongPrompts), warn=warnings.append)

    async def main() -> None:
        batch = await executor.next_batch()
        assert [group.task.id for group in batch.groups] == ["1", "4", "3"]
        assert executor.metrics()["groups/replaced_too_long"] == 1
        assert warnings == ["counting 2: skipped: a prompt of 99 tokens leaves no room for an answer in 20"]
        generator.max_model_len = 2
        generator.version = 1
        await executor.next_batch()

    with pytest.raises(TaskError, match="a prompt of 3 tokens leaves no room") as caught:
        await main()
    assert "--generator.max-model-len" in caught.value.hint


async def test_uniform_batches_are_delivered_with_one_warning() -> None:
    warnings: list[str] = []
    executor = rollouts(reward=StagedReward(lambda task, text: 0.5), warn=warnings.append)
    batch = await executor.next_batch()
    assert len(batch.groups) == 3
    assert warnings == [], "a method without groups may learn from them"
    assert executor.metrics().get("groups/replaced_uniform", 0) == 0

    log = SimpleNamespace(warn=warnings.append)
    monitor = SimpleNamespace(log=log, clock=PhaseClock())
    services, mixture = SimpleNamespace(trainers=(), rollout=None), SimpleNamespace(epochs={})
    metrics = StepMetrics(RunConfig(), services, executor, mixture, monitor)  # type: ignore[arg-type]
    varied = torch.arange(float(batch.rewards.numel())).reshape(batch.rewards.shape)
    for step, advantages in enumerate([varied * 0, varied * 0, varied, varied * 0]):
        metrics.warn(step, {}, pack(batch, advantages, Layout()))
    assert [warning.split(":")[0] for warning in warnings] == ["step 0", "step 3"]
    assert "all advantages are 0" in warnings[0]


async def test_the_user_is_told_once_when_nearly_all_answers_are_cut() -> None:
    generator = StagedGenerator(truncated=True)
    warnings: list[str] = []
    executor = rollouts(generator=generator, warn=warnings.append)
    for generator.version in range(2):
        await executor.next_batch()
    (warning,) = warnings
    assert "12 of 12 episodes were truncated, by --generator.max-tokens 4" in warning


@pytest.mark.parametrize(("rises", "kinds"), [(True, []), (False, ["batch 4"])])
def test_answers_that_stay_cut_without_rising_rewards_are_reported(rises: bool, kinds: list[str]) -> None:
    warnings: list[str] = []
    advice = Advice()
    for number in range(7):
        task = Task(id="1", source="tasks", messages=())
        episodes = [
            Episode(task=task, turns=(), score=Score(total=0.1 * number * rises + 0.01 * index), outcome=outcome)
            for index, outcome in enumerate([Outcome.TRUNCATED] * 3 + [Outcome.COMPLETED] * 2)
        ]
        batch = Batch(groups=(Group(task=task, episodes=tuple(episodes)),), version=number)
        if text := advice.look_at(batch, max_tokens=4):
            warnings.append(f"batch {number}: {text}")
    assert [warning.split(":")[0] for warning in warnings] == kinds


@pytest.mark.parametrize(("before", "after"), [(40, 900), (800, 900), (400, 40), (400, 400)])
def test_sudden_changes_of_length_name_the_learning_rate_first(before: int, after: int) -> None:
    def batch_of(tokens: int, outcome: Outcome, spread: float) -> Batch:
        task = Task(id="1", source="s", messages=())
        turn = Turn(token_ids=[1] * tokens, prompt_ids=[1], logprobs=[0.0] * tokens, versions=[0] * tokens, text="")
        episodes = [Episode(task=task, turns=(turn,), score=Score(total=spread * n), outcome=outcome) for n in range(4)]
        return Batch(groups=(Group(task=task, episodes=tuple(episodes)),), version=0)

    advice = Advice()
    first = advice.look_at(batch_of(before, Outcome.COMPLETED, 0.5), max_tokens=1000)
    outcome = Outcome.TRUNCATED if after == 900 else Outcome.COMPLETED
    text = advice.look_at(batch_of(after, outcome, 0.0), max_tokens=1000)
    later = [advice.look_at(batch_of(after, outcome, 0.0), max_tokens=1000) for _ in range(4)]
    assert first == later[0] == later[-1] == ""
    assert ("lower --trainer.optimizer.lr before" in text) == (before != after), text


async def test_a_group_with_equal_rewards_is_replaced_where_that_is_asked_for() -> None:
    def even_tasks_teach(task: Task, text: str) -> float:
        return float(int(text) % 7) if int(task.id) % 2 == 0 else 1.0

    schedule = ScheduleConfig(max_lag=0, dynamic_sampling=True)
    executor = rollouts(reward=StagedReward(even_tasks_teach), schedule=schedule)
    batch = await executor.next_batch()
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]
    values = executor.metrics()
    assert values["groups/replaced_uniform"] == 3
    assert values["completed/groups"] == 6, "all, whatever became of them"
    assert values["completed/reward_mean"] * 24 == pytest.approx(float(batch.rewards.sum()) + 12)
    delivered_tokens = sum(episode.response_tokens for episode in batch.episodes)
    assert values["completed/tokens"] == delivered_tokens + values["discarded/uniform_tokens"]


async def test_a_group_whose_turns_differ_teaches_despite_equal_rewards() -> None:
    def by_turn(task: Task, episode: Episode) -> Score:
        return Score(total=1.0, turns=(float(int(episode.text) % 7),) if int(task.id) % 2 == 0 else ())

    schedule = ScheduleConfig(max_lag=0, dynamic_sampling=True)
    executor = rollouts(reward=StagedReward(by_turn, "episode"), schedule=schedule)
    batch = await executor.next_batch()
    assert [int(group.task.id) % 2 for group in batch.groups] == [0, 0, 0]


async def test_a_bug_ends_the_wait_and_the_next_wait_retries_the_episode() -> None:
    executor = rollouts()
    fail_once(executor, lambda task: task.id == "2")
    with pytest.raises(RuntimeError, match="a bug"):
        await executor.next_batch()
    async with asyncio.timeout(60):
        batch = await executor.next_batch()
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]


@pytest.mark.parametrize("error", [SpendingError("spent 10 of 10"), RuntimeError("a bug")])
async def test_an_error_that_comes_between_two_batches_ends_the_next_one(error: Exception) -> None:
    warnings: list[str] = []
    executor = rollouts(schedule=ScheduleConfig(max_lag=1), warn=warnings.append)
    await executor.next_batch()
    executor._fail(error)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            await executor.next_batch()
        assert warnings == []
        executor._raised = False  # nobody was told yet
    executor._raised = True
    await executor.next_batch()
    assert warnings == [f"rollouts continue after an error: {error}"]
    await executor.close()


@pytest.mark.parametrize("turn", [0, 1])
async def test_messages_that_cannot_be_shown_cost_their_group_in_any_turn(turn: int) -> None:
    class Garbage(TwoTurns):
        def _content(self) -> object:
            return None if self.task.id == "2" and self.turns == turn else "again"

        async def reset(self) -> Observation:
            return Observation(messages=({"role": "user", "content": self._content()},))

        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            step = await super().step(answer, truncated=truncated)
            return step if step.done else Step(messages=({"role": "user", "content": self._content()},), done=False)

    environment = StagedEnvironment(Garbage)
    executor = rollouts(environment=environment)
    batch = await executor.next_batch()
    assert [group.task.id for group in batch.groups] == ["1", "4", "3"]
    assert executor.metrics()["groups/replaced_failed"] == 1
    assert environment.closed >= 3, "sessions of what failed are closed"


async def test_thousands_of_episodes_start_in_several_turns_of_the_loop() -> None:
    class Wide(StagedGenerator):
        def engines(self) -> dict[int, int]:
            return {0: 2000}

    executor = rollouts(generator=Wide(), groups=500)
    starts: list[int] = []
    pop = executor._scheduler.pop_starts

    def counting(**limits: int) -> list[InflightEpisode]:
        starts_of_pop = pop(**limits)
        starts.append(len(starts_of_pop))
        return starts_of_pop

    executor._scheduler.pop_starts = counting  # type: ignore[method-assign]
    batch = await executor.next_batch()
    assert len(batch.episodes) == sum(starts) == 2000
    assert max(starts) <= 64
    await executor.close()


async def test_a_cancellation_inside_an_episodes_own_code_is_its_failure() -> None:
    executor = rollouts()
    run_episode = executor._run_episode
    calls = 0

    async def cancelling(task: Task, client: PolicyClient) -> Episode:
        nonlocal calls
        calls += 1
        if calls == 2:
            inner = asyncio.ensure_future(asyncio.sleep(10))
            inner.cancel()
            await inner
        return await run_episode(task, client)

    executor._run_episode = cancelling
    async with asyncio.timeout(60):
        batch = await executor.next_batch()
    assert len(batch.episodes) == 12
    assert executor.metrics()["outcomes/environment_error"] == 1


async def test_concurrent_completions_of_an_episode_decode_one_after_the_other() -> None:
    class Slow(StagedGenerator):
        async def decode(self, completion: ResumableCompletion, *, engine: int) -> None:
            await asyncio.sleep(0)  # an episode that decodes and asks for an engine is an error
            await super().decode(completion, engine=engine)

    async def twice(task: Task, client: PolicyClient) -> Episode:
        prompt_ids = tuple(map(ord, f"{task.id}/{client.episode.index}"))

        async def one() -> list[Chunk]:
            parts: list[Chunk] = []
            await client(prompt_ids, observe=parts.append, gather_s=0.0)
            return parts

        pieces = await asyncio.gather(one(), one())
        assert [part[-1].finish for part in pieces] == ["stop", "stop"]
        return Episode(task=task, turns=(), score=Score(total=float(client.episode.index)))

    executor = rollouts(generator=Slow())
    executor._run_episode = twice
    async with asyncio.timeout(60):
        assert len((await executor.next_batch()).episodes) == 12


async def test_environment_errors_are_distinguished_from_model_errors() -> None:
    class Picky(SingleTurn):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            if int(self._task.id) == 1:
                raise ServiceError("KeyError: 'x'", service="environment", replica=0)
            return Step(done=True, reward=float(int(answer) % 5), model_error=int(answer) % 2 == 0)

    executor = rollouts(environment=StagedEnvironment(Picky))
    batch = await executor.next_batch()
    assert "1" not in [group.task.id for group in batch.groups]
    broken = [episode for episode in batch.episodes if episode.outcome is Outcome.MODEL_ERROR]
    assert broken
    assert all(int(episode.text) % 2 == 0 for episode in broken)
    assert executor.metrics()["outcomes/environment_error"] >= 3


@pytest.mark.parametrize("evaluates", [False, True])
async def test_a_pause_holds_all_requests_at_a_token_and_loses_nothing(evaluates: bool) -> None:
    generator, hold = MortalGenerator(), Hold()
    executor = rollouts(generator=generator, hold=hold)
    if evaluates:
        waiting = asyncio.ensure_future(play(executor, max_tokens=12))
    else:
        waiting = asyncio.ensure_future(executor.next_batch())
    await run_until_idle()
    assert executor.status().episodes_running > 0
    hold.pause()
    await run_until_idle()
    assert generator.told == ["pause"]
    for gate in generator.gates.values():  # engines that finish meanwhile get no other request
        gate.set_result(None)
    begun = len(generator.seen)
    await run_until_idle()
    assert len(generator.seen) == begun
    assert not waiting.done()
    hold.resume()
    result = await waiting
    assert generator.told[:2] == ["pause", "resume"]
    episodes = [result] if evaluates else list(result.episodes)
    assert len(episodes) == (1 if evaluates else 12)
    assert all(len(episode.turns[0].token_ids) == 12 for episode in episodes)


async def test_requests_of_an_evaluation_that_wait_or_come_in_a_pause_go_on_after_it() -> None:
    generator, hold = MortalGenerator(), Hold()
    generator.serving = {0: 1}
    executor = rollouts(generator=generator, hold=hold, environment=StagedEnvironment(TwoTurns))
    sampling, tasks = Sampling(max_tokens=12, temperature=0), [CountingSource().draw() for _ in range(3)]
    evaluation = Evaluation({"held": tasks}, episodes=1, sampling=sampling, version=0)
    executor.start_evaluation(evaluation)
    waiting = asyncio.ensure_future(executor.finish_evaluation())
    await run_until_idle()
    hold.pause()
    await run_until_idle()
    generator.gates[0].set_result(None)  # the first turn ends, and its episode asks for another
    await run_until_idle()
    assert (len(generator.seen), executor.status().queue) == (1, 2)
    hold.resume()
    await asyncio.wait_for(waiting, 10)
    assert [len(episode.turns) for (episode,) in evaluation.results("held")] == [2, 2, 2]


async def test_a_request_waits_until_an_engine_has_a_free_slot_for_it() -> None:
    generator = MortalGenerator()
    generator.serving = {0: 2, 1: 1}
    executor = rollouts(generator=generator)
    waiting = asyncio.ensure_future(executor.next_batch())
    await run_until_idle()
    assert len(generator.seen) == 3
    assert executor.status().queue > 0
    for gate in generator.gates.values():
        gate.set_result(None)
    assert len((await waiting).episodes) == 12
