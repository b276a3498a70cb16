"""Environments by the flag --env: bundled ones, a user's own, and what is wrong with those that cannot be made."""

import asyncio
import pickle
from pathlib import Path

import cloudpickle
import pytest

from forge_rl.data.data_config import DataConfig
from forge_rl.envs import env_flag as config
from forge_rl.envs.by_source import BySource
from forge_rl.envs.env_flag import build_environment, sources_of
from forge_rl.envs.protocol import EnvFactory, Observation, Step
from forge_rl.envs.single_turn import SingleTurn
from forge_rl.envs.tools import ToolEnv
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.run.records.run_dir import code_digests
from forge_rl.services.environment import Environment
from forge_rl.types import Task
from forge_rl.worlds.game import GuessNumber
from recipes.grpo import Config

TASK = Task(id="1", source="toy", messages=({"role": "user", "content": "q"},))

MINE = '''
from dataclasses import dataclass
from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tools import ToolEnv

class World:
    """Ends at once, with the number of rooms."""
    def __init__(self, task, rooms=1):
        self.task, self.rooms = task, rooms
    async def reset(self):
        return Observation(messages=self.task.messages)
    async def step(self, completion):
        return Step(done=True, reward=float(self.rooms))

@dataclass(frozen=True)
class Worlds:
    """A factory with settings."""
    rooms: int = 2
    def __call__(self, task):
        return World(task, self.rooms)

def world(task, rooms=3):
    return World(task, rooms)

four = Worlds(4)

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

class Shop:
    """Methods are tools."""
    def buy(self, item: str) -> str:
        return item

tools = ToolEnv([add], max_turns=2)
functions = [add]

class NoStep:
    def __init__(self, task): ...
    async def reset(self): ...

class NoReset:
    def __init__(self, task): ...
    async def step(self, completion): ...

class PlainStep:
    def __init__(self, task): ...
    async def reset(self): ...
    def step(self, completion): ...

class NoTask:
    def __init__(self): ...
    async def reset(self): ...
    async def step(self, completion): ...

class Nothing:
    """Has no method."""

def untyped(a): ...

hintless = [untyped]
same = [add, add]
number = 7

@dataclass(frozen=True)
class Strict:
    rooms: int
    def __post_init__(self):
        if self.rooms < 1:
            raise ValueError("no rooms")
    def __call__(self, task): ...
'''


@pytest.fixture
def mine(users_folder: Path) -> Path:
    (users_folder / "mine.py").write_text(MINE)
    (users_folder / "wrong.py").write_text("import nowhere_at_all\n")
    (users_folder / "torn.py").write_text("class World(:\n")
    (users_folder / "bad.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    (users_folder / "empty").mkdir()
    (users_folder / "not.db").write_text("no database")
    return users_folder


def reward_of(factory: EnvFactory) -> float | None:
    again: EnvFactory = pickle.loads(cloudpickle.dumps(factory))  # as it travels to the service
    return asyncio.run(again(TASK).step("x")).reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("mine.py:World", 1.0),
        ("mine.py:World,rooms=5", 5.0),
        ("mine.py:Worlds", 2.0),
        ("mine.py:Worlds,rooms=6", 6.0),
        ("mine.py:world", 3.0),
        ("mine.py:world,rooms=7", 7.0),
        ("mine.py:four", 4.0),
        ("mine:World", 1.0),
        ("./mine.py:World", 1.0),
    ],
)
def test_a_flag_names_a_users_class_function_or_factory(text: str, reward: float, mine: Path):
    assert reward_of(build_environment(text)) == reward


@pytest.mark.parametrize(
    ("text", "names", "turns"),
    [
        ("mine.py:Shop", ["buy"], 8),
        ("mine.py:Shop,max_turns=3", ["buy"], 3),
        ("mine.py:functions,max_turns=4", ["add"], 4),
        ("mine.py:tools", ["add"], 2),
        ("tools:max_turns=5", ["calculator"], 5),
        ('tools:instruction="Be brief, please."', ["calculator"], 8),
    ],
)
async def test_a_flag_names_tools(text: str, names: list[str], turns: int, mine: Path):
    world = pickle.loads(cloudpickle.dumps(build_environment(text)))
    assert isinstance(world, ToolEnv)
    shown = await world(TASK).reset()
    assert ([tool["function"]["name"] for tool in shown.tools], world.max_turns) == (names, turns)  # type: ignore[index]
    if "brief" in text:
        assert shown.messages[0]["content"] == "Be brief, please."


OPTIONS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal

