"""Episodes of many turns: rewards by turn, tool calls, and histories that are compacted."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from benchmarks.real_engines import _Story
from forge_rl.envs.protocol import Observation, Step
from forge_rl.errors import ContextError
from forge_rl.rollout.episode_runner import EpisodeRunner, Parse
from forge_rl.sandbox import SandboxError
from forge_rl.token_arrays import TokenIds
from forge_rl.types import Episode, Outcome, Task, ToolCall, Turn
from tests.staged_rollouts import Letters, StagedEnvironment, StagedReward

TASK = Task(id="1", source="toy", messages=({"role": "user", "content": "go"},))
ADD = {"type": "function", "function": {"name": "add"}}


def run(
    kind: type,
    answers: Sequence[str],
    *,
    parse: Parse | None = None,
    task: Task = TASK,
    score: Callable[[Task, str], float] | None = None,
) -> Episode:
    """Run an episode whose model writes these answers, in an environment of this kind."""
    left = list(answers)

    async def decode(prompt_ids: TokenIds) -> Turn:
        text = left.pop(0)
        zeros, ids = [0] * len(text), list(map(ord, text))
        answer = Letters().thoughts.answer(prompt_ids, ids, text)
        return Turn(prompt_ids=prompt_ids, token_ids=ids, logprobs=zeros, versions=zeros, text=text, answer=answer)

    reward = StagedReward(score or (lambda task, text: float(len(text))))
    runner = EpisodeRunner(Letters(), StagedEnvironment(kind), reward, parse)  # type: ignore[arg-type]
    return asyncio.run(runner(task, decode))


class World:
    """Shows the task, and ends when the model says "end"."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.seen: list[object] = []

    async def reset(self) -> Observation:
        return Observation(messages=self.task.messages)

    async def step(self, completion: str) -> Step:
        done = completion == "end"
        return Step(done=done, messages=() if done else ({"role": "user", "content": "?"},))


class Paid(World):
    """Gives each turn its length, and nothing for the end."""

    async def step(self, completion: str) -> Step:
        step = await super().step(completion)
        reward = None if step.done else float(len(completion))
        return Step(done=step.done, messages=step.messages, reward=reward, parts={"turns": 1.0})


class PaidAtTheEnd(World):
    async def step(self, completion: str) -> Step:
        step = await super().step(completion)
        return Step(done=step.done, messages=step.messages, reward=5.0 if step.done else None)


@pytest.mark.parametrize(
    ("kind", "reward", "values", "parts"),
    [
        (World, 3.0, (), {}),  # the verifier's, of "end"
        (Paid, 3.0, (1.0, 2.0, 0.0), {"turns": 3.0}),
        (PaidAtTheEnd, 5.0, (), {}),
    ],
)
def test_an_environments_rewards_add_up_and_are_those_of_their_turns(kind, reward, values, parts):
    episode = run(kind, ["a", "bb", "end"])
    assert (episode.outcome, episode.reward) == (Outcome.COMPLETED, reward)
    assert (episode.score.turns, episode.score.parts) == (values, parts)
    assert episode.score.turns_in_total == bool(values)


