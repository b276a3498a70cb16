"""Gymnasium environments that are played in text."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from forge_rl.envs.env_flag import build_environment
from forge_rl.errors import ConfigError
from forge_rl.types import Task
from forge_rl.worlds.gymnasium import GymnasiumEnv

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")

LAKE = "gymnasium:FrozenLake-v1,is_slippery=false"


def task(seed: int = 0) -> Task:
    return Task(id="1", source="s", messages=({"role": "system", "content": "Reach G."},), truth={"seed": seed})


async def test_an_episode_is_played_turn_by_turn_with_the_rewards_of_each():
    env = build_environment(LAKE)

    session = env(task())
    observation = await session.reset()
    assert observation.messages[0]["content"] == "Reach G."
    assert str(observation.messages[1]["content"]).startswith("[S]FFF\nFHFH\n")
    assert str(observation.messages[1]["content"]).endswith("Answer with one of: left, down, right, up.")
    step = await session.step("I do not know.", truncated=False)
    assert (step.done, step.reward, dict(step.parts)) == (False, 0.0, {"no_action": 1.0})
    steps = [await session.step(text, truncated=False) for text in ("not up but DOWN", "1", "right", "2", "down")]
    assert "S[F]" not in str(steps[0].messages[0]["content"])
    assert "\n[F]HFH" in str(steps[0].messages[0]["content"])
    last = await session.step("right.", truncated=True)
    assert [step.reward for step in (*steps, last)] == [0.0] * 5 + [1.0]
    assert [step.done for step in (*steps, last)] == [False] * 5 + [True]
    session.close()


async def test_an_episode_ends_by_its_turns_and_where_the_context_is_full():
    session = build_environment(f"{LAKE},max_turns=2")(task())
    await session.reset()
    assert not (await session.step("left", truncated=False)).done
    assert (await session.step("what?", truncated=False)).done
    session = build_environment(LAKE)(task())
    await session.reset()
    full = await session.step("", truncated=True)
    assert (full.done, full.reward) == (True, 0.0)


def test_the_same_seed_is_the_same_world_and_held_out_seeds_are_others():
    env = build_environment("gymnasium:Blackjack-v1,tasks=5,held_out=3")

    async def first(seed: int) -> str:
        return str((await env(task(seed)).reset()).messages[1]["content"])

    assert asyncio.run(first(7)) == asyncio.run(first(7))
    assert len({asyncio.run(first(seed)) for seed in range(8)}) > 1
    (source,) = env.sources(0).values()  # type: ignore[attr-defined]
    drawn = {source.draw().truth["seed"] for _ in range(20)}
    assert (drawn, [task.truth["seed"] for task in source.held_out(9)]) == ({3, 4, 5, 6, 7}, [0, 1, 2])


@pytest.mark.parametrize(
    ("completion", "action"),
    [("left", 0), ("I choose: RIGHT!", 2), ("3", 3), ("upwards", None), ("first up, then down", 1), ("10", None)],
)
def test_the_last_action_that_is_named_counts(completion: str, action: int | None):
    assert GymnasiumEnv("FrozenLake-v1").action_of(completion) == action


def test_images_are_refused_as_text_would_show_a_few_of_their_numbers():
    class Screen(gymnasium.Env):  # type: ignore[misc, type-arg]
        observation_space = gymnasium.spaces.Dict({"screen": gymnasium.spaces.Box(0, 255, (210, 160, 3), np.uint8)})
        action_space = gymnasium.spaces.Discrete(3)

    gymnasium.register("Screen-v0", entry_point=lambda **_: Screen())
    with pytest.raises(ConfigError, match=r"Screen-v0 shows Dict.*cut to a few numbers"):
        GymnasiumEnv("Screen-v0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gymnasium:Nope-v0", "Nope"),
        ("gymnasium:Pendulum-v1", "Box"),
        ('gymnasium:FrozenLake-v1,actions=["a"]', "4 actions, but actions has 1 names"),
        ("gymnasium:FrozenLake-v1,nonsense=1", "nonsense"),
        ("gymnasium:FrozenLake-v1,max_turns=0", "max_turns is 0"),
    ],
)
def test_what_cannot_be_played_is_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        build_environment(text)
