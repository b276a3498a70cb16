"""Environments: one turn, and a small environment of many turns that proves the protocol."""

import asyncio
import pickle
from dataclasses import dataclass

import pytest

from forge_rl.envs.protocol import Env, EnvFactory, Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.types import Message, Task

TASK = Task(id="t", source="s", messages=({"role": "user", "content": "Guess 1 to 9."},), truth={"number": 6})


class GuessTheNumber:
    """Says higher or lower; the reward falls with each guess."""

    def __init__(self, task: Task, guesses: int) -> None:
        self._task, self._guesses, self._used = task, guesses, 0

    async def reset(self) -> Observation:
        return Observation(messages=self._task.messages)

    async def step(self, answer: str) -> Step:
        self._used += 1
        number = self._task.truth["number"]
        assert isinstance(number, int)
        if int(answer) == number:
            return Step(done=True, reward=1 / self._used)
        if self._used == self._guesses:
            return Step(done=True, reward=0.0)
        hint = "higher" if int(answer) < number else "lower"
        return Step(done=False, messages=({"role": "user", "content": hint},))


@dataclass(frozen=True, kw_only=True)
class Guessing:
    guesses: int

    def __call__(self, task: Task) -> Env:
        return GuessTheNumber(task, self.guesses)


async def _play(env: Env, answers: list[str]) -> tuple[list[Message], Step]:
    shown = list((await env.reset()).messages)
    for answer in answers:
        step = await env.step(answer)
        shown += step.messages
        if step.done:
            break
    return shown, step


async def test_a_single_turn_shows_the_task_and_leaves_the_score_to_the_verifier() -> None:
    factory: EnvFactory = SingleTurn
    shown, last = await _play(factory(TASK), ["6", "never taken"])
    assert shown == list(TASK.messages)
    assert last == Step(done=True, reward=None)


async def test_an_episode_of_many_turns_ends_with_its_own_reward() -> None:
    factory: EnvFactory = Guessing(guesses=3)
    shown, last = await _play(factory(TASK), ["4", "8", "6"])
    assert [message["content"] for message in shown] == ["Guess 1 to 9.", "higher", "lower"]
    assert last == Step(done=True, reward=1 / 3)


def test_each_episode_gets_an_env_of_its_own() -> None:
    factory = Guessing(guesses=1)
    ends = [asyncio.run(_play(factory(TASK), [answer]))[1].reward for answer in ("4", "6")]
    assert ends == [0.0, 1.0]


@pytest.mark.parametrize("factory", [SingleTurn, Guessing(guesses=2)])
def test_a_factory_pickles(factory: EnvFactory) -> None:
    assert pickle.loads(pickle.dumps(factory)) == factory


def test_a_step_that_goes_on_must_show_something() -> None:
    with pytest.raises(AssertionError, match="must show"):
        Step(done=False)
