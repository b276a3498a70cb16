"""Episodes with tools: what the model is shown, how they end, what they are worth, and what of them is trained."""

import asyncio
import json
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from forge_rl.algorithms.advantages import batch_advantages
from forge_rl.engines.protocol import DecodeSettings
from forge_rl.envs.by_source import BySource
from forge_rl.envs.compaction import DropOldOutputs, check_compaction
from forge_rl.envs.protocol import EnvFactory
from forge_rl.envs.tools import ToolEnv
from forge_rl.errors import ConfigError, ContextError
from forge_rl.packing.pack import pack
from forge_rl.packing.rows import Layout
from forge_rl.rollout.episode_runner import EpisodeRunner
from forge_rl.services.environment import Environment
from forge_rl.token_arrays import TokenIds
from forge_rl.types import Batch, Episode, Group, Outcome, Task, ToolCall, Turn
from tests.staged_rollouts import Letters, StagedReward

TASK = Task(id="1", source="toy", messages=({"role": "user", "content": "q"},), truth={"item": "tea"})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def shout(text: str) -> str:
    return text.upper()


def long(n: int) -> str:
    return "".join(str(digit % 10) for digit in range(n))


class Shop:
    """A world with a state, tools, and a reward of its own."""

    closed: ClassVar[list[str]] = []

    def __init__(self, task: Task) -> None:
        self.task = task
        self.cart: list[str] = []

    def buy(self, item: str) -> str:
        """Put something into the cart."""
        self.cart.append(item)
        return f"{len(self.cart)} in the cart"

    async def look(self) -> list[str]:
        return self.cart

    def _secret(self) -> None: ...

    async def reward(self, answer: str) -> float:
        return float(self.task.truth["item"] in self.cart) + 0.5 * (answer == "done")

    def close(self) -> None:
        self.closed.append(",".join(self.cart))


class Stateless:
    """A world that needs no task."""

    def ping(self) -> str:
        return "pong"


def calling(*calls: tuple[str, Mapping[str, object]]) -> str:
    """A completion that calls tools: each as a line of JSON."""
    return "\n".join(json.dumps([name, arguments]) for name, arguments in calls)


async def parse(turn: Turn, tools: Sequence[Mapping[str, object]]) -> tuple[str, tuple[ToolCall, ...]]:
    lines = turn.text.splitlines()
    read = [json.loads(line) for line in lines if line.startswith("[")]
    return "\n".join(line for line in lines if not line.startswith("[")), tuple(
        ToolCall(id=f"call{place}", name=name, arguments=json.dumps(given)) for place, (name, given) in enumerate(read)
    )


def run(
    world: EnvFactory, *answers: str, cut: bool = False, room: int = 10_000, score: Any = None, task: Task = TASK
) -> Episode:
    """Run an episode whose model writes these answers, the last one cut if so, in a context of so many letters."""
    left = list(answers)

    async def decode(prompt_ids: TokenIds) -> Turn:
        if len(prompt_ids) >= room:
            raise ContextError("full")
        text = left.pop(0)
        zeros = [-1.0] * len(text)
        versions, ids = [0] * len(text), list(map(ord, text))
        truncated = cut and not left
        return Turn(
            prompt_ids=prompt_ids, token_ids=ids, logprobs=zeros, versions=versions, text=text, truncated=truncated
        )

    environment = Environment(Environment.Config(), world)  # without processes
    reward = StagedReward(score or (lambda task, text: float(len(text))), "episode" if score else "text")
    runner = EpisodeRunner(Letters(), environment, reward, parse)  # type: ignore[arg-type]
    return asyncio.run(runner(task, decode))


def shown(episode: Episode, turn: int) -> str:
    return "".join(map(chr, episode.turns[turn].prompt_ids))


def test_a_model_calls_tools_until_it_answers():
    episode = run(
        ToolEnv([add, shout]),
        calling(("add", {"a": 1, "b": 2}), ("shout", {"text": "hi"})),
        calling(("add", {"a": "x"}), ("ad", {}), ("shout", {"text": 1})),
        "three!",
    )
    assert (episode.outcome, episode.text, episode.reward) == (Outcome.COMPLETED, "three!", 6.0)
    assert shown(episode, 1).endswith("]3HI")
    told = shown(episode, 2).removeprefix("".join(map(chr, episode.turns[1].context)))
    assert told == (
        "error: wrong arguments of add: a: Input should be a valid integer, unable to parse string as an integer, got "
        "'x'; b: Field requirederror: there is no tool 'ad'; there are: add, shouterror: wrong arguments of shout: "
        "text: Input should be a valid string, got 1"
    )
    assert len(episode.segments) == 1
    calls = [(call.name, call.error[:20], call.seconds is None) for turn in episode.turns for call in turn.calls]
    ran = [("add", "", False), ("shout", "", False)]
    failed = ["error: wrong argumen", "error: there is no t", "error: wrong argumen"]
    assert calls == [*ran, *zip(("add", "ad", "shout"), failed, [False] * 3, strict=True)]
    assert [message["content"] for message in episode.turns[1].messages] == ["3", "HI"]