class Calculator(World):
    """Answers calls, and remembers what it was given."""

    given: list[tuple[str, tuple[ToolCall, ...]]]

    async def reset(self) -> Observation:
        type(self).given = []
        return Observation(messages=self.task.messages, tools=(ADD,))

    async def step(self, completion: str, *, calls: tuple[ToolCall, ...] = ()) -> Step:
        self.given.append((completion, calls))
        outputs = tuple({"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls)
        return Step(done=not calls, messages=outputs)


async def parse(turn: Turn, tools: Sequence[object]) -> tuple[str, tuple[ToolCall, ...]]:
    assert tools == (ADD,)
    content, star, name = turn.text.partition("*")
    return content, (ToolCall(id="c1", name=name, arguments="{}"),) if star else ()


def test_a_turn_keeps_its_messages_and_calls() -> None:
    def parse_as(calls: tuple[ToolCall, ...]) -> Parse:
        async def parse(turn: Turn, tools: object) -> tuple[str, tuple[ToolCall, ...]]:
            return turn.text, calls

        return parse

    class Slow(World):
        async def step(self, completion: str) -> Step:
            await asyncio.sleep(0.02)
            return await super().step(completion)

    call = ToolCall(id="1", name="add", arguments="{}")
    with_tool = Task(id="1", source="toy", messages=TASK.messages, tools=(ADD,))
    first, second = run(Slow, ["a", "end"], parse=parse_as((call,)), task=with_tool).turns
    assert (first.messages, second.messages) == (TASK.messages, ({"role": "user", "content": "?"},))
    assert first.calls == second.calls == (call,)
    assert first.seconds >= 0
    assert first.response_s > 0.01

    class Timed(World):
        async def step(self, completion: str) -> Step:
            step = await super().step(completion)
            return Step(done=step.done, messages=step.messages, calls=(ran,))

    ran = ToolCall(id="1", name="add", arguments="{}", seconds=0.5, error="error: add needs b")
    first, *_ = run(Timed, ["end"], parse=parse_as((call,)), task=with_tool).turns
    assert (first.calls, first.calls[0].seconds) == ((ran,), 0.5), "as the environment ran it"


def test_an_environment_gets_the_calls_that_the_parser_found():
    episode = run(Calculator, ["so *add", "three"], parse=parse)
    assert Calculator.given == [("so ", (ToolCall(id="c1", name="add", arguments="{}"),)), ("three", ())]
    assert [turn.text for turn in episode.turns] == ["so *add", "three"]
    assert len(episode.segments) == 1


def test_one_that_takes_none_is_given_the_completion_as_it_is():
    assert run(World, ["so *add", "end"], parse=parse, task=Task(**{**vars(TASK), "tools": (ADD,)})).reward == 3.0


class Forgetful(World):
    async def step(self, completion: str) -> Step:
        if completion == "end":
            return Step(done=True)
        return Step(done=False, history=({"role": "user", "content": f"you said {completion}"},))


def test_a_new_history_is_all_that_the_model_is_shown_and_begins_a_segment():
    episode = run(Forgetful, ["a", "b", "end"])
    prompts = ["".join(map(chr, turn.prompt_ids)) for turn in episode.turns]
    assert prompts == ["go", "you said a", "you said b"]
    assert [segment.turns.max() for segment in episode.segments] == [0, 1, 2]


class Broken(World):
    async def step(self, completion: str) -> Step:
        return Step(done=False)


def test_a_step_that_shows_nothing_and_does_not_end_is_an_error():
    episode = run(Broken, ["a"])
    assert (episode.outcome, len(episode.turns)) == (Outcome.ENVIRONMENT_ERROR, 1)
    assert "must show the model something" in episode.problem


class Sandboxed(World):
    async def step(self, completion: str) -> Step:
        raise SandboxError("the sandbox server is gone")


def test_a_failed_sandbox_is_no_evidence_about_the_policy():
    def score(task: Task, text: str) -> float:
        raise SandboxError("the sandbox server is gone")

    for kind, scores in ((Sandboxed, None), (World, score)):
        episode = run(kind, ["end"], score=scores)
        assert (episode.outcome, episode.score) == (Outcome.INFRASTRUCTURE_ERROR, None)


async def test_a_benchmark_conversation_is_scored_even_past_the_context() -> None:
    story = _Story(100, random.Random(0))
    runner = EpisodeRunner(Letters(), story, None)  # type: ignore[arg-type]  # the environment scores
    rooms = iter([True, True])

    async def decode(prompt_ids: TokenIds) -> Turn:
        if next(rooms, None) is None:
            raise ContextError("no room")
        return Turn(prompt_ids=prompt_ids, token_ids=[1], logprobs=[0.0], versions=[0], text="a")

    episode = await runner(TASK, decode)
    assert (episode.outcome, len(episode.turns), episode.problem) == (Outcome.TRUNCATED, 2, "")


class Quoting(World):
    seen_texts: ClassVar[list[str]] = []

    async def step(self, completion: str) -> Step:
        self.seen_texts.append(completion)
        return Step(done=True)


class QuotingThoughts(Quoting):
    seen_texts: ClassVar[list[str]] = []
    thoughts = True


def test_environments_see_thoughts_only_if_they_ask() -> None:
    for kind in (Quoting, QuotingThoughts):
        assert run(kind, ["<think>end</think>go"]).reward == len("go"), "the verifier sees the answer"
    assert (Quoting.seen_texts, QuotingThoughts.seen_texts) == (["go"], ["<think>end</think>go"])


def test_a_call_in_an_unfinished_thought_is_none() -> None:
    Calculator.given.clear()
    episode = run(Calculator, ["<think>perhaps *add"], parse=parse)
    assert (Calculator.given, episode.reward) == ([("", ())], 0.0)
