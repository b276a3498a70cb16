"""Hosts of a run pass each other the layers of images, without being asked by hand."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge_rl.envs.by_source import BySource
from forge_rl.envs.protocol import Observation, SharesFiles, Step
from forge_rl.runtime.seats import ServiceHosts
from forge_rl.services.environment import Environment
from forge_rl.services.file_peers import order_on_host
from forge_rl.services.service_start import ServiceStart
from forge_rl.types import Task
from forge_rl.worlds.harbor import HarborEnv
from forge_rl.worlds.image_lookahead import ImageLookahead, image_lookahead
from forge_rl.worlds.swebench import SweBenchEnv
from tests.fake_actors import cluster_of
from tests.images import image, layer, member, registry

LONG_S = 120.0


class ReadingEnv:
    """Shows what a file of its task's image says, and which process holds it."""

    def __init__(self, lookahead: ImageLookahead, task: Task) -> None:
        self.lookahead, self.task = lookahead, task

    async def reset(self) -> Observation:
        async with self.lookahead.use(str(self.task.truth["image"])) as container_image:
            text = (container_image.layers[0] / "f").read_text()
        return Observation(messages=({"role": "user", "content": f"{os.getpid()} {text}"},))

    async def step(self, answer: str) -> Step:
        raise AssertionError


@dataclass(frozen=True)
class Reading:
    """As worlds with images, but each process has a store of its own, as if its host's disk were."""

    folder: Path

    @property
    def lookahead(self) -> ImageLookahead:
        return image_lookahead(str(self.folder / str(os.getpid())))

    def __call__(self, task: Task) -> ReadingEnv:
        return ReadingEnv(self.lookahead, task)

    def prepare(self, tasks: Sequence[Task]) -> Mapping[str, float]:
        return self.lookahead.prepare([str(task.truth["image"]) for task in tasks if task.truth["image"]])

    def serve_files(self, address: str, key: str) -> Sequence[str]:
        return self.lookahead.serve_files(address, key)

    def ask_peers(self, urls: Sequence[str], key: str) -> None:
        self.lookahead.ask_peers(urls, key)


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
async def test_a_layer_comes_from_the_registry_to_one_host_and_from_there_to_the_other(tmp_path: Path):
    with registry() as server:
        built_image = image([layer(member("f", b"read"))])
        task = Task(id="1", source="s", messages=(), truth={"image": server.add(built_image, "it:1")})
        async with cluster_of(tmp_path, "a", "b") as (cluster, faults):
            service = await Environment.start(
                Environment.Config(replicas=2),
                ServiceStart(cluster=cluster, faults=faults, deadline_s=LONG_S, hosts=ServiceHosts(names=("a", "b"))),
                factory=BySource({"s": Reading(tmp_path / "stores")}),
            )
            service.prepare([Task(id="0", source="s", messages=(), truth={"image": ""})])
            await asyncio.gather(*service._closing)
            opened = [await service.open(task) for _ in range(2)]  # each goes where fewer are open
            texts = [str(observation.messages[0]["content"]).split() for _, observation in opened]
            assert len({process for process, _ in texts}) == 2, "both hosts"
            assert [text for _, text in texts] == ["read", "read"]
            assert server.requests[f"/v2/it/blobs/{built_image.layers[0]}"] == 1
            assert "environment/peers_failed" not in service.pop_metrics()
            faults.closing = True
            await service.stop()


@pytest.mark.parametrize("factory", [HarborEnv, SweBenchEnv, BySource])
def test_worlds_with_images_share_their_layers(factory: type):
    assert issubclass(factory, SharesFiles)


@pytest.mark.parametrize(
    ("host", "hosts", "ordered"),
    [(0, 1, "abcde"), (0, 2, "abcde"), (1, 2, "badce"), (2, 3, "cabde"), (4, 5, "eabcd"), (7, 8, "cdeab")],
)
def test_hosts_begin_with_different_files(host: int, hosts: int, ordered: str):
    assert "".join(order_on_host("abcde", host, hosts)) == ordered
