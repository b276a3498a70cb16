"""Rewards by the texts of --reward: what they name, and 25 that cannot work, each with its one clear message."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_rl.algorithms.evaluation import pass_at_k
from forge_rl.errors import ForgeError, SpendingError
from forge_rl.flags.user_code import load, name_of
from forge_rl.rewards.answers import Number
from forge_rl.rewards.auto import Auto
from forge_rl.rewards.by_source import RewardBySource
from forge_rl.rewards.composition import WeightedSum, described
from forge_rl.rewards.formats import Regex
from forge_rl.rewards.reward_flag import REWARDS, build_reward
from forge_rl.rewards.scorer import score_again, with_score
from forge_rl.run.records.run_dir import code_digests
from forge_rl.services.reward import parts_of
from forge_rl.services.reward_actor import RewardActor, _with_forms
from forge_rl.types import Episode, Score, Task, Turn

TASK = Task(id="t", source="s", messages=({"role": "user", "content": "2+3?"},), truth={"answer": "5"})
TURN = Turn(prompt_ids=[1], token_ids=[2, 3], logprobs=[0.0, 0.0], versions=[0, 0], text="it is 5")
EPISODE = Episode(task=TASK, turns=(TURN, TURN))

MINE = """
import time
import numpy as np
from forge_rl.types import Episode, Score, Task

def score(task, text): return float(len(text))
def of_episode(task: Task, episode: Episode): return float(len(episode.turns))
def alone(task): return 1.0
def nothing(task, text): pass
def text(task, text): return "good"
def nan(task, text): return float("nan")
def several(task, text): return np.zeros(3)
def one_turn(task, episode): return Score(total=1.0, turns=(0.5,))
def nan_part(task, text): return Score(total=1.0, parts={"style": float("nan")})
def few(task, episodes): return []
def number(task, episodes): return 1.0
def raises(task, text): raise KeyError("solution")
def stops(task, text): return next(iter(()))
def slow(task, text): time.sleep(2)
class Plain:
    def __call__(self, task, text): return 2.0
class Wants:
    def __init__(self, threshold): pass
    def __call__(self, task, text): return 0.0
class Breaks:
    def __init__(self): raise OSError("no such corpus")
