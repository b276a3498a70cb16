"""Rollouts go on when engines, environments and judges die; staged services."""

import asyncio
from dataclasses import replace

from forge_rl.envs.protocol import Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.errors import ReplicaError
from forge_rl.rollout.evaluation import Evaluation
from forge_rl.services.completion import ResumableCompletion
from forge_rl.types import Outcome, Sampling, Task
from tests.staged_rollouts import (
    CountingSource,
    MortalGenerator,
    StagedEnvironment,
    StagedGenerator,
    StagedReward,
    rollouts,
    run_until_idle,
)


async def test_an_episode_whose_environment_or_judge_died_starts_again() -> None:
    died: set[str] = set()

    def die_once(who: str, task: Task) -> None:
        if who + task.id not in died:
            died.add(who + task.id)
            raise ReplicaError("gone", service=who, replica=0)

    class Mortal(SingleTurn):
        async def step(self, answer: str, *, truncated: bool = False) -> Step:
            die_once("environment", self._task)
            return Step(done=True)

    def score(task: Task, text: str) -> float:
        die_once("reward", task)
        return float(int(text) % 7)

    executor = rollouts(environment=StagedEnvironment(Mortal), reward=StagedReward(score))
    batch = await executor.next_batch()
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert {episode.outcome for episode in batch.episodes} == {Outcome.COMPLETED}
    metrics = executor.metrics()
    assert (metrics["outcomes/infrastructure_error"], metrics["outcomes/completed"]) == (3, 12), (
        "for a judge that died nothing is decoded again"
    )
    tokens_of_one = batch.episodes[0].response_tokens
    assert metrics["discarded/failed_tokens"] == 3 * tokens_of_one, "of environments that died after an answer"
    decoded = executor._generator.seen
    assert len(decoded) == 12 + 3, "the others of its group are not decoded again"
    for group in batch.groups:
        rewards = [float(int(episode.text) % 7) for episode in group.episodes]
        assert [episode.reward for episode in group.episodes] == rewards, "what failed is in no group's mean"


async def test_a_turn_whose_engine_dies_continues_from_its_tokens() -> None:
    generator = MortalGenerator()
    executor = rollouts(generator=generator, reward=StagedReward(lambda task, text: float(int(text) % 7)))
    coming = asyncio.create_task(executor.next_batch())
    await run_until_idle()
    assert len(generator.seen) == 12
    on_first = [episode for episode in executor._running if episode.engine == 0]
    generator.kill(0)
    await run_until_idle()
    rest = generator.seen[12:]
    assert len(rest) == 8 - (12 - len(on_first)), "as many as the other engine takes"
    generator.gates[1].set_result(None)
    batch = await coming
    assert [group.task.id for group in batch.groups] == ["1", "2", "3"]
    assert executor.metrics()["outcomes/truncated"] == 12
    losses = 0
    for episode in batch.episodes:
        (turn,) = episode.turns
        assert (len(turn.token_ids), turn.truncated) == (12, True)
        assert turn.text == "".join(map(chr, turn.token_ids))
        if turn.versions[0] == 0:
            losses += 1
            assert turn.versions.tolist() == [0] * 3 + [1] * 9
            (retry,) = [request for request in generator.seen if request[0] == tuple(turn.context[:-9])]
            assert retry[1].max_tokens == 9
    assert losses == len(on_first)
    assert executor._scheduler.states["decoding"] == 0


async def test_a_replaced_groups_decoded_tokens_count_as_discarded() -> None:
    generator = MortalGenerator()
    executor = rollouts(generator=generator, reward=StagedReward(lambda task, text: float(int(text) % 7)))
    coming = asyncio.create_task(executor.next_batch())
    await run_until_idle()
    planner = executor._scheduler.planner
    planner.replace(next(planner.groups()), "failed", "it broke", "mend it")
    executor._advance()
    await run_until_idle()
    assert executor.metrics()["discarded/failed_tokens"] == 4 * 3, "four episodes, three letters each"
    for gate in generator.gates.values():
        gate.set_result(None)
    batch = await coming
    assert [group.task.id for group in batch.groups] == ["4", "2", "3"]
    assert executor.metrics()["completed/tokens"] == 12 * 12