def test_a_call_that_cannot_be_read_is_told_to_the_model_and_is_no_answer():
    broken = '<tool_call>{"name": add}</tool_call>'
    episode = run(ToolEnv([add], max_turns=3), broken, "three")
    assert shown(episode, 1).endswith("error: the tool call cannot be read; write it as JSON, in the form shown")
    assert (episode.text, len(episode.turns)) == ("three", 2)
    assert run(ToolEnv([add], max_turns=3), *[broken] * 3).text == ""
    assert run(ToolEnv([add]), broken, cut=True).text == broken


@pytest.mark.parametrize(
    ("answers", "cut", "room", "text", "outcome"),
    [
        (["plain"], False, 999, "plain", Outcome.COMPLETED),
        (["pla"], True, 999, "pla", Outcome.TRUNCATED),  # what is cut is scored as it is
        (["so\n" + calling(("add", {"a": 1, "b": 2}))] * 3, False, 999, "", Outcome.COMPLETED),  # calls are no answer
        ([calling(("add", {"a": 1, "b": 2}))], True, 999, "", Outcome.TRUNCATED),
        ([calling(("add", {"a": 1, "b": 2}))], False, 10, "", Outcome.TRUNCATED),  # the context is full
    ],
)
def test_an_episode_ends_with_an_answer_a_cut_or_a_full_context(answers, cut, room, text, outcome):
    episode = run(ToolEnv([add], max_turns=3), *answers, cut=cut, room=room)
    assert (episode.text, episode.outcome, episode.reward) == (text, outcome, float(len(text)))
    assert len(episode.turns) == len(answers)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([calling(("buy", {"item": "tea"})), "done"], 1.5),
        ([calling(("buy", {"item": "milk"})), calling(("look", {})), "done"], 0.5),
        ([calling(("buy", {"item": "tea"}))] * 3, 1.0),  # without an answer
    ],
)
def test_a_class_with_methods_is_a_world_with_state_and_reward(answers, reward):
    Shop.closed.clear()
    world = pickle.loads(pickle.dumps(ToolEnv(Shop, max_turns=3)))
    episode = run(world, *answers)
    assert episode.reward == reward
    assert list(asyncio.run(world(TASK).reset()).tools) == [
        {
            "type": "function",
            "function": {
                "name": "buy",
                "description": "Put something into the cart.",
                "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
            },
        },
        {
            "type": "function",
            "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    assert "pong" in shown(run(ToolEnv(Stateless), calling(("ping", {})), "ok"), 1)


async def test_an_environment_closes_its_world():
    Shop.closed.clear()

    env = ToolEnv(Shop)(TASK)
    await env.step("", truncated=False, calls=[ToolCall(id="1", name="buy", arguments='{"item": "tea"}')])
    await env.close()
    await ToolEnv([add])(TASK).close()
    assert Shop.closed == ["tea"]


def test_examples_come_between_system_message_and_question():
    example = ({"role": "user", "content": "e"}, {"role": "assistant", "content": "x"})
    world = ToolEnv([add], instruction="Use tools.", examples=example)
    told = asyncio.run(world(TASK).reset()).messages
    assert [message["content"] for message in told] == ["Use tools.", "e", "x", "q"]
    with_system = Task(id="2", source="toy", messages=({"role": "system", "content": "own"}, *TASK.messages))
    told = asyncio.run(world(with_system).reset()).messages
    assert [message["content"] for message in told] == ["own", "e", "x", "q"]


def test_a_long_output_is_clipped_in_the_middle():
    episode = run(ToolEnv([long], max_output_chars=100), calling(("long", {"n": 1000})), "ok")
    told = shown(episode, 1).partition("]")[2]
    assert told == long(50) + "\n[... 900 characters left out ...]\n" + long(50)


async def test_calls_are_not_run_once_others_have_taken_the_time_of_their_completion():
    async def wait() -> None:
        await asyncio.sleep(60)

    env = ToolEnv([wait, add], timeout_s=0.1)(TASK)
    names = ("wait", "add", "wait", "add")
    calls = [ToolCall(id=name, name=name, arguments='{"a": 1, "b": 2}' if name == "add" else "") for name in names]
    step = await env.step("", truncated=False, calls=calls)
    late, refusal = "error: wait took longer than 0.1 s", "error: not run, as the calls before it took 0.1 s"
    assert [message["content"] for message in step.messages] == [late, "3", late, refusal]
    assert [(call.error, call.seconds is None) for call in step.calls[2:]] == [(late, False), (refusal, True)]


def test_no_tools_and_two_of_one_name_are_refused():
    for tools, message in (([], "there are no tools"), ([add, add], "two tools have the name 'add'")):
        with pytest.raises(ConfigError, match=message):
            ToolEnv(tools)


def credited(task: Task, episode: Episode) -> Any:
    """1 for "yes"; a call that worked is credited to its turn."""
    from forge_rl.types import Score

    worked = [1.0 if "error" not in shown(episode, turn + 1) else 0.0 for turn in range(len(episode.turns) - 1)]
    return Score(total=float(episode.text == "yes"), turns=(*worked, 0.0))


def test_the_reward_of_a_turn_reaches_its_own_tokens_in_the_packed_batch():
    good, bad = calling(("add", {"a": 1, "b": 2})), calling(("add", {"a": 1}))
    episodes = tuple(
        run(ToolEnv([add]), *answers, score=credited) for answers in ([good, "yes"], [bad, "yes"], [good, "no"])
    )
    batch = Batch(groups=(Group(task=TASK, episodes=episodes),), version=0)
    advantages = batch_advantages(batch, estimator="dr_grpo")
    # Totals are 1, 1, 0: advantages 1/3, 1/3, -2/3. Values of turns are 1, 0, 0, 0, 1, 0: their mean is 1/3.
    by_turn = {(0, 0): 1 / 3 + 2 / 3, (0, 1): 0, (1, 0): 0, (1, 1): 0, (2, 0): -2 / 3 + 2 / 3, (2, 1): -2 / 3 - 1 / 3}
    packed = pack(batch, advantages, Layout(share_prefixes=False))
    found: dict[tuple[int, int], set[float]] = {}
    for row in packed.rows:
        for episode, turn, advantage in zip(row.episodes, row.turns, row.advantages, strict=True):
            if turn >= 0:
                found.setdefault((int(episode), int(turn)), set()).add(round(float(advantage), 5))
    assert found == {key: {round(value, 5)} for key, value in by_turn.items()}
    trained = sum(int(row.mask.sum()) for row in packed.rows)
    assert trained == sum(episode.response_tokens for episode in episodes)


def test_a_compacted_history_starts_a_segment_and_both_are_trained():
    compact = DropOldOutputs(above_chars=150, keep=1, left_out="[...]")
    call = calling(("long", {"n": 100}))
    world = ToolEnv([long], compact=compact)
    episode = run(world, call, call, "ok")
    first, second = episode.segments
    texts = ["".join(map(chr, segment.token_ids)) for segment in (first, second)]
    assert texts[0] == "q" + call + long(100) + call
    assert texts[1] == "q" + "[...]" + long(100) + "ok"  # Letters shows no calls
    for segment, said, turns in ((first, call + call, [0, 1]), (second, "ok", [2])):
        assert "".join(map(chr, segment.token_ids[segment.trained])) == said
        assert np.unique(segment.turns[segment.trained]).tolist() == turns
    other = run(world, "nope")
    batch = Batch(groups=(Group(task=TASK, episodes=(episode, other)),), version=0)
    packed = pack(batch, batch_advantages(batch, estimator="dr_grpo"), Layout())
    trained = sum(int(row.mask.sum()) for row in packed.rows)
    assert trained == len(call + call + "ok") + len("nope")
    assert (episode.reward, other.reward) == (2.0, 4.0)


def test_only_old_outputs_are_dropped_and_only_where_that_helps():
    def output(text: str) -> dict[str, object]:
        return {"role": "tool", "content": text}

    compact = DropOldOutputs(above_chars=10, keep=1)
    user = {"role": "user", "content": "q"}
    assert compact([user, output("a" * 9)]) is None  # short enough
    assert compact([user, output("a" * 90)]) is None  # the last one stays
    assert compact([user, output("short"), output("a" * 90)]) is None  # the text in its place is longer
    old = output("b" * 20)
    assert compact([user, old, output("a")]) == [user, output("[left out]"), output("a")]
    assert DropOldOutputs(above_chars=10, keep=3)([user, old, old]) is None  # there are fewer than stay


def test_compaction_that_no_context_reaches_is_refused():
    def world(**options: int) -> ToolEnv:
        return ToolEnv([add], compact=DropOldOutputs(**options))

    length = DecodeSettings().max_model_len
    for environment in (world(), world(above_chars=4 * length), ToolEnv([add]), BySource({"s": world()})):
        check_compaction(environment, length)
    for environment in (world(above_chars=4 * length + 1), BySource({"s": world(above_chars=8000)})):
        with pytest.raises(ConfigError, match=r"a context of 1024 tokens .*, so none ever is"):
            check_compaction(environment, length)


async def test_a_model_may_write_the_summary():
    async def summary(messages: Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]] | None:
        calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
        return [{"role": "user", "content": f"summary {calls[0][0]['function']}"}]  # type: ignore[index]

    env = ToolEnv([add], compact=summary)(TASK)

    await env.reset()
    call = ToolCall(id="1", name="add", arguments='{"a": 1, "b": 2}')
    history = (await env.step("", truncated=False, calls=[call])).history
    assert history == ({"role": "user", "content": "summary {'name': 'add', 'arguments': {'a': 1, 'b': 2}}"},)