value = 3
"""


@pytest.fixture
def mine(users_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, in which the command is given."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (users_folder / "mine.py").write_text(MINE)
    (users_folder / "broken.py").write_text("def score(task, text)\n    return 1\n")
    (users_folder / "imports.py").write_text("import not_there_at_all\n")
    (users_folder / "schema.json").write_text('{"type": "nonsense"}')
    (users_folder / "deep.json").write_text("[" * 100_000)
    (users_folder / "causal").mkdir()
    (users_folder / "causal" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return users_folder


def scored(reward: Any) -> Episode:
    """Score an episode as a replica and the controller do."""

    async def main() -> Episode:
        actor = RewardActor(5.0, 0)
        functions = {"alone": reward}
        if isinstance(reward, WeightedSum):
            functions = {name: function for name, (function, _) in reward.parts.items()}
        actor._functions = {0: _with_forms(functions)}
        part_scores = {name: scores[0] for name, scores in (await actor.score(0, TASK, [EPISODE]))[0].items()}
        if isinstance(reward, WeightedSum):
            [combined] = reward.combine_all({name: [score] for name, score in part_scores.items()})
            return with_score(EPISODE, combined)
        return with_score(EPISODE, part_scores["alone"])

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("texts", "total", "parts"),
    [
        (["auto"], 1.0, {}),
        (["number=0.5"], 0.5, {"number": 1.0}),
        (["number*0.5"], 0.5, {"number": 1.0}),
        (["mine.py:score"], 7.0, {}),
        (["mine:score"], 7.0, {}),
        (["mine.py:score=2"], 14.0, {"score": 7.0}),
        (["mine.py:Plain*-1", "number=0"], -2.0, {"Plain": 2.0, "number": 1.0}),
        (["number", "mine.py:of_episode=0.1"], 1.2, {"number": 1.0, "of_episode": 2.0}),
        (["length:tokens=8*-0.5"], -0.25, {"length": 0.5}),
        (["regex:pattern=^it.*5$"], 1.0, {}),
        (["regex:pattern='it, is|5*5'"], 1.0, {}),
        (["regex:pattern=^is*0.5", "regex:pattern=^it,full=false*0.5"], 0.5, {"regex": 0.0, "regex_2": 1.0}),
        (["diversity", "number"], 2.0, {"diversity": 1.0, "number": 1.0}),
        # Of four tokens: half a cosine at 4 / 8 is the middle of 2 and 1.
        (["number=0", "cosine:max_tokens=8"], -5.0, {"number": 1.0, "cosine": -5.0, "cosine/repeated": 0.0}),
        (
            ["maths=number=0", "cosine:of=maths,max_tokens=8*2"],
            3.0,
            {"maths": 1.0, "cosine": 1.5, "cosine/repeated": 0.0},
        ),
        (["number", "adaptive_length:tokens=16*-0.5"], 0.875, {"number": 1.0, "adaptive_length": 0.25}),
        (["number", "stop_properly"], 1.0, {"number": 1.0, "stop_properly": 0.0}),
    ],
)
def test_texts_name_rewards_and_weights(texts: list[str], total: float, parts: dict[str, float], mine: Path):
    episode = scored(build_reward(texts))
    assert episode.reward == pytest.approx(total)
    assert dict(episode.score.parts) == parts


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.8, 0.1, 0.1), (0.333, 0.333, 0.334), (0.1,) * 10])
def test_full_marks_in_every_part_are_a_success_whatever_the_weights(weights: tuple[float, ...]):
    parts = {str(place): Score(total=1.0) for place in range(len(weights))}
    rewards = WeightedSum({name: (lambda task, text: 1.0, weight) for name, weight in zip(parts, weights, strict=True)})
    total = rewards.combine(parts).total
    assert pass_at_k([[total, 0.0]], 2).value == 1.0
    assert pass_at_k([[total - 1e-6, 0.0]], 2).value == 0.0


def test_options_are_read_as_their_types_say():
    assert build_reward(["number:tolerance=0.5,key=solution,extract=boxed"]) == Number(
        tolerance=0.5, key="solution", extract="boxed"
    )
    assert build_reward(["regex:pattern=5,full=true"]) == Regex(pattern="5", full=True)
    assert build_reward([" auto".strip()]) == Auto()


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("gone.py:score", "No such file", "name an existing Python file"),
        ("gone:score", "there is no module gone", "FILE.py:NAME"),
        ("broken.py:score", r"SyntaxError: expected ':' \(.*broken.py:1\)", "fix the file"),
        ("imports.py:score", r"No module named 'not_there_at_all' \(.*imports.py:1\)", "its imports"),
        ("mine.py:scor", "mine.py has no scor", "it defines score"),
        ("mine.py:value", "cannot be called with a task and its episode: it is not a function", "def score"),
        ("mine.py:alone", "cannot be called with a task and its episode: too many positional", "def score"),
        ("mine.py:Wants", "mine.py:Wants needs threshold", "mine.py:Wants:threshold=..."),
        ("mine.py:Wants,treshold=1", "mine.py:Wants has no option 'treshold'", "did you mean threshold"),
        ("mine.py:Breaks", "Breaks cannot be made: OSError: no such corpus", "fix its options or its code"),
        ("mine.py:score=x", "the weight 'x' is not a finite number", "WEIGHT"),
        ("math*", "the weight '' is not a finite number", "WEIGHT"),
        ("auto=nan", "the weight 'nan' is not a finite number", "WEIGHT"),
        ("exat", "there is no reward 'exat'", "did you mean exact"),
        ("exat:key=solution", "there is no reward 'exat'", "did you mean exact"),
        ("number:tolerence=1", "number has no option 'tolerence'", "did you mean tolerance"),
        ("number:tolerance=much", "tolerance is 'much': Input should be a valid number", "of type float"),
        ("number:tolerance", "'tolerance' is not KEY=VALUE", "KEY=VALUE"),
        ("exact:extract=first", "extract is 'first': Input should be 'auto'", "a valid value"),
        ("overlong:max_tokens=5", "overlong needs cache_tokens", "cache_tokens=..."),
        (
            "overlong:max_tokens=5,cache_tokens=9",
            "cache_tokens is 9, more than max_tokens 5",
            "a fraction of max_tokens",
        ),
        ("regex:pattern=(", r"'\(' is not a regular expression: missing \)", "fix the pattern"),
        ("stop_properly", "depends on another part of the reward, but there is no other part", "--reward auto"),
        ("stop_properly:factor=2", "factor is 2.0", "to 1 or less"),
        ("cosine:max_tokens=8", "--reward cosine depends on another part", "--reward auto cosine:..."),
        ("cosine:max_tokens=8,exceeded=inf", "exceeded is inf", "a finite number"),
        ("cosine:max_tokens=8,ngram=0", "ngram is 0", "to 1 or more"),
        ("adaptive_length:of=math", "adaptive_length needs tokens", "tokens=..."),
        ("json_schema:schema=gone.json", "gone.json has no valid JSON schema: No such file", "schema=FILE.json"),
        ("json_schema:schema=schema.json", "'nonsense' is not valid", "schema=FILE.json"),
        ("json_schema:schema=deep.json", "deep.json has no valid JSON schema: maximum recursion", "schema=FILE.json"),
        ("judge:rubric=x", "judge needs model", "model=..."),
        ("judge:model=m", "the environment variable OPENAI_API_KEY is not set", "api_key_env="),
        (
            "judge:model=m,api_key_env=,rubric=gone.md",
            "the rubric gone.md cannot be read: No such file",
            "an existing file",
        ),
        ("judge:model=m,api_key_env=,rubric={{ quest }}", "unknown placeholders: quest", "question"),
        ("judge:model=m,api_key_env=,low=2,high=1", "low is 2.0, high is 1.0", "set low below high"),
        ("model:path=gone", "gone has no model: No such file", "path=FOLDER"),
        ("model:path=causal", "causal has LlamaForCausalLM, not a sequence classifier", "SequenceClassification"),
    ],
)
def test_a_text_that_cannot_work_is_one_clear_message(text: str, message: str, hint: str, mine: Path):
    with pytest.raises(ForgeError, match=message) as caught:
        build_reward([text])
    assert hint in caught.value.hint
    assert "--reward" in str(caught.value)
    with pytest.raises(ForgeError, match="no reward is given"):
        build_reward([])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "the reward of t is None"),
        ("text", "the reward of t is 'good'"),
        ("several", r"the reward of t is array\(\[0., 0., 0.\]\)"),
        ("nan", "the reward of t is nan"),
        ("nan_part", "the reward of t is 1.0, of parts .*style.*nan"),
        ("one_turn", "the reward of t has 1 entries in `turns`, for 2 turns"),
        ("few", r"the reward of t is \[\] for 1 episodes"),
        ("number", r"the reward of t is 1.0 for 1 episodes"),
        ("stops", "the reward of t raised StopIteration"),
        ("slow", "no answer within 0.2 s"),
    ],
)
async def test_a_function_that_gives_no_score_is_one_clear_message(
    function: str, message: str, mine: Path, monkeypatch: pytest.MonkeyPatch
):
    async def main() -> None:
        actor = RewardActor(0.2 if function == "slow" else 60.0, 0)
        monkeypatch.setattr("os._exit", stopped.append)  # the process of one that does not come back is ended
        actor._functions = {0: _with_forms({"alone": build_reward([f"mine.py:{function}"])})}
        [score] = (await actor.score(0, TASK, [EPISODE]))[0]["alone"]
        with_score(EPISODE, score)

    stopped: list[int] = []
    with pytest.raises(ForgeError, match=message):
        await main()


def test_each_bundled_reward_is_built_documented_and_pickled(mine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    (mine / "schema.json").write_text(json.dumps({"type": "object"}))
    (mine / "causal" / "config.json").write_text('{"architectures": ["LlamaForSequenceClassification"]}')
    needed = {
        "adaptive_length": "tokens=9",
        "cosine": "max_tokens=9",
        "json_schema": "schema=schema.json",
        "judge": "model=m",
        "length": "tokens=9",
        "model": "path=causal",
        "overlong": "max_tokens=9,cache_tokens=3",
        "regex": "pattern=a",
    }
    for name, kind in REWARDS.items():
        if name == "math":
            pytest.importorskip("math_verify")
        parts = ["number"] if hasattr(kind, "shape") else []
        reward = build_reward([f"{name}:{needed.get(name, '')}", *parts])
        assert pickle.loads(pickle.dumps(reward)) == reward, name
        assert inspect.getdoc(kind), name


def test_scores_of_numpy_are_numbers():
    assert scored(lambda task, text: np.float32(0.5)).reward == 0.5
    assert scored(lambda task, text: Score(total=np.int64(2))).reward == 2.0


def test_a_resumed_run_sees_the_files_of_all_parts(mine: Path):
    def digests() -> dict[str, str]:
        reward = build_reward(["mine.py:score", "judge:model=m,api_key_env=,rubric=rubric.md*0.5"])
        return code_digests(*parts_of(reward).values())

    (mine / "rubric.md").write_text("Be kind.")
    before = digests()
    assert before.keys() == {"mine.py", "rubric.md"}
    (mine / "rubric.md").write_text("Be stern.")
    (mine / "mine.py").write_text(MINE.replace("len(text)", "len(text) + 1"))
    after = digests()
    assert all(before[name] != after[name] for name in before)


async def test_a_judge_that_was_asked_again_is_not_asked_again_by_the_run():
    class Spent:
        calls = 0

        async def score(self, episodes: object) -> list[Score]:
            self.calls += 1
            raise SpendingError("spent")

    judge = Spent()
    with pytest.raises(SpendingError):
        await score_again(judge, [EPISODE])
    assert judge.calls == 1


def test_a_reward_shows_as_it_was_named_and_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.py").write_text("def score(task, text):\n    return 1.0\n")
    function = build_reward(["ok.py:score"])
    assert described(function) == "ok.py:score"
    assert described(build_reward(["a=ok.py:score*2", "auto"])) == "ok.py:score*2 Auto"
    assert load(name_of(function), "--reward") is function
    assert described(lambda task, text: 1.0).startswith("<function")
    assert name_of(Auto()) == ""


def in_event_loop(task: Task, text: str) -> float:
    """Return 1 in the main thread, which runs the event loop, and 0 in any other."""
    return float(threading.current_thread() is threading.main_thread())


def test_a_synchronous_reward_of_a_source_does_not_block_the_event_loop():
    assert scored(RewardBySource({TASK.source: in_event_loop}, build_reward(["auto"]))).reward == 0  # type: ignore[arg-type]
