"""Pure tools: their results are kept by version, arguments and task, and nothing else is."""

import functools
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

import forge_rl
from forge_rl.envs.pure import version_of
from forge_rl.envs.tools import ToolEnv
from forge_rl.errors import ConfigError, ForgeError
from forge_rl.metrics.batch import batch_metrics
from forge_rl.types import Batch, Episode, Group, Outcome, Task
from tests.test_tool_env import TASK, calling, run

RAN: list[object] = []


@forge_rl.tool(pure=True)
def price(item: str, count: int = 1) -> int:
    """Look up a price."""
    RAN.append(item)
    if item == "lost":
        raise ForgeError("the shop is closed")
    return {"apple": 3}[item] * count


@forge_rl.tool()
def now() -> str:
    RAN.append("now")
    return "noon"


class Shop:
    """A world whose `find` depends on its arguments and the task, and `buy` on its state."""

    made: ClassVar[int] = 0

    def __init__(self, task: Task) -> None:
        self.task = task

    @forge_rl.tool(pure=True)
    def find(self, item: str) -> bool:
        RAN.append(item)
        return self.task.truth["item"] == item

    def buy(self, item: str) -> str:
        RAN.append(item)
        return "bought"


def cached(episode: Episode) -> list[bool | None]:
    return [call.cached for turn in episode.turns for call in turn.calls]


def test_pure_tool_results_are_reused_for_equal_arguments(tmp_path: Path):
    RAN.clear()
    world = ToolEnv([price, now], cache=str(tmp_path))
    apples = calling(("price", {"item": "apple", "count": 2}), ("now", {}))
    first = run(world, apples, apples, "6")
    assert [message["content"] for message in first.turns[2].messages] == ["6", "noon"]
    other = pickle.loads(pickle.dumps(world))
    others = calling(("price", {"count": "2", "item": "apple"}), ("price", {"item": "apple"}), ("price", {"item": 1}))
    second = run(other, others, "6")
    assert (cached(first), cached(second)) == ([False, None, True, None], [True, False, None])
    assert RAN == ["apple", "now", "now", "apple"]
    group = Group(task=TASK, episodes=(first, second))
    assert batch_metrics(Batch(groups=(group,), version=0))["tools/cache_hits"] == 0.5
    group = Group(task=TASK, episodes=(run(world, "6"),))
    assert "tools/cache_hits" not in batch_metrics(Batch(groups=(group,), version=0))


def test_errors_and_failures_of_infrastructure_are_not_kept(tmp_path: Path):
    RAN.clear()
    world = ToolEnv([price], cache=str(tmp_path))
    wrong, lost = calling(("price", {"item": "pear"})), calling(("price", {"item": "lost"}))
    assert cached(run(world, wrong, wrong, "no")) == [False, False]
    for _ in range(2):
        assert run(world, lost).outcome is Outcome.ENVIRONMENT_ERROR
    assert RAN == ["pear", "pear", "lost", "lost"]


def test_results_of_a_pure_method_are_kept_for_its_task(tmp_path: Path):
    RAN.clear()
    world = ToolEnv(Shop, cache=str(tmp_path))
    asked = calling(("find", {"item": "tea"}), ("buy", {"item": "tea"}))
    other = Task(id="2", source="toy", messages=TASK.messages, truth={"item": "milk"})
    unknown = Task(id="2", source="toy", messages=TASK.messages, truth={"item": {"tea"}})
    for task, flags, text in (
        (TASK, [False, None], "true"),
        (TASK, [True, None], "true"),
        (other, [False, None], "false"),
        (unknown, [None, None], "false"),
    ):
        episode = run(world, asked, "yes", task=task)
        assert cached(episode) == flags
        assert episode.turns[1].messages[0]["content"] == text
    assert RAN == ["tea"] * 7


def load(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("shop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TEXT = """import functools, forge_rl
PRICES = {"apple": 3}
def look(item): return PRICES[item]
def twice(f):
    @functools.wraps(f)
    def g(item: str) -> int: return 2 * f(item)
    return g
@forge_rl.tool(pure=True, version="1")
def price(item: str) -> int: return look(item)
@forge_rl.tool(pure=True)
@twice
def double(item: str) -> int: return look(item)
"""


def test_a_version_changes_with_code_file_bound_values_and_declaration(tmp_path: Path):
    versions = {}
    for name, text in {
        "same": TEXT,
        "helper": TEXT.replace("PRICES[item]", "PRICES[item] + 1"),
        "data": TEXT.replace("3", "4"),
        "declared": TEXT.replace('"1"', '"2"'),
    }.items():
        module = load(tmp_path / "shop.py", text)
        versions[name] = version_of(module.price)
        module = load(tmp_path / "shop.py", text)
        assert version_of(module.price) == versions[name]
        assert version_of(module.double) != version_of(module.price)
    assert len(set(versions.values())) == 4
    bound = [version_of(functools.partial(price, count=count)) for count in (1, 2)]
    assert len({*bound, version_of(price)}) == 3


def of_file(unseen: object) -> Callable[..., object]:
    @forge_rl.tool(pure=True)
    def find(item: str) -> str:
        return f"{unseen}{item}"

    return find


def test_a_pure_tool_that_holds_what_cannot_be_compared_needs_a_version():
    assert version_of(of_file("a")) != version_of(of_file("b"))
    with pytest.raises(ConfigError, match="bound objects whose changes cannot be seen") as caught:
        ToolEnv([of_file(object())])
    assert 'version="..."' in caught.value.hint
    ToolEnv([forge_rl.tool(pure=True, version="1")(of_file(object()))])