@dataclass(frozen=True)
class Maze:
    mode: Literal["easy", "hard"] = "easy"
    rooms: int | None = 4
    names: tuple[str, ...] = ()
    def __call__(self, task): ...
"""


@pytest.mark.parametrize(
    ("option", "value"),
    [("mode=hard", "hard"), ("rooms=3", 3), ("rooms=none", None), ("names=[a,b]", ("a", "b"))],
)
def test_options_are_converted_to_the_types_of_their_hints(option: str, value: object, users_folder: Path):
    (users_folder / "maze.py").write_text(OPTIONS)
    assert getattr(build_environment(f"maze.py:Maze,{option}"), option.partition("=")[0]) == value


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("mode=hrad", "mode is 'hrad': Input should be 'easy' or 'hard'"),
        ("rooms=many", "rooms is 'many': Input should be a valid integer"),
        ("rooms=1.5", "rooms is '1.5': Input should be a valid integer"),
        ("names=a", "names is 'a': Input should be a valid"),
    ],
)
def test_options_of_other_types_than_their_hints_are_refused(option: str, said: str, users_folder: Path):
    (users_folder / "maze.py").write_text(OPTIONS)
    with pytest.raises(ConfigError) as caught:
        build_environment(f"maze.py:Maze,{option}")
    assert said in str(caught.value)


def test_messages_as_examples_are_not_a_text():
    with pytest.raises(ConfigError, match="examples is 'hello': Input should be a valid"):
        build_environment("python:examples=hello")


def test_without_a_flag_the_model_answers_once():
    assert build_environment("") is SingleTurn
    assert build_environment(" ") is SingleTurn


def test_a_game_comes_with_its_options_and_its_tasks():
    game = build_environment("game:highest=9,max_turns=4")
    assert game == GuessNumber(highest=9, max_turns=4)
    assert list(sources_of(game, seed=0)) == ["game"]


def test_an_environments_own_tasks_are_evaluated_on_eval_tasks(users_folder: Path):
    (users_folder / "test.jsonl").write_text('{"question": "Guess.", "answer": "5"}\n')
    settings = Config(env="game", eval_tasks=("test=test.jsonl",))
    mixture = settings.sources(build_environment("game"))
    assert list(mixture) == ["game"]
    assert {name: len(tasks) for name, tasks in mixture.eval_sets(5).items()} == {"test": 1}
    assert [*Config(env="game").sources(build_environment("game")).eval_sets(5)] == ["held_out"]
    unused = Config(env="game", data=DataConfig(system="Play.", held_out_share=0.5))
    with pytest.raises(ConfigError, match=r"--data.system, --data.held-out-share has no effect"):
        unused.sources(build_environment("game"))


def test_adapters_get_the_first_plain_word_and_the_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config, "ENVIRONMENTS", {"adapter": adapter})
    made = build_environment("adapter:http://localhost:1/a?b=c,sessions=4,deep=true,names=[1,2],text=a b")
    expected = ("http://localhost:1/a?b=c", {"sessions": 4, "deep": True, "names": [1, 2], "text": "a b"})
    assert made(TASK) == expected


def adapter(argument: str, **options: object) -> object:
    return lambda task: (argument, options)


BROKEN = [
    ("nope", "there is no environment 'nope'"),
    ("nowhere:World", "--env nowhere: there is no module nowhere"),
    ("gone.py:World", "--env gone.py: No such file or directory"),
    ("mine.py:Wrld", r"--env mine.py:Wrld: mine.py has no Wrld\n.*it defines World"),
    ("wrong.py:World", r"wrong.py cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all' \(.*:1\)"),
    ("torn.py:World", r"torn.py cannot be imported: SyntaxError: .*torn.py:1\)"),
    ("mine.py:NoStep", "--env mine.py:NoStep is a class without step"),
    ("mine.py:NoReset", "--env mine.py:NoReset is a class without reset"),
    ("mine.py:PlainStep", "--env mine.py:PlainStep is a class whose step is not async"),
    ("mine.py:NoTask", "--env mine.py:NoTask cannot be called with a task: too many positional arguments"),
    ("mine.py:Nothing", "there are no tools"),
    ("mine.py:number", "--env mine.py:number is int 7, which does not make environments"),
    ("mine.py:add", "--env mine.py:add cannot be called with a task: missing a required argument: 'b'"),
    ("mine.py:hintless", "the parameter a of the tool untyped has no type hint"),
    ("mine.py:same", "two tools have the name 'add'"),
    ("mine.py:World,room=1", r"mine.py:World has no option 'room'\n.*\n *\^+\n  hint: did you mean rooms\?"),
    ("mine.py:World,rooms", r"--env: 'rooms' is not KEY=VALUE\n  mine.py:World,rooms\n                \^{5}\n"),
    ("tools:max_turns=2,turns", "'turns' is not KEY=VALUE"),
    ("mine.py:Strict,rooms=0", "--env mine.py:Strict cannot be made: ValueError: no rooms"),
    ("mine.py:Strict", r"mine.py:Strict needs rooms\n"),
    (
        "tools:corp=notes",
        r"tools has no option 'corp'\n.*\n *\^+\n  hint: did you mean corpus\? its options are: .*results",
    ),
    ("tools:max_turns=2,max_turns=3", "'max_turns' is given twice"),
    ("gam:highest=9", r"there is no environment 'gam'\n  gam:highest=9\n  \^\^\^\n  hint: did you mean game\?"),
    ("tools:max_turns=0", "max-turns is 0"),
    ("tools:max_turns=many", r"--env: max_turns is 'many': .*\n.*\n.*\n.*pass a value of type int"),
    ("tools:corpus=gone.jsonl", "there is no corpus gone.jsonl"),
    ("tools:corpus=bad.jsonl,cache=cache", "bad.jsonl:2 has no text: KeyError: 'text'"),
    ("tools:corpus=empty,cache=cache", "the corpus empty has no text files"),
    ("tools:corpus=not.db", "not.db cannot be searched: file is not a database"),
    ("game:chess", r"game takes no 'chess'\n.*\n.*\n.*highest, max_turns, possible"),
    ("game:highest=1", "--env game: highest is 1"),
    ("user:turns=3", "user has no option 'turns'"),
    ("user:model=m,api_key_env=NO_SUCH_KEY_HERE", "the environment variable NO_SUCH_KEY_HERE is not set"),
    ("user:model=m,api_key_env=sk-123", "--env user: api_key_env is not the name of an environment variable"),
    ("textarena:", "textarena needs game"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[text for text, _ in BROKEN])
def test_an_environment_that_cannot_be_made_says_so_in_one_message(text: str, message: str, mine: Path):
    with pytest.raises(ConfigError) as caught:
        build_environment(text)
    assert caught.match(message)
    assert caught.value.hint
    assert "sk-123" not in str(caught.value)


class Odd:
    """Does what its task says."""

    def __init__(self, task: Task) -> None:
        self.task = task

    async def reset(self) -> Observation:
        if self.task.truth["fault"] == "reset":
            return None  # type: ignore[return-value]
        return Observation(messages=self.task.messages)

    async def step(self, completion: str) -> Step:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("factory", "fault", "message"),
    [
        (lambda task: None, "", "the environment's factory returned None, which lacks reset or step"),
        (Odd, "reset", "Odd.reset returned None, not an Observation"),
        (Odd, "step", "Odd.step returned None, not a Step"),
        (GuessNumber(), "", "the task '1' has no number to guess"),
        (BySource({"math": SingleTurn}), "", "the source 'toy' has no environment"),
    ],
)
async def test_a_world_that_breaks_the_protocol_is_named(factory: EnvFactory, fault: str, message: str):
    task = Task(id="1", source="toy", messages=TASK.messages, truth={"fault": fault})

    async def main() -> None:
        session, _ = await Environment(Environment.Config(), factory).open(task)
        await session.step("x")

    with pytest.raises(ForgeError, match=message) as caught:
        await main()
    assert caught.value.hint


def test_tasks_are_those_of_an_environment_that_brings_some():
    class Empty:
        def sources(self, seed: int) -> dict[str, object]:
            return {}

    for factory, message in ((SingleTurn, "the environment has none of its own"), (Empty(), "returned {}")):
        with pytest.raises(ConfigError, match=message):
            sources_of(factory, 0)  # type: ignore[arg-type]


def test_each_source_may_have_an_environment_of_its_own():
    both = BySource({"toy": SingleTurn, "game": GuessNumber()})
    assert isinstance(both(TASK), SingleTurn)
    assert not both.in_process
    assert BySource({"toy": SingleTurn}).in_process


def test_an_edited_world_is_another_run(mine: Path):
    def digests() -> list[dict[str, str]]:
        return [
            code_digests(build_environment(f"mine.py:{name}")) for name in ("World,rooms=5", "four", "Shop", "tools")
        ]

    before = digests()
    assert all(list(each) == ["mine.py"] for each in before)
    assert code_digests(BySource({"a": build_environment("mine.py:tools")})) == before[0]
    (mine / "mine.py").write_text(MINE.replace("return a + b", "return a - b"))
    after = digests()
    assert all(old != new for old, new in zip(before, after, strict=True))
