"""Images of coming tasks are fetched before episodes need them, within bounds, and failures are tried again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_rl.envs.by_source import BySource
from forge_rl.envs.protocol import EnvFactory, Observation, Step, prepare_env
from forge_rl.envs.task_list import TaskList
from forge_rl.sandbox.images import ImageError, ImageStore
from forge_rl.types import Task
from forge_rl.worlds.image_lookahead import ImageLookahead, image_lookahead
from tests.fake_envs import NotingEnv, task_of
from tests.images import image, layer, member, registry
from tests.test_environment import environment


class FakeStore:
    """Images whose pulls end on request."""

    def __init__(self) -> None:
        self.pulls: list[str] = []
        self.held: list[str] = []
        self.go_on, self.begun = asyncio.Event(), asyncio.Event()
        self.broken: set[str] = set()

    @contextlib.asynccontextmanager
    async def use(self, reference: str) -> AsyncIterator[Any]:
        self.pulls.append(reference)
        self.begun.set()
        await self.go_on.wait()
        if reference in self.broken:
            raise ImageError(f"{reference} does not exist", hint="name another")
        self.held.append(reference)
        yield SimpleNamespace(digest=reference)
        self.held.remove(reference)

    def images(self) -> Sequence[Any]:
        return [SimpleNamespace(digest=reference, disk_bytes=10) for reference in self.held]


def lookahead_of(store: FakeStore, **bounds: int) -> ImageLookahead:
    return ImageLookahead(cast(ImageStore, store), **bounds)


async def fetched(lookahead: ImageLookahead) -> None:
    await asyncio.sleep(0)
    assert lookahead._fetching is not None
    await lookahead._fetching


async def test_images_are_held_until_they_are_no_longer_named():
    store = FakeStore()
    lookahead = lookahead_of(store)
    store.go_on.set()
    assert lookahead.prepare(["a", "b", "a"]) == {}
    await fetched(lookahead)
    assert store.held == ["a", "b"]
    lookahead.prepare(["b", "c"])
    await fetched(lookahead)
    assert store.held == ["b", "c"]
    await lookahead.close()
    assert store.held == []


@pytest.mark.parametrize(
    ("bounds", "image_count"), [({"most_images": 2}, 2), ({"most_bytes": 25}, 3), ({"most_bytes": 0}, 0)]
)
async def test_images_and_their_bytes_are_bounded(bounds: Mapping[str, int], image_count: int):
    store = FakeStore()
    store.go_on.set()
    lookahead = lookahead_of(store, **bounds)
    lookahead.prepare(list("abcdef"))
    await fetched(lookahead)
    assert store.held == list("abcdef")[:image_count]
    await lookahead.close()


async def test_a_pull_is_cancelled_with_the_lookahead():
    store = FakeStore()
    lookahead = lookahead_of(store)
    lookahead.prepare(["a", "b"])
    await store.begun.wait()
    await lookahead.close()
    assert (store.pulls, store.held) == (["a"], [])


async def test_a_pull_that_takes_longer_than_a_batch_goes_on_and_who_waits_for_it_is_counted():
    store = FakeStore()
    lookahead = lookahead_of(store)
    lookahead.prepare(["a", "b"])
    await store.begun.wait()
    assert dict(lookahead.prepare(["a", "b", "c"])) == {}
    waiting = [asyncio.ensure_future(lookahead.use(name).__aenter__()) for name in ("a", "c", "d")]
    await asyncio.sleep(0)
    store.go_on.set()
    await asyncio.gather(*waiting)
    await fetched(lookahead)
    assert store.pulls == ["a", "a", "c", "d", "b", "c"], "the first was not begun again"
    async with lookahead.use("a"), lookahead.use("b"), lookahead.use("c"):
        pass
    counts = dict(lookahead.prepare([]))
    assert counts.pop("image_wait_s") >= 0
    assert counts == {"image_uses": 6, "image_prefetched": 3, "image_late": 1}, "of a alone, named a batch before"
    await lookahead.close()


async def test_a_pull_that_no_task_needs_any_more_is_cancelled():
    store = FakeStore()
    lookahead = lookahead_of(store)
    lookahead.prepare(["a", "b"])
    await store.begun.wait()
    lookahead.prepare(["b"])
    store.go_on.set()
    await fetched(lookahead)
    assert (store.pulls, store.held) == (["a", "b"], ["b"])
    await lookahead.close()


async def test_images_of_environments_that_share_a_folder_take_turns():
    store = FakeStore()
    lookahead = lookahead_of(store, most_images=3)

    class Images(Preparing):
        def prepare(self, tasks: Sequence[Task]) -> Mapping[str, float]:
            return lookahead.prepare([task.id for task in tasks])

    factory = BySource({"s": Images(), "other": Images()})
    tasks = [Task(id=name, source=name.rstrip("123"), messages=(), truth={}) for name in ("s1", "s2", "s3", "other1")]
    factory.prepare(tasks)
    await store.begun.wait()
    factory.prepare(tasks)
    store.go_on.set()
    await fetched(lookahead)
    assert store.pulls == ["s1", "other1", "s2"], "no pull was cut off"
    assert store.held == store.pulls
    await lookahead.close()


async def test_a_failure_is_counted_and_tried_again_when_an_episode_asks():
    store = FakeStore()
    store.go_on.set()
    store.broken.add("a")
    lookahead = lookahead_of(store)
    lookahead.prepare(["a", "b"])
    await fetched(lookahead)
    assert store.held == ["b"]
    with pytest.raises(ImageError, match="a does not exist"):
        async with lookahead.use("a"):
            pass
    store.broken.clear()
    async with lookahead.use("a"), lookahead.use("b"):
        assert store.pulls == ["a", "b", "a", "a", "b"]
    counts = dict(lookahead.prepare([]))
    assert counts.pop("image_wait_s") >= 0
    assert counts == {"image_prefetch_failed": 1, "image_uses": 3, "image_prefetched": 1, "image_late": 0}
    await lookahead.close()


async def test_an_episode_asks_the_registry_for_nothing_that_was_prefetched(tmp_path: Path):
    with registry() as server:
        reference = server.add(image([layer(member("a", b"1"))]), "it:1")
        lookahead = ImageLookahead(ImageStore(tmp_path / "store"))
        lookahead.prepare([reference])
        await fetched(lookahead)
        requests = server.requests.total()
        assert requests > 0
        assert await lookahead.store.prune() == 0, "it is held"
        async with lookahead.use(reference) as used:
            assert (used.layers[0] / "a").read_bytes() == b"1"
        assert server.requests.total() == requests
        await lookahead.close()
        assert await lookahead.store.prune() > 0


def test_coming_tasks_of_a_list_are_those_drawn_next():
    tasks = [Task(id=str(index), source="s", messages=(), truth={}) for index in range(5)]
    source = TaskList("s", tasks, (), seed=3)
    for _ in range(12):
        coming = source.coming(4)
        state = source.state()
        drawn = [source.draw() for _ in range(4)]
        assert [task.id for task in coming] == list(dict.fromkeys(task.id for task in drawn))
        source.restore(state)
        source.draw()


class Preparing:
    """Makes environments, and counts the tasks that it is told of."""

    def __call__(self, task: Task) -> NotingEnv:
        return NotingEnv(task)

    def prepare(self, tasks: Sequence[Task]) -> Mapping[str, float]:
        return {"told": float(len(tasks))}


class Plain(NotingEnv):
    async def reset(self) -> Observation:
        raise AssertionError

    async def step(self, answer: str) -> Step:
        raise AssertionError


async def test_each_process_is_told_of_the_coming_tasks_of_its_sources(tmp_path: Path):
    factory = BySource({"s": Preparing(), "other": Plain})
    other = Task(id="o", source="other", messages=(), truth={})
    async with environment(tmp_path, factory, replicas=2) as (service, _):
        service.prepare([task_of(), task_of(), other])
        await asyncio.gather(*service._closing)
        assert service.pop_metrics() == {"environment/told": 4.0}
        assert service.pop_metrics() == {}


def test_an_episode_s_own_prepare_is_not_called_with_the_coming_tasks():
    class Prepared(NotingEnv):
        def prepare(self) -> None:
            raise AssertionError

    for factory in (Prepared, partial(Prepared)):
        assert prepare_env(cast(EnvFactory, factory), [task_of()]) == {}
    assert prepare_env(partial(Preparing()), [task_of()]) == {"told": 1.0}  # an object with options


async def test_layers_come_from_the_peers_that_variables_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key = "a key of the job"
    with registry() as server:
        built_image = image([layer(member("f", b"1"))])
        reference = server.add(built_image, "it:1")
        first = ImageStore(tmp_path / "first")
        await first.get(reference)
        with first.serve("127.0.0.1", 0, key) as port:
            monkeypatch.setenv("FORGE_RL_IMAGE_PEERS", f"http://127.0.0.1:9 http://127.0.0.1:{port}")
            monkeypatch.setenv("FORGE_RL_IMAGE_KEY", key)
            server.requests.clear()
            lookahead = image_lookahead(str(tmp_path / "second"))
            async with lookahead.use(reference) as local_image:
                assert (local_image.layers[0] / "f").read_bytes() == b"1"
            await lookahead.close()
        assert f"/v2/it/blobs/{built_image.layers[0]}" not in server.requests
