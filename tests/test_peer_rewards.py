"""Rewards written for TRL or verl score as those trainers call them."""

import asyncio
import inspect
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from forge_rl.data.sources.rows import Columns
from forge_rl.errors import ConfigError, ForgeError, TaskError
from forge_rl.rewards.composition import described
from forge_rl.rewards.protocol import form_of
from forge_rl.rewards.reward_flag import build_reward
from forge_rl.types import Episode, Score, Task
from tests.test_recording import turn

REWARDS = """
def brief(completions, **kwargs):
    return [float(len(completion) < 10) for completion in completions]

def right(prompts, completions, solution, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(wanted in answer[0]["content"]) for answer, wanted in zip(completions, solution)]

async def right_or_none(completions, solution):
    return [1.0 if wanted in answer[0]["content"] else None for answer, wanted in zip(completions, solution)]

def mean(prompts, completions, **kwargs):
    return sum(map(len, completions)) / len(completions)

def tokens(completion_ids, completions, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("openai/gsm8k", {"split": "train"})
    return float(solution_str.split("#### ")[-1] == ground_truth)

def compute_parts(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str}

def without_score(data_source, solution_str, ground_truth):
    return {"acc": 1.0}

def neither(prompts, answers):
    return 1.0
"""
CHAT: dict[str, Any] = {"prompt": [{"role": "user", "content": "2+3?"}], "solution": "5"}
TEXT: dict[str, Any] = {"prompt": "2+3?", "solution": "5"}
VERL: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+3?"}],
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train"},
}


def scores(reward: Any, row: dict[str, Any], *answers: str) -> list[Any]:
    """Score the answers of one group, as the service does."""
    reward = pickle.loads(cloudpickle.dumps(reward))  # as it travels
    task: Task = Columns().read(row, "sums")[0]
    episodes = [Episode(task=task, turns=(turn([1], [2, 3], text=answer),)) for answer in answers]

    async def scored() -> list[Any]:
        results = reward(task, episodes) if form_of(reward) == "group" else [reward(task, text) for text in answers]
        return list(await results if inspect.isawaitable(results) else results)

    return asyncio.run(scored())


@pytest.fixture
def rewards(users_folder: Path) -> Path:
    (users_folder / "theirs.py").write_text(REWARDS)
    return users_folder


@pytest.mark.parametrize(
    ("name", "row", "answers", "expected"),
    [
        ("brief", TEXT, ["It is 5.", "It is perhaps 5."], [1.0, 0.0]),
        ("right", CHAT, ["It is 5.", "It is 6."], [1.0, 0.0]),
        ("right_or_none", CHAT, ["It is 5.", "It is 6."], [1.0, 0.0]),
        ("tokens", TEXT, ["5", "6"], [2.0, 2.0]),
        ("compute_score", VERL, ["#### 5", "#### 6"], [1.0, 0.0]),
        ("compute_parts", VERL, ["5", "6"], [Score(total=0.5, parts={"acc": acc}) for acc in (1.0, 0.0)]),
    ],
)
def test_they_score_as_they_are(name: str, row: dict[str, Any], answers: list[str], expected: list[Any], rewards: Path):
    reward = build_reward([f"theirs.py:{name}"])
    assert scores(reward, row, *answers) == expected
    assert described(reward) == f"theirs.py:{name}"


@pytest.mark.parametrize(
    ("name", "row", "error", "message"),
    [
        ("mean", TEXT, ForgeError, "not a list of scores"),
        ("right", {"prompt": CHAT["prompt"]}, TaskError, "the reward needs solution, but the task"),
        ("compute_score", CHAT, TaskError, "has no ground truth"),
        ("without_score", VERL, ForgeError, "the reward returned {'acc': 1.0}"),
    ],
)
def test_what_they_lack_is_named(name: str, row: dict[str, Any], error: type[ForgeError], message: str, rewards: Path):
    with pytest.raises(error, match=message):
        scores(build_reward([f"theirs.py:{name}"]), row, "5")


def test_a_form_that_nobody_calls_is_refused(rewards: Path):
    with pytest.raises(ConfigError, match=r"theirs.py:neither: the reward neither takes 'prompts'"):
        build_reward(["theirs.py:neither"])