async def test_a_stop_text_ends_a_completion_over_two_engines() -> None:
    generator = MortalGenerator()
    generator.sampling = Sampling(max_tokens=12, stop=tuple(5 * str(digit) for digit in range(10)))
    executor = rollouts(generator=generator, reward=StagedReward(lambda task, text: float(len(text))))
    sampling = replace(generator.sampling, temperature=0)
    evaluation = Evaluation({"one": [CountingSource().draw()]}, episodes=1, sampling=sampling, version=0)
    executor.start_evaluation(evaluation)
    waiting = asyncio.create_task(executor.finish_evaluation())
    await run_until_idle()
    generator.kill(0)
    generator.gates[1].set_result(None)
    await waiting
    (((turn,),),) = [[episode.turns for episode in group] for group in evaluation.results("one")]
    assert [sampling.seed for _, sampling in generator.seen] == 2 * [generator.seen[0][1].seed]
    assert "".join(map(chr, turn.token_ids)) == 3 * "0" + 5 * "1"
    assert turn.text == 3 * "0"
    assert not turn.truncated


async def test_when_all_engines_die_interrupted_work_goes_first() -> None:
    generator = MortalGenerator()
    executor = rollouts(generator=generator, reward=StagedReward(lambda task, text: float(int(text) % 7)))
    coming = asyncio.create_task(executor.next_batch())
    await run_until_idle()
    generator.kill(0)
    generator.kill(1)
    await run_until_idle()
    assert executor._scheduler.states["waiting"] == 12
    assert "12 wait for an engine" in executor.waiting_for()
    assert all(episode.interrupted for episode in executor._running)
    generator.serving = {2: 16}
    generator.gates[2].set_result(None)
    generator.tell()
    batch = await coming
    assert all(turn.versions.tolist() == [turn.versions[0]] * 3 + [2] * 9 for e in batch.episodes for turn in e.turns)
    assert len(generator.seen) == 24


async def test_an_evaluation_survives_a_dead_engine_even_between_batches() -> None:
    generator = MortalGenerator()
    executor = rollouts(generator=generator, reward=StagedReward(lambda task, text: 1.0))
    executor._scheduler.capacity.set_paused(True)
    tasks = {"held_out": [CountingSource().draw()]}
    evaluation = Evaluation(tasks, episodes=1, sampling=Sampling(max_tokens=12, temperature=0), version=0)
    executor.start_evaluation(evaluation)
    waiting = asyncio.create_task(executor.finish_evaluation())
    await run_until_idle()
    generator.kill(0)
    generator.gates[1].set_result(None)
    await waiting
    ((episode,),) = evaluation.results("held_out")
    assert episode.turns[0].versions.tolist() == [0] * 3 + [1] * 9


async def test_a_completion_that_kills_engines_costs_only_its_episode() -> None:
    class Poisonous(StagedGenerator):
        async def decode(self, completion: ResumableCompletion, *, engine: int) -> None:
            if completion.prompt_ids.tolist() == [ord("1")]:
                self.seen.append(((ord("1"),), completion.rest))
                raise ReplicaError("gone", service="generator", replica=engine)
            await super().decode(completion, engine=engine)

    environment = StagedEnvironment(SingleTurn)
    generator = Poisonous()
    executor = rollouts(generator=generator, environment=environment)
    batch = await executor.next_batch()
    assert [group.task.id for group in batch.groups] == ["4", "2", "3"]
    metrics = executor.metrics()
    assert metrics["groups/replaced_failed"] == 1
    assert 1 <= metrics["outcomes/infrastructure_error"] <= 4
    poisoned = sum(prompt == (ord("1"),) for prompt, _ in generator.seen)
    assert poisoned <= 3 * 4, "an episode is not run again"
    await executor.close()
    assert environment.closed >= 1, "the sessions of episodes that are given up are closed"
    assert len(generator.listeners) == 0
